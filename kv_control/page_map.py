"""Which pages each running request holds, in order, behind handles that go stale safely.

For:        request to pages, in a table of one int32 per page (never one per token).
Not for:    which pages are free (allocator) or how many tokens are written (control_plane).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kv_common.errors import ConfigError, PageStateError, StaleHandleError
from kv_control.plan import RequestHandle

NO_PAGE = -1
"""Fills table entries that hold no page: outside every pool, and refused by whoever takes page ids."""

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Packed:
    """The last list that ``first_pages`` made, and what it was made for."""

    rows: Int64
    versions: Int64
    num_wanted: Int64
    pages: Int32
    fill: int

    def serves(self, rows: Int64, versions: Int64, num_wanted: Int64, size: int, fill: int) -> bool:
        """Whether the same rows still begin with these pages, and a list of ``size`` is wanted again."""
        return bool(
            len(rows) == len(self.rows)
            and (size, fill) == (len(self.pages), self.fill)
            and (rows == self.rows).all()
            and (versions == self.versions).all()
            and (num_wanted >= self.num_wanted).all()
        )


class PageMap:
    """An int32 table ``[max_num_seqs, max_pages_per_request]`` of page ids; unused entries are ``NO_PAGE``.

    Rows are handed out 0, 1, 2, ...; a released row is the next to be handed out.

    >>> page_map = PageMap(max_num_seqs=2, max_pages_per_request=3)
    >>> handle = page_map.acquire()
    >>> page_map.extend(handle, [4, 0])
    >>> page_map.pages(handle).tolist(), page_map.table[0].tolist()
    ([4, 0], [4, 0, -1])
    >>> page_map.release(handle).tolist(), page_map.table[0].tolist()
    ([4, 0], [-1, -1, -1])
    >>> page_map.pages(handle)
    Traceback (most recent call last):
    ...
    kv_common.errors.StaleHandleError: row 0, epoch 1: this request has been released
    """

    __slots__ = ("_block_epoch", "_counts", "_epochs", "_free_rows", "_packed", "_table", "_versions")

    def __init__(self, max_num_seqs: int, max_pages_per_request: int) -> None:
        if max_num_seqs < 1 or max_pages_per_request < 1:
            raise ConfigError(
                f"max_num_seqs={max_num_seqs}, max_pages_per_request={max_pages_per_request}: both must be at least 1"
            )
        self._table = np.full((max_num_seqs, max_pages_per_request), NO_PAGE, np.int32)
        self._counts = np.zeros(max_num_seqs, np.int64)
        self._epochs = np.zeros(max_num_seqs, np.int64)  # odd while the row is held
        self._versions = np.zeros(max_num_seqs, np.int64)  # moves when pages that a row had leave it
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._block_epoch = 0
        self._packed: _Packed | None = None

    @property
    def block_epoch(self) -> int:
        """Moves with every change of any request's pages or rows; while it stands still, so do they all."""
        return self._block_epoch

    @property
    def nbytes(self) -> int:
        """Bytes of the map's arrays."""
        return self._table.nbytes + self._counts.nbytes + self._epochs.nbytes

    @property
    def num_rows_free(self) -> int:
        """Requests that ``acquire`` can still take in."""
        return len(self._free_rows)

    @property
    def table(self) -> Int32:
        """int32 ``[max_num_seqs, max_pages_per_request]``, a read-only view (the padded block table)."""
        view = self._table.view()
        view.flags.writeable = False
        return view

    @property
    def live_rows(self) -> Int64:
        """int64, rows that are held."""
        return np.flatnonzero(self._epochs & 1)

    @property
    def counts(self) -> Int64:
        """int64 ``[max_num_seqs]``, pages held by each row; a read-only view."""
        view = self._counts.view()
        view.flags.writeable = False
        return view

    def acquire(self) -> RequestHandle | None:
        """A row without pages, or None when all are held."""
        if not self._free_rows:
            return None
        row = self._free_rows.pop()
        self._epochs[row] += 1
        self._block_epoch += 1
        return RequestHandle(row, int(self._epochs[row]))

    def release(self, handle: RequestHandle) -> Int32:
        """Give the row back; returns the pages it held, int32. The handle is stale from now on."""
        pages = self.truncate(handle, 0)
        self._epochs[handle.row] += 1
        self._free_rows.append(handle.row)
        return pages

    def is_live(self, handle: RequestHandle) -> bool:
        """Whether the handle's request still holds its row."""
        return 0 <= handle.row < len(self._epochs) and bool(self._epochs[handle.row] == handle.epoch)

    def pages(self, handle: RequestHandle) -> Int32:
        """int32 ``[num_pages]``, the request's pages in order; a copy."""
        row = self._row(handle)
        return self._table[row, : self._counts[row]].copy()

    def page_at(self, row: int, i: int) -> int:
        """The ``i``-th page of a row; ``NO_PAGE`` where it has fewer."""
        return int(self._table[row, i])

    def num_pages(self, handle: RequestHandle) -> int:
        """Pages the request holds."""
        return int(self._counts[self._row(handle)])

    def extend(self, handle: RequestHandle, pages: ArrayLike) -> None:
        """Add pages at the end of a request's list."""
        added = np.asarray(pages, np.int32)
        self.extend_rows(np.array([self._row(handle)]), np.array([len(added)]), added)

    def replace(self, handle: RequestHandle, i: int, page: int) -> None:
        """Let the request's ``i``-th page be another one."""
        self._table[self._row(handle), i] = page
        self._versions[handle.row] += 1
        self._block_epoch += 1

    def truncate(self, handle: RequestHandle, num_pages: int) -> Int32:
        """Keep the first ``num_pages`` pages; returns the others, int32, in order."""
        row = self._row(handle)
        count = int(self._counts[row])
        dropped = self._table[row, num_pages:count].copy()
        self._table[row, num_pages:count] = NO_PAGE
        self._counts[row] = min(count, num_pages)
        self._versions[row] += 1
        self._block_epoch += 1
        return dropped

    def rows_of(self, handles: Sequence[RequestHandle]) -> Int64:
        """int64 ``[len(handles)]``, the rows of live handles.

        Raises:
          StaleHandleError: one of them has been released; it is named.
        """
        rows = np.array([handle.row for handle in handles], np.int64)
        self.require_live(rows, np.array([handle.epoch for handle in handles], np.int64))
        return rows

    def require_live(self, rows: Int64, epochs: Int64) -> None:
        """Check handles given as arrays, int64 ``[n]`` each.

        Raises:
          StaleHandleError: one of them has been released; it is named.
        """
        if len(rows) == 0 or (rows.min() >= 0 and rows.max() < len(self._epochs)):
            stale = self._epochs[rows] != epochs
        else:
            stale = (rows < 0) | (rows >= len(self._epochs))
        if stale.any():
            i = int(stale.argmax())
            raise _stale(RequestHandle(int(rows[i]), int(epochs[i])))

    def extend_rows(self, rows: Int64, num_added: Int64, pages: Int32) -> None:
        """Add ``num_added[i]`` of ``pages`` to each of the distinct ``rows``, in order.

        Raises:
          PageStateError: a row would hold more than ``max_pages_per_request``; nothing has changed.
        """
        counts = self._counts[rows] + num_added
        if (counts > self._table.shape[1]).any():
            i = int((counts > self._table.shape[1]).argmax())
            raise PageStateError(
                f"row {rows[i]} would hold {counts[i]} pages, a request holds at most {self._table.shape[1]}"
            )
        if not len(pages):
            return
        self._table[_entries(rows, self._counts[rows], num_added)] = pages
        self._counts[rows] = counts
        self._block_epoch += 1

    def first_pages(self, rows: Int64, num_wanted: Int64, *, capacity: int = 0, fill: int = NO_PAGE) -> Int32:
        """The first ``num_wanted[i]`` pages of each row, row after row.

        While the same rows are asked for and only grow, the last answer is cut where they grew and copied piece by
        piece: a decode step costs its new pages and one copy of the list, not a look at every page.

        Args:
          capacity: length of the result; what lies behind the pages is ``fill``. 0: exactly the pages.

        Returns:
          int32 ``[max(capacity, sum(num_wanted))]``, not to be written to.

        Raises:
          PageStateError: a row holds fewer; what lies behind them is no page.
        """
        short = num_wanted > self._counts[rows]
        if short.any():
            i = int(short.argmax())
            raise PageStateError(f"row {rows[i]} holds {self._counts[rows[i]]} pages, {num_wanted[i]} are needed")
        total = int(num_wanted.sum())
        size = max(capacity, total)
        last = self._packed
        if last is not None and last.serves(rows, self._versions[rows], num_wanted, size, fill):
            grown = np.flatnonzero(num_wanted > last.num_wanted)
            if not len(grown):
                return last.pages
            parts: list[Int32] = []
            begin = 0
            ends = np.cumsum(last.num_wanted)[grown]
            before, after = last.num_wanted[grown], num_wanted[grown]
            for row, end, old, new in zip(
                rows[grown].tolist(), ends.tolist(), before.tolist(), after.tolist(), strict=True
            ):
                parts += (last.pages[begin:end], self._table[row, old:new])
                begin = end
            parts.append(last.pages[begin : total - int((after - before).sum())])
        else:
            table = self._table
            parts = [table[row, :n] for row, n in zip(rows.tolist(), num_wanted.tolist(), strict=True)]
        pages = np.empty(size, np.int32)
        if parts:
            np.concatenate(parts, out=pages[:total])
        pages[total:] = fill
        pages.flags.writeable = False
        self._packed = _Packed(rows.copy(), self._versions[rows], num_wanted.copy(), pages, fill)
        return pages

    def _row(self, handle: RequestHandle) -> int:
        if not self.is_live(handle):
            raise _stale(handle)
        return handle.row


def _stale(handle: RequestHandle) -> StaleHandleError:
    return StaleHandleError(f"row {handle.row}, epoch {handle.epoch}: this request has been released")


def _entries(rows: Int64, first: Int64, count: Int64) -> tuple[Int64, Int64]:
    """Table indices of ``count[i]`` entries of ``rows[i]`` from column ``first[i]`` on, row after row."""
    begins = np.cumsum(count) - count
    columns = np.arange(int(count.sum())) + np.repeat(first - begins, count)
    return np.repeat(rows, count), columns
