"""Each law is broken by hand once, and the check names what broke it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kv_common.errors import InvariantError
from kv_control.invariants import check_invariants
from kv_control.page_map import NO_PAGE
from kv_control.plan import RequestHandle
from kv_control.request import RequestStatus
from tests.strategies import Loop, control_of, loop_of, request_of, submit_all


@pytest.fixture
def loop() -> Loop:
    """Pages 0-2 with request 0 (9 tokens), 3 with request 1, 4-7 free; requests 2 and 3 wait."""
    loop = loop_of(control_of(8, max_num_seqs=2))
    submit_all(loop.scheduler, [request_of(i, length, max_tokens=4) for i, length in enumerate((9, 3, 1, 1))])
    loop.step()
    check_invariants(loop.engine.control, loop.scheduler, plan=loop.engine.plans[-1])
    return loop


def lose_a_free_page(control):
    control.allocator._num_free -= 1
    return r"pages are neither free nor held: \[4\]"


def free_a_held_page(control):
    control.allocator._free[control.allocator._num_free] = 1
    control.allocator._num_free += 1
    return r"pages are free and held at once: \[1\]"


def list_a_free_page_twice(control):
    control.allocator._free[0] = 6
    return r"pages are in the free list twice: \[6\]"


def count_a_holder_too_many(control):
    control.allocator.retain([2])
    return r"pages have other holders than the allocator counts: \[2\]"


def give_a_page_two_owners(control):
    control.page_map._table[1, 0] = 0
    return r"pages have other holders than the allocator counts: \[0, 3\]"


def put_a_sentinel_in_a_row(control):
    control.page_map._table[0, 1] = NO_PAGE
    control.allocator.free([1])
    return r"rows hold something that is no page: \[0\]"


def leave_a_page_behind_the_end(control):
    control.page_map._counts[0] -= 1
    return r"rows keep pages behind their end: \[0\]"


def put_another_sentinel_behind_the_end(control):
    control.page_map._table[1, 3] = 8
    return r"rows keep pages behind their end: \[1\]"


def release_a_row_but_not_its_pages(control):
    control.page_map._epochs[1] += 1
    return r"rows without a request hold pages: \[1\]"


def leave_tokens_in_an_empty_row(control):
    control.release(RequestHandle(1, 1))
    control._written[1] = 1
    return r"rows without a request have tokens written: \[1\]"


def write_beyond_the_pages(control):
    control._written[0] = 13
    return r"rows have more tokens written than their pages hold: \[0\]"


def hold_a_page_twice(control):
    control.page_map._table[0, 1] = 0
    control.allocator.free([1])
    control.allocator.retain([0])
    return r"rows hold a page twice: \[0\]"


BREAKS = [
    lose_a_free_page,
    free_a_held_page,
    list_a_free_page_twice,
    count_a_holder_too_many,
    give_a_page_two_owners,
    put_a_sentinel_in_a_row,
    leave_a_page_behind_the_end,
    put_another_sentinel_behind_the_end,
    release_a_row_but_not_its_pages,
    leave_tokens_in_an_empty_row,
    write_beyond_the_pages,
    hold_a_page_twice,
]


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda f: f.__name__)
def test_books_that_do_not_balance_are_reported_by_page_or_row(loop, break_it):  # CASES 1-3
    message = break_it(loop.engine.control)
    with pytest.raises(InvariantError, match=message):
        check_invariants(loop.engine.control)


def hold_a_stale_handle(loop):
    request = loop.scheduler.running[0]
    request.handle = dataclasses.replace(request.handle, epoch=99)
    return r"request 0 runs without a live row"


def run_with_the_wrong_status(loop):
    loop.scheduler.running[1].status = RequestStatus.WAITING
    return r"request 1 runs without a live row"


def swap_two_rows(loop):
    first, second = loop.scheduler.running
    first.handle, second.handle = second.handle, first.handle
    return r"request 0: row 1 belongs to another"


def count_a_token_that_was_not_written(loop):
    loop.scheduler.table.num_computed[loop.scheduler.running[1].handle.row] += 1
    return r"request 1 has computed 4 tokens, 3 are written"


def wait_with_a_row(loop):
    loop.scheduler.waiting[0].handle = RequestHandle(0, 1)
    return r"request 2 waits and still holds RequestHandle\(row=0"


def queue_out_of_order(loop):
    loop.scheduler._queue.waiting.move_to_end(2)
    return r"waiting requests are not in order of arrival: \[3, 2\]"


@pytest.mark.parametrize(
    "break_it",
    [
        hold_a_stale_handle,
        run_with_the_wrong_status,
        swap_two_rows,
        count_a_token_that_was_not_written,
        wait_with_a_row,
        queue_out_of_order,
    ],
    ids=lambda f: f.__name__,
)
def test_requests_that_disagree_with_the_books_are_reported_by_id(loop, break_it):
    message = break_it(loop)
    check_invariants(loop.engine.control)  # the pages alone are in order
    with pytest.raises(InvariantError, match=message):
        check_invariants(loop.engine.control, loop.scheduler)


def test_a_dirty_page_in_a_running_step_is_reported(loop):
    loop.engine.control.allocator._dirty[2] = True
    check_invariants(loop.engine.control, loop.scheduler)
    with pytest.raises(InvariantError, match=r"pages of a running step are dirty: \[2\]"):
        check_invariants(loop.engine.control, loop.scheduler, plan=loop.engine.plans[-1])


def test_checking_changes_nothing(loop):
    control = loop.engine.control
    before = (control.page_map.table.tolist(), control.allocator.free_pages.tolist(), control.block_epoch)
    check_invariants(control, loop.scheduler)
    after = (control.page_map.table.tolist(), control.allocator.free_pages.tolist(), control.block_epoch)
    assert after == before
    assert np.array_equal(control.written, [9, 3])
