"""What a job did over time, in a bounded number of equal spans: when they are used up, neighbours are merged.

For:        sums (tokens, rows) and levels (running requests, pages) by time since the start.
Not for:    what is put in (recorder.py) or how it is drawn (charts.py).
May import: the standard library, numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


class TimeSeries:
    """Columns over ``capacity`` spans of ``width`` seconds. A span covers more time the longer the job runs.

    What is given for an interval is spread over the spans that it touches, so a step longer than a span leaves no
    hole and no peak, and sums stay whole when spans are merged.

    Args:
      sums: names of columns that add up. levels: of columns that have a value at each time.
      width: seconds of a span at first. capacity: most spans, even.

    >>> series = TimeSeries(sums=("tokens",), levels=("running",), width=1.0, capacity=4)
    >>> series.add(0.0, 2.0, {"tokens": 6}, {"running": 2})
    >>> series.add(2.0, 8.0, {"tokens": 6}, {"running": 4})
    >>> series.width, series.sums("tokens").tolist(), series.means("running").tolist()
    (2.0, [6.0, 2.0, 2.0, 2.0], [2.0, 4.0, 4.0, 4.0])
    """

    def __init__(
        self, *, sums: tuple[str, ...], levels: tuple[str, ...], width: float = 0.25, capacity: int = 240
    ) -> None:
        self.width = width
        self.end = 0.0
        self._capacity = capacity
        self._sums = {name: np.zeros(capacity) for name in sums}
        self._areas = {name: np.zeros(capacity) for name in levels}
        self._covered = np.zeros(capacity)

    @property
    def num_spans(self) -> int:
        """Spans begun so far."""
        return self._place(self.end) + 1 if self.end > 0 else 0

    def _place(self, end: float) -> int:
        """The span that a moment ends in; one on a boundary belongs to the span before."""
        return min(max(math.ceil(end / self.width - 1e-9) - 1, 0), self._capacity - 1)

    def add(self, start: float, end: float, sums: Mapping[str, float], levels: Mapping[str, float]) -> None:
        """Take what happened in ``start .. end``, in seconds since the job's start.

        Args:
          sums: column to what it grew by. levels: column to its value then; all of them, or none.
        """
        start = max(start, 0.0)
        end = max(end, start)
        while end > self.width * self._capacity:
            self._merge()
        self.end = max(self.end, end)
        last = self._place(end)
        first = min(int(start / self.width), last)
        if first == last:
            self._take(first, 1.0, end - start, sums, levels)
            return
        for place in range(first, last + 1):
            length = min(end, (place + 1) * self.width) - max(start, place * self.width)
            if length > 0:
                self._take(place, length / (end - start), length, sums, levels)

    def _take(
        self, place: int, share: float, length: float, sums: Mapping[str, float], levels: Mapping[str, float]
    ) -> None:
        for name, value in sums.items():
            self._sums[name][place] += value * share
        self._covered[place] += length if levels else 0.0
        for name, value in levels.items():
            self._areas[name][place] += value * length

    def _merge(self) -> None:
        self.width *= 2
        half = self._capacity // 2
        for column in (*self._sums.values(), *self._areas.values(), self._covered):
            column[:half] = column[0::2] + column[1::2]
            column[half:] = 0.0

    # --- reading -------------------------------------------------------------------------------------

    def starts(self) -> Float64:
        """Where each span begins, in seconds."""
        return np.arange(self.num_spans, dtype=np.float64) * self.width

    def lengths(self) -> Float64:
        """Seconds of each span; the last one has only begun."""
        lengths = np.full(self.num_spans, self.width)
        if len(lengths):
            lengths[-1] = self.end - (len(lengths) - 1) * self.width
        return lengths

    def sums(self, name: str) -> Float64:
        """A column's sum over each span."""
        return self._sums[name][: self.num_spans]

    def rates(self, name: str) -> Float64:
        """A column's sum over each span, a second."""
        rates: Float64 = self.sums(name) / np.maximum(self.lengths(), 1e-9)
        return rates

    def means(self, name: str) -> Float64:
        """A level's mean over the time of each span for which it was given; NaN where that is none."""
        covered = self._covered[: self.num_spans]
        means: Float64 = np.full(len(covered), np.nan)
        np.divide(self._areas[name][: self.num_spans], covered, out=means, where=covered > 0)
        return means
