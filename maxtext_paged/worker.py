"""The offline worker: rows in, results out, through one driver, without threads.

For:        turning rows into requests, keeping a bounded number of them in the queue, and handing results
            over as they finish.
Not for:    tokenizers and text (the caller detokenises), files, MaxText's types.
May import: kv_common, kv_control, kv_execution, maxtext_paged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from kv_common.errors import RequestError
from kv_control.plan import RequestId
from kv_control.request import Request
from maxtext_paged.row_order import PrefixOrderedRows
from maxtext_paged.rows import MAX_SAMPLES, RequestIds, Row, RowResult
from maxtext_paged.session import PagedSession

QUEUED_PER_SEQ = 2
"""Rows kept waiting per running one: enough that admission always finds the next, few enough that memory
does not grow with the input."""

FIRST_WINDOW_PER_SEQ = 4
"""Rows of the first ordered window per running one."""


@dataclass(frozen=True, slots=True)
class _Samples:
    """A row under way, and its requests in order of their samples."""

    row: Row
    requests: list[Request]


class RowWatch(Protocol):
    """Is told when rows enter and leave the queue, and when a step begins (``report.Recorder`` is one)."""

    def submitted(self, index: int, request_ids: Iterable[int]) -> None:
        """Row ``index`` entered the queue with these requests, one for each sample."""

    def step_begins(self) -> None:
        """A step is about to begin."""

    def ended(self, request_id: int, num_generated: int, *, ran: bool) -> None:
        """A request ended in the last step; ``ran``: whether any step ran it."""


class PagedInferenceWorker:
    """Completes rows through a session's driver.

    Args:
      session: the assembled loop.
      stop_token_ids: end tokens of the model and tokenizer; rows add their own.
    """

    def __init__(self, session: PagedSession, stop_token_ids: Iterable[int] = ()) -> None:
        self.session = session
        self.stop_token_ids = frozenset(stop_token_ids)
        self._ids = RequestIds()
        self._awaited: set[RequestId] = set()
        self._finished: dict[RequestId, Request] = {}
        self._ordered: PrefixOrderedRows | None = None

    @property
    def attainable_tokens(self) -> int | None:
        """Prompt tokens that sharing can avoid at best in the rows of the last ``in_file_order``; None if it kept the
        input's order."""
        return None if self._ordered is None else self._ordered.attainable_tokens

    def in_file_order(self, rows: Iterable[Row]) -> Iterable[Row]:
        """Rows of an input that is known as a whole, in the order that ``paged_file_order`` asks for."""
        choice, control = self.session.options.paged_file_order, self.session.control
        self._ordered = None
        if choice == "input" or (choice == "auto" and control.prefix_index is None):
            return rows
        first = FIRST_WINDOW_PER_SEQ * self.session.max_num_seqs
        self._ordered = PrefixOrderedRows(rows, control.layout.tokens_per_page, first_window=first)
        return self._ordered

    def stop_drawing(self) -> None:
        """Start no more rows of the last ``in_file_order``, those that were read ahead included."""
        if self._ordered is not None:
            self._ordered.close()

    def update_params(self, params: Any) -> None:
        """Exchange the weights (scanned or not); what starts from now on uses them. Nothing compiles."""
        self.session.update_params(params)

    def run_inference(
        self,
        rows: Iterable[Row],
        rng: Any = None,
        on_step: Callable[[PagedInferenceWorker], None] | None = None,
    ) -> list[RowResult]:
        """Complete all rows and return one result for each, in the order of their ``index``.

        Args:
          rows: drawn as there is room for them.
          rng: run key from now on, also of later calls; None keeps the one there is. The same rows under the same
            key give the same tokens again.
          on_step: as in ``complete``.
        """
        if rng is not None:
            self.session.set_rng(rng)
        return sorted(self.complete(rows, on_step), key=lambda result: result.row.index)

    def complete(
        self,
        rows: Iterable[Row],
        on_step: Callable[[PagedInferenceWorker], None] | None = None,
        watch: RowWatch | None = None,
    ) -> Iterator[RowResult]:
        """Yield exactly one result per row, in completion order; rows are drawn as there is room for them.

        A row that cannot run yields an error and the others go on. When the iterator is closed early, what is
        still under way is cancelled and its pages return.

        Args:
          on_step: called after every step, for progress.
          watch: is told of rows, to time them.
        """
        driver = self.session.driver
        waiting = iter(rows)
        rows_left = True
        mine: dict[RequestId, _Samples] = {}
        limit = self.session.max_num_seqs * (1 + QUEUED_PER_SEQ)
        try:
            while rows_left or mine:
                while rows_left and len(mine) < limit:
                    row = next(waiting, None)
                    if row is None:
                        rows_left = False
                        break
                    try:
                        samples = _Samples(row, self.new_requests(row))
                        for request in samples.requests:  # the first is refused, or none is: they are alike
                            driver.submit(request)
                    except RequestError as error:
                        yield RowResult.refused(row, str(error))
                        continue
                    for request in samples.requests:
                        mine[request.id] = samples
                        self._awaited.add(request.id)
                    if watch is not None:
                        watch.submitted(row.index, [request.id for request in samples.requests])
                if not mine:
                    break
                if isinstance(rows, PrefixOrderedRows):
                    rows.read_ahead()
                if watch is not None:
                    watch.step_begins()
                self.step()
                if on_step is not None:
                    on_step(self)
                # By id, and only this call's own: several iterators may share one engine.
                for request_id in [request_id for request_id in mine if request_id in self._finished]:
                    self._awaited.discard(request_id)
                    request = self._finished.pop(request_id)
                    samples = mine.pop(request_id)
                    if watch is not None:
                        watch.ended(request_id, request.num_generated, ran=request.ran)
                    if not any(request.id in mine for request in samples.requests):
                        yield RowResult.of_samples(samples.row, samples.requests)
        finally:
            for request_id in mine:
                driver.cancel(request_id)
            self._collect(driver.pop_finished())
            for request_id in mine:
                self._awaited.discard(request_id)
                self._finished.pop(request_id, None)

    def step(self) -> None:
        """Run one step of the shared loop; what it finished waits for the iterator it belongs to, if it has one."""
        self._collect(self.session.driver.step())

    def _collect(self, requests: Iterable[Request]) -> None:
        self._finished.update((request.id, request) for request in requests if request.id in self._awaited)

    def new_requests(self, row: Row) -> list[Request]:
        """A row's samples as requests of one group, not submitted yet; errors as in ``new_request``."""
        if not isinstance(row.n, int | np.integer) or isinstance(row.n, bool) or not 1 <= row.n <= MAX_SAMPLES:
            raise RequestError(f"n={row.n!r}: must be a whole number in 1..{MAX_SAMPLES}")
        first = self.new_request(row)
        if row.n == 1:
            return [first]
        first.group = first.id
        rest = [self.new_request(row, sample_index=i) for i in range(1, row.n)]
        for request in rest:
            request.group = first.id
        return [first, *rest]

    def new_request(self, row: Row, *, sample_index: int = 0) -> Request:
        """A row, or one of its samples, as a request of this session, not submitted yet.

        Raises:
          RequestError: its prompt is no list of token ids, or a count is negative.
        """
        control = self.session.control
        max_tokens = row.max_tokens
        if max_tokens is None:
            # The last generated token is never written, so the pool may hold one token less than the completion has.
            room = min(control.max_model_len, control.max_request_tokens + 1) - len(row.tokens)
            max_tokens = max(room, 1)
        return Request(
            id=self._ids.new(),
            prompt=row.tokens,  # type: ignore[arg-type]  # checked and converted there
            sampling=row.sampling if sample_index == 0 else replace(row.sampling, sample_index=sample_index),
            max_tokens=max_tokens,
            stop_token_ids=self.stop_token_ids | row.stop_token_ids,
            ignore_eos=row.ignore_eos,
            min_tokens=row.min_tokens,
            want_prompt_logprobs=row.want_prompt_logprobs,
        )
