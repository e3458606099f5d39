"""Rows and their pages: handles that go stale, tails that stay empty, an epoch that moves."""

from __future__ import annotations

import numpy as np
import pytest

from kv_common.errors import ConfigError, PageStateError, StaleHandleError
from kv_control.page_map import NO_PAGE, PageMap
from kv_control.plan import RequestHandle


def test_pages_are_kept_in_the_order_in_which_they_were_added():
    page_map = PageMap(2, 4)
    first, second = page_map.acquire(), page_map.acquire()
    page_map.extend(first, [5, 0])
    page_map.extend(second, [3])
    page_map.extend(first, np.array([1], np.int32))
    assert page_map.pages(first).tolist() == [5, 0, 1]
    assert page_map.pages(second).tolist() == [3]
    assert (page_map.num_pages(first), page_map.num_pages(second)) == (3, 1)


def test_rows_run_out_as_none_and_a_released_row_is_the_next_to_be_handed_out():
    page_map = PageMap(2, 1)
    first, second = page_map.acquire(), page_map.acquire()
    assert (first.row, second.row, page_map.acquire(), page_map.num_rows_free) == (0, 1, None, 0)
    page_map.release(first)
    assert page_map.acquire().row == 0


def test_the_tail_of_a_reused_row_holds_no_page_of_its_last_owner():  # CASES 10
    page_map = PageMap(1, 6)
    page_map.extend(page_map.acquire(), [5, 4, 3, 2, 1])
    page_map.release(RequestHandle(0, 1))
    page_map.extend(page_map.acquire(), [0])
    assert page_map.table[0].tolist() == [0] + [NO_PAGE] * 5


def test_truncating_returns_the_pages_behind_and_empties_their_entries():
    page_map = PageMap(1, 4)
    handle = page_map.acquire()
    page_map.extend(handle, [7, 8, 9])
    assert page_map.truncate(handle, 1).tolist() == [8, 9]
    assert page_map.table[0].tolist() == [7, NO_PAGE, NO_PAGE, NO_PAGE]
    assert page_map.truncate(handle, 3).tolist() == []
    assert page_map.num_pages(handle) == 1


@pytest.mark.parametrize(
    "use",
    [
        PageMap.release,
        PageMap.pages,
        PageMap.num_pages,
        lambda page_map, handle: page_map.extend(handle, [1]),
        lambda page_map, handle: page_map.truncate(handle, 0),
        lambda page_map, handle: page_map.rows_of([RequestHandle(1, 1), handle]),
    ],
)
@pytest.mark.parametrize("reused", [False, True])
def test_a_released_handle_is_refused_everywhere_and_its_rows_next_owner_is_unharmed(use, reused):  # CASES 4
    page_map = PageMap(2, 3)
    stale, _neighbour = page_map.acquire(), page_map.acquire()
    page_map.extend(stale, [4])
    page_map.release(stale)
    owner = page_map.acquire() if reused else None
    if owner is not None:
        page_map.extend(owner, [2])
    epoch = page_map.block_epoch
    with pytest.raises(StaleHandleError, match="row 0, epoch 1: this request has been released"):
        use(page_map, stale)
    assert not page_map.is_live(stale)
    assert page_map.block_epoch == epoch
    assert owner is None or page_map.pages(owner).tolist() == [2]


@pytest.mark.parametrize("forged", [RequestHandle(0, 0), RequestHandle(-1, 1), RequestHandle(2, 1)])
def test_a_handle_nobody_was_given_is_refused(forged):
    page_map = PageMap(2, 3)
    page_map.acquire(), page_map.acquire()
    with pytest.raises(StaleHandleError):
        page_map.pages(forged)
    with pytest.raises(StaleHandleError):
        page_map.rows_of([forged])


def test_the_block_epoch_moves_with_every_page_and_stands_still_for_a_look():  # CASES 143
    page_map = PageMap(2, 3)
    seen = [page_map.block_epoch]

    def moved() -> bool:
        seen.append(page_map.block_epoch)
        return seen[-1] > seen[-2]

    handle = page_map.acquire()
    assert moved()
    page_map.extend(handle, [1, 2])
    assert moved()
    page_map.pages(handle), page_map.num_pages(handle), page_map.table, page_map.rows_of([handle])
    page_map.extend(handle, [])
    assert not moved()
    page_map.truncate(handle, 1)
    assert moved()
    page_map.release(handle)
    assert moved()


def test_a_row_beyond_its_pages_is_refused_and_nothing_changes():
    page_map = PageMap(2, 2)
    first, second = page_map.acquire(), page_map.acquire()
    page_map.extend(second, [9])
    with pytest.raises(PageStateError, match="row 1 would hold 3 pages, a request holds at most 2"):
        page_map.extend_rows(np.array([0, 1]), np.array([1, 2]), np.array([4, 5, 6], np.int32))
    assert (page_map.pages(first).tolist(), page_map.pages(second).tolist()) == ([], [9])


def test_many_rows_grow_and_are_read_as_one_by_one():
    together, one_by_one = PageMap(3, 4), PageMap(3, 4)
    for page_map in (together, one_by_one):
        for pages in ([10], [], [20, 21]):
            page_map.extend(page_map.acquire(), pages)
    together.extend_rows(np.array([2, 0, 1]), np.array([1, 3, 0]), np.array([22, 11, 12, 13], np.int32))
    one_by_one.extend(RequestHandle(2, 1), [22])
    one_by_one.extend(RequestHandle(0, 1), [11, 12, 13])
    assert together.table.tolist() == one_by_one.table.tolist()
    read = together.first_pages(np.array([2, 1, 0]), np.array([2, 0, 4]))
    assert read.tolist() == [20, 21, 10, 11, 12, 13]


def test_reading_more_pages_than_a_row_holds_is_refused_rather_than_a_sentinel_returned():
    page_map = PageMap(1, 4)
    page_map.extend(page_map.acquire(), [3])
    with pytest.raises(PageStateError, match="row 0 holds 1 pages, 2 are needed"):
        page_map.first_pages(np.array([0]), np.array([2]))


def test_a_map_of_256_requests_of_32k_tokens_takes_two_megabytes_where_a_token_map_takes_33():
    page_map = PageMap(256, 32 * 1024 // 16)
    assert 2.0e6 < page_map.nbytes < 2.2e6
    assert 256 * 32 * 1024 * 4 > 33e6


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_a_map_without_rows_or_pages_is_refused(sizes):
    with pytest.raises(ConfigError, match="at least 1"):
        PageMap(*sizes)
