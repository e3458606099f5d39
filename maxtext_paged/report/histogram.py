"""A distribution of durations in fixed buckets: the same memory for ten values and for a billion.

For:        counting seconds, and saying what quantiles and sums they have.
Not for:    what is counted (clocks.py) or how it is drawn (charts.py).
May import: the standard library, numpy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

_TENTHS = (10, 11, 12, 13, 15, 16, 18, 20, 22, 24, 27, 30, 33, 36, 39, 43, 47, 50, 56, 62, 68, 75, 82, 91)
_DECADES = range(-6, 6)
_COARSE_DECADES = range(-4, 6)


def _bounds(tenths: Iterable[int], decades: Iterable[int]) -> NDArray[np.float64]:
    # Written as decimals, so that a bound is the number that its label says.
    return np.array([float(f"{value}e{decade - 1}") for decade in decades for value in tenths])


BOUNDS = _bounds(_TENTHS, _DECADES)
"""float64, upper ends of the buckets in seconds, 1 µs to 252 h, at most a sixth apart. One more takes the rest."""

_BOUND_LIST = BOUNDS.tolist()

COARSE_BOUNDS = _bounds((10, 20, 50), _COARSE_DECADES)
"""Those of them that a metrics file names, from 0.1 ms."""

QUANTILES = (0.5, 0.9, 0.95, 0.99)


class DurationHistogram:
    """Counts of seconds; a value on a bucket's upper end belongs to that bucket, as Prometheus has it.

    Attributes:
      count: values. sum: of them. min, max: NaN before the first.

    >>> histogram = DurationHistogram()
    >>> histogram.add([0.1, 0.1, 0.1, 4.0])
    >>> histogram.count, histogram.max, histogram.mean
    (4, 4.0, 1.075)
    """

    __slots__ = ("_counts", "max", "min", "sum")

    def __init__(self) -> None:
        self._counts = np.zeros(len(BOUNDS) + 1, np.int64)
        self.sum = 0.0
        self.min = self.max = float("nan")

    def add(self, seconds: ArrayLike, times: ArrayLike = 1) -> None:
        """Take values, each ``times`` over; negative ones (a clock set back) count as 0."""
        values = np.maximum(np.atleast_1d(np.asarray(seconds, np.float64)), 0.0)
        if not len(values):
            return
        weights = np.broadcast_to(np.asarray(times, np.int64), values.shape)
        np.add.at(self._counts, BOUNDS.searchsorted(values, side="left"), weights)
        self.sum += float(values @ weights)
        self._widen(float(values.min()), float(values.max()))

    def add_one(self, seconds: float) -> None:
        """``add`` of one value, many times quicker."""
        value = max(seconds, 0.0)
        self._counts[bisect_left(_BOUND_LIST, value)] += 1
        self.sum += value
        self._widen(value, value)

    def _widen(self, least: float, most: float) -> None:
        if not self.min <= least:  # NaN before the first
            self.min = least
        if not self.max >= most:
            self.max = most

    @property
    def count(self) -> int:
        """Values."""
        return int(self._counts.sum())

    @property
    def mean(self) -> float:
        """Of the values themselves, not of buckets; NaN before the first."""
        return self.sum / self.count if self.count else float("nan")

    def quantile(self, share: float) -> float:
        """The value below which ``share`` of them lie, to within its bucket (at most a sixth); NaN before the first."""
        if not self.count:
            return float("nan")
        below = np.cumsum(self._counts)
        place = int(below.searchsorted(share * self.count, side="left"))
        upper = BOUNDS[place] if place < len(BOUNDS) else self.max
        lower = BOUNDS[place - 1] if place else 0.0
        before = int(below[place - 1]) if place else 0
        within = (share * self.count - before) / max(int(self._counts[place]), 1)
        return float(min(max(lower + within * (upper - lower), self.min), self.max))

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper end in seconds, values up to it) for each coarse bucket; the last end is infinite."""
        below = np.cumsum(self._counts)
        places = BOUNDS.searchsorted(COARSE_BOUNDS)
        ends = zip(COARSE_BOUNDS.tolist(), below[places].tolist(), strict=True)
        return [*ends, (float("inf"), int(below[-1]))]

    def filled(self) -> list[tuple[float, float, int]]:
        """(lower end, upper end, values) of the fine buckets from the first to the last that has any."""
        found = np.flatnonzero(self._counts)
        if not len(found):
            return []
        ends = [0.0, *BOUNDS.tolist(), max(float(BOUNDS[-1]), 0.0 if np.isnan(self.max) else self.max)]
        return [(ends[i], ends[i + 1], int(self._counts[i])) for i in range(int(found[0]), int(found[-1]) + 1)]
