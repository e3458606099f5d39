"""The control plane alone: what a step costs the host, and what pages and prefixes cost.

For:        one table of host time per step by running requests and by context length, of page and prefix rates, and of
            memory; no jax, no model.
Not for:    steps on a device (benchmarks/parity.py) or what sharing saves (benchmarks/prefix_cache.py).
May import: the standard library, numpy, kv_common, kv_control.

    python -m benchmarks.control_plane --json out/control_plane.json
    python -m benchmarks.control_plane --quick                 # seconds; figures mean nothing

A step is schedule + slices + reserve + confirm + plan + commit + advance + record_step: a decision, the packed page
table, and the results of every request. Three passes, each on an engine of its own; a figure whose passes differ by
more than 5 % is marked with ``!``: not reportable.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kv_common.layout import KvStorageLayoutV1
from kv_control.allocator import PageAllocator
from kv_control.bucketing import token_ladder
from kv_control.control_plane import ControlPlane
from kv_control.plan import RequestId, StepResults
from kv_control.prefix_index import PrefixIndex
from kv_control.request import Request
from kv_control.scheduler import Scheduler

PAGE = 16
PARTS = ("schedule", "slices", "reserve", "plan", "advance", "record")
SETTLED = 1.05
"""Largest over smallest median of the passes up to which a figure counts."""


@dataclass(frozen=True)
class StepCost:
    """Host time of a decode step. Times are microseconds; ``spread`` is (90th - 10th percentile) / median of all steps
    of the median pass, ``passes`` the medians of the passes."""

    running: int
    context: int
    prefix_cache: bool
    median_us: float
    per_request_us: float
    spread: float
    passes: list[float]
    settled: bool
    parts_us: dict[str, float] = field(default_factory=dict)


class Loop:
    """A scheduler over a pool that nobody writes to: every token it is given is 7."""

    def __init__(self, running: int, context: int, num_steps: int, *, prefix_cache: bool) -> None:
        budget = max(8192, running)
        meanwhile = running * context // (budget - running + 1) + 1  # tokens the first gets while the last is prefilled
        new_tokens = meanwhile + num_steps + PAGE
        length = context + new_tokens
        num_pages = running * (-(-length // PAGE) + 1)
        self.control = ControlPlane(
            KvStorageLayoutV1(1, num_pages, PAGE, num_kv_heads=1, head_dim=1, dtype="float32"),
            max_num_seqs=running,
            max_model_len=length,
            token_ladder=token_ladder(budget),
            prefix_namespace=b"benchmark" if prefix_cache else None,
        )
        self.scheduler = Scheduler(
            self.control, max_num_batched_tokens=budget, max_num_seqs=running, max_model_len=length
        )
        rng = np.random.default_rng(0)
        for i in range(running):  # lengths differ by up to a page, so that some request opens a page in every step
            self.scheduler.submit(
                Request(
                    RequestId(i),
                    rng.integers(8, 50_000, context - i % PAGE),
                    max_tokens=new_tokens,
                    stop_token_ids=frozenset({2}),
                )
            )
        while self.scheduler.num_waiting or (self.scheduler.table.num_tokens <= self.scheduler.table.num_prompt).any():
            self.step()

    def step(self) -> list[float]:
        """One step; the clock before and after each of ``PARTS``."""
        clock, control, scheduler = time.perf_counter, self.control, self.scheduler
        ticks = [clock()]
        scheduled = scheduler.schedule()
        ticks.append(clock())
        batch = scheduler.slices(scheduled)
        ticks.append(clock())
        reservation = control.reserve(batch)
        ticks.append(clock())
        assert reservation is not None
        plan = control.plan(control.confirm_scrubbed(reservation))
        control.commit(plan)
        ticks.append(clock())
        scheduler.advance(batch)
        ticks.append(clock())
        n = len(batch)
        results = StepResults(np.full(n, 7, np.int32), np.zeros(n, np.float32), np.ones(n, np.bool_))
        scheduler.record_step(batch, results)
        ticks.append(clock())
        return ticks


def step_cost(running: int, context: int, *, prefix_cache: bool = False, num_steps: int = 120) -> StepCost:
    """Measure decode steps of ``running`` requests of ``context`` tokens."""
    passes = []
    for _ in range(3):
        loop = Loop(running, context, num_steps, prefix_cache=prefix_cache)
        for _ in range(4):
            loop.step()
        ticks = np.array([loop.step() for _ in range(num_steps - 40)]) * 1e6
        if loop.scheduler.num_running != running:
            raise RuntimeError("a request ended while steps were timed")
        passes.append(ticks)
    medians = [float(np.median(ticks[:, -1] - ticks[:, 0])) for ticks in passes]
    chosen = passes[medians.index(median(medians))]
    whole = chosen[:, -1] - chosen[:, 0]
    low, high = np.percentile(whole, [10, 90])
    return StepCost(
        running=running,
        context=context,
        prefix_cache=prefix_cache,
        median_us=median(medians),
        per_request_us=median(medians) / running,
        spread=float((high - low) / np.median(whole)),
        passes=medians,
        settled=max(medians) / min(medians) <= SETTLED,
        parts_us=dict(zip(PARTS, np.median(np.diff(chosen, axis=1), axis=0).tolist(), strict=True)),
    )


def rate(call: Callable[[], int], seconds: float) -> float:
    """Units a second: the median of three passes of ``seconds`` each, where a call returns the units it did."""
    rates = []
    for _ in range(3):
        done, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            done += call()
        rates.append(done / elapsed)
    return median(rates)


def page_rates(seconds: float) -> dict[str, float]:
    """Pages a second: allocated and freed (8 at a time), published, and matched (prompts of 32 pages)."""
    pool = PageAllocator(100_000)

    def allocate_and_free() -> int:
        pages = pool.allocate(8)
        assert pages is not None
        pool.free(pages)
        return 8

    rng = np.random.default_rng(0)
    index = PrefixIndex(PAGE)
    prompt = rng.integers(0, 50_000, 32 * PAGE).astype(np.int32)
    keys = index.page_keys(b"benchmark", prompt)

    def publish() -> int:
        index.clear()
        parent = None
        for i, key in enumerate(keys):
            parent = index.publish(parent, key, prompt[i * PAGE : (i + 1) * PAGE], page=i)
        return len(keys)

    def hash_pages() -> int:
        return len(index.page_keys(b"benchmark", prompt))

    def match() -> int:
        return len(index.match(keys, prompt))

    rates = {"allocated and freed": rate(allocate_and_free, seconds), "published": rate(publish, seconds)}
    publish()
    return rates | {"hashed": rate(hash_pages, seconds), "matched": rate(match, seconds)}


def memory(running: int, context: int) -> dict[str, int]:
    """Bytes that the control plane's arrays reserve for ``running`` requests of ``context`` tokens, and how many more
    the process has resident once all of them run there."""
    before = resident_bytes()
    loop = Loop(running, context, 64, prefix_cache=False)
    table, page_map = loop.scheduler.table, loop.control.page_map
    reserved = table.tokens.nbytes + table.logprobs.nbytes + page_map.nbytes
    return {"reserved": reserved, "resident": resident_bytes() - before}


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def nodes_under_unique_suffixes(num_requests: int, num_pages: int = 64) -> list[int]:
    """Nodes of the prefix index, ten times along a run of requests that share a prefix and end differently."""
    control = ControlPlane(
        KvStorageLayoutV1(1, num_pages, PAGE, num_kv_heads=1, head_dim=1, dtype="float32"),
        max_num_seqs=4,
        max_model_len=256,
        token_ladder=token_ladder(256),
        prefix_namespace=b"benchmark",
    )
    scheduler = Scheduler(control, max_num_batched_tokens=256, max_num_seqs=4, max_model_len=256)
    prefix = np.arange(64)
    counts = []
    for i in range(num_requests):
        suffix = np.array([i % 50_000, i // 50_000, *range(PAGE)])
        scheduler.submit(Request(RequestId(i), np.concatenate([prefix, suffix]), max_tokens=1))
        while scheduler.has_work:
            batch = scheduler.slices(scheduler.schedule())
            reservation = control.reserve(batch)
            assert reservation is not None
            control.commit(control.plan(control.confirm_scrubbed(reservation)))
            scheduler.advance(batch)
            n = len(batch)
            results = StepResults(np.full(n, 7, np.int32), np.zeros(n, np.float32), np.ones(n, np.bool_))
            scheduler.record_step(batch, results)
        scheduler.pop_finished()
        if (i + 1) % max(1, num_requests // 10) == 0:
            assert control.prefix_index is not None
            counts.append(control.prefix_index.num_nodes)
    return counts


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--quick", action="store_true", help="a fraction of the work: shows that it runs")
    arguments = parser.parse_args(argv)
    quick = arguments.quick
    batches, contexts = ((1, 16), (64,)) if quick else ((1, 64, 256, 1024), (256, 1024, 4096, 16384))
    seconds = 0.02 if quick else 1.0
    costs = [step_cost(running, 64 if quick else 128) for running in batches]
    costs += [step_cost(batches[-1] if quick else 256, context) for context in contexts]
    costs.append(step_cost(batches[-1] if quick else 256, contexts[0], prefix_cache=True))
    record: dict[str, Any] = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.processor() or platform.machine(),
        "seed": 0,
        "page_size": PAGE,
        "steps": [asdict(cost) for cost in costs],
        "pages_per_second": page_rates(seconds),
        "memory": memory(*((4, 512) if quick else (256, 32_768))),
        "prefix_nodes": nodes_under_unique_suffixes(200 if quick else 100_000),
    }
    print("running  context  cache   us/step  us/request  spread  passes differ  " + "  ".join(PARTS))
    for cost in costs:
        differ = max(cost.passes) / min(cost.passes)
        parts = "  ".join(f"{cost.parts_us[part]:{len(part)}.0f}" for part in PARTS)
        print(
            f"{cost.running:7d} {cost.context:8d} {'on' if cost.prefix_cache else 'off':>6} {cost.median_us:9.0f} "
            f"{cost.per_request_us:11.2f} {cost.spread:7.2f} {differ:10.2f}{' ' if cost.settled else '!'}    {parts}"
        )
    print(
        "a second: "
        + ", ".join(f"{value / 1e3:,.0f}k pages {name}" for name, value in record["pages_per_second"].items())
    )
    print("memory: " + ", ".join(f"{value / 2**20:.1f} MiB {name}" for name, value in record["memory"].items()))
    print(f"prefix nodes along unique suffixes: {record['prefix_nodes']}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
