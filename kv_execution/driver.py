"""The paged loop: admit, step, read, finish; preempt when the pool is full.

For:        policy around the runtime's two calls.
Not for:    page mechanics (runtime.py), tokenizers, files or MaxText.
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kv_common.errors import RequestError
from kv_control.invariants import check_invariants
from kv_control.plan import RequestId, RequestSlice
from kv_control.request import Request
from kv_control.scheduler import Scheduler
from kv_execution.runtime import PagedRuntime, SliceResult

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DriverMetrics:
    """Counts since the driver was made.

    Attributes:
      num_steps: steps run.
      num_prefill_tokens: prompt tokens run, and tokens run again after a preemption.
      num_generated_tokens: tokens sampled and kept.
      num_preemptions: times a request was sent back. num_preempted_requests: how many different ones.
      num_finished: requests ended, by any reason. num_failed: those that ended with an error.
      peak_running: most requests that ran in one step. peak_pages_held: most pages held after a step.
    """

    num_steps: int = 0
    num_prefill_tokens: int = 0
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
    """

    def __init__(self, runtime: PagedRuntime, scheduler: Scheduler, *, check: bool = False) -> None:
        self.runtime = runtime
        self.scheduler = scheduler
        self.metrics = DriverMetrics()
        self._check = check

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
        self.scheduler.submit(request)

    def cancel(self, request_id: RequestId) -> Request | None:
        """End a request in whatever state it is; its pages return. None if it is not here (any more)."""
        return self.scheduler.cancel(request_id)

    def run(self, on_step: Callable[[PagedDriver], None] | None = None) -> Iterator[Request]:
        """Step until nothing is left, yielding requests as they finish."""
        yield from self.pop_finished()
        while self.scheduler.has_work:
            yield from self.step()
            if on_step is not None:
                on_step(self)

    def step(self) -> list[Request]:
        """Run one step, if anything can run, and return the requests that ended since the last call."""
        if self.scheduler.has_work:
            slices = self.scheduler.slices(self.scheduler.schedule())
            prepared = self.runtime.prepare_step(slices) if slices else None
            if prepared is not None:
                outcome = self.runtime.run_step(prepared)
                self._dispatched(outcome.plan.slices)
                for result in outcome.read():
                    self._account(result)
            elif slices:
                self._make_room()
            if self._check:
                check_invariants(self.runtime.control, self.scheduler)
        return self.pop_finished()

    def _dispatched(self, slices: tuple[RequestSlice, ...]) -> None:
        metrics, control = self.metrics, self.runtime.control
        metrics.num_steps += 1
        metrics.peak_running = max(metrics.peak_running, len(slices))
        metrics.peak_pages_held = max(metrics.peak_pages_held, control.allocator.num_held)
        for piece in slices:
            request = self.scheduler.request_of(piece.handle)
            if request is not None and (piece.num_tokens > 1 or piece.start < request.num_prompt_tokens):
                metrics.num_prefill_tokens += piece.num_tokens
        self.scheduler.advance(slices)

    def _account(self, result: SliceResult) -> None:
        """Take one slice's results to its request, found by handle: a batch that changed meanwhile cannot mix them."""
        request = self.scheduler.request_of(result.slice.handle)
        if request is not None and not result.ok:
            self.scheduler.finish(
                request, "error", "the model's logits for this request are not finite (NaN or infinity)"
            )
            return
        generated = request.num_generated if request is not None else 0
        request = self.scheduler.record(
            result.slice, token=result.token, logprob=result.logprob, target_logprobs=result.target_logprobs
        )
        if request is not None:
            self.metrics.num_generated_tokens += request.num_generated - generated

    def _make_room(self) -> None:
        """The pool had no room for the step: send the newest back, to be computed again later."""
        victim = self.scheduler.preempt_newest()
        if victim is not None:
            self.metrics.num_preemptions += 1
            self.metrics.num_preempted_requests += victim.num_preemptions == 1
            logger.debug("preempted request %s after %d generated tokens", victim.id, victim.num_generated)
            return
        [request] = self.scheduler.running
        control = self.runtime.control
        held = control.pages_held(request.handle) if request.handle is not None else 0
        self.scheduler.finish(
            request,
            "error",
            f"needs more than the {held} pages it holds and {control.num_free_pages} of {control.num_pages} are free "
            "although nothing else runs: release the handles that were opened outside this scheduler",
        )

    def pop_finished(self) -> list[Request]:
        """Requests that ended since the last call, in the order in which they did."""
        finished = self.scheduler.pop_finished()
        self.metrics.num_finished += len(finished)
        self.metrics.num_failed += sum(request.finish_reason == "error" for request in finished)
        return finished
