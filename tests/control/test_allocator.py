"""The allocator against a set of free pages, and its refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_common.errors import ConfigError, PageStateError
from kv_control.allocator import PageAllocator


def snapshot(pool: PageAllocator) -> tuple:
    return pool.free_pages.tolist(), pool.references.tolist(), pool.dirty.tolist()


def test_a_fresh_pool_hands_out_every_page_from_zero_up():  # CASES 15, 16
    pool = PageAllocator(5)
    assert pool.allocate(2).tolist() == [0, 1]
    assert pool.allocate(3).tolist() == [2, 3, 4]
    assert (pool.num_free, pool.num_held) == (0, 5)


def test_freed_pages_come_back_first_the_latest_call_first_and_in_that_calls_order():
    pool = PageAllocator(6)
    pool.allocate(4)
    pool.free([3, 1])
    pool.free([2])
    assert pool.free_pages.tolist() == [2, 3, 1, 4, 5]
    assert pool.allocate(5).tolist() == [2, 3, 1, 4, 5]


def test_what_was_handed_out_does_not_change_when_other_pages_come_back():
    pool = PageAllocator(4)
    held, other = pool.allocate(2), pool.allocate(2)
    freed = pool.free([0, 3])
    pool.free([2, 1])
    assert (held.tolist(), other.tolist(), freed.tolist()) == ([0, 1], [2, 3], [0, 3])


def test_no_room_is_none_and_changes_nothing():
    pool = PageAllocator(3)
    pool.allocate(1)
    before = snapshot(pool)
    assert pool.allocate(3) is None
    assert snapshot(pool) == before
    assert pool.allocate(0).tolist() == []
    assert snapshot(pool) == before


def test_a_page_listed_twice_in_one_call_is_freed_once():  # CASES 5
    pool = PageAllocator(8)
    pool.allocate(8)
    assert pool.free([7, 7]).tolist() == [7]
    assert pool.num_free == 1
    assert pool.allocate(1).tolist() == [7]
    assert pool.allocate(1) is None


def test_pages_listed_twice_keep_the_order_in_which_they_were_first_named():
    pool = PageAllocator(4)
    pool.allocate(4)
    assert pool.free([3, 0, 3, 2, 0]).tolist() == [3, 0, 2]


@pytest.mark.parametrize("act", ["free", "retain"])
@pytest.mark.parametrize(
    ("pages", "message"),
    [([0, 2], "page 2 is already free"), ([0, -1], r"page -1: pages are 0\.\.2"), ([0, 3], "page 3: pages are")],
)
def test_freeing_or_retaining_what_is_not_held_names_the_page_and_changes_nothing(act, pages, message):
    pool = PageAllocator(3)
    pool.allocate(2)
    before = snapshot(pool)
    with pytest.raises(PageStateError, match=message):
        getattr(pool, act)(pages)
    assert snapshot(pool) == before


def test_freeing_a_page_twice_names_the_page():  # CASES 4
    pool = PageAllocator(4)
    [page] = pool.allocate(1)
    pool.free([page])
    with pytest.raises(PageStateError, match=f"page {page} is already free"):
        pool.free([page])


def test_a_retained_page_stays_held_and_clean_until_its_last_holder_lets_go():
    pool = PageAllocator(3)
    pool.allocate(2)
    pool.retain([1])
    assert pool.free([0, 1]).tolist() == [0]
    assert (pool.num_free, pool.dirty.tolist()) == (2, [True, False, False])
    assert pool.free([1]).tolist() == [1]
    assert pool.dirty.tolist() == [True, True, False]
    with pytest.raises(PageStateError, match="page 1 is already free"):
        pool.free([1])


def test_a_freed_page_is_dirty_through_every_new_holder_until_the_scrub_is_confirmed():  # CASES 12
    pool = PageAllocator(2)
    pool.allocate(2)
    assert pool.dirty_among([0, 1]).tolist() == []
    pool.free([1])
    assert pool.allocate(1).tolist() == [1]
    assert pool.dirty_among([1, 0]).tolist() == [1]
    pool.confirm_scrubbed([1])
    assert pool.dirty_among([0, 1]).tolist() == []
    pool.free([1])
    assert pool.dirty_among([1]).tolist() == [1]


def test_the_sentinel_is_neither_read_nor_scrubbed_as_the_last_page():  # CASES 6, 17
    pool = PageAllocator(3)
    pool.free(pool.allocate(3))
    with pytest.raises(PageStateError, match="cannot scrub page -1"):
        pool.confirm_scrubbed([-1])
    with pytest.raises(PageStateError, match="cannot read page -1"):
        pool.dirty_among([-1])
    assert pool.dirty.tolist() == [True] * 3


@pytest.mark.parametrize("num_pages", [0, -1])
def test_a_pool_without_pages_is_refused(num_pages):
    with pytest.raises(ConfigError, match=f"paged_num_pages={num_pages}"):
        PageAllocator(num_pages)


def test_a_negative_demand_is_refused():
    with pytest.raises(PageStateError, match="-1 pages"):
        PageAllocator(2).allocate(-1)


def test_what_it_shows_cannot_be_written_through():
    pool = PageAllocator(2)
    for view in (pool.references, pool.dirty):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    pool.free_pages[0] = 1
    assert pool.allocate(2).tolist() == [0, 1]


@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from("aafrsFFRR"), st.lists(st.integers(-1, 12), max_size=5))))
def test_every_page_is_free_or_held_after_any_calls(num_pages, calls):
    """Capital letters name held pages only, so that pages of several holders come up."""
    pool = PageAllocator(num_pages)
    holds = dict.fromkeys(range(num_pages), 0)  # the model: holders per page
    dirty: set[int] = set()
    for call, pages in calls:
        if call in "FR":
            held = [page for page, holders in holds.items() if holders]
            call, pages = call.lower(), [held[i % len(held)] for i in pages if held]
        legal = all(0 <= page < num_pages for page in pages)
        if call == "a":
            got = pool.allocate(len(pages))
            free_before = [page for page, holders in holds.items() if holders == 0]
            if len(pages) > len(free_before):
                assert got is None
                continue
            assert len(set(got.tolist())) == len(pages) and set(got.tolist()) <= set(free_before)
            holds.update(dict.fromkeys(got.tolist(), 1))
        elif call == "s" and legal:
            pool.confirm_scrubbed(pages)
            dirty -= set(pages)
        elif call in "fr" and legal and all(holds[page] for page in pages):
            (pool.free if call == "f" else pool.retain)(pages)
            for page in set(pages):
                holds[page] += -1 if call == "f" else 1
                if holds[page] == 0:
                    dirty.add(page)
        else:
            with pytest.raises(PageStateError):
                {"f": pool.free, "r": pool.retain, "s": pool.confirm_scrubbed}[call](pages)
        assert pool.references.tolist() == list(holds.values())
        assert sorted(pool.free_pages.tolist()) == [page for page, holders in holds.items() if not holders]
        assert np.flatnonzero(pool.dirty).tolist() == sorted(dirty)
        assert pool.num_free + pool.num_held == num_pages
