"""Sharing pages between requests: the same tokens as alone, computed once, and every hold on a page accounted for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_common.errors import PageStateError
from kv_control.control_plane import ControlPlane
from kv_control.invariants import check_invariants
from kv_control.plan import RequestId, SamplingSpec, StepResults
from kv_control.request import Request
from kv_control.scheduler import max_steps
from kv_control.step_accounts import NOT_FINITE
from tests.strategies import (
    Loop,
    completion_alone,
    control_of,
    loop_of,
    prompt_logprobs_alone,
    request_of,
)

P = 4


def cached_loop(num_pages: int = 32, *, max_num_seqs: int = 4, **options: int | None) -> Loop:
    return loop_of(control_of(num_pages, P, max_num_seqs=max_num_seqs, prefix_cache=True), **options)


def tokens_of(*parts: tuple[int, int]) -> list[int]:
    """Tokens that differ between ``seed``s: ``(seed, length)`` after ``(seed, length)``."""
    return [(11 * seed + 5 * i + seed * i) % 50 for seed, length in parts for i in range(length)]


def assert_as_alone(*requests: Request) -> None:
    for request in requests:
        prompt = request.prompt.tolist()
        assert request.finish_reason == "length", request.error
        assert request.tokens[len(prompt) :].tolist() == completion_alone(prompt, request.max_tokens)
        if request.want_prompt_logprobs:
            assert request.prompt_logprobs[1:].tolist() == prompt_logprobs_alone(prompt)


def run(loop: Loop, *requests: Request) -> None:
    for request in requests:
        loop.scheduler.submit(request)
    loop.drain()
    assert_as_alone(*requests)


# --- hits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (10, 8), (13, 8)])
def test_a_hit_and_what_is_recomputed_are_the_whole_prompt_without_gap_or_overlap(length, cached):  # CASES 44, 46
    loop = cached_loop()
    base = tokens_of((1, 9))
    run(loop, request_of(0, base, max_tokens=1))  # publishes two whole pages
    prompt = (base + tokens_of((2, 9)))[:length]
    before = len(loop.engine.plans)
    again = request_of(1, prompt, max_tokens=3)
    run(loop, again)
    assert again.num_cached_tokens == cached
    [first] = [piece for piece in loop.engine.plans[before].slices]
    assert (first.start, first.num_tokens) == (cached, length - cached)
    assert loop.engine.plans[before].table.positions[: length - cached].tolist() == list(range(cached, length))


def test_a_page_whose_last_slot_was_sampled_but_never_written_is_not_published():  # CASES 27
    loop = cached_loop()
    first = request_of(0, tokens_of((1, 3)), max_tokens=1)
    run(loop, first)
    assert loop.engine.control.prefix_index.num_nodes == 0
    follower = request_of(1, [*first.tokens.tolist(), 7], max_tokens=2)
    run(loop, follower)
    assert follower.num_cached_tokens == 0


def test_generated_tokens_are_found_by_a_prompt_that_continues_them():
    loop = cached_loop()
    first = request_of(0, tokens_of((1, 5)), max_tokens=8)
    run(loop, first)  # 12 written tokens
    follower = request_of(1, [*first.tokens.tolist(), 7], max_tokens=2)
    run(loop, follower)
    assert follower.num_cached_tokens == 12


def test_a_file_admitted_at_once_computes_a_shared_prefix_once():
    loop = cached_loop(64, max_num_seqs=8)
    prefix = tokens_of((1, 16))
    requests = [request_of(i, prefix + tokens_of((i + 2, 3)), max_tokens=4) for i in range(8)]
    run(loop, *requests)
    metrics = loop.engine.control.metrics()
    assert [request.num_cached_tokens for request in requests] == [0] + [16] * 7
    assert (metrics.num_prefill_tokens, metrics.num_cached_tokens) == (16 + 8 * 3, 7 * 16)
    assert metrics.num_prefix_waits == 7
    assert metrics.page_hit_rate == 7 * 4 / (8 * 4)


def test_requests_without_the_prefix_are_not_held_up_by_those_that_wait_for_it():
    loop = cached_loop(max_num_seqs=3, prefill_chunk_tokens=4)
    prefix = tokens_of((1, 12))
    owner, waiter = request_of(0, prefix, max_tokens=2), request_of(1, [*prefix, 3], max_tokens=2)
    other = request_of(2, tokens_of((5, 4)), max_tokens=2)
    for request in (owner, waiter, other):
        loop.scheduler.submit(request)
    loop.step()
    assert [request.id for request in loop.scheduler.running] == [0, 2]
    loop.drain()
    assert_as_alone(owner, waiter, other)
    assert waiter.num_cached_tokens == 12


def test_a_waiter_computes_its_prefix_itself_when_its_owner_is_cancelled():
    loop = cached_loop(prefill_chunk_tokens=4)
    prefix = tokens_of((1, 12))
    owner, waiter = request_of(0, prefix, max_tokens=2), request_of(1, [*prefix, 3], max_tokens=2)
    loop.scheduler.submit(owner), loop.scheduler.submit(waiter)
    loop.step()
    loop.scheduler.cancel(0)
    loop.drain()
    assert_as_alone(waiter)
    assert waiter.num_cached_tokens == 4  # the one page that was written


def test_equal_prompts_submitted_together_leave_one_node_per_page_and_no_page_behind():  # CASES 53
    loop = cached_loop()
    prompt = tokens_of((1, 8))
    run(loop, *(request_of(i, prompt, max_tokens=1) for i in range(2)))  # a page short of a full match: both compute it
    metrics = loop.engine.control.metrics()
    assert (metrics.num_retained_pages, metrics.num_free_pages, metrics.num_leaked_pages) == (2, 30, 0)


def test_the_same_tokens_under_another_namespace_are_not_found():  # CASES 32, 39
    loop = cached_loop()
    prompt = tokens_of((1, 9))
    run(loop, request_of(0, prompt, max_tokens=1))
    loop.engine.control.prefix_namespace = b"another tenant's digest"
    again = request_of(1, prompt, max_tokens=1)
    run(loop, again)
    assert again.num_cached_tokens == 0


def test_a_reset_reports_what_it_cleared_and_nothing_is_found_afterwards():  # CASES 41, 45
    loop = cached_loop()
    prompt = tokens_of((1, 9))
    run(loop, request_of(0, prompt, max_tokens=1))
    cleared, freed = loop.engine.control.reset_prefix_cache(b"new weights")
    assert (cleared, len(freed), loop.engine.control.num_free_pages) == (2, 2, 32)
    again = request_of(1, prompt, max_tokens=1)
    run(loop, again)
    assert again.num_cached_tokens == 0
    assert loop.engine.control.reset_prefix_cache()[0] == 2


def test_a_reset_while_a_reader_runs_leaves_it_its_pages_and_frees_them_with_it():
    loop = cached_loop()
    prompt = tokens_of((1, 9))
    run(loop, request_of(0, prompt, max_tokens=1))
    reader = request_of(1, prompt, max_tokens=6)
    loop.scheduler.submit(reader)
    loop.step()
    loop.engine.control.reset_prefix_cache()
    check_invariants(loop.engine.control, loop.scheduler)
    loop.drain()
    assert_as_alone(reader)
    assert loop.engine.control.num_free_pages == 32


def test_a_request_whose_logits_were_not_finite_takes_back_what_it_published():  # CASES 119
    loop = cached_loop(prefill_chunk_tokens=4)
    prompt = tokens_of((1, 9))
    bad = request_of(0, prompt, max_tokens=2)
    loop.scheduler.submit(bad)
    for finite in (True, True, False):
        plan = loop.engine.run(loop.scheduler.slices(loop.scheduler.schedule()))
        loop.scheduler.advance(plan.slices)
        results = StepResults(np.zeros(1, np.int32), np.zeros(1, np.float32), np.array([finite]))
        loop.scheduler.record_step(plan.slices, results)
        check_invariants(loop.engine.control, loop.scheduler)
    assert (bad.finish_reason, bad.error) == ("error", NOT_FINITE)
    assert loop.engine.control.num_free_pages == 32
    again = request_of(1, prompt, max_tokens=2)
    run(loop, again)
    assert again.num_cached_tokens == 0


# --- prompt logprobs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 8, 9, 12, 13])
@pytest.mark.parametrize("first_scores", [True, False])
def test_prompt_logprobs_are_complete_on_a_hit_from_the_cache_or_computed_again(length, first_scores):  # CASES 87
    loop = cached_loop()
    base = tokens_of((1, 12))
    run(loop, request_of(0, base, max_tokens=1, want_prompt_logprobs=first_scores))
    prompt = (base + tokens_of((2, 3)))[:length]
    again = request_of(1, prompt, max_tokens=2, want_prompt_logprobs=True)
    run(loop, again)
    whole = (length - 1) // P
    # The logprob of the token behind the last known page comes from that page's last token: it is run again.
    reusable = whole if length in (8, 12) else max(min(length // P, 3) - 1, 0)
    assert again.num_cached_tokens == (P * reusable if first_scores else 0)
    third = request_of(2, prompt, max_tokens=2, want_prompt_logprobs=True)
    run(loop, third)
    assert third.num_cached_tokens >= again.num_cached_tokens


def test_logprobs_that_one_request_computed_serve_those_who_come_later():
    loop = cached_loop()
    prompt = tokens_of((1, 13))
    run(loop, request_of(0, prompt, max_tokens=1))
    scored = [request_of(i, prompt, max_tokens=0, want_prompt_logprobs=True) for i in (1, 2)]
    for request in scored:
        run(loop, request)
    assert [request.num_cached_tokens for request in scored] == [0, 8]


# --- room ----------------------------------------------------------------------------------------------


def test_pages_of_ended_requests_stay_until_room_is_needed_and_then_go():  # CASES 7
    loop = cached_loop(8)
    for i in range(10):
        run(loop, request_of(i, tokens_of((i, 8)), max_tokens=1))
        metrics = loop.engine.control.metrics()
        assert metrics.num_held_pages == 0 and metrics.num_evictable_pages == metrics.num_retained_pages
    assert metrics.num_evictions == 2 * 10 - 8


def test_four_requests_with_a_common_prefix_run_together_in_a_pool_that_could_hold_one_and_a_half():  # CASES 51
    loop = cached_loop(12)
    prefix = tokens_of((1, 24))
    run(loop, request_of(9, [*prefix, 1], max_tokens=1))
    requests = [request_of(i, prefix + tokens_of((i + 2, 2)), max_tokens=2) for i in range(4)]
    for request in requests:
        loop.scheduler.submit(request)
    loop.step()
    assert loop.scheduler.num_running == 4
    assert loop.engine.control.metrics().fragmentation < 1
    loop.drain()
    assert_as_alone(*requests)


def test_pages_that_a_request_is_about_to_pin_do_not_count_as_room_for_it():  # CASES 52
    loop = cached_loop(8)
    control: ControlPlane = loop.engine.control
    run(loop, request_of(0, tokens_of((1, 24)), max_tokens=1))  # six cached pages, two free
    outside = control.open()
    assert control.reserve([_piece(outside, 4)]) is not None  # one free page less
    request = request_of(1, tokens_of((1, 24)) + tokens_of((2, 6)), max_tokens=3)  # needs eight pages in all
    loop.scheduler.submit(request)
    assert len(loop.scheduler.schedule()) == 0
    check_invariants(control, loop.scheduler)
    assert control.prefix_index.num_locked == 0
    control.release(outside)
    loop.drain()
    assert_as_alone(request)


def test_a_demand_that_cannot_be_met_evicts_nothing():  # CASES 49, 50
    loop = cached_loop(8)
    control = loop.engine.control
    run(loop, request_of(0, tokens_of((1, 16)), max_tokens=1))
    holder = control.open()
    assert control.reserve([_piece(holder, 8)]) is not None
    other = control.open()
    assert control.reserve([_piece(other, 28)]) is None
    assert control.prefix_index.num_nodes == 4


def test_a_hot_prefix_outlives_the_suffixes_that_came_after_it():  # CASES 56
    loop = cached_loop(8, max_num_seqs=1)
    prefix = tokens_of((1, 8))
    for i in range(12):
        request = request_of(i, prefix + tokens_of((i + 2, 5)), max_tokens=2)
        run(loop, request)
        assert request.num_cached_tokens == (8 if i else 0)


def test_release_frees_exactly_the_pages_that_the_index_did_not_take():
    loop = cached_loop()
    released = []
    free = loop.scheduler._queue._release
    loop.scheduler._queue._release = lambda handle: released.append(free(handle).tolist())
    run(loop, request_of(0, tokens_of((1, 9)), max_tokens=1))
    assert released == [[2]]  # pages 0 and 1 are whole and stay


# --- preemption ----------------------------------------------------------------------------------------


def test_a_preempted_request_resumes_behind_its_own_pages_at_the_right_positions():  # CASES 61
    loop = cached_loop()
    first, victim = request_of(0, tokens_of((1, 6)), max_tokens=9), request_of(1, tokens_of((2, 7)), max_tokens=9)
    loop.scheduler.submit(first), loop.scheduler.submit(victim)
    loop.step_until(lambda: victim.num_generated == 3)
    assert loop.scheduler.preempt_newest() is victim
    loop.step()
    assert loop.engine.plans[-1].slices[-1].start == 8  # 7 + 3 tokens: two whole pages of the nine written
    loop.drain()
    assert_as_alone(first, victim)
    metrics = loop.engine.control.metrics()
    assert (metrics.num_recovered_tokens, metrics.num_recomputed_tokens) == (8, 1)


def test_preemption_publishes_nothing():
    """The step that fills the second page is under way: nobody knows yet what it brought."""
    loop = cached_loop()
    first, victim = request_of(0, [1, 2], max_tokens=9), request_of(1, tokens_of((2, 7)), max_tokens=9)
    loop.scheduler.submit(first), loop.scheduler.submit(victim)
    loop.step_until(lambda: victim.num_generated == 1)
    before = loop.engine.control.prefix_index.num_nodes
    assert (victim.num_computed, before) == (7, 1)
    plan = loop.engine.run(loop.scheduler.slices(loop.scheduler.schedule()))
    loop.scheduler.advance(plan.slices)
    assert victim.num_computed == 8
    assert loop.scheduler.preempt_newest() is victim
    assert loop.engine.control.prefix_index.num_nodes == before


def test_a_request_overtaken_while_it_waited_stands_before_the_one_that_overtook_it():  # CASES 71
    loop = cached_loop(max_num_seqs=3, prefill_chunk_tokens=4)
    prefix = tokens_of((1, 12))
    for request in (
        request_of(0, prefix, max_tokens=2),
        request_of(1, [*prefix, 3], max_tokens=2),
        request_of(2, tokens_of((5, 4)), max_tokens=2),
    ):
        loop.scheduler.submit(request)
    loop.step()
    assert loop.scheduler.preempt_newest().id == 2
    assert [request.id for request in loop.scheduler.waiting] == [1, 2]
    check_invariants(loop.engine.control, loop.scheduler)


# --- groups --------------------------------------------------------------------------------------------


def samples(n: int, prompt: list[int], *, group: int = 1, first_id: int = 0, **options: object) -> list[Request]:
    return [
        Request(
            RequestId(first_id + i), np.array(prompt), group=group, sampling=SamplingSpec(sample_index=i), **options
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9, 11])
def test_the_samples_of_a_prompt_compute_it_once_and_copy_its_partial_page(length, prefix_cache):
    loop = loop_of(control_of(32, P, max_num_seqs=4, prefix_cache=prefix_cache))
    group = samples(3, tokens_of((1, length)), max_tokens=6)
    run(loop, *group)
    metrics = loop.engine.control.metrics()
    assert metrics.num_prefill_tokens == length + 2  # the last prompt token once per sample: it samples
    assert [request.num_shared_tokens for request in group] == [0, length - 1, length - 1]
    assert metrics.num_free_pages + metrics.num_retained_pages == 32


def test_samples_share_whole_pages_while_they_run():
    loop = loop_of(control_of(32, P, max_num_seqs=4))
    for request in samples(4, tokens_of((1, 17)), max_tokens=9):
        loop.scheduler.submit(request)
    loop.step(), loop.step()
    assert loop.scheduler.num_running == 4
    references = loop.engine.control.allocator.references
    assert sorted(references[references > 0].tolist()) == [1, 1, 1, 1, 4, 4, 4, 4]
    loop.drain()
    assert loop.engine.control.num_free_pages == 32


def test_a_sample_forks_all_or_nothing_when_pages_are_short():  # CASES 9
    loop = loop_of(control_of(3, P, max_num_seqs=3))
    group = samples(3, tokens_of((1, 6)), max_tokens=3)
    run(loop, *group)
    assert loop.engine.control.num_free_pages == 3


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_three_samples_are_complete_though_one_had_ended_when_the_others_were_preempted(prefix_cache):  # CASES 73
    loop = loop_of(control_of(32, P, max_num_seqs=3, prefix_cache=prefix_cache))
    prompt = tokens_of((1, 6))
    group = samples(3, prompt, max_tokens=8)
    group[0].max_tokens = 2
    for request in group:
        loop.scheduler.submit(request)
    loop.step_until(lambda: group[0].finished and group[2].num_generated >= 2)
    loop.scheduler.preempt_newest()
    check_invariants(loop.engine.control, loop.scheduler)
    loop.drain()
    assert_as_alone(*group)


def test_a_sample_that_forks_after_a_reset_shares_pages_that_nobody_offers_again():
    loop = loop_of(control_of(8, P, max_num_seqs=2, prefix_cache=True))
    leader, fork = samples(2, tokens_of((1, 9)), max_tokens=6)
    loop.scheduler.submit(leader), loop.scheduler.submit(fork)
    loop.step()
    loop.engine.control.reset_prefix_cache()
    loop.drain()
    assert_as_alone(leader, fork)
    assert fork.num_shared_tokens == 8
    assert loop.engine.control.num_free_pages == 8


def test_a_copy_that_was_not_made_yet_is_dropped_with_its_request_and_its_source_is_not_held():
    loop = loop_of(control_of(8, P, max_num_seqs=2))
    leader, fork = samples(2, tokens_of((1, 6)), max_tokens=4)
    loop.scheduler.submit(leader), loop.scheduler.submit(fork)
    loop.step()
    loop.scheduler.schedule()  # the fork is in, its copy is not made
    assert loop.engine.control.sharing.copies.pending.shape == (2, 1)
    loop.scheduler.cancel(fork.id)
    check_invariants(loop.engine.control, loop.scheduler)
    loop.drain()
    assert loop.engine.control.num_free_pages == 8
    assert_as_alone(leader)


def test_the_source_of_a_copy_stays_until_the_copy_is_made_though_its_request_ends():
    loop = loop_of(control_of(8, P, max_num_seqs=2))
    leader, fork = samples(2, tokens_of((1, 6)), max_tokens=4)
    loop.scheduler.submit(leader), loop.scheduler.submit(fork)
    loop.step()
    loop.scheduler.schedule()
    loop.scheduler.cancel(leader.id)  # its partial page is poisoned only if it was freed
    check_invariants(loop.engine.control, loop.scheduler)
    loop.drain()
    assert_as_alone(fork)
    assert loop.engine.control.num_free_pages == 8


def test_a_row_that_holds_pages_cannot_adopt_and_a_source_cannot_give_what_is_not_written():
    control = control_of(8, P, prefix_cache=True)
    source, target = control.open(), control.open()
    with pytest.raises(PageStateError, match="has 0 tokens written, 3 are to be shared"):
        control.fork(source, target, 3)
    assert control.reserve([_piece(source, 5)]) is not None
    with pytest.raises(PageStateError, match="only a new request can share"):
        control.adopt(source, [])


def _piece(handle, num_tokens):
    from kv_control.plan import RequestSlice

    return RequestSlice(handle, 0, np.zeros(num_tokens, np.int32))


# --- any traffic ---------------------------------------------------------------------------------------


@st.composite
def shared_traffic(draw):
    """Requests over few prefixes, in tiny pools."""
    max_num_seqs = draw(st.integers(1, 5))
    size = draw(st.integers(1, 4))
    budget = draw(st.integers(max_num_seqs, 16))
    prefixes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from(prefixes),
                st.integers(0, 10),
                st.integers(0, 4),
                st.integers(0, 12),
                st.booleans(),
                st.sampled_from([None, None, 1, 2]),
            ),
            min_size=2,
            max_size=9,
        )
    )
    options = (draw(st.integers(2, 12)), size, max_num_seqs, budget, draw(st.none() | st.integers(1, budget)))
    return options, rows, draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(shared_traffic())
def test_every_request_gets_the_tokens_and_logprobs_it_would_get_alone_whatever_it_shares(traffic):  # CASES 43
    (num_pages, size, max_num_seqs, budget, chunk), rows, prefix_cache = traffic
    control = control_of(
        num_pages, size, max_num_seqs=max_num_seqs, max_model_len=40, max_tokens=budget, prefix_cache=prefix_cache
    )
    loop = loop_of(control, prefill_chunk_tokens=chunk)
    requests = []
    for i, (prefix, shared, own, max_tokens, scored, group) in enumerate(rows):
        prompt = tokens_of((prefix, shared), (i if group is None else 40 + group, own)) or [1]
        options = {"max_tokens": max_tokens, "want_prompt_logprobs": scored}
        if group is not None:
            prompt = tokens_of((group, 7 + group))
            request = Request(RequestId(i), np.array(prompt), group=group, **options)
        else:
            request = request_of(i, prompt, **options)
        if control.limits.fits(request.max_kv_tokens):
            loop.scheduler.submit(request)
            requests.append(request)
    steps = loop.drain(at_most=4000)
    assert steps <= max_steps(requests)
    for request in requests:
        prompt = request.prompt.tolist()
        assert request.finish_reason == "length"
        assert request.tokens[len(prompt) :].tolist() == completion_alone(prompt, request.max_tokens)
        if request.want_prompt_logprobs:
            assert request.prompt_logprobs[1:].tolist() == prompt_logprobs_alone(prompt)
    metrics = control.metrics()
    assert metrics.num_leaked_pages == 0 and metrics.num_held_pages == 0
    assert metrics.num_free_pages + metrics.num_retained_pages == num_pages


# --- found by an attack on the above -------------------------------------------------------------------


def test_a_sample_that_forks_from_one_whose_own_copy_is_not_made_yet_reads_what_that_one_will():
    loop = loop_of(control_of(16, P, max_num_seqs=3))
    leader, first, second = samples(3, tokens_of((1, 7)), max_tokens=4)
    for request in (leader, first):
        loop.scheduler.submit(request)
    loop.step()
    loop.scheduler.schedule()  # `first` is in, its partial page is not copied yet
    loop.scheduler.cancel(leader.id)
    loop.scheduler.submit(second)
    loop.scheduler.schedule()
    sources, targets = loop.engine.control.sharing.copies.pending
    assert len(targets) == 2 and not set(sources) & set(targets), "one dispatch copies all: no page is in both"
    loop.scheduler.cancel(first.id)
    check_invariants(loop.engine.control, loop.scheduler)
    loop.drain()
    assert_as_alone(second)
    assert loop.engine.control.num_free_pages == 16


def test_nobody_waits_for_what_runs_while_the_namespace_moves():
    loop = cached_loop(prefill_chunk_tokens=3)
    prompt = tokens_of((1, 13))
    old = request_of(0, prompt, max_tokens=3)
    loop.scheduler.submit(old)
    loop.step()  # three tokens of its first page are the old weights'
    loop.engine.control.reset_prefix_cache(b"new weights")
    new = request_of(1, prompt, max_tokens=3)
    loop.scheduler.submit(new)
    loop.step_until(lambda: old.finished)
    assert not new.waited_for_prefix
    loop.scheduler.cancel(new.id)
    loop.engine.control.reset_prefix_cache()
    assert not loop.scheduler._admission._prefilling, "nobody waits for what has ended"


def test_pages_begun_under_the_old_namespace_are_not_found_under_the_new_one():  # CASES 33, 41
    loop = cached_loop(prefill_chunk_tokens=3)
    prompt = tokens_of((1, 13))
    old = request_of(0, prompt, max_tokens=3)
    loop.scheduler.submit(old)
    loop.step()  # three tokens of its first page are the old weights'
    loop.engine.control.reset_prefix_cache(b"new weights")
    loop.drain()
    new, later = (request_of(i, prompt, max_tokens=3) for i in (1, 2))
    run(loop, new)
    run(loop, later)
    assert (new.num_cached_tokens, later.num_cached_tokens) == (0, 12)


def test_nobody_waits_for_pages_that_their_owner_can_no_longer_offer():
    loop = cached_loop(prefill_chunk_tokens=P)
    prompt = tokens_of((1, 5 * P + 1))
    owner = request_of(0, prompt, max_tokens=40)
    loop.scheduler.submit(owner)
    loop.step()
    loop.engine.control.reset_prefix_cache()
    loop.step()  # its second page finds its parent withdrawn
    first, second = request_of(1, prompt[: 2 * P + 1], max_tokens=1), request_of(2, prompt, max_tokens=2)
    loop.scheduler.submit(first)
    loop.step_until(lambda: first.finished)
    loop.scheduler.submit(second)
    loop.step_until(lambda: second.finished)
    assert not owner.finished and not second.waited_for_prefix
    loop.drain()
    assert_as_alone(owner, first, second)


def test_cached_tokens_are_those_of_the_admission_after_which_the_request_ran():
    loop = cached_loop(12)
    control = loop.engine.control
    prompt = tokens_of((1, 9))
    run(loop, request_of(0, prompt, max_tokens=1))
    front, again = request_of(1, tokens_of((3, 3)), max_tokens=2), request_of(2, prompt, max_tokens=2)
    loop.scheduler.submit(front), loop.scheduler.submit(again)
    loop.scheduler.schedule()
    assert again.num_cached_tokens == 8
    assert loop.scheduler.preempt_newest() is again  # sent back before it ran a token
    control.reset_prefix_cache()
    loop.drain()
    assert_as_alone(front, again)
    metrics = control.metrics()
    assert (again.num_cached_tokens, metrics.num_cached_tokens, metrics.num_recovered_tokens) == (0, 0, 0)
    assert metrics.num_prefix_pages_hit == 0
    assert metrics.num_prefill_tokens + metrics.num_cached_tokens == 9 + 3 + 9
