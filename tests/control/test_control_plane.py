"""Reserve, scrub, confirm, plan, commit: their order, their refusals and the pages they move."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kv_common.errors import ConfigError, PageStateError, RequestTooLarge, StaleHandleError
from kv_control.bucketing import Ladder
from kv_control.control_plane import ControlPlane
from kv_control.invariants import check_invariants
from kv_control.limits import MAX_REFERENCES_PER_PAGE
from kv_control.plan import RequestHandle, RequestSlice, ScrubbedReservation
from tests.strategies import HostEngine, control_of, layout_of


def piece(handle: RequestHandle, start: int, num_tokens: int) -> RequestSlice:
    return RequestSlice(handle, start, np.arange(num_tokens, dtype=np.int32))


def plan_of(control: ControlPlane, *pieces: RequestSlice):
    return control.plan(control.confirm_scrubbed(control.reserve(pieces)))


def run(control: ControlPlane, *pieces: RequestSlice):
    plan = plan_of(control, *pieces)
    control.commit(plan)
    check_invariants(control, plan=plan)
    return plan


def books(control: ControlPlane) -> tuple:
    return (
        control.allocator.free_pages.tolist(),
        control.page_map.table.tolist(),
        control.written.tolist(),
        control.block_epoch,
    )


# --- pages follow tokens -------------------------------------------------------------------------------


def test_a_step_holds_the_pages_of_its_tokens_and_no_more():  # CASES 22, 26
    control = control_of(8)
    handle = control.open()
    run(control, piece(handle, 0, 3))
    for length in range(4, 14):
        plan = run(control, piece(handle, length - 1, 1))
        assert control.pages_held(handle) == len(range(0, length, 4))
        assert plan.table.kv_indptr[1] == len(range(0, length, 4))
        assert plan.table.kv_last_page_len[0] == (length - 1) % 4 + 1


def test_eight_requests_that_started_apart_each_get_a_page_at_their_own_crossing():  # CASES 26
    control = control_of(64, max_num_seqs=8)
    handles = [control.open() for _ in range(8)]
    run(control, *(piece(handle, 0, 1 + i) for i, handle in enumerate(handles)))
    for step in range(12):
        run(control, *(piece(handle, 1 + i + step, 1) for i, handle in enumerate(handles)))
        held = [control.pages_held(handle) for handle in handles]
        assert held == [len(range(0, 2 + i + step, 4)) for i in range(8)]


def test_a_prompt_of_exactly_two_pages_opens_the_third_with_its_first_decode():  # CASES 24
    control = control_of(4)
    handle = control.open()
    run(control, piece(handle, 0, 4))
    run(control, piece(handle, 4, 4))
    assert control.pages_held(handle) == 2
    plan = run(control, piece(handle, 8, 1))
    assert control.pages_held(handle) == 3
    assert plan.table.slot_mapping[0] == plan.table.kv_indices[2] * 4


def test_a_ten_token_request_counts_three_pages_of_four_everywhere():  # CASES 21
    control = control_of(3, max_model_len=10)
    assert control.limits.max_pages_per_request == control.page_map.table.shape[1] == control.layout.pages_for(10) == 3
    handle = control.open()
    plan = run(control, piece(handle, 0, 10))
    assert (control.pages_held(handle), int(plan.table.kv_indptr[1]), control.num_free_pages) == (3, 3, 0)


def test_reserving_again_adds_only_the_difference():  # CASES 10
    control = control_of(8)
    handle = control.open()
    control.reserve([piece(handle, 0, 5)])
    assert (control.pages_held(handle), control.num_free_pages) == (2, 6)
    control.reserve([piece(handle, 0, 5)])
    assert (control.pages_held(handle), control.num_free_pages) == (2, 6)
    control.reserve([piece(handle, 0, 9)])
    assert (control.pages_held(handle), control.num_free_pages) == (3, 5)


def test_a_smaller_step_after_a_superseded_larger_one_reads_only_its_own_pages():  # CASES 22
    control = control_of(8)
    handle = control.open()
    control.reserve([piece(handle, 0, 12)])
    plan = run(control, piece(handle, 0, 5))
    assert plan.table.kv_indptr[1] == 2
    assert plan.table.kv_last_page_len[0] == 1


def test_a_request_on_page_zero_and_one_on_the_last_page_read_back_what_they_wrote():  # CASES 15, 16
    control = control_of(2)
    engine = HostEngine(control)
    first, second = control.open(), control.open()
    slices = (
        RequestSlice(first, 0, np.array([11, 12], np.int32)),
        RequestSlice(second, 0, np.array([21, 22, 23], np.int32)),
    )
    plan = engine.run(slices)
    assert plan.table.kv_indices[:2].tolist() == [0, 1]
    assert (engine.context(plan, 0), engine.context(plan, 1)) == ([11, 12], [21, 22, 23])
    assert control.num_free_pages == 0


# --- no room, misuse -----------------------------------------------------------------------------------


def test_no_room_is_none_for_the_whole_step_and_changes_nothing():
    control = control_of(3)
    small, large = control.open(), control.open()
    run(control, piece(small, 0, 4))
    before = books(control)
    assert control.reserve([piece(small, 4, 1), piece(large, 0, 8)]) is None
    assert books(control) == before
    assert control.reserve([piece(small, 4, 1), piece(large, 0, 4)]) is not None


def test_a_reservation_outlives_a_later_one_that_found_no_room():
    control = control_of(2)
    handle, other = control.open(), control.open()
    reservation = control.reserve([piece(handle, 0, 4)])
    assert control.reserve([piece(other, 0, 9)]) is None
    control.commit(control.plan(control.confirm_scrubbed(reservation)))
    assert control.num_written(handle) == 4


@pytest.mark.parametrize(("start", "written"), [(0, 5), (4, 5), (6, 5)])
def test_a_slice_that_does_not_start_where_the_written_tokens_end_is_refused_with_both(start, written):
    control = control_of(8)
    handle = control.open()
    run(control, piece(handle, 0, written))
    before = books(control)
    with pytest.raises(PageStateError, match=f"starts at position {start}, but {written} tokens are written"):
        control.reserve([piece(handle, start, 1)])
    assert books(control) == before


def test_a_slice_without_tokens_and_two_slices_of_one_request_are_refused():
    control = control_of(8)
    handle = control.open()
    before = books(control)
    with pytest.raises(PageStateError, match="without tokens"):
        control.reserve([piece(handle, 0, 0)])
    with pytest.raises(PageStateError, match="share a request"):
        control.reserve([piece(handle, 0, 1), piece(handle, 0, 1)])
    assert books(control) == before


def test_a_slice_beyond_the_context_is_refused_before_anything_is_held():
    control = control_of(8, max_model_len=6)
    handle = control.open()
    before = books(control)
    with pytest.raises(RequestTooLarge, match=r"7 tokens, the context holds 6: raise `max_target_length`"):
        control.reserve([piece(handle, 0, 7)])
    assert books(control) == before


def test_releasing_twice_is_refused_and_leaves_the_rows_next_owner_alone():  # CASES 4
    control = control_of(4)
    handle = control.open()
    run(control, piece(handle, 0, 8))
    assert sorted(control.release(handle).tolist()) == [0, 1]
    owner = control.open()
    run(control, piece(owner, 0, 5))
    before = books(control)
    for use in (control.release, control.pages_held, control.num_written):
        with pytest.raises(StaleHandleError):
            use(handle)
    with pytest.raises(StaleHandleError):
        control.reserve([piece(owner, 5, 1), piece(handle, 8, 1)])
    assert books(control) == before
    assert owner.row == handle.row


def test_rows_run_out_as_none():
    control = control_of(4, max_num_seqs=2)
    first, _second = control.open(), control.open()
    assert (control.open(), control.num_free_rows) == (None, 0)
    control.release(first)
    assert control.open().row == first.row


def test_a_new_owner_of_a_row_starts_at_position_zero():
    control = control_of(4)
    handle = control.open()
    run(control, piece(handle, 0, 6))
    control.release(handle)
    owner = control.open()
    assert (control.num_written(owner), control.pages_held(owner)) == (0, 0)
    assert run(control, piece(owner, 0, 2)).table.positions[:2].tolist() == [0, 1]


# --- dirty pages ---------------------------------------------------------------------------------------


def test_fresh_pages_need_no_scrub_and_recycled_ones_are_named():  # CASES 12
    control = control_of(3)
    handle = control.open()
    assert control.reserve([piece(handle, 0, 8)]).dirty_pages.tolist() == []
    freed = control.release(handle)
    reservation = control.reserve([piece(control.open(), 0, 12)])
    assert sorted(reservation.dirty_pages.tolist()) == sorted(freed.tolist()) == [0, 1]


def test_no_table_can_be_built_for_a_page_that_was_not_scrubbed():  # CASES 12
    control = control_of(2)
    handle = control.open()
    run(control, piece(handle, 0, 8))
    control.release(handle)
    reservation = control.reserve([piece(control.open(), 0, 1)])
    with pytest.raises(PageStateError, match="never confirmed as scrubbed"):
        control.plan(ScrubbedReservation(reservation.slices, reservation.serial))  # a forged confirmation
    scrubbed = control.confirm_scrubbed(dataclasses.replace(reservation, dirty_pages=np.zeros(0, np.int32)))
    with pytest.raises(PageStateError, match=r"pages \[0\] still carry"):
        control.plan(scrubbed)  # confirmed without naming the page


def test_pages_of_a_superseded_reservation_are_still_dirty_in_the_next():
    control = control_of(2)
    handle = control.open()
    run(control, piece(handle, 0, 8))
    control.release(handle)
    owner = control.open()
    first = control.reserve([piece(owner, 0, 8)])
    second = control.reserve([piece(owner, 0, 8)])
    assert second.dirty_pages.tolist() == first.dirty_pages.tolist() != []


# --- the order of a step -------------------------------------------------------------------------------


def test_each_reservation_is_confirmed_planned_and_committed_once():
    control = control_of(4)
    handle = control.open()
    reservation = control.reserve([piece(handle, 0, 2)])
    scrubbed = control.confirm_scrubbed(reservation)
    with pytest.raises(PageStateError, match="confirmed already"):
        control.confirm_scrubbed(reservation)
    plan = control.plan(scrubbed)
    with pytest.raises(PageStateError, match="planned already"):
        control.plan(scrubbed)
    control.commit(plan)
    with pytest.raises(PageStateError, match="committed already"):
        control.commit(plan)
    for use, value in ((control.confirm_scrubbed, reservation), (control.plan, scrubbed)):
        with pytest.raises(PageStateError, match="not the current one"):
            use(value)
    assert control.num_written(handle) == 2


def test_whatever_a_later_reservation_superseded_is_refused():
    control = control_of(8)
    handle = control.open()
    first = control.reserve([piece(handle, 0, 2)])
    second = control.reserve([piece(handle, 0, 2)])
    scrubbed = control.confirm_scrubbed(second)
    third = control.reserve([piece(handle, 0, 3)])
    for use, value in ((control.confirm_scrubbed, first), (control.plan, scrubbed), (control.cancel, second)):
        with pytest.raises(PageStateError, match="not the current one"):
            use(value)
    plan = control.plan(control.confirm_scrubbed(third))
    control.reserve([piece(handle, 0, 1)])
    with pytest.raises(PageStateError, match="superseded"):
        control.commit(plan)
    assert control.num_written(handle) == 0


def test_nothing_is_written_before_commit():
    control = control_of(4)
    handle = control.open()
    plan = plan_of(control, piece(handle, 0, 3))
    assert control.num_written(handle) == 0
    control.commit(plan)
    assert control.num_written(handle) == 3


def test_a_request_released_after_its_reservation_can_be_neither_planned_nor_committed():
    control = control_of(4)
    gone, stays = control.open(), control.open()
    scrubbed = control.confirm_scrubbed(control.reserve([piece(stays, 0, 1), piece(gone, 0, 1)]))
    control.release(gone)
    with pytest.raises(StaleHandleError):
        control.plan(scrubbed)
    gone = control.open()
    plan = plan_of(control, piece(stays, 0, 1), piece(gone, 0, 1))
    control.release(gone)
    with pytest.raises(StaleHandleError):
        control.commit(plan)
    assert control.num_written(stays) == 0


def test_cancelling_gives_back_what_the_reservation_added_and_nothing_else():
    control = control_of(8)
    old, new = control.open(), control.open()
    run(control, piece(old, 0, 4))
    reservation = control.reserve([piece(old, 4, 1), piece(new, 0, 8)])
    added = {*control.page_map.pages(old)[1:].tolist(), *control.page_map.pages(new).tolist()}
    assert set(control.cancel(reservation).tolist()) == added
    assert (control.pages_held(old), control.pages_held(new), control.num_free_pages) == (1, 0, 7)
    check_invariants(control)
    with pytest.raises(PageStateError, match="not the current one"):
        control.cancel(reservation)


def test_cancelling_after_one_of_its_requests_was_released_gives_back_the_others_pages():
    control = control_of(8)
    gone, stays = control.open(), control.open()
    reservation = control.reserve([piece(gone, 0, 8), piece(stays, 0, 8)])
    control.release(gone)
    control.open()  # the row has a new owner
    assert len(control.cancel(reservation)) == 2
    assert control.num_free_pages == 8
    check_invariants(control)


def test_a_planned_reservation_can_no_longer_be_cancelled():
    control = control_of(4)
    handle = control.open()
    reservation = control.reserve([piece(handle, 0, 2)])
    control.commit(plan := control.plan(control.confirm_scrubbed(reservation)))
    assert plan.slices == reservation.slices
    with pytest.raises(PageStateError):
        control.cancel(reservation)
    reservation = control.reserve([piece(handle, 2, 1)])
    control.plan(control.confirm_scrubbed(reservation))
    with pytest.raises(PageStateError, match="planned already"):
        control.cancel(reservation)


# --- shapes --------------------------------------------------------------------------------------------


def test_a_plan_is_padded_to_its_rung_and_shapes_are_a_function_of_it():
    control = control_of(12, max_num_seqs=3, max_model_len=20, max_tokens=32)
    seen: dict[int, set[tuple[int, ...]]] = {}
    for num_tokens in (1, 5, 8, 9, 16, 17, 20):
        handle = control.open()
        plan = run(control, piece(handle, 0, num_tokens))
        table = plan.table
        shape = (len(table.positions), len(table.seq_lens), len(table.kv_indices))
        assert plan.token_rung == min(rung for rung in control.token_ladder.rungs if rung >= num_tokens)
        assert shape == (plan.token_rung, min(plan.token_rung, 3), min(plan.row_rung * 5, MAX_REFERENCES_PER_PAGE * 12))
        seen.setdefault(plan.token_rung, set()).add(shape)
        control.release(handle)
    assert all(len(shapes) == 1 for shapes in seen.values())
    assert control.token_ladder.observed_shapes == set(seen)


def test_page_references_are_capped_by_full_rows_or_by_the_pool():
    control = control_of(2, max_num_seqs=4, max_model_len=20)
    assert [control.limits.index_capacity(rows) for rows in (1, 2, 3, 4)] == [5, 8, 8, 8]


def test_an_empty_step_can_be_planned_at_every_rung_and_touches_nothing():
    control = control_of(4, max_tokens=32)
    before = books(control)
    for rung in control.token_ladder.rungs:
        plan = control.plan(control.confirm_scrubbed(control.reserve([])), min_token_rung=rung)
        control.commit(plan)
        assert plan.token_rung == rung
        assert (plan.table.slot_mapping == control.layout.num_slots).all()
    assert books(control) == before


def test_a_step_above_the_ladder_is_refused():
    control = ControlPlane(layout_of(8, 4), max_num_seqs=2, max_model_len=32, token_ladder=Ladder([8]))
    with pytest.raises(ConfigError, match="9 tokens"):
        plan_of(control, piece(control.open(), 0, 9))


# --- sizes ---------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_with_both_numbers_and_the_option():  # CASES 66
    control = control_of(8, max_model_len=64)
    assert control.limits.max_request_tokens == 32
    assert (control.limits.fits(32), control.limits.fits(33)) == (True, False)
    control.limits.check_fits(32)
    with pytest.raises(RequestTooLarge, match=r"needs 9 pages for 33 tokens, the pool has 8: .*`paged_num_pages`"):
        control.limits.check_fits(33)
    with pytest.raises(RequestTooLarge, match=r"needs 65 tokens, the context holds 64: raise `max_target_length`"):
        control.limits.check_fits(65)


def test_a_context_without_tokens_is_refused():
    with pytest.raises(ConfigError, match="max_target_length=0"):
        control_of(4, max_model_len=0)


def test_the_block_epoch_stands_still_while_tokens_stay_inside_a_page():  # CASES 143
    control = control_of(4)
    handle = control.open()
    run(control, piece(handle, 0, 2))
    epoch = control.block_epoch
    run(control, piece(handle, 2, 1))
    run(control, piece(handle, 3, 1))
    assert control.block_epoch == epoch
    run(control, piece(handle, 4, 1))
    assert control.block_epoch > epoch
    epoch = control.block_epoch
    control.release(handle)
    assert control.block_epoch > epoch
