"""What happened over time in few spans, against sums over everything that was given."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext_paged.report.series import TimeSeries

steps = st.lists(st.tuples(st.floats(0.0, 300.0), st.integers(0, 1000), st.integers(0, 64)), min_size=1, max_size=80)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_whatever_was_merged_sums_stay_whole_and_levels_keep_their_area(
    taken: list[tuple[float, int, int]],
) -> None:
    series = TimeSeries(sums=("tokens",), levels=("running",), width=0.25, capacity=8)
    now = area = 0.0
    for length, tokens, running in taken:
        series.add(now, now + length, {"tokens": tokens}, {"running": running})
        now, area = now + length, area + running * length
    if now == 0.0:
        return
    assert series.sums("tokens").sum() == pytest.approx(sum(tokens for _, tokens, _ in taken))
    assert np.nansum(series.means("running") * series.lengths()) == pytest.approx(area, abs=1e-6)
    assert series.lengths().sum() == pytest.approx(now)
    assert series.num_spans <= 8 and series.starts()[-1] < now


def test_a_step_longer_than_a_span_is_spread_over_the_spans_it_touches() -> None:
    series = TimeSeries(sums=("tokens",), levels=("running",), width=1.0, capacity=8)
    series.add(0.5, 4.5, {"tokens": 8}, {"running": 3})
    assert series.rates("tokens").tolist() == [1.0, 2.0, 2.0, 2.0, 2.0]
    assert series.means("running").tolist() == [3.0] * 5


def test_rows_that_end_at_one_moment_are_seen_also_where_a_span_ends() -> None:
    series = TimeSeries(sums=("rows",), levels=("running",), width=1.0, capacity=4)
    series.add(0.0, 2.0, {}, {"running": 1})
    series.add(2.0, 2.0, {"rows": 5}, {})
    assert series.sums("rows").tolist() == [0.0, 5.0]
    assert series.means("running").tolist() == [1.0, 1.0]


def test_a_level_that_was_not_given_is_not_known() -> None:
    series = TimeSeries(sums=("rows",), levels=("running",), width=1.0, capacity=4)
    series.add(1.5, 1.5, {"rows": 1}, {})
    series.add(2.0, 3.0, {}, {"running": 2})
    assert np.isnan(series.means("running")[:2]).all() and series.means("running")[2] == 2.0


def test_a_week_takes_as_many_spans_as_a_minute() -> None:
    series = TimeSeries(sums=("tokens",), levels=("running",))
    for hour in range(7 * 24):
        series.add(hour * 3600.0, (hour + 1) * 3600.0, {"tokens": 3600}, {"running": 1})
    assert 120 <= series.num_spans <= 240
    assert series.rates("tokens") == pytest.approx(np.ones(series.num_spans))
