"""Which pages of the pool already hold which prefix: a trie of whole pages, least recently used leaves first to go.

For:        finding, naming and giving up cached pages. Each node counts as one hold on its page.
Not for:    reference counts and page tables (allocator, page_map), or who may share (admission).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import InvariantError, PageStateError

Int32 = NDArray[np.int32]

_NO_PAGES = np.zeros(0, np.int32)
_STALE_ENTRIES = 4
"""Entries of the eviction queue per node, beyond which those that no longer mean anything are swept out."""


def hash_page(parent: bytes, tokens: bytes) -> bytes:
    """The key of a page, 32 bytes: cryptographic, chained from its parent's (at the root: the namespace's digest).

    Tokens are compared on a hit, namespaces are not: nothing but this key keeps tenants apart, so all of ``parent``
    goes in, behind its length.
    """
    return hashlib.blake2b(len(parent).to_bytes(8, "little") + parent + tokens, digest_size=32).digest()


class PageNode:
    """One cached page.

    Attributes:
      key: chained hash of everything up to and with this page. parent: None at a root.
      page: the page of the pool that holds it.
      tokens: its token ids, int32 little-endian.
      num_children: nodes below it. num_locks: rows that read it; never fewer than of any child.
      last_used: the index's counter when it or something below it was last used. Never less than an unlocked child's;
        between two locked nodes it may lag, and catches up when the child is unlocked.
      token_logprobs: float32 ``[tokens_per_page]``, each token's logprob given all before it, once somebody computed
        them (NaN only at position 0); None before.
      live: whether it can be found; False once evicted or withdrawn.
    """

    __slots__ = (
        "key",
        "last_used",
        "live",
        "num_children",
        "num_locks",
        "page",
        "parent",
        "token_logprobs",
        "tokens",
    )

    def __init__(self, key: bytes, parent: PageNode | None, page: int, tokens: bytes, last_used: int) -> None:
        self.key = key
        self.parent = parent
        self.page = page
        self.tokens = tokens
        self.num_children = 0
        self.num_locks = 0
        self.last_used = last_used
        self.token_logprobs: NDArray[np.float32] | None = None
        self.live = True


class PrefixIndex:
    """A trie whose nodes are whole pages, found by chained keys.

    A row locks the whole chain that describes its pages, so an unlocked node has only unlocked nodes below it: every
    unlocked node can be evicted, leaves first.

    Args:
      tokens_per_page: tokens of one page.
      hash_page: key of a page from its parent's key and its token bytes; another one only in tests.

    Attributes:
      on_forget: called with each node that can no longer be found, for whoever keeps more about nodes; None: nobody.

    >>> index = PrefixIndex(2)
    >>> prompt = np.array([5, 6, 7, 8, 9], np.int32)
    >>> keys = index.page_keys(b"namespace", prompt)
    >>> first = index.publish(None, keys[0], prompt[:2], page=3)
    >>> [node.page for node in index.match(keys, prompt)], index.match(index.page_keys(b"other", prompt), prompt)
    ([3], [])
    >>> index.evict(5).tolist(), first.live
    ([3], False)
    """

    def __init__(self, tokens_per_page: int, *, hash_page: Callable[[bytes, bytes], bytes] = hash_page) -> None:
        self.tokens_per_page = tokens_per_page
        self.on_forget: Callable[[PageNode], None] | None = None
        self._hash_page = hash_page
        self._nodes: dict[bytes, PageNode] = {}
        self._orphans: dict[int, PageNode] = {}  # withdrawn, still locked; by identity
        self._queue: list[tuple[int, int, PageNode]] = []  # unlocked leaves by recency; may hold stale entries
        self._num_locked = 0
        self._num_evicted = 0
        self._clock = 0
        self._entry = 0

    # --- counts ------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """Pages that the index holds, those withdrawn but still read included."""
        return len(self._nodes) + len(self._orphans)

    @property
    def num_locked(self) -> int:
        """Nodes that some row reads."""
        return self._num_locked

    @property
    def num_evictable(self) -> int:
        """Nodes that ``evict`` can give up."""
        return self.num_nodes - self._num_locked

    @property
    def num_evicted(self) -> int:
        """Pages given up by ``evict`` since the index was made."""
        return self._num_evicted

    @property
    def pages(self) -> Int32:
        """int32 ``[num_nodes]``, the pages that the index holds."""
        return np.array([node.page for node in self.nodes()], np.int32)

    def nodes(self) -> Iterator[PageNode]:
        """All nodes, those withdrawn but still read included."""
        yield from self._nodes.values()
        yield from self._orphans.values()

    # --- finding -----------------------------------------------------------------------------------------

    def page_keys(self, namespace: bytes, tokens: Int32, known: Sequence[bytes] = ()) -> list[bytes]:
        """The keys of all whole pages of ``tokens``, chained from the namespace's digest.

        Args:
          known: the keys of the first pages, if they were made before.
        """
        size = self.tokens_per_page
        num_pages = len(tokens) // size
        if num_pages <= len(known):
            return list(known[:num_pages])
        keys = list(known)
        data = np.ascontiguousarray(tokens[len(known) * size : num_pages * size], "<i4").tobytes()
        key = keys[-1] if keys else namespace
        for begin in range(0, len(data), 4 * size):
            key = self._hash_page(key, data[begin : begin + 4 * size])
            keys.append(key)
        return keys

    def match(self, keys: Sequence[bytes], tokens: Int32) -> list[PageNode]:
        """The longest chain of nodes that holds the beginning of ``tokens``; recency stays as it is.

        Args:
          keys: of the whole pages of ``tokens``. Equal keys are not enough: the tokens are compared too.
        """
        size, found = 4 * self.tokens_per_page, []
        parent: PageNode | None = None
        data = b""
        for i, key in enumerate(keys):
            node = self._nodes.get(key)
            if node is None:
                break
            if not data:
                data = np.ascontiguousarray(tokens[: len(keys) * self.tokens_per_page], "<i4").tobytes()
            if node.parent is not parent or node.tokens != data[i * size : (i + 1) * size]:
                break
            found.append(node)
            parent = node
        return found

    def touch(self, nodes: Sequence[PageNode]) -> None:
        """Make a chain, and all that it hangs from, the most recently used one.

        Raises:
          PageStateError: a node was evicted or withdrawn; nothing has changed.
        """
        _require_live(nodes, "touched")
        self._clock += 1
        for node in nodes:
            above: PageNode | None = node
            while above is not None and above.last_used != self._clock:
                above.last_used = self._clock
                above = above.parent
            self._enqueue(node)

    # --- locks -------------------------------------------------------------------------------------------

    def lock(self, nodes: Sequence[PageNode]) -> None:
        """Keep a chain, or its extension, from being evicted.

        Raises:
          PageStateError: a node was evicted or withdrawn; nothing has changed.
        """
        _require_live(nodes, "locked")
        for node in nodes:
            self._num_locked += node.num_locks == 0
            node.num_locks += 1

    def unlock(self, nodes: Sequence[PageNode]) -> Int32:
        """Give up a lock on each of a chain.

        Returns:
          int32, pages of withdrawn nodes that nobody reads any more: the index holds them no longer.

        Raises:
          InvariantError: a node was not locked; nothing has changed.
        """
        for node in nodes:
            _require(node.num_locks > 0, node, "is unlocked once too often")
        dropped = []
        for node in reversed(nodes):
            node.num_locks -= 1
            if node.num_locks == 0:
                self._num_locked -= 1
                if node.parent is not None:  # still locked itself: `publish` stops below it
                    node.parent.last_used = max(node.parent.last_used, node.last_used)
                if self._orphans.pop(id(node), None) is not None:
                    dropped.append(node.page)
                else:
                    self._enqueue(node)
        return np.array(dropped, np.int32)

    # --- coming and going --------------------------------------------------------------------------------

    def publish(
        self,
        parent: PageNode | None,
        key: bytes,
        tokens: Int32,
        page: int,
        token_logprobs: NDArray[np.float32] | None = None,
    ) -> PageNode | None:
        """Name ``page`` as the one that holds ``tokens`` behind ``parent``.

        Returns:
          The new node; or the one that had this content before, which names another page (the caller's is then
          nobody else's). Either keeps ``token_logprobs`` where it had none. None where another content has the key.

        Raises:
          PageStateError: ``parent`` was evicted or withdrawn.
        """
        if parent is not None and not parent.live:
            raise PageStateError(f"page {parent.page} left the prefix index: nothing can be published below it")
        data = np.ascontiguousarray(tokens, "<i4").tobytes()
        node = self._nodes.get(key)
        if node is not None and (node.parent is not parent or node.tokens != data):
            return None
        if node is None:
            self._clock += 1
            node = self._nodes[key] = PageNode(key, parent, page, data, self._clock)
            above = parent
            while above is not None:
                above.last_used = self._clock
                if above.num_locks:  # `unlock` takes it further up: a long chain is not walked once per page
                    break
                above = above.parent
            if parent is not None:
                parent.num_children += 1
            self._enqueue(node)
        if node.token_logprobs is None and token_logprobs is not None:
            node.token_logprobs = np.array(token_logprobs, np.float32)
        return node

    def evict(self, num_pages: int) -> Int32:
        """Give up at most ``num_pages`` unlocked pages: leaves, least recently used first.

        Returns:
          int32, their pages in the order in which they went.
        """
        pages: list[int] = []
        while len(pages) < num_pages and self._queue:
            last_used, _, node = heapq.heappop(self._queue)
            if last_used == node.last_used and self._is_leaf(node):
                pages.append(self._drop(node))
                self._num_evicted += 1
        return np.array(pages, np.int32)

    def withdraw(self, node: PageNode) -> Int32:
        """Let a node and everything below it never be found again: their K/V turned out to be bad.

        Returns:
          int32, the pages of those that nobody reads. The others' come back from ``unlock``.
        """
        if not node.live:
            return _NO_PAGES
        below = {id(node)}
        doomed = [node]
        for other in self._nodes.values():  # in the order of publishing: a parent comes before its children
            if other.parent is not None and id(other.parent) in below:
                below.add(id(other))
                doomed.append(other)
        return self._forget(doomed)

    def clear(self) -> Int32:
        """``withdraw`` of everything."""
        self._queue.clear()
        return self._forget(list(self._nodes.values()))

    def _forget(self, nodes: Sequence[PageNode]) -> Int32:
        """Drop nodes whose subtrees are all among them."""
        pages = []
        for node in nodes:
            node.live = False
            del self._nodes[node.key]
            if self.on_forget is not None:
                self.on_forget(node)
            if node.num_locks:
                self._orphans[id(node)] = node
            else:
                pages.append(node.page)
        for node in nodes:
            if node.parent is not None and node.parent.live:
                node.parent.num_children -= 1
                self._enqueue(node.parent)
        return np.array(pages, np.int32)

    def _drop(self, leaf: PageNode) -> int:
        leaf.live = False
        del self._nodes[leaf.key]
        if self.on_forget is not None:
            self.on_forget(leaf)
        if leaf.parent is not None:
            leaf.parent.num_children -= 1
            self._enqueue(leaf.parent)
        return leaf.page

    def _is_leaf(self, node: PageNode) -> bool:
        return node.live and not node.num_locks and not node.num_children

    def _enqueue(self, node: PageNode) -> None:
        """Put an unlocked leaf where ``evict`` finds it; entries that its later use outdated are swept in time."""
        if not self._is_leaf(node):
            return
        self._entry += 1
        heapq.heappush(self._queue, (node.last_used, self._entry, node))
        if len(self._queue) > _STALE_ENTRIES * len(self._nodes) + 64:
            latest = {id(one): (used, entry, one) for used, entry, one in self._queue if used == one.last_used}
            self._queue = [item for item in latest.values() if self._is_leaf(item[2])]
            heapq.heapify(self._queue)

    # --- laws --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify the tree's laws.

        Raises:
          InvariantError: one does not hold; the message names the pages.
        """
        children: dict[int, int] = {}
        for node in self._nodes.values():
            above = node.parent
            if above is None:
                continue
            children[id(above)] = children.get(id(above), 0) + 1
            _require(above.live and self._nodes.get(above.key) is above, node, "has a parent that is not there")
            _require(node.num_locks > 0 or above.last_used >= node.last_used, node, "was used after its parent")
            _require(self._hash_page(above.key, node.tokens) == node.key, node, "has another key than its chain")
        for node in self.nodes():
            _require(
                node.parent is None or node.parent.num_locks >= node.num_locks, node, "has more locks than its parent"
            )
        queued = {id(node) for used, _, node in self._queue if used == node.last_used}
        for key, node in self._nodes.items():
            _require(node.live and node.key == key, node, "is listed and cannot be found")
            _require(node.num_children == children.get(id(node), 0), node, "miscounts its children")
            _require(not self._is_leaf(node) or id(node) in queued, node, "could be evicted and is not queued")
        for node in self._orphans.values():
            _require(not node.live and node.num_locks > 0, node, "was withdrawn and is not read")
        if self._num_locked != sum(node.num_locks > 0 for node in self.nodes()):
            raise InvariantError(f"the prefix index counts {self._num_locked} locked pages, which is wrong")
        pages = [node.page for node in self.nodes()]
        if len(set(pages)) < len(pages):
            raise InvariantError(f"two nodes of the prefix index name one page: {sorted(pages)}")


def _require_live(nodes: Sequence[PageNode], verb: str) -> None:
    for node in nodes:
        if not node.live:
            raise PageStateError(f"page {node.page} left the prefix index: it cannot be {verb}")


def _require(holds: bool, node: PageNode, law: str) -> None:
    if not holds:
        raise InvariantError(f"page {node.page} of the prefix index {law}")
