"""Files that do not fit in memory: what a job holds does not grow with its rows (tests/fake_engine.py runs them).

Report and metrics files are on: what they are made of does not grow either.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.cli_runs import ROOT, environment

BYTES_PER_ROW = 50
"""What may be kept of a row: a digest of its id and its line (12 bytes), and what comparing the digests takes."""
SLACK_KIB = 6 * 1024


def write_own(path: Path, num_rows: int) -> None:
    with open(path, "w") as file:
        for i in range(num_rows):
            file.write(json.dumps({"id": f"row {i}", "prompt": f"{i} " + "word " * 40, "max_tokens": 16}) + "\n")


def write_batch(path: Path, num_rows: int) -> None:
    with open(path, "w") as file:
        for i in range(num_rows):
            body = {"model": "m", "prompt": f"{i} " + "word " * 40, "max_tokens": 16}
            row = {"custom_id": f"row {i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(row) + "\n")


def write_parquet(path: Path, num_rows: int) -> None:
    columns = {"id": [f"row {i}" for i in range(num_rows)], "prompt": [f"{i} " + "word " * 40 for i in range(num_rows)]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2048)


def run_rows(
    place: Path, write: Callable[[Path, int], None], num_rows: int, suffix: str, *words: str
) -> tuple[int, float]:
    """Peak resident memory of a whole job in KiB, and its seconds of processor time."""
    source, output = place / f"{num_rows}{suffix}", place / f"{num_rows}.out{suffix}"
    if not source.exists():
        write(source, num_rows)
    (place / "c.yml").touch()
    report = place / "report.json"
    command = [sys.executable, str(ROOT / "tests" / "fake_command.py"), json.dumps({"report": str(report)})]
    command += ["generate", str(place / "c.yml"), "-i", str(source), "-o", str(output), "--no-progress", *words]
    command += ["--report", str(place / "report.html")]
    command += ["--metrics-file", str(place / "m.json"), "--metrics-file", str(place / "m.prom")]
    ended = subprocess.run(command, capture_output=True, env=environment(), check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    if suffix == ".jsonl":
        with open(output, "rb") as file:
            assert sum(1 for _ in file) == num_rows
    else:
        assert pyarrow.parquet.read_metadata(output).num_rows == num_rows
    shown = json.loads((place / "m.json").read_text())
    assert shown["file"]["rows"] == {"ok": num_rows, "failed": 0, "missing": 0}
    assert shown["distributions"]["latency_seconds"]["count"] == shown["run"]["rows"]["ok"]
    assert (place / "report.html").stat().st_size < 400_000
    found = json.loads(report.read_text())
    return found["peak_kib"], found["cpu_s"]


@pytest.mark.slow
@pytest.mark.parametrize(("write", "suffix"), [(write_own, ".jsonl"), (write_batch, ".jsonl")])
def test_memory_is_flat_over_some_thousand_rows(
    tmp_path: Path, write: Callable[[Path, int], None], suffix: str
) -> None:
    few, many = (run_rows(tmp_path, write, num_rows, suffix)[0] for num_rows in (10, 10_000))
    assert many - few < 10_000 * BYTES_PER_ROW / 1024 + SLACK_KIB


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_two_hundred_thousand_rows_run_and_resume_at_flat_memory_and_speed(tmp_path: Path) -> None:
    seconds: dict[int, float] = {}
    peaks: dict[int | str, int] = {}
    for num_rows in (10, 20_000, 200_000):
        peaks[num_rows], seconds[num_rows] = run_rows(tmp_path, write_own, num_rows, ".jsonl")
    output = tmp_path / "200000.out.jsonl"
    content = output.read_bytes()
    output.write_bytes(content[: len(content) // 2])
    peaks["resumed"], _ = run_rows(tmp_path, write_own, 200_000, ".jsonl", "--resume")
    print(f"peak KiB {peaks}, seconds {seconds}")
    for peak in (peaks[200_000], peaks["resumed"]):
        assert peak - peaks[10] < 200_000 * BYTES_PER_ROW / 1024 + SLACK_KIB
    assert seconds[200_000] < 10 * seconds[20_000] * 1.5


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_two_hundred_thousand_rows_of_parquet_at_flat_memory(tmp_path: Path) -> None:
    peaks = {n: run_rows(tmp_path, write_parquet, n, ".parquet")[0] for n in (20_000, 200_000)}
    print(f"peak KiB {peaks}")
    assert peaks[200_000] - peaks[20_000] < 200_000 * BYTES_PER_ROW / 1024 + 24 * 1024  # a row group
