"""The offline worker: rows in, results out, through one driver, without threads.

For:        turning rows into requests, keeping a bounded number of them in the queue, and handing results
            over as they finish.
Not for:    tokenizers and text (the caller detokenises), files, MaxText's types.
May import: kv_common, kv_control, kv_execution, maxtext_paged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kv_common.errors import RequestError
from kv_control.plan import RequestId
from kv_control.request import Request
from maxtext_paged.rows import RequestIds, Row, RowResult
from maxtext_paged.session import PagedSession

QUEUED_PER_SEQ = 2
"""Rows kept waiting per running one: enough that admission always finds the next, few enough that memory
does not grow with the input."""


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
        self, rows: Iterable[Row], on_step: Callable[[PagedInferenceWorker], None] | None = None
    ) -> Iterator[RowResult]:
        """Yield exactly one result per row, in completion order; rows are drawn as there is room for them.

        A row that cannot run yields an error and the others go on. When the iterator is closed early, what is
        still under way is cancelled and its pages return.

        Args:
          on_step: called after every step, for progress.
        """
        driver = self.session.driver
        waiting = iter(rows)
        rows_left = True
        mine: dict[RequestId, Row] = {}
        limit = self.session.max_num_seqs * (1 + QUEUED_PER_SEQ)
        try:
            while rows_left or mine:
                while rows_left and len(mine) < limit:
                    row = next(waiting, None)
                    if row is None:
                        rows_left = False
                        break
                    try:
                        request = self.new_request(row)
                        driver.submit(request)
                    except RequestError as error:
                        yield RowResult.refused(row, str(error))
                        continue
                    mine[request.id] = row
                    self._awaited.add(request.id)
                if not mine:
                    break
                self.step()
                if on_step is not None:
                    on_step(self)
                # By id, and only this call's own: several iterators may share one engine.
                for request_id in [request_id for request_id in mine if request_id in self._finished]:
                    self._awaited.discard(request_id)
                    yield RowResult.of(mine.pop(request_id), self._finished.pop(request_id))
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

    def new_request(self, row: Row) -> Request:
        """A row as a request of this session, not submitted yet.

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
            sampling=row.sampling,
            max_tokens=max_tokens,
            stop_token_ids=self.stop_token_ids | row.stop_token_ids,
            ignore_eos=row.ignore_eos,
            min_tokens=row.min_tokens,
            want_prompt_logprobs=row.want_prompt_logprobs,
        )
