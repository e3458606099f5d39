"""What the benchmarks share: when a figure may be reported, arms as processes, peers as engines behind a pipe."""

from __future__ import annotations

import doctest
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records, traces
from benchmarks.cold_start import start_once
from benchmarks.peers import compare
from benchmarks.records import Failures, WrongPath, figure, fresh_process

ENGINE = """
from engine_loop import serve

class Engine:
    version = "fake 1"
    def __init__(self, options):
        if options.arm == "absent":
            import a_module_that_nobody_has
    def run(self, prompts, limits):
        made = [[7] * (n - self.lost) for n in limits]
        return [[0.001 * (1 + i) for i in range(len(own))] for own in made], made

def make(options):
    print("libraries print")
    engine = Engine(options)
    engine.lost = options.arm == "short"
    return engine

serve(make, "fake", ("--arm", {"default": "good"}))
"""


@pytest.mark.parametrize("module", [records, traces])
def test_examples_of_the_shared_modules_hold(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


def test_passes_that_disagree_are_not_reportable() -> None:
    assert figure([10, 10.4, 10.2]).reportable
    assert not figure([10, 10.6, 10.2]).reportable and figure([10, 10.6, 10.2], agreement=1.1).reportable
    assert not figure([10, 10]).reportable and not figure([]).reportable and not figure([0, 0, 0]).reportable
    assert figure([3, 1, 2]).median == 2 and figure([3, 1, 2]).spread == 3


def test_a_record_is_json_whatever_was_measured(tmp_path: Path) -> None:
    records.write(tmp_path / "a" / "record.json", {"figure": figure([]), "path": tmp_path, 3: (1, float("inf"))})
    written = json.loads((tmp_path / "a" / "record.json").read_text())
    assert written["figure"]["median"] is None and written["3"] == [1, None] and written["path"] == str(tmp_path)
    environment = records.environment(5)
    assert environment["seed"] == 5 and environment["cores"] >= 1 and "numpy" in environment["versions"]
    assert records.peak_memory_mib() >= records.memory_mib() > 1


def test_an_arm_that_fails_in_its_process_is_an_error_and_not_a_figure() -> None:
    with pytest.raises(WrongPath, match="left with status 2"):
        fresh_process("doctest", ["no-such-file"])
    failures = Failures("a program")
    assert failures.status() == 0
    failures.add("why")
    assert failures.status() == 1


def test_the_trace_is_the_one_that_peers_were_measured_on() -> None:
    trace = traces.read_trace(traces.DEFAULT_TRACE)
    assert (len(trace), sum(len(one.prompt) for one in trace), sum(one.max_tokens for one in trace)) == (32, 5194, 2413)
    assert traces.decode_rate([[1.0, 2.0, 3.0], [2.0, 4.0]]) == pytest.approx(1.0)
    assert [len(prompt) for prompt in traces.probe_prompts(trace[:1], 3, 500)] == [500] * 3


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a comparison whose engines are made here, in this Python."""
    for name in ("engine_loop.py",):
        (tmp_path / name).write_text((Path(compare.__file__).parent / name).read_text())
    (tmp_path / "engine_fake.py").write_text(ENGINE)
    monkeypatch.setattr(compare, "HERE", tmp_path)
    monkeypatch.setattr(compare.signal, "signal", lambda *_: None)  # this process's own handlers stay
    for name in ("paged", "vllm-f32", "short", "absent"):
        kind = {"paged": "good", "vllm-f32": "good"}.get(name, name)
        spec = compare.ArmSpec(None, "engine_fake.py", None, ("--arm", kind))
        monkeypatch.setitem(compare.ARMS, name, spec)
    (tmp_path / "config.yml").touch()
    root = str(tmp_path / "nothing")
    return [str(tmp_path / "config.yml"), "--no-wait", "--root", root, "--json", str(tmp_path / "record.json")]


def test_peers_are_compared_in_one_run_and_a_missing_one_is_a_line(
    peers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([*peers, "--arms", "paged,openvino-f32,absent,vllm-f32", "--requests", "4"]) == 0
    out = capsys.readouterr().out
    assert "openvino-f32 is not installed (no openvino/bin/python): sh benchmarks/peers/install.sh openvino" in out
    assert "absent is not installed (No module named 'a_module_that_nobody_has')" in out
    record = json.loads((tmp_path / "record.json").read_text())
    assert [(one["arm"], one["round"]) for one in record["rounds"]] == [
        (arm, number) for number in range(3) for arm in ("paged", "vllm-f32")
    ]
    figures = record["arms"]["vllm-f32"]["figures"]
    assert {"trace_tokens_per_second", "trace_ttft_p50", "prefill_tokens_per_second"} <= set(figures)
    assert all(len(one["passes"]) == 3 for one in figures.values())
    assert [name for name in figures if name.startswith("decode")] == [
        f"decode_b{n}_tokens_per_second" for n in (1, 4, 16)
    ]


def test_a_peer_that_makes_other_tokens_than_asked_fails_the_run(
    peers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        compare.main([*peers, "--arms", "paged,short", "--requests", "2", "--rounds", "1", "--tests", "prefill"]) == 1
    )
    assert "FAILED: short made [3, 3] tokens of [4, 4]" in capsys.readouterr().err


def test_cold_start_times_the_first_record_of_a_command(tmp_path: Path) -> None:
    program = (
        "import sys, time; print('a line', file=sys.stderr, flush=True); sys.stdin.read(); time.sleep(0.2); print({})"
    )
    good = repr(json.dumps({"token_ids": [5]}))
    start = start_once([sys.executable, "-c", program.format(good)], {"prompt": "x"}, {})
    assert 0.2 < start.first_token <= start.exit and start.spans[0][1] == "a line"
    with pytest.raises(WrongPath, match="status 0"):
        start_once([sys.executable, "-c", program.format(repr("{}"))], {"prompt": "x"}, {})
