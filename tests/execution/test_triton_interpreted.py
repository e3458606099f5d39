"""The Triton kernels equal dense attention: Triton's interpreter runs them, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kv_execution.attention import triton_bridge

ROOT = Path(__file__).parents[2]
not_here = triton_bridge.missing(route="xla")
pytestmark = pytest.mark.skipif(not_here is not None, reason=str(not_here))


FILES = ("tests/execution/triton_conformance.py", "tests/execution/triton_quantised.py")


def run_interpreted(*arguments: str, seconds: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", *FILES, *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.slow
def test_interpreted_kernels_keep_the_promises_that_ragged_steps_need() -> None:
    run_interpreted(seconds=280)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_interpreted_kernels_keep_every_promise_of_a_backend() -> None:
    run_interpreted("-m", "long", "--timeout=2000", seconds=2900)
