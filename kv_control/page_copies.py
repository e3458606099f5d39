"""Pages to be copied whole before the next step, because two rows go on from the same half-full one.

For:        holding a copy's source until it was made.
Not for:    deciding who copies (sharing, window_pages) or copying (kv_execution).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv_control.allocator import PageAllocator

Int32 = NDArray[np.int32]
_NO_PAGES = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A page to be copied; its source is held until then."""

    source: int
    target: int
    row: int


class PageCopies:
    """Copies that are still to be made within one pool."""

    __slots__ = ("_allocator", "_copies")

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._copies: list[PageCopy] = []

    @property
    def pending(self) -> Int32:
        """int32 ``[2, n]``, sources and targets."""
        return np.array([[c.source for c in self._copies], [c.target for c in self._copies]], np.int32).reshape(2, -1)

    def add(self, source: int, target: int, row: int) -> None:
        """Copy ``source`` to ``target``, a page of ``row``, before the next step.

        All copies of a step are one dispatch: where the source is itself still to be copied, its own source is read.
        """
        read = next((one.source for one in self._copies if one.target == source), source)
        self._allocator.retain_one(read)
        self._copies.append(PageCopy(read, target, row))

    def made(self, copies: Int32) -> None:
        """Record that copies (int32 ``[2, n]``, as ``pending`` gave them) were dispatched."""
        done = set(map(tuple, copies.T.tolist()))
        for copy in [copy for copy in self._copies if (copy.source, copy.target) in done]:
            self._copies.remove(copy)
            self._allocator.free([copy.source])

    def drop(self, row: int) -> Int32:
        """Make no copies for a row that ends; returns the pages that became free."""
        freed = [_NO_PAGES]
        for copy in [copy for copy in self._copies if copy.row == row]:
            self._copies.remove(copy)
            freed.append(self._allocator.free([copy.source]))
        return np.concatenate(freed)
