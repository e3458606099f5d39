"""``maxtext-paged generate`` between pipes, on a terminal, over a pool that is too small; and terminated half way."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli_runs import CHECKS, POOL, Finished, command, driver, environment, finished, records, tiny_model

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]

SAMPLED = ["decode_sampling_strategy=composite", "decode_sampling_temperature=0.8", "decode_sampling_top_k=40"]
SAMPLED += ["decode_sampling_nucleus_p=0.9"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("piped")


@pytest.fixture(scope="module")
def piped(place: Path) -> Finished:
    """``generate -i - -o -`` with stderr on a terminal and something that prints to stdout meanwhile."""
    spoken = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
    base = {"prompt": "abc", "max_tokens": 24, "ignore_eos": True}
    rows = [
        {"id": "silent", "seed": 7, **base},
        {"id": "spoken", "seed": 7, **base, **spoken},
        {"id": "greedy", "seed": 7, **base, "temperature": 0},
        *({"id": f"filler {i}", "tokens": [i + 3] * 4, "max_tokens": 24, "ignore_eos": True} for i in range(3)),
    ]
    small = ["paged_tokens_per_page=4", "paged_num_pages=12", "paged_max_num_seqs=4", *CHECKS, *SAMPLED]
    words = ["generate", "-i", "-", tiny_model().config, *small, "--strict", "-o", "-", "max_target_length=40"]
    words += ["--metrics-file", str(place / "m.json"), "--report", str(place / "r.html")]
    terminal, end = pty.openpty()
    with subprocess.Popen(
        driver(place, [words], noisy=True),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=end,
        env=environment(COLUMNS="80", TERM="xterm"),
    ) as process:
        os.close(end)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        process.stdin.close()
        shown = read_terminal(terminal)
        out = process.stdout.read()
    os.close(terminal)
    return finished(subprocess.CompletedProcess([], process.returncode, out, shown), place)


def read_terminal(terminal: int) -> bytes:
    """Everything written to a terminal until its last writer is gone."""
    shown = b""
    while True:
        select.select([terminal], [], [])
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # Linux's end of file for terminals
            piece = b""
        if not piece:
            return shown
        shown += piece


def test_stdout_holds_records_alone_whatever_else_prints_there(piped: Finished) -> None:
    assert piped.code == 0, piped.err
    assert sorted(row["index"] for row in records(piped.out)) == list(range(6))
    assert "noise from Python" in piped.err and "noise from C" in piped.err


def test_where_a_row_is_silent_maxtexts_decode_options_apply(piped: Finished) -> None:
    rows = {row["id"]: row["token_ids"] for row in records(piped.out)}
    assert rows["silent"] == rows["spoken"]
    assert rows["silent"] != rows["greedy"]


def test_a_pool_too_small_for_all_rows_answers_all_and_reports_its_preemptions(
    piped: Finished,
) -> None:
    rows = {row["id"]: row for row in records(piped.out)}
    assert rows["greedy"]["token_ids"] == tiny_model().greedy("abc", 24)
    found = re.search(r"(\d+) preemptions, at most (\d+) of 12 pages held, (\d+) scrubbed", piped.err)
    assert found is not None
    assert int(found[1]) > 0 and int(found[2]) <= 12 and int(found[3]) > 0


def test_metrics_and_report_of_a_real_job_say_what_ran_where(piped: Finished, place: Path) -> None:
    found = json.loads((place / "m.json").read_text())
    run, rows = found["run"], records(piped.out)
    said = " ".join(piped.err.split())
    assert f"{run['steps']} steps, {run['preemptions']} preemptions, at most {run['peak_pages']} of 12 pages" in said
    assert run["generated_tokens"] == run["sampled_tokens"] == sum(row["usage"]["completion_tokens"] for row in rows)
    assert sum(run["attention_steps"].values()) == run["steps"] > 0
    assert sum(one["count"] for one in run["decode_causes"]) == sum(run["decodes"].values()) > 0
    assert run["programs"]["paged_step"] > 0
    distributions = found["distributions"]
    assert distributions["ttft_seconds"]["count"] == distributions["latency_seconds"]["count"] == 6
    assert distributions["itl_seconds"]["count"] == run["generated_tokens"] - 6
    page = (place / "r.html").read_text()
    for text in ("1 x cpu", "0.11", "KV pool", "paged_num_pages", *(one["cause"] for one in run["decode_causes"])):
        assert text in page, text


def test_a_terminal_sees_rows_rate_pages_and_preemptions(piped: Finished) -> None:
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", piped.err)
    assert re.search(r"rows \S+ [1-6]/6 \d:\d\d:\d\d", shown)
    pattern = r"0 failed, [\d.]+ tokens/s, [1-4] running, \d waiting, \d+/12 pages, [1-9]\d* preemptions"
    assert re.search(pattern, shown)


# --- interrupted ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Terminated:
    """SIGTERM after the first record, with much left to do, and two runs more.

    Attributes:
      first: how the terminated run ended. output: what it wrote.
      other: ``--resume`` with another configuration. resumed: ``--resume`` as it was. whole: the output then.
    """

    first: Finished
    output: bytes
    other: dict[str, Any]
    resumed: dict[str, Any]
    whole: bytes


@pytest.fixture(scope="module")
def terminated(tmp_path_factory: pytest.TempPathFactory) -> Terminated:
    place = tmp_path_factory.mktemp("terminated")
    rows: list[dict[str, Any]] = [{"prompt": "abc", "max_tokens": 2}]
    rows += [{"prompt": "the cat", "max_tokens": 40, "ignore_eos": True, "temperature": 1, "id": i} for i in range(60)]
    (place / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = place / "out.jsonl"
    words = ["generate", tiny_model().config, *POOL, "-i", str(place / "in.jsonl"), "-o", str(out)]
    with subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        while process.poll() is None and not (out.exists() and out.stat().st_size):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        printed, said = process.communicate()
    first = finished(subprocess.CompletedProcess([], process.returncode, printed, said))
    output = out.read_bytes()
    again = [[*words, "--resume", "max_target_length=64"], [*words, "--resume"]]
    resumed = subprocess.run(driver(place, again, capture=True), capture_output=True, env=environment(), check=False)
    report = finished(resumed, place).report
    assert report, resumed.stderr.decode()
    return Terminated(first, output, *report["commands"], out.read_bytes())


def test_sigterm_keeps_what_is_done_and_says_that_it_is_not_all(terminated: Terminated) -> None:
    ended, rows = terminated.first, records(terminated.output)
    assert ended.code == 143
    assert 1 <= len(rows) < 61
    assert all(row["error"] is None for row in rows)
    assert f"SIGTERM: the output is incomplete: stopped after {len(rows)} of 61 rows" in ended.err
    assert f"61 rows: {len(rows)} ok, 0 failed, {61 - len(rows)} not answered; " in ended.err
    assert "Traceback" not in ended.err


def test_a_resumed_job_is_refused_another_configuration_and_ends_as_one_run_would(terminated: Terminated) -> None:
    assert terminated.other["code"] == 2
    assert 'configuration max_target_length was "128", is "64"' in terminated.other["err"]
    assert terminated.resumed["code"] == 0, terminated.resumed["err"]
    assert terminated.whole.startswith(terminated.output)
    rows = records(terminated.whole)
    assert sorted(row["index"] for row in rows) == list(range(61))
    sampled = {tuple(row["token_ids"]) for row in rows if row["index"]}
    assert len(sampled) == 60  # by their place in the file, none like another
