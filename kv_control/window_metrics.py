"""What one window group's pages stand at, as a frozen value.

For:        counting the pages of layers with a sliding window, independently of the allocator's own books.
Not for:    events of the scheduler (metrics.py).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kv_control.page_map import NO_PAGE
from kv_control.window_pages import WindowPages


@dataclass(frozen=True, slots=True)
class WindowMetrics:
    """Pages of one group as they stand, and events since the control plane was made.

    Attributes:
      window: positions that a query sees. num_layers: layers of the group.
      num_pages: pages of its pools; free + held + retained + leaked.
      num_free_pages: pages that nobody holds.
      num_held_pages: pages that requests hold and the prefix cache does not name.
      num_retained_pages: pages that the prefix cache names. num_leaked_pages: neither; anything but 0 is a bug.
      num_evictable_pages: retained pages that no request reads.
      occupancy: share of the pool that is not free.
      num_passed_pages: pages given back because they left a row's window.
      num_evictions: cached pages given up for room.
      peak_pages_held: most pages that were not free.
    """

    window: int
    num_layers: int
    num_pages: int
    num_free_pages: int
    num_held_pages: int
    num_retained_pages: int
    num_leaked_pages: int
    num_evictable_pages: int
    occupancy: float
    num_passed_pages: int
    num_evictions: int
    peak_pages_held: int


def window_metrics(pages: WindowPages) -> WindowMetrics:
    """The value of one group."""
    num_pages, free = pages.allocator.num_pages, pages.allocator.num_free
    retained = np.zeros(num_pages, np.bool_)
    retained[pages.cache.pages] = True
    held = np.zeros(num_pages, np.bool_)
    held[pages.table[pages.table != NO_PAGE]] = True
    held[pages.copies.pending[0]] = True
    held &= ~retained
    num_held, num_retained = int(held.sum()), int(retained.sum())
    return WindowMetrics(
        window=pages.group.window,
        num_layers=pages.group.layout.num_layers,
        num_pages=num_pages,
        num_free_pages=free,
        num_held_pages=num_held,
        num_retained_pages=num_retained,
        num_leaked_pages=num_pages - free - num_held - num_retained,
        num_evictable_pages=pages.cache.num_evictable,
        occupancy=(num_pages - free) / num_pages,
        num_passed_pages=pages.num_passed,
        num_evictions=pages.cache.num_evicted,
        peak_pages_held=pages.peak_held,
    )
