"""The one door to pages and rows: open, reserve, confirm, plan, commit, release.

For:        turning a step's slices into held pages and then into a packed page table, or into "no room".
Not for:    choosing what runs (scheduler) or running it (kv_execution).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import PageStateError
from kv_common.layout import KvStorageLayoutV1
from kv_common.page_table import pack_page_arrays
from kv_common.pages import pages_for_tokens
from kv_common.window_group import WindowGroup
from kv_control.allocator import PageAllocator
from kv_control.bucketing import Ladder
from kv_control.dirty_pages import DirtyPages
from kv_control.limits import PoolLimits
from kv_control.metrics import ControlCounters, ControlMetrics, pool_metrics
from kv_control.page_map import PageMap
from kv_control.plan import (
    PageChores,
    RequestHandle,
    RequestSlice,
    Reservation,
    ScrubbedReservation,
    StepBatch,
    StepPlan,
)
from kv_control.prefix_index import PageNode, PrefixIndex
from kv_control.sharing import PageSharing
from kv_control.step_protocol import StepProtocol, lengths_after
from kv_control.window_groups import WindowGroups
from kv_control.window_metrics import window_metrics

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class ControlPlane:
    """Pages, rows and written counts of all requests of one pool.

    A step goes ``reserve`` -> (scrub) -> ``confirm_scrubbed`` -> ``plan`` -> (dispatch) -> ``commit``. One
    reservation is current at a time: a later ``reserve`` supersedes it, and whatever was superseded,
    cancelled or planned is refused from then on. Pages a superseded reservation added stay with their
    requests, who are about to ask for them again.

    Args:
      layout: geometry of the pool of layers that see everything.
      max_num_seqs: rows, that is requests that can hold pages at once.
      max_model_len: most tokens of one request, prompt and completion.
      token_ladder: padded sizes of a step; its top is the largest step.
      prefix_namespace: digest under which pages are cached for other requests (``CacheNamespace.digest``); None
        keeps no page beyond its requests.
      window_groups: layers with a sliding window, and their own pools.

    >>> layout = KvStorageLayoutV1(1, 4, 4, num_kv_heads=1, head_dim=8, dtype="float32")
    >>> control = ControlPlane(layout, max_num_seqs=2, max_model_len=12, token_ladder=Ladder([8]))
    >>> handle = control.open()
    >>> prompt = RequestSlice(handle, start=0, tokens=np.array([5, 6, 7, 8, 9], np.int32))
    >>> reservation = control.reserve([prompt])
    >>> plan = control.plan(control.confirm_scrubbed(reservation))
    >>> plan.table.kv_indices.tolist(), plan.table.slot_mapping.tolist()
    ([0, 1, 4, 4, 4, 4], [0, 1, 2, 3, 4, 16, 16, 16])
    >>> control.commit(plan)
    >>> control.num_written(handle), control.release(handle).tolist()
    (5, [0, 1])
    """

    def __init__(
        self,
        layout: KvStorageLayoutV1,
        *,
        max_num_seqs: int,
        max_model_len: int,
        token_ladder: Ladder,
        prefix_namespace: bytes | None = None,
        window_groups: Sequence[WindowGroup] = (),
    ) -> None:
        self.layout = layout
        self.limits = PoolLimits(layout, max_num_seqs, max_model_len)
        self.token_ladder = token_ladder
        self.allocator = PageAllocator(layout.num_pages)
        self.page_map = PageMap(max_num_seqs, self.limits.max_pages_per_request)
        self.prefix_namespace = prefix_namespace
        self.prefix_index = None if prefix_namespace is None else PrefixIndex(layout.tokens_per_page)
        self.sharing = PageSharing(self.allocator, self.page_map, layout.tokens_per_page, self.prefix_index)
        self.windows = WindowGroups(
            window_groups,
            self.sharing,
            max_num_seqs=max_num_seqs,
            max_pages_per_request=self.limits.max_pages_per_request,
            num_pages=layout.num_pages,
            step_tokens=token_ladder.top,
        )
        self.counters = ControlCounters()
        self._dirty = DirtyPages(self.allocator)
        self._written = np.zeros(max_num_seqs, np.int64)
        self._steps = StepProtocol()

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
    def num_available_pages(self) -> int:
        """Pages that a request can be given: free ones, and cached ones that nobody reads."""
        return self.allocator.num_free + self.sharing.num_evictable

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
        pages = self.page_map.release(handle)
        self.windows.release(handle.row)
        freed = np.concatenate([self.allocator.free(pages), self.sharing.leave(handle.row)])
        self._written[handle.row] = 0
        return freed

    def adopt(self, handle: RequestHandle, nodes: Sequence[PageNode]) -> None:
        """Begin a request behind cached pages: they count as written.

        Raises:
          PageStateError: the request holds pages already.
        """
        self._require_empty(handle)
        self.sharing.adopt(handle, nodes)
        self.windows.adopt(handle.row, nodes)
        self._written[handle.row] = len(nodes) * self.layout.tokens_per_page

    def fork(self, source: RequestHandle, target: RequestHandle, num_tokens: int) -> bool:
        """Begin ``target`` behind the first ``num_tokens`` tokens of ``source``: whole pages are shared, a partial
        last one is copied before the next step.

        Returns:
          False when there is no page for the copy, or a window of ``source`` has passed the place (``can_fork``); then
          nothing has changed.

        Raises:
          PageStateError: ``target`` holds pages already, or ``source`` has fewer tokens written.
        """
        self._require_empty(target)
        if self.num_written(source) < num_tokens:
            raise PageStateError(
                f"row {source.row} has {self.num_written(source)} tokens written, {num_tokens} are to be shared"
            )
        if not self.can_fork(source, num_tokens) or not self.windows.can_copy(num_tokens):
            return False
        if not self.sharing.fork(source, target, num_tokens):
            return False
        self.windows.fork(source.row, target.row, num_tokens)
        self._dirty.note(self.page_map.pages(target)[-1:])
        self._written[target.row] = num_tokens
        return True

    def can_fork(self, source: RequestHandle, num_tokens: int) -> bool:
        """Whether another request can still begin behind ``num_tokens`` tokens of this one: no window has passed."""
        return self.windows.can_fork(source.row, num_tokens)

    def publish(
        self, handle: RequestHandle, key: bytes, tokens: Int32, token_logprobs: NDArray[np.float32] | None = None
    ) -> bool:
        """Offer the request's next unpublished page to other requests; see ``PageSharing.publish``.

        Raises:
          PageStateError: a slot of the page is not written yet.
        """
        position = (len(self.sharing.path(handle.row)) + 1) * self.layout.tokens_per_page
        written = int(self._written[handle.row]) if self.page_map.is_live(handle) else self.num_written(handle)
        if written < position:
            raise PageStateError(
                f"row {handle.row}: a page ending at token {position} is published, but only {written} tokens are "
                "written"
            )
        published = self.sharing.publish(handle, key, tokens, token_logprobs)
        if self.windows:
            if published:
                self.windows.offer(handle.row, self.sharing.path(handle.row)[-1])
            row = np.array([handle.row])
            self.windows.slide(row, self._written[row])
        return published

    def reset_prefix_cache(self, namespace: bytes | None = None) -> tuple[int, Int32]:
        """Forget every cached page; running requests keep theirs, which nobody else can find any more.

        Args:
          namespace: what is cached from now on lies under this digest, and nothing of the requests that hold a row
            now; None keeps the one there is.

        Returns:
          How many pages the cache named, and those (int32) that nobody holds any more.
        """
        cleared, freed = self.sharing.clear()
        if namespace is not None and self.prefix_namespace is not None:
            self.prefix_namespace = namespace
            live = self.page_map.live_rows
            self.sharing.close(live.tolist())  # what they have begun is of the old namespace
            self.windows.slide(live, self._written[live])
        return cleared, freed

    def metrics(self) -> ControlMetrics:
        """Pages and counts as they stand."""
        return pool_metrics(
            allocator=self.allocator,
            page_map=self.page_map,
            sharing=self.sharing,
            written=self._written,
            tokens_per_page=self.layout.tokens_per_page,
            num_layers=self.layout.num_layers,
            counters=self.counters,
            windows=tuple(window_metrics(pages) for pages in self.windows),
        )

    def _require_empty(self, handle: RequestHandle) -> None:
        if self.pages_held(handle):
            raise PageStateError(
                f"row {handle.row} holds {self.pages_held(handle)} pages: only a new request can share"
            )

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
        batch = StepBatch.of(slices)
        self.page_map.require_live(batch.rows, batch.epochs)
        length = lengths_after(batch, self._written, self.limits)
        needed = pages_for_tokens(length, self.layout.tokens_per_page)
        if needed.sum() > self.limits.max_step_references:
            return None
        rows = batch.rows
        added = np.maximum(needed - self.page_map.counts[rows], 0)
        window_added = self.windows.missing(rows, length)
        if not self.windows.have_room(window_added):
            live = self.page_map.live_rows  # better a page less in the cache than no room
            self.windows.slide(live, self._written[live], wait=False)
            if not self.windows.have_room(window_added):
                return None
        pages = self.sharing.allocate(int(added.sum()))
        if pages is None:
            return None
        self.page_map.extend_rows(rows, added, pages)
        self._dirty.note(pages)
        self.windows.extend(rows, window_added)
        return self._steps.begin(
            batch,
            PageChores(self._dirty.held(), self.sharing.copies.pending),
            self.windows.chores(),
            num_added=added,
            window_added=window_added,
            length=length,
        )

    def confirm_scrubbed(self, reservation: Reservation) -> ScrubbedReservation:
        """Record that the reservation's dirty pages were overwritten; called after the scrub was dispatched.

        Raises:
          PageStateError: the reservation is not the current one, or was confirmed already.
        """
        current = self._steps.to_confirm(reservation)
        self.allocator.confirm_scrubbed(reservation.dirty_pages)
        self.sharing.copies.made(reservation.copies)
        self.windows.done(reservation.windows)
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
        current = self._steps.to_plan(scrubbed)
        batch = scrubbed.slices
        self.page_map.require_live(batch.rows, batch.epochs)
        needed = pages_for_tokens(current.length, self.layout.tokens_per_page)
        token_rung = self.token_ladder.rung(max(len(batch.tokens), min_token_rung))
        rows_padded = self.limits.row_rung(token_rung)
        capacity = self.limits.index_capacity(rows_padded)
        indices = self.page_map.first_pages(batch.rows, needed, capacity=capacity, fill=self.num_pages)
        if len(self._dirty.held()):
            dirty = self.allocator.dirty_among(indices[: int(needed.sum())])
            if len(dirty):
                raise PageStateError(f"pages {dirty.tolist()} still carry another request's K/V: scrub them first")
        table = pack_page_arrays(
            start=batch.start,
            num_new=batch.num_tokens,
            first_page_offset=np.zeros_like(batch.start),
            pages_per_row=needed,
            kv_indices=indices,
            num_pages=self.num_pages,
            tokens_per_page=self.layout.tokens_per_page,
            token_rung=token_rung,
            row_rung=rows_padded,
            index_capacity=capacity,
        )
        windows = self.windows.pack(batch, token_rung=token_rung, row_rung=rows_padded)
        current.plan = StepPlan(batch, table, token_rung, rows_padded, self.page_map.block_epoch, windows)
        return current.plan

    def commit(self, plan: StepPlan) -> None:
        """Record that the step was dispatched: its tokens are written, the next step starts behind them.

        Raises:
          PageStateError: the plan is not the current one, or was committed already.
          StaleHandleError: a request of the step was released since it was planned.
        """
        current = self._steps.to_commit(plan)
        self.page_map.require_live(plan.slices.rows, plan.slices.epochs)
        self._written[plan.slices.rows] = current.length
        self.windows.slide(plan.slices.rows, current.length)
        self._steps.end()

    def cancel(self, reservation: Reservation) -> Int32:
        """Give back the pages that an unplanned reservation added.

        Returns:
          int32, the pages that nobody holds any more.

        Raises:
          PageStateError: the reservation is not the current one, or was planned already.
        """
        current = self._steps.to_cancel(reservation)
        dropped = [np.zeros(0, np.int32)]
        for i in range(len(reservation.slices)):
            handle = reservation.slices.handle(i)
            if self.page_map.is_live(handle):  # a request released meanwhile has given everything back
                self.windows.shorten(handle.row, i, current.window_added)
                if current.num_added[i]:
                    keep = self.page_map.num_pages(handle) - int(current.num_added[i])
                    dropped.append(self.page_map.truncate(handle, keep))
        self._steps.end()
        return self.allocator.free(np.concatenate(dropped))
