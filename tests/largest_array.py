"""The largest array that any one device held while a piece of code ran.

For:        showing that pools and weights are never whole on one device, not even for a moment.
Not for:    memory inside a compiled program (``compiled.memory_analysis()``), or host arrays.
May import: the standard library, jax.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

EVERY = 32
"""Returns between two looks: putting one array on devices takes hundreds, and looking at each would take minutes."""


class Watch:
    """Looks at all live arrays again and again while functions return, in every thread.

    Attributes:
      elements: of the largest part of an array that one device held. looks: how often it looked.
    """

    def __init__(self, before: frozenset[int]) -> None:
        self.elements = self.looks = self._returns = 0
        self._before = before

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("return", "c_return"):
            self._returns += 1
            if self._returns % EVERY == 0:
                self.look()

    def look(self) -> None:
        """Take in what is alive now."""
        self.looks += 1
        for array in jax.live_arrays():
            if id(array) not in self._before and not array.is_deleted():
                self.elements = max(self.elements, math.prod(array.sharding.shard_shape(array.shape)))


@contextmanager
def largest_array_on_a_device() -> Iterator[Watch]:
    """Watch a block. Arrays that were alive before are not counted."""
    kept = jax.live_arrays()
    watch = Watch(frozenset(map(id, kept)))
    threading.setprofile_all_threads(watch)
    try:
        yield watch
    finally:
        threading.setprofile_all_threads(None)
        sys.setprofile(None)
        watch.look()
        del kept
