"""One list of figures: every count is in it, and both metrics formats, the summary and the documents say the same."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from maxtext_paged.report.counts import JobCounts
from maxtext_paged.report.figures import DISTRIBUTIONS, FIGURES, snapshot
from maxtext_paged.report.prometheus import PREFIX, prometheus_text
from maxtext_paged.report.recorder import Recorder
from tests.recorded_job import HOSTILE, busy_recorder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return busy_recorder()


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Prometheus text as its own parser reads it."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def text_of(recorder: Recorder, **labels: str) -> bytes:
    return prometheus_text(recorder, labels=labels, state="running", written_at=1.7e9)


def test_every_count_of_a_job_is_a_figure() -> None:
    seen: set[str] = set()

    class Watched(JobCounts):
        def __getattribute__(self, name: str) -> Any:
            seen.add(name)
            return super().__getattribute__(name)

    for figure in FIGURES:
        figure.read(Watched())
    assert {field.name for field in dataclasses.fields(JobCounts)} - seen == {"shares"}


def test_figures_have_names_of_their_own_and_metrics_the_standard_ones() -> None:
    names = [(figure.part, figure.name) for figure in FIGURES]
    metrics = [each.metric for each in (*FIGURES, *DISTRIBUTIONS)]
    assert len(set(names)) == len(names) and len(set(metrics)) == len(metrics)
    for figure in FIGURES:
        assert re.fullmatch(r"[a-z][a-z_]*", figure.metric)
        assert (figure.kind == "counter") == figure.metric.endswith("_total")
        assert figure.meaning.endswith(".")
    assert all(each.metric.endswith("_seconds") for each in DISTRIBUTIONS)


def test_both_formats_hold_the_same_numbers(recorder: Recorder) -> None:
    found, plain = samples(text_of(recorder)), json.loads(json.dumps(snapshot(recorder)))
    for figure in FIGURES:
        value = plain[figure.part][figure.name]
        name = PREFIX + figure.metric
        if value is None:
            assert not any(metric == name for metric, _ in found)
        elif len(figure.labels) > 1:
            for entry in value:
                assert found[name, tuple(sorted((label, entry[label]) for label in figure.labels))] == entry["count"]
        elif figure.labels:
            for key, number in value.items():
                assert found[name, ((figure.labels[0], key),)] == number
            assert sum(1 for metric, _ in found if metric == name) == len(value)
        else:
            assert found[name, ()] == value
    for each in DISTRIBUTIONS:
        value, name = plain["distributions"][each.name], PREFIX + each.metric
        assert found[f"{name}_count", ()] == value["count"] > 0
        assert found[f"{name}_sum", ()] == pytest.approx(value["sum"])
        assert {
            dict(labels)["le"]: number for (metric, labels), number in found.items() if metric == f"{name}_bucket"
        } == (value["buckets"])
        assert value["min"] <= value["p50"] <= value["p90"] <= value["p95"] <= value["p99"] <= value["max"]


def test_what_is_not_known_is_null_or_absent_and_never_nan() -> None:
    recorder = Recorder(JobCounts())
    plain = snapshot(recorder)
    json.dumps(plain, allow_nan=False)
    assert plain["run"]["hit_rate"] is None and plain["distributions"]["ttft_seconds"]["p50"] is None
    found = samples(text_of(recorder))
    assert not any(math.isnan(value) for value in found.values())
    assert not any(name == f"{PREFIX}prefix_page_hit_ratio" for name, _ in found)


@pytest.mark.parametrize("hostile", [*HOSTILE, 'quote " backslash \\ and\nline', "ünï ☃"])
def test_labels_come_back_as_they_went_in(hostile: str, recorder: Recorder) -> None:
    found = samples(text_of(recorder, input=hostile))
    [labels] = [dict(labels) for name, labels in found if name == f"{PREFIX}job_info"]
    assert labels["input"] == hostile.replace("\ud800", "?")
    assert labels["state"] == "running"


def test_the_parts_of_a_file_and_of_a_run_add_up(recorder: Recorder) -> None:
    plain = snapshot(recorder)
    file, run = plain["file"], plain["run"]
    assert sum(file["rows"].values()) == file["total"]
    assert {state: file["earlier"][state] + run["rows"][state] for state in ("ok", "failed")} == {
        state: file["rows"][state] for state in ("ok", "failed")
    }
    assert sum(run["failures"].values()) == run["rows"]["failed"]
    assert sum(entry["count"] for entry in run["decode_causes"]) == sum(run["decodes"].values())


def test_the_documents_table_is_the_list() -> None:
    text = (ROOT / "docs" / "watching.md").read_text()
    script = runpy.run_path(str(ROOT / "scripts" / "figure_tables.py"))
    assert script["filled"](text) == text, "run scripts/figure_tables.py docs/watching.md"
    assert all(f"`{PREFIX}{each.metric}`" in text for each in (*FIGURES, *DISTRIBUTIONS))
