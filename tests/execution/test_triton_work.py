"""The Triton work lists: every new token in one tile or row, every key in one piece, counts as announced."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_common.layout import KvStorageLayoutV1
from kv_common.page_table import KvPageTableV1, PageRow, pack_page_table
from kv_execution.attention import triton_work
from kv_execution.attention.triton_bridge import GpuTarget
from kv_execution.attention.triton_plan import TritonPlans
from kv_execution.dispatch import SplitFloors, decide
from kv_execution.metadata import PageMetadata

PAGE, ROWS, TOKENS, CAPACITY = 16, 6, 64, 512
TARGET = GpuTarget("cuda", "90", 132)
PLANS = TritonPlans(TARGET, row_programs=8, block_tokens=64, tokens_per_page=PAGE)


def table_of(sizes: list[tuple[int, int]]) -> KvPageTableV1:
    """Rows of ``(length, new tokens)``."""
    rows, first = [], 0
    for length, num_new in sizes:
        count = -(-length // PAGE)
        rows.append(PageRow(length - num_new, num_new, np.arange(first, first + count, dtype=np.int32)))
        first += count
    return pack_page_table(
        rows, num_pages=600, tokens_per_page=PAGE, token_rung=TOKENS, row_rung=ROWS, index_capacity=CAPACITY
    )


steps = st.lists(
    st.tuples(st.integers(0, 1400), st.one_of(st.just(1), st.integers(1, 12))).map(lambda x: (x[0] + x[1], x[1])),
    max_size=ROWS - 1,
)


@given(steps, st.sampled_from([1, 16]))
def test_tiles_hold_every_token_of_longer_rows_once_in_order(sizes, tile_tokens):
    table = table_of(sizes)
    tiles = np.asarray(_tiles(PageMetadata.from_table(table), tile_tokens))
    held = []
    for first, count, index, listed, position in tiles[tiles[:, 1] > 0]:
        row = table.row_of_token[first]
        assert 0 < count <= tile_tokens
        assert (table.row_of_token[first : first + count] == row).all(), "a tile has one request's tokens"
        assert (index, listed) == (table.kv_indptr[row], table.kv_indptr[row + 1] - table.kv_indptr[row])
        assert position == table.positions[first]
        held += range(first, first + count)
    wanted = np.flatnonzero(np.repeat([n > 1 for _, n in sizes], [n for _, n in sizes]))
    assert held == wanted.tolist()


@given(steps, st.sampled_from([(None, 0), (40, 0), (500, 512), (None, 512), (None, 1 << 40)]))
def test_pieces_hold_every_visible_key_once_and_count_as_the_host_says(sizes, case):
    window, floor = case
    table, floors = table_of(sizes), SplitFloors(floor, floor)
    splits = PLANS.num_splits(ROWS, CAPACITY * PAGE if window is None else min(CAPACITY * PAGE, window))
    rows = np.asarray(_rows(PageMetadata.from_table(table), window, splits, floors))
    outcome = decide(table, window=window, fused_kernel=None, floors=floors)
    pieces = []
    for number, (token, index, listed, low, high, piece) in enumerate(rows.tolist()):
        if number >= len(sizes) or sizes[number][1] > 1:
            assert low >= high, "no work for other rows"
            continue
        length = sizes[number][0]
        assert (token, index, listed) == (
            table.query_start_loc[number],
            table.kv_indptr[number],
            table.kv_indptr[number + 1] - table.kv_indptr[number],
        )
        assert (low, high) == (0 if window is None else max(0, length - window), length)
        assert piece % PLANS.block_tokens == 0
        pieces.append(-(-(high - low) // piece))
        assert 1 <= pieces[-1] <= splits
    if outcome.kind != "fused":
        assert pieces == [1] * len(pieces)
    elif pieces:
        plan, _ = PLANS.plan(table, window, 0)
        assert (plan.num_chunks, plan.num_merged_rows) == (sum(pieces), sum(n > 1 for n in pieces))


_tiles = jax.jit(lambda pages, tile: triton_work.attend_tiles(pages, tile_tokens=tile), static_argnums=1)
_rows = jax.jit(
    lambda pages, window, splits, floors: triton_work.decode_rows(
        pages, sliding_window=window, num_splits=splits, block_tokens=PLANS.block_tokens, floors=floors
    ),
    static_argnums=(1, 2, 3),
)


@pytest.mark.parametrize(
    ("num_rows", "row_programs", "max_tokens", "splits"),
    [(1, 8, 100, 1), (1, 8, 8192, 32), (1, 1, 1 << 20, 64), (64, 8, 8192, 2), (66, 8, 8192, 1), (512, 1, 8192, 2)],
)
def test_the_number_of_pieces_follows_from_static_facts_and_fills_the_device(
    num_rows, row_programs, max_tokens, splits
):
    found = triton_work.num_splits(
        num_rows=num_rows, row_programs=row_programs, max_tokens=max_tokens, num_sms=TARGET.num_sms
    )
    assert found == splits


def test_the_workspace_covers_every_number_of_rows():
    layout = KvStorageLayoutV1(1, 64, PAGE, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    plans = TritonPlans.of(TARGET, layout, query_heads=32, query_dtype="bfloat16")
    assert (plans.row_programs, plans.block_tokens, plans.where) == (8, 64, "132 multiprocessors")
    charged = plans.workspace_bytes(max_num_seqs=70, query_heads=32, head_dim=128)
    for num_rows in range(1, 71):
        splits = plans.num_splits(num_rows, 1 << 20)
        assert charged >= (splits > 1) * splits * num_rows * 32 * 130 * 4
    assert replace(plans, row_programs=1000).workspace_bytes(max_num_seqs=70, query_heads=32, head_dim=128) == 0
