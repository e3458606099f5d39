"""The offline worker: rows in, results out, through one driver, without threads.

For:        turning rows into requests, keeping a bounded number of them in the queue, and handing results
            over as they finish.
Not for:    text (the caller detokenises; only rows with stop strings are read on their way), files, MaxText's types.
May import: kv_common, kv_control, kv_execution, maxtext_paged.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np

from kv_common.errors import RequestError
from kv_control.plan import RequestId
from kv_control.request import Request
from maxtext_paged.row_order import FIRST_WINDOW_PER_SEQ, PrefixOrderedRows
from maxtext_paged.rows import MAX_SAMPLES, RequestIds, Row, RowResult
from maxtext_paged.session import PagedSession
from maxtext_paged.stop_strings import StopWatch

QUEUED_PER_SEQ = 2
"""Rows kept waiting per running one: enough that admission always finds the next, few enough that memory
does not grow with the input."""

_END: Any = object()


@dataclass(frozen=True, slots=True)
class _Samples:
    """A row under way, and its requests in order of their samples."""

    row: Row
    requests: list[Request]
    watches: dict[RequestId, StopWatch]


@dataclass(slots=True)
class _Call:
    """One ``complete`` that is under way.

    Attributes:
      mine: its requests. cancelled: ids of rows that were cancelled since it began, drawn or not.
    """

    mine: dict[RequestId, _Samples] = field(default_factory=dict)
    cancelled: set[Hashable] = field(default_factory=set)


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
      tokenizer: what reads text for rows with stop strings (``decode``, and ``special_id`` if it has that); without
        one they are refused.
    """

    def __init__(self, session: PagedSession, stop_token_ids: Iterable[int] = (), tokenizer: Any = None) -> None:
        self.session = session
        self.stop_token_ids = frozenset(stop_token_ids)
        self._tokenizer = tokenizer
        self._watches: dict[RequestId, StopWatch] = {}
        self._calls: list[_Call] = []
        self._cancels: SimpleQueue[Hashable] = SimpleQueue()
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

    def cancel(self, row_id: Hashable) -> None:
        """End the row of this id, from any thread: at the next step, whatever state it is in by then.

        Its result says "cancelled" and has the tokens it got; a row that was not drawn yet is not run any more. A row
        that has ended, or that no call under way has, is left alone. Rows of later calls are other rows.
        """
        self._cancels.put(row_id)

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
        rows: Iterable[Row | RowResult | None],
        on_step: Callable[[PagedInferenceWorker], None] | None = None,
        watch: RowWatch | None = None,
    ) -> Generator[RowResult, None, None]:
        """Yield exactly one result per row, in completion order; rows are drawn as there is room for them.

        A row that cannot run yields an error and the others go on. When the iterator is closed early, what is
        still under way is cancelled and its pages return.

        Args:
          rows: a ``RowResult`` among them is handed through: what was refused before it came here keeps its turn. None
            says that there is no row now, which is allowed while some are under way.
          on_step: called after every step, for progress.
          watch: is told of rows, to time them.
        """
        driver = self.session.driver
        waiting = iter(rows)
        rows_left = True
        self._take_cancels()  # of rows of earlier calls
        call = _Call()
        self._calls.append(call)
        mine = call.mine
        limit = self.session.max_num_seqs * (1 + QUEUED_PER_SEQ)
        try:
            while rows_left or mine:
                self._take_cancels()
                while rows_left and len(mine) < limit:
                    row = next(waiting, _END)
                    if row is _END:
                        rows_left = False
                    if row is _END or row is None:
                        break
                    if isinstance(row, RowResult):
                        yield row
                        continue
                    if row.id in call.cancelled:
                        yield RowResult.refused(row, None, "cancelled")
                        continue
                    try:
                        samples = self._submit(row)
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
                        texts = {request_id: watch.text for request_id, watch in samples.watches.items()}
                        yield RowResult.of_samples(samples.row, samples.requests, texts)
        finally:
            self._calls.remove(call)
            for request_id in mine:
                driver.cancel(request_id)
                self._watches.pop(request_id, None)
            self._collect(driver.pop_finished())
            for request_id in mine:
                self._awaited.discard(request_id)
                self._finished.pop(request_id, None)

    def _submit(self, row: Row) -> _Samples:
        """Queue a row's requests; errors as in ``new_requests``, and then none is queued."""
        requests = self.new_requests(row)
        watches = {request.id: self._watch(row, request) for request in requests} if row.stop else {}
        for request in requests:  # the first is refused, or none is: they are alike
            self.session.driver.submit(request)
        self._watches.update(watches)
        return _Samples(row, requests, watches)

    def _take_cancels(self) -> None:
        """Hand ids that were cancelled to the calls under way, and end what they name."""
        while not self._cancels.empty():
            row_id = self._cancels.get()
            for call in self._calls:
                call.cancelled.add(row_id)
                for request_id, samples in call.mine.items():
                    if samples.row.id == row_id:
                        self.session.driver.cancel(request_id)

    def step(self) -> None:
        """Run one step of the shared loop; what it finished waits for the iterator it belongs to, if it has one."""
        self._take(self.session.driver.step())

    def settle(self) -> None:
        """Read the step that is in flight, as if nothing were to follow it."""
        self._take(self.session.driver.settle())

    def _take(self, ended: list[Request]) -> None:
        if self._watches:
            self._look_for_stops()
            ended = ended + self.session.driver.pop_finished()
        self._collect(ended)

    def _look_for_stops(self) -> None:
        """End requests whose text has come to a stop string; a fault of the tokenizer is the request's own."""
        scheduler = self.session.driver.scheduler
        for request_id, watch in list(self._watches.items()):
            request = watch.request
            try:
                if watch.look():
                    scheduler.finish(request, "stop")
                    request.finish_reason = "stop"  # also where its last token did both
            except Exception as error:
                message = f"its text could not be searched for stop strings: {type(error).__name__}: {error}"
                scheduler.finish(request, "error", message)
                request.finish_reason, request.error = "error", message
            if request.finished:
                del self._watches[request_id]

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
          RequestError: its prompt is no list of token ids, a count is negative, or nothing here reads text for its
            stop strings.
        """
        control = self.session.control
        stops = row.stop_token_ids | frozenset(self._special(row).values())
        max_tokens = row.max_tokens
        if max_tokens is None:
            # The last generated token is never written, so the pool may hold one token less than the completion has.
            room = min(control.limits.max_model_len, control.limits.max_request_tokens + 1) - len(row.tokens)
            max_tokens = max(room, 1)
        return Request(
            id=self._ids.new(),
            prompt=row.tokens,  # type: ignore[arg-type]  # checked and converted there
            sampling=row.sampling if sample_index == 0 else replace(row.sampling, sample_index=sample_index),
            max_tokens=max_tokens,
            stop_token_ids=stops if row.ignore_eos else stops | self.stop_token_ids,
            min_tokens=row.min_tokens,
            options=row.options,
            want_prompt_logprobs=row.want_prompt_logprobs,
        )

    def _watch(self, row: Row, request: Request) -> StopWatch:
        decode, special = self._tokenizer.decode, self._special(row)
        return StopWatch(request, row.stop, decode, include=row.include_stop, special=special)

    def _special(self, row: Row) -> dict[str, int]:
        """Those of a row's stop strings that are special tokens: text never shows them, so the tokens end it."""
        if not row.stop:
            return {}
        if self._tokenizer is None:
            raise RequestError(
                f"stop={list(row.stop)!r}: this engine has no tokenizer to find text with: use `stop_token_ids`"
            )
        special_id = getattr(self._tokenizer, "special_id", lambda text: None)
        found = {stop: special_id(stop) for stop in row.stop}
        return {stop: token for stop, token in found.items() if token is not None}
