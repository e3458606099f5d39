"""The recorder of a job: told of rows and steps, it keeps every figure that is shown while and after the job runs.

For:        feeding counts, clocks, courses over time and notable rows, each event once.
Not for:    showing them (cli/progress.py, figures.py, page.py), or the figures that the engine itself keeps (looks.py).
May import: the standard library, numpy, maxtext_paged without MaxText.

Its memory does not depend on how many rows there are: distributions have fixed buckets, the course over time a fixed
number of spans, and of single rows only those under way and the notable ones are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from maxtext_paged.report.clocks import RowClocks
from maxtext_paged.report.counts import JobCounts
from maxtext_paged.report.histogram import DurationHistogram
from maxtext_paged.report.rows import NotableRow, NotableRows
from maxtext_paged.report.series import TimeSeries
from maxtext_paged.rows import Usage

MAX_FAILURE_CODES = 32
"""Codes that are counted by name; further ones are counted together."""


@dataclass(frozen=True, slots=True)
class StepView:
    """What can be seen of the engine when a step is over.

    Attributes:
      request_ids: int64 ``[n]``, of the requests that run. num_generated: int64 ``[n]``, tokens of each so far.
      waiting: requests that wait.
      pages_held: pages that are not free. pages_needed: those of them that requests hold, not the prefix cache alone.
      sampled_tokens, prompt_tokens, steps, preemptions: since the engine was made; prompt tokens are those that were
        run, tokens that were run again after a preemption included.
    """

    request_ids: NDArray[np.int64]
    num_generated: NDArray[np.int64]
    waiting: int
    pages_held: int
    pages_needed: int
    sampled_tokens: int
    prompt_tokens: int
    steps: int
    preemptions: int


class InputPlace(Protocol):
    """Where a row stands in the input: ``InputRow`` and ``BadRow``."""

    @property
    def index(self) -> int: ...
    @property
    def line(self) -> int: ...
    @property
    def id(self) -> str | int | None: ...


class Failure(Protocol):
    """Why a row failed: ``RowError``."""

    @property
    def code(self) -> str: ...
    @property
    def message(self) -> str: ...


class Recorder:
    """Keeps what a job did. Every time is a reading of one clock.

    Args:
      counts: where the job stands; rows and their tokens are counted here, the engine's own counts are gathered by
        the job.
      clock: seconds, never going back. wall: seconds since 1970, read once at the start.

    Attributes:
      clocks: queue time, TTFT and ITL. latency: submission to the end of the step that brought the last token, of rows
        with an answer. step: of steps.
      series: the course over time. notable: slowest and failed rows.
      started_at: seconds since 1970 when the job began.
    """

    def __init__(
        self,
        counts: JobCounts,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.counts = counts
        self.clocks = RowClocks()
        self.latency, self.step = DurationHistogram(), DurationHistogram()
        self.series = TimeSeries(
            sums=("sampled_tokens", "prompt_tokens", "ok", "failed", "preemptions"),
            levels=("running", "waiting", "pages_held", "pages_needed"),
        )
        self.notable = NotableRows()
        self.started_at = wall()
        self._clock, self._wall = clock, wall
        self._started = self._began = self._ended = self._looked_at = clock()
        self._before: StepView | None = None

    def start(self) -> None:
        """The first row is about to be drawn: time begins."""
        self.started_at = self._wall()
        self._started = self._began = self._ended = self._looked_at = self._clock()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._started

    # --- what the worker tells -----------------------------------------------------------------------

    def submitted(self, index: int, request_ids: Iterable[int]) -> None:
        """Row ``index`` entered the engine's queue with these requests, one for each sample."""
        self.clocks.submit(index, request_ids, self._clock())

    def step_begins(self) -> None:
        """A step is about to begin."""
        self._began = self._clock()

    def ended(self, request_id: int, num_generated: int, *, ran: bool) -> None:
        """A request ended in the step that was seen last.

        Args:
          ran: whether any step ran it.
        """
        self.clocks.end(request_id, num_generated, ran=ran, began=self._began, ended=self._ended)

    # --- what the job tells --------------------------------------------------------------------------

    def step_ended(self, view: StepView) -> None:
        """A step is over."""
        now = self._ended = self._clock()
        before, self._before = self._before, view
        if before is None or view.steps > before.steps:
            self.step.add_one(now - self._began)
        self.clocks.step(view.request_ids, view.num_generated, began=self._began, ended=now)
        self.series.add(
            self._looked_at - self._started,
            now - self._started,
            {
                name: getattr(view, name) - (0 if before is None else getattr(before, name))
                for name in ("sampled_tokens", "prompt_tokens", "preemptions")
            },
            {
                "running": len(view.request_ids),
                "waiting": view.waiting,
                "pages_held": view.pages_held,
                "pages_needed": view.pages_needed,
            },
        )
        self._looked_at = now

    def row_written(
        self, row: InputPlace, usage: Usage | None, failure: Failure | None, *, finish_reason: str = "error"
    ) -> None:
        """A row's record was written: it is counted, and what was kept of it is let go.

        Args:
          usage: None where it never ran. failure: why it has no answer.
        """
        counts, usage, clock = self.counts, usage or Usage(0, 0), self.clocks.pop(row.index)
        counts.cached_tokens += usage.cached_tokens
        latency = None if clock is None else clock.since(clock.ended)
        if failure is None:
            counts.ok += 1
            counts.prompt_tokens += usage.prompt_tokens
            counts.generated_tokens += usage.completion_tokens
            if latency is not None:
                self.latency.add_one(latency)
        else:
            counts.failed += 1
            known = failure.code in counts.failures or len(counts.failures) < MAX_FAILURE_CODES
            code = failure.code if known else "other"
            counts.failures[code] = counts.failures.get(code, 0) + 1
        now = self._clock() - self._started
        self.series.add(now, now, {"ok": failure is None, "failed": failure is not None}, {})
        slow = self.notable.is_slow(latency)
        if failure is None and not slow:
            return
        notable = NotableRow(
            row.index,
            row.line,
            row.id,
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
            usage.num_preemptions,
            queue=None if clock is None else clock.since(clock.first_run),
            ttft=None if clock is None else clock.since(clock.first_token),
            latency=latency,
            finish_reason=finish_reason,
            code=None if failure is None else failure.code,
            message=None if failure is None else failure.message,
        )
        if slow:
            self.notable.add_slow(notable)
        if failure is not None:
            self.notable.add_failed(notable)

    def row_dropped(self, index: int) -> None:
        """A row ended without a record: the job was interrupted."""
        self.clocks.pop(index)
