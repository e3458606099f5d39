"""Random traffic over shared pages on tiny pools: every law after every call, every token as alone.

What the requests read is checked by the host engine: a page that was given up, evicted, swapped or copied wrongly
changes the tokens of whoever reads it. `print_blob` makes a failing case one line to replay.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kv_common.errors import RequestTooLarge, StaleHandleError
from kv_common.window_group import WindowGroup
from kv_control.invariants import check_invariants
from kv_control.plan import RequestHandle, RequestId, SamplingSpec, StepBatch, StepResults
from kv_control.request import Request
from kv_control.step_accounts import NOT_FINITE
from tests.strategies import (
    VOCAB_SIZE,
    completion_alone,
    control_of,
    layout_of,
    loop_of,
    prompt_logprobs_alone,
)

MAX_MODEL_LEN = 24
NUM_OPERATIONS = 100_000
COUNTED: Counter[str] = Counter()
"""Calls made by every machine of this process, and what they brought about."""


def family(seed: int, length: int) -> list[int]:
    """The beginning of one of a few prompts: equal for equal seeds."""
    return [(17 * seed + 5 * i + i * i) % VOCAB_SIZE for i in range(length)]


def step_pages(window: int, tokens_per_page: int, num_tokens: int) -> int:
    """Most pages that one row can need of a window group in a step."""
    return WindowGroup(window, layout_of(1, tokens_per_page)).step_pages(num_rows=1, num_tokens=num_tokens)


class SharingMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(1, 12),
        tokens_per_page=st.integers(1, 4),
        max_num_seqs=st.integers(1, 4),
        spare_budget=st.integers(0, 12),
        chunk=st.none() | st.integers(1, 5),
        prefix_cache=st.sampled_from([True, True, True, False]),
        windows=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), max_size=2),
    )
    def start(self, num_pages, tokens_per_page, max_num_seqs, spare_budget, chunk, prefix_cache, windows):
        budget = max_num_seqs + spare_budget
        # As few pages as a window group may have, and some more.
        alone = min(num_pages, -(-MAX_MODEL_LEN // tokens_per_page))
        group_pages = [min(alone, step_pages(w, tokens_per_page, budget)) + more for w, more in windows]
        self.control = control_of(
            num_pages,
            tokens_per_page,
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            max_tokens=budget,
            prefix_cache=prefix_cache,
            windows=[(window, pages) for (window, _), pages in zip(windows, group_pages, strict=True)],
        )
        self.loop = loop_of(self.control, prefill_chunk_tokens=None if chunk is None else min(chunk, budget))
        self.scheduler, self.engine = self.loop.scheduler, self.loop.engine
        self.requests: list[Request] = []
        self.in_flight = None
        self.stale: list[RequestHandle] = []
        self.num_submitted = 0
        self.num_weights = 0
        COUNTED["machines"] += 1

    # --- calls -----------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.requests) < 10)
    @rule(
        seed=st.integers(0, 2),
        shared=st.integers(0, 12),
        own=st.integers(0, 4),
        max_tokens=st.integers(0, 10),
        scored=st.booleans(),
        n=st.sampled_from([1, 1, 2, 3]),
    )
    def submit(self, seed, shared, own, max_tokens, scored, n):
        prompt = family(seed, shared) + [(self.num_submitted + i) % VOCAB_SIZE for i in range(own)] or [1]
        group = self.num_submitted if n > 1 else None
        for i in range(n):
            self.num_submitted += 1
            request = Request(
                RequestId(self.num_submitted),
                np.array(prompt),
                sampling=SamplingSpec(sample_index=i),
                max_tokens=max_tokens,
                want_prompt_logprobs=scored,
                group=group,
            )
            try:
                self.scheduler.submit(request)
            except RequestTooLarge:
                assert not self.control.limits.fits(request.max_kv_tokens)
                return
            if not request.finished:
                self.requests.append(request)

    @precondition(lambda self: self.in_flight is None and self.scheduler.has_work)
    @rule()
    def dispatch(self):
        slices = self.scheduler.slices(self.scheduler.schedule())
        if not slices:
            return
        plan = self.engine.run(slices)
        if plan is None:
            if self.scheduler.num_running == 1:
                raise AssertionError("one request alone found no room")
            self.preempt()
            return
        self.scheduler.advance(plan.slices)
        check_invariants(self.control, self.scheduler, plan=plan)
        self.in_flight = (plan, [self.engine.results(plan, i) for i in range(len(plan.slices))])

    @precondition(lambda self: self.in_flight is not None)
    @rule(broken=st.integers(0, 40))
    def collect(self, broken):
        """Results arrive; now and then one row's are not finite."""
        (plan, results), self.in_flight = self.in_flight, None
        batch: StepBatch = plan.slices
        ok = np.arange(len(batch)) != broken
        targets = None
        if batch.targets is not None:
            parts = [
                found.get("target_logprobs", np.full(piece.num_tokens, np.nan, np.float32))
                for piece, found in zip(batch, results, strict=True)
            ]
            targets = np.concatenate(parts).astype(np.float32)
        tokens = np.array([found.get("token", 0) for found in results], np.int32)
        logprobs = np.array([found.get("logprob", np.nan) for found in results], np.float32)
        hit = [self.scheduler.request_of(batch.handle(i)) for i in np.flatnonzero(~ok)]
        self.scheduler.record_step(batch, StepResults(tokens, logprobs, ok, targets))
        for request in hit:
            if request is not None:
                assert (request.finish_reason, request.error) == ("error", NOT_FINITE)
                COUNTED["not finite"] += 1
        self.settle()

    def settle(self):
        """Ended requests have what they would have alone."""
        for request in [request for request in self.requests if request.finished]:
            self.requests.remove(request)
            prompt = request.prompt.tolist()
            alone = completion_alone(prompt, request.max_tokens)
            assert request.tokens[len(prompt) :].tolist() == alone[: request.num_generated]
            if request.finish_reason == "length":
                assert request.num_generated == request.max_tokens
                if request.want_prompt_logprobs:
                    assert request.prompt_logprobs[1:].tolist() == prompt_logprobs_alone(prompt)
                COUNTED["completed"] += 1

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 20))
    def cancel(self, which):
        request = self.requests[which % len(self.requests)]
        if request.handle is not None:
            self.stale.append(request.handle)
        assert self.scheduler.cancel(request.id) is request
        self.settle()

    @precondition(lambda self: self.scheduler.num_running > 1)
    @rule()
    def preempt(self):
        victim = self.scheduler.running[-1]
        self.stale.append(victim.handle)
        nodes = 0 if self.control.prefix_index is None else self.control.prefix_index.num_nodes
        assert self.scheduler.preempt_newest() is victim
        if self.control.prefix_index is not None:
            assert self.control.prefix_index.num_nodes <= nodes, "preemption publishes nothing"
        COUNTED["preempted"] += 1

    @precondition(lambda self: self.control.prefix_index is not None and self.control.prefix_index.num_evictable)
    @rule(n=st.integers(1, 4))
    def evict(self, n):
        before = self.control.prefix_index.num_evictable
        pages = self.control.prefix_index.evict(n)
        freed = self.control.allocator.free(pages)
        assert len(freed) == min(n, before)
        self.engine.slots[freed] = -3
        COUNTED["evicted"] += len(freed)

    @precondition(lambda self: self.control.prefix_index is not None and self.control.prefix_index.num_nodes > 2)
    @rule(update=st.booleans(), seldom=st.integers(0, 3))
    def reset(self, update, seldom):
        """The cache is emptied; with new weights nothing may run, as `update_params` has it."""
        if seldom or (update and (self.scheduler.has_work or self.in_flight is not None)):
            return
        self.num_weights += update
        namespace = str(self.num_weights).encode() if update else None
        before = len(self.control.prefix_index.pages)
        cleared, freed = self.control.reset_prefix_cache(namespace)
        assert cleared <= before
        self.engine.slots[freed] = -4
        COUNTED["reset"] += 1

    @precondition(lambda self: self.stale)
    @rule(which=st.integers(0, 20))
    def use_a_stale_handle(self, which):
        handle = self.stale[which % len(self.stale)]
        with pytest.raises(StaleHandleError):
            self.control.release(handle)
        assert self.scheduler.request_of(handle) is None

    # --- after every call --------------------------------------------------------------------------------

    @invariant()
    def every_law_holds(self):
        COUNTED["operations"] += 1
        if hasattr(self, "loop"):
            check_invariants(self.control, self.scheduler)

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        if self.in_flight is not None:
            self.collect(broken=-1)
        self.loop.drain()
        self.settle()
        assert not self.requests
        metrics = self.control.metrics()
        COUNTED["cached tokens"] += metrics.num_cached_tokens
        COUNTED["shared tokens"] += metrics.num_shared_tokens
        assert metrics.num_held_pages == 0 and metrics.num_leaked_pages == 0
        assert metrics.num_evictable_pages == metrics.num_retained_pages
        for window in metrics.windows:
            COUNTED["passed"] += window.num_passed_pages
            COUNTED["window evictions"] += window.num_evictions
            assert window.num_held_pages == 0 and window.num_evictable_pages == window.num_retained_pages
        _, freed = self.control.reset_prefix_cache()
        assert len(freed) == metrics.num_retained_pages
        assert self.control.num_free_pages == self.control.num_pages
        assert all(one.allocator.num_free == one.allocator.num_pages for one in self.control.windows)


TestAFewThousandCalls = SharingMachine.TestCase
TestAFewThousandCalls.settings = settings(max_examples=60, stateful_step_count=50, print_blob=True)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_random_calls_keep_every_law():  # CASES 20
    COUNTED.clear()
    many = settings(
        max_examples=400,
        stateful_step_count=100,
        suppress_health_check=list(HealthCheck),
        deadline=None,
        print_blob=True,
        database=None,
    )
    while COUNTED["operations"] < NUM_OPERATIONS:
        run_state_machine_as_test(SharingMachine, settings=many)
    print(dict(COUNTED))
    for event in (
        "completed",
        "preempted",
        "evicted",
        "reset",
        "not finite",
        "cached tokens",
        "shared tokens",
        "passed",
        "window evictions",
    ):
        assert COUNTED[event], f"the traffic never reached: {event}"
