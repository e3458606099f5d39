"""Random calls on tiny pools beside a model that keeps its own books.

The model knows lengths only: it predicts which requests wait and run, how many tokens of each are written and
how many pages each holds. What is on those pages is checked by the engine, whose tokens depend on every slot read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_common.errors import PageStateError, RequestTooLarge, StaleHandleError
from kv_control.invariants import check_invariants
from kv_control.plan import RequestHandle, RequestSlice, StepPlan
from kv_control.request import Request
from tests.strategies import completion_alone, control_of, logprob_of, loop_of, prompt_logprobs_alone, request_of

MAX_MODEL_LEN = 24


@dataclass
class Books:
    """What the model believes of one unfinished request."""

    request: Request
    prompt: list[int]
    completion: list[int]
    max_tokens: int
    running: bool = False
    written: int = 0
    reserved: int = 0  # tokens its pages were last asked to hold
    generated: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt) + self.generated


@dataclass
class Outside:
    """A handle held by somebody else than the scheduler."""

    handle: RequestHandle
    written: int = 0


@dataclass
class Model:
    """All unfinished requests, oldest first, and the handles held outside."""

    live: list[Books] = field(default_factory=list)
    outside: list[Outside] = field(default_factory=list)


class ControlMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(1, 12),
        tokens_per_page=st.integers(1, 4),
        max_num_seqs=st.integers(1, 4),
        spare_budget=st.integers(0, 8),
        chunk=st.none() | st.integers(1, 4),
    )
    def start(self, num_pages, tokens_per_page, max_num_seqs, spare_budget, chunk):
        self.page = tokens_per_page
        self.budget = max_num_seqs + spare_budget
        self.chunk = self.budget if chunk is None else min(chunk, self.budget)
        self.control = control_of(
            num_pages,
            tokens_per_page,
            max_num_seqs=max_num_seqs + 1,  # one row that only outsiders can take
            max_model_len=MAX_MODEL_LEN,
            max_tokens=self.budget,
        )
        self.loop = loop_of(
            self.control,
            max_num_batched_tokens=self.budget,
            max_num_seqs=max_num_seqs,
            prefill_chunk_tokens=self.chunk,
        )
        self.scheduler, self.engine = self.loop.scheduler, self.loop.engine
        self.model = Model()
        self.in_flight: StepPlan | None = None
        self.results: list[dict] = []
        self.stale: list[RequestHandle] = []
        self.num_submitted = 0

    # --- what the model predicts ---------------------------------------------------------------------

    def pages(self, num_tokens: int) -> int:
        return len(range(0, num_tokens, self.page))

    def pages_held(self) -> int:
        inside = sum(self.pages(books.reserved) for books in self.model.live)
        return inside + sum(self.pages(outside.written) for outside in self.model.outside)

    def leave(self, books: Books, *, reason: str) -> None:
        """The request has ended."""
        self.model.live.remove(books)
        assert books.request.finish_reason == reason
        assert books.request.tokens.tolist() == books.prompt + books.completion[: books.generated]
        assert books.request.handle is None

    def decide(self) -> tuple[RequestSlice, ...]:
        """Ask for a decision and hold it against the rules."""
        scheduled = self.scheduler.schedule()
        chosen = dict(scheduled.num_tokens)
        failed = [books for books in self.model.live if books.request.finish_reason == "error"]
        if failed:  # the front waited for pages that outsiders hold
            assert failed == self.model.live[:1] and self.model.outside and not chosen
            self.leave(failed[0], reason="error")
        assert sum(chosen.values()) <= self.budget
        for books in self.model.live:
            left = books.length - books.written
            if books.running and left == 1:
                assert chosen[books.request.id] == 1  # a decode is never left out
            if books.request.id in chosen:
                assert 1 <= chosen[books.request.id] <= max(1, min(left, self.chunk))
                if not books.running:
                    assert all(older.running for older in self.model.live[: self.model.live.index(books)])
                    books.running = True
        for books in self.model.live:
            assert books.running == (books.request.handle is not None)
        running = [books.request.id for books in self.model.live if books.running]
        assert running == [books.request.id for books in self.model.live[: len(running)]]  # the oldest run
        assert sorted(chosen) == running and len(running) <= self.scheduler.max_num_seqs  # and all of them move
        return self.scheduler.slices(scheduled)

    def books_of(self, piece: RequestSlice) -> Books:
        return next(books for books in self.model.live if books.request.handle == piece.handle)

    def fits(self, slices) -> bool:
        """Whether the model's free pages hold what a step adds."""
        added = 0
        for piece in slices:
            books = self.books_of(piece)
            added += max(self.pages(piece.start + piece.num_tokens) - self.pages(books.reserved), 0)
        return added <= self.control.num_pages - self.pages_held()

    def note_reserved(self, slices) -> None:
        for piece in slices:
            books = self.books_of(piece)
            books.reserved = max(books.reserved, piece.start + piece.num_tokens)

    def send_back_newest(self) -> None:
        running = [books for books in self.model.live if books.running]
        handle = running[-1].request.handle if running else None
        victim = self.scheduler.preempt_newest()
        if len(running) <= 1:
            assert victim is None
            return
        assert victim is running[-1].request
        running[-1].running, running[-1].written, running[-1].reserved = False, 0, 0
        self.stale.append(handle)

    # --- calls ---------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.model.live) < 8)
    @rule(some=st.lists(st.tuples(st.integers(1, 10), st.integers(0, 12), st.booleans()), min_size=1, max_size=4))
    def submit(self, some):
        for prompt, max_tokens, wanted in some:
            self.submit_one(prompt, max_tokens, wanted)

    def submit_one(self, prompt, max_tokens, wanted):
        request = request_of(self.num_submitted, prompt, max_tokens=max_tokens, want_prompt_logprobs=wanted)
        self.num_submitted += 1
        slots = self.control.num_pages * self.page
        if prompt + max(max_tokens - 1, 0) > slots:
            with pytest.raises(RequestTooLarge):
                self.scheduler.submit(request)
            return
        self.scheduler.submit(request)
        tokens = request.prompt.tolist()
        books = Books(request, tokens, completion_alone(tokens, max_tokens), max_tokens)
        self.model.live.append(books)
        if max_tokens == 0 and not wanted:
            self.leave(books, reason="length")

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def dispatch(self):
        slices = self.decide()
        if not slices:
            return
        fits = self.fits(slices)
        plan = self.engine.run(slices)
        assert (plan is not None) == fits
        if plan is None:
            alone = self.scheduler.num_running == 1
            if alone:  # outsiders hold what it needs
                assert self.model.outside
                books = self.books_of(slices[0])
                self.scheduler.finish(books.request, "error", "no room")
                self.leave(books, reason="error")
            else:
                self.send_back_newest()
            return
        self.note_reserved(slices)
        for piece in slices:
            self.books_of(piece).written = piece.start + piece.num_tokens
        self.scheduler.advance(plan.slices)
        check_invariants(self.control, self.scheduler, plan=plan)
        self.in_flight = plan
        self.results = [self.engine.results(plan, i) for i in range(len(plan.slices))]

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def collect(self):
        """Record the step's results; requests may have been cancelled or preempted since it was dispatched."""
        plan, self.in_flight = self.in_flight, None
        for piece, results in zip(plan.slices, self.results, strict=True):
            books = next((b for b in self.model.live if b.request.handle == piece.handle), None)
            recorded = self.scheduler.record(piece, **results)
            assert recorded is (None if books is None else books.request)
            if books is None:
                continue
            if piece.sample is not None:
                books.generated += 1
                prefix = books.prompt + books.completion[: books.generated]
                assert books.request.tokens.tolist() == prefix
                assert books.request.logprobs[-1] == np.float32(logprob_of(prefix[:-1], prefix[-1]))
            if books.generated == books.max_tokens and books.written >= len(books.prompt):
                self.leave(books, reason="length")
                if books.request.want_prompt_logprobs:
                    assert books.request.prompt_logprobs[1:].tolist() == prompt_logprobs_alone(books.prompt)

    @precondition(lambda self: self.model.live)
    @rule(which=st.integers(0, 20))
    def cancel(self, which):
        books = self.model.live[which % len(self.model.live)]
        if books.request.handle is not None:
            self.stale.append(books.request.handle)
        assert self.scheduler.cancel(books.request.id) is books.request
        self.leave(books, reason="cancelled")

    @precondition(lambda self: any(books.running for books in self.model.live))
    @rule()
    def preempt(self):
        self.send_back_newest()

    @precondition(lambda self: self.in_flight is None)
    @rule(again=st.booleans())
    def reserve_and_think_better_of_it(self, again):
        """Reserve, perhaps twice, and cancel: pages that the last reservation added come back."""
        slices = self.decide()
        if not slices or not self.fits(slices):
            return
        if again:
            assert self.control.reserve(slices) is not None
            self.note_reserved(slices)
        reservation = self.control.reserve(slices)
        returned = self.control.cancel(reservation)
        self.engine.slots[returned] = -1
        if again:
            assert len(returned) == 0
        with pytest.raises(PageStateError):
            self.control.confirm_scrubbed(reservation)

    @precondition(lambda self: sum(outside.written for outside in self.model.outside) < 6)
    @rule(num_tokens=st.integers(1, 6))
    def outsider_writes(self, num_tokens):
        """Somebody uses the control plane beside the scheduler, as engine entry points do."""
        if self.model.outside:
            outside = self.model.outside[0]
        else:
            handle = self.control.open()
            if handle is None:
                return
            outside = Outside(handle)
            self.model.outside.append(outside)
        num_tokens = min(num_tokens, self.budget, MAX_MODEL_LEN - outside.written)
        if num_tokens == 0:
            return
        piece = RequestSlice(outside.handle, outside.written, np.full(num_tokens, 99, np.int32))
        added = self.pages(outside.written + num_tokens) - self.pages(outside.written)
        plan = self.engine.run((piece,))
        assert (plan is not None) == (added <= self.control.num_pages - self.pages_held())
        if plan is not None:
            outside.written += num_tokens
            assert self.engine.context(plan, 0) == [99] * outside.written

    @precondition(lambda self: self.model.outside)
    @rule()
    def outsider_leaves(self):
        outside = self.model.outside.pop()
        assert len(self.engine.release(outside.handle)) == self.pages(outside.written)
        self.stale.append(outside.handle)

    @precondition(lambda self: self.stale)
    @rule(which=st.integers(0, 20))
    def use_a_stale_handle(self, which):
        handle = self.stale[which % len(self.stale)]
        with pytest.raises(StaleHandleError):
            self.control.release(handle)
        assert self.scheduler.request_of(handle) is None

    # --- after every call ----------------------------------------------------------------------------

    @invariant()
    def the_books_agree(self):
        check_invariants(self.control, self.scheduler)
        assert self.control.num_free_pages == self.control.num_pages - self.pages_held()
        assert [r.id for r in self.scheduler.running] == [b.request.id for b in self.model.live if b.running]
        assert [r.id for r in self.scheduler.waiting] == [b.request.id for b in self.model.live if not b.running]
        for books in self.model.live:
            if books.running:
                assert self.control.num_written(books.request.handle) == books.written
                assert self.control.pages_held(books.request.handle) == self.pages(books.reserved)

    def teardown(self):
        """Whatever state the calls left: outsiders leave, everybody finishes, and the pool is whole again."""
        if not hasattr(self, "loop"):
            return
        while self.model.outside:
            self.outsider_leaves()
        if self.in_flight is not None:
            self.collect()
        live = list(self.model.live)
        self.loop.drain()
        for books in live:
            assert books.request.tokens.tolist() == books.prompt + books.completion
        assert self.control.num_free_pages == self.control.num_pages
        check_invariants(self.control, self.scheduler)


TestFewThousandCalls = ControlMachine.TestCase
TestFewThousandCalls.settings = settings(max_examples=60, stateful_step_count=50)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
class TestManyThousandCalls(ControlMachine.TestCase):  # CASES 20
    settings = settings(
        max_examples=300, stateful_step_count=100, suppress_health_check=list(HealthCheck), deadline=None
    )
