"""What dispatched steps did to their requests: tokens computed, tokens brought, who is done.

For:        accounting for a step when it is dispatched, and again when its results are read.
Not for:    deciding what runs (scheduler) or which token is chosen (kv_execution).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import InvariantError
from kv_control.admission import Admission
from kv_control.control_plane import ControlPlane
from kv_control.logit_options import Alternatives
from kv_control.plan import Int64, RequestSlice, StepBatch, StepResults
from kv_control.request import FinishReason, Request
from kv_control.request_table import RequestTable

NOT_FINITE = "the model's logits for this request are not finite (NaN or infinity)"
"""Why a request fails whose results are not ``ok``."""


class Finish(Protocol):
    """Ends a request; ``Scheduler.finish`` is one."""

    def __call__(self, request: Request, reason: FinishReason, error: str | None = None) -> None: ...


class StepAccounts:
    """The books of a scheduler's running requests.

    Args:
      control: rows and pages. table, admission: the scheduler's own.
      by_row: the request behind each row of the table, kept by the scheduler.
      running: all of them. finish: ends one.
    """

    def __init__(
        self,
        control: ControlPlane,
        table: RequestTable,
        admission: Admission,
        by_row: Sequence[Request | None],
        *,
        running: Callable[[], Iterable[Request]],
        finish: Finish,
    ) -> None:
        self._control, self._table, self._admission, self._by_row = control, table, admission, by_row
        self._running, self._finish = running, finish
        self._stop_ids: NDArray[np.int32] | None = None  # every token that stops any of them

    def running_changed(self) -> None:
        """A request entered or left."""
        self._stop_ids = None

    def advance(self, slices: Iterable[RequestSlice]) -> None:
        """Count the tokens of a dispatched step as computed."""
        batch = StepBatch.of(slices)
        table, counters = self._table, self._control.counters
        here = table.held_by(batch.rows, batch.epochs)
        rows, num_tokens, start = batch.rows[here], batch.num_tokens[here], batch.start[here]
        table.num_computed[rows] = start + num_tokens
        sampled = batch.rows[here & batch.samples]
        table.num_in_flight[sampled] += 1
        table.sample_index[sampled] = (np.cumsum(batch.samples) - 1)[here & batch.samples]
        if batch.options is not None:
            acted = batch.options.rows[here]
            table.options_sent[acted[acted >= 0]] = True
        counters.num_steps += 1
        prefill = (num_tokens > 1) | (start < table.num_prompt[rows])
        again = np.clip(table.num_seen[rows] - start, 0, num_tokens)
        counters.num_recomputed_tokens += int(again.sum())
        counters.num_prefill_tokens += int((num_tokens - again)[prefill].sum())
        table.num_seen[rows] = np.maximum(table.num_seen[rows], start + num_tokens)

    def record_step(self, batch: StepBatch, results: StepResults) -> None:
        """Take a dispatched step's results: tokens and logprobs join their requests, whole pages are offered to the
        prefix cache, and requests that are done end.

        Results of a request that was preempted or ended meanwhile are dropped (a preempted one computes the same
        ones again).

        Raises:
          InvariantError: results belong to another position.
        """
        table = self._table
        here = table.held_by(batch.rows, batch.epochs)
        for i in np.flatnonzero(here & ~results.ok).tolist():
            self._fail_not_finite(self._by_row[batch.rows[i]])
        here &= results.ok
        if results.target_logprobs is not None:
            self._record_targets(batch, results.target_logprobs, here)
        end = batch.start + batch.num_tokens
        sampled = here & batch.samples
        rows = batch.rows[sampled]
        wrong = end[sampled] != table.num_tokens[rows]
        if wrong.any():
            i = int(wrong.argmax())
            raise InvariantError(
                f"request {table.ids[rows[i]]}: a token for position {end[sampled][i]} arrived, "
                f"position {table.num_tokens[rows[i]]} is next"
            )
        tokens = results.tokens[sampled]
        table.append(rows, tokens, results.logprobs[sampled])
        table.num_in_flight[rows] -= 1
        if batch.options is not None and results.top_ids is not None and results.top_logprobs is not None:
            for i in np.flatnonzero(sampled & (batch.options.num_top > 0)).tolist():
                request, k = self._by_row[batch.rows[i]], int(batch.options.num_top[i])
                if request is not None:
                    request.alternatives.append(Alternatives(results.top_ids[i, :k], results.top_logprobs[i, :k]))
        self._control.counters.num_generated_tokens += len(rows)
        if self._control.prefix_index is not None:
            self._publish(batch.rows[here], end[here])
        num_tokens = table.num_tokens[rows]
        done = rows[self._stops(tokens) & (num_tokens >= table.may_stop_at[rows]) | (num_tokens >= table.end_at[rows])]
        scored = batch.rows[here & ~batch.samples & (end >= table.end_at[batch.rows])]  # the end of a prompt, no token
        for row in [*done.tolist(), *scored.tolist()]:
            request = self._by_row[row]
            reason = None if request is None else request.ended()
            if request is not None and reason is not None:
                self._finish(request, reason)

    # --- how -----------------------------------------------------------------------------------------

    def _stops(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """bool ``[len(tokens)]``, whether each can end any of the running requests."""
        stops = self._all_stop_ids()
        if not len(stops):
            return np.zeros(len(tokens), np.bool_)
        found: NDArray[np.bool_] = stops[np.minimum(stops.searchsorted(tokens), len(stops) - 1)] == tokens
        return found

    def _all_stop_ids(self) -> NDArray[np.int32]:
        """int32, tokens that can end any of the running requests, in order."""
        if self._stop_ids is None:
            sets = {request.stop_token_ids for request in self._running() if not request.ignore_eos}
            stops = sorted(frozenset().union(*sets))
            self._stop_ids = np.array([token for token in stops if -(2**31) <= token < 2**31], np.int32)
        return self._stop_ids

    def _record_targets(self, batch: StepBatch, values: NDArray[np.float32], here: NDArray[np.bool_]) -> None:
        if batch.targets is None:
            raise InvariantError("prompt logprobs arrived for a batch that asked for none")
        ends = batch.ends
        for i in np.flatnonzero(here & self._table.wants_targets[batch.rows]).tolist():
            request = self._by_row[batch.rows[i]]
            if request is not None:
                fed = slice(int(ends[i] - batch.num_tokens[i]), int(ends[i]))
                request.record_prompt_logprobs(int(batch.start[i]), batch.targets[fed], values[fed])

    def _publish(self, rows: Int64, num_computed: Int64) -> None:
        page = self._control.layout.tokens_per_page
        more = num_computed // page > self._table.num_published[rows]
        for row, computed in zip(rows[more].tolist(), num_computed[more].tolist(), strict=True):
            request = self._by_row[row]
            if request is not None:
                self._admission.publish(request, computed)

    def _fail_not_finite(self, request: Request | None) -> None:
        """End a request whose logits are not finite; what it offered to others is taken back."""
        if request is not None and request.handle is not None:
            self._control.sharing.withdraw(request.handle.row)
            self._finish(request, "error", NOT_FINITE)
