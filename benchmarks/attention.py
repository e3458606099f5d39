"""Paged attention on this CPU: native kernels against the jnp reference and against what a core can read.

For:        one table of decode and prefill times per shape, context, batch and dtype, and whether the native kernels
            reached the bandwidth measured in the same run.
Not for:    whole model steps (benchmarks/parity.py): a gain here is not a gain end to end.
May import: the standard library, numpy, jax, kv_common, kv_execution.

    python -m benchmarks.attention --json out/attention.json            # every cell: about half an hour
    python -m benchmarks.attention --shapes 8/8x128 --contexts 4096 --batches 1
    python -m benchmarks.attention --device gpu                         # attention_gpu.py: other arms and measures

Leaves with status 1 if a native arm did not run the kernel it names, or the reference arm ran a native one.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kv_common.dtypes import bytes_of, scale_bits
from kv_common.page_table import KvPageTableV1, PageRow, pack_page_table
from kv_execution.attention.api import PagedAttentionBackend
from kv_execution.attention.native import NativeBackend, native_threads
from kv_execution.attention.reference import ReferenceBackend
from kv_execution.dispatch import DecodeDispatch, SplitFloors
from kv_execution.metadata import PageMetadata
from kv_execution.native.library import LaunchCounts, native_library
from kv_execution.quantised import KvPool, QuantisedPool, storage_dtype
from kv_execution.split_plan import SplitPlanCache

SHAPES = {"9/3x64": (9, 3, 64), "32/8x128": (32, 8, 128), "8/8x128": (8, 8, 128), "16/2x64": (16, 2, 64)}
"""Query heads / KV heads x head size; the first is SmolLM2-135M's."""

CONTEXTS, BATCHES, DTYPES = (256, 1024, 4096, 16384), (1, 4, 16), ("float32", "bfloat16")
QUANTISED = ("float8_e4m3fn", "int8")
"""Dtypes that are measured when they are asked for."""

PAGE_SIZE = 16
COLD_BYTES = 256 << 20
"""Calls walk through at least so many bytes of pages before they come back to one."""

NEVER = 1 << 40


@dataclass(frozen=True)
class Cell:
    """One measured cell. Times are seconds a call; ``spread`` is (90th - 10th percentile) / median.

    Bytes are the KV tokens' that the batch sees, once each: a decode's measure, ``share_of_one_core`` of its read
    bandwidth. Operations are those of the visible query-key pairs alone, two products of ``head_dim`` each: a prefill's
    measure, ``share_of_matmul`` of what XLA's own float32 matrix product reaches on all threads.
    """

    kind: str
    shape: str
    dtype: str
    context: int
    batch: int
    arm: str
    calls: int
    seconds: float
    spread: float
    gigabytes_per_second: float
    share_of_one_core: float
    gigaflops_per_second: float
    share_of_matmul: float
    dispatch: str
    launches: dict[str, int]


class WrongKernel(Exception):
    """An arm did not run what it is named after."""


def bandwidth(threads: int, *, size: int = COLD_BYTES, seconds: float = 1.0) -> float:
    """GB/s that ``threads`` cores read together from arrays of their own."""
    library = native_library()
    arrays = [np.ones(size // 4 // threads, np.float32) for _ in range(threads)]
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(rates) < 3:
            start = time.perf_counter()
            list(pool.map(library.read, arrays))
            rates.append(sum(array.nbytes for array in arrays) / (time.perf_counter() - start) / 1e9)
    return median(rates)


def matmul_rate(*, size: int = 2048, seconds: float = 1.0) -> float:
    """Gigaflops a second of XLA's float32 matrix product on all threads: what a prefill could reach."""
    square = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / median(timed(lambda _: product(square, square), budget=seconds)) / 1e9


def tables(kind: str, context: int, batch: int, token_bytes: int) -> tuple[list[KvPageTableV1], int]:
    """Page tables over different shuffled pages of one pool, and the pool's pages."""
    per_request = -(-context // PAGE_SIZE)
    copies = max(1, min(64, COLD_BYTES // (batch * context * token_bytes)))
    num_pages = copies * batch * per_request
    order = np.random.default_rng(0).permutation(num_pages).astype(np.int32).reshape(copies, batch, per_request)
    num_new = context if kind == "prefill" else 1
    made = []
    for pages in order:
        rows = [PageRow(context - num_new, num_new, own) for own in pages]
        shape = {"token_rung": batch * num_new, "row_rung": batch, "index_capacity": batch * per_request}
        made.append(pack_page_table(rows, num_pages=num_pages, tokens_per_page=PAGE_SIZE, **shape))
    return made, num_pages


def random_pool(key: jax.Array, shape: tuple[int, ...], dtype: str) -> KvPool:
    """A pool of random numbers, none of them NaN; quantised ones by their bits, to need no float32 pool on the way."""
    if not scale_bits(dtype):
        return jax.random.normal(key, shape, dtype)
    bits = jax.random.bits(key, shape, "uint8") & np.uint8(0xFF if dtype == "int8" else 0xBF)
    values = lax.bitcast_convert_type(bits, storage_dtype(dtype))
    return QuantisedPool(values, jnp.full((*shape[:3], 1), 1 / 64, jnp.float32))


def timed(call: Callable[[int], Any], *, budget: float, least: int = 5, most: int = 200) -> list[float]:
    """Seconds of each call, after two that do not count."""
    for i in range(2):
        jax.block_until_ready(call(i))
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < least or (time.perf_counter() < end and len(times) < most):
        start = time.perf_counter()
        jax.block_until_ready(call(len(times)))
        times.append(time.perf_counter() - start)
    return times


def check_arm(arm: str, kind: str, counts: LaunchCounts, calls: int) -> None:
    """Whether an arm's calls were the kernel's it is named after, and nobody else's.

    Raises:
      WrongKernel: they were not.
    """
    native = {"fused": counts.fused, "whole": counts.whole, "tiles": counts.tiles}
    wanted = {"native": "tiles" if kind == "prefill" else "fused", "native-whole": "whole", "reference": None}[arm]
    for name, count in native.items():
        if (name == wanted) != (count > 0) or (name == wanted != "tiles" and count != calls):
            raise WrongKernel(f"{arm} {kind}: {calls} calls ran as {native}")


def measure(
    kind: str,
    shape: str,
    dtype: str,
    context: int,
    batch: int,
    *,
    one_core: float,
    matmul: float,
    budget: float,
    arms: Sequence[str],
) -> Iterator[Cell]:
    """Time each arm on one problem."""
    heads, kv_heads, dim = SHAPES[shape]
    token_bytes = 2 * kv_heads * (bytes_of(dim, dtype) + scale_bits(dtype) // 8)
    made, num_pages = tables(kind, context, batch, token_bytes)
    metadata = [jax.device_put(PageMetadata.from_table(table)) for table in made]
    keys = jax.random.split(jax.random.key(0), 3)
    pools = [random_pool(key, (num_pages, PAGE_SIZE, kv_heads, dim), dtype) for key in keys[:2]]
    query = jax.random.normal(keys[2], (made[0].num_tokens, heads, dim), "float32" if scale_bits(dtype) else dtype)
    backends: dict[str, PagedAttentionBackend] = {
        "native": NativeBackend(),
        "native-whole": NativeBackend(None, NEVER, NEVER),
        "reference": ReferenceBackend(),
    }
    for arm in arms:
        if arm == "native-whole" and kind == "prefill":
            continue
        attend = jax.jit(
            lambda query, k_pool, v_pool, pages, backend=backends[arm]: backend.attend(
                query, k_pool, v_pool, pages, scale=dim**-0.5, sliding_window=None, soft_cap=None, sinks=None
            )
        )
        before = native_library().counts()
        times = timed(
            lambda i, attend=attend: attend(query, *pools, metadata[i % len(metadata)]),
            budget=budget,
            least=3 if arm == "reference" else 5,
        )
        counts = native_library().counts().since(before)
        check_arm(arm, kind, counts, len(times) + 2)
        dispatch = DecodeDispatch(
            fused_kernel="the jnp reference" if arm == "reference" else None,
            floors=SplitFloors(NEVER, NEVER) if arm == "native-whole" else SplitFloors(),
            plans=SplitPlanCache(native_threads(), PAGE_SIZE),
        )
        [outcome] = dispatch.outcomes(made[0])
        seconds = median(times)
        low, high = np.percentile(times, [10, 90])
        rate = batch * context * token_bytes / seconds / 1e9
        pairs = batch * heads * (context * (context + 1) // 2 if kind == "prefill" else context)
        gigaflops = 4 * dim * pairs / seconds / 1e9
        yield Cell(
            kind=kind,
            shape=shape,
            dtype=dtype,
            context=context,
            batch=batch,
            arm=arm,
            calls=len(times),
            seconds=seconds,
            spread=float((high - low) / seconds),
            gigabytes_per_second=rate,
            share_of_one_core=rate / one_core,
            gigaflops_per_second=gigaflops,
            share_of_matmul=gigaflops / matmul,
            dispatch=outcome.reason,
            launches=asdict(counts),
        )


def machine() -> dict[str, Any]:
    """Versions and what the CPU is."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    model, flags = (re.search(rf"^{name}\s*: (.*)$", info, re.MULTILINE) for name in ("model name", "flags"))
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cpu": model[1] if model else platform.processor(),
        "cpu_flags": sorted(flag for flag in (flags[1].split() if flags else []) if re.match("avx|amx|fma|f16c", flag)),
        "instruction_set": native_library().best,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells that were asked for; the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:2] == ["--device", "gpu"]:
        from benchmarks import attention_gpu

        return attention_gpu.main(given[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=("decode", "prefill"), default=("decode", "prefill"))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=tuple(SHAPES))
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--prefill", nargs="+", type=int, default=(512,), help="prompt lengths of the prefill cells")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--dtypes", nargs="+", choices=(*DTYPES, *QUANTISED), default=DTYPES)
    parser.add_argument("--arms", nargs="+", default=("native", "native-whole", "reference"))
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds a cell")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument(
        "--device", choices=("cpu",), default="cpu", help="first of all: `--device gpu` is a program apart"
    )
    options = parser.parse_args(given)
    one_core, two_cores = bandwidth(1), bandwidth(2)
    matmul = matmul_rate()
    print(f"read bandwidth: one core {one_core:.1f} GB/s, two {two_cores:.1f} GB/s; {native_library().best}")
    print(f"matrix products: {matmul:.0f} GFLOP/s")
    print(
        f"{'':8}{'shape':10}{'dtype':10}{'context':>8}{'batch':>6}  {'arm':14}"
        f"{'ms':>10}{'spread':>8}{'GB/s':>8}{'of core':>8}{'GFLOP/s':>9}{'of matmul':>10}"
    )
    cells: list[Cell] = []
    try:
        for kind in options.kinds:
            decode = kind == "decode"
            for shape in options.shapes:
                for dtype in options.dtypes:
                    for context in options.contexts if decode else options.prefill:
                        for batch in options.batches if decode else (1,):
                            for cell in measure(
                                kind, shape, dtype, context, batch,
                                one_core=one_core, matmul=matmul, budget=options.seconds, arms=options.arms,
                            ):  # fmt: skip
                                cells.append(cell)
                                print(
                                    f"{kind:8}{shape:10}{dtype:10}{context:8}{batch:6}  {cell.arm:14}"
                                    f"{cell.seconds * 1e3:10.3f}{cell.spread:8.2f}{cell.gigabytes_per_second:8.2f}"
                                    f"{cell.share_of_one_core:8.0%}{cell.gigaflops_per_second:9.1f}"
                                    f"{cell.share_of_matmul:10.0%}",
                                    flush=True,
                                )
    except WrongKernel as error:
        print(f"benchmarks.attention: {error}", file=sys.stderr)
        return 1
    after = bandwidth(1)
    print(f"read bandwidth of one core afterwards: {after:.1f} GB/s")
    if options.json:
        record = {
            "machine": machine(),
            "read_gigabytes_per_second": {"one_core": one_core, "two_cores": two_cores, "one_core_after": after},
            "matmul_gigaflops_per_second": matmul,
            "cells": [asdict(cell) for cell in cells],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
