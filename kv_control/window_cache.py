"""Pages of one window group that the prefix index names beside its own, least recently used first to go.

For:        which of a node's window pages can still be adopted, and giving them up for room.
Not for:    the trie (prefix_index) or pages that rows hold (window_pages).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_common.window_group import WindowGroup
from kv_control.allocator import PageAllocator
from kv_control.prefix_index import PageNode

Int32 = NDArray[np.int32]


class WindowCache:
    """One page of the group for some nodes of the prefix index; each counts as one hold on its page.

    A page can go while its node stays: the node then ends no hit, but is still passed through by longer ones.
    """

    __slots__ = ("_allocator", "_group", "_is_named", "_pages", "num_evicted")

    def __init__(self, group: WindowGroup, allocator: PageAllocator) -> None:
        self._group = group
        self._allocator = allocator
        self._pages: OrderedDict[PageNode, int] = OrderedDict()  # least recently used first
        self._is_named = np.zeros(allocator.num_pages, np.bool_)
        self.num_evicted = 0

    @property
    def pages(self) -> Int32:
        """int32, the pages that nodes name."""
        return np.flatnonzero(self._is_named).astype(np.int32)

    @property
    def num_evictable(self) -> int:
        """Pages that only the index holds."""
        return int(np.count_nonzero(self._is_named & (self._allocator.references == 1)))

    @property
    def nodes(self) -> Sequence[PageNode]:
        """Nodes that name a page, least recently used first."""
        return tuple(self._pages)

    def page_of(self, node: PageNode) -> int | None:
        """The page that a node names."""
        return self._pages.get(node)

    def num_usable(self, nodes: Sequence[PageNode]) -> int:
        """How many of a chain's leading nodes end at a place whose whole window is still there: the most of them.

        A row that goes on behind ``n`` pages reads the last ``window - 1`` tokens of them; older ones may be gone.
        """
        size = self._group.layout.tokens_per_page
        usable = run = 0
        for n, node in enumerate(nodes, start=1):
            run = run + 1 if node in self._pages else 0
            if run >= n - self._group.first_page(n * size):
                usable = n
        return usable

    def offer(self, node: PageNode, page: int) -> None:
        """Let a node name ``page``, unless it names one already."""
        if node in self._pages or not node.live:
            return
        self._allocator.retain_one(page)
        self._pages[node] = page
        self._is_named[page] = True

    def touch(self, nodes: Sequence[PageNode]) -> None:
        """Make these nodes' pages the most recently used ones."""
        for node in nodes:
            if node in self._pages:
                self._pages.move_to_end(node)

    def forget(self, node: PageNode) -> Int32:
        """A node left the index; returns the pages that became free."""
        page = self._pages.pop(node, None)
        if page is None:
            return np.zeros(0, np.int32)
        self._is_named[page] = False
        return self._allocator.free([page])

    def evict(self, num_pages: int) -> Int32:
        """Give up at most ``num_pages`` pages that nobody reads; returns them, in the order in which they went."""
        doomed: list[PageNode] = []
        references = self._allocator.references
        for node, page in self._pages.items():
            if len(doomed) == num_pages:
                break
            if references[page] == 1:
                doomed.append(node)
        self.num_evicted += len(doomed)
        return np.concatenate([np.zeros(0, np.int32), *(self.forget(node) for node in doomed)])
