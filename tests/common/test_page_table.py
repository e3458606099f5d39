"""The packed page table against a construction that goes token by token."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_common.errors import PageStateError
from kv_common.page_table import PageRow, pack_page_table


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def naive_table(rows, *, num_pages, tokens_per_page, token_rung, row_rung, index_capacity):
    """The same fields as plain lists, one token after another and one page after another."""
    positions, slots, row_of_token, starts, indptr, indices = [], [], [], [0], [0], []
    seq_lens, last, first = [], [], []
    for r, row in enumerate(rows):
        for position in range(row.start, row.start + row.num_tokens):
            local = position - row.first_page_offset
            hops = 0
            while local >= tokens_per_page:
                local, hops = local - tokens_per_page, hops + 1
            positions.append(position)
            slots.append(int(row.pages[hops]) * tokens_per_page + local)
            row_of_token.append(r)
        starts.append(len(positions))
        indices += row.pages.tolist()
        indptr.append(len(indices))
        seq_lens.append(row.start + row.num_tokens)
        last.append(seq_lens[-1] - row.first_page_offset - (len(row.pages) - 1) * tokens_per_page)
        first.append(row.first_page_offset)

    def pad(values, size, fill):
        return values + [fill] * (size - len(values))

    return {
        "num_reqs": len(rows),
        "num_tokens": len(positions),
        "query_start_loc": pad(starts, row_rung + 1, len(positions)),
        "seq_lens": pad(seq_lens, row_rung, 0),
        "positions": pad(positions, token_rung, 0),
        "slot_mapping": pad(slots, token_rung, num_pages * tokens_per_page),
        "row_of_token": pad(row_of_token, token_rung, row_rung),
        "kv_indptr": pad(indptr, row_rung + 1, len(indices)),
        "kv_indices": pad(indices, index_capacity, num_pages),
        "kv_last_page_len": pad(last, row_rung, 0),
        "kv_first_page_offset": pad(first, row_rung, 0),
    }


@st.composite
def steps(draw):
    """Rows over distinct pages of one pool, some behind a sliding window, and a shape that holds them."""
    tokens_per_page = draw(st.integers(1, 5))
    shapes = draw(st.lists(st.tuples(st.integers(0, 17), st.integers(1, 9), st.integers(0, 3)), max_size=5))
    needed = []
    for start, num_tokens, dropped_pages in shapes:
        offset = min(dropped_pages, start // tokens_per_page) * tokens_per_page
        needed.append((start, num_tokens, offset, -(-(start + num_tokens - offset) // tokens_per_page)))
    total = sum(count for *_, count in needed)
    num_pages = max(total, 1) + draw(st.integers(0, 4))
    order = iter(draw(st.permutations(range(num_pages))))
    rows = [
        PageRow(start, num_tokens, pages(*(next(order) for _ in range(count))), offset)
        for start, num_tokens, offset, count in needed
    ]
    shape = {
        "num_pages": num_pages,
        "tokens_per_page": tokens_per_page,
        "token_rung": max(sum(row.num_tokens for row in rows), 1) + draw(st.integers(0, 5)),
        "row_rung": max(len(rows), 1) + draw(st.integers(0, 3)),
        "index_capacity": max(total, 1) + draw(st.integers(0, 5)),
    }
    return rows, shape


@given(steps())
def test_the_packed_table_is_the_one_built_token_by_token(step):
    rows, shape = step
    table = pack_page_table(rows, **shape)
    packed = {f.name: getattr(table, f.name) for f in dataclasses.fields(table)}
    assert {k: v if isinstance(v, int) else v.tolist() for k, v in packed.items()} == naive_table(rows, **shape)
    assert all(array.dtype == np.int32 for array in packed.values() if not isinstance(array, int))


@given(steps())
def test_padding_reads_and_writes_nothing(step):
    rows, shape = step
    table = pack_page_table(rows, **shape)
    pad_slot = shape["num_pages"] * shape["tokens_per_page"]
    assert (table.slot_mapping[table.num_tokens :] == pad_slot).all()
    assert (table.slot_mapping[: table.num_tokens] < pad_slot).all()
    assert len(set(table.slot_mapping[: table.num_tokens].tolist())) == table.num_tokens
    assert (np.diff(table.kv_indptr)[table.num_reqs :] == 0).all()
    assert (table.kv_indices[table.kv_indptr[-1] :] == shape["num_pages"]).all()  # outside the pool, not page N-1


SHAPE = {"num_pages": 6, "tokens_per_page": 4, "token_rung": 16, "row_rung": 2, "index_capacity": 8}


@pytest.mark.parametrize(
    ("length", "expected"), [(4, (1, 4)), (5, (2, 1)), (8, (2, 4)), (9, (3, 1)), (12, (3, 4)), (13, (4, 1))]
)
def test_a_decode_lists_a_page_from_the_token_that_needs_it(length, expected):  # CASES 22
    row = PageRow(length - 1, 1, pages(*range(expected[0])))
    table = pack_page_table([row], **SHAPE)
    assert (int(table.kv_indptr[1]), int(table.kv_last_page_len[0])) == expected
    with pytest.raises(PageStateError, match="do not hold exactly"):  # the next, still empty page
        pack_page_table([dataclasses.replace(row, pages=pages(*range(expected[0] + 1)))], **SHAPE)


@pytest.mark.parametrize(
    "row",
    [
        PageRow(12, 1, pages(0, 1, 2)),  # CASES 25: position 12 lies on a fourth page
        PageRow(3, 2, pages(0)),
        PageRow(4, 0, pages(0)),
        PageRow(4, 0, pages(0, 1)),  # CASES 23: a last page of length 0
        PageRow(0, 3, pages()),
        PageRow(0, -1, pages()),
        PageRow(8, 1, pages(0, 1), 2),  # a first page that begins inside a page
        PageRow(4, 1, pages(0), 8),  # a first page behind the new tokens
        PageRow(3, 3, pages(0), 4),  # and one behind some of them
        PageRow(4, 1, pages(0, 1, 2), -4),
    ],
)
def test_pages_that_do_not_hold_exactly_the_tokens_are_refused_with_the_row(row):  # CASES 23, 25
    with pytest.raises(PageStateError, match=r"row 1: .* do not hold exactly"):
        pack_page_table([PageRow(0, 1, pages(5)), row], **SHAPE)


@pytest.mark.parametrize("page", [-1, 6, 2**31 - 1])
def test_a_page_outside_the_pool_is_refused_by_row_and_page(page):  # CASES 16, 17
    with pytest.raises(PageStateError, match=rf"row 1 names a page outside 0\.\.5: \[{page}\]"):
        pack_page_table([PageRow(0, 1, pages(0)), PageRow(0, 5, pages(1, page))], **SHAPE)


def test_the_first_and_the_last_page_of_the_pool_are_pages_like_any_other():  # CASES 15, 16
    table = pack_page_table([PageRow(0, 4, pages(0)), PageRow(3, 2, pages(5, 1))], **SHAPE)
    assert table.slot_mapping[:6].tolist() == [0, 1, 2, 3, 23, 4]


@pytest.mark.parametrize("small", [{"token_rung": 5}, {"row_rung": 1}, {"index_capacity": 2}])
def test_a_step_that_does_not_fit_its_shape_is_refused_with_all_numbers(small):
    rows = [PageRow(0, 5, pages(0, 1)), PageRow(0, 1, pages(2))]
    with pytest.raises(PageStateError, match="2 rows, 6 tokens and 3 page references do not fit"):
        pack_page_table(rows, **{**SHAPE, **small})


def test_rows_of_length_three_and_nine_decode_at_their_own_positions():  # CASES 59
    table = pack_page_table([PageRow(2, 1, pages(4)), PageRow(8, 1, pages(1, 2, 3))], **SHAPE)
    assert table.positions[:2].tolist() == [2, 8]
    assert table.seq_lens.tolist() == [3, 9]
