"""Python's cyclic garbage collector while a session starts.

Importing MaxText, building its model and tracing its steps leave about a million objects that live as long as the
session; the collector would walk all of them again and again, for seconds.

For:        keeping the collector from doing so.
Not for:    memory: what it finds are cycles, and a start leaves few.
May import: the standard library.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused(*, freeze: bool = False) -> Iterator[None]:
    """Pause the collector inside the block, unless it was off already: then it stays off.

    Args:
      freeze: afterwards leave what is alive to the process's end, unwalked (``gc.freeze``). Only for whoever owns the
        process: cycles among it are not collected before.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
            atexit.register(gc.unfreeze)  # at the end extension modules look for what they made, and list what was kept
        if was_on:
            gc.enable()
