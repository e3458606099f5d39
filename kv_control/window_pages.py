"""Which pages of one window group each row holds: a run of logical pages that ends at its newest token.

For:        the pools of layers with a sliding window, from a row's first page to the one that left the window.
Not for:    rows, epochs and written tokens (control_plane), or several groups at once (window_groups).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_common.page_table import KvPageTableV1, pack_page_arrays
from kv_common.pages import full_pages, pages_for_tokens
from kv_common.window_group import WindowGroup
from kv_control.allocator import PageAllocator
from kv_control.dirty_pages import DirtyPages
from kv_control.page_copies import PageCopies
from kv_control.page_map import NO_PAGE
from kv_control.prefix_index import PageNode
from kv_control.window_cache import WindowCache

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class WindowPages:
    """Pages of one group. Rows are the control plane's; logical pages have the numbers they have in its page map.

    Args:
      group: window and pools. max_num_seqs, max_pages_per_request: of the control plane.

    Attributes:
      first, end: int64 ``[max_num_seqs]``; a row holds logical pages ``first .. end - 1``.
      table: int32 ``[max_num_seqs, max_pages_per_request]``; ``NO_PAGE`` outside of that, also where a page left.
      cache: pages that the prefix index names. copies: pages to be copied before the next step.
      num_passed: pages that left a row's window. peak_held: most pages that were not free.
    """

    def __init__(self, group: WindowGroup, *, max_num_seqs: int, max_pages_per_request: int) -> None:
        self.group = group
        self.allocator = PageAllocator(group.layout.num_pages)
        self.first: Int64 = np.zeros(max_num_seqs, np.int64)
        self.end: Int64 = np.zeros(max_num_seqs, np.int64)
        self.table: Int32 = np.full((max_num_seqs, max_pages_per_request), NO_PAGE, np.int32)
        self.cache = WindowCache(group, self.allocator)
        self.copies = PageCopies(self.allocator)
        self.num_passed = self.peak_held = 0
        self._dirty = DirtyPages(self.allocator)
        self._freed = np.zeros(group.layout.num_pages, np.bool_)  # since `take_freed`

    # --- counts ------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Pages that a row can be given: free ones, and cached ones that nobody reads."""
        return int(self.allocator.num_free) + self.cache.num_evictable

    @property
    def dirty_held(self) -> Int32:
        """int32, pages that somebody holds and nobody has scrubbed yet."""
        return self._dirty.held()

    def missing(self, rows: Int64, length: Int64) -> Int64:
        """int64 ``[n]``, pages that rows lack for so many tokens."""
        needed = pages_for_tokens(length, self.group.layout.tokens_per_page)
        lacking: Int64 = np.maximum(needed - self.end[rows], 0)
        return lacking

    def step_capacity(self, *, num_rows: int, num_tokens: int) -> int:
        """Page references of a step's table."""
        max_pages: int = self.table.shape[1]
        return min(num_rows * max_pages, self.group.step_pages(num_rows=num_rows, num_tokens=num_tokens))

    # --- holding and giving back -------------------------------------------------------------------------

    def extend(self, rows: Int64, added: Int64) -> None:
        """Give each of the distinct ``rows`` ``added`` more pages, of which ``num_available`` has enough."""
        total = int(added.sum())
        if not total:
            return
        pages = self._allocate(total)
        self.table[_entries(rows, self.end[rows], added)] = pages
        self.end[rows] += added
        self._dirty.note(pages)

    def shorten(self, row: int, num_pages: int) -> None:
        """Take a row's newest ``num_pages`` pages back."""
        end = int(self.end[row])
        self.end[row] = end - num_pages
        self._let_go(row, end - num_pages, end)

    def slide(self, rows: Int64, positions: Int64, kept_from: Int64 | None = None) -> None:
        """Give back what no query of each row from its position on sees.

        Args:
          kept_from: int64 ``[n]``, the logical page of each row that must stay, and all behind it, seen or not.
        """
        first = np.minimum(self.group.first_pages(positions), self.end[rows])
        if kept_from is not None:
            first = np.minimum(first, kept_from)
        old = self.first[rows]
        for i in np.flatnonzero(first > old).tolist():
            row, begin, end = int(rows[i]), int(old[i]), int(first[i])
            self.num_passed += end - begin
            self.first[row] = end
            self._let_go(row, begin, end)

    def release(self, row: int) -> None:
        """A row ends."""
        self._note_freed(self.copies.drop(row))
        self._let_go(row, int(self.first[row]), int(self.end[row]))
        self.first[row] = self.end[row] = 0

    def take_freed(self) -> Int32:
        """int32, pages that became free since the last call (what a debug knob may poison before the next scrub)."""
        freed = np.flatnonzero(self._freed).astype(np.int32)
        self._freed[freed] = False
        return freed

    # --- beginning behind others -------------------------------------------------------------------------

    def adopt(self, row: int, nodes: Sequence[PageNode]) -> None:
        """Begin a row without pages behind a chain of nodes, which ``cache.num_usable`` has taken as it is."""
        end = len(nodes)
        first = self.group.first_page(end * self.group.layout.tokens_per_page)
        pages = np.array([self._page_of(node) for node in nodes[first:]], np.int32)
        self.allocator.retain(pages)
        self._begin(row, first, pages)
        self.cache.touch(nodes[first:])

    def can_fork(self, source: int, num_tokens: int) -> bool:
        """Whether a row still has what a query at ``num_tokens`` sees."""
        return bool(self.first[source] <= self.group.first_page(num_tokens))

    def fork(self, source: int, target: int, num_tokens: int) -> None:
        """Begin row ``target``, without pages, behind ``num_tokens`` tokens of ``source``: whole pages are shared, a
        partial last one is copied before the next step (one page, of which ``num_available`` has enough)."""
        size = self.group.layout.tokens_per_page
        first, whole = self.group.first_page(num_tokens), full_pages(num_tokens, size)
        pages = self.table[source, first:whole].copy()
        self.allocator.retain(pages)
        self._begin(target, first, pages)
        if num_tokens > whole * size:
            self.extend(np.array([target]), np.array([1]))
            self.copies.add(int(self.table[source, whole]), int(self.table[target, whole]), target)

    def offer(self, row: int, i: int, node: PageNode) -> None:
        """Let a node of the prefix index name the row's logical page ``i``, if the row still has it."""
        if self.first[row] <= i < self.end[row]:
            self.cache.offer(node, int(self.table[row, i]))

    def forget(self, node: PageNode) -> None:
        """A node left the prefix index."""
        self._note_freed(self.cache.forget(node))

    # --- one step ----------------------------------------------------------------------------------------

    def pack(
        self, rows: Int64, start: Int64, num_new: Int64, *, token_rung: int, row_rung: int
    ) -> tuple[KvPageTableV1, Int32]:
        """A step's table, padded to its rung; and int32, the pages that it names."""
        layout = self.group.layout
        first = self.group.first_pages(start)
        num_listed = pages_for_tokens(start + num_new, layout.tokens_per_page) - first
        capacity = self.step_capacity(num_rows=row_rung, num_tokens=token_rung)
        named = self.table[_entries(rows, first, num_listed)]
        indices = np.full(capacity, layout.num_pages, np.int32)
        indices[: len(named)] = named
        table = pack_page_arrays(
            start=start,
            num_new=num_new,
            first_page_offset=first * layout.tokens_per_page,
            pages_per_row=num_listed,
            kv_indices=indices,
            num_pages=layout.num_pages,
            tokens_per_page=layout.tokens_per_page,
            token_rung=token_rung,
            row_rung=row_rung,
            index_capacity=capacity,
        )
        return table, named

    # --- how ---------------------------------------------------------------------------------------------

    def _allocate(self, n: int) -> Int32:
        missing = n - self.allocator.num_free
        if missing > 0:
            self._note_freed(self.cache.evict(missing))
        pages = self.allocator.allocate(n)
        assert pages is not None  # the control plane has looked at `num_available`
        self.peak_held = max(self.peak_held, self.allocator.num_held)
        return pages

    def _begin(self, row: int, first: int, pages: Int32) -> None:
        self.first[row], self.end[row] = first, first + len(pages)
        self.table[row, first : first + len(pages)] = pages
        self.peak_held = max(self.peak_held, self.allocator.num_held)

    def _let_go(self, row: int, begin: int, end: int) -> None:
        """Free the row's logical pages ``begin .. end - 1``."""
        pages = self.table[row, begin:end].copy()
        self.table[row, begin:end] = NO_PAGE
        self._note_freed(self.allocator.free(pages))

    def _note_freed(self, pages: Int32) -> None:
        self._freed[pages] = True

    def _page_of(self, node: PageNode) -> int:
        page = self.cache.page_of(node)
        assert page is not None  # `num_usable` has looked
        return page


def _entries(rows: Int64, first: Int64, count: Int64) -> tuple[Int64, Int64]:
    """Table indices of ``count[i]`` entries of ``rows[i]`` from column ``first[i]`` on, row after row."""
    begins = np.cumsum(count) - count
    columns = np.arange(int(count.sum())) + np.repeat(first - begins, count)
    return np.repeat(rows, count), columns
