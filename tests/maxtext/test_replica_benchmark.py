"""benchmarks/replicas.py on the tiny model: it measures what it names, and a job that went wrong is no figure."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.cli_runs import POOL, tiny_model

pytestmark = [
    pytest.mark.maxtext,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two replicas take two cores"),
]

SMALL = ["--rows", "60", "--batch", "4", "--passes", "1", "--no-wait", "--vocab-size", "40"]


def run(record: Path, *words: str) -> int:
    from benchmarks.replicas import main

    return main([tiny_model().config, *POOL, *SMALL, "--json", str(record), *words])


def check(record: Path, *arms: str) -> None:
    found = json.loads(record.read_text())["arms"]
    assert tuple(found) == arms
    for arm in found.values():
        figures = arm["figures"]
        assert arm["backends"] == ["native"]
        assert figures["rows_per_second"]["median"] > 0 and figures["start_seconds"]["median"] > 1
        assert figures["rows_per_second"]["why"] == "not reportable: 1 of at least 3 passes"


def test_one_and_two_replicas_are_measured_over_the_same_rows(tmp_path: Path) -> None:
    assert run(tmp_path / "record.json", "--arms", "replicas-1,replicas-2") == 0
    check(tmp_path / "record.json", "replicas-1", "replicas-2")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_one_and_two_ray_actors_are_measured_over_the_same_rows(tmp_path: Path) -> None:
    assert run(tmp_path / "record.json", "--arms", "ray-1,ray-2") == 0
    check(tmp_path / "record.json", "ray-1", "ray-2")


def test_attention_on_the_reference_unasked_is_no_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "record.json", "paged_attention_native=0", "--arms", "replicas-1") == 1
    assert "FAILED: replicas-1 ran attention on the jnp reference" in capsys.readouterr().err
    assert json.loads((tmp_path / "record.json").read_text())["arms"] == {}
