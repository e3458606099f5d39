"""How a job is going: a bar on a terminal, a line now and then elsewhere, and the summary at its end.

For:        showing counts on stderr.
Not for:    gathering them (generate.py).
May import: the standard library, rich.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

PLAIN_INTERVAL_S = 10.0
"""Seconds between lines where stderr is not a terminal."""
_BAR_INTERVAL_S = 0.1


@dataclass(slots=True)
class JobCounts:
    """Where a job stands.

    Attributes:
      total: rows of the input. ok, failed: rows written with and without an answer.
      earlier: rows that had their record before this run. earlier_failed: those of them without an answer.
      prompt_tokens, generated_tokens: of those rows.
      seconds: since the first row was drawn.
      sampled_tokens: generated so far, rows still running included.
      running, waiting: requests. pages_held, num_pages: of the pool.
      steps, preemptions, peak_pages, scrubbed_pages: as the driver and the runtime count them.
      shares: whether the prefix cache is on. cached_tokens: prompt tokens that it had. attainable_tokens: that sharing
        within the windows in which rows were ordered can avoid at best; None where they were not ordered.
      evictions, hit_rate: of its pages.
      backends: attention backend to steps. decodes: how decode rows ran, fused or gather, to launches, one for each
        step and attention window. native_products: matrix products that our kernel computed, warm-up not counted.
      programs: jitted function to programs obtained.
    """

    total: int = 0
    earlier: int = 0
    earlier_failed: int = 0
    ok: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    sampled_tokens: int = 0
    running: int = 0
    waiting: int = 0
    pages_held: int = 0
    num_pages: int = 0
    steps: int = 0
    preemptions: int = 0
    peak_pages: int = 0
    scrubbed_pages: int = 0
    shares: bool = False
    cached_tokens: int = 0
    attainable_tokens: int | None = None
    evictions: int = 0
    hit_rate: float = float("nan")
    backends: Mapping[str, int] = field(default_factory=dict)
    decodes: Mapping[str, int] = field(default_factory=dict)
    native_products: int = 0
    programs: Mapping[str, int] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """Rows that have their record."""
        return self.earlier + self.ok + self.failed

    def state(self) -> str:
        """The running counts in one line, without the rows."""
        rate = self.sampled_tokens / self.seconds if self.seconds else 0.0
        return (
            f"{self.failed} failed, {rate:.1f} tokens/s, {self.running} running, {self.waiting} waiting, "
            f"{self.pages_held}/{self.num_pages} pages, {self.preemptions} preemptions"
        )

    def summary(self) -> list[str]:
        """What a finished job has to say for itself."""
        rate = self.generated_tokens / self.seconds if self.seconds else 0.0
        backends = ", ".join(f"{name} {steps} steps" for name, steps in self.backends.items()) or "nothing ran"
        left = f", {self.total - self.done} not answered" if self.done < self.total else ""
        before = f", {self.earlier} before ({self.earlier_failed} failed)" if self.earlier else ""
        decodes = ", ".join(f"{count} {kind}" for kind, count in self.decodes.items()) or "none"
        products = f"{self.native_products} native" if self.native_products else "XLA's"
        programs = ", ".join(f"{name} {count}" for name, count in sorted(self.programs.items())) or "none"
        return [
            f"{self.total} rows: {self.ok} ok, {self.failed} failed{before}{left}; {self.prompt_tokens} prompt and "
            f"{self.generated_tokens} generated tokens in {self.seconds:.1f} s, {rate:.1f} tokens/s",
            f"{self.steps} steps, {self.preemptions} preemptions, at most {self.peak_pages} of {self.num_pages} pages "
            f"held, {self.scrubbed_pages} scrubbed; attention: {backends}; decodes: {decodes}; products: "
            f"{products}; programs: {programs}",
            *self._sharing(),
        ]

    def _sharing(self) -> list[str]:
        if not self.shares:
            return []
        best = "" if self.attainable_tokens is None else f" of {self.attainable_tokens} attainable within its windows"
        rate = "no page looked up" if math.isnan(self.hit_rate) else f"{self.hit_rate:.1%} of pages found"
        return [f"prefix cache: {self.cached_tokens} prompt tokens not run{best}, {rate}, {self.evictions} evictions"]


class _Bar(Progress):
    """A bar, and a line of text below it: beside it there is no room on most terminals."""

    state = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.state)


class JobProgress:
    """Shows ``JobCounts`` while a job runs. No threads: it draws when it is told of a change.

    Args:
      total: rows of the input.
      stream: where to write; a terminal gets a bar.
      enabled: False shows nothing.
      clock: seconds, never going back.
    """

    def __init__(
        self, total: int, stream: TextIO, *, enabled: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._stream = stream
        self._enabled = enabled
        self._shown_at = clock()
        self._bar: _Bar | None = None
        if enabled and stream.isatty():
            self._bar = _Bar(
                TextColumn("rows"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(file=stream),
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
            )
            self._task = self._bar.add_task("rows", total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.stop()

    def show(self, counts: JobCounts) -> None:
        """Draw, unless that was done just now."""
        interval = PLAIN_INTERVAL_S if self._bar is None else _BAR_INTERVAL_S
        now = self._clock()
        if not self._enabled or now - self._shown_at < interval:
            return
        self._shown_at = now
        if self._bar is None:
            print(f"maxtext-paged: {counts.done}/{counts.total} rows, {counts.state()}", file=self._stream, flush=True)
            return
        self._bar.state = counts.state()
        self._bar.update(self._task, completed=counts.done)
        self._bar.refresh()
