"""sglang-jax's page allocator on the operation of ``benchmarks.control_plane``: eight pages taken and given back.

For:        a peer's rate, in an environment of its own where ``sgl_jax`` imports.
Not for:    anything that this project imports.

    PYTHONPATH=UNPACKED_SGLANG_JAX VENV/bin/python benchmarks/peers/sglang_allocator.py
"""

from __future__ import annotations

import time
from statistics import median

import jax.numpy as jnp
import numpy as np
from sgl_jax.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

PAGE, PAGES, NUM_PAGES = 16, 8, 100_000


def pages_per_second(seconds: float = 1.0) -> float:
    """The median of three passes."""
    pool = PagedTokenToKVPoolAllocator(NUM_PAGES * PAGE, PAGE, jnp.float32, None)
    rates = []
    for _ in range(3):
        done, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            slots = pool.alloc(PAGES * PAGE)
            pool.free(np.asarray(slots))
            done += PAGES
        rates.append(done / elapsed)
    return median(rates)


if __name__ == "__main__":
    print(f"sglang-jax: {pages_per_second() / 1e3:.0f}k pages a second allocated and freed")
