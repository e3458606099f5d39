"""Rows a second with one and two replicas, and with one and two Ray actors, over one file of prompts.

For:        ``maxtext-paged generate --replicas`` and ``maxtext_paged.ray`` as users run them: whole processes.
Not for:    one engine's speed (benchmarks/serving.py).
May import: the standard library, benchmarks; ray and pyarrow in processes of their own only.

    DECOUPLE_GCLOUD=TRUE JAX_PLATFORMS=cpu python -m benchmarks.replicas .cache/models/smollm2-135m/config.yml \\
        --rows 256 --passes 3 --ray-python RAY_ENVIRONMENT/bin/python --json out/replicas.json

A pass of an arm is two jobs: a short one of one batch an engine, which is what a start costs, and the whole file. Rows
a second are those of the whole file over its whole time, start included; "steady" leaves the short job's rows and time
out. Arms alternate. On CPUs each engine has its part of the cores: two engines then show what handing out costs or what
one leaves idle, not two machines' worth. Leaves with status 1 if a job fails, loses a row, gives other tokens than the
first arm, or ran its attention on the jnp reference unasked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import records
from benchmarks.records import Failures, Figure, WrongPath
from benchmarks.traces import generate_trace

ARMS = {"replicas-1": 1, "replicas-2": 2, "ray-1": 1, "ray-2": 2}
_READ_PARQUET = """\
import json, sys, pathlib, pyarrow.parquet as parquet
for path in pathlib.Path(sys.argv[1]).glob("*.parquet"):
    for row in parquet.read_table(path, columns=["id", "token_ids", "backend"]).to_pylist():
        print(json.dumps(row))
"""


@dataclass(frozen=True, slots=True)
class Job:
    """What one job did: seconds of its process, tokens by row id, and the backends that its attention ran on."""

    seconds: float
    foreign: float
    tokens: dict[str, list[int]]
    backends: set[str]


def run_job(arm: str, rows: Path, place: Path, options: argparse.Namespace) -> Job:
    """Run one job and read what it wrote.

    Raises:
      WrongPath: it failed.
    """
    engines, ray = ARMS[arm], arm.startswith("ray")
    if ray:
        words = [options.ray_python, "-m", "benchmarks.ray_arm", options.config, str(rows), str(place / "answers")]
        words += [*options.overrides, "--engines", str(engines), "--batch", str(options.batch)]
    else:
        words = [sys.executable, "-m", "maxtext_paged", "generate", options.config, *options.overrides, "-i", str(rows)]
        words += ["-o", str(place / "out.jsonl"), "--no-progress", "--metrics-file", str(place / "metrics.json")]
        words += ["--replicas", str(engines)] if engines > 1 else []
    more = {"DECOUPLE_GCLOUD": "TRUE", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, **more, "PYTHONPATH": path, "RAY_AUTH_MODE": "disabled"}
    with records.one_pass(quiet=not options.no_wait) as watch:
        ended = subprocess.run(words, capture_output=True, text=True, env=environ, check=False)
    if ended.returncode:
        raise WrongPath(f"{arm} left with status {ended.returncode}: {(ended.stdout + ended.stderr)[-2000:]}")
    if ray:
        read = [options.ray_python, "-c", _READ_PARQUET, str(place / "answers")]
        lines = subprocess.run(read, capture_output=True, text=True, check=True).stdout
    else:
        lines = (place / "out.jsonl").read_text(encoding="utf-8")
    found = list(map(json.loads, lines.splitlines()))
    if len({row["id"] for row in found}) != len(found):
        raise WrongPath(f"{arm} answered a row twice")
    if ray:
        backends = {row["backend"] for row in found}
    else:
        shown = json.loads((place / "metrics.json").read_text(encoding="utf-8"))["run"]["attention_steps"]
        backends = {name for name, steps in shown.items() if steps}
    return Job(watch.seconds, watch.foreign, {row["id"]: row["token_ids"] for row in found}, backends)


def write_rows(path: Path, options: argparse.Namespace, limit: int | None = None) -> int:
    """The file that every arm reads, or its beginning; how many rows it has."""
    trace = generate_trace(
        options.rows, options.seed, options.vocab_size, prompts=options.prompts, outputs=options.outputs
    )[:limit]
    with open(path, "w", encoding="utf-8") as file:
        for number, asked in enumerate(trace):
            row = {"id": f"r{number}", "tokens": asked.prompt, "max_tokens": asked.max_tokens, "ignore_eos": True}
            file.write(json.dumps(row) + "\n")
    return len(trace)


class Measured:
    """Passes of one arm."""

    def __init__(self) -> None:
        self.whole: list[float] = []
        self.start: list[float] = []
        self.steady: list[float] = []
        self.foreign: list[float] = []
        self.backends: set[str] = set()

    def add(self, short: Job, whole: Job) -> None:
        """One pass."""
        rows, more = len(whole.tokens), len(whole.tokens) - len(short.tokens)
        self.whole.append(rows / whole.seconds)
        self.start.append(short.seconds)
        gained = whole.seconds - short.seconds
        self.steady.append(more / gained if gained > 0 else float("nan"))
        self.foreign.append(max(short.foreign, whole.foreign))
        self.backends |= short.backends | whole.backends

    def figures(self, agreement: float) -> dict[str, Figure]:
        """By name."""
        passes = {"rows_per_second": self.whole, "steady_rows_per_second": self.steady, "start_seconds": self.start}
        return {
            name: records.figure(values, agreement=agreement, foreign=self.foreign) for name, values in passes.items()
        }


def measure(chosen: Sequence[str], options: argparse.Namespace, failures: Failures) -> dict[str, Measured]:
    """All passes of all arms; an arm that fails is left out from there on."""
    done, left = {arm: Measured() for arm in chosen}, list(chosen)
    yardstick: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        write_rows(place / "all.jsonl", options)
        for number in range(options.passes + 1):  # the first is not counted: it fills caches
            for arm in list(left):
                short = min(ARMS[arm] * options.batch, options.rows - 1)
                write_rows(place / "short.jsonl", options, short)
                jobs = []
                try:
                    for name, count in (("short", short), ("all", options.rows)):
                        into = place / f"{arm}-{number}-{name}"
                        into.mkdir()
                        jobs.append(run_job(arm, place / f"{name}.jsonl", into, options))
                        if len(jobs[-1].tokens) != count:
                            raise WrongPath(f"{arm} answered {len(jobs[-1].tokens)} of {count} rows")
                    yardstick = yardstick or jobs[1].tokens
                    if other := sum(jobs[1].tokens[name] != tokens for name, tokens in yardstick.items()):
                        raise WrongPath(f"{arm} gave other tokens for {other} rows than {chosen[0]}")
                    if "reference" in jobs[1].backends and "paged_backend=reference" not in options.overrides:
                        raise WrongPath(f"{arm} ran attention on the jnp reference")
                except WrongPath as error:
                    failures.add(str(error))
                    left.remove(arm)
                    continue
                if number:
                    done[arm].add(*jobs)
                print(f"{time.strftime('%H:%M:%S')} pass {number} {arm}: {jobs[1].seconds:.1f} s", file=sys.stderr)
    return done


def show(done: dict[str, dict[str, Figure]], spread_of: Sequence[str]) -> None:
    """The arms beneath each other; a figure that is not reportable has a ? behind it."""
    print(f"{'arm':12}{'rows/s':>10}{'steady':>10}{'start s':>10}   spreads")
    for arm, figures in done.items():
        cells = "".join(f"{figures[name].median:9.2f}{' ' if figures[name].reportable else '?'}" for name in spread_of)
        print(f"{arm:12}{cells}   {', '.join(f'{figures[name].spread:.2f}' for name in spread_of)}")
    for kind in ("replicas", "ray"):
        one, two = done.get(f"{kind}-1"), done.get(f"{kind}-2")
        if one and two:
            ratios = [two[name].median / one[name].median for name in spread_of[:2]]
            print(f"{kind}: two over one {ratios[0]:.2f}, steady {ratios[1]:.2f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="MaxText configuration, such as `maxtext-paged convert` writes")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, nargs=2, default=(16, 64), metavar=("LEAST", "MOST"))
    parser.add_argument("--outputs", type=int, nargs=2, default=(8, 24), metavar=("LEAST", "MOST"))
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--batch", type=int, default=32, help="rows of a Ray batch, and of a short job for each engine")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)} (default: all)")
    parser.add_argument("--ray-python", default=sys.executable, help="of an environment with ray (default: this one)")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--agreement", type=float, default=records.AGREEMENT)
    parser.add_argument("--no-wait", action="store_true", help="do not wait for a quiet machine before a job")
    parser.add_argument("--json", type=Path, help="write the record here")
    words = list(sys.argv[1:] if arguments is None else arguments)
    options, failures = parser.parse_intermixed_args(words), Failures("benchmarks.replicas")
    chosen = options.arms.split(",")
    if unknown := [arm for arm in chosen if arm not in ARMS]:
        parser.error(f"--arms: {', '.join(unknown)}: choose of {', '.join(ARMS)}")
    measured = measure(chosen, options, failures)
    figures = {arm: one.figures(options.agreement) for arm, one in measured.items() if one.whole}
    show(figures, ("rows_per_second", "steady_rows_per_second", "start_seconds"))
    found = {
        arm: {"figures": figures[arm], "engines": ARMS[arm], "backends": sorted(measured[arm].backends)}
        for arm in figures
    }
    records.write(
        options.json,
        {"command": words, "rows": options.rows, "arms": found, "environment": records.environment(options.seed)},
    )
    return failures.status()


if __name__ == "__main__":
    sys.exit(main())
