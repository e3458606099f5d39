"""Several engines' figures are one job's: what was done counts for every life, what is held for those that live."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from maxtext_paged.replicas.figures import Merged, reported
from maxtext_paged.report.counts import JobCounts
from maxtext_paged.report.recorder import Recorder
from tests.fake_engine import fake_model


def report(windows: Mapping[int, tuple[int, int, int]]) -> dict[str, Any]:
    """What an engine with these window groups says: window to (pages, free ones, most that were held)."""
    session = fake_model().start(0).session
    metrics = session.runtime.metrics()
    metrics.control.windows = tuple(
        SimpleNamespace(window=window, num_pages=pages, num_free_pages=free, peak_pages_held=peak)
        for window, (pages, free, peak) in windows.items()
    )
    session.runtime = SimpleNamespace(metrics=lambda: metrics)
    return reported(session, Recorder(JobCounts()))


def test_pages_of_window_groups_are_those_of_living_engines_by_window() -> None:
    merged, counts = Merged(), JobCounts()
    merged.take(0, 0, report({512: (66, 60, 33), 8: (10, 10, 2)}))
    merged.take(1, 0, report({512: (66, 50, 40)}))
    merged.gather(counts)
    assert counts.window_pages == {"512": 132, "8": 10}
    assert counts.window_pages_held == {"512": 22, "8": 0}
    assert counts.window_peak_pages == {"512": 73, "8": 2}
    merged.ended(0, 0)
    merged.gather(counts)
    assert (counts.window_pages, counts.window_peak_pages) == ({"512": 66}, {"512": 40})


@pytest.mark.parametrize("name", ["window_pages", "window_pages_held", "window_peak_pages"])
def test_an_engine_without_windows_has_none(name: str) -> None:
    assert report({})[name] == {}
