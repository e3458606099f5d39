"""tests/conftest.py sends each test to a process that can run it, and says so when it does not run.

The whole-process cases run pytest on a copy of conftest.py beside a few one-line tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import NUM_VIRTUAL_DEVICES, selects_only, virtual_devices

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("markexpr", ["gpu", "gpu and slow", "gpu and not slow", "slow and gpu or gpu and maxtext"])
def test_an_expression_that_needs_the_marker_selects_only_it(markexpr: str):
    assert selects_only(markexpr, "gpu")


@pytest.mark.parametrize("markexpr", ["", "slow", "not slow", "not gpu", "gpu or slow", "gpu and not gpu"])
def test_an_expression_that_can_select_another_test_does_not(markexpr: str):
    assert not selects_only(markexpr, "gpu")


def test_the_last_device_count_wins_as_it_does_in_xla():
    flag = "--xla_force_host_platform_device_count"
    assert [virtual_devices(flags) for flags in ("", f"{flag}=4", f"{flag}=4 {flag}=8")] == [1, 4, 8]


def test_the_default_process_runs_on_one_cpu_device():
    import jax

    if virtual_devices(os.environ.get("XLA_FLAGS", "")) > 1:
        pytest.skip("this process was given virtual devices")
    assert [device.platform for device in jax.devices()] == ["cpu"]


@pytest.mark.multi_device
def test_a_multi_device_process_has_eight_cpu_devices():
    import jax

    assert [device.platform for device in jax.devices()] == ["cpu"] * NUM_VIRTUAL_DEVICES


@pytest.fixture
def pytest_on(tmp_path: Path):
    """Run pytest, in a process of its own, on test source laid beside this project's conftest.py."""

    def run(source: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        tests = tmp_path / "tests"
        tests.mkdir()
        shutil.copy(ROOT / "tests" / "conftest.py", tests)
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        (tests / "test_given.py").write_text("import os\nimport pytest\n" + source)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_", "PYTEST_"))}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=tmp_path,
            env=clean | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.slow
def test_an_unmarked_gpu_test_stops_the_run_and_is_named(pytest_on):
    result = pytest_on("def test_unmarked(gpu_device): ...\ndef test_other(): ...\n")
    assert result.returncode != 0
    assert "without `@pytest.mark.gpu`: tests/test_given.py::test_unmarked" in result.stdout + result.stderr
    assert "passed" not in result.stdout


@pytest.mark.slow
def test_a_gpu_test_is_skipped_with_a_reason_and_no_gpu_is_visible_to_others(pytest_on):
    result = pytest_on(
        "@pytest.mark.gpu\ndef test_gpu(gpu_device): assert False\n"
        "def test_other(): assert os.environ['JAX_PLATFORMS'] == 'cpu'\n",
        JAX_PLATFORMS="cuda",
    )
    assert result.returncode == 0, result.stdout
    assert "1 passed, 1 skipped" in result.stdout
    assert "this process is CPU-only: GPU tests run with `-m gpu`" in result.stdout


@pytest.mark.slow
def test_a_gpu_process_without_a_gpu_skips_and_says_what_jax_answered(pytest_on):
    result = pytest_on("@pytest.mark.gpu\ndef test_gpu(gpu_device): assert False\n", "-m", "gpu", JAX_PLATFORMS="cpu")
    assert "1 skipped" in result.stdout
    assert "no GPU: " in result.stdout


@pytest.mark.slow
def test_multi_device_tests_are_deselected_aloud_in_a_one_device_process(pytest_on):
    result = pytest_on("@pytest.mark.multi_device\ndef test_many(): assert False\ndef test_one(): ...\n")
    assert result.returncode == 0, result.stdout
    assert "1 passed, 1 deselected" in result.stdout
    assert "1 multi_device tests deselected: this process has one device" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ((), "quick"),
        (("--slow",), "quick slow"),
        (("tests/test_given.py",), "quick slow"),
        (("tests/test_given.py::test_slow",), "slow"),
        (("-m", "slow"), "slow"),
        (("-m", "long"), "long"),
        (("-m", "not maxtext"), "quick"),
        (("tests",), "quick"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_slow_and_long_tests_run_where_they_are_asked_for_and_are_left_out_aloud(pytest_on, arguments, passed: str):
    result = pytest_on(
        "def test_quick(): ...\n@pytest.mark.slow\ndef test_slow(): ...\n@pytest.mark.long\ndef test_long(): ...\n",
        "-v",
        *arguments,
    )
    assert result.returncode == 0, result.stdout
    assert re.findall(r"::test_(\w+) PASSED", result.stdout) == passed.split()
    left_out = {"quick": "1 slow tests deselected: they run with `--slow`"}.get(passed, "")
    assert left_out in result.stdout


@pytest.mark.slow
def test_a_multi_device_process_gets_its_devices_without_being_told(pytest_on):
    result = pytest_on(
        "@pytest.mark.multi_device\ndef test_many():\n    import jax\n    assert jax.device_count() == 8\n",
        "-m",
        "multi_device",
    )
    assert result.returncode == 0, result.stdout
    assert "1 passed" in result.stdout


@pytest.mark.slow
def test_a_multi_device_test_that_hangs_in_c_fails_the_run(pytest_on):
    result = pytest_on(
        "import ctypes\n@pytest.mark.multi_device\n@pytest.mark.timeout(2)\ndef test_hangs():\n"
        "    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        "    library.pthread_mutex_lock(mutex)\n    library.pthread_mutex_lock(mutex)\n",
        "-m",
        "multi_device",
    )
    assert result.returncode != 0
    assert "Timeout" in result.stdout + result.stderr and "test_hangs" in result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("@pytest.mark.gpus\ndef test_typo(): ...\n", "'gpus' not found in `markers`"),
        ("import warnings\ndef test_warns(): warnings.warn('old', DeprecationWarning)\n", "1 failed"),
        ("@pytest.mark.xfail\ndef test_passes(): ...\n", "XPASS(strict)"),
    ],
)
def test_a_typo_a_warning_and_an_unexpected_pass_fail_the_run(pytest_on, source: str, complaint: str):
    result = pytest_on(source)
    assert result.returncode != 0
    assert complaint in result.stdout + result.stderr
