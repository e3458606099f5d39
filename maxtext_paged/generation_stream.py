"""The iterator that ``OfflineEngine.stream`` returns.

For:        drawing results one at a time, and stopping early without leaving anything behind.
Not for:    making results (prompt_runner.py).
May import: the standard library, maxtext_paged.generation and turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from types import TracebackType

from maxtext_paged.generation import Generation
from maxtext_paged.turns import Turns


class StreamClosed(Exception):
    """Ends the loop of a stream that was closed while it ran; callers never see it."""


class GenerationStream(Iterator[Generation]):
    """Results in the order in which prompts finish. Runs only while it is asked for the next one.

    ::

        with engine.stream(prompts) as results:
            for result in results:
                ...

    Closed (or dropped) before its end it cancels what it has under way, and those pages return.
    """

    def __init__(
        self,
        turns: Turns,
        results: Callable[[Callable[[], None]], Generator[Generation, None, None]],
        check: Callable[[], object],
    ) -> None:
        """Most callers want ``OfflineEngine.stream``.

        Args:
          results: makes the generator to draw from; it calls its argument whenever it could stop.
          check: raises where the engine was closed.
        """
        self._turns = turns
        self._check = check
        self._closing, self._over = threading.Event(), False
        closing = self._closing  # not `self`: in a cycle it would wait for the garbage collector

        def stop_if_closing() -> None:
            if closing.is_set():
                raise StreamClosed

        self._results = turns.adopt(results(stop_if_closing))

    def __iter__(self) -> GenerationStream:
        return self

    def __next__(self) -> Generation:
        if self._over:
            raise StopIteration
        with self._turns:
            self._check()
            try:
                return next(self._results)
            except StreamClosed:
                self._turns.end(self._results)
                raise StopIteration from None
            except BaseException:  # the end of the prompts, or a fault: a generator is over after either
                self._over = not self._closing.is_set()
                self._turns.end(self._results)
                raise

    def close(self) -> None:
        """Cancel what is under way. From another thread: once the step that runs there is over. Once is enough."""
        self._closing.set()
        with self._turns:
            self._turns.end(self._results)  # where it is asked from within, the stream ends at its next look

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_results"):
            self._turns.end_when_idle(self._results)
