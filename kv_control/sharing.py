"""Pages that more than one reader holds: found in the prefix index, or taken over from a request's own group.

For:        adopting, forking, publishing and evicting pages, with every hold on them counted in one place.
Not for:    deciding who shares with whom (admission.py) or the trie itself (prefix_index.py).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kv_common.pages import full_pages
from kv_control.allocator import PageAllocator
from kv_control.page_copies import PageCopies
from kv_control.page_map import PageMap
from kv_control.plan import RequestHandle
from kv_control.prefix_index import PageNode, PrefixIndex

Int32 = NDArray[np.int32]
_NO_PAGES = np.zeros(0, np.int32)


class PageSharing:
    """Holds on shared pages, beside those that rows have in the page map.

    A page's holders are: each row that lists it, the prefix index where a node names it, and a pending copy that
    reads it. Every row remembers the chain of nodes that name its leading pages and keeps it locked: so whoever locks
    a node locks its parents, and what is locked is read.

    Args:
      index: the prefix index; None where it is switched off (groups still share).
    """

    def __init__(
        self, allocator: PageAllocator, page_map: PageMap, tokens_per_page: int, index: PrefixIndex | None
    ) -> None:
        self.index = index
        self.copies = PageCopies(allocator)
        self._allocator = allocator
        self._page_map = page_map
        self._tokens_per_page = tokens_per_page
        self._paths: dict[int, list[PageNode]] = {}
        self._num_adopted: dict[int, int] = {}
        self._closed: set[int] = set()  # rows that offer no more pages

    @property
    def num_evictable(self) -> int:
        """Pages that only the index holds and that it can give up."""
        return 0 if self.index is None else self.index.num_evictable

    def path(self, row: int) -> Sequence[PageNode]:
        """The locked nodes of a row's leading pages."""
        return self._paths.get(row, ())

    def num_offered(self, row: int) -> int | None:
        """Leading pages of a row that the index has been offered; None where the row offers no more."""
        return None if self.index is None or row in self._closed else len(self.path(row))

    # --- taking pages over -------------------------------------------------------------------------------

    def adopt(self, handle: RequestHandle, nodes: Sequence[PageNode]) -> None:
        """Give a row without pages those of a chain of nodes."""
        if self.index is None or not nodes:
            return
        self.index.lock(nodes)
        self.index.touch(nodes)
        pages = np.array([node.page for node in nodes], np.int32)
        self._allocator.retain(pages)
        self._page_map.extend(handle, pages)
        self._paths[handle.row] = list(nodes)
        self._num_adopted[handle.row] = len(nodes)

    def fork(self, source: RequestHandle, target: RequestHandle, num_tokens: int) -> bool:
        """Give ``target``, which has no pages, the first ``num_tokens`` tokens of ``source``: whole pages are
        shared, a partial last one is copied before the next step.

        Returns:
          False when there is no page for the copy; then nothing has changed.
        """
        whole = full_pages(num_tokens, self._tokens_per_page)
        partial = num_tokens > whole * self._tokens_per_page
        copy = self.allocate(int(partial))
        if copy is None:
            return False
        pages = self._page_map.pages(source)
        self._allocator.retain(pages[:whole])
        self._page_map.extend(target, np.concatenate([pages[:whole], copy]))
        if partial:
            self.copies.add(int(pages[whole]), int(copy[0]), target.row)
        path = list(self.path(source.row)[:whole])
        if source.row in self._closed or not all(node.live for node in path):
            self._closed.add(target.row)  # withdrawn pages: neither row offers them again
        elif self.index is not None and path:
            self.index.lock(path)
            self._paths[target.row] = path
            self._num_adopted[target.row] = len(path)
        return True

    # --- the index ---------------------------------------------------------------------------------------

    def publish(
        self,
        handle: RequestHandle,
        key: bytes,
        tokens: Int32,
        token_logprobs: NDArray[np.float32] | None,
    ) -> bool:
        """Offer the row's next page, whose every slot is written, to the index. Where the index has a page of this
        content already, the row reads that one from now on and gives up its own.

        Args:
          tokens: int32 ``[tokens_per_page]``. token_logprobs: float32 beside them, where all are known.

        Returns:
          False when the chain ends here for this row: its parent was withdrawn, or another content has its key.
        """
        if self.index is None or handle.row in self._closed:
            return False
        path = self._paths.setdefault(handle.row, [])
        page = self._page_map.page_at(handle.row, len(path))
        parent = path[-1] if path else None
        if parent is not None and not parent.live:
            self._closed.add(handle.row)
            return False
        num_nodes = self.index.num_nodes
        node = self.index.publish(parent, key, tokens, page, token_logprobs)
        if node is None:
            self._closed.add(handle.row)
            return False
        if self.index.num_nodes > num_nodes:
            self._allocator.retain_one(page)
        elif node.page != page:
            self._allocator.retain_one(node.page)
            self._page_map.replace(handle, len(path), node.page)
            self._allocator.free([page])
        self.index.lock([node])
        path.append(node)
        return True

    def withdraw(self, row: int) -> Int32:
        """Take back what a row published (its K/V turned out to be bad); returns the pages that became free."""
        published = self._paths.get(row, [])[self._num_adopted.get(row, 0) :]
        if self.index is None or not published:
            return _NO_PAGES
        return self._allocator.free(self.index.withdraw(published[0]))

    def leave(self, row: int) -> Int32:
        """A row ends: its locks and its pending copies go; returns the pages that became free.

        The row's own pages are the page map's to give back.
        """
        freed = [self.copies.drop(row)]
        self._closed.discard(row)
        path = self._paths.pop(row, [])
        self._num_adopted.pop(row, None)
        if self.index is not None and path:
            self.index.touch([node for node in path if node.live])
            freed.append(self._allocator.free(self.index.unlock(path)))
        return np.concatenate(freed)

    def close(self, rows: Iterable[int]) -> None:
        """Let rows offer no more pages."""
        self._closed.update(rows)

    def clear(self) -> tuple[int, Int32]:
        """Empty the index. Returns how many pages it named, and those of them (int32) that became free."""
        if self.index is None:
            return 0, _NO_PAGES
        cleared = self.index.num_nodes
        return cleared, self._allocator.free(self.index.clear())

    # --- room --------------------------------------------------------------------------------------------

    def allocate(self, n: int) -> Int32 | None:
        """``n`` pages, evicting the least recently used cached ones where too few are free.

        Returns:
          None when free and evictable pages together are fewer; then nothing was evicted.
        """
        missing = n - self._allocator.num_free
        if missing > 0 and self.index is not None and missing <= self.index.num_evictable:
            self._allocator.free(self.index.evict(missing))
        return self._allocator.allocate(n)
