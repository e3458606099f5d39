"""``--warmup``: every program a run can need, before the first row.

For:        showing how far that is.
Not for:    which programs there are (kv_execution/runtime.py).
May import: the standard library, rich; a session is given.
"""

from __future__ import annotations

import time
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from maxtext_paged.cli import say


def warm_up(session: Any, stream: TextIO, *, enabled: bool = True) -> None:
    """Obtain the step's programs at all its sizes: none is compiled or loaded while rows run.

    Args:
      session: an open ``PagedSession``.
      stream: a terminal gets a bar, anything else one line at the end. enabled: False shows nothing.
    """
    start = time.monotonic()
    console = Console(file=stream)
    shown = enabled and stream.isatty() and not console.is_dumb_terminal
    columns = TextColumn("warm-up"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=not shown) as bar:
        task = bar.add_task("programs", total=None)
        session.runtime.warm_up(lambda done, total: bar.update(task, completed=done, total=total))
    if enabled:
        say(f"warm-up: {session.runtime.metrics().num_compile_events} programs in {time.monotonic() - start:.1f} s")
