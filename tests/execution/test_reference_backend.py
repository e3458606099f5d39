"""The jnp reference keeps every backend's promises, in its default tiles and in tiny ones."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kv_common.errors import ConfigError
from kv_execution.attention import reference
from kv_execution.attention.reference import ReferenceBackend
from kv_execution.metadata import PageMetadata
from tests.execution.conformance import BackendConformance
from tests.execution.paged_steps import PLAIN, make_request, make_step, run


class TestReferenceBackend(BackendConformance):
    backend = ReferenceBackend()


class TestReferenceBackendInTinyTiles:
    """Blocks of two pages and tiles of a few tokens: every loop turns more than once in small steps."""

    backend = ReferenceBackend(block_tokens=8, decode_tile=3, chunk_tile=5)
    head_dim = 16
    rng = BackendConformance.rng
    test_mixed = BackendConformance.test_decodes_prompts_and_chunks_share_a_step
    test_options = BackendConformance.test_a_window_a_cap_and_sinks_act_together
    test_left_pages = BackendConformance.test_pages_that_left_the_window_are_not_needed
    test_chunks = BackendConformance.test_chunks_give_what_the_whole_prompt_gives
    test_sick = BackendConformance.test_a_sick_request_shows_and_its_neighbours_do_not_notice
    test_padding = BackendConformance.test_a_step_of_padding_alone_gives_zeros_and_writes_nothing


def _temporary_bytes(num_pages: int, dtype: str, token_rung: int = 16) -> int:
    """Scratch memory of one compiled ``attend`` whose requests may list every page of the pool."""
    num_rows, index_capacity = 4, num_pages
    i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    pages = PageMetadata(
        query_start_loc=i32(num_rows + 1),
        seq_lens=i32(num_rows),
        positions=i32(token_rung),
        slot_mapping=i32(token_rung),
        row_of_token=i32(token_rung),
        kv_indptr=i32(num_rows + 1),
        kv_indices=i32(index_capacity),
        kv_last_page_len=i32(num_rows),
        kv_first_page_offset=i32(num_rows),
    )
    pool = jax.ShapeDtypeStruct((num_pages, 16, 3, 64), dtype)
    query = jax.ShapeDtypeStruct((token_rung, 9, 64), jnp.float32)
    attend = lambda q, k, v, p: ReferenceBackend().attend(  # noqa: E731
        q, k, v, p, scale=1.0, sliding_window=None, soft_cap=None, sinks=None
    )
    return jax.jit(attend).lower(query, pool, pool, pages).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_scratch_memory_grows_neither_with_the_longest_context_nor_with_the_pool(dtype):
    short, long = _temporary_bytes(16, dtype), _temporary_bytes(16_384, dtype)
    assert long <= short + 4096
    block_of_a_tile = 8 * 128 * 3 * 64 * 4  # [decode_tile, block_tokens, kv_heads, head_dim] float32
    assert long < 4 * block_of_a_tile


@pytest.mark.parametrize(("window", "blocks"), [(None, 3 + 6), (8, 2 + 5)])
def test_each_request_is_read_by_its_own_loop_and_only_where_it_can_see(monkeypatch, window, blocks):
    """Decodes share one tile, as deep as the deepest; the prompt's two tiles read what each can see."""
    reads = []
    read = reference._Call.read

    def counted(call, first_index):
        jax.debug.callback(reads.append, first_index)
        return read(call, first_index)

    monkeypatch.setattr(reference._Call, "read", counted)
    rng = np.random.default_rng(0)
    sizes = [(9, 1), (1, 1), (17, 1), (5, 1), (32, 32)]
    # Tile sizes that no other test has: the counters must be traced, and never be met again.
    backend = ReferenceBackend(block_tokens=8, decode_tile=4, chunk_tile=16)
    step = make_step([make_request(rng, length, num_new) for length, num_new in sizes])
    run(backend, step, replace(PLAIN, sliding_window=window))
    jax.effects_barrier()
    assert len(reads) == blocks


@pytest.mark.parametrize(
    "wrong",
    [{"sliding_window": 0}, {"soft_cap": 0.0}, {"soft_cap": -1.0}, {"soft_cap": np.inf}, {"scale": 0.0}],
    ids=str,
)
def test_off_is_none_and_other_spellings_of_it_are_refused(wrong):
    step = make_step([make_request(np.random.default_rng(0), 3, 3)])
    options = {"scale": 1.0, "sliding_window": None, "soft_cap": None, "sinks": None, **wrong}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ReferenceBackend().attend(step.query, step.k_pool, step.v_pool, PageMetadata.from_table(step.table), **options)
