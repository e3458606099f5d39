"""What runs next: intake, order, chunks, results, ends."""

from __future__ import annotations

import numpy as np
import pytest

from kv_common.errors import ConfigError, InvariantError, RequestError, RequestTooLarge, SchedulerStalled
from kv_control.invariants import check_invariants
from kv_control.plan import GREEDY, RequestSlice, SamplingSpec
from kv_control.request import RequestStatus
from kv_control.scheduler import MAX_IDLE_SCHEDULES, Scheduler, max_steps
from tests.strategies import (
    Loop,
    completion_alone,
    control_of,
    loop_of,
    next_token,
    prompt_logprobs_alone,
    request_of,
    submit_all,
)


def decision(loop: Loop) -> dict[int, int]:
    return dict(loop.scheduler.schedule().num_tokens)


# --- intake --------------------------------------------------------------------------------------------


def test_an_empty_prompt_is_refused_and_nothing_is_queued():
    loop = loop_of(control_of(4))
    with pytest.raises(RequestError, match="the prompt is empty"):
        loop.scheduler.submit(request_of(0, []))
    assert not loop.scheduler.has_work


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers_and_the_option():
    loop = loop_of(control_of(8, max_model_len=16))
    for length in (15, 16):
        loop.scheduler.submit(request_of(length, length))
    with pytest.raises(RequestTooLarge, match=r"17 tokens, the context holds 16: raise `max_target_length`"):
        loop.scheduler.submit(request_of(17, 17))
    assert loop.scheduler.num_waiting + len(loop.scheduler.pop_finished()) == 2


@pytest.mark.parametrize(("prompt", "max_tokens", "pages"), [(20, 20, 10), (33, 1, 9), (40, 0, 10)])
def test_a_request_the_pool_can_never_hold_is_refused_and_the_others_run_on(prompt, max_tokens, pages):  # CASES 66
    loop = loop_of(control_of(8, max_model_len=64))
    good = request_of(1, 5, max_tokens=3)
    loop.scheduler.submit(good)
    with pytest.raises(RequestTooLarge, match=rf"needs {pages} pages .* the pool has 8: raise `paged_num_pages`"):
        loop.scheduler.submit(request_of(2, prompt, max_tokens=max_tokens, want_prompt_logprobs=True))
    loop.drain()
    assert good.finish_reason == "length"


def test_the_last_token_needs_no_slot_so_a_request_may_fill_the_pool_exactly():
    loop = loop_of(control_of(2, max_model_len=64))
    exact = request_of(1, 4, max_tokens=5)  # 4 + 5 - 1 = 8 slots
    loop.scheduler.submit(exact)
    loop.drain()
    assert exact.tokens[4:].tolist() == completion_alone(exact.prompt, 5)
    with pytest.raises(RequestTooLarge):
        loop.scheduler.submit(request_of(2, 4, max_tokens=6))


def test_max_tokens_is_capped_to_the_context_and_the_row_ends_with_length():  # CASES 77, 78
    loop = loop_of(control_of(32, max_num_seqs=8, max_model_len=12))
    requests = [request_of(i, 3, max_tokens=4) for i in range(7)]
    longest = request_of(7, 9, max_tokens=1_000_000)
    for request in (*requests, longest):
        loop.scheduler.submit(request)
    assert longest.max_tokens == 3
    loop.drain()
    assert (longest.finish_reason, longest.num_tokens) == ("length", 12)
    assert all(r.tokens[3:].tolist() == completion_alone(r.prompt, 4) for r in requests)


def test_a_prompt_that_fills_the_context_ends_with_length_and_no_token():
    loop = loop_of(control_of(8, max_model_len=8))
    request = request_of(1, 8, max_tokens=5)
    loop.scheduler.submit(request)
    assert (request.finish_reason, request.num_generated, loop.num_steps) == ("length", 0, 0)


def test_an_id_in_use_and_a_request_submitted_twice_are_refused():  # CASES 175
    loop = loop_of(control_of(8))
    first = request_of(1, 3, max_tokens=1)
    loop.scheduler.submit(first)
    with pytest.raises(RequestError, match="id 1 is in use"):
        loop.scheduler.submit(request_of(1, 3))  # while it waits
    loop.scheduler.schedule()
    with pytest.raises(RequestError, match="id 1 is in use"):
        loop.scheduler.submit(request_of(1, 3))  # while it runs
    loop.step()
    assert first.finished
    with pytest.raises(RequestError, match="submitted before"):
        loop.scheduler.submit(first)
    loop.scheduler.submit(request_of(1, 3))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("max_num_batched_tokens", 3, "paged_max_num_batched_tokens=3 is below paged_max_num_seqs=4"),
        ("max_num_batched_tokens", 65, r"paged_max_num_batched_tokens=65: must lie in 1\.\.64"),
        ("max_num_seqs", 5, r"paged_max_num_seqs=5: must lie in 1\.\.4"),
        ("max_num_seqs", 0, r"paged_max_num_seqs=0: must lie in 1\.\.4"),
        ("max_model_len", 65, r"max_target_length=65: must lie in 1\.\.64"),
        ("prefill_chunk_tokens", 0, r"paged_prefill_chunk_tokens=0: must lie in 1\.\.64"),
        ("prefill_chunk_tokens", 65, r"paged_prefill_chunk_tokens=65: must lie in 1\.\.64"),
    ],
)
def test_a_limit_that_cannot_work_is_refused_by_name(option, value, message):
    with pytest.raises(ConfigError, match=message):
        loop_of(control_of(8), **{option: value})


# --- order and budget ----------------------------------------------------------------------------------


def test_decodes_come_first_then_prompts_in_progress_then_the_queue():
    loop = loop_of(control_of(32, max_num_seqs=4), max_num_batched_tokens=10)
    scheduler = loop.scheduler
    scheduler.submit(request_of(0, 14, max_tokens=9))
    scheduler.submit(request_of(1, 2, max_tokens=9))
    loop.step()  # 0 takes the whole budget
    assert decision(loop) == {0: 4, 1: 2}
    loop.step()
    scheduler.submit(request_of(2, 12, max_tokens=9))
    scheduler.submit(request_of(3, 5, max_tokens=9))
    loop.step()
    assert decision(loop) == {0: 1, 1: 1, 2: 4, 3: 4}
    assert list(decision(loop)) == [0, 1, 2, 3]
    loop.step()
    assert decision(loop) == {0: 1, 1: 1, 2: 1, 3: 1}


def test_a_decode_is_never_left_out_however_many_prompts_wait():
    loop = loop_of(control_of(64, max_num_seqs=4), max_num_batched_tokens=4)
    first = request_of(0, 1, max_tokens=30)
    loop.scheduler.submit(first)
    loop.step()
    for i in range(1, 6):
        loop.scheduler.submit(request_of(i, 30, max_tokens=2))
    for generated in range(2, 31):
        loop.step()
        assert first.num_generated == generated


def test_the_oldest_prompt_advances_even_when_decodes_take_almost_the_whole_budget():
    loop = loop_of(control_of(64, max_num_seqs=4), max_num_batched_tokens=4, prefill_chunk_tokens=1)
    oldest = request_of(0, 20, max_tokens=1)
    for request in (oldest, *(request_of(i, 1, max_tokens=30) for i in (1, 2, 3))):
        loop.scheduler.submit(request)
    for computed in range(1, 20):
        loop.step()
        assert oldest.num_computed == computed


@pytest.mark.parametrize("chunk", [1, 4, 7, 16])
def test_no_prompt_takes_more_than_its_chunk_per_step_and_no_step_more_than_the_budget(chunk):
    loop = loop_of(control_of(64, max_num_seqs=3), max_num_batched_tokens=16, prefill_chunk_tokens=chunk)
    for i in range(6):
        loop.scheduler.submit(request_of(i, 11 + i, max_tokens=3))
    loop.drain()
    for plan in loop.engine.plans:
        assert max(piece.num_tokens for piece in plan.slices) <= chunk
        assert sum(piece.num_tokens for piece in plan.slices) <= 16
    assert sum(len(plan.slices) for plan in loop.engine.plans) >= 6 * (11 // chunk)


@pytest.mark.parametrize("chunk", [1, 4, 7, 16, None])
def test_chunks_of_any_size_give_the_tokens_of_the_whole_prompt(chunk):  # CASES 24
    loop = loop_of(control_of(32), prefill_chunk_tokens=chunk)
    requests = [request_of(i, length, max_tokens=6, want_prompt_logprobs=True) for i, length in enumerate((8, 9, 1))]
    for request in requests:
        loop.scheduler.submit(request)
    loop.drain()
    for request in requests:
        assert request.tokens[request.num_prompt_tokens :].tolist() == completion_alone(request.prompt, 6)
        assert request.prompt_logprobs[1:].tolist() == prompt_logprobs_alone(request.prompt.tolist())
        assert np.isnan(request.prompt_logprobs[0])


def test_nobody_overtakes_a_front_that_does_not_fit():
    loop = loop_of(control_of(4, max_num_seqs=4))
    running = request_of(0, 9, max_tokens=4)
    loop.scheduler.submit(running)
    loop.step()
    assert loop.engine.control.num_free_pages == 1
    front, small = request_of(1, 8, max_tokens=2), request_of(2, 1, max_tokens=3)
    loop.scheduler.submit(front)
    loop.scheduler.submit(small)
    started: list[int] = []
    loop.drain(every_step=lambda: started.extend(r.id for r in loop.scheduler.running if r.id not in started))
    assert started == [0, 1, 2]


def test_pages_that_running_requests_are_about_to_need_are_not_promised_to_the_next():
    loop = loop_of(control_of(4, max_num_seqs=4), prefill_chunk_tokens=4)
    loop.scheduler.submit(request_of(0, 11, max_tokens=2))  # 12 slots: three pages, one chunk a step
    loop.scheduler.submit(request_of(1, 6, max_tokens=2))  # two pages
    loop.step()
    assert loop.engine.control.num_free_pages == 3
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (1, 1)


def test_pages_a_running_request_already_holds_are_not_kept_free_for_it_again():
    loop = loop_of(control_of(4))
    submit_all(loop.scheduler, [request_of(0, 5, max_tokens=4)])  # 8 slots, two pages, both held after one step
    loop.step()
    assert loop.engine.control.num_free_pages == 2
    submit_all(loop.scheduler, [request_of(1, 5, max_tokens=4)])
    loop.step()
    assert loop.scheduler.num_running == 2


def test_no_more_run_at_once_than_the_scheduler_was_told_though_rows_are_free():
    loop = loop_of(control_of(32, max_num_seqs=4), max_num_seqs=2)
    submit_all(loop.scheduler, [request_of(i, 2, max_tokens=4) for i in range(5)])
    loop.drain()
    assert max(len(plan.slices) for plan in loop.engine.plans) == 2


def test_as_many_run_at_once_as_there_are_rows_and_the_next_enters_when_one_ends():
    loop = loop_of(control_of(64, max_num_seqs=3))
    for i in range(5):
        loop.scheduler.submit(request_of(i, 3, max_tokens=2 + i))
    loop.step()
    assert [r.id for r in loop.scheduler.running] == [0, 1, 2]
    loop.step()
    assert [r.id for r in loop.scheduler.pop_finished()] == [0]
    loop.step()
    assert [r.id for r in loop.scheduler.running] == [2, 3]
    loop.step()
    assert [r.id for r in loop.scheduler.running] == [3, 4]


def test_scheduling_again_without_running_a_step_decides_the_same():
    loop = loop_of(control_of(16), max_num_batched_tokens=6)
    for i in range(3):
        loop.scheduler.submit(request_of(i, 5, max_tokens=3))
    assert decision(loop) == decision(loop) == {0: 5, 1: 1}
    check_invariants(loop.engine.control, loop.scheduler)


# --- slices and results --------------------------------------------------------------------------------


def test_only_the_chunk_that_ends_a_prompt_samples_and_says_how():
    spec = SamplingSpec(temperature=0.5, seed=7)
    loop = loop_of(control_of(16), prefill_chunk_tokens=4)
    loop.scheduler.submit(request_of(0, 9, max_tokens=2, sampling=spec))
    loop.drain()
    pieces = [piece for plan in loop.engine.plans for piece in plan.slices]
    assert [(p.start, p.num_tokens, p.sample) for p in pieces] == [
        (0, 4, None),
        (4, 4, None),
        (8, 1, spec),
        (9, 1, spec),
    ]


def test_the_first_decode_feeds_the_token_that_the_prompt_gave_at_its_own_position():
    loop = loop_of(control_of(16))
    request = request_of(0, 5, max_tokens=2)
    loop.scheduler.submit(request)
    loop.drain()
    [decode] = loop.engine.plans[1].slices
    assert (decode.start, decode.tokens.tolist()) == (5, [next_token(request.prompt)])
    assert loop.engine.plans[1].table.positions[0] == 5


def test_each_position_is_fed_once_and_in_order():  # CASES 58, 59
    loop = loop_of(control_of(32), max_num_batched_tokens=7)
    requests = [request_of(0, 3, max_tokens=5), request_of(1, 9, max_tokens=4)]
    for request in requests:
        loop.scheduler.submit(request)
    loop.drain()
    assert sorted(loop.engine.positions.values()) == [list(range(3 + 4)), list(range(9 + 3))]


def test_a_slice_keeps_its_tokens_when_its_request_grows():
    loop = loop_of(control_of(16))
    request = request_of(0, 4, max_tokens=8)
    loop.scheduler.submit(request)
    before = [piece.tokens.tolist() for piece in loop.step().slices]
    loop.drain()
    assert [piece.tokens.tolist() for piece in loop.engine.plans[0].slices] == before


def test_scoring_runs_the_prompt_samples_nothing_and_ends_with_length():  # CASES 180
    loop = loop_of(control_of(8), prefill_chunk_tokens=3)
    request = request_of(0, 10, max_tokens=0, want_prompt_logprobs=True)
    loop.scheduler.submit(request)
    assert loop.drain() == 4
    assert (request.finish_reason, request.num_generated) == ("length", 0)
    assert request.prompt_logprobs[1:].tolist() == prompt_logprobs_alone(request.prompt.tolist())
    assert all(piece.sample is None for plan in loop.engine.plans for piece in plan.slices)


def test_no_tokens_and_no_scores_wanted_ends_at_submit_without_a_step():
    loop = loop_of(control_of(8))
    request = request_of(0, 4, max_tokens=0)
    loop.scheduler.submit(request)
    assert loop.scheduler.pop_finished() == [request]
    assert (request.finish_reason, loop.scheduler.has_work) == ("length", False)


def test_a_one_token_prompt_that_only_scores_ends_after_one_step():
    loop = loop_of(control_of(8))
    request = request_of(0, 1, max_tokens=0, want_prompt_logprobs=True)
    loop.scheduler.submit(request)
    assert loop.drain() == 1
    assert request.finish_reason == "length" and np.isnan(request.prompt_logprobs).all()


def test_a_stop_token_ends_the_row_and_its_pages_are_free_at_the_next_step():  # CASES 109
    loop = loop_of(control_of(8))
    probe = completion_alone(request_of(0, 4).prompt, 2)
    request = request_of(0, 4, max_tokens=20, stop_token_ids=frozenset({probe[1]}), min_tokens=1)
    loop.scheduler.submit(request)
    loop.step(), loop.step()
    assert (request.finish_reason, request.tokens[4:].tolist()) == ("stop", probe)
    assert loop.engine.control.num_free_pages == 8


def test_results_that_do_not_match_what_the_slice_asked_for_are_refused():  # CASES 79
    loop = loop_of(control_of(8))
    request = request_of(0, 4, max_tokens=3, want_prompt_logprobs=True)
    loop.scheduler.submit(request)
    plan = loop.engine.run(loop.scheduler.slices(loop.scheduler.schedule()))
    loop.scheduler.advance(plan.slices)
    [piece] = plan.slices
    logprobs = np.zeros(4, np.float32)
    for wrong in ({}, {"token": 1}, {"target_logprobs": logprobs}):
        with pytest.raises(InvariantError, match="do not match what its slice asked for"):
            loop.scheduler.record(piece, **wrong)
    loop.scheduler.record(piece, token=1, logprob=-1.0, target_logprobs=logprobs)
    stale = RequestSlice(piece.handle, piece.start, piece.tokens, sample=GREEDY)
    with pytest.raises(InvariantError, match=r"position 4 arrived, position 5 is next"):
        loop.scheduler.record(stale, token=2)
    assert request.tokens[4:].tolist() == [1]


def test_results_of_a_request_that_is_gone_are_dropped_and_the_others_get_their_own():  # CASES 79, 80
    loop = loop_of(control_of(32))
    requests = [request_of(i, 4 + i, max_tokens=3, want_prompt_logprobs=True) for i in range(3)]
    for request in requests:
        loop.scheduler.submit(request)
    plan = loop.engine.run(loop.scheduler.slices(loop.scheduler.schedule()))
    loop.scheduler.advance(plan.slices)
    results = [loop.engine.results(plan, i) for i in range(3)]
    loop.scheduler.cancel(requests[0].id)
    loop.scheduler.submit(request_of(9, 6, max_tokens=1))
    loop.scheduler.schedule()  # the newcomer takes the row that was given back
    recorded = [loop.scheduler.record(plan.slices[i], **results[i]) for i in range(3)]
    assert recorded == [None, requests[1], requests[2]]
    for request in requests[1:]:
        assert request.tokens[request.num_prompt_tokens :].tolist() == completion_alone(request.prompt, 1)
        assert request.prompt_logprobs[1:].tolist() == prompt_logprobs_alone(request.prompt.tolist())
    assert requests[0].num_generated == 0
    loop.drain()


def test_slices_of_a_request_that_left_since_the_decision_are_refused():
    loop = loop_of(control_of(8))
    loop.scheduler.submit(request_of(0, 4))
    scheduled = loop.scheduler.schedule()
    loop.scheduler.cancel(0)
    with pytest.raises(RequestError, match="request 0 is not running"):
        loop.scheduler.slices(scheduled)


# --- ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "preempted", "finished"])
def test_cancelling_in_any_state_returns_every_page(state):  # CASES 19
    loop = loop_of(control_of(8, max_num_seqs=2), prefill_chunk_tokens=4)
    scheduler = loop.scheduler
    other, request = request_of(0, 3, max_tokens=6), request_of(1, 9, max_tokens=8)
    scheduler.submit(other)
    if state != "waiting":
        scheduler.submit(request)
    loop.step()
    if state == "waiting":
        scheduler.submit(request)
    if state in ("decoding", "preempted"):
        loop.step_until(lambda: request.num_generated == 2)
    if state == "preempted":
        assert scheduler.preempt_newest() is request
    if state == "finished":
        loop.step_until(lambda: request.finished)
    held_by_other = 0 if other.handle is None else loop.engine.control.pages_held(other.handle)
    cancelled = scheduler.cancel(request.id)
    assert cancelled is (None if state == "finished" else request)
    assert request.finish_reason == ("length" if state == "finished" else "cancelled")
    assert loop.engine.control.num_free_pages == 8 - held_by_other
    check_invariants(loop.engine.control, scheduler)
    loop.drain()
    assert loop.engine.control.num_free_pages == 8
    assert other.tokens[3:].tolist() == completion_alone(other.prompt, 6)


def test_cancelling_an_unknown_id_is_none():
    assert loop_of(control_of(4)).scheduler.cancel(3) is None


def test_an_error_ends_one_request_with_its_text_and_finishing_twice_changes_nothing():
    loop = loop_of(control_of(8))
    bad, good = request_of(0, 4, max_tokens=4), request_of(1, 4, max_tokens=4)
    loop.scheduler.submit(bad), loop.scheduler.submit(good)
    loop.step()
    loop.scheduler.finish(bad, "error", "logits are not finite")
    loop.scheduler.finish(bad, "cancelled")
    loop.drain()
    assert (bad.finish_reason, bad.error, bad.status) == ("error", "logits are not finite", RequestStatus.FINISHED)
    assert good.tokens[4:].tolist() == completion_alone(good.prompt, 4)
    assert loop.scheduler.pop_finished() == [bad, good]
    assert loop.scheduler.pop_finished() == []


def test_a_request_of_another_scheduler_cannot_be_finished():
    loop = loop_of(control_of(8))
    with pytest.raises(RequestError, match="request 5 is not one of this scheduler's"):
        loop.scheduler.finish(request_of(5, 3), "cancelled")


def test_every_page_is_free_after_two_hundred_requests_three_at_a_time():  # CASES 1
    loop = loop_of(control_of(16, max_num_seqs=3))
    requests = [request_of(i, 1 + i % 9, max_tokens=1 + i % 6) for i in range(200)]
    for request in requests:
        loop.scheduler.submit(request)
    loop.drain()  # checks free + held = total after every step
    assert loop.engine.control.num_free_pages == 16
    for request in requests:
        assert request.tokens[request.num_prompt_tokens :].tolist() == completion_alone(
            request.prompt, request.max_tokens
        )


def test_a_finished_request_is_forgotten_so_memory_stays_flat():
    loop = loop_of(control_of(16))
    for i in range(50):
        loop.scheduler.submit(request_of(i, 3, max_tokens=2))
        loop.drain()
        assert len(loop.scheduler.pop_finished()) == 1
    queue = loop.scheduler._queue
    assert not queue.waiting and not queue.running and not queue._finished and queue.by_row == [None] * 4


# --- no progress ---------------------------------------------------------------------------------------


def test_a_front_that_waits_for_pages_held_elsewhere_is_failed_and_the_next_runs():  # CASES 67
    control = control_of(4)
    outside = control.open()  # an engine's caller that took two pages and never gave them back
    control.reserve([RequestSlice(outside, 0, np.zeros(8, np.int32))])
    loop = loop_of(control)
    front, small = request_of(0, 9, max_tokens=1), request_of(1, 4, max_tokens=2)
    loop.scheduler.submit(front), loop.scheduler.submit(small)
    loop.drain(at_most=MAX_IDLE_SCHEDULES + 4)
    assert front.finish_reason == "error"
    assert "needs 3 pages" in front.error and "2 pages of 4" in front.error
    assert small.tokens[4:].tolist() == completion_alone(small.prompt, 2)
    assert control.num_free_pages == 2


def test_each_front_gets_the_same_patience():
    control = control_of(4)
    outside = control.open()
    control.reserve([RequestSlice(outside, 0, np.zeros(8, np.int32))])
    loop = loop_of(control)
    fronts = submit_all(loop.scheduler, [request_of(i, 9, max_tokens=1) for i in range(3)])
    failed_after = []
    for turn in range(1, 3 * MAX_IDLE_SCHEDULES + 1):
        loop.step()
        failed_after += [turn] * len(loop.scheduler.pop_finished())
    assert failed_after == [MAX_IDLE_SCHEDULES * (i + 1) for i in range(len(fronts))]


def test_a_front_whose_pages_come_back_in_time_is_not_failed():
    control = control_of(4)
    outside = control.open()
    control.reserve([RequestSlice(outside, 0, np.zeros(8, np.int32))])
    loop = loop_of(control)
    front = request_of(0, 9, max_tokens=1)
    loop.scheduler.submit(front)
    for _ in range(MAX_IDLE_SCHEDULES - 1):
        loop.step()
    control.release(outside)
    loop.drain()
    assert front.tokens[9:].tolist() == completion_alone(front.prompt, 1)


def test_a_loop_that_never_records_its_results_is_stopped():
    loop = loop_of(control_of(4))
    loop.scheduler.submit(request_of(3, 4, max_tokens=4))
    for _ in range(2):  # a step, and one ahead of its results
        plan = loop.engine.run(loop.scheduler.slices(loop.scheduler.schedule()))
        loop.scheduler.advance(plan.slices)
    for _ in range(MAX_IDLE_SCHEDULES - 1):
        assert decision(loop) == {}
    with pytest.raises(SchedulerStalled, match=r"requests \[3\] run and have nothing left to compute"):
        loop.scheduler.schedule()


def test_no_work_is_an_empty_decision_for_ever():  # CASES 76
    loop = loop_of(control_of(4))
    for _ in range(2 * MAX_IDLE_SCHEDULES):
        assert decision(loop) == {}
    assert loop.drain() == 0


def test_the_bound_on_steps_is_the_tokens_of_all_requests():
    requests = [request_of(0, 3, max_tokens=4), request_of(1, 5, max_tokens=0)]
    assert max_steps(requests) == 12
    assert max_steps([]) == 0


def test_a_scheduler_gives_pages_back_through_the_release_it_was_given():
    control = control_of(8)
    released = []

    def release(handle):
        released.append((handle, control.release(handle).tolist()))

    scheduler = Scheduler(control, max_num_batched_tokens=8, max_num_seqs=2, max_model_len=8, release=release)
    scheduler.submit(request_of(0, 5))
    control.reserve(scheduler.slices(scheduler.schedule()))
    scheduler.cancel(0)
    assert [pages for _, pages in released] == [[0, 1]]
