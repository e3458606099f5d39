"""SIGINT and SIGTERM while a job runs: finish the step, keep what is done, say so.

For:        turning the first signal into a wish and the second into an end.
Not for:    what the job does about it (generate.py).
May import: the standard library.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from maxtext_paged.cli import ExitCode, say

_EXIT_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


class Interrupted(BaseException):
    """Raised where a signal cannot wait for the end of a step. Not an ``Exception``: no row may swallow it."""


class Interruption:
    """Watches for the two signals while it is entered.

    Attributes:
      asked: the signal that came, or None.
      patient: whether the first one waits for the job to look at ``asked``; otherwise it raises ``Interrupted``.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.patient = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = {number: signal.signal(number, self._arrived) for number in _EXIT_CODES}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> ExitCode:
        """128 and the signal's number, as shells have it."""
        return _EXIT_CODES[self.asked or signal.SIGINT]

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        first = self.asked is None
        self.asked = signal.Signals(number)
        if not (self.patient and first):
            raise Interrupted
        say(f"{self.asked.name}: stopping after this step; once more to stop now")
