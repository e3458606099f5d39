"""The figures of several engines as one job's.

For:        what a replica reports, and adding reports up for progress, metrics files, summary and report.
Not for:    what the figures are (report/).
May import: the standard library, numpy, maxtext_paged.report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from maxtext_paged.report.clocks import RowClock, RowClocks
from maxtext_paged.report.counts import JobCounts
from maxtext_paged.report.histogram import DurationHistogram
from maxtext_paged.report.looks import gather, step_view
from maxtext_paged.report.recorder import Recorder, StepView

Report = Mapping[str, Any]

_LEVELS = ("running", "waiting", "num_pages", "pages_held", "peak_pages")
_LEVELS_BY_NAME = ("window_pages", "window_pages_held", "window_peak_pages")
_SUMS = ("sampled_tokens", "steps", "preemptions", "scrubbed_pages", "evictions")
_COUNTERS = ("backends", "decodes", "programs")
_SEEN = ("pages_needed", "prompt_tokens")


def reported(session: Any, recorder: Recorder) -> dict[str, Any]:
    """What a replica says of itself."""
    counts, view = JobCounts(), step_view(session)
    gather(counts, session)
    found = {name: asdict(counts)[name] for name in (*_LEVELS, *_LEVELS_BY_NAME, *_SUMS, *_COUNTERS, "shares")}
    control = session.runtime.metrics().control
    return {
        **found,
        **{name: int(getattr(view, name)) for name in _SEEN},
        "decode_causes": [[*names, count] for names, count in counts.decode_causes.items()],
        "native_products": int(session.num_native_products()),
        "pages_hit": int(getattr(control, "num_prefix_pages_hit", 0)),
        "pages_wanted": int(getattr(control, "num_prefix_pages_wanted", 0)),
        "step": recorder.step.packed(),
        "itl": recorder.clocks.itl.packed(),
    }


class Merged:
    """The sum of the last reports of all lives of all replicas: counts of every life, levels of those that live."""

    def __init__(self) -> None:
        self._reports: dict[tuple[int, int], Report] = {}
        self._alive: set[tuple[int, int]] = set()

    def take(self, replica: int, life: int, report: Report) -> None:
        """A replica reported; ``life`` counts its processes."""
        self._reports[replica, life] = report
        self._alive.add((replica, life))

    def ended(self, replica: int, life: int) -> None:
        """That process is gone: what it did stays counted, what it held does not."""
        self._alive.discard((replica, life))

    def total(self, name: str) -> int:
        """Of every life, or for a level of those that live."""
        lives = self._alive if name in (*_LEVELS, "pages_needed") else self._reports
        return sum(int(self._reports[life].get(name, 0)) for life in lives)

    def counter(self, name: str) -> dict[Any, int]:
        """Of named counts, of every life, or for levels of those that live."""
        found: Counter[Any] = Counter()
        lives = self._alive if name in _LEVELS_BY_NAME else self._reports
        for report in map(self._reports.__getitem__, lives):
            if name == "decode_causes":
                found.update({(kind, cause): count for kind, cause, count in report[name]})
            else:
                found.update(report[name])
        return dict(found)

    def histogram(self, name: str) -> DurationHistogram:
        """Of all lives."""
        return DurationHistogram.of(report[name] for report in self._reports.values())

    @property
    def hit_rate(self) -> float:
        """Pages found over pages looked up; NaN before any was."""
        wanted = self.total("pages_wanted")
        return self.total("pages_hit") / wanted if wanted else float("nan")

    def gather(self, counts: JobCounts) -> None:
        """As ``report.looks.gather``."""
        for name in (*_LEVELS, *_SUMS):
            setattr(counts, name, self.total(name))
        for name in (*_COUNTERS, *_LEVELS_BY_NAME, "decode_causes"):
            setattr(counts, name, self.counter(name))
        counts.shares = any(report["shares"] for report in self._reports.values())
        counts.hit_rate = self.hit_rate

    def step_view(self) -> StepView:
        """As ``report.looks.step_view``; requests are counted and not named."""
        running = np.zeros(self.total("running"), np.int64)
        return StepView(
            request_ids=running,
            num_generated=running,
            waiting=self.total("waiting"),
            pages_held=self.total("pages_held"),
            pages_needed=self.total("pages_needed"),
            sampled_tokens=self.total("sampled_tokens"),
            prompt_tokens=self.total("prompt_tokens"),
            steps=self.total("steps"),
            preemptions=self.total("preemptions"),
        )


class ReportedClocks(RowClocks):
    """Clocks that were read elsewhere: a row's moments come with its result."""

    def report(self, index: int, times: Iterable[float | None]) -> None:
        """A row ended: seconds from its submission to its first run, first token and end."""
        queue, ttft, latency = times
        self._rows[index] = RowClock(0.0, 0, queue, ttft, latency)
        if queue is not None:
            self.queue.add_one(queue)
        if ttft is not None:
            self.ttft.add_one(ttft)

    def step(self, *_: Any, **__: Any) -> None:
        """Requests are timed where they run."""


class ReplicaRecorder(Recorder):
    """A recorder of a job whose steps run elsewhere."""

    def __init__(self, counts: JobCounts, merged: Merged) -> None:
        super().__init__(counts)
        self.clocks: ReportedClocks = ReportedClocks()
        self._merged = merged

    def step_ended(self, view: StepView) -> None:
        """Some replica reported."""
        super().step_ended(view)
        self.step, self.clocks.itl = self._merged.histogram("step"), self._merged.histogram("itl")
