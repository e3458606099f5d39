"""Who uses an engine now: one thread at a time, and calls within calls of that thread.

For:        making an engine's calls safe from several threads, and ending what was dropped where nothing is half done.
Not for:    running anything.
May import: the standard library.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Generator
from types import TracebackType
from typing import Any


class Turns:
    """A lock that its thread may take again, and the generators that run under it.

    >>> turns = Turns()
    >>> numbers = turns.adopt(number for number in range(3))
    >>> with turns:
    ...     turns.end_when_idle(numbers)
    ...     print(next(numbers))
    0
    >>> list(numbers)
    []
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._adopted: set[Generator[Any, None, None]] = set()
        self._dropped: deque[Generator[Any, None, None]] = deque()

    @property
    def nested(self) -> bool:
        """For whoever is inside: whether this is a call within a call."""
        return self._depth > 1

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._depth == 1:
                self._end_dropped()
        finally:
            self._depth -= 1
            self._lock.release()

    def adopt[G: Generator[Any, None, None]](self, generator: G) -> G:
        """Keep it alive until it is ended here: Python closes one that is lost, whatever runs at that moment."""
        self._adopted.add(generator)
        return generator

    def end(self, generator: Generator[Any, None, None]) -> None:
        """Close one, from inside. One that runs now (it is what asks) goes on."""
        if inspect.getgeneratorstate(generator) != inspect.GEN_RUNNING:
            generator.close()
            self._adopted.discard(generator)

    def end_when_idle(self, generator: Generator[Any, None, None]) -> None:
        """Close one now, or behind the call that is under way: garbage collectors ask at any moment, in any thread."""
        self._dropped.append(generator)
        if self._lock.acquire(blocking=False):
            try:
                if not self._depth:
                    self._end_dropped()
            finally:
                self._lock.release()

    def _end_dropped(self) -> None:
        while self._dropped:
            self.end(self._dropped.popleft())
