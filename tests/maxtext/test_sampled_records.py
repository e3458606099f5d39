"""Which records ``maxtext-paged verify`` draws: the same ones for one seed, and never a failed or torn one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxtext_paged.cli import CommandError
from maxtext_paged.cli.sampled_records import SampledRecords, Share


def write_output(path: Path, num: int, *, failed: int = 0, order: int = 1) -> None:
    rows = [{"index": i, "error": {"code": "x"} if i < failed else None, "id": f"r{i}"} for i in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[::order]))


def test_a_draw_is_the_same_in_whatever_order_records_stand(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    drawn = []
    for order in (1, -1):
        write_output(path, 1000, order=order)
        found = SampledRecords(str(path), Share.parse("5%"), 3)
        assert len(found) == 50 and all(found.record(i)["id"] == f"r{i}" for i in found.indices)
        drawn.append(found.indices)
    assert drawn[0] == drawn[1]
    other = SampledRecords(str(path), Share.parse("5%"), 4)
    assert other.indices != drawn[0]
    assert len(SampledRecords(str(path), Share.parse("7"), 4)) == 7


def test_failed_rows_are_counted_and_not_drawn_and_a_torn_record_was_never_there(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_output(path, 20, failed=5)
    path.write_bytes(path.read_bytes() + b'{"index": 20, "er')
    found = SampledRecords(str(path), Share.parse("100%"), 0)
    assert (found.num_records, found.num_failed, found.indices) == (20, 5, set(range(5, 20)))


def test_records_that_stand_twice_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_output(path, 3)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(CommandError, match="two records are of one row"):
        SampledRecords(str(path), Share.parse("100%"), 0)
    path.write_text('{"prompt": "no record"}\n')
    with pytest.raises(CommandError, match="no record of this command"):
        SampledRecords(str(path), Share.parse("100%"), 0)


def test_a_parquet_output_is_drawn_from_as_its_lines_would_be(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "out.parquet"
    table = pyarrow.table({"index": list(range(100)), "error": [None] * 100, "id": [f"r{i}" for i in range(100)]})
    parquet.write_table(table, path, row_group_size=7)
    write_output(tmp_path / "out.jsonl", 100)
    found = SampledRecords(str(path), Share.parse("10"), 1)
    assert found.indices == SampledRecords(str(tmp_path / "out.jsonl"), Share.parse("10"), 1).indices
    assert all(found.record(i)["id"] == f"r{i}" for i in found.indices)


@pytest.mark.parametrize("text", ["0", "0%", "101%", "-1", "some", ""])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number of rows, or a percentage"):
        Share.parse(text)
