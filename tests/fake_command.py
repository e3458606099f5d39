"""Runs ``maxtext-paged`` over tests/fake_engine.py in a process of its own, killed at will.

For:        tests of the command's files; run it as a script with a plan (JSON) and the command's words.
Not for:    importing.
May import: the standard library, maxtext_paged, tests/fake_engine.py.

The plan is an object with
  report      where to write what happened: {"kills", "peak_kib", "cpu_s"};
  model       arguments of ``fake_model``;
  kills       SIGKILLs to survive before the last run, each at a random moment of a run of its own: every fourth by the
              clock, so that the start is hit too, the others by what was written, however fast the machine is;
  within_s    the clock's upper bound; within_bytes: of what was written; seed: of the moments;
  watch       the file that is looked at after every kill;
  tear        whether every record is written in two pieces with a pause between them;
  max_bytes   no file may grow beyond (RLIMIT_FSIZE).
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from maxtext_paged.__main__ import main
from maxtext_paged.cli import generate
from tests.fake_engine import fake_model


def tear_records() -> None:
    """Let a kill find records half written."""
    write = os.write

    def in_two(descriptor: int, data: Any) -> int:
        if bytes(data[:1]) != b"{":  # the second piece
            return write(descriptor, data)
        written = write(descriptor, data[: len(data) // 2])
        time.sleep(0.0005)
        return written

    os.write = in_two  # type: ignore[assignment]


def killed(words: list[str], due: Callable[[], bool]) -> int | None:
    """Run the command in a fork and kill it when that is due; its exit code if it was quicker."""
    child = os.fork()
    if not child:
        os._exit(main(words))
    while not due() and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.0002)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def by_the_clock(end: float) -> bool:
    return time.monotonic() >= end


def by_what_was_written(path: Path, enough: float) -> bool:
    return size(path) >= enough


def whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def survive(plan: dict[str, Any], words: list[str]) -> list[dict[str, Any]]:
    """What was found in the watched file after each kill."""
    watched, moments, found = Path(plan["watch"]), random.Random(plan.get("seed", 0)), []
    before = b""
    for i in range(plan.get("kills", 0)):
        if i % 4 == 0:
            due = partial(by_the_clock, time.monotonic() + moments.uniform(0, plan["within_s"]))
        else:
            due = partial(by_what_was_written, watched, size(watched) + moments.uniform(0, plan["within_bytes"]))
        code = killed(words, due)
        content = watched.read_bytes() if watched.exists() else b""
        found.append(
            {
                "code": code,
                "lines": content.count(b"\n"),
                "torn": not content.endswith(b"\n") and bool(content),
                "untouched": content.startswith(before),
            }
        )
        before = whole_lines(content)
    return found


if __name__ == "__main__":
    plan, words = json.loads(sys.argv[1]), sys.argv[2:]
    generate.open_model = lambda path, overrides: fake_model(**plan.get("model", {}))  # type: ignore[assignment]
    if plan.get("tear"):
        tear_records()
    if "max_bytes" in plan:
        resource.setrlimit(resource.RLIMIT_FSIZE, (plan["max_bytes"], resource.RLIM_INFINITY))
    kills = survive(plan, words) if plan.get("kills") else []
    code = main(words)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert not {"jax", "maxtext"} & set(sys.modules)
    if "report" in plan:
        peak = int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])  # ru_maxrss has the parent's
        Path(plan["report"]).write_text(json.dumps({"kills": kills, "peak_kib": peak, "cpu_s": time.process_time()}))
    sys.exit(code)
