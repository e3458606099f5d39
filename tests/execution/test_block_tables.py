"""Block tables of a vLLM-shaped step against the table our own control plane would pack."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_common.errors import UnsupportedError
from kv_common.page_table import PageRow, pack_page_table
from kv_execution.attention.native import NativeBackend
from kv_execution.attention.reference import ReferenceBackend
from kv_execution.block_tables import BlockTableStep, pack_block_tables
from kv_execution.compile_events import CompileCounter
from kv_execution.metadata import PageMetadata
from kv_execution.native.library import native_available
from tests.execution.paged_steps import PLAIN, TOKEN_RUNG, assert_equals_dense, make_step, mixed_requests, program_of

ROWS, MAX_BLOCKS, TOKENS, NUM_PAGES = 4, 5, 16, 12


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Metadata:
    """The fields tpu-inference passes, as far as they matter here."""

    block_tables: Any
    seq_lens: Any
    query_start_loc: Any
    request_distribution: Any = None
    input_positions: Any = None


@cache
def program(tokens_per_page: int, num_pages: int = NUM_PAGES, num_tokens: int = TOKENS):
    """``pack_block_tables`` under jit, once per geometry."""

    def packed_block_tables(metadata: Any) -> BlockTableStep:
        return pack_block_tables(metadata, num_tokens=num_tokens, num_pages=num_pages, tokens_per_page=tokens_per_page)

    return jax.jit(packed_block_tables)


def anything(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers that would do harm if they were looked at: small ones, and the ends of int32."""
    harmful = np.array([-(2**31), -1, *range(NUM_PAGES + 1), 2**31 - 1])
    return rng.choice(harmful, shape).astype(np.int32)


def block_tables(rows: list[PageRow], seed: int = 0) -> np.ndarray:
    """``[R, max_blocks]`` with the rows' pages in front and ``anything`` everywhere else."""
    table = anything(np.random.default_rng(seed), ROWS, MAX_BLOCKS)
    for i, row in enumerate(rows):
        table[i, : len(row.pages)] = row.pages
    return table


def assert_packed(step: BlockTableStep, rows: list[PageRow], tokens_per_page: int) -> None:
    """Every field is that of ``pack_page_table`` and nothing was refused."""
    expected = PageMetadata.from_table(
        pack_page_table(
            rows,
            num_pages=NUM_PAGES,
            tokens_per_page=tokens_per_page,
            token_rung=TOKENS,
            row_rung=ROWS,
            index_capacity=ROWS * MAX_BLOCKS,
        )
    )
    for field in dataclasses.fields(PageMetadata):
        if field.metadata.get("static"):
            continue  # no array: which program the step is
        got = getattr(step.pages, field.name)
        if field.name == "windows":
            assert got == (), "callers' block tables serve all layers"
            continue
        assert got.dtype == np.int32, field.name
        np.testing.assert_array_equal(np.asarray(got), getattr(expected, field.name), err_msg=field.name)
    assert not np.asarray(step.refused).any()


@st.composite
def steps(draw: Any) -> tuple[list[PageRow], int, Metadata]:
    """Rows whose pages may be shared, and their metadata in one of the forms callers pad it."""
    tokens_per_page = draw(st.sampled_from([1, 3, 4]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    left, rows = TOKENS, []
    for _ in range(draw(st.integers(0, ROWS))):
        length = draw(st.integers(1, MAX_BLOCKS * tokens_per_page))
        num_new = draw(st.integers(1, min(length, left))) if left else 0
        if not num_new:
            break
        left -= num_new
        pages = rng.integers(0, NUM_PAGES, -(-length // tokens_per_page)).astype(np.int32)
        rows.append(PageRow(length - num_new, num_new, pages))
    starts = np.cumsum([0, *(row.num_tokens for row in rows)]).tolist()
    lengths = [row.start + row.num_tokens for row in rows]
    padding = ROWS - len(rows)
    counted = draw(st.booleans())  # with request_distribution, padding may hold anything; without, it shows
    if counted:
        starts += anything(rng, padding).tolist()
        lengths += anything(rng, padding).tolist()
    else:
        starts += [draw(st.sampled_from([starts[-1], 0, 1, -1, TOKENS]))] * padding
        lengths += [0] * padding
    tables = block_tables(rows, int(rng.integers(2**32)))
    metadata = Metadata(
        block_tables=tables.reshape(-1) if draw(st.booleans()) else tables,
        seq_lens=np.array(lengths, np.int32),
        query_start_loc=np.array(starts, np.int32),
        request_distribution=np.array([0, 0, len(rows)], np.int32) if counted else None,
    )
    return rows, tokens_per_page, metadata


@pytest.mark.slow
@given(steps())
def test_the_packed_table_is_the_control_plane_s_whatever_stands_in_the_padding(step):
    rows, tokens_per_page, metadata = step
    assert_packed(program(tokens_per_page)(metadata), rows, tokens_per_page)


def test_one_program_serves_every_content():
    rows = [PageRow(4, 1, np.array([3, 7], np.int32)), PageRow(0, 6, np.array([1, 0], np.int32))]
    counter = CompileCounter()
    packed = jax.jit(partial(pack_block_tables, num_tokens=TOKENS, num_pages=NUM_PAGES, tokens_per_page=4))
    for count in (2, 1, 0):
        some = rows[:count]
        starts = np.cumsum([0, *(row.num_tokens for row in some)])
        metadata = {
            "block_tables": block_tables(some, seed=count),
            "seq_lens": np.array([row.start + row.num_tokens for row in some] + [0] * (ROWS - count), np.int32),
            "query_start_loc": np.pad(starts, (0, ROWS - count), mode="edge").astype(np.int32),
        }
        assert_packed(packed(metadata), some, 4)
    assert counter.by_function() == {"pack_block_tables": 1}


FIRST = PageRow(4, 1, np.array([3, 7], np.int32))


@pytest.mark.parametrize("lengths", [(5, 0, 6), (5, 9, 6)])
def test_a_row_without_new_tokens_is_passed_over_in_its_place(lengths: tuple[int, ...]):
    """A request of the caller's batch that was not scheduled this step, whatever its length."""
    tables = np.array([[3, 7, -1, -1, -1], [9, 9, 9, 9, 9], [1, 0, -1, -1, -1], [0] * 5], np.int32)
    metadata = Metadata(tables, np.array([*lengths, 0], np.int32), np.array([0, 1, 1, 7, 7], np.int32))
    step = program(4)(metadata)
    alone = program(4)(Metadata(tables[[0, 2, 1, 3]], np.array([5, 6, 0, 0], np.int32), np.array([0, 1, 7, 7, 7])))
    assert step.pages.row_of_token.tolist() == [0] + [2] * 6 + [ROWS] * 9
    assert (step.pages.seq_lens.tolist(), step.pages.kv_indptr.tolist()) == ([5, 0, 6, 0], [0, 2, 2, 4, 4])
    for name in ("positions", "slot_mapping", "kv_indices"):
        np.testing.assert_array_equal(getattr(step.pages, name), getattr(alone.pages, name))
    assert not step.refused.any()


@pytest.mark.parametrize(
    ("length", "num_new", "pages", "start"),
    [
        pytest.param(2, 3, [1], 1, id="more new tokens than tokens"),
        pytest.param(21, 1, [1, 2, 4, 5, 6], 1, id="more tokens than its table has pages for"),
        pytest.param(2**31 - 1, 1, [1, 2, 4, 5, 6], 1, id="a length at the end of int32"),
        pytest.param(6, 2, [1, NUM_PAGES], 1, id="a page past the pool"),
        pytest.param(6, 2, [-1, 2], 1, id="a page in front of the pool"),
        pytest.param(6, 2, [1, 2**31 - 1], 1, id="a page whose slot would wrap round"),
        pytest.param(18, 16, [1, 2, 4, 5, 6], 1, id="tokens past the step"),
    ],
)
def test_a_row_that_makes_no_sense_ends_the_step_and_is_marked(length, num_new, pages, start):
    """It and what stands behind it write and read nothing; what stands before it is served."""
    tables = block_tables([FIRST, PageRow(0, 1, np.array(pages)), FIRST])
    starts = np.cumsum([0, 1, num_new, 1, 0])
    step = program(4)(Metadata(tables, np.array([5, length, 5, 0], np.int32), starts.astype(np.int32)))
    assert step.refused.tolist() == [False] + [True] * (TOKENS - 1)
    assert_packed(dataclasses.replace(step, refused=jnp.zeros(1)), [FIRST], 4)


def test_offsets_that_run_backwards_end_the_step_without_a_mark():
    """Stale lengths behind the real rows, as a reused buffer leaves them."""
    tables = block_tables([FIRST, FIRST, FIRST])
    step = program(4)(Metadata(tables, np.array([5, 5, 5, 0], np.int32), np.array([0, 1, 0, 1, 1], np.int32)))
    assert_packed(step, [FIRST], 4)


def test_rows_that_do_not_begin_with_the_first_token_make_no_sense():
    tables = block_tables([FIRST])
    step = program(4)(Metadata(tables, np.array([5, 0, 0, 0], np.int32), np.array([1, 2, 2, 2, 2], np.int32)))
    assert step.refused.all()
    assert_packed(dataclasses.replace(step, refused=jnp.zeros(1)), [], 4)


@pytest.mark.parametrize("backend", [ReferenceBackend(), NativeBackend()], ids=lambda backend: backend.name)
def test_attention_over_block_tables_is_dense_and_padding_gives_zeros_and_writes_nothing(backend):
    if backend.name == "native" and (missing := native_available()) is not None:
        pytest.skip(missing)
    step = make_step(mixed_requests(np.random.default_rng(7)))
    page_size, num_pages = step.k_pool.shape[1], step.k_pool.shape[0]
    table, num_rows = step.table, len(step.requests) + 2
    tables = anything(np.random.default_rng(1), num_rows, 16)
    for i in range(table.num_reqs):
        own = table.kv_indices[table.kv_indptr[i] : table.kv_indptr[i + 1]]
        tables[i, : len(own)] = own
    metadata = SimpleNamespace(
        block_tables=tables,
        seq_lens=table.seq_lens[:num_rows],
        query_start_loc=np.append(table.query_start_loc[: table.num_reqs + 1], [1, 1]),
    )
    pages = pack_block_tables(metadata, num_tokens=TOKEN_RUNG, num_pages=num_pages, tokens_per_page=page_size).pages
    pools = [jnp.array(pool) for pool in (step.k_pool, step.v_pool)]
    call = program_of(backend, PLAIN, None, ())
    output, k_pool, _ = call(step.query, step.key, step.value, *pools, pages, None)
    assert_equals_dense(np.asarray(output), step)
    same = (np.asarray(k_pool) == step.k_pool) | (np.isnan(np.asarray(k_pool)) & np.isnan(step.k_pool))
    changed = np.flatnonzero(~same.reshape(num_pages * page_size, -1).all(axis=1))
    np.testing.assert_array_equal(changed, np.sort(table.slot_mapping[: table.num_tokens]))


GOOD = {
    "block_tables": np.zeros((2, 3), np.int32),
    "seq_lens": np.zeros(2, np.int32),
    "query_start_loc": np.zeros(3, np.int32),
}


@pytest.mark.parametrize("as_object", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_tables": None}, "no block_tables: block_tables, seq_lens, query_start_loc are needed"),
        ({"seq_lens": None}, "no seq_lens"),
        ({"query_start_loc": None}, "no query_start_loc"),
        ({"seq_lens": np.zeros(2, np.float32)}, "seq_lens is float32: integers are needed"),
        ({"query_start_loc": np.zeros(4, np.int32)}, r"query_start_loc \(4,\) .* one engine per replica"),
        ({"seq_lens": np.zeros((2, 1), np.int32)}, "one axis each"),
        ({"block_tables": np.zeros((3, 2), np.int32)}, r"block_tables \(3, 2\) does not fit 2 rows: axis 0"),
        ({"block_tables": np.zeros(5, np.int32)}, r"block_tables \(5,\) does not fit 2 rows"),
        ({"block_tables": np.zeros((2, 0), np.int32)}, r"block_tables \(2, 0\) does not fit"),
        ({"pcp": object()}, "sets pcp: prefill context parallelism"),
        ({"k_scale_cache": np.ones(2)}, "sets k_scale_cache: .* not served"),
    ],
)
def test_metadata_that_is_not_served_is_refused_by_field(change: dict[str, Any], message: str, as_object: bool):
    fields = {**GOOD, **change}
    with pytest.raises(UnsupportedError, match=message):
        pack_block_tables(
            SimpleNamespace(**fields) if as_object else fields, num_tokens=4, num_pages=4, tokens_per_page=4
        )


def test_metadata_per_layer_is_refused_with_the_way_out():
    with pytest.raises(UnsupportedError, match=r"per layer \(layer.0, layer.1, ...\).* hybrid KV-cache groups off"):
        pack_block_tables({"layer.0": GOOD, "layer.1": GOOD}, num_tokens=4, num_pages=4, tokens_per_page=4)
