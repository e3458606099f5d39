"""Huge memory pages behind a CPU's weights and pools.

For:        fewer address translations while a step streams through weights and K/V; ADR 5 has what it brings.
Not for:    KV pages (kv_control), GPUs, or how arrays are made.
May import: the standard library, jax.

A decode step reads every weight once. On memory pages of 4 KiB that is a translation for each 4 KiB, twice nested in a
virtual machine. Linux gives pages of 2 MiB to who asks (``madvise``), and ``MADV_COLLAPSE`` (Linux 6.1) exchanges those
that are there, whoever allocated them. Values, addresses and sizes stay what they were.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax

HUGE_PAGE = 2 * 2**20
"""Bytes; as on x86-64, and on 64-bit ARM with pages of 4 KiB."""

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_NEAR = 64 * 1024
"""Arrays with less than this between them share huge pages: what lies between is the allocator's own."""


def back_with_huge_pages(arrays: Iterable[Any], *, setting: Path = _SETTING) -> int:
    """Move what CPU arrays hold onto huge pages, as far as the kernel gives them. Best effort: never an error.

    Args:
      arrays: ``jax.Array``; those of other devices and anything else (``jax.ShapeDtypeStruct``) are passed over.
      setting: where the kernel says whether it gives huge pages; ``never`` is respected.

    Returns:
      Bytes that lie on huge pages now.
    """
    if not _are_given(setting):
        return 0
    advise = _madvise()
    held = 0
    for begin, end in merged(_ranges(arrays)):
        for page in range(-(-begin // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
            advise(page, HUGE_PAGE, _MADV_HUGEPAGE)
            held += HUGE_PAGE if advise(page, HUGE_PAGE, _MADV_COLLAPSE) == 0 else 0
    return held


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Address ranges in order, those that lie near each other as one.

    >>> merged([(0, 10), (1_000_000, 1_000_010), (20, 30)])
    [(0, 30), (1000000, 1000010)]
    """
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin - found[-1][1] < _NEAR:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _ranges(arrays: Iterable[Any]) -> Iterator[tuple[int, int]]:
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            for shard in array.addressable_shards:
                if shard.device.platform == "cpu" and shard.data.nbytes:
                    begin = shard.data.unsafe_buffer_pointer()
                    yield begin, begin + shard.data.nbytes


def _are_given(setting: Path) -> bool:
    try:
        return sys.platform == "linux" and "[never]" not in setting.read_text()
    except OSError:
        return False


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
