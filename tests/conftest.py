"""Which process runs which tests: one device on a CPU by default, eight virtual ones, or a GPU.

For:        the environment jax reads once, at its first import, and the markers that depend on it.
Not for:    fixtures of one area (those live in that area's conftest.py), fakes, strategies.
May import: pytest, hypothesis; jax only inside a fixture.
"""

from __future__ import annotations

import os
import re
import sys
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression
from hypothesis import settings

MARKERS = ("gpu", "multi_device", "maxtext", "slow", "long")
NUM_VIRTUAL_DEVICES = 8
MULTI_DEVICE_TIMEOUT_SECONDS = 180
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"

settings.register_profile("maxtext-paged", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("maxtext-paged")


def selects_only(markexpr: str, marker: str) -> bool:
    """Whether every test that ``-m markexpr`` can select carries `marker`."""
    if not markexpr:
        return False
    expression = Expression.compile(markexpr)
    subsets = chain.from_iterable(combinations(MARKERS, size) for size in range(len(MARKERS) + 1))
    selected = [set(marks) for marks in subsets if expression.evaluate(lambda name, **_: name in marks)]  # noqa: B023
    return bool(selected) and all(marker in marks for marks in selected)


def virtual_devices(xla_flags: str) -> int:
    """Number of virtual CPU devices that these XLA flags ask for; 1 when they do not say."""
    counts = re.findall(rf"{_DEVICE_COUNT_FLAG}=(\d+)", xla_flags)
    return int(counts[-1]) if counts else 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests marked `slow` too, as `make test` does")


def pytest_configure(config: pytest.Config) -> None:
    if "jax" in sys.modules:
        raise pytest.UsageError("jax was imported before tests/conftest.py could choose its devices")
    markexpr = config.option.markexpr
    environ = os.environ
    if not selects_only(markexpr, "gpu"):
        environ["JAX_PLATFORMS"] = "cpu"  # an unmarked GPU test cannot exist: no GPU is visible
    if selects_only(markexpr, "multi_device") and virtual_devices(environ.get("XLA_FLAGS", "")) == 1:
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {_DEVICE_COUNT_FLAG}={NUM_VIRTUAL_DEVICES}".strip()
    environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
    environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(config.rootpath) / ".cache" / "jax"))
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unmarked = [
        item.nodeid
        for item in items
        if "gpu_device" in getattr(item, "fixturenames", ()) and item.get_closest_marker("gpu") is None
    ]
    if unmarked:
        raise pytest.UsageError(f"tests use `gpu_device` without `@pytest.mark.gpu`: {', '.join(unmarked)}")

    if not selects_only(config.option.markexpr, "gpu"):
        skip = pytest.mark.skip(reason="this process is CPU-only: GPU tests run with `-m gpu`")
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(skip)

    if virtual_devices(os.environ.get("XLA_FLAGS", "")) < NUM_VIRTUAL_DEVICES:
        _deselect(config, items, "multi_device", _DESELECTED)

    for item in items:
        if item.get_closest_marker("multi_device") is not None:
            # A collective that waits for ever sits in C++, where no signal handler of Python's gets to run.
            own = item.get_closest_marker("timeout")
            seconds = own.args[0] if own is not None and own.args else MULTI_DEVICE_TIMEOUT_SECONDS
            item.add_marker(pytest.mark.timeout(seconds, method="thread"), append=False)

    named = set(re.findall(r"\w+", config.option.markexpr))
    if "long" not in named:
        _deselect(config, items, "long", _LONG)
    # Who names a file wants all of it.
    files = any(Path(argument.partition("::")[0]).is_file() for argument in config.args)
    if not (config.option.slow or files or {"slow", "long"} & named):
        _deselect(config, items, "slow", _SLOW)


def _deselect(config: pytest.Config, items: list[pytest.Item], marker: str, key: pytest.StashKey[int]) -> None:
    left_out = [item for item in items if item.get_closest_marker(marker) is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        config.stash[key] = len(left_out)
        items[:] = [item for item in items if item.get_closest_marker(marker) is None]


_DESELECTED = pytest.StashKey[int]()
_SLOW = pytest.StashKey[int]()
_LONG = pytest.StashKey[int]()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if count := config.stash.get(_DESELECTED, 0):
        terminalreporter.write_line(
            f"{count} multi_device tests deselected: this process has one device; "
            "they run with `-m multi_device` (`make test` does both)"
        )
    if count := config.stash.get(_SLOW, 0):
        terminalreporter.write_line(f"{count} slow tests deselected: they run with `--slow` (`make test`)")
    if count := config.stash.get(_LONG, 0):
        terminalreporter.write_line(f"{count} tests that take minutes deselected: they run with `make test-long`")


@pytest.fixture(scope="session")
def gpu_device() -> Any:
    """The first GPU jax sees; the test is skipped, saying what jax saw instead, where there is none."""
    import jax

    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"no GPU: {error}")
