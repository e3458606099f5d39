"""``generate --replicas``: one output, whatever becomes of the processes that run the rows.

The command and its replicas run whole, as processes, over a stand-in for the engine (tests/fake_replica.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from maxtext_paged.cli import CommandError
from maxtext_paged.replicas import devices
from maxtext_paged.replicas.devices import mesh_devices, place_replicas
from tests.cli_runs import ROOT, environment, records
from tests.fake_engine import completion

WORDS = ["generate", "plan.json", "-i", "in.jsonl", "-o", "out.jsonl", "--no-progress"]
TWO = ["--replicas", "2"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 2, reason="two replicas take two cores, and this process may use one"
    ),
]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lives").mkdir()
    return tmp_path


def write_job(num_rows: int, **plan: Any) -> list[dict[str, Any]]:
    rows = [{"id": f"r{i}", "prompt": f"row {i}", "temperature": 1, "max_tokens": 5} for i in range(num_rows)]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("plan.json").write_text(json.dumps({"lives": "lives", **plan}))
    return rows


def command(*words: str) -> list[str]:
    return [sys.executable, str(ROOT / "tests" / "replica_command.py"), *words]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*WORDS, *words), capture_output=True, text=True, env=environment(), check=False, timeout=120
    )


def assert_whole(rows: list[dict[str, Any]]) -> None:
    """Every row has one record, and it is what the row alone gives, its seed by its place in the file included."""
    found = records(Path("out.jsonl").read_bytes())
    assert sorted(record["index"] for record in found) == list(range(len(rows)))
    for record in found:
        row = rows[record["index"]]
        assert record["id"] == row["id"]
        prompt = list(row["prompt"].encode())
        assert record["token_ids"] == completion(prompt, 2**31 + record["index"], 5)


def ran(number: int, life: int = 0) -> list[int]:
    """The rows that a replica finished in one of its lives."""
    path = Path(f"lives/seen.{number}.{life}")
    return list(map(int, path.read_text().split())) if path.exists() else []


def children_of(process: int) -> list[int]:
    return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))


def test_two_replicas_share_the_rows_and_the_cores_and_write_one_whole_output() -> None:
    rows = write_job(200, model={"step_s": 0.001})
    ended = run(*TWO, "--metrics-file", "m.json", "--report", "r.html")
    assert ended.returncode == 0, ended.stderr
    assert_whole(rows)
    both = [ran(0), ran(1)]
    assert sorted([*both[0], *both[1]]) == list(range(200)), "no row runs twice"
    assert min(map(len, both)) > 30, "both work"
    cores = [set(Path(f"lives/cores.{i}").read_text().split(",")) for i in (0, 1)]
    assert cores[0].isdisjoint(cores[1])
    assert set(map(int, cores[0] | cores[1])) == os.sched_getaffinity(0)
    assert "2 replicas, none died" in ended.stderr
    shown = json.loads(Path("m.json").read_text())
    assert shown["file"]["rows"] == {"ok": 200, "failed": 0, "missing": 0}
    assert shown["run"]["sampled_tokens"] == shown["run"]["generated_tokens"] == 1000
    assert (shown["run"]["replicas"], shown["run"]["running"]) == (2, 0)
    for name in ("queue_seconds", "ttft_seconds", "latency_seconds"):
        assert shown["distributions"][name]["count"] == 200
    assert shown["distributions"]["step_seconds"]["count"] == shown["run"]["steps"] > 0


def test_a_replica_that_is_killed_is_started_again_and_its_unfinished_rows_go_back() -> None:
    rows = write_job(120, slow={"0": {"step_s": 0.2}}, die={"1": ["rows:7"]})  # there is time for another life
    ended = run(*TWO)
    assert ended.returncode == 0, ended.stderr
    assert_whole(rows)
    assert len(ran(1, 0)) == 7 and ran(1, 1), "it worked before and after"
    assert "replica 1 died (SIGKILL): " in ended.stderr and "it is started again" in ended.stderr
    assert "2 replicas, 1 deaths: replica 1 (SIGKILL); 1 started again, " in ended.stderr
    twice = Counter([*ran(0), *ran(1, 0), *ran(1, 1)])
    assert all(count == 1 for count in twice.values()), "a row that has its record is not run again"


def test_a_replica_that_dies_twice_is_given_up_and_the_others_finish() -> None:
    rows = write_job(40, slow={"1": {"step_s": 0.1}}, die={"0": ["rows:3", "rows:2"]})
    ended = run(*TWO)
    assert ended.returncode == 0, ended.stderr
    assert_whole(rows)
    assert "it died before and is given up" in ended.stderr
    assert not Path("lives/0.2").exists(), "it is not started a third time"


def test_where_no_replica_is_left_the_job_ends_with_what_it_has_and_can_be_resumed() -> None:
    rows = write_job(60, model={"step_s": 0.001}, die={"0": ["rows:3", "rows:2"], "1": ["rows:4", "start"]})
    ended = run(*TWO)
    assert ended.returncode == 3, ended.stderr
    assert "no replica is left: " in ended.stderr and "--resume runs the rest" in ended.stderr
    before = Path("out.jsonl").read_bytes()
    assert 0 < len(records(before)) < 60
    resumed = run(*TWO, "--resume")  # their next lives are long
    assert resumed.returncode == 0, resumed.stderr
    assert Path("out.jsonl").read_bytes().startswith(before)
    assert_whole(rows)


def test_a_replica_that_cannot_start_ends_the_job_before_anything_is_written() -> None:
    write_job(5, die={"1": ["start"]})
    ended = run(*TWO)
    assert ended.returncode == 3
    assert "error: replica 1: it ended (SIGKILL)" in ended.stderr
    assert not Path("out.jsonl").exists()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_a_job_that_is_killed_or_interrupted_leaves_no_process_and_whole_records_and_is_resumed(
    number: signal.Signals,
) -> None:
    stuck = {"1": {"step_s": 60}} if number == signal.SIGKILL else {}  # in the middle of a step
    rows = write_job(1000, model={"step_s": 0.005}, slow=stuck)
    with subprocess.Popen(
        command(*WORDS, *TWO), stderr=subprocess.PIPE, env=environment(), start_new_session=True
    ) as process:
        until = time.monotonic() + 60
        while not (Path("out.jsonl").exists() and Path("out.jsonl").stat().st_size) and time.monotonic() < until:
            time.sleep(0.005)
        replicas = children_of(process.pid)
        assert len(replicas) == 2
        asked = time.monotonic()
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does it: to all of the job's session
        else:
            process.send_signal(number)
        said = process.stderr.read().decode()
        process.wait(30)
    until = time.monotonic() + 10
    while any(Path(f"/proc/{replica}").exists() for replica in replicas) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{replica}").exists() for replica in replicas), "nobody is left behind"
    assert time.monotonic() - asked < 40, "nobody waits for a step"
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number and "Traceback" not in said
        assert Path("out.jsonl").read_bytes().endswith(b"\n")
    before = Path("out.jsonl").read_bytes()
    num_before = before.count(b"\n")
    assert 0 < num_before < 1000
    Path("plan.json").write_text(json.dumps({"lives": "lives"}))  # quicker now; the model is the same
    resumed = run(*TWO, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert Path("out.jsonl").read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert f"{num_before} before" in resumed.stderr
    assert_whole(rows)


def test_an_output_of_one_engine_is_finished_by_two_and_the_other_way_round() -> None:
    rows = write_job(40)
    assert run().returncode == 0  # no replicas: in the command's own process
    lines = Path("out.jsonl").read_bytes().splitlines(keepends=True)
    Path("out.jsonl").write_bytes(b"".join(lines[:15]))
    assert run(*TWO, "--resume").returncode == 0
    assert_whole(rows)
    Path("out.jsonl").write_bytes(b"".join(Path("out.jsonl").read_bytes().splitlines(keepends=True)[:25]))
    assert run("--resume").returncode == 0
    assert_whole(rows)


def test_an_engine_that_fails_says_why_and_is_started_again() -> None:
    rows = write_job(60, slow={"0": {"step_s": 0.1}}, die={"1": ["raise:5"]})
    ended = run(*TWO)
    assert ended.returncode == 0, ended.stderr
    assert_whole(rows)
    assert "replica 1 died (RuntimeError: the device is lost): " in ended.stderr and ran(1, 1)
    assert "1 deaths: replica 1 (RuntimeError: the device is lost); 1 started again" in ended.stderr


def test_an_output_of_other_weights_is_not_resumed_and_replicas_of_two_are_refused() -> None:
    write_job(10)
    assert run(*TWO).returncode == 0
    before = Path("out.jsonl").read_bytes()
    Path("out.jsonl").write_bytes(b"".join(before.splitlines(keepends=True)[:4]))
    write_job(10, model={"weights": "w2"})
    ended = run(*TWO, "--resume")
    assert ended.returncode == 2 and "weights" in ended.stderr, ended.stderr
    assert Path("out.jsonl").read_bytes() == b"".join(before.splitlines(keepends=True)[:4])
    write_job(10, slow={"1": {"weights": "w2"}})
    ended = run(*TWO, "--overwrite")
    assert ended.returncode == 2 and "the replicas loaded different weights" in ended.stderr, ended.stderr


# --- sharing the machine out -------------------------------------------------------------------------------


def machine(monkeypatch: pytest.MonkeyPatch, platform: str, num: int, *, rocm: bool = False, **values: object) -> None:
    monkeypatch.setattr(devices, "_devices", lambda: (platform, rocm, num))
    monkeypatch.setattr(devices, "given_values", lambda path, overrides: values)
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_auto_is_one_replica_for_each_group_of_devices_of_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "gpu", 8, ici_tensor_parallelism=2, ici_fsdp_parallelism=1)
    found = place_replicas("auto", "c.yml", [])
    assert [one.environment for one in found] == [{"CUDA_VISIBLE_DEVICES": f"{i},{i + 1}"} for i in (0, 2, 4, 6)]
    machine(monkeypatch, "gpu", 4, rocm=True)
    found = place_replicas("auto", "c.yml", [])
    assert [one.environment for one in found] == [{"ROCR_VISIBLE_DEVICES": str(i)} for i in range(4)]
    machine(monkeypatch, "cpu", 1)
    assert len(place_replicas("auto", "c.yml", [])) == 1


def test_a_mesh_that_fills_takes_what_each_replica_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "gpu", 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    found = place_replicas("2", "c.yml", [])
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in found] == ["7,6,5,4", "3,2,1,0"]
    assert mesh_devices({"ici_fsdp_parallelism": "2"}) == (2, False)


def test_more_replicas_than_devices_or_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "gpu", 2, ici_tensor_parallelism=2, ici_fsdp_parallelism=1)
    with pytest.raises(CommandError, match="2 devices are visible, and the configuration's mesh takes 2"):
        place_replicas("2", "c.yml", [])
    machine(monkeypatch, "cpu", 1)
    with pytest.raises(CommandError, match="each needs one"):
        place_replicas("200", "c.yml", [])
