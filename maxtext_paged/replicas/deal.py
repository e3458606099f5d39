"""Which replica gets which rows: each has a queue, prefix groups stay together, who runs dry takes from the longest.

For:        dealing rows out and taking them back.
Not for:    processes (group.py) or the order of the rows (maxtext_paged.row_order).
May import: the standard library, numpy, maxtext_paged.rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from maxtext_paged.rows import Row


class Deal:
    """Rows that no replica has been sent yet.

    Args:
      num_replicas: queues. page: tokens that two rows must share at their beginning to be of one group; 0: none are.

    Attributes:
      num_stolen: rows that went to another replica than they were dealt to.

    >>> deal = Deal(2)
    >>> for index in range(4):
    ...     deal.add(Row(index=index, tokens=np.array([index])))
    >>> [row.index for row in deal.take(0, 3)], deal.num_stolen, len(deal)
    ([0, 2], 0, 2)
    >>> [row.index for row in deal.take(0, 3)], deal.num_stolen, len(deal)
    ([3], 1, 1)
    """

    def __init__(self, num_replicas: int, page: int = 0) -> None:
        self.num_stolen = 0
        self._page = page
        self._queues: list[deque[tuple[int, Row]]] = [deque() for _ in range(num_replicas)]  # (group, row)
        self._group = 0
        self._last: tuple[int, bytes] | None = None  # whose queue the last row is in, and how it begins

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def add(self, row: Row, loads: Iterable[int] = ()) -> None:
        """Deal one row: to the queue of the row before it where they share a prefix, else to the shortest.

        Args:
          loads: rows that each replica has been sent already, added to its queue's.
        """
        begin = self._begin(row)
        if self._last is not None and begin and begin == self._last[1]:
            place = self._last[0]
        else:
            sent = list(loads) or [0] * len(self._queues)
            place = min(range(len(self._queues)), key=lambda i: (len(self._queues[i]) + sent[i], i))
            self._group += 1
        self._last = place, begin
        self._queues[place].append((self._group, row))

    def take(self, replica: int, most: int) -> list[Row]:
        """Up to ``most`` rows for a replica; from the longest queue where its own is empty."""
        own = self._queues[replica]
        if not own and most > 0:
            self._steal(own)
        return [own.popleft()[1] for _ in range(min(most, len(own)))]

    def put_back(self, replica: int, rows: Iterable[Row]) -> None:
        """Rows that a replica will not finish: they are the next to be taken."""
        self._group += 1
        self._queues[replica].extendleft((self._group, row) for row in reversed(list(rows)))

    def clear(self) -> None:
        """Forget them all."""
        for queue in self._queues:
            queue.clear()

    def _steal(self, own: deque[tuple[int, Row]]) -> None:
        """Move the tail of the longest queue, half of it or less where a group ends there."""
        longest = max(self._queues, key=len)
        wanted = (len(longest) + 1) // 2
        if not wanted:
            return
        entries = list(longest)
        cut = len(entries) - wanted
        boundary = next((at for at in range(max(cut, 1), len(entries)) if entries[at][0] != entries[at - 1][0]), cut)
        for _ in range(len(entries) - boundary):
            own.appendleft(longest.pop())
        self.num_stolen += len(entries) - boundary

    def _begin(self, row: Row) -> bytes:
        return np.asarray(row.tokens[: self._page], np.int32).tobytes() if len(row.tokens) >= self._page else b""
