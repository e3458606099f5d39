"""Construction: which arguments count, which engine serves which configuration, and sampling by configuration."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import tokenizers
from maxtext.configs.types import SamplingStrategy
from maxtext.inference.maxengine import maxengine

import maxtext_paged.dense
import maxtext_paged.offline_engine as module
from kv_common.errors import ConfigError, UnsupportedError
from kv_control.plan import GREEDY, SamplingSpec
from maxtext_paged import OfflineEngine, default_sampling
from maxtext_paged.imports import import_dense_engine
from tests.tiny_models import make_config

pytestmark = pytest.mark.maxtext


# --- sampling by configuration ---------------------------------------------------------------------------


def sampling_config(strategy: Any, **values: Any) -> SimpleNamespace:
    options = {"temperature": 1.0, "top_k": 0, "nucleus_p": -1, **values}
    return SimpleNamespace(
        decode_sampling_strategy=strategy, **{f"decode_sampling_{name}": value for name, value in options.items()}
    )


@pytest.mark.parametrize("as_enum", [True, False])
@pytest.mark.parametrize(
    ("strategy", "values", "expected"),
    [
        ("greedy", {"temperature": 3.0, "top_k": 5, "nucleus_p": 0.5}, GREEDY),
        ("weighted", {"temperature": 0.5, "top_k": 5, "nucleus_p": 0.5}, SamplingSpec(temperature=0.5)),
        ("topk", {"top_k": 5, "nucleus_p": 0.5}, SamplingSpec(temperature=1.0, top_k=5)),
        ("nucleus", {"top_k": 5, "nucleus_p": 0.5}, SamplingSpec(temperature=1.0, top_p=0.5)),
        ("composite", {"top_k": 5, "nucleus_p": 0.5}, SamplingSpec(temperature=1.0, top_k=5, top_p=0.5)),
        ("composite", {}, SamplingSpec(temperature=1.0)),
        ("topk", {"top_k": 0}, SamplingSpec(temperature=1.0)),
        ("topk", {"top_k": -1}, SamplingSpec(temperature=1.0)),
        ("nucleus", {"nucleus_p": -1}, SamplingSpec(temperature=1.0)),
        ("nucleus", {"nucleus_p": 0}, SamplingSpec(temperature=1.0)),
        ("nucleus", {"nucleus_p": 1}, SamplingSpec(temperature=1.0)),
        ("weighted", {"temperature": 0}, GREEDY),
    ],
)
def test_the_configured_strategy_says_which_options_count(
    strategy: str, values: dict[str, Any], expected: SamplingSpec, as_enum: bool
) -> None:
    config = sampling_config(SamplingStrategy(strategy) if as_enum else strategy, **values)
    assert default_sampling(config) == expected


@pytest.mark.parametrize(
    ("strategy", "values", "said"),
    [
        ("beam", {}, "decode_sampling_strategy='beam'"),
        ("weighted", {"temperature": -1}, "decode_sampling_temperature=-1.0"),
        ("weighted", {"temperature": float("nan")}, "decode_sampling_temperature=nan"),
        ("topk", {"temperature": float("inf")}, "decode_sampling_temperature=inf"),
        ("nucleus", {"nucleus_p": 1.5}, "decode_sampling_nucleus_p=1.5"),
        ("nucleus", {"nucleus_p": float("nan")}, "decode_sampling_nucleus_p=nan"),
    ],
)
def test_a_value_out_of_range_is_named(strategy: str, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        default_sampling(sampling_config(strategy, **values))


def test_maxtexts_defaults_are_greedy_and_its_enums_are_understood() -> None:
    assert default_sampling(make_config()) == GREEDY
    assert default_sampling(make_config(decode_sampling_strategy="composite")) == SamplingSpec(temperature=1.0)


# --- the paged engine's arguments ---------------------------------------------------------------------------


class FakeSession:
    """Stands for the loop, which these tests never start."""

    def __init__(self, config: Any, **options: Any) -> None:
        self.config, self.options = config, options
        self.runtime = SimpleNamespace(params="weights")
        self.model = SimpleNamespace(mesh="mesh")


@pytest.fixture
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "open_session", FakeSession)


def test_arguments_that_only_the_dense_engine_needs_are_accepted_and_named_once(
    no_session: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="maxtext_paged"):
        engine = OfflineEngine(make_config(), None, True, 4, None, [7], [64, 128], 8)
    lines = [record.message for record in caplog.records if "has no use for" in record.message]
    assert len(lines) == 1
    for name, value in (
        ("enable_batch_prefill", True),
        ("min_decode_steps", 4),
        ("prefill_lengths", [64, 128]),
        ("batch_prefill_max_batch_size", 8),
    ):
        assert name in lines[0] and getattr(engine, name) == value
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="maxtext_paged"):
        OfflineEngine(make_config(), eos_ids=[7])
    assert "has no use for" not in caplog.text


def test_mesh_rng_and_params_reach_the_session(no_session: None) -> None:
    given = {"mesh": object(), "rng": object(), "params": object()}
    engine = OfflineEngine(make_config(), eos_ids=[7], **given)
    assert engine.session.options == given
    assert (engine.rng, engine.mesh, engine.params) == (given["rng"], "mesh", "weights")


def test_logprobs_need_no_return_log_prob_and_a_short_context_no_prefill_limit(no_session: None) -> None:
    config = make_config(return_log_prob=False, max_prefill_predict_length=64, max_target_length=64)
    engine = OfflineEngine(config, eos_ids=[7])
    assert engine.max_decode_length == 63
    for method in (engine.prepare_data, engine.pad_data):
        with pytest.raises(UnsupportedError, match="neither pads, sorts nor cuts"):
            method([[3]])


class Tokenizer:
    def __init__(self, *eos: int) -> None:
        self.eos_token_id, self.eos_token_ids = eos[0], list(eos)

    def encode(self, text: str) -> list[int]:
        return [3] * len(text)

    def decode(self, ids: list[int]) -> str:
        return "a" * len(ids)


@pytest.mark.parametrize(
    ("tokenizer", "eos_ids", "ends"),
    [
        (Tokenizer(5), None, [5]),
        (Tokenizer(5, 250), None, [5, 250]),  # with a stop token its caller added
        (Tokenizer(5, 250), [7, 5], [5, 7, 250]),
        (None, [7], [7]),
        (None, [], []),
        (object(), [7], [7]),  # MaxText never looks at it either where eos_ids are given
    ],
)
def test_end_tokens_are_a_union_and_the_tokenizer_is_the_callers(
    no_session: None, tokenizer: Any, eos_ids: Any, ends: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="maxtext_paged"):
        engine = OfflineEngine(make_config(), tokenizer=tokenizer, eos_ids=eos_ids)
    assert engine.tokenizer is tokenizer
    assert engine.eos_ids == ends
    assert engine.worker.stop_token_ids == frozenset(ends)
    assert f"end tokens: {ends or 'none'}" in caplog.text


def test_without_any_end_token_the_way_out_is_named(no_session: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_path=.*`tokenizer=` or `eos_ids=`"):
        OfflineEngine(make_config(tokenizer_path=str(tmp_path / "none"), tokenizer_type="huggingface"))
    with pytest.raises(ConfigError, match="object cannot serve as a tokenizer"):
        OfflineEngine(make_config(), tokenizer=object())


def test_the_configured_tokenizer_brings_the_generation_configs_end_tokens(no_session: None, tmp_path: Path) -> None:
    """A chat model lists its turn's end in generation_config.json, beside the tokenizer's own end token."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2, "<turn>": 3}, "a"))
    tokenizer.add_special_tokens(["</s>", "<turn>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    config = make_config(tokenizer_path=str(tmp_path), tokenizer_type="huggingface")
    engine = OfflineEngine(config)
    assert engine.eos_ids == [1, 2, 3]
    assert engine.tokenizer.decode([0, 1, 2]) == "a b"
    assert OfflineEngine(config, tokenizer=engine.tokenizer, eos_ids=[9]).eos_ids == [1, 2, 3, 9]


# --- dense configurations -------------------------------------------------------------------------------


class FakeWorker:
    """Stands for MaxText's dense worker and keeps what it was given."""

    def __init__(self, **options: Any) -> None:
        self.options, self.tokenizer, self.calls = options, options["tokenizer"], []

    def run_inference(self, data: list[Any], rng: Any) -> list[Any]:
        self.calls.append((data, rng))
        return ["dense"] * len(data)

    def update_params(self, params: Any) -> None:
        self.calls.append(params)


def test_a_dense_configuration_is_maxtexts_own_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maxtext_paged.dense, "_obstacles", list)
    monkeypatch.setattr(import_dense_engine(), "InferenceWorker", FakeWorker)
    config = make_config(attention="dot_product", return_log_prob=True)
    engine = OfflineEngine(config, "weights", min_decode_steps=3, eos_ids=[7], rng="key", prefill_lengths=[64, 8])
    options = engine.worker.options
    assert (options["params"], options["min_decode_steps"], options["eos_ids"]) == ("weights", 3, [7])
    assert (options["rng"], options["prefill_lengths"]) == ("key", [8, 64])
    assert engine.batch_inference([jax.numpy.arange(3)], rng="other") == ["dense"]
    [(data, rng)] = engine.worker.calls
    assert rng == "other" and len(data[0].tokens) == 8, "MaxText pads to its buckets"
    engine.update_params("new")
    assert engine.worker.calls[-1] == "new"
    with pytest.raises(UnsupportedError, match="max_tokens, seed: only with attention=gpu_paged"):
        engine.batch_inference([[3]], max_tokens=1, seed=3)
    engine.close()


def test_maxtexts_own_rules_hold_for_dense_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maxtext_paged.dense, "_obstacles", list)
    with pytest.raises(ValueError, match="return_log_prob must be True"):
        OfflineEngine(make_config(attention="dot_product", return_log_prob=False), eos_ids=[7])


def test_a_dense_engine_that_cannot_run_here_is_refused_before_it_hangs() -> None:
    if not getattr(maxengine.engine_api, "_IS_STUB", False):
        pytest.skip("JetStream is installed: the dense engine runs")
    with pytest.raises(UnsupportedError, match=r"JetStream is not installed.*attention=gpu_paged"):
        OfflineEngine(make_config(attention="dot_product", return_log_prob=True), eos_ids=[7])
