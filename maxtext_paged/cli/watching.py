"""What a job leaves for people to look at: metrics files and the report, while it runs and when it has ended.

For:        the options that ask for them, their paths, and what they say of the job's end.
Not for:    figures and pages (report/), progress (progress.py), records (output.py).
May import: the standard library, maxtext_paged.cli and report.

Nothing here can end a job or change its exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from maxtext_paged.cli import PROGRAM, CommandError, ExitCode, say
from maxtext_paged.cli.files import STANDARD, rows_path
from maxtext_paged.cli.run_file import SUFFIX as RUN_SUFFIX
from maxtext_paged.cli.run_file import Fingerprint
from maxtext_paged.report.figures import snapshot
from maxtext_paged.report.files import ShownFile
from maxtext_paged.report.page import JobState, report_page
from maxtext_paged.report.recorder import Recorder
from maxtext_paged.report.words import is_secret, without_secrets

METRICS_MARK = "maxtext-paged metrics"
_MARKS = (METRICS_MARK.encode(), b"maxtext-paged report")
_MARKED_BYTES = 200
REPORT_INTERVAL_S = 60.0
"""Seconds between two writings of the report: it takes some tens of milliseconds."""


def check_shown_paths(arguments: argparse.Namespace) -> None:
    """Refuse a metrics file or report that cannot be written, or would replace something else.

    Raises:
      CommandError: which, and why.
    """
    taken = {_real(path): path for path in _job_paths(arguments.input, arguments.output)}
    for option, path in (
        *(("--metrics-file", path) for path in arguments.metrics_file),
        ("--report", arguments.report),
    ):
        if path is None:
            continue
        target = Path(path)
        if path in ("", STANDARD):
            raise CommandError(f"{option} is a file: {path or 'an empty name'} is none")
        if target.is_dir() or (target.exists() and not target.is_file()):
            raise CommandError(f"{option} {path}: not a regular file")
        if not target.parent.is_dir():
            raise CommandError(f"{option} {path}: there is no directory {target.parent}")
        if (real := _real(path)) in taken:
            raise CommandError(f"{option} {path} would overwrite {taken[real]}: choose another file")
        taken[real] = path
        if not os.access(Path(real).parent, os.W_OK):
            raise CommandError(f"{option} {path}: cannot be written")
        if target.exists() and not _ours(target):
            raise CommandError(f"{option} {path} exists and is none of ours: choose another file or remove it")


def _job_paths(input_path: str, output_path: str) -> list[str]:
    paths = [path for path in (input_path, output_path) if path != STANDARD]
    return paths if output_path == STANDARD else [*paths, output_path + RUN_SUFFIX, rows_path(output_path)]


def _real(path: str) -> str:
    return os.path.realpath(path)


def _ours(path: Path) -> bool:
    """Whether a file is one that an earlier run wrote, or empty."""
    with open(path, "rb") as file:
        begin = file.read(_MARKED_BYTES)
    return not begin or any(mark in begin for mark in _MARKS)


@dataclass(slots=True)
class Watching:
    """A job's metrics files and report.

    Attributes:
      recorder: what they show. arguments: of the command. run: its fingerprint.
      facts: what it runs on; asked once, when a report is first written.
      state: how the job stands.
    """

    recorder: Recorder
    arguments: argparse.Namespace
    run: Fingerprint = field(default_factory=dict)
    facts: Callable[[], Mapping[str, Mapping[str, str]]] = dict
    state: JobState = field(default_factory=JobState)
    _files: list[ShownFile] = field(default_factory=list)
    _known_facts: dict[str, Mapping[str, str]] | None = None

    def __post_init__(self) -> None:
        for path in self.arguments.metrics_file:
            prometheus = self.arguments.metrics_format == "prometheus" or (
                self.arguments.metrics_format is None and path.endswith(".prom")
            )
            render = self._prometheus if prometheus else self._json
            self._add(path, "metrics file", render, self.arguments.metrics_interval)
        if self.arguments.report is not None:
            self._add(self.arguments.report, "report", self._report, REPORT_INTERVAL_S)

    def _add(self, path: str, kind: str, render: Callable[[], bytes], interval: float) -> None:
        self._files.append(ShownFile(path, kind, render, interval=interval, say=say))

    @property
    def due(self) -> bool:
        """Whether ``write`` has something to do; counts have to be gathered before."""
        return any(file.due for file in self._files)

    def write(self) -> None:
        """Write what is due."""
        for file in self._files:
            if file.due:
                file.write()

    def finish(self, code: int, stopped: str | None, *, resumable: bool) -> None:
        """The job is over: say so in every file.

        Args:
          stopped: why it ended before its last row, if it did. resumable: whether ``--resume`` can go on with it.
        """
        self.state = end_state(code, stopped, self.recorder, resumable=resumable)
        for file in self._files:
            if file.write(last=True) and file.kind == "report":
                say(f"report: {file.path}")

    # --- what stands in them ---------------------------------------------------------------------------

    def _json(self) -> bytes:
        content = {
            "what": METRICS_MARK,
            "format": 1,
            "state": self.state.word,
            "reason": self.state.reason,
            "started_at": self.recorder.started_at,
            "written_at": time.time(),
            "job": self._labels(),
            **snapshot(self.recorder),
        }
        return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()

    def _prometheus(self) -> bytes:
        from maxtext_paged.report.prometheus import prometheus_text  # where it is not asked for, it need not be there

        return prometheus_text(self.recorder, labels=self._labels(), state=self.state.word, written_at=time.time())

    def _report(self) -> bytes:
        if self._known_facts is None:
            self._known_facts = self._all_facts()
        state = JobState(self.state.word, self.state.reason, self.state.resumable, self._known_facts)
        return report_page(self.recorder, state, written_at=time.time())

    def _labels(self) -> dict[str, str]:
        from importlib.metadata import version

        return {
            "version": version(PROGRAM),
            "config": self.arguments.config,
            "input": self.arguments.input,
            "output": self.arguments.output,
        }

    def _all_facts(self) -> dict[str, Mapping[str, str]]:
        command = shlex.join([PROGRAM, *(without_secrets(word) for word in self.arguments.words)])
        about = {
            "command": command,
            PROGRAM: self._labels()["version"],
            "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable",
        }
        about |= {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        parts = {part: _flat(values) for part, values in self.run.items()}
        configuration = parts.pop("configuration", {})
        identity = {f"{part} {name}": value for part, values in parts.items() for name, value in values.items()}
        return {
            "Command": about,
            **self.facts(),
            "Configuration that is not at its default": configuration,
            "Run": identity,
        }


_ENVIRONMENT = ("JAX_PLATFORMS", "XLA_FLAGS", "OMP_NUM_THREADS", "JAX_COMPILATION_CACHE_DIR")


def _flat(values: Mapping[str, object]) -> dict[str, str]:
    return {
        name: "..." if is_secret(name) else value if isinstance(value, str) else json.dumps(value, default=str)
        for name, value in values.items()
    }


def end_state(code: int, stopped: str | None, recorder: Recorder, *, resumable: bool) -> JobState:
    """How a job that is over stands, in words."""
    counts = recorder.counts
    missing = counts.total - counts.done
    again = "run the same command with --resume" if resumable else None
    if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
        name = signal.Signals(code - 128).name
        left = f"{missing} of {counts.total} rows have no record yet"
        return JobState("interrupted", f"{stopped or name}; {left}", again and f"{again}: finished rows are kept")
    if code == ExitCode.ENGINE:
        return JobState("failed", stopped or "the job ended early", again and f"{again}: what was written is good")
    failed = counts.failed + counts.earlier_failed
    return JobState(
        "complete", f"every row has its record; {failed} of them failed" if failed else "every row was answered"
    )
