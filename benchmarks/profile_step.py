"""Where the time of a step goes: host, transfer and dispatch, device, read-back, and what running ahead hides of it.

For:        decode steps at several batch sizes and one prefill step, part by part.
Not for:    a trace of requests (benchmarks/serving.py), attention alone (benchmarks/attention.py).
May import: the standard library, numpy, jax, kv_control, kv_execution, maxtext_paged, benchmarks.

    DECOUPLE_GCLOUD=TRUE JAX_PLATFORMS=cpu python -m benchmarks.profile_step .cache/models/smollm2-135m/config.yml \\
        --json out/profile_step.json

Each part is timed with the device waited for in between, one step after another, so the parts add up to a step;
"loop" is the driver's own step, dispatched ahead of the last one's results, over the same requests. Their difference
is what running ahead hides. "argument transfer" is a transfer of the step's buffer to the device on its own, waited
for; a dispatch has one in it. Leaves with status 1 if a program was obtained while it timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import records
from benchmarks.records import Failures, WrongPath

BATCHES = (1, 4, 16, 32)
PREFILL_TOKENS = 512
CONTEXT = 256
PARTS = ("schedule", "pages and arrays", "dispatch", "device", "read-back", "account")
"""In the order of a step. schedule: what runs. account: tokens join their requests, whoever is done ends."""


def timed_step(session: Any) -> dict[str, float]:
    """One step, part by part, in seconds; and ``"argument transfer"``, which is not a part of its own."""
    import jax

    scheduler, runtime = session.driver.scheduler, session.runtime
    marks = [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    slices = scheduler.slices(scheduler.schedule())
    mark()
    prepared = runtime.prepare_step(slices)
    if prepared is None:
        raise WrongPath("the pool has no room for the step that is to be timed")
    mark()
    outcome = runtime.run_step(prepared)
    mark()
    jax.block_until_ready(outcome.outputs.samples)
    mark()
    results = outcome.results()
    mark()
    scheduler.advance(slices)
    scheduler.record_step(slices, results)
    mark()
    parts = {name: end - start for name, (start, end) in zip(PARTS, pairwise(marks), strict=True)}
    start = time.perf_counter()
    jax.block_until_ready(jax.device_put(prepared.buffer.copy()))
    parts["argument transfer"] = time.perf_counter() - start
    return parts


def submit(session: Any, count: int, num_tokens: int, max_tokens: int, seed: int) -> list[Any]:
    """``count`` greedy requests of random prompts, which no end token ends."""
    import numpy as np

    from kv_control.plan import RequestId
    from kv_control.request import Request

    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(count):
        submit.next_id += 1  # type: ignore[attr-defined]
        prompt = rng.integers(3, session.model.vocab_size, num_tokens)
        requests.append(
            Request(RequestId(submit.next_id), prompt, max_tokens=max_tokens, ignore_eos=True)  # type: ignore[attr-defined]
        )
        session.driver.submit(requests[-1])
    return requests


submit.next_id = 0  # type: ignore[attr-defined]


def decode_parts(session: Any, batch: int, steps: int, seed: int) -> tuple[dict[str, float], float]:
    """Medians of the parts of a decode step, and of the driver's own steps, in seconds."""
    requests = submit(session, batch, CONTEXT, 2 * steps + 4, seed)
    while not all(request.num_generated for request in requests):
        timed_step(session)
    parts = [timed_step(session) for _ in range(steps)]
    session.driver.step()
    loop = []
    for _ in range(steps):
        start = time.perf_counter()
        session.driver.step()
        loop.append(time.perf_counter() - start)
    for _ in session.driver.run():
        pass
    return {name: median(part[name] for part in parts) for name in parts[0]}, median(loop)


def prefill_parts(session: Any, steps: int, seed: int) -> dict[str, float]:
    """Medians of the parts of a step that computes one prompt of ``PREFILL_TOKENS``."""
    parts = []
    for i in range(steps):
        submit(session, 1, PREFILL_TOKENS, 1, seed + i)
        parts.append(timed_step(session))
    session.driver.pop_finished()
    return {name: median(part[name] for part in parts) for name in parts[0]}


def summarise(passes: Sequence[dict[str, float]], agreement: float) -> dict[str, Any]:
    """A figure for each part and for their sum."""
    whole = [sum(one[name] for name in PARTS) for one in passes]
    figures = {name: records.figure([one[name] for one in passes], agreement=agreement) for name in passes[0]}
    return {**figures, "step": records.figure(whole, agreement=agreement)}


def table(name: str, figures: dict[str, Any]) -> str:
    """One line: milliseconds and share of each part."""
    whole = figures["step"].median
    cells = [f"{part} {figures[part].median * 1e3:.2f} ({figures[part].median / whole:.1%})" for part in PARTS]
    text = f"{name:11} step {whole * 1e3:7.1f} ms: " + ", ".join(cells)
    if "loop" in figures:
        text += f"; loop ahead {figures['loop'].median * 1e3:.1f}"
    return f"{text}; transfer alone {figures['argument transfer'].median * 1e3:.2f}; {figures['step'].why}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the parts; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="MaxText configuration, such as `maxtext-paged convert` writes")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--steps", type=int, default=24, help="timed steps of each kind and pass")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--agreement", type=float, default=1.1, help="largest over smallest pass of a reportable figure"
    )
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args(arguments)
    from maxtext_paged.cli.configuration import load_configuration
    from maxtext_paged.session import open_session

    longest = max(CONTEXT + 2 * options.steps + 4, PREFILL_TOKENS + 1)
    shape = [f"max_target_length={longest}", f"paged_max_num_seqs={max(options.batches)}"]
    session = open_session(load_configuration(options.config, [*shape, *options.overrides]))
    session.runtime.warm_up()
    failures, before = Failures("benchmarks.profile_step"), session.runtime.metrics()
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(options.passes):
        for batch in options.batches:
            parts, loop = decode_parts(session, batch, options.steps, options.seed + number)
            found.setdefault(f"decode {batch}", []).append({**parts, "loop": loop})
        prefill = prefill_parts(session, max(3, options.steps // 4), options.seed + number)
        found.setdefault(f"prefill {PREFILL_TOKENS}", []).append(prefill)
    after = session.runtime.metrics()
    if after.num_compile_events != before.num_compile_events:
        failures.add(f"{after.num_compile_events - before.num_compile_events} programs were obtained after warm-up")
    figures = {name: summarise(passes, options.agreement) for name, passes in found.items()}
    for name, one in figures.items():
        print(table(name, one))
    records.write(
        options.json,
        {
            "seconds": figures,
            "backend": session.backend.name,
            "decodes": after.decodes_by_kind,
            "steps_by_rung": after.steps_by_rung,
            "arguments": vars(options),
            "environment": records.environment(options.seed),
        },
    )
    session.close()
    return failures.status()


if __name__ == "__main__":
    sys.exit(main())
