"""The control plane's benchmark runs, and its record says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.control_plane import PARTS, main, nodes_under_unique_suffixes


def test_the_control_planes_benchmark_writes_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--json", str(tmp_path / "record.json")]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert {(step["running"], step["prefix_cache"]) for step in record["steps"]} >= {(1, False), (16, True)}
    for step in record["steps"]:
        assert set(step["parts_us"]) == set(PARTS) and len(step["passes"]) == 3
        assert min(step["passes"]) <= step["median_us"] <= max(step["passes"])
    assert all(value > 0 for value in record["pages_per_second"].values())
    assert "us/request" in capsys.readouterr().out


def test_unique_suffixes_leave_no_more_nodes_than_the_pool_has_pages() -> None:
    counts = nodes_under_unique_suffixes(300, num_pages=24)
    assert counts[-1] == counts[5] <= 24
