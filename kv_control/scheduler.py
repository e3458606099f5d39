"""What runs next: admission, chunking, preemption, and the end of every request.

For:        deciding ``{request: num_tokens}`` for one step after another under a token budget.
Not for:    who waits and who runs (request_queue), pages of a step (control_plane), what a step brought
            (step_accounts), running it (kv_execution).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import ConfigError, InvariantError, RequestError, RequestTooLarge, SchedulerStalled
from kv_control.admission import Admission
from kv_control.control_plane import ControlPlane
from kv_control.logit_options import step_options
from kv_control.plan import Int64, RequestHandle, RequestId, RequestSlice, Scheduled, StepBatch, StepResults
from kv_control.request import FinishReason, Request
from kv_control.request_queue import RequestQueue
from kv_control.request_table import RequestTable
from kv_control.step_accounts import StepAccounts

MAX_IDLE_SCHEDULES = 3
"""Empty decisions in a row, with work, after which the wait is taken to be endless."""


def max_steps(requests: Iterable[Request]) -> int:
    """Most steps a run over ``requests`` takes, at any pool size at which each of them fits alone.

    In every step the request that was let in first of all that run computes at least one token. It is never
    preempted (the one let in last is), so whatever it holds it keeps; decodes leave it a token of the budget,
    because the budget is at least ``max_num_seqs`` and it takes one of those rows; among prefills it comes first;
    and with all others sent back the pool holds it. It stays the first until it ends, and computes at most
    ``prompt + max_tokens - 1`` tokens, one more when a step runs ahead of its last token. So the steps in which a
    request is the first are at most ``prompt + max_tokens``, and every step has a first one.

    >>> max_steps([Request(RequestId(0), np.array([1, 2, 3]), max_tokens=4)])
    7
    """
    return sum(request.num_prompt_tokens + request.max_tokens for request in requests)


class Scheduler:
    """Requests in order of arrival, served in that order.

    Each step: first one token for every request that decodes, then the prompts being computed, then waiting requests
    from the front, until the budget is spent. Nobody overtakes the front, except while it waits for a request that
    is just computing the beginning of its own prompt.

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
            ("paged_max_num_seqs", max_num_seqs, control.limits.max_num_seqs),
            ("max_target_length", max_model_len, control.limits.max_model_len),
            ("paged_prefill_chunk_tokens", prefill_chunk_tokens, max_num_batched_tokens),
        ):
            if value is not None and not 1 <= value <= limit:
                raise ConfigError(f"{name}={value}: must lie in 1..{limit}")
        self.control = control
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.prefill_chunk_tokens = prefill_chunk_tokens or max_num_batched_tokens
        self.table = RequestTable(control.limits.max_num_seqs, max_model_len)
        self._admission = Admission(control, self.table)
        self._queue = RequestQueue(control, self.table, self._admission, release=release or control.release)
        self._accounts = StepAccounts(
            control,
            self.table,
            self._admission,
            self._queue.by_row,
            running=self._queue.running.values,
            finish=self.finish,
        )
        self._queue.when_running_changes = self._accounts.running_changed
        self._num_idle_schedules = 0

    # --- the queue -----------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._queue.running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing: new or preempted."""
        return len(self._queue.waiting)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._queue.running or self._queue.waiting)

    @property
    def num_preemptions(self) -> int:
        """Times a request was sent back."""
        return self.control.counters.num_preemptions

    @property
    def running(self) -> tuple[Request, ...]:
        """Running requests, in the order in which they were let in."""
        return tuple(self._queue.running.values())

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Waiting requests, oldest first."""
        return tuple(self._queue.waiting.values())

    def submit(self, request: Request) -> None:
        """Queue a request, or refuse it before anything is held. Lowers ``max_tokens`` to fit the context.

        A request with nothing to compute (``max_tokens=0`` and no prompt logprobs) is finished on return.

        Raises:
          RequestError: an empty prompt, an id that is in use, or a request that was submitted before.
          RequestTooLarge: the context or the pool can never hold it; other requests go on.
        """
        if request.num_prompt_tokens == 0:
            raise RequestError("the prompt is empty: a model needs at least one token to continue")
        if self._queue.find(request.id) is not None:
            raise RequestError(f"request id {request.id} is in use")
        if request.arrival >= 0:
            raise RequestError(f"request {request.id} was submitted before")
        if request.num_prompt_tokens > self.max_model_len:
            raise RequestTooLarge(
                f"the prompt has {request.num_prompt_tokens} tokens, the context holds {self.max_model_len}: "
                "raise `max_target_length` or shorten the prompt"
            )
        max_tokens = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
        self.control.limits.check_fits(request.num_prompt_tokens + max(max_tokens - 1, 0))
        request.max_tokens = max_tokens
        self._queue.arrive(request)
        if request.max_tokens == 0 and not request.want_prompt_logprobs:
            self.finish(request, "length")

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request in whatever state it is; its row and pages go back at once."""
        if not request.finished:
            self._queue.end(request, reason, error)

    def cancel(self, request_id: RequestId) -> Request | None:
        """End a waiting, running or preempted request as "cancelled"; None when there is none of this id."""
        request = self._queue.find(request_id)
        if request is not None:
            self.finish(request, "cancelled")
        return request

    def pop_finished(self) -> list[Request]:
        """Requests that ended since the last call, in the order in which they did."""
        return self._queue.pop_finished()

    # --- one step ------------------------------------------------------------------------------------

    def schedule(self) -> Scheduled:
        """Decide the next step. Holds rows for those it lets in, but no pages: it may be called again
        after a step that found no room.

        It may run ahead of one dispatched step whose results are not recorded yet: a request whose next token is
        still on the device goes on from there, unless that token is known to be its last.

        Returns:
          An empty decision when nothing can run: no work, results to be recorded first, or a front that must wait for
          pages which others than this scheduler's requests hold. After ``MAX_IDLE_SCHEDULES`` of those in a row the
          front is failed.

        Raises:
          SchedulerStalled: as often in a row, running requests had nothing to compute.
        """
        table, rows = self.table, self._queue.running_rows()
        to_come = table.num_to_come(rows)
        left = to_come - table.num_computed[rows]
        in_flight = table.num_in_flight[rows]
        left[(in_flight > 1) | ((in_flight == 1) & (to_come >= table.end_at[rows]))] = 0  # until results are recorded
        decodes = rows[left == 1]
        chosen, counts = [decodes], [np.ones(len(decodes), np.int64)]
        budget = self.max_num_batched_tokens - len(decodes)
        behind = left > 1
        for row, missing in zip(rows[behind].tolist(), left[behind].tolist(), strict=True):
            if budget:
                budget -= self._take(row, missing, budget, chosen, counts)
        if budget and self._queue.waiting:
            for request in self._let_in(budget):
                assert request.handle is not None
                budget -= self._take(request.handle.row, request.num_uncomputed, budget, chosen, counts)
        decided = np.concatenate(chosen)
        self._guard_progress(len(decided) > 0)
        return Scheduled(table.ids[decided], decided, table.epochs[decided], np.concatenate(counts))

    def _take(self, row: int, missing: int, budget: int, chosen: list[Int64], counts: list[Int64]) -> int:
        count = min(missing, self.prefill_chunk_tokens, budget)
        chosen.append(np.array([row], np.int64))
        counts.append(np.array([count], np.int64))
        return count

    def slices(self, scheduled: Scheduled) -> StepBatch:
        """The step's slices: what to feed, whether to sample behind it, and whose prompt logprobs to read.

        Raises:
          RequestError: a request of the decision is no longer running.
        """
        table, rows, counts = self.table, scheduled.rows, scheduled.counts
        gone = ~table.held_by(rows, scheduled.epochs)
        if gone.any():
            raise RequestError(f"request {scheduled.ids[gone][0]} is not running")
        start = table.num_computed[rows]
        end = start + counts
        first = np.cumsum(counts) - counts
        position = np.arange(int(counts.sum())) + np.repeat(start - first, counts)
        tokens = table.tokens[np.repeat(rows, counts), position]
        ahead = table.num_in_flight[rows] > 0
        tokens[first[ahead]] = 0  # nobody knows it yet
        targets = None
        for i in np.flatnonzero(table.wants_targets[rows]).tolist():
            request = self._queue.by_row[rows[i]]
            wanted = None if request is None else request.prompt_targets(int(start[i]), int(counts[i]))
            if wanted is not None:
                targets = np.full(len(tokens), -1, np.int32) if targets is None else targets
                targets[first[i] : first[i] + counts[i]] = wanted
        samples = (end == table.num_to_come(rows)) & (end < table.end_at[rows])
        return StepBatch(
            rows=rows,
            epochs=scheduled.epochs,
            start=start,
            num_tokens=counts,
            tokens=tokens,
            samples=samples,
            sampling=table.sampling.take(rows),
            previous_sample=np.where(ahead, table.sample_index[rows], -1).astype(np.int32),
            targets=targets,
            options=step_options(table, rows, samples, self._queue.by_row),
        )

    def advance(self, slices: Iterable[RequestSlice]) -> None:
        """Count the tokens of a dispatched step as computed."""
        self._accounts.advance(slices)

    def record(
        self,
        piece: RequestSlice,
        *,
        token: int | None = None,
        logprob: float = float("nan"),
        target_logprobs: NDArray[np.float32] | None = None,
    ) -> Request | None:
        """``record_step`` for one slice on its own.

        Args:
          token, logprob: what was sampled; given if and only if ``piece.sample`` is.
          target_logprobs: float32 ``[n]``, logprobs of ``piece.targets``; given if and only if those are.

        Returns:
          The request; None when it was preempted or ended meanwhile.

        Raises:
          InvariantError: results are missing, or belong to another position.
        """
        request = self.request_of(piece.handle)
        if request is None:
            return None
        if (token is None) != (piece.sample is None) or (target_logprobs is None) != (piece.targets is None):
            raise InvariantError(f"request {request.id}: results do not match what its slice asked for")
        self.record_step(
            StepBatch.of([piece]),
            StepResults(
                tokens=np.array([0 if token is None else token], np.int32),
                logprobs=np.array([logprob], np.float32),
                ok=np.array([True]),
                target_logprobs=target_logprobs,
            ),
        )
        return request

    def record_step(self, batch: StepBatch, results: StepResults) -> None:
        """Take a dispatched step's results; see ``StepAccounts.record_step``."""
        self._num_idle_schedules = 0
        self._accounts.record_step(batch, results)

    def preempt_newest(self) -> Request | None:
        """Send the request that was let in last back to its place in the queue, to be computed again.

        Its generated tokens stay. None when at most one runs: the first is never sent back.
        """
        return self._queue.send_back_newest() if len(self._queue.running) > 1 else None

    def request_of(self, handle: RequestHandle) -> Request | None:
        """The running request behind a handle; None when it was preempted or has ended."""
        request = self._queue.by_row[handle.row]
        return request if request is not None and request.handle == handle else None

    # --- how -----------------------------------------------------------------------------------------

    def _let_in(self, budget: int) -> list[Request]:
        """Let requests in from the front while rows, pages and a token of the budget for each are left."""
        queue, entered = self._queue, []
        for request in list(islice(queue.waiting.values(), 2 * self.max_num_seqs)):
            if budget <= 0 or len(queue.running) >= self.max_num_seqs:
                break
            shared = self._admission.shared(request)
            if shared is None:
                self.control.counters.num_prefix_waits += not request.waited_for_prefix
                request.waited_for_prefix = True
                continue
            if not self._admission.fits(request, shared, queue.running_rows()) or not queue.enter(request, shared):
                break
            entered.append(request)
            budget -= min(request.num_uncomputed, self.prefill_chunk_tokens)
        return entered

    def _guard_progress(self, anything: bool) -> None:
        """End a wait that nothing can end: empty decisions in a row although there is work."""
        if anything or not self.has_work:
            self._num_idle_schedules = 0
            return
        self._num_idle_schedules += 1
        if self._num_idle_schedules < MAX_IDLE_SCHEDULES:
            return
        self._num_idle_schedules = 0
        if self._queue.running:
            raise SchedulerStalled(
                f"requests {list(self._queue.running)} run and have nothing left to compute: "
                "the results of their last step were never recorded"
            )
        front = next(iter(self._queue.waiting.values()))
        self.finish(
            front,
            "error",
            f"needs {self._admission.pages_wanted(front)} pages and a row; {self.control.num_available_pages} pages of "
            f"{self.control.num_pages} and {self.control.num_free_rows} rows are free although nothing runs: "
            "release the handles that were opened outside this scheduler",
        )
