"""Conservation laws of the control plane, callable after every step.

For:        failing where the books stop balancing, not days later.
Not for:    repairing anything.
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from kv_common.errors import InvariantError
from kv_common.pages import pages_for_tokens
from kv_control.control_plane import ControlPlane
from kv_control.page_map import NO_PAGE
from kv_control.plan import StepPlan
from kv_control.pool_laws import check_holders, check_window_pages, require_none
from kv_control.request import RequestStatus
from kv_control.scheduler import Scheduler


def check_invariants(
    control: ControlPlane, scheduler: Scheduler | None = None, *, plan: StepPlan | None = None
) -> None:
    """Check every law below, between steps (after ``Scheduler.advance``); a pass over the pool and the table.

    - Free and held pages are disjoint and together are the pool, each free page listed once.
    - A page has as many holders as the allocator counts; nobody holds a free page.
    - Every table row holds exactly its count of pages, all inside the pool, none twice, then ``NO_PAGE``;
      rows without a request hold none.
    - Tokens written fit the pages held; rows without a request have none written.
    - With ``scheduler``: running requests' handles are live and agree on what is written; waiting ones hold
      nothing; they wait in order of arrival.
    - Free, held, retained (named by the prefix index) pages are the pool; evictable + protected are the retained.
      The index is a tree with locks that never grow downwards; every lock is a row's, on a chain it has written.
    - Pages of each window group: see ``check_window_pages``.
    - With ``plan``: no page of the step is dirty.

    Raises:
      InvariantError: a law does not hold; the message names the pages, rows or requests.
    """
    _check_pool(control)
    _check_rows(control)
    _check_sharing(control)
    for pages in control.windows:
        check_window_pages(control, pages)
    if scheduler is not None:
        _check_requests(control, scheduler)
    if plan is not None:
        named = plan.table.kv_indices[: plan.table.kv_indptr[-1]]
        require_none(control.allocator.dirty_among(named), "pages of a running step are dirty")
        for pages, table in zip(control.windows, plan.window_tables, strict=True):
            named = table.kv_indices[: table.kv_indptr[-1]]
            named = named[pages.allocator.references[named] > 0]  # others have left their window since
            require_none(pages.allocator.dirty_among(named), "window pages of a running step are dirty")


def _check_pool(control: ControlPlane) -> None:
    cached = np.zeros(0, np.int32) if control.prefix_index is None else control.prefix_index.pages
    check_holders(control.allocator, [control.page_map.table, control.sharing.copies.pending[0], cached])


def _check_rows(control: ControlPlane) -> None:
    table, counts, written = control.page_map.table, control.page_map.counts, control.written
    live = np.zeros(len(counts), np.bool_)
    live[control.page_map.live_rows] = True
    used = np.arange(table.shape[1]) < counts[:, None]
    inside = (table >= 0) & (table < control.num_pages)
    require_none(np.flatnonzero((used & ~inside).any(axis=1)), "rows hold something that is no page")
    require_none(np.flatnonzero((~used & (table != NO_PAGE)).any(axis=1)), "rows keep pages behind their end")
    require_none(np.flatnonzero(~live & (counts > 0)), "rows without a request hold pages")
    require_none(np.flatnonzero(~live & (written > 0)), "rows without a request have tokens written")
    needed = pages_for_tokens(written, control.layout.tokens_per_page)
    require_none(np.flatnonzero(needed > counts), "rows have more tokens written than their pages hold")
    in_order = np.sort(table, axis=1)
    twice = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] != NO_PAGE)
    require_none(np.flatnonzero(twice.any(axis=1)), "rows hold a page twice")


def _check_requests(control: ControlPlane, scheduler: Scheduler) -> None:
    running, waiting = scheduler.running, scheduler.waiting
    for request in running:
        handle = request.handle
        if request.status is not RequestStatus.RUNNING or handle is None or not control.page_map.is_live(handle):
            raise InvariantError(f"request {request.id} runs without a live row: {handle}")
        if scheduler.request_of(handle) is not request:
            raise InvariantError(f"request {request.id}: row {handle.row} belongs to another")
        if control.num_written(handle) != request.num_computed:
            raise InvariantError(
                f"request {request.id} has computed {request.num_computed} tokens, "
                f"{control.num_written(handle)} are written"
            )
    for request in waiting:
        if request.status is not RequestStatus.WAITING or request.handle is not None or request.num_computed:
            raise InvariantError(f"request {request.id} waits and still holds {request.handle}")
    arrivals = [request.arrival for request in waiting]
    if arrivals != sorted(set(arrivals)):
        raise InvariantError(f"waiting requests are not in order of arrival: {arrivals}")


def _check_sharing(control: ControlPlane) -> None:
    """The laws of the prefix index, and of each row's hold on it."""
    index, page_map = control.prefix_index, control.page_map
    metrics = control.metrics()
    if metrics.num_leaked_pages:
        raise InvariantError(f"{metrics.num_leaked_pages} pages are neither free, held nor retained")
    if index is None:
        return
    index.check()
    if index.num_locked + index.num_evictable != metrics.num_retained_pages:
        raise InvariantError(
            f"{index.num_locked} protected + {index.num_evictable} evictable pages are not the "
            f"{metrics.num_retained_pages} retained ones"
        )
    live = set(page_map.live_rows.tolist())
    locks: Counter[int] = Counter()
    for row in range(control.limits.max_num_seqs):
        path = control.sharing.path(row)
        if path and row not in live:
            raise InvariantError(f"row {row} has no request and still locks {len(path)} cached pages")
        if len(path) > control.written[row] // control.layout.tokens_per_page:
            raise InvariantError(f"row {row} published or adopted {len(path)} pages, which are not all written")
        if any(node.parent is not above for node, above in zip(path, [None, *path], strict=False)):
            raise InvariantError(f"row {row} locks pages that are no chain")
        if [node.page for node in path] != control.page_map.table[row, : len(path)].tolist():
            raise InvariantError(f"row {row} locks other cached pages than it reads")
        locks.update(id(node) for node in path)
    wrong = [node.page for node in index.nodes() if node.num_locks != locks[id(node)]]
    if wrong:
        raise InvariantError(f"cached pages {wrong} have other locks than rows that read them")
