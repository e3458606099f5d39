"""The prefix index against a naive model of it, its eviction order page by page, and its refusals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_common.errors import InvariantError, PageStateError
from kv_control.prefix_index import PageNode, PrefixIndex, hash_page

P = 4


def tokens_of(*pages: int, size: int = P) -> np.ndarray:
    """Whole pages of tokens, each page its number over and over: equal numbers, equal content."""
    return np.repeat(np.array(pages, np.int32), size)


def publish(index: PrefixIndex, *content: int, page: int, namespace: bytes = b"n") -> list[PageNode]:
    """Publish the pages that are missing of a chain, under pages `page`, `page + 1`, ...; returns the chain."""
    size = index.tokens_per_page
    tokens = tokens_of(*content, size=size)
    keys = index.page_keys(namespace, tokens)
    nodes = index.match(keys, tokens)
    for i in range(len(nodes), len(keys)):
        parent = nodes[-1] if nodes else None
        nodes.append(index.publish(parent, keys[i], tokens[i * size : (i + 1) * size], page))
        page += 1
    return nodes


def found(index: PrefixIndex, tokens: Sequence[int], namespace: bytes = b"n") -> list[int]:
    tokens = np.array(tokens, np.int32)
    return [node.page for node in index.match(index.page_keys(namespace, tokens), tokens)]


def counts(index: PrefixIndex) -> tuple[int, int, int, int]:
    return index.num_nodes, index.num_locked, index.num_evictable, index.num_evicted


# --- keys: is it really the same prefix? ---------------------------------------------------------------


NAMESPACES = {
    "base": b"",
    "zero byte": b"\0",
    "adapter A": b"adapter:A",
    "adapter B": b"adapter:B",
    "reloaded": b"adapter:A:1",
    "tenant": b"tenant:A",
    "ab|c": b"ab|c",
    "a|bc": b"a|bc",
    "64 bytes": b"n" * 64,
    "64 bytes and A": b"n" * 64 + b"A",
    "64 bytes and B": b"n" * 64 + b"B",
    "looks like tokens": tokens_of(1).tobytes(),
}


def test_nothing_published_in_one_namespace_is_found_in_another():  # CASES 32-35
    index = PrefixIndex(P)
    for i, namespace in enumerate(NAMESPACES.values()):
        publish(index, 1, 2, page=2 * i, namespace=namespace)
        index.check()
    assert index.num_nodes == 2 * len(NAMESPACES)
    for i, namespace in enumerate(NAMESPACES.values()):
        assert found(index, tokens_of(1, 2), namespace) == [2 * i, 2 * i + 1]
    assert found(index, tokens_of(1, 2), b"never seen") == []


def test_a_namespace_that_equals_a_pages_key_finds_nothing_below_that_page():
    index = PrefixIndex(P)
    first, _ = publish(index, 1, 2, page=0)
    assert found(index, tokens_of(2), first.key) == []
    assert index.publish(None, hash_page(first.key, tokens_of(2).tobytes()), tokens_of(2), 9) is None
    assert sorted(index.pages.tolist()) == [0, 1]


def test_a_page_is_found_only_behind_what_stood_before_it():
    index = PrefixIndex(P)
    publish(index, 1, 2, 3, page=0)
    assert found(index, tokens_of(1, 2, 3)) == [0, 1, 2]
    assert found(index, tokens_of(2, 3)) == []
    assert found(index, tokens_of(1, 3)) == [0]
    assert found(index, tokens_of(9, 2, 3)) == []


def test_a_constant_hash_serves_nobody_another_prompts_pages():  # CASES 37
    index = PrefixIndex(P, hash_page=lambda parent, tokens: b"same for all")
    [node] = publish(index, 1, page=5)
    [key] = index.page_keys(b"n", tokens_of(2))
    assert key == node.key
    assert found(index, tokens_of(2)) == []
    assert index.publish(None, key, tokens_of(2), 6) is None
    assert index.publish(node, key, tokens_of(1), 6) is None  # same tokens, elsewhere in the trie
    assert (found(index, tokens_of(1)), found(index, tokens_of(1, 1))) == ([5], [5])
    assert (index.pages.tolist(), node.num_children) == ([5], 0)
    index.check()


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=23), st.integers(0, 6), st.integers(1, 5))
def test_keys_made_in_pieces_are_the_keys_made_at_once(tokens, num_known, size):
    hashed = []

    def spy(parent: bytes, data: bytes) -> bytes:
        hashed.append(data)
        return hash_page(parent, data)

    index, tokens = PrefixIndex(size, hash_page=spy), np.array(tokens, np.int32)
    whole = index.page_keys(b"n", tokens)
    key, chained = b"n", []
    for i in range(len(tokens) // size):
        key = hash_page(key, b"".join(int(t).to_bytes(4, "little", signed=True) for t in tokens[i * size :][:size]))
        chained.append(key)
    assert whole == chained
    hashed.clear()
    known = whole[:num_known]
    assert index.page_keys(b"n", tokens, known) == whole
    assert len(hashed) == len(whole) - len(known), "known pages are not hashed again"
    assert len(known) == min(num_known, len(whole)), "what was passed in stays as it was"


@pytest.mark.parametrize(("num_tokens", "cached"), [(3, 0), (4, 4), (8, 8), (9, 8), (10, 8), (13, 8)])
def test_what_was_stored_and_what_is_left_make_the_prompt_without_gap_or_overlap(num_tokens, cached):  # CASES 46
    index, prompt = PrefixIndex(P), np.arange(100, 113, dtype=np.int32)
    keys = index.page_keys(b"n", prompt[:9])
    assert len(keys) == 2  # 9 tokens: the ninth belongs to no whole page
    first = index.publish(None, keys[0], prompt[:4], 7)
    index.publish(first, keys[1], prompt[4:8], 3)
    nodes = index.match(index.page_keys(b"n", prompt[:num_tokens]), prompt[:num_tokens])
    stored = b"".join(node.tokens for node in nodes)
    assert len(nodes) * P == cached
    assert stored + prompt[cached:num_tokens].tobytes() == prompt[:num_tokens].tobytes()


# --- publishing ----------------------------------------------------------------------------------------


def test_one_node_names_one_content_and_a_duplicate_page_stays_its_callers():  # CASES 53
    index = PrefixIndex(P)
    first, second = publish(index, 1, 2, page=0)
    assert index.publish(None, first.key, tokens_of(1), 8) is first
    assert index.publish(first, second.key, tokens_of(2), 9) is second
    assert (index.pages.tolist(), first.num_children, counts(index)) == ([0, 1], 1, (2, 0, 2, 0))
    index.check()


def test_token_logprobs_are_kept_once_somebody_has_them_and_never_replaced():
    index = PrefixIndex(2)
    tokens = tokens_of(1, size=2)
    [key] = index.page_keys(b"n", tokens)
    node = index.publish(None, key, tokens, 0)
    assert node.token_logprobs is None
    logprobs = np.array([np.nan, -1.5], np.float32)
    assert index.publish(None, key, tokens, 1, logprobs) is node
    logprobs[:] = 7
    assert (node.token_logprobs.dtype, node.token_logprobs[1]) == (np.float32, -1.5)
    index.publish(None, key, tokens, 2, np.array([0.0, -9.0], np.float32))
    index.publish(None, key, tokens, 2)
    assert np.isnan(node.token_logprobs[0]) and node.token_logprobs[1] == -1.5


@pytest.mark.parametrize("leave", ["evict", "withdraw", "clear"])
def test_what_left_the_index_takes_no_child_no_lock_and_no_touch(leave):  # CASES 57
    index = PrefixIndex(P)
    [node] = publish(index, 1, page=4)
    key = index.page_keys(b"n", tokens_of(1, 2))[1]
    {"evict": lambda: index.evict(1), "withdraw": lambda: index.withdraw(node), "clear": index.clear}[leave]()
    [other] = publish(index, 3, page=5)
    for act in (
        lambda: index.publish(node, key, tokens_of(2), 6),
        lambda: index.lock([other, node]),
        lambda: index.touch([other, node]),
    ):
        with pytest.raises(PageStateError, match="page 4 left the prefix index"):
            act()
    assert not node.live and (other.num_locks, index.pages.tolist()) == (0, [5])
    index.check()


# --- eviction ------------------------------------------------------------------------------------------


def test_leaves_go_first_and_no_child_is_left_without_its_parent():  # CASES 57
    index = PrefixIndex(P)
    publish(index, 1, 2, 3, page=0)
    publish(index, 1, 4, page=10)
    publish(index, 5, page=20)
    order = []
    while index.num_nodes:
        order += index.evict(1).tolist()
        index.check()
    assert order == [2, 1, 10, 0, 20]
    assert counts(index) == (0, 0, 0, 5)


def test_one_call_evicts_in_the_order_of_many_and_at_most_what_was_asked():
    index = PrefixIndex(P)
    publish(index, 1, 2, 3, page=0)
    publish(index, 1, 4, page=10)
    assert index.evict(0).tolist() == [] and index.evict(-1).tolist() == []
    assert index.evict(3).tolist() == [2, 1, 10]
    pages = index.evict(50)
    assert (pages.tolist(), pages.dtype, index.evict(1).tolist()) == ([0], np.int32, [])


def test_the_least_recently_used_leaf_goes_first_and_a_match_is_no_use():
    index = PrefixIndex(P)
    a, _, _ = (publish(index, content, page=content)[0] for content in (1, 2, 3))
    index.touch([a])
    for _ in range(3):
        found(index, tokens_of(2))
    assert index.evict(3).tolist() == [2, 3, 1]


def test_touching_the_end_of_a_chain_keeps_all_that_it_hangs_from():  # CASES 56
    index = PrefixIndex(P)
    chain = publish(index, 1, 2, 3, page=0)
    publish(index, 4, page=10)
    index.touch(chain[2:])
    index.check()
    assert index.evict(4).tolist() == [10, 2, 1, 0]


def test_what_was_published_below_a_locked_chain_counts_as_its_use():  # CASES 56
    index = PrefixIndex(P)
    chain = publish(index, 1, 2, page=0)
    index.lock(chain)
    publish(index, 9, page=30)
    publish(index, 1, 2, 3, page=20)  # names page 20, never locked
    index.check()
    index.unlock(chain)
    index.check()
    assert index.evict(4).tolist() == [30, 20, 1, 0]


def test_a_shared_prefix_hit_every_round_outlives_the_suffixes_whatever_the_pressure():  # CASES 56
    index, capacity = PrefixIndex(1), 6
    prefix = publish(index, 1, 2, page=0)
    gone = []
    for i in range(50):
        index.lock(prefix)
        index.touch(prefix)
        if index.num_nodes == capacity:
            gone += index.evict(1).tolist()
        index.unlock(prefix)
        publish(index, 1, 2, 1000 + i, page=10 + i)
    assert gone == list(range(10, 10 + len(gone))) and len(gone) == 46
    assert found(index, [1, 2]) == [0, 1]


def test_a_locked_chain_is_never_evicted_and_its_unlocked_end_is():  # CASES 48
    index = PrefixIndex(P)
    chain = publish(index, 1, 2, 3, page=0)
    index.lock(chain[:2])
    assert counts(index) == (3, 2, 1, 0)
    assert index.evict(3).tolist() == [2]
    assert counts(index) == (2, 2, 0, 1)
    assert index.unlock(chain[:2]).tolist() == []
    assert index.evict(3).tolist() == [1, 0]


def test_a_demand_beyond_what_is_evictable_can_be_seen_before_anything_goes():  # CASES 50, 52
    index = PrefixIndex(P)
    publish(index, *range(10), page=0)
    chain = publish(index, *range(6), page=90)
    index.lock(chain)
    assert (index.num_evictable, index.num_evicted) == (4, 0)
    assert found(index, tokens_of(*range(10))) == list(range(10))


def test_locks_of_two_readers_are_counted_apart_and_return_to_what_they_were():  # CASES 49
    index = PrefixIndex(P)
    chain = publish(index, 1, 2, 3, page=0)
    index.lock(chain[:2])
    before = [node.num_locks for node in chain], counts(index)
    index.lock(chain)
    index.unlock(chain)
    assert ([node.num_locks for node in chain], counts(index)) == before
    index.check()


def test_unlocking_once_too_often_names_the_page_and_changes_nothing():
    index = PrefixIndex(P)
    chain = publish(index, 1, 2, page=3)
    index.lock(chain[:1])
    with pytest.raises(InvariantError, match="page 4 of the prefix index is unlocked once too often"):
        index.unlock(chain)
    assert ([node.num_locks for node in chain], index.num_locked) == ([1, 0], 1)
    index.unlock(chain[:1])
    with pytest.raises(InvariantError, match="page 3 of the prefix index"):
        index.unlock(chain[:1])


def test_a_chain_of_thousands_of_pages_needs_no_recursion():
    index, depth = PrefixIndex(1), 5_000
    chain = publish(index, *range(depth), page=0)
    index.lock(chain)
    index.touch(chain)
    index.check()
    assert index.unlock(chain).tolist() == []
    assert index.evict(depth - 1).tolist() == list(range(depth - 1, 0, -1))
    publish(index, *range(depth), page=1)
    assert len(index.withdraw(chain[0])) == depth
    del chain
    assert counts(index) == (0, 0, 0, depth - 1)


def test_a_hundred_thousand_suffixes_under_pressure_leave_nothing_behind():
    index, capacity = PrefixIndex(1), 64
    prefix = publish(index, 1, page=0)
    most = 0
    for i in range(100_000):
        if index.num_nodes == capacity:
            assert len(index.evict(1)) == 1
        tokens = np.array([i], np.int32)
        node = index.publish(prefix[0], hash_page(prefix[0].key, tokens.tobytes()), tokens, 1 + i)
        index.lock([*prefix, node])
        index.touch([*prefix, node])
        index.unlock([*prefix, node])
        most = max(most, len(index._queue))
    assert counts(index) == (capacity, 0, capacity, 100_001 - capacity)
    assert most <= 4 * capacity + 65, "stale entries of the eviction queue are swept"
    assert prefix[0].num_children == capacity - 1
    index.check()


def test_hits_alone_do_not_grow_the_eviction_queue():
    index = PrefixIndex(1)
    chain = publish(index, 1, page=0)
    for _ in range(2_000):
        index.touch(chain)
        index.lock(chain)
        index.unlock(chain)
    assert len(index._queue) <= 4 * 1 + 65
    assert index.evict(2).tolist() == [0]


# --- withdrawing ---------------------------------------------------------------------------------------


def test_withdrawn_pages_are_never_found_again_and_only_unread_ones_come_back_at_once():
    index = PrefixIndex(P)
    chain = publish(index, 1, 2, 3, page=0)
    publish(index, 1, 2, 4, page=10)
    publish(index, 1, 5, page=20)
    index.lock(chain)
    assert index.withdraw(chain[1]).tolist() == [10]
    index.check()
    assert [node.live for node in chain] == [True, False, False]
    assert (counts(index), sorted(index.pages.tolist())) == ((4, 3, 1, 0), [0, 1, 2, 20])
    assert found(index, tokens_of(1, 2, 3)) == [0] and found(index, tokens_of(1, 5)) == [0, 20]
    assert index.withdraw(chain[1]).tolist() == []
    assert sorted(index.unlock(chain).tolist()) == [1, 2]
    index.check()
    assert (counts(index), index.evict(9).tolist()) == ((2, 0, 2, 0), [20, 0])


def test_an_orphan_is_given_back_by_its_last_reader_only():
    index = PrefixIndex(P)
    chain = publish(index, 1, page=6)
    index.lock(chain)
    index.lock(chain)
    assert index.withdraw(chain[0]).tolist() == []
    assert index.evict(1).tolist() == [] and index.unlock(chain).tolist() == []
    assert index.unlock(chain).tolist() == [6]
    assert counts(index) == (0, 0, 0, 0)


def test_content_withdrawn_and_still_read_can_be_published_anew():
    index = PrefixIndex(P)
    old = publish(index, 1, page=0)
    index.lock(old)
    index.withdraw(old[0])
    new = publish(index, 1, page=1)
    assert new[0] is not old[0] and found(index, tokens_of(1)) == [1]
    assert sorted(index.pages.tolist()) == [0, 1]
    index.check()
    assert index.unlock(old).tolist() == [0]
    assert found(index, tokens_of(1)) == [1]


def test_withdrawing_the_only_child_makes_its_parent_evictable_again():
    index = PrefixIndex(P)
    first, second = publish(index, 1, 2, page=0)
    assert index.withdraw(second).tolist() == [1]
    index.check()
    assert index.evict(1).tolist() == [0] and not first.live


def test_clearing_leaves_only_what_is_read_and_a_full_index_can_begin_again():  # CASES 41
    index = PrefixIndex(P)
    chain = publish(index, 1, 2, page=0)
    publish(index, 3, page=10)
    index.lock(chain[:1])
    assert sorted(index.clear().tolist()) == [1, 10]
    index.check()
    assert (counts(index), found(index, tokens_of(1)), len(index._queue)) == ((1, 1, 0, 0), [], 0)
    publish(index, 1, page=20)
    assert index.clear().tolist() == [20] and index.unlock(chain[:1]).tolist() == [0]
    assert counts(index) == (0, 0, 0, 0)


# --- the check itself ----------------------------------------------------------------------------------


def break_parent(index, chain):
    chain[0].live = False


def break_parent_entry(index, chain):
    del index._nodes[chain[0].key]


def break_tokens(index, chain):
    chain[1].tokens = tokens_of(9).tobytes()


def break_children(index, chain):
    chain[0].num_children += 1


def break_locks(index, chain):
    index.lock(chain[1:])


def break_recency(index, chain):
    chain[0].last_used = 0


def break_pages(index, chain):
    chain[1].page = chain[0].page


def break_locked_count(index, chain):
    index._num_locked += 1


def break_queue(index, chain):
    index._queue.clear()


def break_orphan(index, chain):
    chain[1].live = False
    index._orphans[id(chain[1])] = index._nodes.pop(chain[1].key)
    chain[0].num_children = 0
    index._enqueue(chain[0])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_parent, "page 1 .* has a parent that is not there"),
        (break_parent_entry, "page 1 .* has a parent that is not there"),
        (break_tokens, "page 1 .* has another key than its chain"),
        (break_children, "page 0 .* miscounts its children"),
        (break_locks, "page 1 .* has more locks than its parent"),
        (break_recency, "page 1 .* was used after its parent"),
        (break_pages, r"two nodes of the prefix index name one page: \[0, 0\]"),
        (break_locked_count, "counts 1 locked pages"),
        (break_queue, "page 1 .* could be evicted and is not queued"),
        (break_orphan, "page 1 .* was withdrawn and is not read"),
    ],
)
def test_the_check_names_what_is_broken(damage, message):  # CASES 54
    index = PrefixIndex(P)
    chain = publish(index, 1, 2, page=0)
    index.check()
    damage(index, chain)
    with pytest.raises(InvariantError, match=message):
        index.check()


# --- any calls, against a model ------------------------------------------------------------------------


class Naive:
    """The index as a dict from content to [page, locks, last use]; every answer by looking at everything.

    Withdrawn content that is still read is kept under its page. A use counts for all ancestors at once.
    """

    def __init__(self):
        self.live: dict[tuple[int, ...], list[int]] = {}
        self.orphans: dict[int, int] = {}  # page: locks
        self.clock = 0

    def use(self, path):
        self.clock += 1
        for n in range(1, len(path) + 1):
            self.live[path[:n]][2] = self.clock

    def matched(self, path):
        n = 0
        while n < len(path) and path[: n + 1] in self.live:
            n += 1
        return [self.live[path[:i]][0] for i in range(1, n + 1)]

    def leaves(self):
        parents = {path[:-1] for path in self.live}
        return [path for path, (_, locks, _) in self.live.items() if not locks and path not in parents]

    def evict(self, n):
        pages = []
        while len(pages) < n and (leaves := self.leaves()):
            pages.append(self.live.pop(min(leaves, key=lambda path: self.live[path][2]))[0])
        return pages

    def withdraw(self, below):
        pages = set()
        for path in [path for path in self.live if path[: len(below)] == below]:
            page, locks, _ = self.live.pop(path)
            if locks:
                self.orphans[page] = locks
            else:
                pages.add(page)
        return pages


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index, self.naive = PrefixIndex(2), Naive()
        self.next_page, self.evicted = 0, 0
        self.held: list[tuple[list[PageNode], list[int]]] = []  # what readers locked: nodes, their pages

    def found(self, path):
        tokens = tokens_of(*path, size=2)
        return self.index.match(self.index.page_keys(b"n", tokens), tokens)

    @rule(path=PATHS)
    def look(self, path):
        before = [(node.page, node.last_used) for node in self.index.nodes()]
        assert [node.page for node in self.found(path)] == self.naive.matched(path)
        assert [(node.page, node.last_used) for node in self.index.nodes()] == before

    @rule(path=PATHS, lock=st.booleans())
    def publish(self, path, lock):
        """A row computes a prompt: what is cached is locked, each further page is published and locked in turn."""
        tokens = tokens_of(*path, size=2)
        keys, nodes = self.index.page_keys(b"n", tokens), self.found(path)
        begin = len(nodes)
        if lock:
            self.index.lock(nodes)
        for i in range(begin, len(path)):
            node = self.index.publish(nodes[-1] if nodes else None, keys[i], tokens[2 * i : 2 * i + 2], self.next_page)
            assert node.page == self.next_page
            nodes.append(node)
            self.naive.live[path[: i + 1]] = [self.next_page, 0, 0]
            self.naive.use(path[: i + 1])
            self.next_page += 1
            if lock:
                self.index.lock([node])
        if lock:
            self.note_locked(nodes, path)

    @rule(path=PATHS)
    def publish_again(self, path):
        nodes = self.found(path)
        if len(nodes) == len(path):
            parent = nodes[-2] if len(nodes) > 1 else None
            again = self.index.publish(parent, nodes[-1].key, tokens_of(path[-1], size=2), self.next_page)
            assert again is nodes[-1]

    @rule(path=PATHS)
    def touch(self, path):
        nodes = self.found(path)
        if nodes:
            self.index.touch(nodes)
            self.naive.use(path[: len(nodes)])

    @rule(path=PATHS)
    def touch_the_end(self, path):
        nodes = self.found(path)
        if nodes:
            self.index.touch(nodes[-1:])
            self.naive.use(path[: len(nodes)])

    @rule(path=PATHS)
    def lock(self, path):
        nodes = self.found(path)
        self.index.lock(nodes)
        self.note_locked(nodes, path)

    def note_locked(self, nodes, path):
        for n in range(1, len(nodes) + 1):
            self.naive.live[path[:n]][1] += 1
        self.held.append((nodes, [node.page for node in nodes]))

    @rule(which=st.integers(0, 20), keep=st.integers(0, 5))
    def unlock(self, which, keep):
        """A reader gives up the end of its chain, or all of it."""
        if not self.held:
            return
        nodes, pages = self.held.pop(which % len(self.held))
        keep = keep if keep < len(nodes) else 0
        if keep:
            self.held.append((nodes[:keep], pages[:keep]))
        gone = set()
        for page in pages[keep:]:
            if page in self.naive.orphans:
                self.naive.orphans[page] -= 1
                if not self.naive.orphans[page]:
                    del self.naive.orphans[page]
                    gone.add(page)
            else:
                next(entry for entry in self.naive.live.values() if entry[0] == page)[1] -= 1
        returned = self.index.unlock(nodes[keep:]).tolist()
        assert set(returned) == gone and len(returned) == len(gone)

    @rule(n=st.integers(0, 6))
    def evict(self, n):
        pages = self.index.evict(n).tolist()
        assert pages == self.naive.evict(n)
        self.evicted += len(pages)

    @rule(path=PATHS)
    def withdraw(self, path):
        nodes = self.found(path)
        if len(nodes) == len(path):
            pages = self.index.withdraw(nodes[-1]).tolist()
            assert set(pages) == self.naive.withdraw(path) and len(set(pages)) == len(pages)

    @rule()
    def clear(self):
        pages = self.index.clear().tolist()
        assert set(pages) == self.naive.withdraw(()) and len(set(pages)) == len(pages)

    @invariant()
    def both_hold_the_same(self):
        self.index.check()
        live = self.naive.live
        assert sorted(self.index.pages.tolist()) == sorted([e[0] for e in live.values()] + list(self.naive.orphans))
        locks = {node.page: node.num_locks for node in self.index.nodes()}
        assert locks == {e[0]: e[1] for e in live.values()} | self.naive.orphans
        num_locked = sum(n > 0 for n in locks.values())
        assert counts(self.index) == (len(locks), num_locked, len(locks) - num_locked, self.evicted)
        assert len(self.index._queue) <= 4 * self.next_page + 65

    def teardown(self):
        """When everybody has left, all that remains goes, in the model's order."""
        while self.held:
            self.unlock(0, 0)
        self.evict(10_000)
        assert self.index.num_nodes == 0


TestAnyCalls = IndexMachine.TestCase
TestAnyCalls.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
