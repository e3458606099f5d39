"""``maxtext-paged generate --resume``: rows that have their record are not run again, whatever ended the run before.

The command runs whole, over a stand-in for the engine (tests/fake_engine.py), mostly in processes of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maxtext_paged.__main__ import main
from maxtext_paged.cli import generate
from maxtext_paged.formats import BadRow, InputRow, RowError
from maxtext_paged.intake import Intake
from tests.cli_runs import ROOT, environment, records
from tests.fake_engine import completion, fake_model

ROWS = [{"id": f"r{i}", "prompt": f"row {i}", "max_tokens": 5} for i in range(12)]
WORDS = ["generate", "c.yml", "-i", "in.jsonl", "-o", "out.jsonl", "--no-progress"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a configuration and an input, and a model that answers at once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yml").write_text("base_config: base.yml\n")
    write_rows(ROWS)
    use_model(monkeypatch)
    return tmp_path


def use_model(monkeypatch: pytest.MonkeyPatch, **model: Any) -> None:
    monkeypatch.setattr(generate, "open_model", lambda path, overrides: fake_model(**model))


def use_unloadable_model(monkeypatch: pytest.MonkeyPatch, **model: Any) -> None:
    def start(first_step_tokens: int) -> Any:
        raise AssertionError("the model was loaded")

    unloadable = replace(fake_model(**model), start=start)
    monkeypatch.setattr(generate, "open_model", lambda path, overrides: unloadable)


def write_rows(rows: list[Any], path: str = "in.jsonl") -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def output() -> bytes:
    return Path("out.jsonl").read_bytes()


def whole_output(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What one run alone writes."""
    assert main([*WORDS[:-2], "whole.jsonl", "--no-progress"]) == 0
    return Path("whole.jsonl").read_bytes()


def in_process(plan: dict[str, Any], *words: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, str(ROOT / "tests" / "fake_command.py"), json.dumps(plan), *WORDS, *words]
    return subprocess.run(command, capture_output=True, env=environment(), check=False, **more)


# --- what is missing, and nothing else -----------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_killed_at_fifty_random_moments_ends_with_every_record_once_and_earlier_bytes_untouched(
    place: Path,
) -> None:
    rows = [{"id": f"r{i}", "prompt": f"row {i}", "temperature": 1} for i in range(600)]
    write_rows(rows)
    moments = {"kills": 50, "within_s": 0.1, "within_bytes": 6000, "seed": 3}
    plan = {"report": "report.json", "watch": "out.jsonl", "tear": True, **moments}
    ended = in_process(plan, "--resume")
    assert ended.returncode == 0, ended.stderr.decode()
    kills = json.loads(Path("report.json").read_text())["kills"]
    assert len(kills) == 50 and all(kill["untouched"] for kill in kills)
    assert sum(kill["torn"] for kill in kills) > 5  # the moments did find records half written
    assert len({kill["lines"] for kill in kills}) > 10  # and different ones
    found = records(output())
    assert sorted(record["index"] for record in found) == list(range(600))
    for record in found:  # every one is what a run alone gives, seeds by place in the file included
        prompt = list(rows[record["index"]]["prompt"].encode())
        assert record["id"] == f"r{record['index']}"
        assert record["token_ids"] == completion(prompt, 2**31 + record["index"], 16)


def test_an_output_cut_at_any_byte_is_finished_without_touching_its_whole_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = whole_output(monkeypatch)
    run_file = Path("whole.jsonl.run.json").read_bytes()
    for cut in [*range(0, len(whole), 37), len(whole) - 1]:
        Path("out.jsonl").write_bytes(whole[:cut])
        Path("out.jsonl.run.json").write_bytes(run_file)
        assert main([*WORDS, "--resume"]) == 0
        kept = whole[: whole.rfind(b"\n", 0, cut) + 1]
        assert output().startswith(kept)
        assert sorted(output().splitlines()) == sorted(whole.splitlines())


def test_a_tail_of_zeros_as_a_power_cut_leaves_it_is_a_torn_record(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = whole_output(monkeypatch)
    Path("out.jsonl").write_bytes(whole[: whole.find(b"\n") + 1] + bytes(100))
    os.rename("whole.jsonl.run.json", "out.jsonl.run.json")
    assert main([*WORDS, "--resume"]) == 0
    assert sorted(output().splitlines()) == sorted(whole.splitlines())


def test_resuming_a_finished_job_loads_no_model_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(WORDS) == 0
    before = output()
    use_unloadable_model(monkeypatch)
    assert main([*WORDS, "--resume"]) == 0
    assert output() == before
    assert "out.jsonl is complete" in capsys.readouterr().err


def test_resuming_nothing_is_a_first_run() -> None:
    assert main([*WORDS, "--resume"]) == 0
    assert len(records(output())) == 12
    Path("out.jsonl").write_bytes(b"")  # killed after it was created
    assert main([*WORDS, "--resume"]) == 0
    assert len(records(output())) == 12


def test_rows_that_failed_before_count_and_are_not_run_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows([{"prompt": 5}, *ROWS])
    assert main(WORDS) == 1
    lines = output().splitlines(keepends=True)
    Path("out.jsonl").write_bytes(b"".join(lines[:-3]))
    assert main([*WORDS, "--resume"]) == 1
    assert output().splitlines()[: len(lines) - 3] == [line.rstrip() for line in lines[:-3]]
    assert sorted(record["index"] for record in records(output())) == list(range(13))
    assert "13 rows: 3 ok, 0 failed, 10 before (1 failed); " in capsys.readouterr().err
    assert main([*WORDS, "--resume"]) == 1  # complete, with a failed row


# --- whose records are they ----------------------------------------------------------------------------------


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """An output with half of its records."""
    assert main(WORDS) == 0
    Path("out.jsonl").write_bytes(b"".join(output().splitlines(keepends=True)[:6]))
    return output()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"temperature": 0.5}, "sampling temperature was 0.0, is 0.5"),
        ({"weights": "w2"}, 'model weights was "w1", is "w2"'),
        ({"input": True}, "input sha256 was "),
    ],
)
def test_another_run_is_refused_by_what_differs_and_goes_on_where_forced(
    half: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    says: str,
) -> None:
    if change.pop("input", False):
        write_rows([*ROWS, {"id": "new", "prompt": "one more"}])
    use_model(monkeypatch, **change)
    assert main([*WORDS, "--resume"]) == 2
    said = capsys.readouterr().err
    assert "out.jsonl is another run's: " in said and says in said
    assert output() == half
    assert main([*WORDS, "--resume-anyway"]) == 0
    assert output().startswith(half)
    assert len(records(output())) == (13 if "input" in says else 12)
    assert len(json.loads(Path("out.jsonl.run.json").read_text())["runs"]) == 2
    assert main([*WORDS, "--resume"]) == 0  # it is this run's now


def test_another_run_is_refused_before_the_model_is_loaded_also_where_the_job_is_complete(
    half: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "--resume"]) == 0
    use_unloadable_model(monkeypatch, temperature=0.5)
    for content in (output(), half):
        Path("out.jsonl").write_bytes(content)
        assert main([*WORDS, "--resume"]) == 2
        assert "sampling temperature" in capsys.readouterr().err


def test_records_of_other_rows_are_refused_even_where_forced(half: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows([{**row, "id": f"x{row['id']}"} for row in ROWS])
    assert main([*WORDS, "--resume-anyway"]) == 2
    assert "out.jsonl:1: no record of this input: id='r0'" in capsys.readouterr().err
    write_rows(ROWS[:2])
    assert main([*WORDS, "--resume-anyway"]) == 2
    assert "and the input has 2 rows" in capsys.readouterr().err
    assert output() == half


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{}\n", "missing required field"),
        (b"\n", "out.jsonl:7: "),
        (b'{"index": 3, "error": null, "id": "r3"}\n', "index=3 has a record above"),
        (b'{"index": -1, "error": null}\n', "index=-1"),
        (b"someone's notes\n", "out.jsonl:7: "),
        (b"someone's notes", "out.jsonl:7: "),
    ],
)
def test_a_file_with_anything_else_in_it_is_left_as_it_is(
    half: bytes, capsys: pytest.CaptureFixture[str], line: bytes, says: str
) -> None:
    Path("out.jsonl").write_bytes(half + line)
    for flag in ("--resume", "--resume-anyway"):
        assert main([*WORDS, flag]) == 2
        assert says in capsys.readouterr().err
        assert output() == half + line


def test_records_without_a_run_file_are_taken_up_only_where_forced(
    half: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out.jsonl.run.json").unlink()
    assert main([*WORDS, "--resume"]) == 2
    assert "out.jsonl.run.json says which run" in capsys.readouterr().err
    assert main([*WORDS, "--resume-anyway"]) == 0
    assert output().startswith(half) and len(records(output())) == 12


def test_a_run_file_that_is_somebody_elses_is_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out.jsonl.run.json").write_text('{"mine": 1}')
    assert main(WORDS) == 2
    assert "out.jsonl.run.json is not a file of this command" in capsys.readouterr().err
    assert Path("out.jsonl.run.json").read_text() == '{"mine": 1}' and not Path("out.jsonl").exists()


def test_overwriting_begins_anew_and_belongs_to_the_new_run(half: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    use_model(monkeypatch, temperature=0.5)
    assert main([*WORDS, "--overwrite"]) == 0
    assert len(records(output())) == 12
    [run] = json.loads(Path("out.jsonl.run.json").read_text())["runs"]
    assert run["sampling"] == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*WORDS, "--resume", "--overwrite"], "which?"),
        ([*WORDS[:4], "-o", "-", "--resume"], "-o - has none"),
        ([*WORDS[:4], "-o", os.devnull, "--resume"], "is not a file"),
        (WORDS, "out.jsonl exists: choose another output, or --resume or --overwrite it"),
    ],
)
def test_what_cannot_be_resumed_is_a_usage_error(
    half: bytes, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err
    assert output() == half


def test_an_output_that_another_process_writes_is_refused(half: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with open("out.jsonl", "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for flag in ("--resume", "--overwrite"):
            assert main([*WORDS, flag]) == 2
            assert "another process is writing it" in capsys.readouterr().err
    assert output() == half


# --- signals and full disks ----------------------------------------------------------------------------------


@pytest.fixture
def slow_run() -> Iterator[subprocess.Popen[bytes]]:
    """A job of many steps, seen after its first records."""
    write_rows([{"prompt": f"row {i}"} for i in range(2000)])
    plan = {"model": {"step_s": 0.005}}
    command = [sys.executable, str(ROOT / "tests" / "fake_command.py"), json.dumps(plan), *WORDS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment()) as process:
        until = time.monotonic() + 30
        while not (Path("out.jsonl").exists() and output()) and time.monotonic() < until:
            time.sleep(0.005)
        yield process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_whole_records_a_code_that_says_incomplete_and_a_job_to_resume(
    slow_run: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    slow_run.send_signal(number)
    _, said = slow_run.communicate()
    assert slow_run.returncode == 128 + number
    before = output()
    assert 0 < len(records(before)) < 2000
    assert b"the same command with --resume runs the rest" in said and b"Traceback" not in said
    assert main([*WORDS, "--resume"]) == 0
    assert output().startswith(before)
    assert sorted(record["index"] for record in records(output())) == list(range(2000))


def test_a_full_disk_stops_the_job_with_whole_records_and_it_can_be_resumed(place: Path) -> None:
    ended = in_process({"max_bytes": 1500})
    assert ended.returncode == 3
    assert b"error: the output failed after " in ended.stderr and b"--resume" in ended.stderr
    assert b"Traceback" not in ended.stderr
    before = output()
    assert before.endswith(b"\n") and 0 < len(records(before)) < 12 and len(before) <= 1500
    assert in_process({"max_bytes": 1500}, "--resume").returncode == 3  # still full: nothing is lost or doubled
    assert output() == before
    assert main([*WORDS, "--resume"]) == 0
    assert output().startswith(before) and len(records(output())) == 12


def test_a_disk_too_full_for_the_run_file_runs_nothing_and_keeps_an_output_that_was_to_be_overwritten(
    half: bytes,
) -> None:
    ended = in_process({"max_bytes": 100}, "--overwrite")
    assert ended.returncode == 2 and b"cannot be written" in ended.stderr
    assert output() == half
    assert sorted(path.name for path in Path().iterdir()) == ["c.yml", "in.jsonl", "out.jsonl", "out.jsonl.run.json"]
    assert main([*WORDS, "--resume"]) == 0


def test_the_first_step_is_guessed_from_rows_that_are_still_to_run_and_never_above_a_steps_limit() -> None:
    rows = [InputRow(index=i, line=i + 1, id=str(i), prompt="four") for i in range(99)]
    intake = fake_model().intake
    few = generate.first_rows(rows[:3], intake, 64)
    assert list(few) == [0, 1, 2]
    assert generate.num_tokens(few, 64) == sum(len(intake.row(row).tokens) for row in rows[:3]) > 0
    many = generate.first_rows(rows, intake, 64)
    assert generate.num_tokens(many, 64) == 64 and len(many) < 64, "no row is read that the first step has no room for"
    bad = generate.first_rows([BadRow(i, 1, RowError("no", "bad_value")) for i in range(99)], intake, 64)
    assert generate.num_tokens(bad, 64) == 0 and len(bad) < 99, "unusable rows are not read to the file's end"


def test_every_row_is_tokenised_once(monkeypatch: pytest.MonkeyPatch, half: bytes) -> None:
    """A template that hangs costs its time limit: not twice for the rows that the first step is guessed from."""
    seen: list[int] = []
    judge = Intake.row

    def row(intake: Intake, source: InputRow | BadRow) -> Any:
        seen.append(source.index)
        return judge(intake, source)

    monkeypatch.setattr(Intake, "row", row)
    assert main([*WORDS, "--overwrite"]) == 0
    assert sorted(seen) == list(range(12))
