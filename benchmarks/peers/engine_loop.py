"""How an engine of any environment answers ``benchmarks.peers.compare``: one JSON line in, one out.

For:        the process of one peer: it makes its engine, then runs lists of prompts until its input ends.
Not for:    measuring: what is asked, how often and in which order is decided by the caller.
May import: the standard library; peers' packages inside ``engine_*.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol


class Engine(Protocol):
    """What a peer implements. ``version``: of whatever does the work."""

    version: str

    def run(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> tuple[list[list[float]], list[list[int]]]:
        """Complete all prompts, greedily, ignoring end tokens: token times from the start, and tokens."""
        ...


def serve(make: Callable[[argparse.Namespace], Engine], doc: str | None, *add: tuple[str, dict[str, Any]]) -> None:
    """Make the engine that the arguments describe and answer until stdin ends.

    Args:
      add: further arguments, name and keywords of ``add_argument``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--slots", type=int, default=32, help="requests at once")
    for name, keywords in add:
        parser.add_argument(name, **keywords)
    options = parser.parse_args()
    # Libraries print; the answers keep stdout's descriptor for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start = time.perf_counter()

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        engine = make(options)
    except ImportError as error:  # an environment that was made and not filled
        answer(missing=str(error))
        return
    answer(version=engine.version, start_seconds=time.perf_counter() - start)
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        try:
            times, tokens = engine.run(asked["prompts"], asked["limits"])
        except Exception as error:  # told to the caller, who leaves the engine out
            answer(error=f"{type(error).__name__}: {error}")
            continue
        answer(times=times, tokens=tokens, seconds=time.perf_counter() - start, peak_rss_mib=peak_memory_mib())


def peak_memory_mib() -> float:
    """Most memory of this process, and of its children where an engine has some."""
    parents: dict[int, int] = {}
    peaks: dict[int, float] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except OSError:  # it ended meanwhile
            continue
        process, parent = int(status.parent.name), re.search(r"PPid:\s*(\d+)", text)
        peak = re.search(r"VmHWM:\s*(\d+)", text)
        parents[process] = int(parent[1]) if parent else 0
        peaks[process] = int(peak[1]) / 1024 if peak else 0.0

    def is_ours(process: int) -> bool:
        while process in parents:
            if process == os.getpid():
                return True
            process = parents[process]
        return False

    return sum(peak for process, peak in peaks.items() if is_ours(process))
