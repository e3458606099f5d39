"""What every benchmark's record has in it, and the rule by which a figure may be reported.

For:        versions and machine, passes and their agreement, other processes' load, peak memory, one JSON file.
Not for:    measuring any one thing.
May import: the standard library; nothing else, so that peers' environments can use it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

AGREEMENT = 1.05
"""Largest over smallest pass, up to which a figure is reportable."""

LEAST_PASSES = 3
PACKAGES = ("jax", "jaxlib", "flax", "maxtext", "numpy", "maxtext-paged")
QUIET_SHARE, QUIET_SECONDS = 0.15, 8.0
"""A pass waits up to so many seconds for one half second in which others use less than this share of a core."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity over several passes.

    Attributes:
      passes: one value each. median, spread: largest over smallest.
      reportable: whether the passes agree. why: in words.
      foreign_cores: cores that other processes used during each pass.
    """

    passes: tuple[float, ...]
    median: float
    spread: float
    reportable: bool
    why: str
    foreign_cores: tuple[float, ...] = ()


def figure(passes: Sequence[float], *, agreement: float = AGREEMENT, foreign: Sequence[float] = ()) -> Figure:
    """Passes and what may be said of them.

    >>> figure([10.0, 10.2, 10.1]).reportable, figure([10.0, 13.0, 10.1]).why
    (True, 'not reportable: largest over smallest pass 1.30 > 1.05')
    >>> figure([10.0]).why
    'not reportable: 1 of at least 3 passes'
    """
    values = tuple(float(value) for value in passes)
    low, high = (min(values), max(values)) if values else (math.nan, math.nan)
    spread = high / low if values and low > 0 else math.nan
    if len(values) < LEAST_PASSES:
        why = f"not reportable: {len(values)} of at least {LEAST_PASSES} passes"
    elif not spread <= agreement:
        why = f"not reportable: largest over smallest pass {spread:.2f} > {agreement:.2f}"
    else:
        why = f"reportable: largest over smallest pass {spread:.2f} <= {agreement:.2f}"
    middle = median(values) if values else math.nan
    return Figure(values, middle, spread, why.startswith("reportable"), why, tuple(foreign))


def percentile(values: Iterable[float], share: float) -> float:
    """Nearest-rank percentile; NaN of nothing.

    >>> percentile([4, 1, 3, 2], 50), percentile(range(1, 101), 99)
    (2, 99)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)] if ordered else math.nan


def environment(seed: int | None = None) -> dict[str, Any]:
    """Versions and machine. Asks jax for its device only where jax was imported already."""
    model = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    found: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": model.partition(":")[2].strip() or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "versions": {name: version for name in PACKAGES if (version := installed(name)) is not None},
        "seed": seed,
    }
    jax = sys.modules.get("jax")
    if jax is not None:
        device = jax.devices()[0]
        found["device"] = f"{device.platform} {device.device_kind}"
    return found


def installed(name: str) -> str | None:
    """A distribution's version; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def peak_memory_mib() -> float:
    """Most memory this process ever held. Not ``ru_maxrss``, which starts with what the parent had."""
    found = re.search(r"VmHWM:\s*(\d+)", "\n".join(_lines("/proc/self/status")))
    return int(found[1]) / 1024 if found else math.nan


def memory_mib() -> float:
    """Memory this process holds now."""
    found = re.search(r"VmRSS:\s*(\d+)", "\n".join(_lines("/proc/self/status")))
    return int(found[1]) / 1024 if found else math.nan


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []


# --- passes ------------------------------------------------------------------------------------------------


def _busy() -> float:
    """CPU seconds of all processes since boot, without idle and waiting; 0 where nobody counts them."""
    head = _lines("/proc/stat")[:1]
    if not head:
        return 0.0
    ticks = [int(word) for word in head[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@dataclass(slots=True)
class Stopwatch:
    """One pass. ``foreign``: cores that other processes used meanwhile."""

    seconds: float = math.nan
    cpu_seconds: float = math.nan
    foreign: float = math.nan


@contextmanager
def one_pass(*, quiet: bool = True) -> Iterator[Stopwatch]:
    """Time a block; waits a little for a quiet machine first."""
    if quiet:
        wait_quiet()
    watch = Stopwatch()
    busy, own, start = _busy(), _own(), time.perf_counter()
    yield watch
    watch.seconds = time.perf_counter() - start
    watch.cpu_seconds = _own() - own
    watch.foreign = round(max(0.0, _busy() - busy - watch.cpu_seconds) / watch.seconds, 2)


def wait_quiet() -> None:
    """Wait, up to ``QUIET_SECONDS``, until others leave the machine alone."""
    end = time.perf_counter() + QUIET_SECONDS
    while time.perf_counter() < end:
        busy, own, start = _busy(), _own(), time.perf_counter()
        time.sleep(0.5)
        if (_busy() - busy - (_own() - own)) / (time.perf_counter() - start) < QUIET_SHARE:
            return


# --- arms --------------------------------------------------------------------------------------------------


class WrongPath(Exception):
    """An arm did not run what it is named after, or broke a promise that its figures rest on."""


def fresh_process(module: str, arguments: Sequence[str], *, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run ``python -m module ARGUMENTS --record FILE`` and return what it wrote; its stderr goes to ours.

    Raises:
      WrongPath: it left with another status than 0, or wrote nothing.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "record.json"
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments, "--record", str(file)],
            env={**os.environ, **(environ or {})},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode or not file.exists():
            raise WrongPath(f"{module} {' '.join(arguments)} left with status {done.returncode}")
        return dict(json.loads(file.read_text(encoding="utf-8")))


@dataclass(slots=True)
class Failures:
    """What went wrong, told on stderr at the end; the exit status."""

    program: str
    messages: list[str] = field(default_factory=list)

    def add(self, message: str) -> None:
        """Note one."""
        self.messages.append(message)

    def status(self) -> int:
        """Say them; 1 if there are any."""
        for message in self.messages:
            print(f"{self.program}: FAILED: {message}", file=sys.stderr)
        return 1 if self.messages else 0


def plain(value: Any) -> Any:
    """Dataclasses, tuples, paths and numpy numbers as what JSON has."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no NaN
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return plain(value.item()) if hasattr(value, "item") else str(value)


def write(path: Path | None, record: Mapping[str, Any]) -> None:
    """Write a record, if there is a place for it."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plain(record), indent=1, allow_nan=False) + "\n", encoding="utf-8")
