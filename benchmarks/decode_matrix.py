"""Whole decode steps over long contexts: fused split-KV against the gather that it replaces.

For:        several rows and single rows at 1K to 32K tokens, each arm in a fresh process, three sweeps each.
Not for:    attention alone (benchmarks/attention.py), equal tokens (benchmarks/parity.py).
May import: the standard library, numpy, kv_control, kv_execution, maxtext_paged, benchmarks.

    DECOUPLE_GCLOUD=TRUE JAX_PLATFORMS=cpu python -m benchmarks.decode_matrix .cache/models/smollm2-135m/config.yml \\
        --json out/decode_matrix.json

Contexts are reserved and not computed (their prefill would take most of an hour): pages hold zeros, which cost a step
what any keys do. --prefill computes them. The model's context is stretched by ``max_target_length`` alone, so it must
place tokens by RoPE only. Leaves with status 1 if the fused arm decoded a step without fused launches, or the gather
arm launched any native kernel.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import records
from benchmarks.records import Failures, Figure, WrongPath

CELLS = ("4x1024", "4x4096", "4x16384", "1x16384", "1x32768")
ARMS = {
    "fused": ["paged_backend=native", "paged_attention_native=1"],
    "gather": ["paged_backend=reference"],
}
CHUNK_TOKENS = 512


def parse_cell(text: str) -> tuple[int, int]:
    """Rows and context of each.

    >>> parse_cell("4x1024")
    (4, 1024)
    """
    rows, context = text.split("x")
    return int(rows), int(context)


def run_cell(session: Any, rows: int, context: int, options: argparse.Namespace) -> dict[str, Any]:
    """Decode ``rows`` requests from ``context`` tokens on; milliseconds a step in each sweep.

    Raises:
      WrongPath: the pool has no room, or logits were not finite.
    """
    import numpy as np

    from kv_control.plan import GREEDY, RequestSlice

    runtime, chunk = session.runtime, session.options.paged_max_num_batched_tokens
    handles = [runtime.open() for _ in range(rows)]
    for handle in handles:
        for start in range(0, context, chunk):
            tokens = np.arange(start, min(start + chunk, context), dtype=np.int32) % 200 + 3
            prepared = runtime.prepare_step([RequestSlice(handle, start, tokens)])
            if prepared is None:
                raise WrongPath(f"{rows} x {context}: the pool has no room")
            if options.prefill:
                runtime.run_step(prepared).read()
            else:
                session.control.commit(prepared.plan)  # held as written: nothing was dispatched
    before, compiled = dict(runtime.metrics().decodes_by_kind), runtime.metrics().num_compile_events
    position, last, reasons, sweeps = context, [3] * rows, set(), []
    for sweep in range(options.sweeps + 1):
        times = []
        for _ in range(options.steps if sweep else 2):
            slices = [
                RequestSlice(handle, position, np.array([token], np.int32), sample=GREEDY)
                for handle, token in zip(handles, last, strict=True)
            ]
            start = time.perf_counter()
            prepared = runtime.prepare_step(slices)
            if prepared is None:
                raise WrongPath(f"{rows} x {context}: the pool has no room")
            outcome = runtime.run_step(prepared)
            results = outcome.results()
            times.append(time.perf_counter() - start)
            if not results.ok.all():
                raise WrongPath(f"{rows} x {context}: logits are not finite")
            last, position = results.tokens.tolist(), position + 1
            reasons |= {one.reason for one in outcome.decode if not sweep}
        if sweep:
            sweeps.append(median(times))
    after = runtime.metrics()
    for handle in handles:
        runtime.release(handle)
    if after.num_compile_events != compiled:
        raise WrongPath(f"{rows} x {context}: {after.num_compile_events - compiled} programs were obtained")
    return {
        "rows": rows,
        "context": context,
        "step_seconds": records.figure(sweeps, agreement=options.agreement),
        "steps": 2 + options.steps * options.sweeps,
        "decodes": {
            kind: n - before.get(kind, 0) for kind, n in after.decodes_by_kind.items() if n > before.get(kind, 0)
        },
        "dispatch": sorted(reasons),
    }


def run_arm(options: argparse.Namespace) -> dict[str, Any]:
    """All cells of one arm, in this process.

    Raises:
      WrongPath: the arm did not run what it is named after.
    """
    import os

    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
    from kv_execution.native.library import native_library
    from maxtext_paged.cli.configuration import load_configuration
    from maxtext_paged.session import open_session

    cells = [parse_cell(cell) for cell in options.cells]
    room = 2 + options.steps * options.sweeps
    longest = max(context for _, context in cells) + room
    page = 16
    pages = max(rows * -(-(context + room) // page) for rows, context in cells)
    shape = [f"max_target_length={longest}", f"paged_num_pages={pages}", f"paged_tokens_per_page={page}"]
    shape += [f"paged_max_num_seqs={max(rows for rows, _ in cells)}", f"paged_max_num_batched_tokens={CHUNK_TOKENS}"]
    session = open_session(load_configuration(options.config, [*shape, *options.overrides, *ARMS[options.arm]]))
    session.runtime.warm_up()
    before = native_library().counts()
    done = [run_cell(session, rows, context, options) for rows, context in cells]
    launches = native_library().counts().since(before)
    per_step = len(session.decode.windows)
    for cell in done:
        wanted = {options.arm: cell["steps"] * per_step}
        if cell["decodes"] != wanted:
            raise WrongPath(
                f"{options.arm} {cell['rows']} x {cell['context']}: dispatched {cell['decodes']}, not {wanted}"
            )
    if options.arm == "fused" and (not launches.fused or launches.whole):
        raise WrongPath(f"the fused arm launched {launches}")
    if options.arm == "gather" and (launches.fused or launches.whole or launches.tiles):
        raise WrongPath(f"the gather arm launched native kernels: {launches}")
    layout, pool_bytes = session.model.layout, session.model.device_pool_bytes()
    return {
        "arm": options.arm,
        "backend": f"{session.backend.name} ({session.backend.reason})",
        "pool": f"{layout.num_pages} pages of {layout.tokens_per_page} tokens, {pool_bytes} bytes "
        f"({session.pool.reason})",
        "launches": launches,
        "cells": done,
        "contexts": "computed" if options.prefill else "reserved, not computed",
        "peak_rss_mib": records.peak_memory_mib(),
        "environment": records.environment(),
    }


def show(done: Sequence[dict[str, Any]]) -> None:
    """Each cell, its arms under each other, with what was dispatched."""
    for record in done:
        print(f"{record['arm']}: {record['pool']}; {record['backend']}; launched {record['launches']}")
    for cells in zip(*(record["cells"] for record in done), strict=True):
        for record, cell in zip(done, cells, strict=True):
            one = Figure(**cell["step_seconds"])
            print(
                f"{cell['rows']} x {cell['context']:6}  {record['arm']:7}{one.median * 1e3:10.2f} ms  ({one.why})  "
                f"{cell['decodes']}  {'; '.join(cell['dispatch'])}"
            )
        if len(cells) == 2:
            fused, gather = (cell["step_seconds"]["median"] for cell in cells)
            print(f"{'':12}gather over fused: {gather / fused:.2f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the arms, each in a process of its own, or one arm in this process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="MaxText configuration, such as `maxtext-paged convert` writes")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--cells", nargs="+", default=CELLS, help="ROWSxCONTEXT; fewer or smaller on small machines")
    parser.add_argument("--steps", type=int, default=16, help="of one sweep")
    parser.add_argument("--sweeps", type=int, default=3)
    parser.add_argument("--prefill", action="store_true", help="compute the contexts")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS))
    parser.add_argument("--agreement", type=float, default=records.AGREEMENT)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--arm", choices=tuple(ARMS), help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options, failures = parser.parse_args(words), Failures("benchmarks.decode_matrix")
    if options.arm:
        try:
            records.write(options.record, run_arm(options))
        except WrongPath as error:
            failures.add(f"{options.arm}: {error}")
        return failures.status()
    done = []
    for arm in options.arms:
        try:
            done.append(records.fresh_process("benchmarks.decode_matrix", [*words, "--arm", arm]))
        except WrongPath as error:
            failures.add(str(error))
    show(done)
    records.write(options.json, {"command": words, "arms": done})
    return failures.status()


if __name__ == "__main__":
    sys.exit(main())
