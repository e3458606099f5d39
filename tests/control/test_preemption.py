"""Pools that hold less than the work: whoever is sent back loses no token, no turn and no count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given

from kv_control.invariants import check_invariants
from kv_control.plan import RequestHandle
from kv_control.request import Request, RequestStatus
from kv_control.scheduler import max_steps
from tests.strategies import (
    CROWDED,
    completion_alone,
    control_of,
    logprob_of,
    loop_of,
    prompt_logprobs_alone,
    request_of,
    submit_all,
    workloads,
)


def assert_as_alone(request: Request) -> None:
    """Tokens, logprobs and prompt logprobs are those of the request with nobody else around."""
    prompt = request.prompt.tolist()
    completion = completion_alone(prompt, request.max_tokens)
    assert request.tokens.tolist() == prompt + completion
    expected = [np.float32(logprob_of(prompt + completion[:i], token)) for i, token in enumerate(completion)]
    assert request.logprobs.tolist() == [float(value) for value in expected]
    if request.want_prompt_logprobs:
        assert request.prompt_logprobs[1:].tolist() == prompt_logprobs_alone(prompt)
        assert np.isnan(request.prompt_logprobs[0])


def preempt_at(loop, request: Request, generated: int) -> None:
    """Step until the request has that many tokens, then send it back."""
    loop.step_until(lambda: request.num_generated == generated)
    assert loop.scheduler.preempt_newest() is request
    check_invariants(loop.engine.control, loop.scheduler)


def test_three_requests_on_a_pool_for_little_more_than_one_all_finish_within_the_bound():  # CASES 65
    loop = loop_of(control_of(6))
    requests = submit_all(loop.scheduler, [request_of(i, 4, max_tokens=16) for i in range(3)])
    assert loop.drain() <= max_steps(requests)
    assert loop.scheduler.num_preemptions > 0
    for request in requests:
        assert_as_alone(request)


def test_every_workload_finishes_as_alone_within_the_bound_and_leaves_the_pool_free():  # CASES 65-72
    preemptions = 0

    @given(workloads())
    @example(CROWDED)
    def check(workload):
        nonlocal preemptions
        loop = workload.loop()
        requests = submit_all(loop.scheduler, workload.make_requests())
        assert loop.drain() <= max_steps(requests)
        for request in requests:
            assert request.finish_reason == "length"
            assert_as_alone(request)
        assert loop.engine.control.num_free_pages == workload.num_pages
        preemptions += loop.scheduler.num_preemptions

    check()
    assert preemptions > 0  # else this test shows nothing


@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("num_pages", [5, 6, 7, 9])
def test_in_every_step_the_oldest_request_advances(num_pages, chunk):  # CASES 65
    loop = loop_of(control_of(num_pages), max_num_batched_tokens=5, prefill_chunk_tokens=chunk)
    requests = submit_all(loop.scheduler, [request_of(i, 3 + 2 * i, max_tokens=12 - i) for i in range(4)])
    while loop.scheduler.has_work:
        oldest = next(request for request in requests if not request.finished)
        before = (oldest.num_computed, oldest.num_generated)
        if loop.step() is None:
            assert (oldest.num_computed, oldest.num_generated) == before  # somebody younger was sent back
        else:
            assert oldest.finished or (oldest.num_computed, oldest.num_generated) > before
    assert requests[0].num_preemptions == 0


def test_a_lone_request_on_the_smallest_pool_that_holds_it_is_never_sent_back():  # CASES 68
    loop = loop_of(control_of(3), prefill_chunk_tokens=2)
    [request] = submit_all(loop.scheduler, [request_of(0, 7, max_tokens=6)])  # 12 slots of 12
    while loop.scheduler.has_work:
        assert loop.step() is not None
        assert loop.scheduler.preempt_newest() is None
    assert_as_alone(request)


def test_a_preempted_request_is_not_resumed_for_a_chunk_only_to_be_sent_back():  # CASES 70
    loop = loop_of(control_of(7, max_num_seqs=2), prefill_chunk_tokens=4)
    older, victim = submit_all(loop.scheduler, [request_of(0, 8, max_tokens=16), request_of(1, 10, max_tokens=12)])
    loop.step_until(lambda: victim.num_preemptions == 1)
    assert (victim.num_tokens, loop.engine.control.num_free_pages) == (14, 4)  # a chunk fits, 4 pages do not
    loop.step()
    assert loop.engine.control.num_free_pages == 3
    while not older.finished:
        assert victim.status is RequestStatus.WAITING
        loop.step()
    loop.drain()
    assert victim.num_preemptions == 1
    assert_as_alone(older), assert_as_alone(victim)


def test_with_one_free_page_a_preempted_prompt_of_twelve_waits():  # CASES 70
    loop = loop_of(control_of(5, max_num_seqs=2), prefill_chunk_tokens=4)
    older, victim = submit_all(loop.scheduler, [request_of(0, 4, max_tokens=12), request_of(1, 12, max_tokens=2)])
    loop.step()
    assert victim.status is RequestStatus.WAITING  # it wants 4 pages; of the 5, 2 are spoken for
    while not older.finished:
        assert victim.status is RequestStatus.WAITING
        loop.step()
    loop.drain()
    assert_as_alone(victim)
    assert loop.scheduler.num_preemptions == 0


@pytest.mark.slow
def test_nobody_is_sent_back_before_one_of_those_it_joined_has_outgrown_a_page():  # CASES 70, 71
    preemptions = 0

    @given(workloads())
    @example(CROWDED)
    def check(workload):
        nonlocal preemptions
        loop = workload.loop()
        requests = submit_all(loop.scheduler, workload.make_requests())
        at_admission: dict[int, dict[Request, int]] = {}  # lengths of all that ran when a request was let in
        sent_back = 0

        def watch():
            nonlocal sent_back
            for request in requests:
                if request.status is RequestStatus.RUNNING and request.id not in at_admission:
                    at_admission[request.id] = {r: r.num_tokens for r in loop.scheduler.running}
                if request.status is RequestStatus.WAITING and request.id in at_admission:
                    lengths = at_admission.pop(request.id)
                    assert any(r.num_tokens - length > workload.tokens_per_page for r, length in lengths.items())
                    sent_back += 1

        watch()
        while loop.scheduler.has_work:
            scheduled = loop.scheduler.schedule()
            watch()
            slices = loop.scheduler.slices(scheduled)
            plan = loop.engine.run(slices)
            if plan is None:
                loop.scheduler.preempt_newest()
                watch()
                continue
            loop.scheduler.advance(plan.slices)
            for i, piece in enumerate(plan.slices):
                loop.scheduler.record(piece, **loop.engine.results(plan, i))
        assert sent_back == loop.scheduler.num_preemptions
        preemptions += sent_back

    check()
    assert preemptions > 0


def test_a_preempted_request_resumes_before_all_that_arrived_after_it():  # CASES 71
    loop = loop_of(control_of(16, max_num_seqs=2))
    requests = submit_all(loop.scheduler, [request_of(i, 4, max_tokens=6) for i in range(10)])
    preempt_at(loop, requests[1], 2)
    assert [r.id for r in loop.scheduler.waiting] == list(range(1, 10))
    loop.step()
    assert [r.id for r in loop.scheduler.running] == [0, 1]
    finished = []
    loop.drain(every_step=lambda: finished.extend(r.id for r in loop.scheduler.pop_finished()))
    assert finished == list(range(10))


def test_the_newest_is_sent_back_first_and_the_queue_stays_in_order_of_arrival():  # CASES 71
    loop = loop_of(control_of(32))
    submit_all(loop.scheduler, [request_of(i, 4, max_tokens=6) for i in range(6)])
    loop.step()
    assert [loop.scheduler.preempt_newest().id for _ in range(3)] == [3, 2, 1]
    assert [r.id for r in loop.scheduler.waiting] == [1, 2, 3, 4, 5]
    assert loop.scheduler.preempt_newest() is None
    check_invariants(loop.engine.control, loop.scheduler)


def test_a_request_preempted_at_three_and_at_seven_gives_the_same_twelve_tokens():  # CASES 60, 72, 102
    loop = loop_of(control_of(16, max_num_seqs=2))
    other, request = submit_all(
        loop.scheduler,
        [request_of(0, 2, max_tokens=40), request_of(1, 5, max_tokens=12, min_tokens=5, want_prompt_logprobs=True)],
    )
    preempt_at(loop, request, 3)
    preempt_at(loop, request, 7)
    loop.drain()
    assert (request.num_generated, len(request.logprobs), request.num_preemptions) == (12, 12, 2)
    assert_as_alone(request)
    assert_as_alone(other)


def test_positions_after_a_resume_cover_prompt_and_generated_from_zero():  # CASES 60
    loop = loop_of(control_of(16, max_num_seqs=2))
    _, request = submit_all(loop.scheduler, [request_of(0, 2, max_tokens=40), request_of(1, 6, max_tokens=8)])
    preempt_at(loop, request, 5)
    loop.step()
    resumed: RequestHandle = request.handle
    loop.step_until(lambda: request.finished)
    assert loop.engine.positions[resumed] == list(range(6 + 8 - 1))


def test_a_stop_after_a_resume_counts_min_tokens_from_the_first_token():  # CASES 102
    completion = completion_alone(request_of(1, 5).prompt, 12)
    loop = loop_of(control_of(16, max_num_seqs=2))
    _, request = submit_all(
        loop.scheduler,
        [
            request_of(0, 2, max_tokens=40),
            request_of(1, 5, max_tokens=12, min_tokens=5, stop_token_ids=frozenset(completion)),
        ],
    )
    preempt_at(loop, request, 3)
    loop.drain()
    assert (request.finish_reason, request.tokens[5:].tolist()) == ("stop", completion[:6])


def test_prompt_logprobs_of_a_chunked_and_preempted_prompt_have_no_hole_and_none_twice():  # CASES 89
    loop = loop_of(control_of(16, max_num_seqs=2), prefill_chunk_tokens=3)
    _, request = submit_all(
        loop.scheduler,
        [request_of(0, 2, max_tokens=40), request_of(1, 11, max_tokens=2, want_prompt_logprobs=True)],
    )
    loop.step(), loop.step()
    assert request.num_computed == 6
    assert loop.scheduler.preempt_newest() is request
    loop.drain()
    asked = [
        piece.start + j + 1
        for plan in loop.engine.plans
        for piece in plan.slices
        if piece.targets is not None
        for j, target in enumerate(piece.targets.tolist())
        if target >= 0
    ]
    assert asked == list(range(1, 11))
    assert_as_alone(request)


def test_a_scoring_request_survives_preemption():
    loop = loop_of(control_of(16, max_num_seqs=2), prefill_chunk_tokens=3)
    _, request = submit_all(
        loop.scheduler,
        [request_of(0, 2, max_tokens=9), request_of(1, 8, max_tokens=0, want_prompt_logprobs=True)],
    )
    loop.step(), loop.step()
    assert loop.scheduler.preempt_newest() is request
    loop.drain()
    assert request.finish_reason == "length"
    assert_as_alone(request)


def test_three_samples_of_one_prompt_are_complete_though_two_are_preempted():  # CASES 73
    loop = loop_of(control_of(7, max_num_seqs=3))
    prompt = list(range(6))
    requests = submit_all(loop.scheduler, [request_of(i, prompt, max_tokens=5 + 6 * i) for i in range(3)])
    loop.step_until(lambda: requests[0].finished)
    while loop.scheduler.preempt_newest() is not None:
        pass
    loop.drain()
    assert [request.num_generated for request in requests] == [5, 11, 17]
    for request in requests:
        assert_as_alone(request)


def test_a_preempted_request_holds_nothing_and_says_so():
    loop = loop_of(control_of(16))
    submit_all(loop.scheduler, [request_of(0, 4), request_of(1, 9)])
    loop.step()
    free = loop.engine.control.num_free_pages
    victim = loop.scheduler.preempt_newest()
    assert (victim.status, victim.handle, victim.num_computed) == (RequestStatus.WAITING, None, 0)
    assert loop.engine.control.num_free_pages == free + 3
    assert (victim.num_preemptions, loop.scheduler.num_preemptions) == (1, 1)
    assert victim.tokens.tolist()[:9] == victim.prompt.tolist() and victim.num_generated == 1
