"""What ``maxtext-paged generate`` leaves to look at: progress, metrics files and the report, whatever ends the job.

The command runs whole, over a stand-in for the engine (tests/fake_engine.py).
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from maxtext_paged.__main__ import main
from maxtext_paged.cli import generate
from maxtext_paged.cli.progress import JobProgress
from maxtext_paged.report import files
from maxtext_paged.report.counts import JobCounts
from tests import fake_engine
from tests.cli_runs import ROOT, environment, records
from tests.fake_engine import fake_model
from tests.recorded_job import HOSTILE

ROWS = 200
FAULTY = (3, 50, 51, 199)
WORDS = ["generate", "c.yml", "-i", "in.jsonl", "-o", "out.jsonl", "--no-progress"]
SHOWN = ["--metrics-file", "m.json", "--metrics-file", "m.prom", "--report", "r.html"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a configuration and an input of 200 rows, 4 of them faulty, and a model that answers at once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yml").touch()
    rows = [{"id": f"r{i}", "prompt": f"row {i}", "max_tokens": 5} for i in range(ROWS)]
    for i, place in enumerate(FAULTY):
        rows[place] = {"id": HOSTILE[i], "prompt": "x", "temperature": -1}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(generate, "open_model", lambda path, overrides: fake_model())
    return tmp_path


def metrics(path: str = "m.json") -> dict[str, Any]:
    return json.loads(Path(path).read_text())


def samples(path: str = "m.prom") -> dict[str, float]:
    """Prometheus samples without labels, and those with one as name{value}."""
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(Path(path).read_text())
        for sample in family.samples
    }


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGINT) -> None:
    """A signal arrives in a step of the next run."""
    steps = [0]

    def sleep(_: float) -> None:
        steps[0] += 1
        if steps[0] == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(fake_engine.time, "sleep", sleep)
    monkeypatch.setattr(generate, "open_model", lambda path, overrides: fake_model(step_s=1.0))


# --- figures ------------------------------------------------------------------------------------------------


def test_both_metrics_files_say_what_the_summary_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *SHOWN]) == 1
    said = capsys.readouterr().err
    found = re.search(
        r"200 rows: (\d+) ok, (\d+) failed; (\d+) prompt and (\d+) generated tokens in ([\d.]+) s, ([\d.]+) tokens/s\n"
        r".*: (\d+) steps, (\d+) preemptions, at most (\d+) of (\d+) pages held, (\d+) scrubbed;",
        said,
    )
    assert found is not None, said
    run, numbers = metrics()["run"], [float(text) for text in found.groups()]
    names = ["prompt_tokens", "generated_tokens", "seconds", "tokens_per_second", "steps", "preemptions", "peak_pages"]
    in_files = [run["rows"]["ok"], run["rows"]["failed"], *(run[name] for name in [*names, "pages", "scrubbed_pages"])]
    assert [round(value, 1) for value in in_files] == numbers
    assert (run["rows"], run["failures"]) == ({"ok": 196, "failed": 4}, {"bad_value": 4})
    exposed = samples()
    assert exposed["maxtext_paged_rows_total{ok}"] == 196
    assert exposed["maxtext_paged_generated_tokens_total"] == run["generated_tokens"] == 196 * 5
    assert exposed["maxtext_paged_run_seconds"] == run["seconds"]
    assert metrics()["state"] == "complete" and "report: r.html" in said


def test_every_row_has_its_times_and_every_token_behind_the_first_step_of_tokens_its_gap() -> None:
    main([*WORDS, *SHOWN])
    in_first_step = [5 // (1 + i % 3) for i in range(ROWS) if i not in FAULTY]  # as the fake engine hands them out
    distributions = metrics()["distributions"]
    assert {name: each["count"] for name, each in distributions.items() if name != "step_seconds"} == {
        "queue_seconds": 196,
        "ttft_seconds": 196,
        "latency_seconds": 196,
        "itl_seconds": 196 * 5 - sum(in_first_step),
    }
    assert distributions["step_seconds"]["count"] == metrics()["run"]["steps"]
    assert 0 < distributions["ttft_seconds"]["max"] <= distributions["latency_seconds"]["max"]
    assert distributions["latency_seconds"]["max"] <= metrics()["run"]["seconds"]


def test_a_file_is_in_the_format_of_its_name_unless_the_option_says_which() -> None:
    main([*WORDS, "--metrics-file", "a.txt", "--metrics-format", "prometheus", "--report", "r.html"])
    assert samples("a.txt")["maxtext_paged_file_rows"] == ROWS
    main([*WORDS, "--overwrite", "--metrics-file", "a.txt", "--metrics-file", "b.prom", "--metrics-format", "json"])
    assert metrics("a.txt")["file"] == metrics("b.prom")["file"]


def test_while_a_job_runs_its_files_are_whole_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []
    replace_whole = files.replace_whole

    def watched(path: str, content: bytes, *, sync: bool = False) -> None:
        replace_whole(path, content, sync=sync)
        if path == "m.json":
            found = metrics()
            seen.append((found["state"], sum(found["run"]["rows"].values())))

    monkeypatch.setattr(files, "replace_whole", watched)
    main([*WORDS, *SHOWN, "--metrics-interval", "0.00001"])
    assert len(seen) > 20
    assert [state for state, _ in seen] == ["running"] * (len(seen) - 1) + ["complete"]
    done = [rows for _, rows in seen]
    assert done == sorted(done) and done[-1] == ROWS and len(set(done)) > 20


def test_metrics_are_written_as_often_as_asked_and_not_more(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(files, "replace_whole", lambda path, content, *, sync=False: written.append(path))
    main([*WORDS, *SHOWN])
    assert written == ["m.json", "m.prom", "r.html"]  # a job of less than 15 seconds: at its end


# --- resuming and stopping ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_job_says_so_in_its_files_and_the_resumed_one_tells_its_rows_from_the_files(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 30, number)
        assert main([*WORDS, *SHOWN]) == code
    first = metrics()
    written = len(records(Path("out.jsonl").read_bytes()))
    assert 0 < written < ROWS
    assert first["state"] == "interrupted" and number.name in first["reason"]
    assert first["file"]["rows"]["missing"] == ROWS - written
    page = Path("r.html").read_text()
    assert f"{number.name}; {ROWS - written} of {ROWS} rows have no record yet" in page
    assert "run the same command with --resume" in page
    assert main([*WORDS, *SHOWN, "--resume"]) == 1
    second = metrics()
    assert sum(second["run"]["rows"].values()) == ROWS - written
    assert second["file"]["rows"] == {"ok": 196, "failed": 4, "missing": 0}
    assert second["file"]["earlier"] == first["run"]["rows"]
    assert second["distributions"]["ttft_seconds"]["count"] == second["run"]["rows"]["ok"]
    assert samples()["maxtext_paged_file_earlier_rows{ok}"] == first["run"]["rows"]["ok"]
    assert f"{written} of the file's 200 rows had their record before" in " ".join(Path("r.html").read_text().split())


def test_a_complete_job_that_is_resumed_leaves_its_files_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main([*WORDS, *SHOWN])
    before = {path: Path(path).read_bytes() for path in ("m.json", "m.prom", "r.html")}
    assert main([*WORDS, *SHOWN, "--resume"]) == 1
    assert {path: Path(path).read_bytes() for path in before} == before
    assert "nothing is left to do" in capsys.readouterr().err


def test_an_engine_that_fails_is_the_reason_in_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(_: float) -> None:
        raise RuntimeError("the device <b>is gone</b>")

    monkeypatch.setattr(fake_engine.time, "sleep", sleep)
    monkeypatch.setattr(generate, "open_model", lambda path, overrides: fake_model(step_s=1.0))
    assert main([*WORDS, *SHOWN]) == 3
    found = metrics()
    assert found["state"] == "failed" and "the device <b>is gone</b>" in found["reason"]
    assert "the device &lt;b&gt;is gone&lt;/b&gt;" in Path("r.html").read_text()
    assert 'state="failed"' in Path("m.prom").read_text()


# --- files that cannot be written ---------------------------------------------------------------------------


def no_room(path: str, content: bytes, *, sync: bool = False) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_template(*_: Any, **__: Any) -> bytes:
    raise RuntimeError("a fault in the page")


@pytest.mark.parametrize(
    ("fault", "why"),
    [("replace_whole", "No space left on device"), ("report_page", "RuntimeError: a fault in the page")],
)
def test_a_file_that_cannot_be_written_costs_no_record_and_no_exit_code_and_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str, why: str
) -> None:
    if fault == "replace_whole":
        monkeypatch.setattr(files, "replace_whole", no_room)
    else:
        monkeypatch.setattr("maxtext_paged.cli.watching.report_page", no_template)
    assert main([*WORDS, *SHOWN, "--metrics-interval", "0.00001"]) == 1
    assert len(records(Path("out.jsonl").read_bytes())) == ROWS
    said = capsys.readouterr().err
    assert f"the report r.html could not be written: {why}; records and exit code are not affected" in said
    assert said.count("the metrics file m.json could not be written") == (2 if fault == "replace_whole" else 0)
    assert "report: r.html" not in said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (None, 1)])
def test_no_exit_code_becomes_a_success_because_a_file_failed(
    monkeypatch: pytest.MonkeyPatch, number: int | None, code: int
) -> None:
    if number is not None:
        interrupt_at(monkeypatch, 5, number)
    monkeypatch.setattr(files, "replace_whole", no_room)
    assert main([*WORDS, *SHOWN]) == code


def test_a_disk_that_is_full_leaves_the_earlier_file_whole_and_nothing_beside_it(place: Path) -> None:
    main([*WORDS, *SHOWN])
    before = Path("r.html").read_bytes()
    plan = {"max_bytes": len(before) // 2}  # room for metrics, not for a page; no record is that long a file
    few = "".join(Path("in.jsonl").read_text().splitlines(keepends=True)[:20])
    Path("few.jsonl").write_text(few)
    words = ["generate", "c.yml", "-i", "few.jsonl", "-o", "few.out.jsonl", "--no-progress", *SHOWN]
    command = [sys.executable, str(ROOT / "tests" / "fake_command.py"), json.dumps(plan), *words]
    ended = subprocess.run(command, capture_output=True, env=environment(), check=False)
    assert ended.returncode == 1, ended.stderr.decode()
    assert b"the report r.html could not be written: File too large" in ended.stderr
    assert Path("r.html").read_bytes() == before
    assert metrics()["file"]["total"] == 20
    assert len(records(Path("few.out.jsonl").read_bytes())) == 20
    assert not list(place.glob("*.new"))


# --- paths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "path", "why"),
    [
        ("--report", "in.jsonl", "would overwrite in.jsonl"),
        ("--report", "./out.jsonl", "would overwrite out.jsonl"),
        ("--metrics-file", "out.jsonl.run.json", "would overwrite out.jsonl.run.json"),
        ("--metrics-file", "link", "would overwrite in.jsonl"),
        ("--report", "c.yml2", "exists and is none of ours"),
        ("--metrics-file", "c.yml2", "exists and is none of ours"),
        ("--report", ".", "not a regular file"),
        ("--metrics-file", "/dev/null", "not a regular file"),
        ("--report", "nowhere/r.html", "there is no directory nowhere"),
        ("--metrics-file", "-", "is a file"),
        ("--report", "", "is a file"),
    ],
)
def test_a_path_that_would_cost_something_is_refused_before_anything_runs(
    option: str, path: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("c.yml2").write_text("somebody's")
    Path("link").symlink_to("in.jsonl")
    before = Path("in.jsonl").read_bytes()
    assert main([*WORDS, option, path]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert option in said and why in said
    assert not Path("out.jsonl").exists() and Path("in.jsonl").read_bytes() == before
    assert Path("c.yml2").read_text() == "somebody's"


def test_two_files_of_one_name_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--metrics-file", "x", "--report", "./x"]) == 2
    assert "--report ./x would overwrite x" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--metrics-interval", "0"], ["--progress-interval", "soon"]])
def test_an_interval_is_a_time(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *words]) == 2
    assert "must be a number of seconds above 0" in capsys.readouterr().err


def test_files_of_an_earlier_run_are_replaced_through_links_and_readable_by_others(place: Path) -> None:
    (place / "real").mkdir()
    Path("m.json").symlink_to("real/m.json")
    before = os.umask(0o022)
    try:
        main([*WORDS, *SHOWN])
        main([*WORDS, *SHOWN, "--overwrite"])
    finally:
        os.umask(before)
    assert Path("m.json").is_symlink() and metrics("real/m.json")["run"]["rows"]["ok"] == 196
    assert {oct(Path(path).stat().st_mode & 0o777) for path in ("m.prom", "r.html", "real/m.json")} == {"0o644"}


# --- what is shown, and where -------------------------------------------------------------------------------


def test_stdout_has_records_alone_and_a_secret_is_in_no_file(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    secret = "hf_access_token=hunter2"
    words = ["generate", "c.yml", secret, "-i", "in.jsonl", "-o", "-", "--progress-interval", "0.0001", *SHOWN]
    assert main(words) == 1
    captured = capfdbinary.readouterr()
    assert len(records(captured.out)) == ROWS
    assert b"/200 rows, " in captured.err
    for path in ("m.json", "m.prom", "r.html"):
        assert "hunter2" not in Path(path).read_text()
    assert "hf_access_token=..." in Path("r.html").read_text()


def test_the_page_says_what_the_job_ran_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(fake_model(), facts=lambda: {"Machine": {"devices": "1 x abacus"}})
    monkeypatch.setattr(generate, "open_model", lambda path, overrides: model)
    main([*WORDS, *SHOWN])
    page = Path("r.html").read_text()
    for text in ("1 x abacus", "maxtext-paged generate c.yml -i in.jsonl", "float32", metrics()["job"]["version"]):
        assert text in page, text


def test_what_a_job_runs_on_is_asked_for_only_where_a_report_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts() -> dict[str, dict[str, str]]:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(generate, "open_model", lambda path, overrides: replace(fake_model(), facts=facts))
    assert main([*WORDS, *SHOWN[:4]]) == 1


def test_without_these_options_no_file_appears(place: Path) -> None:
    main(WORDS)
    assert sorted(path.name for path in place.iterdir()) == ["c.yml", "in.jsonl", "out.jsonl", "out.jsonl.run.json"]


class Terminal:
    """A stream that says it is one."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("term", "bar"), [("xterm", True), ("dumb", False)])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(
    monkeypatch: pytest.MonkeyPatch, term: str, bar: bool
) -> None:
    monkeypatch.setenv("TERM", term)
    now, shown = [0.0], Terminal()
    with JobProgress(5, shown, clock=lambda: now[0]) as progress:  # type: ignore[arg-type]
        now[0] = 61.0
        progress.show(JobCounts(total=5, ok=2, seconds=60.0))
    assert ("\x1b[" in shown.text) is bar
    assert ("maxtext-paged: 2/5 rows, " in shown.text) is not bar
    assert "ETA 0:01:30" in " ".join(shown.text.split())
