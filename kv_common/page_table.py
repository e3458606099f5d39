"""One step's page bookkeeping, built in numpy and padded to a fixed shape.

For:        telling a kernel which tokens are new, where their K/V goes and which pages each request reads.
Not for:    deciding any of that, or any kernel's own packing.
May import: the standard library, numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import PageStateError
from kv_common.pages import last_page_len, page_and_offset, pages_for_tokens

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageRow:
    """One request of a step, before packing.

    Attributes:
      start: position of its first new token, equal to the tokens already written.
      num_tokens: new tokens this step, at least 1.
      pages: int32, the pages it reads, in order; the first begins at ``first_page_offset``.
      first_page_offset: position at which ``pages[0]`` begins (0 without a sliding window).
    """

    start: int
    num_tokens: int
    pages: Int32
    first_page_offset: int = 0


@dataclass(frozen=True, slots=True)
class KvPageTableV1:
    """Page bookkeeping of one step: ``R`` request rows, ``T`` flat token rows, ``C`` page references.

    Real rows come first; the rest is padding that writes nothing and reads nothing.

    Attributes:
      num_reqs: real request rows, ``<= R``.
      num_tokens: real token rows, ``<= T``.
      query_start_loc: int32 ``[R + 1]``, offset of each request's new tokens; padding repeats the end.
      seq_lens: int32 ``[R]``, KV length once this step's tokens are written; padding 0.
      positions: int32 ``[T]``, absolute position of each token (the number RoPE sees); padding 0.
      slot_mapping: int32 ``[T]``, ``page * tokens_per_page + offset``; padding one past the last slot.
      row_of_token: int32 ``[T]``, request row of each token; padding ``R``.
      kv_indptr: int32 ``[R + 1]``, offsets into ``kv_indices``; padding repeats the end.
      kv_indices: int32 ``[C]``, page ids, request after request; padding one past the last page.
      kv_last_page_len: int32 ``[R]``, tokens in the last page, ``1..tokens_per_page``; padding 0.
      kv_first_page_offset: int32 ``[R]``, position at which the first listed page begins; padding 0.
    """

    num_reqs: int
    num_tokens: int
    query_start_loc: Int32
    seq_lens: Int32
    positions: Int32
    slot_mapping: Int32
    row_of_token: Int32
    kv_indptr: Int32
    kv_indices: Int32
    kv_last_page_len: Int32
    kv_first_page_offset: Int32


def pack_page_table(
    rows: Sequence[PageRow],
    *,
    num_pages: int,
    tokens_per_page: int,
    token_rung: int,
    row_rung: int,
    index_capacity: int,
) -> KvPageTableV1:
    """Pack each request's pages into one CSR table of fixed shape. Pure: same arguments, same table.

    Args:
      rows: the step's requests, decodes first.
      token_rung: ``T``. row_rung: ``R``. index_capacity: ``C``.

    Raises:
      PageStateError: a row's pages do not cover its tokens exactly, a page id is outside the pool, or
        the rows do not fit the given shape.

    >>> table = pack_page_table(
    ...     [PageRow(19, 1, np.array([3, 7], np.int32)), PageRow(0, 4, np.array([5], np.int32))],
    ...     num_pages=9, tokens_per_page=16, token_rung=8, row_rung=3, index_capacity=6)
    >>> table.kv_indptr.tolist(), table.kv_indices.tolist(), table.kv_last_page_len.tolist()
    ([0, 2, 3, 3], [3, 7, 5, 9, 9, 9], [4, 4, 0])
    >>> table.slot_mapping.tolist(), table.seq_lens.tolist()
    ([115, 80, 81, 82, 83, 144, 144, 144], [20, 4, 0])
    """
    for i, row in enumerate(rows):
        outside = (row.pages < 0) | (row.pages >= num_pages)
        if outside.any():
            raise PageStateError(f"row {i} names a page outside 0..{num_pages - 1}: {row.pages[outside].tolist()}")
    start = np.array([row.start for row in rows], np.int64)
    num_new = np.array([row.num_tokens for row in rows], np.int64)
    first_page_offset = np.array([row.first_page_offset for row in rows], np.int64)
    pages_per_row = np.array([len(row.pages) for row in rows], np.int64)
    length = start + num_new
    bad = (num_new < 1) | (first_page_offset < 0) | (first_page_offset > start)
    bad |= page_and_offset(first_page_offset, tokens_per_page)[1] != 0
    bad |= pages_per_row != pages_for_tokens(length - first_page_offset, tokens_per_page)
    if bad.any():
        i = int(bad.argmax())
        raise PageStateError(
            f"row {i}: {pages_per_row[i]} pages of {tokens_per_page} tokens from position "
            f"{first_page_offset[i]} do not hold exactly {length[i]} tokens ({num_new[i]} of them new)"
        )
    pages = np.concatenate([np.zeros(0, np.int32), *(row.pages for row in rows)])
    return pack_page_arrays(
        start=start,
        num_new=num_new,
        first_page_offset=first_page_offset,
        pages_per_row=pages_per_row,
        kv_indices=_padded(pages, max(index_capacity, len(pages)), num_pages),
        num_pages=num_pages,
        tokens_per_page=tokens_per_page,
        token_rung=token_rung,
        row_rung=row_rung,
        index_capacity=index_capacity,
    )


def pack_page_arrays(
    *,
    start: Int64,
    num_new: Int64,
    first_page_offset: Int64,
    pages_per_row: Int64,
    kv_indices: Int32,
    num_pages: int,
    tokens_per_page: int,
    token_rung: int,
    row_rung: int,
    index_capacity: int,
) -> KvPageTableV1:
    """``pack_page_table`` for rows that already stand in arrays, as the control plane has checked them; no Python loop.

    Args:
      start, num_new, first_page_offset: int64 ``[num_reqs]``, the fields of ``PageRow``.
      pages_per_row: int64 ``[num_reqs]``.
      kv_indices: int32 ``[C]``, the rows' pages one after another, padded; becomes the table's own. Its ids are
        taken as they are: a page map only ever holds ids of the pool.

    Raises:
      PageStateError: the rows do not fit the given shape.
    """
    num_reqs, num_tokens, num_indices = len(start), int(num_new.sum()), int(pages_per_row.sum())
    if num_tokens > token_rung or num_reqs > row_rung or num_indices > index_capacity:
        raise PageStateError(
            f"{num_reqs} rows, {num_tokens} tokens and {num_indices} page references do not fit a step of "
            f"{row_rung} rows, {token_rung} tokens and {index_capacity} page references"
        )
    length = start + num_new
    visible = length - first_page_offset
    query_start_loc = np.full(row_rung + 1, num_tokens, np.int32)
    query_start_loc[0], query_start_loc[1 : num_reqs + 1] = 0, np.cumsum(num_new)
    kv_indptr = np.full(row_rung + 1, num_indices, np.int32)
    kv_indptr[0], kv_indptr[1 : num_reqs + 1] = 0, np.cumsum(pages_per_row)

    row = np.repeat(np.arange(num_reqs), num_new)
    position = np.arange(num_tokens) + (start - query_start_loc[:num_reqs])[row]
    page, offset = page_and_offset(position - first_page_offset[row], tokens_per_page)
    slot = kv_indices[kv_indptr[row] + page].astype(np.int64) * tokens_per_page + offset
    return KvPageTableV1(
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        query_start_loc=query_start_loc,
        seq_lens=_padded(length, row_rung, 0),
        positions=_padded(position, token_rung, 0),
        slot_mapping=_padded(slot, token_rung, num_pages * tokens_per_page),
        row_of_token=_padded(row, token_rung, row_rung),
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_last_page_len=_padded(last_page_len(visible, tokens_per_page), row_rung, 0),
        kv_first_page_offset=_padded(first_page_offset, row_rung, 0),
    )


def _padded(values: NDArray[np.integer[Any]], size: int, fill: int) -> Int32:
    """int32 ``[size]`` that begins with ``values`` and ends with ``fill``."""
    padded = np.full(size, fill, np.int32)
    padded[: len(values)] = values
    return padded
