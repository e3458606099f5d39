"""The jnp reference keeps every backend's promises, in its default tiles and in tiny ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kv_common.errors import ConfigError
from kv_execution.attention.reference import ReferenceBackend
from kv_execution.metadata import PageMetadata
from tests.execution.conformance import BackendConformance
from tests.execution.paged_steps import make_request, make_step


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
    test_decode = BackendConformance.test_decode_of_one_token_per_request_equals_dense_attention


def _temporary_bytes(num_pages: int, token_rung: int = 16) -> int:
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
    pool = jax.ShapeDtypeStruct((num_pages, 16, 3, 64), jnp.float32)
    query = jax.ShapeDtypeStruct((token_rung, 9, 64), jnp.float32)
    attend = lambda q, k, v, p: ReferenceBackend().attend(  # noqa: E731
        q, k, v, p, scale=1.0, sliding_window=None, soft_cap=None, sinks=None
    )
    return jax.jit(attend).lower(query, pool, pool, pages).compile().memory_analysis().temp_size_in_bytes


def test_scratch_memory_does_not_grow_with_the_longest_context():
    short, long = _temporary_bytes(num_pages=16), _temporary_bytes(num_pages=16_384)
    assert long <= short + 4096
    block_of_a_tile = 8 * 128 * 3 * 64 * 4  # [decode_tile, block_tokens, kv_heads, head_dim] float32
    assert long < 4 * block_of_a_tile


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
