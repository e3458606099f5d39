"""``maxtext-paged generate`` over files of every form, with a stand-in for the engine (tests/fake_engine.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from maxtext_paged.__main__ import main
from maxtext_paged.cli import CommandError, checking, generate, output
from maxtext_paged.formats import InputRow, parquet
from maxtext_paged.formats.sources import open_source
from tests.cli_runs import ROOT, environment, records
from tests.fake_engine import completion, fake_model

WORDS = ["generate", "c.yml", "--no-progress", "-i"]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a configuration, and a model that answers at once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yml").write_text("base_config: base.yml\n")
    monkeypatch.setattr(generate, "open_model", lambda path, overrides: fake_model())
    return tmp_path


def write_lines(path: str, *rows: Any) -> None:
    raw = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    Path(path).write_bytes(b"\n".join(raw) + b"\n")


def request(custom_id: Any, url: str = TEXT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}


def run_command(words: list[str], **more: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, str(ROOT / "tests" / "fake_command.py"), "{}", *words]
    return subprocess.run(command, capture_output=True, env=environment(), check=False, **more)


# --- OpenAI's batch form -------------------------------------------------------------------------------------

MIXED = [
    request("text", prompt="row", max_tokens=4),
    b"",
    request("chat", CHAT, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=3),
    b"[1]",
    request("twin", prompt="a"),
    request("cold", prompt="x", temperature=-1),
    request("twin", prompt="b"),
    request("embed", "/v1/embeddings", input="x"),
    {"prompt": "one of ours"},
    request("long", prompt="x" * 600),
    b'{"custom_id": "broken", ',
    request("two", prompt="row", n=1, max_tokens=2),
]


def test_a_batch_is_answered_in_its_own_form_with_one_line_for_every_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_lines("in.jsonl", *MIXED)
    assert main([*WORDS, "in.jsonl", "-o", "out.jsonl"]) == 1
    found = {record["line"]: record for record in records(Path("out.jsonl").read_bytes())}
    assert sorted(found) == [1, *range(3, 13)]
    assert [found[line]["index"] for line in sorted(found)] == list(range(11))
    assert {line: record["response"]["status_code"] for line, record in found.items()} == {
        line: 200 if line in (1, 3, 12) else 400 for line in found
    }
    codes = {line: record["error"]["code"] for line, record in found.items() if record["error"]}
    assert codes == {
        4: "not_an_object",
        5: "duplicate_id",
        6: "bad_value",
        7: "duplicate_id",
        8: "unsupported_url",
        9: "unknown_field",
        10: "context_length_exceeded",
        11: "invalid_json",
    }
    for record in found.values():
        assert (record["response"]["body"] is None) == (record["error"] is not None)
    assert found[1]["custom_id"] == "text" and found[5]["custom_id"] == "twin" and found[4]["custom_id"] is None
    text = found[1]["response"]["body"]["choices"][0]["text"]
    assert text == bytes(completion(list(b"row"), 2**31, 4)).decode("latin-1")
    message = found[3]["response"]["body"]["choices"][0]["message"]
    assert message["role"] == "assistant" and len(message["content"]) == 3
    assert len({record["id"] for record in found.values()}) == 11
    write_lines("other.jsonl", *MIXED[:1])
    assert main([*WORDS, "other.jsonl", "-o", "other_out.jsonl"]) == 0
    [other] = records(Path("other_out.jsonl").read_bytes())
    assert other["id"] not in {record["id"] for record in found.values()}
    said = capsys.readouterr().err
    assert "in.jsonl has rows of the OpenAI batch form" in said


def test_bad_lines_are_listed_before_anything_runs_and_strict_stops_there(capsys: pytest.CaptureFixture[str]) -> None:
    write_lines("in.jsonl", *MIXED)
    assert main([*WORDS, "in.jsonl", "-o", "out.jsonl"]) == 1
    said = capsys.readouterr().err
    listed = [int(line.split(":")[2]) for line in said.splitlines() if line.startswith("maxtext-paged: in.jsonl:")]
    assert listed == [4, 5, 6, 7, 8, 9, 11]  # what needs no model to be seen
    assert "7 of 11 rows cannot run" in said and "lines 5 and 7" in said
    assert main([*WORDS, "in.jsonl", "-o", "strict.jsonl", "--strict"]) == 2
    said = capsys.readouterr().err
    listed = [int(line.split(":")[2]) for line in said.splitlines() if line.startswith("maxtext-paged: in.jsonl:")]
    assert listed == [4, 5, 6, 7, 8, 9, 10, 11]
    assert "--strict: 8 of 11 rows are unusable" in said
    assert not Path("strict.jsonl").exists() and not Path("strict.jsonl.run.json").exists()


def test_ids_that_repeat_are_listed_also_where_nothing_else_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    write_lines("in.jsonl", {"id": 1, "prompt": "x"}, {"id": 1, "prompt": "y"}, {"id": "1", "prompt": "z"})
    assert main([*WORDS, "in.jsonl", "-o", "out.jsonl"]) == 1
    said = capsys.readouterr().err
    assert "in.jsonl:1: id=1 stands on lines 1 and 2" in said and "in.jsonl:2: " in said and ":3: " not in said


def test_very_many_bad_lines_are_listed_whole_only_where_they_stop_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checking, "MAX_LISTED", 3)
    write_lines("in.jsonl", {"prompt": "x"}, *([1],) * 5)
    assert main([*WORDS, "in.jsonl", "-o", "out.jsonl"]) == 1
    said = capsys.readouterr().err
    assert said.count("in.jsonl:") == 3 and "5 of 6 rows cannot run, 2 of them not listed" in said
    assert main([*WORDS, "in.jsonl", "-o", "strict.jsonl", "--strict"]) == 2
    assert capsys.readouterr().err.count("in.jsonl:") == 5


@pytest.mark.slow
def test_a_batch_goes_through_pipes(place: Path) -> None:
    write_lines("in.jsonl", *MIXED)
    ended = run_command([*WORDS, "-", "-o", "-"], input=Path("in.jsonl").read_bytes())
    assert ended.returncode == 1, ended.stderr
    assert len(records(ended.stdout)) == 11
    write_parquet("in.parquet", [request("a", prompt="x")])
    ended = run_command([*WORDS, "-", "-o", "-"], input=Path("in.parquet").read_bytes())
    assert [record["custom_id"] for record in records(ended.stdout)] == ["a"], ended.stderr
    assert sorted(path.name for path in place.iterdir()) == ["c.yml", "in.jsonl", "in.parquet"]  # nothing of a pipe


def test_a_batch_is_resumed_by_its_places(capsys: pytest.CaptureFixture[str]) -> None:
    write_lines("in.jsonl", *MIXED)
    assert main([*WORDS, "in.jsonl", "-o", "out.jsonl"]) == 1
    whole = Path("out.jsonl").read_bytes()
    for kept in range(11):
        before = b"".join(whole.splitlines(keepends=True)[:kept])
        Path("out.jsonl").write_bytes(before + b'{"id": "batch_r')
        assert main([*WORDS, "in.jsonl", "-o", "out.jsonl", "--resume"]) == 1
        assert Path("out.jsonl").read_bytes().startswith(before)
        found = records(Path("out.jsonl").read_bytes())
        assert sorted(record["id"] for record in found) == sorted(record["id"] for record in records(whole))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"prompt": "x"}\n'.encode("utf-16"), "in.jsonl is UTF-16"),
        ('{"prompt": "x"}\n'.encode("utf-32"), "in.jsonl is UTF-32"),
        (b"\x1f\x8b\x08\x00", "in.jsonl is compressed with gzip"),
        (b"PAR1 and nothing else", "in.jsonl: not a readable Parquet file"),
    ],
)
def test_a_file_in_another_encoding_is_refused_as_a_whole(
    capsys: pytest.CaptureFixture[str], content: bytes, says: str
) -> None:
    Path("in.jsonl").write_bytes(content)
    assert main([*WORDS, "in.jsonl", "-o", "out.jsonl"]) == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
    assert not Path("out.jsonl").exists()


def test_a_latin_1_line_fails_alone() -> None:
    write_lines("in.jsonl", {"prompt": "x"}, b'{"prompt": "caf\xe9"}', {"prompt": "y"})
    assert main([*WORDS, "in.jsonl", "-o", "out.jsonl"]) == 1
    found = records(Path("out.jsonl").read_bytes())
    assert {record["index"]: record["status_code"] for record in found} == {0: 200, 1: 400, 2: 200}


# --- Parquet -------------------------------------------------------------------------------------------------

ROWS = [
    {"id": i, "prompt": f"row {i}", "tokens": None, "max_tokens": 3, "temperature": None, "seed": i} for i in range(9)
]
ROWS[4] |= {"prompt": None, "tokens": [1, 2]}
ROWS[5] |= {"temperature": float("nan")}


def write_parquet(path: str, rows: list[Any] = ROWS, **more: Any) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **more)


def read_parquet(path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return found


def as_json_lines(rows: list[Any]) -> list[Any]:
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def test_parquet_says_what_json_lines_say_in_and_out(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_BATCH_ROWS", 4)
    monkeypatch.setattr(parquet, "_GROUP_BYTES", 1)
    write_parquet("in.parquet", row_group_size=2)
    write_lines("in.jsonl", *as_json_lines([*ROWS[:5], {**ROWS[5], "temperature": -1}, *ROWS[6:]]))
    assert main([*WORDS, "in.parquet", "-o", "out.parquet"]) == 1
    assert main([*WORDS, "in.jsonl", "-o", "out.jsonl"]) == 1
    ours, expected = read_parquet("out.parquet"), records(Path("out.jsonl").read_bytes())
    [nan] = [record["error"]["message"] for record in ours if record["error"] is not None]
    assert nan.startswith("temperature=NaN: ")
    for record in (*ours, *expected):
        if record["error"] is not None:
            assert record["index"] == 5
            record["error"]["message"] = ""
    assert ours == expected
    assert sorted(path.name for path in place.iterdir() if "parquet" in path.name) == [
        "in.parquet",
        "out.parquet",
        "out.parquet.run.json",
    ]


def test_a_batch_in_parquet_keeps_its_form_and_its_bodies_as_json() -> None:
    rows = [
        request(f"r{i}", CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=i or None) for i in range(3)
    ]
    rows[1]["method"] = "GET"
    write_parquet("in.parquet", rows)
    assert main([*WORDS, "in.parquet", "-o", "out.parquet"]) == 1
    found = {record["custom_id"]: record for record in read_parquet("out.parquet")}
    assert set(found) == {"r0", "r1", "r2"}
    body = json.loads(found["r2"]["response"]["body"])
    assert len(body["choices"][0]["message"]["content"]) == 2
    assert found["r1"]["error"]["code"] == "bad_value" and found["r1"]["response"]["body"] is None


def test_ids_of_two_kinds_become_text_and_samples_a_column() -> None:
    write_lines("in.jsonl", {"id": 1, "prompt": "a"}, {"id": "b", "prompt": "a"}, {"prompt": "a"})
    assert main([*WORDS, "in.jsonl", "-o", "out.parquet"]) == 0
    found = {record["index"]: record for record in read_parquet("out.parquet")}
    assert [found[index]["id"] for index in range(3)] == ["1", "b", None]
    assert "choices" not in found[0]
    lines = [b'{"id": null, "index": 0, "choices": [{"index": 0, "text": "a", "token_ids": [1], "error": null}]}']
    parquet.write_records("choices.parquet", lambda: lines)
    assert read_parquet("choices.parquet")[0]["choices"][0]["token_ids"] == [1]


def test_scores_are_columns_where_some_row_asks_for_them() -> None:
    ask = {"max_tokens": 2, "logprobs": True, "prompt_logprobs": True}
    write_lines("in.jsonl", {"prompt": "ab", **ask}, {"prompt": "ab", "max_tokens": 2}, {"prompt": "ab", "top_k": -1})
    assert main([*WORDS, "in.jsonl", "-o", "out.parquet"]) == 1
    asked, silent, bad = sorted(read_parquet("out.parquet"), key=lambda record: record["index"])
    assert asked["logprobs"] == [0.0, 0.0] and asked["prompt_token_ids"] == [97, 98]
    for record in (silent, bad):
        assert [record[name] for name in ("logprobs", "prompt_token_ids", "prompt_logprobs")] == [None] * 3
    best = [[{"id": 5, "logprob": -0.5}], None]
    lines = [json.dumps({"id": 1, "index": 0, "logprobs": [None, -1.5], "top_logprobs": best}).encode()]
    parquet.write_records("scores.parquet", lambda: lines)
    [record] = read_parquet("scores.parquet")
    assert (record["logprobs"], record["top_logprobs"]) == ([None, -1.5], best)


def test_parquet_that_nothing_reads_is_refused_by_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    write_parquet("in.parquet", [{"prompt": "x", "label": 1, "notes": "y"}])
    assert main([*WORDS, "in.parquet", "-o", "out.jsonl"]) == 2
    assert "in.parquet: nothing reads the columns label, notes" in capsys.readouterr().err


def test_a_field_that_only_other_rows_have_is_not_there() -> None:
    named = [{"role": "user", "content": "a", "name": "x"}]
    write_parquet("in.parquet", [{"messages": named}, {"messages": [{"role": "user", "content": "b"}]}])
    with open("in.parquet", "rb") as file:
        rows = list(open_source("in.parquet", file).rows())
    assert [row.messages for row in rows if isinstance(row, InputRow)] == [named, [{"role": "user", "content": "b"}]]


def test_values_that_json_does_not_have_fail_their_row_alone() -> None:
    write_parquet("in.parquet", [{"prompt": b"bytes"}])
    assert main([*WORDS, "in.parquet", "-o", "out.jsonl"]) == 1
    [record] = records(Path("out.jsonl").read_bytes())
    assert record["error"]["message"].startswith("prompt=") and record["error"]["code"] == "bad_value"


def test_without_pyarrow_only_parquet_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet("in.parquet")
    write_lines("in.jsonl", {"prompt": "x"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for words in (["in.parquet", "-o", "out.jsonl"], ["in.jsonl", "-o", "out.parquet"]):
        assert main([*WORDS, *words]) == 2
        assert "pip install 'maxtext-paged[parquet]'" in capsys.readouterr().err
    assert main([*WORDS, "in.jsonl", "-o", "out.jsonl"]) == 0


def test_an_unfinished_parquet_file_is_json_lines_and_is_resumed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines("in.jsonl", *as_json_lines(ROWS[:5]))
    words = [*WORDS, "in.jsonl", "-o", "out.parquet"]
    with monkeypatch.context() as patched:
        patched.setattr(output, "write_records", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        assert main(words) == 3
    assert "the output failed after its last row: No space left; --resume ends it" in capsys.readouterr().err
    unfinished = Path("out.parquet.unfinished.jsonl")
    assert len(records(unfinished.read_bytes())) == 5 and not Path("out.parquet").exists()
    unfinished.write_bytes(unfinished.read_bytes()[:700])
    kept = unfinished.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(generate, "open_model", None)  # refused before it is wanted
        assert main(words) == 2
    assert "out.parquet.unfinished.jsonl exists" in capsys.readouterr().err
    assert unfinished.read_bytes() == kept
    assert main([*words, "--resume"]) == 0
    assert sorted(record["index"] for record in read_parquet("out.parquet")) == list(range(5))
    assert not unfinished.exists()
    before = os.stat("out.parquet")
    assert main([*words, "--resume"]) == 0
    assert os.stat("out.parquet").st_mtime_ns == before.st_mtime_ns
    assert main(words) == 2
    assert main([*words, "--overwrite"]) == 0
    monkeypatch.setattr(generate, "open_model", lambda path, overrides: fake_model(temperature=0.5))
    assert main([*words, "--resume"]) == 2
    assert "sampling temperature" in capsys.readouterr().err


def test_a_parquet_file_that_appeared_meanwhile_is_not_replaced() -> None:
    with output.claim_output("out.parquet") as claimed:
        Path("out.parquet").write_bytes(b"somebody else's")
        with pytest.raises(CommandError, match=r"out\.parquet exists"):
            claimed.begin({})
    assert Path("out.parquet").read_bytes() == b"somebody else's"
    assert sorted(path.name for path in Path().iterdir()) == ["c.yml", "out.parquet"]
