"""A job's figures as Prometheus text, for node_exporter's textfile collector or whoever reads that format.

For:        writing the figures of figures.py under their standard names.
Not for:    serving them over a network, or computing them.
May import: the standard library, prometheus_client, maxtext_paged.report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from maxtext_paged.report.figures import DISTRIBUTIONS, FIGURES, Figure, bound_label, known
from maxtext_paged.report.histogram import DurationHistogram
from maxtext_paged.report.recorder import Recorder

PREFIX = "maxtext_paged_"
MARK = "# maxtext-paged metrics\n"
"""The first line of every such file: by it the next run knows that it may replace the file."""


def prometheus_text(recorder: Recorder, *, labels: Mapping[str, str], state: str, written_at: float) -> bytes:
    """All figures of a job.

    Args:
      labels: what the job is, for ``maxtext_paged_job_info``; values may hold any characters.
      state: as in the JSON file.
    """
    registry = CollectorRegistry()
    registry.register(_Job(recorder, labels, state, written_at))
    return MARK.encode() + generate_latest(registry)


class _Job(Collector):
    def __init__(self, recorder: Recorder, labels: Mapping[str, str], state: str, written_at: float) -> None:
        self._recorder, self._labels, self._state, self._written_at = recorder, labels, state, written_at

    def collect(self) -> Iterator[Metric]:
        yield _info("job", "What the job is.", {**self._labels, "state": self._state})
        for name, meaning, moment in (
            ("job_start_time_seconds", "When the job began, in seconds since 1970.", self._recorder.started_at),
            ("job_written_time_seconds", "When this was written, in seconds since 1970.", self._written_at),
        ):
            yield GaugeMetricFamily(PREFIX + name, meaning, value=moment)
        for figure in FIGURES:
            if (value := known(figure.read(self._recorder.counts))) is not None:
                yield _metric(figure, value)
        for distribution in DISTRIBUTIONS:
            yield _histogram(distribution.metric, distribution.meaning, distribution.read(self._recorder))

    def describe(self) -> Iterable[Metric]:
        return ()


def _metric(figure: Figure, value: int | float | Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    metric = family(PREFIX + figure.metric, f"{figure.meaning} Unit: {figure.unit}.", labels=figure.labels)
    if not isinstance(value, Mapping):
        metric.add_metric([], value)
        return metric
    for key, number in value.items():
        metric.add_metric([_text(part) for part in ((key,) if isinstance(key, str) else key)], number)
    return metric


def _histogram(name: str, meaning: str, histogram: DurationHistogram) -> Metric:
    buckets = [(bound_label(end), count) for end, count in histogram.cumulative()]
    return HistogramMetricFamily(PREFIX + name, f"{meaning} Unit: seconds.", buckets=buckets, sum_value=histogram.sum)


def _info(name: str, meaning: str, labels: Mapping[str, str]) -> Metric:
    return InfoMetricFamily(PREFIX + name, meaning, value={key: _text(value) for key, value in labels.items()})


def _text(value: str) -> str:
    """Without halves of surrogate pairs, which a file name may hold and UTF-8 does not."""
    return value.encode("utf-8", "replace").decode()
