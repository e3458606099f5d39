"""One trace of requests through paged MaxText and through MaxText's own dense engine, at the same KV byte budget.

For:        tokens a second, time to first token, gaps between tokens, requests at once, memory, page overhead, leaks.
Not for:    what prefix sharing brings (benchmarks/prefix_cache.py), other engines (benchmarks/peers/compare.py).
May import: the standard library, jax, maxtext_paged and benchmarks; all but the standard library in an arm's process.

    DECOUPLE_GCLOUD=TRUE JAX_PLATFORMS=cpu python -m benchmarks.serving .cache/models/smollm2-135m/config.yml \\
        --json out/serving.json

Every arm runs in a process of its own: warm-up, one pass that does not count, then passes that do, each from an empty
cache, then one pass that looks at the pages after each step and is not timed. A figure is reportable if at least three
passes agree (largest over smallest at most --agreement). A paged run in which requests were preempted shows what the
pool holds, not how fast it is: it is marked "capacity". Leaves with status 1 if an arm did not run what it is named
after, left pages behind, or obtained a program after warm-up.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.records import Failures, Figure, WrongPath
from benchmarks.traces import DEFAULT_TRACE, Asked, generate_trace, latencies, read_trace

SLOTS, SLOT_TOKENS = 4, 640
"""The budget: what MaxText's dense engine holds for so many slots of so many tokens."""

ARMS = {"paged": "paged, prefix cache off", "paged-cached": "paged, prefix cache on", "dense": "MaxText's MaxEngine"}
HIGHER_IS_BETTER = {"tokens_per_second": True, "ttft_p50": False, "ttft_p99": False, "itl_p50": False, "itl_p99": False}


def token_bytes(config: Any) -> int:
    """Bytes of one token's keys and values in all layers."""
    import numpy as np

    return int(2 * config.num_decoder_layers * config.num_kv_heads * config.head_dim * np.dtype(config.dtype).itemsize)


def shape_of(trace: Sequence[Asked]) -> tuple[int, int, int]:
    """Longest prompt, longest completion, longest request."""
    return (
        max(len(asked.prompt) for asked in trace),
        max(asked.max_tokens for asked in trace),
        max(len(asked.prompt) + asked.max_tokens for asked in trace),
    )


def read_requests(options: argparse.Namespace) -> list[Asked]:
    """The trace that the arguments name."""
    if options.generate:
        return generate_trace(
            options.generate,
            options.seed,
            options.vocab_size,
            prompts=tuple(options.prompts),
            outputs=tuple(options.outputs),
        )
    return read_trace(options.trace)


def passes_of(arm: Any, prompts: list[list[int]], limits: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Counted passes of ``arm.run``, each checked, and their figures.

    Raises:
      WrongPath: passes gave different tokens, or one broke a promise (``counts.check``).
    """
    arm.run(prompts, limits)  # not counted
    seen, watches, counted, tokens = [], [], [], None
    for _ in range(options.passes):
        with records.one_pass(quiet=not options.no_wait) as watch:
            times, made, counts = arm.run(prompts, limits)
        counts.check()
        if tokens is not None and made != tokens:
            raise WrongPath("two passes gave different tokens")
        tokens = made
        seen.append(latencies(times))
        watches.append(watch)
        counted.append(counts)
    foreign = [watch.foreign for watch in watches]
    values = {name: [getattr(one, name) for one in seen] for name in HIGHER_IS_BETTER if name != "tokens_per_second"}
    values["tokens_per_second"] = [one.num_tokens / watch.seconds for one, watch in zip(seen, watches, strict=True)]
    return {
        "figures": {
            name: records.figure(values[name], agreement=options.agreement, foreign=foreign)
            for name in HIGHER_IS_BETTER
        },
        "seconds": [watch.seconds for watch in watches],
        "cpu_seconds": [watch.cpu_seconds for watch in watches],
        "counts": counted,
        "tokens": tokens,
    }


def paged_record(options: argparse.Namespace, trace: list[Asked], *, cached: bool) -> dict[str, Any]:
    """The paged arm, in this process."""
    from types import SimpleNamespace

    from benchmarks.paged_arm import run_requests, watch_pages
    from maxtext_paged.cli.configuration import load_configuration
    from maxtext_paged.session import open_session

    prompts, limits = [asked.prompt for asked in trace], [asked.max_tokens for asked in trace]
    longest = shape_of(trace)[2]
    fixed = [f"max_target_length={longest}", f"paged_enable_prefix_cache={str(cached).lower()}"]
    config = load_configuration(options.config, [*fixed, *options.overrides])
    budget = options.kv_budget_bytes or SLOTS * SLOT_TOKENS * token_bytes(config)
    sized = [] if options.default_pool else [f"paged_kv_budget_bytes={budget}"]
    session = open_session(load_configuration(options.config, [*fixed, *sized, *options.overrides]))
    session.runtime.warm_up()
    arm = SimpleNamespace(run=lambda *asked: run_requests(session, *asked))
    record = passes_of(arm, prompts, limits, options)
    peak = records.peak_memory_mib()
    occupancy = watch_pages(session, prompts, limits)
    counts, metrics = record["counts"][-1], session.runtime.metrics()
    wanted = session.options.paged_backend
    if session.backend.name == "reference" and wanted != "reference":
        raise WrongPath(f"attention ran on the jnp reference: {session.backend.reason}")
    if not counts.decodes or not metrics.steps_by_backend.get(session.backend.name):
        raise WrongPath(f"no decode was counted on {session.backend.name}: {counts.decodes}")
    if counts.cached_tokens and not cached:
        raise WrongPath(f"{counts.cached_tokens} tokens came from a prefix cache that is off")
    layout = session.model.layout
    return record | {
        "kv_budget_bytes": budget,
        "kv_bytes": session.model.device_pool_bytes() + session.pool.workspace_bytes,
        "room": f"{layout.num_pages} pages of {layout.tokens_per_page} tokens ({session.pool.reason})",
        "kind": "capacity" if counts.preemptions else "throughput",
        "preemptions": counts.preemptions,
        "pages_left": counts.pages_held_after + counts.leaked_pages,
        "occupancy": occupancy,
        "mean_running": occupancy.mean_running,
        "peak_running": occupancy.peak_running,
        "peak_rss_mib": peak,
        "backend": f"{session.backend.name} ({session.backend.reason})",
        "dispatch": list(session.decode.describe()),
        "decodes": counts.decodes,
        "options": session.options,
    }


def dense_record(options: argparse.Namespace, trace: list[Asked]) -> dict[str, Any]:
    """MaxText's dense engine, in this process."""
    from benchmarks.dense_arm import DenseArm
    from maxtext_paged.cli.configuration import load_configuration

    prompts, limits = [asked.prompt for asked in trace], [asked.max_tokens for asked in trace]
    longest_prompt, longest_completion, _ = shape_of(trace)
    prefill = -(-longest_prompt // 64) * 64
    dense = [word for word in options.overrides if not word.startswith(("paged_", "attention="))]
    one_token = token_bytes(load_configuration(options.config, dense))
    budget = options.kv_budget_bytes or SLOTS * SLOT_TOKENS * one_token
    slots = budget // (one_token * (prefill + longest_completion))
    if not slots:
        raise WrongPath(
            f"{budget} bytes hold no dense slot of {prefill} + {longest_completion} tokens of {one_token} bytes"
        )
    arm = DenseArm(options.config, slots=slots, prefill=prefill, decode=longest_completion, overrides=dense)
    arm.warm_up()
    record = passes_of(arm, prompts, limits, options)
    counts = record["counts"][-1]
    if not counts.steps or counts.prefills != len(prompts) or arm.config.attention == "gpu_paged":
        raise WrongPath(f"the dense engine did not serve the trace: {counts}")
    return record | {
        "kv_budget_bytes": budget,
        "kv_bytes": arm.kv_bytes,
        "room": f"{slots} slots of {prefill} + {longest_completion} tokens, prompts padded to {arm.buckets}",
        "kind": "throughput",
        "preemptions": 0,
        "pages_left": 0,
        "mean_running": counts.mean_running,
        "peak_running": counts.peak_running,
        "peak_rss_mib": records.peak_memory_mib(),
        "backend": f"attention={arm.config.attention}",
        "dispatch": [],
        "decodes": {},
    }


def run_arm(options: argparse.Namespace) -> dict[str, Any]:
    """One arm in this process, with everything a record has."""
    import os

    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
    trace = read_requests(options)
    record = (
        dense_record(options, trace)
        if options.arm == "dense"
        else paged_record(options, trace, cached=options.arm == "paged-cached")
    )
    return {"arm": options.arm, **record, "environment": records.environment(options.seed)}


COLUMNS = (
    ("tokens_per_second", "tokens/s", 1.0),
    ("ttft_p50", "TTFT p50 s", 1.0),
    ("ttft_p99", "p99 s", 1.0),
    ("itl_p50", "ITL p50 ms", 1e3),
    ("itl_p99", "p99 ms", 1e3),
)


def show(done: Sequence[dict[str, Any]]) -> None:
    """The arms side by side; a figure that is not reportable has a ? behind it."""
    titles = "".join(f"{title:>13}" for _, title, _ in COLUMNS)
    print(f"{'arm':13}{titles}{'at once':>13}{'RSS MiB':>9}{'KV bytes':>12}{'overhead':>9}{'preempted':>10}{'left':>5}")
    for record in done:
        cells = ""
        for name, _, scale in COLUMNS:
            one = Figure(**{**record["figures"][name]})
            cells += f"{one.median * scale:12.2f}{' ' if one.reportable else '?'}"
        at_once = f"{record['mean_running']:.1f} / {record['peak_running']}"
        overhead = record["occupancy"]["page_overhead"] if record.get("occupancy") else float("nan")
        print(
            f"{record['arm']:13}{cells}{at_once:>13}{record['peak_rss_mib']:9.0f}{record['kv_bytes']:12}"
            f"{overhead:9.3f}{record['preemptions']:10}{record['pages_left']:5}  {record['room']}"
        )
        print(f"{'':13}{record['kind']} run; {record['backend']}; decodes {record['decodes'] or '-'}")
        for name, _, _ in COLUMNS:
            if not record["figures"][name]["reportable"]:
                print(f"{'':13}{name} {record['figures'][name]['why']}")
    by_arm = {record["arm"]: record for record in done}
    if {"paged", "dense"} <= set(by_arm):
        ratio = {
            n: by_arm["paged"]["figures"][n]["median"] / by_arm["dense"]["figures"][n]["median"] for n, *_ in COLUMNS
        }
        print(
            f"paged over dense: {ratio['tokens_per_second']:.2f} times the tokens a second, TTFT p50 "
            f"{1 / ratio['ttft_p50']:.1f} times and p99 {1 / ratio['ttft_p99']:.1f} times sooner"
        )


def parser() -> argparse.ArgumentParser:
    """The arguments, an arm's own included."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("config", help="MaxText configuration, such as `maxtext-paged convert` writes")
    made.add_argument("overrides", nargs="*", metavar="key=value")
    made.add_argument("--trace", type=Path, default=DEFAULT_TRACE, help="a file of requests (default: SmolLM2's)")
    made.add_argument("--generate", type=int, default=0, metavar="N", help="N random requests instead")
    made.add_argument("--seed", type=int, default=0, help="of --generate")
    made.add_argument(
        "--prompts", type=int, nargs=2, default=(16, 512), metavar=("LEAST", "MOST"), help="of --generate"
    )
    made.add_argument(
        "--outputs", type=int, nargs=2, default=(16, 128), metavar=("LEAST", "MOST"), help="of --generate"
    )
    made.add_argument("--vocab-size", type=int, default=49152, help="of --generate")
    made.add_argument("--arms", default="paged,dense", help="of paged and dense (default: both)")
    made.add_argument(
        "--prefix-cache",
        choices=("off", "on", "both"),
        default="both",
        help="of the paged arm. This trace shares no prefixes: the arm shows what the cache costs, and the dedicated "
        "program, benchmarks/prefix_cache.py, measures what sharing brings",
    )
    made.add_argument("--kv-budget-bytes", type=int, help=f"default: {SLOTS} dense slots of {SLOT_TOKENS} tokens")
    made.add_argument("--default-pool", action="store_true", help="give the paged arm its own default pool instead")
    made.add_argument("--passes", type=int, default=3)
    made.add_argument(
        "--agreement", type=float, default=records.AGREEMENT, help="largest over smallest reportable pass"
    )
    made.add_argument("--no-wait", action="store_true", help="do not wait for a quiet machine before a pass")
    made.add_argument("--json", type=Path, help="write the record here")
    made.add_argument("--arm", choices=tuple(ARMS), help=argparse.SUPPRESS)
    made.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all arms, each in a process of its own, or one arm in this process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options, failures = parser().parse_args(words), Failures("benchmarks.serving")
    if options.arm:
        try:
            records.write(options.record, run_arm(options))
        except WrongPath as error:
            failures.add(f"{options.arm}: {error}")
        return failures.status()
    cached = {"off": ["paged"], "on": ["paged-cached"], "both": ["paged", "paged-cached"]}[options.prefix_cache]
    chosen = options.arms.split(",")
    done = []
    for arm in [name for kind in chosen for name in (cached if kind == "paged" else [kind])]:
        try:
            done.append(records.fresh_process("benchmarks.serving", [*words, "--arm", arm]))
        except WrongPath as error:
            failures.add(str(error))
    show(done)
    trace = read_requests(options)
    records.write(
        options.json,
        {
            "command": words,
            "requests": len(trace),
            "prompt_tokens": sum(len(asked.prompt) for asked in trace),
            "output_tokens": sum(asked.max_tokens for asked in trace),
            "arms": [{name: value for name, value in record.items() if name != "tokens"} for record in done],
        },
    )
    return failures.status()


if __name__ == "__main__":
    sys.exit(main())
