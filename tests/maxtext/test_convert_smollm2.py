"""SmolLM2-135M converted is SmolLM2-135M: against numpy, and against Hugging Face's tokens on file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_common.errors import ConfigError
from maxtext_paged.convert import converted_smollm2, find_packaged_gguf
from maxtext_paged.tokenizer import HfTokenizer
from tests.converted_dense import ConvertedDense, error_of
from tests.llama_numpy import LlamaNumpy

ROOT = Path(__file__).parents[2]
RECORDS: list[dict[str, Any]] = [
    json.loads(line) for line in (ROOT / "tests/data/smollm2-greedy.jsonl").read_text(encoding="utf-8").splitlines()
]
TIE = 0.002
"""Logit margin below which two correct float32 implementations may choose differently."""

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]


@pytest.fixture(scope="module")
def weights() -> Path:
    try:
        return find_packaged_gguf()
    except ConfigError as error:
        pytest.skip(f"no SmolLM2 weights: {error}")


@pytest.fixture(scope="module")
def directory(weights: Path) -> Path:
    return converted_smollm2(ROOT / ".cache" / "models")


@pytest.fixture(scope="module")
def numpy_model(weights: Path) -> LlamaNumpy:
    return LlamaNumpy(weights)


@pytest.fixture(scope="module")
def dense(directory: Path) -> ConvertedDense:
    return ConvertedDense(directory, "max_target_length=128", "max_prefill_predict_length=64")


def test_the_data_holds_prompts_of_32_tokens_with_32_new_ones_and_their_margins():
    assert len(RECORDS) >= 3
    for record in RECORDS:
        assert [len(record[key]) for key in ("prompt", "new", "margins")] == [32, 32, 32], record["name"]
        assert min(record["margins"]) > TIE, record["name"]


def test_float32_logits_of_the_converted_model_equal_an_independent_forward(dense, numpy_model):
    ids = RECORDS[0]["prompt"] + RECORDS[0]["new"] + RECORDS[3]["prompt"] + RECORDS[3]["new"]
    expected = numpy_model.forward(ids)
    assert error_of(dense.logits([ids])[0], expected) < 1e-4


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["name"])
def test_tokens_and_margins_on_file_are_those_of_a_float64_forward(record, numpy_model):
    logits = numpy_model.forward(record["prompt"] + record["new"][:-1])[31:]
    second, first = np.partition(logits, -2, axis=-1)[:, -2:].T
    assert logits.argmax(-1).tolist() == record["new"]
    np.testing.assert_allclose(first - second, record["margins"], atol=1e-3)


def test_incremental_numpy_greedy_reaches_the_tokens_on_file(numpy_model):
    new, _ = numpy_model.greedy(RECORDS[3]["prompt"], 8)
    assert new == RECORDS[3]["new"][:8]


def test_maxtext_chooses_the_tokens_hugging_face_chose(dense):
    rows = [record["prompt"] + record["new"][:-1] for record in RECORDS]
    chosen = dense.logits(rows)[:, 31:].argmax(-1)
    assert chosen.tolist() == [record["new"] for record in RECORDS]


def test_the_converted_tokenizer_gives_the_ids_hugging_face_gave(directory):
    tokenizer = HfTokenizer.from_dir(directory)
    for record in RECORDS:
        assert tokenizer.encode(record["prompt_text"]) == record["prompt"], record["name"]
        assert tokenizer.decode(record["new"], skip_special_tokens=False) == record["new_text"], record["name"]


def test_the_converted_config_states_the_model_and_its_own_place(directory, dense):
    config = dense.config
    assert (config.emb_dim, config.num_decoder_layers, config.mlp_dim, config.vocab_size) == (576, 30, 1536, 49152)
    assert (config.num_query_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.rope_max_timescale == 100_000 and config.normalization_layer_epsilon == 1e-5
    assert Path(config.load_parameters_path).is_relative_to(directory)
    assert Path(config.tokenizer_path) == directory
