"""The rows that somebody will ask about: the slowest and the failed ones, a bounded number of each.

For:        keeping them while a job runs.
Not for:    counting (counts.py), or showing them (page.py).
May import: the standard library, maxtext_paged.report.

Ids and messages come from the input: they are kept as they are, cut to a length, and escaped where they are shown.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

MAX_ROWS = 50
_MAX_ID_CHARACTERS = 128
_MAX_MESSAGE_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class NotableRow:
    """A row that has its record.

    Attributes:
      index, line, id: as its record has them.
      prompt_tokens, completion_tokens, cached_tokens, num_preemptions: of its usage.
      queue, ttft, latency: seconds since its submission; None where there is no such moment.
      finish_reason: as its record has it. code, message: of its error, None where it has an answer.
    """

    index: int
    line: int
    id: str | int | None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    queue: float | None = None
    ttft: float | None = None
    latency: float | None = None
    finish_reason: str = "error"
    code: str | None = None
    message: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", cut(self.id, _MAX_ID_CHARACTERS))
        object.__setattr__(self, "message", cut(self.message, _MAX_MESSAGE_CHARACTERS))


class NotableRows:
    """The ``limit`` slowest rows and the ``limit`` failed ones of lowest index."""

    def __init__(self, limit: int = MAX_ROWS) -> None:
        self._limit = limit
        self._slowest: list[tuple[float, int, NotableRow]] = []  # heaps: the one to give up first stands first
        self._failed: list[tuple[int, NotableRow]] = []

    def is_slow(self, latency: float | None) -> bool:
        """Whether a row of this latency would be kept; asked first, so that most rows cost nothing."""
        if latency is None:
            return False
        return len(self._slowest) < self._limit or latency > self._slowest[0][0]

    def add_slow(self, row: NotableRow) -> None:
        """Keep a row, in place of the quickest where there are enough."""
        assert row.latency is not None
        _keep(self._slowest, (row.latency, -row.index, row), self._limit)

    def add_failed(self, row: NotableRow) -> None:
        """Keep a failed row, in place of the last where there are enough."""
        _keep(self._failed, (-row.index, row), self._limit)

    @property
    def slowest(self) -> list[NotableRow]:
        """The slowest first."""
        return [row for _, _, row in sorted(self._slowest, key=lambda kept: (-kept[0], kept[2].index))]

    @property
    def failed(self) -> list[NotableRow]:
        """In order of the input."""
        return [row for _, row in sorted(self._failed, key=lambda kept: kept[1].index)]


def _keep[T: tuple[Any, ...]](heap: list[T], entry: T, limit: int) -> None:
    if len(heap) < limit:
        heapq.heappush(heap, entry)
    else:
        heapq.heappushpop(heap, entry)


def cut[T](value: T, limit: int) -> T | str:
    """A long text in part, anything else as it is."""
    return value if not isinstance(value, str) or len(value) <= limit else value[: limit - 3] + "..."
