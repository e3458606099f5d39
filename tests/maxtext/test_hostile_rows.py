"""Rows that attack: names of files, controls of terminals, sizes and depths. Each is data, or one bad row."""

from __future__ import annotations

import builtins
import io
import json
import re
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from maxtext_paged.cli import say
from maxtext_paged.formats import BadRow, InputRow, RowError, dump_line, parse_row, record
from maxtext_paged.formats.openai_batch import BatchForm
from maxtext_paged.formats.own import shown
from maxtext_paged.intake import IdCheck, Intake
from maxtext_paged.printable import MAX_MESSAGE_CHARACTERS, printable
from maxtext_paged.prompts import row_of_prompt
from maxtext_paged.row_limits import CHARACTERS_PER_TOKEN, MAX_DEPTH, MAX_MESSAGES, MAX_STOP_TOKEN_IDS
from tests.fake_engine import ByteTokenizer, fake_model

ROOT = Path(__file__).parents[2]
OBEYED = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
NASTY = "\x00\x07\x08\x1b[2J\x1b]0;title\x07\r\n\x7f\x9b31m\x85\u2028\u2029\u202e\u2066"


def parse(row: Any, form: Any = None) -> InputRow | BadRow:
    raw = json.dumps(row).encode()
    return parse_row(raw, index=0, line=1) if form is None else parse_row(raw, index=0, line=1, form=form)


def error_of(row: InputRow | BadRow) -> RowError:
    assert isinstance(row, BadRow), row
    return row.error


# --- nothing a row says is opened, run or obeyed --------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "C:\\x", "file:///etc/passwd", "|id", "$(id)", "-o"])
def test_a_name_of_a_file_is_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    real_open = builtins.open
    monkeypatch.setattr(builtins, "open", lambda *args, **more: opened.append(args) or real_open(*args, **more))
    monkeypatch.setattr(io, "open", builtins.open)
    body = {"model": name, "prompt": name, "max_tokens": 1}
    request = parse({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}, BatchForm())
    own = parse({"id": name, "prompt": name})
    intake = fake_model().intake
    for row in (request, own, row_of_prompt(name, None, 0), row_of_prompt({"prompt": name, "id": name}, None, 0)):
        assert isinstance(row, InputRow) and row.prompt == name
        ran = intake.row(row)
        assert not isinstance(ran, BadRow)
        assert ran.tokens.tolist() == list(name.encode())
    assert isinstance(own, InputRow)
    assert record(own, text="", finish_reason="length")["id"] == name
    assert opened == []


@pytest.mark.parametrize("letter", sorted(set(NASTY) - {"\u2028", "\u2029", "\u202e", "\u2066", *"[2J]0;title31m"}))
def test_an_id_with_a_control_character_is_refused_and_written_out(letter: str) -> None:
    error = error_of(parse({"id": f"a{letter}b", "prompt": "x"}))
    assert "control characters" in error.message
    assert not OBEYED.search(error.message)


PLACES: list[dict[str, Any]] = [
    {NASTY: 1, "prompt": "x"},
    {"prompt": "x", "temperature": NASTY},
    {"prompt": "x", "stop_token_ids": [NASTY]},
    {"prompt": "x", "id": [NASTY]},
    {"messages": [{"role": NASTY, "content": {NASTY: NASTY}}]},
    {"messages": NASTY},
    {"prompt": "x", "best_of": NASTY},
    {"prompt": "x", "custom_id": NASTY},
]


@pytest.mark.parametrize("row", PLACES)
def test_no_message_has_a_letter_that_a_terminal_obeys(row: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    for error in (error_of(parse(row)), error_of(row_of_prompt(row, None, 0))):
        assert not OBEYED.search(error.message)
        say(f"{NASTY}input.jsonl:1: {error.message}{NASTY}")  # a file may have any name
        assert not OBEYED.search(capsys.readouterr().err.rstrip("\n"))


@given(st.text(st.characters(codec=None), max_size=80))
@example(NASTY)
def test_what_is_said_is_one_bounded_line_that_nothing_obeys(text: str) -> None:
    for shown_text in (RowError(text, "x").message, printable(text, 40)):
        assert not OBEYED.search(shown_text)
    assert len(RowError(text * 100, "x").message) <= MAX_MESSAGE_CHARACTERS
    assert printable("plain ä 漢 🎉") == "plain ä 漢 🎉"


def test_messages_do_not_grow_with_what_they_quote() -> None:
    for row in (
        {"x" * 10**6: 1, "prompt": "a"},
        {"prompt": "a", "id": "x" * 10**6},
        {"prompt": "a", "seed": "x" * 10**6},
        {"prompt": "a", "logit_bias": {str(i): "x" for i in range(10**4)}},
        {"messages": [{"role": "x" * 10**6}]},
    ):
        assert len(error_of(parse(row)).message) <= MAX_MESSAGE_CHARACTERS
    ids = IdCheck()
    for line in (1, 2):
        ids.add("x" * 512, line)
    repeated = ids.repeated().error("x" * 512, 1)
    assert repeated is not None and len(repeated.message) <= MAX_MESSAGE_CHARACTERS


def test_a_stranger_s_exception_is_quoted_short_and_harmless() -> None:
    class Tokenizer(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            raise RuntimeError(NASTY + "y" * 10**6)

    intake = Intake(Tokenizer(), fake_model().intake.defaults, vocab_size=256, max_model_len=512)
    row = parse({"prompt": "x"})
    error = error_of(intake.row(row))  # type: ignore[arg-type]
    assert len(error.message) <= MAX_MESSAGE_CHARACTERS and not OBEYED.search(error.message)
    assert error.status_code == 500


def test_a_record_is_one_line_without_controls_whatever_was_generated() -> None:
    row = parse({"prompt": "x"})
    assert isinstance(row, InputRow)
    raw = dump_line(record(row, text=NASTY, finish_reason="length"))
    assert raw.count(b"\n") == 1 and raw.endswith(b"\n")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", raw.decode())
    assert json.loads(raw)["text"] == NASTY


def test_completions_are_shown_without_controls(tmp_path: Path) -> None:
    prompts, completions = tmp_path / "p.jsonl", tmp_path / "c.jsonl"
    prompts.write_text(json.dumps({"prompt": NASTY}) + "\n")
    row = parse({"prompt": NASTY})
    assert isinstance(row, InputRow)
    completions.write_bytes(dump_line(record(row, text=NASTY, finish_reason="length")))
    script = [sys.executable, str(ROOT / "scripts" / "show-completions.py"), str(prompts), str(completions)]
    done = subprocess.run(script, capture_output=True, text=True, check=True, encoding="utf-8")
    assert not OBEYED.search(done.stdout.replace("\n", ""))


# --- sizes and depths -----------------------------------------------------------------------------------------


def nested(depth: int, opening: str = "[", closing: str = "]") -> bytes:
    return (opening * depth + "1" + closing * depth).encode()


@pytest.mark.parametrize("depth", [MAX_DEPTH, 500, 900, 990, 1000, 5000, 200_000])
@pytest.mark.parametrize("key", ["prompt", "temperature", "x", "messages", "id", "metadata"])
def test_json_that_nests_too_deeply_is_one_bad_row(depth: int, key: str) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        raw = b'{"%s": %s}' % (key.encode(), nested(depth, opening, closing))
        assert error_of(parse_row(raw, index=0, line=1)).code == "invalid_json"
        body = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x","%s":%s}}'
        raw = body % (key.encode(), nested(depth, opening, closing))
        assert error_of(parse_row(raw, index=0, line=1, form=BatchForm())).code == "invalid_json"


def test_as_deep_as_the_bound_is_read_and_many_brackets_are_no_depth() -> None:
    assert error_of(parse_row(nested(MAX_DEPTH), index=0, line=1)).code == "not_an_object"
    wide = {"messages": [{"role": "user", "content": "[" * 100}] * 100}
    assert isinstance(parse(wide), InputRow)


@pytest.mark.parametrize("key", ["max_tokens", "min_tokens", "top_k", "seed", "n"])
@pytest.mark.parametrize("value", [2**31, 2**63, 10**30, 10**4000])
def test_numbers_beyond_every_machine_are_taken_or_refused_and_never_wrap(key: str, value: int) -> None:
    row = parse({"tokens": [5], key: value, **({"max_tokens": value} if key == "min_tokens" else {})})
    made = fake_model().intake.row(row)
    if isinstance(made, BadRow):
        assert len(made.error.message) < MAX_MESSAGE_CHARACTERS
    else:
        assert getattr(made, key, value) == value
        assert 0 <= made.sampling.seed < 2**32 and 0 <= made.sampling.top_k <= 256


def test_more_messages_or_stop_ids_than_anyone_needs_are_refused() -> None:
    message = {"role": "user", "content": "x"}
    assert isinstance(parse({"messages": [message] * MAX_MESSAGES}), InputRow)
    error = error_of(parse({"messages": [message] * (MAX_MESSAGES + 1)}))
    assert (error.code, error.message) == ("too_long", "messages has 4097 messages: at most 4096 are read")
    assert isinstance(parse({"prompt": "x", "stop_token_ids": [1] * MAX_STOP_TOKEN_IDS}), InputRow)
    assert error_of(parse({"prompt": "x", "stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)})).code == "too_long"


def test_a_text_that_can_fit_no_context_is_not_encoded() -> None:
    class Tokenizer(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            raise AssertionError("encoded")

    intake = Intake(Tokenizer(), fake_model().intake.defaults, vocab_size=256, max_model_len=4)
    text = "x" * (4 * CHARACTERS_PER_TOKEN + 1)
    for row in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
        error = error_of(intake.row(parse(row)))  # type: ignore[arg-type]
        assert error.code == "context_length_exceeded" and "4097 characters" in error.message


def test_a_circular_object_of_a_python_caller_is_refused_by_what_it_is() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert shown(loop) == "a list"
    assert error_of(row_of_prompt({"prompt": "x", "temperature": loop}, None, 0)).message.startswith(
        "temperature=a list"
    )


def test_a_line_without_an_end_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from maxtext_paged.formats import lines

    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 2**16)
    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"prompt": "' + b"x" * 2**24 + b'"}\n{"prompt": "ok"}\n')
    tracemalloc.start()
    with open(path, "rb") as file:
        bad, good = lines.read_rows(lines.bounded_lines(file, 2**16))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error_of(bad).code == "too_long" and isinstance(good, InputRow) and good.line == 2
    assert peak < 2**20


def test_many_brackets_in_one_row_cost_little_time() -> None:
    row = {"prompt": "x", "temperature": [[[]] for _ in range(100_000)]}
    started = time.monotonic()
    assert error_of(parse(row)).code == "bad_value"
    assert time.monotonic() - started < 5
