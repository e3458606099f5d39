"""Breaks each promise of docs/contracts.md once, in a copy of this project, and expects its test to fail.

    .venv/bin/python scripts/mutants.py                # all of tests/contracts/mutants.toml: a quarter of an hour
    .venv/bin/python scripts/mutants.py --only page    # those whose promise, file or test has the word in it

First the tests run unbroken. Leaves with status 1 where a mutant survives or says nothing, or a test fails without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LISTED = ROOT / "tests" / "contracts" / "mutants.toml"
LEFT_BEHIND = (".git", ".venv", ".cache", ".mypy_cache", ".ruff_cache", ".pytest_cache", "__pycache__", "site", "out")
SECONDS = 600
"""After which a test that neither passes nor fails is given up: it says nothing."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A small fault and the test that must see it.

    Attributes:
      promise: of docs/contracts.md. file: where the fault is put in; `old` stands there once and becomes `new`.
      test: below tests/. multi_device: whether it needs eight devices.
    """

    promise: str
    file: str
    old: str
    new: str
    test: str
    multi_device: bool = False

    def applied_to(self, text: str) -> str:
        """The file's text with the fault.

        Raises:
          ValueError: `old` is not there, or several times.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times {self.old!r}")
        return text.replace(self.old, self.new)


def read_mutants(path: Path = LISTED) -> list[Mutant]:
    """All of the list."""
    return [Mutant(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]]


def run_tests(copy: Path, tests: Iterable[str], *, multi_device: bool, seconds: int = SECONDS) -> tuple[str, str]:
    """What came of these tests in a copy, "passed", "failed" or "unclear", and pytest's last line.

    Unclear is what says nothing about a promise: tests that do not end, are not found or cannot be collected.
    """
    environ = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    if multi_device:
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    words = ["-m", "multi_device"] if multi_device else []
    named = [f"tests/{test}" for test in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *words, *named]
    try:
        done = subprocess.run(command, cwd=copy, env=environ, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "unclear", f"no end in {seconds} s"
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]
    return {0: "passed", 1: "failed"}.get(done.returncode, "unclear"), f"{last} (status {done.returncode})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests unbroken first")
    options = parser.parse_args(arguments)
    chosen = [one for one in read_mutants() if options.only in f"{one.promise} {one.file} {one.test}"]
    if options.list:
        for one in chosen:
            print(f"{one.file}: {one.test}\n         {one.promise}")
        return 0
    caught = 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
        for multi_device in () if options.no_baseline else (False, True):
            tests = sorted({one.test for one in chosen if one.multi_device is multi_device})
            if tests:
                became, last = run_tests(copy, tests, multi_device=multi_device, seconds=3 * SECONDS)
                print(f"unbroken: {len(tests)} tests {became}: {last}", flush=True)
                if became != "passed":
                    return 1
        for one in chosen:
            file = copy / one.file
            text = file.read_text(encoding="utf-8")
            start = time.monotonic()
            try:
                file.write_text(one.applied_to(text), encoding="utf-8")
                became, last = run_tests(copy, [one.test], multi_device=one.multi_device)
            except ValueError as error:
                became, last = "unclear", str(error)
            file.write_text(text, encoding="utf-8")
            caught += became == "failed"
            verdict = {"passed": "SURVIVED", "failed": "caught  "}.get(became, "UNCLEAR ")
            print(f"{verdict} {time.monotonic() - start:4.0f} s  {one.file}: {one.test}")
            print(f"         {one.promise[:90]}\n         {last}", flush=True)
    print(f"{len(chosen)} mutants, {caught} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
