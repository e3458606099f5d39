"""Decode attention on a GPU: our kernels beside jax's deprecated paged attention and the jnp gather, in bytes a second.

For:        one table of times for each shape, context and batch, as a share of the copy bandwidth measured beside it.
Not for:    CPUs (attention.py), whole steps, or anything that a machine without a GPU could say.
May import: the standard library, numpy, jax, kv_common, kv_execution.

    python -m benchmarks.attention --device gpu --json out/attention-gpu.json
    python -m benchmarks.attention --device gpu --contexts 4096 --batches 16

Bytes are the visible keys and values, once each, and queries and outputs. Leaves with status 1 if an arm did not run
the kernel it is named after, or ran one that it is not, and 2 without a GPU. See docs/gpus.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kv_common.layout import KvStorageLayoutV1
from kv_common.page_table import KvPageTableV1, PageRow, pack_page_table
from kv_execution.attention import triton_bridge
from kv_execution.attention.decode_plans import decode_plans, has_split_kv
from kv_execution.attention.reference import ReferenceBackend
from kv_execution.attention.triton_backend import TritonBackend
from kv_execution.dispatch import DecodeDispatch, SplitFloors
from kv_execution.metadata import PageMetadata

SHAPES = {"32/8x128": (32, 8, 128), "8/8x128": (8, 8, 128), "9/3x64": (9, 3, 64)}
"""Query heads / KV heads x head size."""

CONTEXTS, BATCHES, DTYPES = (1024, 2048, 4096, 8192, 16384, 32768), (1, 4, 16, 64), ("bfloat16",)
ARMS = ("triton", "triton-whole", "pallas", "reference")
PAGE_SIZE = 16
NEVER = 1 << 40
COLD_BYTES = 512 << 20
"""Calls walk through at least so many bytes of pages, more than any cache holds, before they come back to one."""
CALLS = 20
"""Calls that are dispatched before one waits: the host's part of a launch overlaps the device's."""


@dataclass(frozen=True)
class Cell:
    """One measured cell; ``spread`` is (90th - 10th percentile) / median of its samples, each of ``CALLS`` calls."""

    shape: str
    dtype: str
    context: int
    batch: int
    arm: str
    seconds: float
    spread: float
    gigabytes_per_second: float
    share_of_copy: float
    dispatch: str


class WrongKernel(Exception):
    """An arm did not run what it is named after."""


def copy_bandwidth(*, size: int = 1 << 30, seconds: float = 1.0) -> float:
    """GB/s of a copy on the device, what it reads and writes counted both."""
    array = jnp.zeros(size // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * size / median(timed(lambda _: copy(array), budget=seconds)) / 1e9


def timed(call: Callable[[int], Any], *, budget: float, least: int = 5) -> list[float]:
    """Seconds of a call, in samples of ``CALLS``, after a first that does not count."""
    jax.block_until_ready(call(0))
    samples: list[float] = []
    end = time.perf_counter() + budget
    while len(samples) < least or time.perf_counter() < end:
        start = time.perf_counter()
        results = [call(i) for i in range(CALLS)]
        jax.block_until_ready(results)
        samples.append((time.perf_counter() - start) / CALLS)
    return samples


def check_arm(arm: str, lowered: str) -> None:
    """Whether a lowered program calls the kernel that its arm is named after, and none of another's.

    Raises:
      WrongKernel: it does not.
    """
    ours = rf"@(?:{triton_bridge.JAX_TRITON_TARGET}|{re.escape(triton_bridge.XLA_TARGET)})\("
    calls = re.findall(r"custom_call (@[\w.$]+\()", lowered)
    decodes = [call for call in calls if re.match(ours, call)]
    wanted = {"triton": 1, "triton-whole": 1, "pallas": None, "reference": 0}[arm]
    if wanted == 0 and calls:
        raise WrongKernel(f"{arm}: its program calls {', '.join(calls)}")
    if wanted is not None and min(len(decodes), 1) != wanted:
        raise WrongKernel(f"{arm}: its program calls {', '.join(calls) or 'no kernel'}")
    if wanted is None and not calls:
        raise WrongKernel(f"{arm}: its program calls no kernel")


def pallas_decode() -> Callable[..., jax.Array] | None:
    """jax's own paged attention, where this jax still has it."""
    try:
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    except ImportError:
        return None
    return paged_attention


def tables(context: int, batch: int, token_bytes: int) -> tuple[list[KvPageTableV1], int]:
    """Page tables of decodes over different shuffled pages of one pool, and the pool's pages."""
    each = -(-context // PAGE_SIZE)
    copies = max(1, min(16, COLD_BYTES // (batch * context * token_bytes)))
    num_pages = copies * batch * each
    order = np.random.default_rng(0).permutation(num_pages).astype(np.int32).reshape(copies, batch, each)
    shape = {"token_rung": batch, "row_rung": batch, "index_capacity": batch * each}
    rows = [[PageRow(context - 1, 1, own) for own in pages] for pages in order]
    return [pack_page_table(r, num_pages=num_pages, tokens_per_page=PAGE_SIZE, **shape) for r in rows], num_pages


def measure(
    shape: str, dtype: str, context: int, batch: int, *, copy: float, budget: float, arms: Sequence[str]
) -> Iterator[Cell]:
    """Time each arm on one problem."""
    heads, kv_heads, dim = SHAPES[shape]
    itemsize = jnp.dtype(dtype).itemsize
    token_bytes = 2 * kv_heads * dim * itemsize
    made, num_pages = tables(context, batch, token_bytes)
    metadata = [jax.device_put(PageMetadata.from_table(table)) for table in made]
    keys = jax.random.split(jax.random.key(0), 3)
    pools = [jax.random.normal(key, (num_pages, PAGE_SIZE, kv_heads, dim), dtype) for key in keys[:2]]
    query = jax.random.normal(keys[2], (batch, heads, dim), dtype)
    moved = batch * (context * token_bytes + 2 * heads * dim * itemsize)
    layout = KvStorageLayoutV1(1, num_pages, PAGE_SIZE, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype)
    for arm in arms:
        if arm == "pallas":
            program, arguments = _pallas(query, pools, made)
            if program is None:
                continue
            reason = "jax's pallas paged attention, 16 pieces a row"
        else:
            floors = SplitFloors(NEVER, NEVER) if arm == "triton-whole" else SplitFloors()
            backend = ReferenceBackend() if arm == "reference" else TritonBackend(floors=floors)
            program = jax.jit(
                lambda q, k, v, pages, backend=backend: backend.decode(
                    q, k, v, pages, scale=dim**-0.5, sliding_window=None, soft_cap=None, sinks=None
                )
            )
            arguments = [(query, *pools, pages) for pages in metadata]
            dispatch = DecodeDispatch(
                fused_kernel=None if has_split_kv(backend) else "the jnp reference",
                floors=floors,
                plans=decode_plans(backend, layout, heads, dtype),
            )
            [outcome] = dispatch.outcomes(made[0])
            reason = outcome.reason
        check_arm(arm, program.lower(*arguments[0]).as_text())
        times = timed(
            lambda i, program=program, arguments=arguments: program(*arguments[i % len(arguments)]), budget=budget
        )
        seconds = median(times)
        low, high = np.percentile(times, [10, 90])
        rate = moved / seconds / 1e9
        yield Cell(shape, dtype, context, batch, arm, seconds, float((high - low) / seconds), rate, rate / copy, reason)


def _pallas(query: jax.Array, pools: Sequence[jax.Array], made: Sequence[KvPageTableV1]) -> tuple[Any, list[Any]]:
    """Its program and arguments: pools with heads first, padded tables; queries scaled beforehand."""
    decode = pallas_decode()
    if decode is None:
        return None, []
    heads_first = [jax.jit(lambda pool: pool.transpose(2, 0, 1, 3))(pool) for pool in pools]
    scaled = query * query.shape[-1] ** -0.5
    lists = [table.kv_indices.reshape(len(table.seq_lens), -1) for table in made]
    return jax.jit(decode), [
        (scaled, *heads_first, jnp.asarray(pages), jnp.asarray(table.seq_lens))
        for pages, table in zip(lists, made, strict=True)
    ]


def fits(shape: str, dtype: str, context: int, batch: int, device: Any) -> bool:
    """Whether a cell's pools, and their copies for the pallas arm, take at most half of the device's memory."""
    _, kv_heads, dim = SHAPES[shape]
    limit = (device.memory_stats() or {}).get("bytes_limit", 8 << 30)
    return 2 * max(COLD_BYTES, batch * context * 2 * kv_heads * dim * jnp.dtype(dtype).itemsize) <= limit // 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells that were asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=tuple(SHAPES))
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--seconds", type=float, default=0.2, help="seconds a cell")
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args(arguments)
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        print(f"benchmarks.attention --device gpu: no GPU: {error}", file=sys.stderr)
        return 2
    copy = copy_bandwidth()
    print(f"{device.device_kind}: a copy moves {copy:.0f} GB/s")
    print(
        f"{'shape':10}{'dtype':10}{'context':>8}{'batch':>6}  {'arm':14}"
        f"{'us':>10}{'spread':>8}{'GB/s':>8}{'of copy':>8}  dispatch"
    )
    cells: list[Cell] = []
    try:
        for shape in options.shapes:
            for dtype in options.dtypes:
                for context in options.contexts:
                    for batch in options.batches:
                        if not fits(shape, dtype, context, batch, device):
                            print(f"{shape:10}{dtype:10}{context:8}{batch:6}  left out: its pools would not fit")
                            continue
                        for cell in measure(
                            shape, dtype, context, batch, copy=copy, budget=options.seconds, arms=options.arms
                        ):
                            cells.append(cell)
                            print(
                                f"{shape:10}{dtype:10}{context:8}{batch:6}  {cell.arm:14}{cell.seconds * 1e6:10.1f}"
                                f"{cell.spread:8.2f}{cell.gigabytes_per_second:8.0f}{cell.share_of_copy:8.0%}"
                                f"  {cell.dispatch}",
                                flush=True,
                            )
    except WrongKernel as error:
        print(f"benchmarks.attention --device gpu: {error}", file=sys.stderr)
        return 1
    after = copy_bandwidth()
    print(f"a copy moves {after:.0f} GB/s afterwards")
    if options.json:
        target = asdict(triton_bridge.local_target())
        machine = {"jax": jax.__version__, "device": device.device_kind, "target": target}
        record = {"machine": machine, "copy_gigabytes_per_second": [copy, after], "cells": [asdict(c) for c in cells]}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
