"""What a run did, as one frozen value.

For:        counting pages and scheduling events in one place, with every ratio defined once.
Not for:    measuring time, or counts of the device side (kv_execution adds its own).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv_control.allocator import PageAllocator
from kv_control.page_map import PageMap
from kv_control.sharing import PageSharing
from kv_control.window_metrics import WindowMetrics


@dataclass(slots=True)
class ControlCounters:
    """Counts that the scheduler keeps while it runs; ``ControlMetrics`` says what each means."""

    num_prefill_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_recovered_tokens: int = 0
    num_shared_tokens: int = 0
    num_prefix_pages_wanted: int = 0
    num_prefix_pages_hit: int = 0
    num_prefix_waits: int = 0
    num_preemptions: int = 0
    num_preempted_requests: int = 0
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class ControlMetrics:
    """Pages as they stand, and events since the control plane was made. Pages are those of layers that see everything.

    Attributes:
      num_pages: pages of the pool; free + held + retained + leaked.
      num_free_pages: pages that nobody holds.
      num_held_pages: pages that requests hold and the prefix cache does not name, each counted once.
      num_retained_pages: pages that the prefix cache names, read by a request or not.
      num_leaked_pages: pages that are neither; anything but 0 is a bug.
      num_evictable_pages: retained pages that no request reads.
      occupancy: share of all pools that is not free: pages count by their layers, those of window groups too.
      fragmentation: token slots of the distinct pages that requests read, over the tokens they have written there.
        Above 1: the unused ends of last pages. Below 1: a sharing dividend. NaN while no request holds a token.
      num_steps: steps dispatched.
      num_prefill_tokens: prompt tokens run for the first time.
      num_recomputed_tokens: tokens run again after a preemption.
      num_generated_tokens: tokens sampled and kept.
      num_cached_tokens: prompt tokens not run because the prefix cache had them. num_recovered_tokens: tokens not run
        again after a preemption for that reason. num_shared_tokens: prompt tokens taken over from the own group.
      num_prefix_pages_wanted: whole pages that first admissions looked up. num_prefix_pages_hit: those found.
      page_hit_rate: hit / wanted; NaN before any was wanted.
      num_prefix_waits: requests that waited for another's prefill of their own prefix instead of repeating it.
      num_evictions: cached pages given up for room.
      num_preemptions: times a request was sent back. num_preempted_requests: how many different ones.
      windows: pages of each group of layers with a sliding window.
    """

    num_pages: int
    num_free_pages: int
    num_held_pages: int
    num_retained_pages: int
    num_leaked_pages: int
    num_evictable_pages: int
    occupancy: float
    fragmentation: float
    num_steps: int
    num_prefill_tokens: int
    num_recomputed_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    num_recovered_tokens: int
    num_shared_tokens: int
    num_prefix_pages_wanted: int
    num_prefix_pages_hit: int
    page_hit_rate: float
    num_prefix_waits: int
    num_evictions: int
    num_preemptions: int
    num_preempted_requests: int
    windows: tuple[WindowMetrics, ...] = ()

    @property
    def num_avoided_tokens(self) -> int:
        """Prompt tokens that were not run: found in the cache, or shared within a group."""
        return self.num_cached_tokens + self.num_shared_tokens


def pool_metrics(
    *,
    allocator: PageAllocator,
    page_map: PageMap,
    sharing: PageSharing,
    written: NDArray[np.int64],
    tokens_per_page: int,
    num_layers: int,
    counters: ControlCounters,
    windows: tuple[WindowMetrics, ...] = (),
) -> ControlMetrics:
    """The value, counted from the page map and the index, independently of the allocator's own books.

    Args:
      num_layers: layers whose pages ``allocator`` counts. windows: those of the others.
    """
    index = sharing.index
    num_pages = allocator.num_pages
    retained = np.zeros(num_pages, np.bool_)
    if index is not None:
        retained[index.pages] = True
    read = np.zeros(num_pages, np.bool_)
    table = page_map.table
    used = np.arange(table.shape[1]) < page_map.counts[:, None]
    read[table[used]] = True
    held = read.copy()
    held[sharing.copies.pending[0]] = True
    held &= ~retained
    num_tokens = int(written.sum())
    free, num_held, num_retained = allocator.num_free, int(held.sum()), int(retained.sum())
    layer_pages = num_layers * num_pages + sum(one.num_layers * one.num_pages for one in windows)
    layer_pages_free = num_layers * free + sum(one.num_layers * one.num_free_pages for one in windows)
    wanted, hit = counters.num_prefix_pages_wanted, counters.num_prefix_pages_hit
    return ControlMetrics(
        num_pages=num_pages,
        num_free_pages=free,
        num_held_pages=num_held,
        num_retained_pages=num_retained,
        num_leaked_pages=num_pages - free - num_held - num_retained,
        num_evictable_pages=sharing.num_evictable,
        occupancy=(layer_pages - layer_pages_free) / layer_pages,
        fragmentation=int(read.sum()) * tokens_per_page / num_tokens if num_tokens else float("nan"),
        num_steps=counters.num_steps,
        num_prefill_tokens=counters.num_prefill_tokens,
        num_recomputed_tokens=counters.num_recomputed_tokens,
        num_generated_tokens=counters.num_generated_tokens,
        num_cached_tokens=counters.num_cached_tokens,
        num_recovered_tokens=counters.num_recovered_tokens,
        num_shared_tokens=counters.num_shared_tokens,
        num_prefix_pages_wanted=wanted,
        num_prefix_pages_hit=hit,
        page_hit_rate=hit / wanted if wanted else float("nan"),
        num_prefix_waits=counters.num_prefix_waits,
        num_evictions=0 if index is None else index.num_evicted,
        num_preemptions=counters.num_preemptions,
        num_preempted_requests=counters.num_preempted_requests,
        windows=windows,
    )
