"""Counting compilations as jax reports them, not as we believe them to be.

For:        "steady state compiles nothing", asserted and shown in metrics.
Not for:    timing.
May import: jax.
"""

from __future__ import annotations

import threading
from collections import Counter

import jax.monitoring

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_lock = threading.Lock()
_counts: Counter[str] = Counter()
_listening = False


def _listen(event: str, duration_secs: float, **details: str | int) -> None:
    if event == _COMPILE_EVENT:
        with _lock:
            _counts[str(details.get("fun_name", "?")).removeprefix("jit_").removeprefix("jit(").rstrip(")")] += 1


class CompileCounter:
    """Compilations in this process since the counter was made, by the name of the jitted function.

    jax has one event stream per process and no way to leave it, so one listener serves all counters.
    A program taken from the persistent cache counts too: it is a program this process had to obtain.
    """

    def __init__(self) -> None:
        global _listening
        with _lock:
            if not _listening:
                jax.monitoring.register_event_duration_secs_listener(_listen)
                _listening = True
            self._start = Counter(_counts)

    def by_function(self) -> dict[str, int]:
        """Function name to programs obtained since this counter was made."""
        with _lock:
            return dict(_counts - self._start)

    def total(self) -> int:
        """Programs obtained since this counter was made."""
        return sum(self.by_function().values())
