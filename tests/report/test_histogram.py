"""Distributions in fixed buckets, against numpy over the values themselves."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from maxtext_paged.report.histogram import BOUNDS, COARSE_BOUNDS, QUANTILES, DurationHistogram


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    """From microseconds to hours."""
    return np.random.default_rng(5).lognormal(mean=-2.0, sigma=3.0, size=20_000)


@pytest.fixture(scope="module")
def histogram(values: np.ndarray) -> DurationHistogram:
    found = DurationHistogram()
    for piece in np.array_split(values[:-500], 30):
        found.add(piece)
    for value in values[-500:].tolist():
        found.add_one(value)
    return found


def test_quantiles_lie_within_the_bucket_of_the_true_ones(histogram: DurationHistogram, values: np.ndarray) -> None:
    for share in (*QUANTILES, 0.01, 0.25, 0.999):
        true = float(np.quantile(values, share, method="inverted_cdf"))
        place = int(BOUNDS.searchsorted(true))
        assert BOUNDS[place - 1] <= histogram.quantile(share) <= BOUNDS[place]


def test_counts_sums_and_extremes_are_those_of_the_values(histogram: DurationHistogram, values: np.ndarray) -> None:
    assert histogram.count == len(values)
    assert histogram.sum == pytest.approx(values.sum()) and histogram.mean == pytest.approx(values.mean())
    assert (histogram.min, histogram.max) == (values.min(), values.max())
    assert histogram.quantile(1.0) == values.max()


def test_a_coarse_bucket_counts_the_values_up_to_its_end_that_end_included(values: np.ndarray) -> None:
    histogram = DurationHistogram()
    with_ends = np.concatenate([values, COARSE_BOUNDS, COARSE_BOUNDS, [1e9]])
    together = len(values) + len(COARSE_BOUNDS)
    histogram.add(with_ends[:together])
    for value in with_ends[together:].tolist():
        histogram.add_one(value)
    for end, count in histogram.cumulative():
        assert count == int((with_ends <= end).sum()), end
    assert histogram.cumulative()[-1] == (math.inf, len(with_ends))


def test_the_ends_of_buckets_are_the_numbers_that_their_labels_say_and_a_sixth_apart() -> None:
    assert set(COARSE_BOUNDS) <= set(BOUNDS)
    assert {0.0002, 0.005, 0.1, 1.0, 20.0} <= set(COARSE_BOUNDS.tolist())
    assert (np.diff(BOUNDS) / BOUNDS[:-1]).max() < 1 / 6


def test_a_value_several_times_over_is_as_many_values() -> None:
    one, other = DurationHistogram(), DurationHistogram()
    one.add([0.3, 0.02], [3, 2])
    for value in (0.3, 0.3, 0.3, 0.02, 0.02):
        other.add(value)
    assert one.cumulative() == other.cumulative()
    assert one.sum == pytest.approx(other.sum) and one.quantile(0.5) == other.quantile(0.5)


def test_filled_buckets_hold_every_value_once_and_lie_side_by_side(histogram: DurationHistogram) -> None:
    filled = histogram.filled()
    assert sum(count for _, _, count in filled) == histogram.count
    assert all(before[1] == after[0] for before, after in itertools.pairwise(filled))


def test_without_values_nothing_is_known_and_a_clock_set_back_counts_as_no_time() -> None:
    histogram = DurationHistogram()
    histogram.add([])
    assert histogram.count == 0 and histogram.filled() == []
    assert all(math.isnan(value) for value in (histogram.mean, histogram.min, histogram.max, histogram.quantile(0.5)))
    histogram.add(-0.5)
    histogram.add_one(-0.5)
    assert (histogram.count, histogram.sum, histogram.max) == (2, 0.0, 0.0)
