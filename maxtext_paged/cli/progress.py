"""How a job is going: a bar on a terminal, a line now and then elsewhere.

For:        showing counts on stderr, never on stdout.
Not for:    the counts (report/counts.py).
May import: the standard library, rich, maxtext_paged.report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from maxtext_paged.report.counts import JobCounts

PLAIN_INTERVAL_S = 60.0
"""Seconds between lines where stderr is not a terminal, unless ``--progress-interval`` says otherwise."""
_BAR_INTERVAL_S = 0.1


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
      interval: seconds between lines where it is no terminal.
      clock: seconds, never going back.
    """

    def __init__(
        self,
        total: int,
        stream: TextIO,
        *,
        enabled: bool = True,
        interval: float = PLAIN_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._stream = stream
        self._enabled = enabled
        self._interval = interval
        self._shown_at = clock()
        self._bar: _Bar | None = None
        console = Console(file=stream)
        if enabled and stream.isatty() and not console.is_dumb_terminal:
            self._interval = _BAR_INTERVAL_S
            self._bar = _Bar(
                TextColumn("rows"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=console,
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

    @property
    def due(self) -> bool:
        """Whether ``show`` would draw."""
        return self._enabled and self._clock() - self._shown_at >= self._interval

    def show(self, counts: JobCounts) -> None:
        """Draw, unless that was done just now."""
        if not self.due:
            return
        self._shown_at = self._clock()
        if self._bar is None:
            print(f"maxtext-paged: {counts.done}/{counts.total} rows, {counts.state()}", file=self._stream, flush=True)
            return
        self._bar.state = counts.state()
        self._bar.update(self._task, completed=counts.done)
        self._bar.refresh()
