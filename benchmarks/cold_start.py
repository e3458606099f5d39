"""Seconds from the command to its first token, beside what importing MaxText's engine alone takes.

For:        ``maxtext-paged generate`` on one prompt as a real process, with a cold and a warm compilation cache; what
            lies between its own log lines; which packages an import spends its time in.
Not for:    throughput (benchmarks/serving.py).
May import: the standard library, benchmarks.

    DECOUPLE_GCLOUD=TRUE JAX_PLATFORMS=cpu python -m benchmarks.cold_start .cache/models/smollm2-135m/config.yml \\
        --json out/cold_start.json

The first token is the only one of a completion of one token: the time is from the start of the process to its record
on a pipe. "Cold" has an empty compilation cache of its own, "warm" the same one again; files are in the system's page
cache in both, after one run that does not count. Processes of both kinds and the bare import alternate. Leaves with
status 1 if the command fails, writes no token, or its warm runs leave new files in the cache: then they compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.records import Failures, Figure, WrongPath

ENGINE = "maxtext.inference.maxengine.maxengine"
TARGET = 2.0
"""Warm start to first token over the import of ``ENGINE``, at most."""


@dataclass(frozen=True, slots=True)
class Start:
    """One process. ``spans``: seconds to each of its log lines. ``first_token``: to its record."""

    first_token: float
    exit: float
    spans: list[tuple[float, str]]


def start_once(command: Sequence[str], prompt: dict[str, Any], environ: dict[str, str]) -> Start:
    """Run the command once.

    Raises:
      WrongPath: it failed, or its record has no token.
    """
    spans: list[tuple[float, str]] = []
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, text=True
    )
    assert process.stdin and process.stdout and process.stderr
    stderr = process.stderr

    def listen() -> None:
        for line in stderr:
            spans.append((time.perf_counter() - start, line.strip()[:100]))

    listener = threading.Thread(target=listen)
    listener.start()
    process.stdin.write(json.dumps(prompt) + "\n")
    process.stdin.close()
    line = process.stdout.readline()
    first = time.perf_counter() - start
    process.stdout.read()
    status = process.wait()
    listener.join()
    process.stdout.close()
    process.stderr.close()
    record = json.loads(line) if line.strip() else {}
    if status or not record.get("token_ids"):
        raise WrongPath(f"{' '.join(command)} left with status {status}: {record or spans[-3:]}")
    return Start(first, time.perf_counter() - start, spans)


def import_once(module: str, environ: dict[str, str]) -> float:
    """Seconds of a process that imports a module and ends."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, capture_output=True, env=environ)
    return time.perf_counter() - start


def import_shares(statement: str, environ: dict[str, str]) -> dict[str, float]:
    """Seconds that each top-level package spends in its own modules, by ``-X importtime`` (which slows them)."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", statement], check=True, capture_output=True, text=True, env=environ
    )
    shares: Counter[str] = Counter()
    for own, name in re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", done.stderr, re.MULTILINE):
        shares[name.partition(".")[0]] += int(own)
    return {name: micros / 1e6 for name, micros in shares.most_common(20)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the times; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="MaxText configuration, such as `maxtext-paged convert` writes")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--prompt", default='{"prompt": "The capital of France is"}', help="an input line")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--no-cold", action="store_true", help="leave out the runs that compile everything")
    parser.add_argument("--no-import", action="store_true", help="leave out the bare import and the target over it")
    parser.add_argument("--agreement", type=float, default=records.AGREEMENT)
    parser.add_argument("--json", type=Path, help="write the record here")
    options, failures = parser.parse_args(arguments), Failures("benchmarks.cold_start")
    prompt = {**json.loads(options.prompt), "max_tokens": 1}
    command = [sys.executable, "-m", "maxtext_paged", "generate", options.config, *options.overrides]
    command += ["-i", "-", "-o", "-", "--no-progress"]
    seconds: dict[str, list[float]] = {"cold": [], "warm": [], "import": []}
    last: Start | None = None
    with tempfile.TemporaryDirectory() as directory:

        def environ(cache: str) -> dict[str, str]:
            return os.environ | {"JAX_COMPILATION_CACHE_DIR": str(Path(directory) / cache), "DECOUPLE_GCLOUD": "TRUE"}

        def files(cache: str) -> set[str]:
            return {path.name for path in (Path(directory) / cache).glob("*-cache")}

        try:
            start_once(command, prompt, environ("warm"))  # not counted
            known = files("warm")
            if not known:
                failures.add("the command left no program in its compilation cache")
            for number in range(options.passes):
                if not options.no_import:
                    seconds["import"].append(import_once(ENGINE, environ("warm")))
                if not options.no_cold:
                    seconds["cold"].append(start_once(command, prompt, environ(f"cold{number}")).first_token)
                last = start_once(command, prompt, environ("warm"))
                seconds["warm"].append(last.first_token)
            if files("warm") != known:
                failures.add(f"warm runs compiled {len(files('warm') - known)} programs")
        except WrongPath as error:
            failures.add(str(error))
        shares = {}
        if not options.no_import and not failures.messages:
            ours = "from maxtext_paged.cli.environment import *; prepare_environment(); import_maxtext()"
            shares = {ENGINE: import_shares(f"import {ENGINE}", environ("warm"))}
            shares["maxtext-paged"] = import_shares(ours, environ("warm"))
    figures = {name: records.figure(times, agreement=options.agreement) for name, times in seconds.items() if times}
    show(figures, last, shares)
    records.write(
        options.json,
        {
            "command": command[1:],
            "figures": figures,
            "warm_spans": last.spans if last else [],
            "import_seconds_by_package": shares,
            "environment": records.environment(),
        },
    )
    return failures.status()


def show(figures: dict[str, Figure], last: Start | None, shares: dict[str, dict[str, float]]) -> None:
    """Times, spans and shares."""
    for name, one in figures.items():
        what = f"import {ENGINE}" if name == "import" else f"command to first token, {name} cache"
        print(f"{one.median:7.2f} s  {what}  ({one.why})")
    if {"warm", "import"} <= set(figures):
        ratio = figures["warm"].median / figures["import"].median
        print(f"warm over import: {ratio:.2f}, target at most {TARGET:.1f}: {'met' if ratio <= TARGET else 'NOT met'}")
    if last is not None:
        print("the last warm run, by its own lines:")
        before = 0.0
        for when, line in [*last.spans, (last.first_token, "first token"), (last.exit, "end")]:
            print(f"  {when:7.2f} s  +{max(0.0, when - before):5.2f}  {line}")
            before = max(when, before)
    for name, packages in shares.items():
        print(f"{name}: " + ", ".join(f"{package} {taken:.2f} s" for package, taken in packages.items()))


if __name__ == "__main__":
    sys.exit(main())
