"""``generate --replicas 2`` over real engines: the completions of one, and every row once where one is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli_runs import POOL, command, environment, records, tiny_model

pytestmark = [
    pytest.mark.maxtext,
    pytest.mark.long,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two replicas take two cores"),
]

NUM_ROWS, KILLED_ROWS = 40, 3000


def words(output: Path, *more: str) -> list[str]:
    rows = str(output.parent / "in.jsonl")
    return command("generate", tiny_model().config, "-i", rows, "-o", str(output), *POOL, "--no-progress", *more)


def write_rows(place: Path, num: int) -> None:
    rows = [
        {"id": f"r{i}", "prompt": f"the cat and the {'dog' if i % 3 else 'abc'}", "max_tokens": 4 + i % 9,
         "temperature": i % 2 * 1.0, "ignore_eos": True, "n": 1 + (i % 7 == 0)}
        for i in range(num)
    ]  # fmt: skip
    (place / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def by_index(output: Path) -> dict[int, Any]:
    found = records(output.read_bytes())
    assert len({record["index"] for record in found}) == len(found), "no row stands there twice"
    return {record["index"]: {name: record[name] for name in record if name != "usage"} for record in found}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("replicas")
    write_rows(place, NUM_ROWS)
    return place


@pytest.mark.timeout(240)
def test_two_replicas_of_half_the_cores_give_the_completions_of_one_engine(place: Path) -> None:
    said = {}
    for name, more in (("one", []), ("two", ["--replicas", "2", "paged_enable_prefix_cache=true"])):
        ended = subprocess.run(
            words(place / f"{name}.jsonl", *more), capture_output=True, text=True, env=environment(), check=False
        )
        assert ended.returncode == 0, ended.stderr
        said[name] = ended.stderr
    assert "2 replicas, none died" in said["two"]
    one, two = by_index(place / "one.jsonl"), by_index(place / "two.jsonl")
    assert sorted(one) == list(range(NUM_ROWS))
    assert two == one


@pytest.mark.timeout(240)
def test_every_row_is_answered_once_where_an_engine_is_killed_in_the_middle(tmp_path: Path) -> None:
    write_rows(tmp_path, KILLED_ROWS)
    output = tmp_path / "out.jsonl"
    with subprocess.Popen(words(output, "--replicas", "2"), stderr=subprocess.PIPE, env=environment()) as process:
        while not (output.exists() and output.read_bytes().count(b"\n") > 20) and process.poll() is None:
            time.sleep(0.01)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2
        os.kill(int(children[1]), signal.SIGKILL)
        assert process.stderr is not None
        said = process.stderr.read().decode()
    assert process.returncode == 0, said
    found = by_index(output)
    assert sorted(found) == list(range(KILLED_ROWS))
    assert all(record["error"] is None for record in found.values())
    assert "replica 1 died (SIGKILL): " in said and "unfinished rows go back; it is started again" in said
    assert "2 replicas, 1 deaths: replica 1 (SIGKILL); 1 started again, " in said
