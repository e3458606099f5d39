"""The one door to pages and rows: open, reserve, confirm, plan, commit, release.

For:        turning a step's slices into held pages and then into a packed page table, or into "no room".
Not for:    choosing what runs (scheduler) or running it (kv_execution).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import ConfigError, PageStateError, RequestTooLarge
from kv_common.layout import KvStorageLayoutV1
from kv_common.page_table import pack_page_arrays
from kv_common.pages import pages_for_tokens
from kv_control.allocator import PageAllocator
from kv_control.bucketing import Ladder, row_rung
from kv_control.page_map import PageMap
from kv_control.plan import RequestHandle, RequestSlice, Reservation, ScrubbedReservation, StepPlan

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(slots=True)
class _Current:
    """The one reservation that may still be confirmed, planned, committed or cancelled."""

    reservation: Reservation
    rows: Int64
    num_added: Int64
    scrubbed: ScrubbedReservation | None = None
    plan: StepPlan | None = None


class ControlPlane:
    """Pages, rows and written counts of all requests of one pool.

    A step goes ``reserve`` -> (scrub) -> ``confirm_scrubbed`` -> ``plan`` -> (dispatch) -> ``commit``. One
    reservation is current at a time: a later ``reserve`` supersedes it, and whatever was superseded,
    cancelled or planned is refused from then on. Pages a superseded reservation added stay with their
    requests, who are about to ask for them again.

    Args:
      layout: geometry of the pool.
      max_num_seqs: rows, that is requests that can hold pages at once.
      max_model_len: most tokens of one request, prompt and completion.
      token_ladder: padded sizes of a step; its top is the largest step.

    >>> layout = KvStorageLayoutV1(1, 4, 4, num_kv_heads=1, head_dim=8, dtype="float32")
    >>> control = ControlPlane(layout, max_num_seqs=2, max_model_len=12, token_ladder=Ladder([8]))
    >>> handle = control.open()
    >>> prompt = RequestSlice(handle, start=0, tokens=np.array([5, 6, 7, 8, 9], np.int32))
    >>> reservation = control.reserve([prompt])
    >>> plan = control.plan(control.confirm_scrubbed(reservation))
    >>> plan.table.kv_indices.tolist(), plan.table.slot_mapping.tolist()
    ([0, 1, 4, 4], [0, 1, 2, 3, 4, 16, 16, 16])
    >>> control.commit(plan)
    >>> control.num_written(handle), control.release(handle).tolist()
    (5, [0, 1])
    """

    def __init__(
        self, layout: KvStorageLayoutV1, *, max_num_seqs: int, max_model_len: int, token_ladder: Ladder
    ) -> None:
        if max_model_len < 1:
            raise ConfigError(f"max_target_length={max_model_len}: a request needs room for at least 1 token")
        self.layout = layout
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.max_pages_per_request = layout.pages_for(max_model_len)
        self.token_ladder = token_ladder
        self.allocator = PageAllocator(layout.num_pages)
        self.page_map = PageMap(max_num_seqs, self.max_pages_per_request)
        self._written = np.zeros(max_num_seqs, np.int64)
        self._serial = 0
        self._current: _Current | None = None

    # --- sizes ---------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.layout.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds."""
        return self.allocator.num_free

    @property
    def num_free_rows(self) -> int:
        """Requests that ``open`` can still take in."""
        return self.page_map.num_rows_free

    @property
    def block_epoch(self) -> int:
        """Moves with every change of any request's pages: what was made of page lists is good until then."""
        return self.page_map.block_epoch

    @property
    def written(self) -> Int64:
        """int64 ``[max_num_seqs]``, tokens written per row; a copy."""
        return self._written.copy()

    def row_rung(self, token_rung: int) -> int:
        """Request rows of a step of ``token_rung`` tokens."""
        return row_rung(token_rung, self.max_num_seqs)

    def index_capacity(self, row_rung: int) -> int:
        """Page references of a step of ``row_rung`` rows: all of them full, but no page is named twice."""
        return min(row_rung * self.max_pages_per_request, self.num_pages)

    @property
    def max_request_tokens(self) -> int:
        """Most tokens one request can ever hold: the context, or the pool where that is smaller."""
        return min(self.max_model_len, self.layout.num_slots)

    def fits(self, num_tokens: int) -> bool:
        """Whether one request of ``num_tokens`` tokens can ever be held."""
        return num_tokens <= self.max_request_tokens

    def check_fits(self, num_tokens: int) -> None:
        """As ``fits``, for those who cannot go on without.

        Raises:
          RequestTooLarge: it cannot; the message has both numbers and the option to turn.
        """
        if num_tokens > self.max_model_len:
            raise RequestTooLarge(
                f"request needs {num_tokens} tokens, the context holds {self.max_model_len}: raise `max_target_length`"
            )
        needed = self.layout.pages_for(num_tokens)
        if needed > self.num_pages:
            raise RequestTooLarge(
                f"request needs {needed} pages for {num_tokens} tokens, the pool has {self.num_pages}: "
                "raise `paged_num_pages` or lower `max_target_length`"
            )

    # --- one request's life --------------------------------------------------------------------------

    def open(self) -> RequestHandle | None:
        """A row for a new request, without pages; None when all ``max_num_seqs`` are taken."""
        handle = self.page_map.acquire()
        if handle is not None:
            self._written[handle.row] = 0
        return handle

    def release(self, handle: RequestHandle) -> Int32:
        """End a request: its row and pages go back.

        Returns:
          int32, the pages that nobody holds any more (the ones a debug knob may poison).

        Raises:
          StaleHandleError: it was released before; nothing has changed.
        """
        freed = self.allocator.free(self.page_map.release(handle))
        self._written[handle.row] = 0
        return freed

    def pages_held(self, handle: RequestHandle) -> int:
        """Pages a request holds."""
        return self.page_map.num_pages(handle)

    def num_written(self, handle: RequestHandle) -> int:
        """Tokens of a request whose K/V is written or dispatched."""
        return int(self._written[self.page_map.rows_of([handle])[0]])

    # --- one step ------------------------------------------------------------------------------------

    def reserve(self, slices: Sequence[RequestSlice]) -> Reservation | None:
        """Hold pages for a step, for all of its slices or none. Each request grows by the difference only.

        Returns:
          The reservation, now the current one; None when the pool has no room, and then nothing has changed.

        Raises:
          StaleHandleError: a slice's request was released.
          PageStateError: a slice does not start where its request's K/V ends, has no tokens, or shares its
            request with another slice.
          RequestTooLarge: a slice reaches beyond the context.
        """
        slices = tuple(slices)
        rows, start, num_new = self._step_arrays(slices)
        needed = pages_for_tokens(start + num_new, self.layout.tokens_per_page)
        added = np.maximum(needed - self.page_map.counts[rows], 0)
        pages = self.allocator.allocate(int(added.sum()))
        if pages is None:
            return None
        self.page_map.extend_rows(rows, added, pages)
        self._serial += 1
        dirty = self.allocator.dirty_among(self.page_map.first_pages(rows, needed))
        reservation = Reservation(slices, dirty, self._serial)
        self._current = _Current(reservation, rows, added)
        return reservation

    def confirm_scrubbed(self, reservation: Reservation) -> ScrubbedReservation:
        """Record that the reservation's dirty pages were overwritten; called after the scrub was dispatched.

        Raises:
          PageStateError: the reservation is not the current one, or was confirmed already.
        """
        current = self._require_current(reservation.serial)
        if current.scrubbed is not None:
            raise PageStateError(f"reservation {reservation.serial} was confirmed already")
        self.allocator.confirm_scrubbed(reservation.dirty_pages)
        current.scrubbed = ScrubbedReservation(reservation.slices, reservation.serial)
        return current.scrubbed

    def plan(self, scrubbed: ScrubbedReservation, *, min_token_rung: int = 0) -> StepPlan:
        """Pack the step's page table, padded to its rung.

        Args:
          min_token_rung: pad at least this far; warm-up walks the ladder with it, and a run that always
            pads to the top has one program whatever the batch.

        Raises:
          PageStateError: a page of the step is dirty, or the reservation is not the current one, was never
            confirmed, or was planned already.
          StaleHandleError: a request of the step was released since it was reserved.
        """
        current = self._require_current(scrubbed.serial)
        if current.scrubbed is not scrubbed:
            raise PageStateError(f"reservation {scrubbed.serial} was never confirmed as scrubbed")
        if current.plan is not None:
            raise PageStateError(f"reservation {scrubbed.serial} was planned already")
        rows, start, num_new = self._step_arrays(scrubbed.slices)
        needed = pages_for_tokens(start + num_new, self.layout.tokens_per_page)
        pages = self.page_map.first_pages(rows, needed)
        dirty = self.allocator.dirty_among(pages)
        if len(dirty):
            raise PageStateError(f"pages {dirty.tolist()} still carry another request's K/V: scrub them first")
        token_rung = self.token_ladder.rung(max(int(num_new.sum()), min_token_rung))
        rows_padded = self.row_rung(token_rung)
        table = pack_page_arrays(
            start=start,
            num_new=num_new,
            first_page_offset=np.zeros_like(start),
            pages_per_row=needed,
            pages=pages,
            num_pages=self.num_pages,
            tokens_per_page=self.layout.tokens_per_page,
            token_rung=token_rung,
            row_rung=rows_padded,
            index_capacity=self.index_capacity(rows_padded),
        )
        current.plan = StepPlan(scrubbed.slices, table, token_rung, rows_padded)
        return current.plan

    def commit(self, plan: StepPlan) -> None:
        """Record that the step was dispatched: its tokens are written, the next step starts behind them.

        Raises:
          PageStateError: the plan is not the current one, or was committed already.
          StaleHandleError: a request of the step was released since it was planned.
        """
        current = self._current
        if current is None or current.plan is not plan:
            raise PageStateError("this plan was committed already, or a later reservation superseded it")
        rows, start, num_new = self._step_arrays(plan.slices)
        self._written[rows] = start + num_new
        self._current = None

    def cancel(self, reservation: Reservation) -> Int32:
        """Give back the pages that an unplanned reservation added.

        Returns:
          int32, the pages that nobody holds any more.

        Raises:
          PageStateError: the reservation is not the current one, or was planned already.
        """
        current = self._require_current(reservation.serial)
        if current.plan is not None:
            raise PageStateError(f"reservation {reservation.serial} was planned already: release its requests instead")
        dropped = [np.zeros(0, np.int32)]
        for i in np.flatnonzero(current.num_added):
            handle = reservation.slices[i].handle
            if self.page_map.is_live(handle):  # a request released meanwhile has given everything back
                keep = self.page_map.num_pages(handle) - int(current.num_added[i])
                dropped.append(self.page_map.truncate(handle, keep))
        self._current = None
        return self.allocator.free(np.concatenate(dropped))

    def _require_current(self, serial: int) -> _Current:
        if self._current is None or self._current.reservation.serial != serial:
            raise PageStateError(
                f"reservation {serial} is not the current one: it was committed, cancelled or superseded"
            )
        return self._current

    def _step_arrays(self, slices: tuple[RequestSlice, ...]) -> tuple[Int64, Int64, Int64]:
        """Rows, starts and lengths of a step, int64 ``[num_reqs]`` each, checked against what is written."""
        rows = self.page_map.rows_of([piece.handle for piece in slices])
        start = np.array([piece.start for piece in slices], np.int64)
        num_new = np.array([len(piece.tokens) for piece in slices], np.int64)
        if len(np.unique(rows)) < len(rows):
            raise PageStateError(f"two slices of one step share a request: rows {rows.tolist()}")
        if (num_new < 1).any():
            raise PageStateError(f"row {rows[(num_new < 1).argmax()]}: a slice without tokens")
        if (start != self._written[rows]).any():
            i = int((start != self._written[rows]).argmax())
            raise PageStateError(
                f"row {rows[i]}: the slice starts at position {start[i]}, "
                f"but {self._written[rows[i]]} tokens are written"
            )
        if len(slices) and int((start + num_new).max()) > self.max_model_len:
            self.check_fits(int((start + num_new).max()))
        return rows, start, num_new
