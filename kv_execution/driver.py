"""The paged loop: admit, dispatch, read the step before, finish; preempt when the pool is full.

A step is dispatched before the results of the one before it are read: its tokens go from one to the other on the
device, and the host plans while the device computes. A request that turns out to have ended has then run one token
too many, which is dropped; what it freed is used again only by later steps, and the device runs them in order.

For:        policy around the runtime's two calls.
Not for:    page mechanics (runtime.py), tokenizers, files or MaxText.
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue

from kv_common.errors import RequestError
from kv_control.invariants import check_invariants
from kv_control.logit_options import check_logit_options
from kv_control.plan import RequestId, StepBatch
from kv_control.request import Request
from kv_control.scheduler import Scheduler
from kv_execution.runtime import PagedRuntime
from kv_execution.step_outcome import StepOutcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DriverMetrics:
    """Counts since the driver was made; ``PagedRuntime.metrics`` has those of pages, sharing and programs.

    Attributes:
      num_steps: steps run.
      num_prefill_tokens: prompt tokens run for the first time. num_recomputed_tokens: run again after a preemption.
      num_cached_tokens: prompt tokens not run because the prefix cache had them.
      num_shared_tokens: prompt tokens not run because another sample of the same prompt had them.
      num_generated_tokens: tokens sampled and kept.
      num_preemptions: times a request was sent back. num_preempted_requests: how many different ones.
      num_finished: requests ended, by any reason. num_failed: those that ended with an error.
      peak_running: most requests that ran in one step. peak_pages_held: most pages in use after a step.
    """

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_cached_tokens: int = 0
    num_shared_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_preempted_requests: int = 0
    num_finished: int = 0
    num_failed: int = 0
    peak_running: int = 0
    peak_pages_held: int = 0


class PagedDriver:
    """Runs requests to their end through an existing runtime.

    A second loop would split shapes and cache accounting, so whoever wants to run steps takes this one.

    Args:
      runtime: where steps run.
      scheduler: the queue, over the runtime's own ``ControlPlane`` and releasing through ``runtime.release``.
      check: verify the conservation laws after every step (costs host time).
      ahead: dispatch each step before the last one is read.
    """

    def __init__(self, runtime: PagedRuntime, scheduler: Scheduler, *, check: bool = False, ahead: bool = True) -> None:
        self.runtime = runtime
        self.scheduler = scheduler
        self._check = check
        self._ahead = ahead
        self._in_flight: StepOutcome | None = None
        self._cancels: SimpleQueue[RequestId] = SimpleQueue()
        self._num_finished = self._num_failed = self._peak_running = self._peak_pages_held = 0

    @property
    def metrics(self) -> DriverMetrics:
        """Counts so far."""
        counters = self.runtime.control.counters
        return DriverMetrics(
            num_steps=counters.num_steps,
            num_prefill_tokens=counters.num_prefill_tokens,
            num_recomputed_tokens=counters.num_recomputed_tokens,
            num_cached_tokens=counters.num_cached_tokens,
            num_shared_tokens=counters.num_shared_tokens,
            num_generated_tokens=counters.num_generated_tokens,
            num_preemptions=counters.num_preemptions,
            num_preempted_requests=counters.num_preempted_requests,
            num_finished=self._num_finished,
            num_failed=self._num_failed,
            peak_running=self._peak_running,
            peak_pages_held=self._peak_pages_held,
        )

    def submit(self, request: Request) -> None:
        """Queue a request; it is checked before anything is held.

        Raises:
          RequestError: it is unusable: no tokens, tokens outside the vocabulary, or too large ever to fit.
        """
        vocab_size = self.runtime.model.vocab_size
        if len(request.prompt) and int(request.prompt.max()) >= vocab_size:
            raise RequestError(
                f"token id {int(request.prompt.max())} is outside the vocabulary of {vocab_size}: "
                "was it made by another model's tokenizer?"
            )
        check_logit_options(request, vocab_size)
        self.scheduler.submit(request)

    def cancel(self, request_id: RequestId) -> Request | None:
        """End a request in whatever state it is; its pages return. None if it is not here (any more)."""
        return self.scheduler.cancel(request_id)

    def cancel_soon(self, request_id: RequestId) -> None:
        """As ``cancel``, from any thread: done when the next step begins. Ids that are not here are ignored."""
        self._cancels.put(request_id)

    def run(self, on_step: Callable[[PagedDriver], None] | None = None) -> Iterator[Request]:
        """Step until nothing is left, yielding requests as they finish."""
        yield from self.pop_finished()
        while self.scheduler.has_work:
            yield from self.step()
            if on_step is not None:
                on_step(self)

    def step(self) -> list[Request]:
        """Dispatch a step, if anything can run, and read the one before it (or, without ``ahead``, itself).

        Returns:
          The requests that ended since the last call.
        """
        before, self._in_flight = self._in_flight, None
        while not self._cancels.empty():
            self.scheduler.cancel(self._cancels.get())
        if self.scheduler.has_work:
            slices = self.scheduler.slices(self.scheduler.schedule())
            if slices:
                self._in_flight = self._dispatch(slices, before)
                if self._in_flight is None and before is None:
                    self._make_room()
        if before is not None:
            self._read(before)
        if self._in_flight is not None and not self._ahead:
            self._read(self._in_flight)
            self._in_flight = None
        if not self.scheduler.has_work:
            self._in_flight = None  # whoever it ran for has ended
        if self._check:
            check_invariants(self.runtime.control, self.scheduler)
        return self.pop_finished()

    @property
    def fills_pipe(self) -> bool:
        """Whether the next ``step`` only dispatches, because none is in flight that it could read."""
        return self._ahead and self._in_flight is None

    def settle(self) -> list[Request]:
        """Read the step in flight, if there is one, and dispatch none: what was computed is counted.

        Returns:
          The requests that ended since the last call.
        """
        before, self._in_flight = self._in_flight, None
        if before is not None:
            self._read(before)
        return self.pop_finished()

    def _dispatch(self, slices: StepBatch, before: StepOutcome | None) -> StepOutcome | None:
        """Start a step, behind the one in flight; None when the pool has no room for it."""
        prepared = self.runtime.prepare_step(slices)
        if prepared is None:
            return None
        outcome = self.runtime.run_step(prepared, after=before)
        self._peak_running = max(self._peak_running, len(slices))
        self._peak_pages_held = max(self._peak_pages_held, self.runtime.control.allocator.num_held)
        self.scheduler.advance(slices)
        return outcome

    def _read(self, outcome: StepOutcome) -> None:
        self.scheduler.record_step(outcome.plan.slices, outcome.results())

    def _make_room(self) -> None:
        """The pool had no room for the step: send the newest back, to be computed again later."""
        victim = self.scheduler.preempt_newest()
        if victim is not None:
            logger.debug("preempted request %s after %d generated tokens", victim.id, victim.num_generated)
            return
        [request] = self.scheduler.running
        control = self.runtime.control
        held = control.pages_held(request.handle) if request.handle is not None else 0
        self.scheduler.finish(
            request,
            "error",
            f"needs more than the {held} pages it holds and {control.num_available_pages} of {control.num_pages} are "
            "free although nothing else runs: release the handles that were opened outside this scheduler",
        )

    def pop_finished(self) -> list[Request]:
        """Requests that ended since the last call, in the order in which they did."""
        finished = self.scheduler.pop_finished()
        self._num_finished += len(finished)
        self._num_failed += sum(request.finish_reason == "error" for request in finished)
        return finished
