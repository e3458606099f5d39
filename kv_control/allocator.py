"""Which pages of the pool are free, how many hold each of the others, and which still carry old K/V.

For:        handing out page ids and taking them back, with misuse named.
Not for:    whose pages they are (page_map) or overwriting them (kv_execution).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kv_common.errors import ConfigError, PageStateError


class PageAllocator:
    """Pages ``0 .. num_pages - 1``, reference-counted; none is reserved. Every call costs what it touches.

    Order is fixed: a fresh pool hands out 0, 1, 2, ...; freed pages are handed out again before
    untouched ones, the latest call's first, and those of one call in the order of that call. So the
    same calls always give the same pages, and a pool that is not full stays small in memory.

    A page is dirty from the moment it is freed until ``confirm_scrubbed``: whoever is given it must not
    read it before. Fresh pages are clean, because pools begin as zeros.

    >>> pool = PageAllocator(4)
    >>> pool.allocate(2).tolist(), pool.num_free, pool.allocate(3)
    ([0, 1], 2, None)
    >>> pool.free([1]).tolist(), pool.allocate(2).tolist(), pool.dirty_among([1, 2]).tolist()
    ([1], [1, 2], [1])
    """

    __slots__ = ("_dirty", "_free", "_num_free", "_references", "num_pages")

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ConfigError(f"paged_num_pages={num_pages}: a pool needs at least 1 page")
        self.num_pages = num_pages
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # a stack; its top is at _num_free
        self._num_free = num_pages
        self._references = np.zeros(num_pages, np.int32)
        self._dirty = np.zeros(num_pages, np.bool_)

    @property
    def num_free(self) -> int:
        """Pages that ``allocate`` can give."""
        return self._num_free

    @property
    def num_held(self) -> int:
        """Pages that somebody holds, each counted once."""
        return self.num_pages - self._num_free

    @property
    def references(self) -> NDArray[np.int32]:
        """int32 ``[num_pages]``, holders of each page; a read-only view."""
        return _read_only(self._references)

    @property
    def dirty(self) -> NDArray[np.bool_]:
        """bool ``[num_pages]``, pages that still carry old K/V; a read-only view."""
        return _read_only(self._dirty)

    @property
    def free_pages(self) -> NDArray[np.int32]:
        """int32 ``[num_free]``, the free pages, next to be handed out first."""
        return self._free[: self._num_free][::-1].copy()

    def allocate(self, n: int) -> NDArray[np.int32] | None:
        """Hold ``n`` more pages, or none of them.

        Returns:
          int32 ``[n]``, distinct; None when fewer are free, and then nothing has changed.
        """
        if n < 0:
            raise PageStateError(f"cannot allocate {n} pages")
        if n > self._num_free:
            return None
        pages = self._free[self._num_free - n : self._num_free][::-1].copy()
        self._num_free -= n
        self._references[pages] = 1
        return pages

    def retain(self, pages: ArrayLike) -> None:
        """Hold pages once more that somebody already holds. A page named twice is retained once.

        Raises:
          PageStateError: a page is outside the pool or free; nothing has changed.
        """
        self._references[self._held(pages, "retain")] += 1

    def retain_one(self, page: int) -> None:
        """``retain`` of a single page, for those who do it once per page of every prompt."""
        if not 0 <= page < self.num_pages or not self._references[page]:
            self.retain([page])
        self._references[page] += 1

    def free(self, pages: ArrayLike) -> NDArray[np.int32]:
        """Give up one hold on each page. A page named twice in one call is given up once.

        Returns:
          int32, the pages nobody holds any more, in the order of the call: free now, and dirty.

        Raises:
          PageStateError: a page is outside the pool or already free; nothing has changed.
        """
        released = self._held(pages, "free")
        self._references[released] -= 1
        freed: NDArray[np.int32] = released[self._references[released] == 0]
        self._dirty[freed] = True
        self._free[self._num_free : self._num_free + len(freed)] = freed[::-1]
        self._num_free += len(freed)
        return freed

    def dirty_among(self, pages: ArrayLike) -> NDArray[np.int32]:
        """int32, those of ``pages`` that still carry old K/V, in order."""
        wanted = self._inside(pages, "read")
        dirty: NDArray[np.int32] = wanted[self._dirty[wanted]]
        return dirty

    def confirm_scrubbed(self, pages: ArrayLike) -> None:
        """Record that the device has overwritten these pages."""
        self._dirty[self._inside(pages, "scrub")] = False

    def _inside(self, pages: ArrayLike, verb: str) -> NDArray[np.int32]:
        """The pages as int32; refuses a sentinel before numpy wraps it round to the last page."""
        wanted = np.asarray(pages, np.int64).reshape(-1)
        outside = (wanted < 0) | (wanted >= self.num_pages)
        if outside.any():
            raise PageStateError(f"cannot {verb} page {wanted[outside][0]}: pages are 0..{self.num_pages - 1}")
        return wanted.astype(np.int32)

    def _held(self, pages: ArrayLike, verb: str) -> NDArray[np.int32]:
        """The distinct pages in first-named order, all of them held."""
        wanted = self._inside(pages, verb)
        distinct, first_named = np.unique(wanted, return_index=True)
        if len(distinct) < len(wanted):
            wanted = wanted[np.sort(first_named)]
        unheld = wanted[self._references[wanted] == 0]
        if len(unheld):
            raise PageStateError(f"cannot {verb}: page {unheld[0]} is already free")
        return wanted


def _read_only[Scalar: np.generic](array: NDArray[Scalar]) -> NDArray[Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view
