"""What runs next: admission, chunking, preemption, and the end of every request.

For:        deciding ``{request: num_tokens}`` for one step after another under a token budget.
Not for:    pages of a step (control_plane), running it (kv_execution) or choosing tokens.
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import ConfigError, InvariantError, RequestError, RequestTooLarge, SchedulerStalled
from kv_control.control_plane import ControlPlane
from kv_control.plan import RequestHandle, RequestId, RequestSlice, Scheduled
from kv_control.request import FinishReason, Request, RequestStatus

MAX_IDLE_SCHEDULES = 3
"""Empty decisions in a row, with work, after which the wait is taken to be endless."""


def max_steps(requests: Iterable[Request]) -> int:
    """Most steps a run over ``requests`` takes, at any pool size at which each of them fits alone.

    In every step the oldest unfinished request computes at least one token. It is never preempted
    (the newest is), so whatever it holds it keeps; decodes leave it a token of the budget, because the
    budget is at least ``max_num_seqs`` and it takes one of those rows; among prefills it comes first; and
    with all others sent back the pool holds it. A request computes at most ``prompt + max_tokens - 1``
    tokens after its last preemption, one more when a step runs ahead of its last token. So the steps in
    which it is the oldest are at most ``prompt + max_tokens``, and every step has an oldest request.

    >>> max_steps([Request(RequestId(0), np.array([1, 2, 3]), max_tokens=4)])
    7
    """
    return sum(request.num_prompt_tokens + request.max_tokens for request in requests)


class Scheduler:
    """Requests in order of arrival: the running ones are always older than the waiting ones.

    Each step: first one token for every request that decodes, then the prompts being computed, then
    waiting requests from the front, until the budget is spent. Nobody overtakes the front.

    Args:
      control: rows and pages.
      max_num_batched_tokens: token budget of a step; bounds its latency.
      max_num_seqs: requests that run at once.
      max_model_len: most tokens of one request, prompt and completion.
      prefill_chunk_tokens: most tokens of one prompt per step; None leaves it to the budget.
      release: gives a handle's pages back; by default ``control.release``. A runtime that must see the
        freed pages passes its own.

    Raises:
      ConfigError: the budget cannot give every running request a token, or a limit exceeds the control
        plane's.
    """

    def __init__(
        self,
        control: ControlPlane,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        prefill_chunk_tokens: int | None = None,
        release: Callable[[RequestHandle], object] | None = None,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"paged_max_num_batched_tokens={max_num_batched_tokens} is below "
                f"paged_max_num_seqs={max_num_seqs}: a step could not give every running request its token"
            )
        for name, value, limit in (
            ("paged_max_num_batched_tokens", max_num_batched_tokens, control.token_ladder.top),
            ("paged_max_num_seqs", max_num_seqs, control.max_num_seqs),
            ("max_target_length", max_model_len, control.max_model_len),
            ("paged_prefill_chunk_tokens", prefill_chunk_tokens, max_num_batched_tokens),
        ):
            if value is not None and not 1 <= value <= limit:
                raise ConfigError(f"{name}={value}: must lie in 1..{limit}")
        self.control = control
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.prefill_chunk_tokens = prefill_chunk_tokens or max_num_batched_tokens
        self.num_preemptions = 0
        self._release = release or control.release
        self._waiting: OrderedDict[RequestId, Request] = OrderedDict()  # in order of arrival
        self._running: OrderedDict[RequestId, Request] = OrderedDict()  # in order of arrival, all older
        self._by_row: list[Request | None] = [None] * control.max_num_seqs
        self._finished: list[Request] = []
        self._num_arrivals = 0
        self._num_idle_schedules = 0

    # --- the queue -----------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing: new or preempted."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._running or self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        """Running requests, oldest first."""
        return tuple(self._running.values())

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Waiting requests, oldest first."""
        return tuple(self._waiting.values())

    def submit(self, request: Request) -> None:
        """Queue a request, or refuse it before anything is held. Lowers ``max_tokens`` to fit the context.

        A request with nothing to compute (``max_tokens=0`` and no prompt logprobs) is finished on return.

        Raises:
          RequestError: an empty prompt, an id that is in use, or a request that was submitted before.
          RequestTooLarge: the context or the pool can never hold it; other requests go on.
        """
        if request.num_prompt_tokens == 0:
            raise RequestError("the prompt is empty: a model needs at least one token to continue")
        if request.id in self._waiting or request.id in self._running:
            raise RequestError(f"request id {request.id} is in use")
        if request.arrival >= 0:
            raise RequestError(f"request {request.id} was submitted before")
        if request.num_prompt_tokens > self.max_model_len:
            raise RequestTooLarge(
                f"the prompt has {request.num_prompt_tokens} tokens, the context holds {self.max_model_len}: "
                "raise `max_target_length` or shorten the prompt"
            )
        max_tokens = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
        self.control.check_fits(request.num_prompt_tokens + max(max_tokens - 1, 0))
        request.max_tokens = max_tokens
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._waiting[request.id] = request
        if request.max_tokens == 0 and not request.want_prompt_logprobs:
            self.finish(request, "length")

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request in whatever state it is; its row and pages go back at once."""
        if request.finished:
            return
        if self._waiting.pop(request.id, None) is None and self._running.pop(request.id, None) is None:
            raise RequestError(f"request {request.id} is not one of this scheduler's")
        self._give_back(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.error = reason, error
        self._finished.append(request)

    def cancel(self, request_id: RequestId) -> Request | None:
        """End a waiting, running or preempted request as "cancelled"; None when there is none of this id."""
        request = self._waiting.get(request_id) or self._running.get(request_id)
        if request is not None:
            self.finish(request, "cancelled")
        return request

    def pop_finished(self) -> list[Request]:
        """Requests that ended since the last call, in the order in which they did."""
        finished, self._finished = self._finished, []
        return finished

    # --- one step ------------------------------------------------------------------------------------

    def schedule(self) -> Scheduled:
        """Decide the next step. Holds rows for those it lets in, but no pages: it may be called again
        after a step that found no room.

        Returns:
          An empty decision when nothing can run: no work, or a front that must wait for pages which others
          than this scheduler's requests hold. After ``MAX_IDLE_SCHEDULES`` of those the front is failed.

        Raises:
          SchedulerStalled: as often in a row, running requests had nothing to compute.
        """
        budget = self.max_num_batched_tokens
        chosen = {request.id: 1 for request in self._running.values() if request.num_uncomputed == 1}
        budget -= len(chosen)
        for request in self._running.values():
            if request.num_uncomputed > 1 and budget:
                chosen[request.id] = min(request.num_uncomputed, self.prefill_chunk_tokens, budget)
                budget -= chosen[request.id]
        while budget and (admitted := self._admit_front()) is not None:
            chosen[admitted.id] = min(admitted.num_uncomputed, self.prefill_chunk_tokens, budget)
            budget -= chosen[admitted.id]
        self._guard_progress(chosen)
        return Scheduled(MappingProxyType(chosen))

    def slices(self, scheduled: Scheduled) -> tuple[RequestSlice, ...]:
        """The step's slices: what to feed, whether to sample behind it, and whose prompt logprobs to read.

        Raises:
          RequestError: a request of the decision is no longer running.
        """
        return tuple(self._slice(request_id, n) for request_id, n in scheduled.num_tokens.items())

    def advance(self, slices: Iterable[RequestSlice]) -> None:
        """Count the tokens of a dispatched step as computed."""
        for piece in slices:
            request = self.request_of(piece.handle)
            if request is not None:
                request.num_computed = piece.start + piece.num_tokens

    def record(
        self,
        piece: RequestSlice,
        *,
        token: int | None = None,
        logprob: float = float("nan"),
        target_logprobs: NDArray[np.float32] | None = None,
    ) -> Request | None:
        """Take one slice's results of a dispatched step, and end its request if that was all.

        Call it for every slice, also for one that asked for nothing: it may have been the last.

        Args:
          token, logprob: what was sampled; given if and only if ``piece.sample`` is.
          target_logprobs: float32 ``[n]``, logprobs of ``piece.targets``; given if and only if those are.

        Returns:
          The request; None when it was preempted or ended meanwhile, and then the results are dropped
          (a preempted request computes the same ones again).

        Raises:
          InvariantError: results are missing, or belong to another position.
        """
        request = self.request_of(piece.handle)
        if request is None:
            return None
        if (token is None) != (piece.sample is None) or (target_logprobs is None) != (piece.targets is None):
            raise InvariantError(f"request {request.id}: results do not match what its slice asked for")
        if piece.targets is not None and target_logprobs is not None:
            request.record_prompt_logprobs(piece.start, piece.targets, target_logprobs)
        if token is not None:
            if piece.start + piece.num_tokens != request.num_tokens:
                raise InvariantError(
                    f"request {request.id}: a token for position {piece.start + piece.num_tokens} arrived, "
                    f"position {request.num_tokens} is next"
                )
            request.append(token, logprob)
        reason = request.ended()
        if reason is not None:
            self.finish(request, reason)
        return request

    def preempt_newest(self) -> Request | None:
        """Send the newest running request back to the front of the queue, to be computed again.

        Its generated tokens stay. None when at most one runs: the oldest is never sent back.
        """
        if len(self._running) <= 1:
            return None
        request_id, request = self._running.popitem()
        self._give_back(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting[request_id] = request
        self._waiting.move_to_end(request_id, last=False)  # all that wait arrived after all that run
        return request

    def request_of(self, handle: RequestHandle) -> Request | None:
        """The running request behind a handle; None when it was preempted or has ended."""
        request = self._by_row[handle.row]
        return request if request is not None and request.handle == handle else None

    # --- how -----------------------------------------------------------------------------------------

    def _slice(self, request_id: RequestId, num_tokens: int) -> RequestSlice:
        request = self._running.get(request_id)
        if request is None or request.handle is None:
            raise RequestError(f"request {request_id} is not running")
        start, end = request.num_computed, request.num_computed + num_tokens
        samples = end == request.num_tokens and request.num_generated < request.max_tokens
        return RequestSlice(
            handle=request.handle,
            start=start,
            tokens=request.tokens[start:end],
            sample=request.sampling if samples else None,
            targets=request.prompt_targets(start, num_tokens),
        )

    def _admit_front(self) -> Request | None:
        """Let the front in if a row is free and the pages it needs are not already spoken for."""
        if not self._waiting or len(self._running) >= self.max_num_seqs:
            return None
        request = next(iter(self._waiting.values()))
        if self._pages_wanted(request) > self.control.num_free_pages - self._pages_spoken_for():
            return None
        handle = self.control.open()
        if handle is None:
            return None
        del self._waiting[request.id]
        request.status, request.handle = RequestStatus.RUNNING, handle
        self._running[request.id] = request
        self._by_row[handle.row] = request
        return request

    def _pages_wanted(self, request: Request) -> int:
        """Pages for all tokens a request has and a page's worth more, as far as it can ever need them.

        Since all that run are counted so when another is let in, it is not sent back for want of room before
        one of them has outgrown a page's worth of new tokens: a resumed request does not bounce.
        """
        layout = self.control.layout
        return layout.pages_for(min(request.num_tokens + layout.tokens_per_page, request.max_kv_tokens))

    def _pages_spoken_for(self) -> int:
        """Free pages that running requests still want, beyond those they hold."""
        return sum(
            max(self._pages_wanted(request) - self.control.pages_held(request.handle), 0)
            for request in self._running.values()
            if request.handle is not None
        )

    def _give_back(self, request: Request) -> None:
        """Return a request's row and pages, if it has any; what was computed there is lost."""
        request.num_computed = 0
        if request.handle is not None:
            self._by_row[request.handle.row] = None
            handle, request.handle = request.handle, None
            self._release(handle)

    def _guard_progress(self, chosen: dict[RequestId, int]) -> None:
        """End a wait that nothing can end: empty decisions in a row although there is work."""
        if chosen or not self.has_work:
            self._num_idle_schedules = 0
            return
        self._num_idle_schedules += 1
        if self._num_idle_schedules < MAX_IDLE_SCHEDULES:
            return
        self._num_idle_schedules = 0
        if self._running:
            raise SchedulerStalled(
                f"requests {list(self._running)} run and have nothing left to compute: "
                "the results of their last step were never recorded"
            )
        front = next(iter(self._waiting.values()))
        self.finish(
            front,
            "error",
            f"needs {self._pages_wanted(front)} pages and a row; {self.control.num_free_pages} pages of "
            f"{self.control.num_pages} and {self.control.num_free_rows} rows are free although nothing runs: "
            "release the handles that were opened outside this scheduler",
        )
