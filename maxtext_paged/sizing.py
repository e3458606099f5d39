"""How many pages a pool gets, and a line that says what decided it.

For:        turning ``paged_num_pages``, ``paged_kv_budget_bytes`` or ``paged_kv_memory_fraction`` into a page count, or
            a refusal with numbers.
Not for:    allocating.
May import: kv_common, maxtext_paged.window_sizing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv_common.errors import ConfigError
from kv_common.layout import MAX_SLOTS, KvStorageLayoutV1
from kv_common.window_group import WindowGroup
from maxtext_paged.window_sizing import GroupDemand, bytes_of_pools, groups_beside, most_pages, rows_that_fit

DEFAULT_BUDGET_BYTES = 1 << 30
"""Most bytes per device that a pool takes when no option is set."""

STEPS_IN_FLIGHT = 2
"""Steps may overlap, each with a split-KV workspace of its own."""

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A page count and the reason for it.

    Attributes:
      num_pages: pages of the pool. reason: what decided it.
      workspace_bytes: split-KV workspace of all steps in flight on one device.
      weight_bytes: weights on one device.
      window_groups: layers with a sliding window that have pages of their own, with their page counts.
    """

    num_pages: int
    reason: str
    workspace_bytes: int = 0
    weight_bytes: int = 0
    window_groups: tuple[WindowGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """What one device has left. ``source`` says who was asked."""

    num_bytes: int
    source: str


def free_memory(devices: Sequence[Any]) -> FreeMemory:
    """Free bytes of the fullest of ``devices`` (jax devices of this process); asks, and allocates nothing.

    CPU devices keep no account of their own: they share what the machine has available.

    Raises:
      ConfigError: neither the device nor the machine says how much is free.
    """
    stats = [device.memory_stats() for device in devices]
    if all(entry and "bytes_limit" in entry and "bytes_in_use" in entry for entry in stats):
        free = min(entry["bytes_limit"] - entry["bytes_in_use"] for entry in stats)
        return FreeMemory(free, f"{devices[0].platform} allocator's limit less what is in use")
    available = _available_host_bytes() if devices[0].platform == "cpu" else None
    if available is None:
        raise ConfigError(
            f"paged_kv_memory_fraction: {devices[0].platform} does not say how much memory is free; set "
            "paged_kv_budget_bytes or paged_num_pages"
        )
    return FreeMemory(available // len(devices), f"MemAvailable of this machine over {len(devices)} CPU devices")


def pool_size(
    one_page: KvStorageLayoutV1,
    *,
    num_pages: int,
    budget_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    memory_fraction: float = 0.0,
    free: FreeMemory | None = None,
    step_workspace_bytes: int = 0,
    weight_bytes: int = 0,
    demands: Sequence[GroupDemand] = (),
) -> PoolSize:
    """Pages of a pool. The first option that is set decides, in the order of the arguments.

    Args:
      one_page: the layout with ``num_pages=1``, for its bytes per page.
      num_pages: ``paged_num_pages``, 0 if unset. budget_bytes: ``paged_kv_budget_bytes``, 0 if unset.
      memory_fraction: ``paged_kv_memory_fraction``, 0 if unset; of ``free`` less the weights.
      step_workspace_bytes: split-KV workspace of one step on one device; 0 for a backend that has none.
      weight_bytes: weights on one device, not loaded yet.
      demands: layers with a sliding window that get pages of their own; ``one_page`` is of the other layers.

    Raises:
      ConfigError: the budget does not hold one page; names the smallest that works.
    """
    workspace = STEPS_IN_FLIGHT * step_workspace_bytes

    def divided(pages: int) -> int:
        return bytes_of_pools(one_page, demands, pages, ample=False)

    page_bytes = divided(1)
    smallest = page_bytes + workspace
    costs = (
        f"one page of {one_page.tokens_per_page} tokens is {page_bytes} bytes over all layers, the split-KV workspace "
        f"of {STEPS_IN_FLIGHT} steps {workspace}, the weights {weight_bytes}, on each device"
    )

    def sized(pages: int, reason: str, *, ample: bool = False) -> PoolSize:
        most = MAX_SLOTS // one_page.tokens_per_page
        if pages > most:
            pages, reason = most, f"{reason}, cut to the {most} pages that int32 slot numbers reach"
        groups = groups_beside(demands, pages, ample=ample)
        return PoolSize(pages, reason, workspace, weight_bytes, groups)

    if num_pages:
        groups = groups_beside(demands, num_pages, ample=True)
        return PoolSize(num_pages, f"paged_num_pages={num_pages}", workspace, weight_bytes, groups)
    if budget_bytes:
        if budget_bytes < smallest:
            raise ConfigError(
                f"paged_kv_budget_bytes={budget_bytes} holds no page: {costs}; the smallest budget that works is "
                f"{smallest}"
            )
        return sized(most_pages(budget_bytes - workspace, divided), f"paged_kv_budget_bytes={budget_bytes}")
    if memory_fraction and free is not None:
        budget = int(memory_fraction * max(0, free.num_bytes - weight_bytes))
        if budget < smallest:
            raise ConfigError(
                f"paged_kv_memory_fraction={memory_fraction} of {free.num_bytes} free bytes ({free.source}), less the "
                f"weights, is {budget} bytes and holds no page: {costs}; the smallest paged_kv_budget_bytes that works "
                f"is {smallest}. What jax may take of a GPU is set by XLA_PYTHON_CLIENT_MEM_FRACTION and "
                "XLA_PYTHON_CLIENT_PREALLOCATE"
            )
        return sized(
            most_pages(budget - workspace, divided),
            f"paged_kv_memory_fraction={memory_fraction}: {budget} bytes of {free.num_bytes} free, {free.source}, less "
            f"{weight_bytes} of weights",
        )
    wanted = max_num_seqs * one_page.pages_for(max_model_len)
    affordable = max(most_pages(DEFAULT_BUDGET_BYTES - workspace, divided), one_page.pages_for(max_model_len))
    ample = bytes_of_pools(one_page, demands, wanted, ample=True) <= DEFAULT_BUDGET_BYTES - workspace
    if ample or wanted <= affordable:
        return sized(wanted, f"{max_num_seqs} requests of {max_model_len} tokens at once", ample=True)
    return sized(affordable, "the default budget of 1 GiB a device; set paged_num_pages or paged_kv_budget_bytes")


def requests_at_once(
    layout: KvStorageLayoutV1,
    num_tokens: int,
    max_num_seqs: int,
    window_groups: Sequence[WindowGroup] = (),
    step_tokens: int = 1,
) -> int:
    """How many requests of ``num_tokens`` tokens, prompt and completion, run at once, sharing nothing.

    Args:
      step_tokens: of the largest step: what prompts under way need beyond their windows.
    """
    windows = (rows_that_fit(group, num_tokens, step_tokens) for group in window_groups)
    return min(max_num_seqs, layout.num_pages // layout.pages_for(num_tokens), *windows)


def _available_host_bytes() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:  # not Linux
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
