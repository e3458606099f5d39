"""Every model family through the one binding equals MaxText's dense forward; every other is refused by name.

The cases are lines of ``benchmarks.families``'s table: prompts in chunks, decodes and preemptions in shared steps, past
every window. One session per family and backend serves both tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.common.common_types import AttentionType, DecoderBlockType
from maxtext.configs import pyconfig
from maxtext.utils import model_creation_utils

from benchmarks.families import (
    FAMILIES,
    REFUSED_MODELS,
    RELATIVE_ERROR,
    SIZES,
    TITLES,
    cells,
    logits_error,
    open_family,
    read_table,
    refusal,
    refusals,
    run_requests,
)
from kv_common.errors import UnsupportedError
from kv_execution.native.library import native_available
from maxtext_paged.binding import attention_modules, attention_options
from maxtext_paged.config import PagedMaxTextConfig
from maxtext_paged.families import REFUSED_BLOCKS, SUPPORTED_BLOCKS, require_supported_block
from maxtext_paged.model import running_order
from maxtext_paged.session import PagedSession
from tests.tiny_models import BLOCKS, CONFIGS_OF_FAMILIES, dense_model, make_config, make_mesh

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]

DOCUMENT = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
ON_NATIVE = ("mixtral", "gemma3", "olmo3", "llama4")
ON_TWO_DEVICES = ("mixtral", "gemma3", "llama4")
"""In `make test`; the long run has all, on the reference backend too. test_binding.py has llama2, gemma2, qwen3
and gpt_oss on both backends."""


def case(family: str, backend: str, *, by_default: bool) -> Any:
    """One family on one backend."""
    marks = [] if by_default else [pytest.mark.long]
    if backend == "native":
        marks.append(pytest.mark.skipif(native_available() is not None, reason=str(native_available())))
    return pytest.param((family, backend), id=f"{family}-{backend}", marks=marks)


ALONE = [case(family, "native", by_default=family in ON_NATIVE) for family in FAMILIES]
ALONE += [case(family, "reference", by_default=False) for family in FAMILIES]
SHARDED = [case(family, "native", by_default=family in ON_TWO_DEVICES) for family in FAMILIES]
SHARDED += [case(family, "reference", by_default=False) for family in FAMILIES]


@pytest.fixture(scope="module", params=ALONE)
def session(request: pytest.FixtureRequest) -> Iterator[tuple[str, PagedSession]]:
    family, backend = request.param
    opened = open_family(family, backend)
    assert opened.backend.name == backend
    yield family, opened
    opened.close()


def test_every_token_and_logprob_is_denses_through_chunks_mixed_steps_and_preemptions(
    session: tuple[str, PagedSession],
) -> None:
    family, opened = session
    run_requests(opened, dense_model(family))  # raises for each


def test_every_logit_of_mixed_steps_is_denses(session: tuple[str, PagedSession]) -> None:
    family, opened = session
    assert logits_error(opened, dense_model(family)) <= RELATIVE_ERROR


@pytest.mark.multi_device
@pytest.mark.parametrize("family_and_backend", SHARDED)
def test_two_shards_of_heads_give_denses_tokens(family_and_backend: tuple[str, str]) -> None:
    family, backend = family_and_backend
    opened = open_family(family, backend, tensor=2)
    assert opened.model.layout.head_shards == 2
    run_requests(opened, dense_model(family))
    opened.close()


# --- what is special about each family is really there --------------------------------------------------------


def windows_of(family: str) -> list[int | None]:
    """Each attention's window, in the order in which a step runs them; nothing is allocated."""
    config = make_config(family)
    create = model_creation_utils.get_nnx_create_model_fn(config, mesh=make_mesh(config), model_mode="prefill")
    with logical_axis_rules(config.logical_axis_rules):
        modules = attention_modules(nnx.eval_shape(create))
    found = [(name, attention_options(attention).sliding_window) for name, attention in modules]
    return [window for _, window in sorted(found, key=lambda item: running_order(item[0], item[1] is not None))]


def test_local_layers_have_a_window_that_contexts_outgrow_and_global_ones_have_none() -> None:
    assert windows_of("gemma2") == [8, None] * 2
    assert windows_of("gemma3") == [8] * 5 + [None, 8]
    assert windows_of("gpt_oss") == [8, None]
    assert windows_of("olmo3") == [8, 8, 8, None, 8]
    assert windows_of("llama4") == [None] * 5, "chunks that no context leaves"
    assert max(prompt + new for prompt, new in SIZES) > 4 * 8


def test_the_configurations_are_the_ones_in_the_repository_and_load_as_they_stand() -> None:
    assert set(BLOCKS) == set(FAMILIES)
    for family in FAMILIES:
        path = CONFIGS_OF_FAMILIES / f"{family}.yml"
        config = pyconfig.initialize(
            ["test", str(path), "hardware=cpu", "log_config=false", "base_output_directory=unused"],
            config_class=PagedMaxTextConfig,
        )
        assert (config.run_name, config.attention, config.emb_dim) == (family, "gpu_paged", 64)
        tested = make_config(family)
        for key, value in yaml.safe_load(path.read_text()).items():
            if key not in ("base_config", "run_name"):
                assert getattr(config, key) == getattr(tested, key), (key, value)


def test_moe_runs_as_ragged_dot_everywhere() -> None:
    families = [family for family in FAMILIES if BLOCKS[family].get("num_experts", 1) > 1]
    assert families == ["mixtral", "qwen3_moe", "gpt_oss", "llama4", "envy"]
    for family in families:
        config = make_config(family)
        assert (config.sparse_matmul, config.megablox, config.capacity_factor) == (True, False, -1)


# --- refusals ---------------------------------------------------------------------------------------------


def test_every_decoder_block_of_maxtext_is_either_supported_or_refused_with_a_reason() -> None:
    assert set(DecoderBlockType) == SUPPORTED_BLOCKS | set(REFUSED_BLOCKS)
    assert not SUPPORTED_BLOCKS & set(REFUSED_BLOCKS)
    assert {block.value for block in SUPPORTED_BLOCKS} == {BLOCKS[family]["decoder_block"] for family in FAMILIES}
    for block, reason in REFUSED_BLOCKS.items():
        with pytest.raises(UnsupportedError, match=f"decoder_block={block.value} .*{re.escape(reason)}"):
            require_supported_block(SimpleNamespace(decoder_block=block))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Llama 4 past its first chunk", "chunk_attn_window_size=32.*max_target_length=64 to 32"),
        ("MoE that drops tokens", r"capacity_factor=1\.25"),
        ("MoE as interpreted Pallas", "megablox=false"),
        ("quantised weights", "quantization=int8"),
        ("YaRN past its tables", "max_position_embeddings=32.*lower max_target_length"),
    ],
)
def test_what_would_give_other_answers_is_refused_by_name(name: str, words: str) -> None:
    family, options = REFUSED_MODELS[name]
    assert re.search(words, refusal(family, **options))


def test_a_context_that_fits_llama_4s_first_chunk_is_served() -> None:
    """The control: the same chunk, and no request that outgrows it."""
    config = {"chunk_attn_window_size": 32, "max_target_length": 32, "max_prefill_predict_length": 16}
    with pytest.raises(AssertionError, match="is not refused"):
        refusal("llama4", **config)
    assert AttentionType.CHUNK.value in refusal("llama4", **config | {"max_target_length": 33})


# --- the document -----------------------------------------------------------------------------------------


def test_the_documents_table_has_a_line_for_each_family_and_no_error_above_the_bound() -> None:
    rows = [dict(zip(TITLES, row, strict=True)) for row in cells(read_table(DOCUMENT, "families"))]
    assert [(row["family"], row["special"]) for row in rows] == [(f"`{name}`", what) for name, what in FAMILIES.items()]
    for row in rows:
        assert row["verdict"] == "supported"
        assert all(0 < float(row[title]) <= RELATIVE_ERROR for title in TITLES[2:-1]), row


def test_the_document_says_of_each_refusal_what_its_user_reads() -> None:
    for mark, table in refusals().items():
        assert read_table(DOCUMENT, mark) == table
