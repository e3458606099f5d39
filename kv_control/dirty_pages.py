"""Pages that were handed out dirty and are not scrubbed yet.

For:        naming, before every step, what must be overwritten, without a look at the whole pool.
Not for:    which pages are dirty at all (allocator).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kv_control.allocator import PageAllocator

Int32 = NDArray[np.int32]


class DirtyPages:
    """Dirty pages that somebody holds; some of those noted may be free again."""

    __slots__ = ("_allocator", "_noted")

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._noted = np.zeros(0, np.int32)

    def note(self, pages: Int32) -> None:
        """Remember those of newly held pages that carry old K/V."""
        dirty = self._allocator.dirty_among(pages)
        if len(dirty):
            self._noted = np.concatenate([self._noted, dirty])

    def held(self) -> Int32:
        """int32, pages that somebody holds and nobody has scrubbed yet: never more than were handed out lately."""
        if not len(self._noted):
            return self._noted
        noted, first = np.unique(self._noted, return_index=True)
        noted = noted[np.argsort(first)]
        self._noted = noted[self._allocator.dirty[noted] & (self._allocator.references[noted] > 0)]
        return self._noted
