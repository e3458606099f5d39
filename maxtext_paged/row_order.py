"""Rows of a long input in prefix order, a window at a time: memory stays flat and the first result comes early.

For:        reading ahead, ordering what was read, and counting what sharing can avoid in it.
Not for:    the order itself (kv_control.file_order) or running rows (worker.py).
May import: the standard library, kv_control, maxtext_paged.rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from kv_control.file_order import prefix_order
from maxtext_paged.rows import Row

WINDOW_ROWS = 4096
"""Rows that are ordered together at most: a row waits for no more than these, whatever its place."""
FIRST_WINDOW_PER_SEQ = 4
"""Rows of the first ordered window per running one."""
ROWS_PER_STEP = 64
"""Rows read ahead while a step's results are waited for: a window fills without stopping the loop."""


class PrefixOrderedRows:
    """An iterator over ``rows`` in prefix order within windows.

    The first window is small, so that the first step does not wait for the input; the next ones are what
    ``read_ahead`` gathered meanwhile.

    Args:
      rows: drawn as there is room for them.
      first_window: rows of the first window.

    Attributes:
      attainable_tokens: prompt tokens that sharing within the windows so far can avoid at best.
    """

    def __init__(self, rows: Iterable[Row], tokens_per_page: int, *, first_window: int) -> None:
        self.attainable_tokens = 0
        self._rows = iter(rows)
        self._tokens_per_page = tokens_per_page
        self._first_window = first_window
        self._ahead: list[Row] = []
        self._ready: deque[Row] = deque()

    def read_ahead(self, num_rows: int = ROWS_PER_STEP) -> None:
        """Read some rows of the next window."""
        room = min(num_rows, WINDOW_ROWS - len(self._ahead))
        if room > 0:
            self._ahead += islice(self._rows, room)

    def close(self) -> None:
        """Forget what was read and not handed out; nothing more is read."""
        self._rows, self._ahead = iter(()), []
        self._ready.clear()

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        if not self._ready:
            if len(self._ahead) < self._first_window:
                self.read_ahead(self._first_window - len(self._ahead))
            self._order(self._ahead)
            self._ahead = []
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def _order(self, rows: list[Row]) -> None:
        readable = [row for row in rows if _is_usable(row)]
        found = prefix_order(
            [row.tokens for row in readable], [row.max_tokens for row in readable], self._tokens_per_page
        )
        self.attainable_tokens += found.attainable_tokens
        self._ready += (readable[i] for i in found.order)
        self._ready += (row for row in rows if not _is_usable(row))  # refused when it is their turn


def _is_usable(row: Row) -> bool:
    """Whether a row can be compared with others; the worker says what is wrong with those that cannot."""
    try:
        tokens = np.asarray(row.tokens)
    except ValueError:
        return False
    limit = row.max_tokens
    return (
        tokens.ndim == 1
        and bool(np.issubdtype(tokens.dtype, np.integer))
        and (limit is None or isinstance(limit, int | np.integer))
    )
