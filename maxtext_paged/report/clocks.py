"""When each row under way was submitted, first ran, and brought its tokens.

For:        queue time, time to first token, gaps between tokens and latency, each defined here and nowhere else.
Not for:    deciding when a step begins and ends (recorder.py); what becomes of a row.
May import: the standard library, numpy.

A row's request has an entry from its submission to its end; nothing is kept of it afterwards. A row with several
samples is one row (one TTFT, one latency) and as many streams of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from maxtext_paged.report.histogram import DurationHistogram

Int64 = NDArray[np.int64]


@dataclass(slots=True)
class RowClock:
    """One row's moments, in seconds of the recorder's clock; None until they come.

    Attributes:
      submitted: it entered the engine's queue. first_run: the first step that ran any of it began.
      first_token: the step that brought its first token ended. ended: the step that brought its last one did.
      num_left: samples that have not ended.
    """

    submitted: float
    num_left: int
    first_run: float | None = None
    first_token: float | None = None
    ended: float | None = None

    def since(self, moment: float | None) -> float | None:
        """Seconds from submission to a moment."""
        return None if moment is None else moment - self.submitted


class RowClocks:
    """The clocks of all rows under way.

    Attributes:
      queue: submission to the begin of the first step that runs the row. ttft: submission to its first token.
      itl: between consecutive tokens of one sample.

    Tokens count when the host has them: at the end of the step that reads them.
    """

    def __init__(self) -> None:
        self.queue, self.ttft, self.itl = DurationHistogram(), DurationHistogram(), DurationHistogram()
        self._rows: dict[int, RowClock] = {}
        self._slots: dict[int, tuple[int, RowClock]] = {}  # by request id
        self._free: list[int] = []
        self._seen = np.zeros(0, np.int64)
        self._last = np.zeros(0)
        self._running = _Running()

    def __len__(self) -> int:
        """Rows under way."""
        return len(self._rows)

    def submit(self, index: int, request_ids: Iterable[int], now: float) -> None:
        """Row ``index`` entered the queue with these requests, one for each sample."""
        ids = list(request_ids)
        clock = self._rows[index] = RowClock(now, len(ids))
        for request_id in ids:
            if not self._free:
                self._grow()
            slot = self._free.pop()
            self._seen[slot] = 0
            self._slots[request_id] = slot, clock

    def step(self, request_ids: Int64, num_generated: Int64, *, began: float, ended: float) -> None:
        """A step is over.

        Args:
          request_ids: int64 ``[n]``, of the requests that run. num_generated: int64 ``[n]``, tokens of each so far.
        """
        running = self._running
        if not np.array_equal(request_ids, running.ids):
            running = self._running = self._enter(request_ids, began)
        slots, num_generated = running.slots, num_generated[running.places]
        seen = self._seen[slots]
        got = num_generated > seen
        if not got.any():
            return
        again = got & (seen > 0)
        if again.any():
            tokens = (num_generated - seen)[again]
            self.itl.add((ended - self._last[slots[again]]) / tokens, tokens)
        for place in np.flatnonzero(got & (seen == 0)).tolist():
            self._first_token(running.clocks[place], ended)
        self._last[slots[got]] = ended
        self._seen[slots[got]] = num_generated[got]

    def end(self, request_id: int, num_generated: int, *, ran: bool, began: float, ended: float) -> None:
        """A request ended in the step between these moments.

        Args:
          ran: whether any step ran it.
        """
        found = self._slots.pop(request_id, None)
        if found is None:
            return
        slot, clock = found
        if ran:
            self._first_run(clock, began)
        seen = int(self._seen[slot])
        new = num_generated - seen
        if new > 0 and seen:
            self.itl.add((ended - self._last[slot]) / new, new)
        elif new > 0:
            self._first_token(clock, ended)
        self._free.append(slot)
        clock.num_left -= 1
        if not clock.num_left:
            clock.ended = ended

    def pop(self, index: int) -> RowClock | None:
        """The clock of a row that has its record, to be forgotten; None where it was never submitted."""
        return self._rows.pop(index, None)

    # --- how -----------------------------------------------------------------------------------------

    def _enter(self, request_ids: Int64, began: float) -> _Running:
        """Which requests run now; those that are not ours are left out."""
        found = [self._slots.get(request_id) for request_id in request_ids.tolist()]
        ours = [(place, *one) for place, one in enumerate(found) if one is not None]
        for _, _, clock in ours:
            self._first_run(clock, began)
        return _Running(
            request_ids.copy(),
            np.array([place for place, _, _ in ours], np.int64),
            np.array([slot for _, slot, _ in ours], np.int64),
            [clock for _, _, clock in ours],
        )

    def _first_run(self, clock: RowClock, began: float) -> None:
        if clock.first_run is None:
            clock.first_run = began
            self.queue.add_one(began - clock.submitted)

    def _first_token(self, clock: RowClock, ended: float) -> None:
        if clock.first_token is None:
            clock.first_token = ended
            self.ttft.add_one(ended - clock.submitted)

    def _grow(self) -> None:
        before, size = len(self._seen), max(2 * len(self._seen), 64)
        self._seen, self._last = np.resize(self._seen, size), np.resize(self._last, size)
        self._free += reversed(range(before, size))


@dataclass(slots=True)
class _Running:
    """The requests of one step after another, until one enters or leaves: their places among all, slots and clocks."""

    ids: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    places: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    slots: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    clocks: list[RowClock] = field(default_factory=list)
