"""Conservation laws of one pool: what is free, what is held, and by how many.

For:        the pages of every group alike, called from ``invariants.check_invariants``.
Not for:    laws of requests and of the prefix index (invariants.py).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import InvariantError
from kv_common.pages import pages_for_tokens
from kv_control.allocator import PageAllocator
from kv_control.page_map import NO_PAGE
from kv_control.window_metrics import window_metrics
from kv_control.window_pages import WindowPages

if TYPE_CHECKING:
    from kv_control.control_plane import ControlPlane


def check_holders(allocator: PageAllocator, holders: Sequence[NDArray[Any]]) -> None:
    """Free and held pages are disjoint and together the pool; each page has as many holders as the allocator counts.

    Args:
      holders: arrays of page ids, one entry for each hold; what lies outside the pool holds nothing.
    """
    num_pages = allocator.num_pages
    listed = np.bincount(allocator.free_pages, minlength=num_pages)
    held = allocator.references > 0
    require_none(np.flatnonzero(listed > 1), "pages are in the free list twice")
    require_none(np.flatnonzero((listed > 0) & held), "pages are free and held at once")
    require_none(np.flatnonzero((listed == 0) & ~held), "pages are neither free nor held")
    if allocator.num_free + allocator.num_held != num_pages:
        raise InvariantError(f"{allocator.num_free} free + {allocator.num_held} held pages are not {num_pages}")
    counted = np.zeros(num_pages, np.int64)
    for pages in holders:
        counted += np.bincount(pages[(pages >= 0) & (pages < num_pages)], minlength=num_pages)
    wrong = np.flatnonzero(counted != allocator.references)
    require_none(wrong, "pages have other holders than the allocator counts")


def check_window_pages(control: ControlPlane, pages: WindowPages) -> None:
    """The laws of one window group, beside those that hold of every pool:

    - a row holds exactly its logical pages ``first .. end - 1``, none twice; rows without a request hold none;
    - what is written and still seen is there, and what nobody will see again is gone, but for pages that are still to
      be offered to the prefix index or forked from;
    - the index's window pages are of nodes that can be found; free + held + retained are the pool.
    """
    group, table = pages.group, pages.table
    check_holders(pages.allocator, [table, pages.copies.pending[0], pages.cache.pages])
    column = np.arange(table.shape[1])
    used = (column >= pages.first[:, None]) & (column < pages.end[:, None])
    inside = (table >= 0) & (table < pages.allocator.num_pages)
    require_none(np.flatnonzero((used & ~inside).any(axis=1)), "rows hold something that is no window page")
    require_none(np.flatnonzero((~used & (table != NO_PAGE)).any(axis=1)), "rows keep window pages outside their run")
    in_order = np.sort(table, axis=1)
    twice = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] != NO_PAGE)
    require_none(np.flatnonzero(twice.any(axis=1)), "rows hold a window page twice")
    live = np.zeros(len(table), np.bool_)
    live[control.page_map.live_rows] = True
    require_none(np.flatnonzero(~live & (pages.end > 0)), "rows without a request hold window pages")
    written = control.written
    require_none(
        np.flatnonzero(pages_for_tokens(written, group.layout.tokens_per_page) > pages.end),
        "rows have more tokens written than their window pages reach",
    )
    seen = np.minimum(group.first_pages(written), pages.end)
    require_none(np.flatnonzero(pages.first > seen), "pages left the window of a row that still sees them")
    position = control.windows.held_back(np.arange(len(written)), written)
    oldest = np.minimum(group.first_pages(position), pages.end)
    for row in np.flatnonzero(pages.first < oldest).tolist():
        offered = control.sharing.num_offered(row)
        if offered is None or pages.first[row] < min(offered, oldest[row]):
            raise InvariantError(f"row {row} keeps window pages that nobody will see again")
    if any(not node.live for node in pages.cache.nodes):
        raise InvariantError("the prefix index names window pages of nodes that cannot be found")
    if window_metrics(pages).num_leaked_pages:
        raise InvariantError(f"pages of window {group.window} are neither free, held nor retained")


def require_none(found: NDArray[np.integer[Any]], law: str) -> None:
    """Raise if anything was found that breaks a law."""
    if len(found):
        raise InvariantError(f"{law}: {found.tolist()}")
