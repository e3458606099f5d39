"""A job of a real size through the command: good rows are answered as alone, bad ones by name, each once."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from maxtext_paged import OfflineEngine
from tests.cli_runs import CONTEXT, command, environment, records, tiny_model

pytestmark = [pytest.mark.maxtext, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

NUM_ROWS = 2000
NUM_ALONE = 20
OPTIONS = {"paged_tokens_per_page": 8, "paged_num_pages": 200, "paged_max_num_seqs": 16}
OPTIONS |= {"paged_max_num_batched_tokens": 64}
WORDS = ["the", "cat", "dog", "sat", "on", "a", "mat", "and", "saw", "what", "it", "was"]

FAULTS: list[tuple[bytes | dict[str, Any], str, str]] = [
    (b'{"prompt": "the cat"', "invalid_json", "not JSON"),
    ({"prompt": ["the"], "id": "type"}, "bad_value", "prompt="),
    ({"prompt": "the", "max_tokens": "4", "id": "type 2"}, "bad_value", 'max_tokens="4"'),
    ({"tokens": [5] * (CONTEXT + 1), "id": "long"}, "context_length_exceeded", f"{CONTEXT + 1} tokens"),
    ({"prompt": "the", "max_token": 4, "id": "option"}, "unknown_field", "did you mean max_tokens?"),
    ({"prompt": "the", "best_of": 4, "id": "best"}, "unsupported_field", "best_of=4"),
    ({"prompt": "the", "id": "twice"}, "duplicate_id", "ids must be unique"),
    ({"prompt": "the", "id": "twice"}, "duplicate_id", "ids must be unique"),
    ({"prompt": "", "id": "empty"}, "empty_prompt", "empty"),
    (b'{"prompt": "the \xff\xfe cat"}', "invalid_utf8", "not UTF-8"),
]
"""Twice each makes one in a hundred; the second time under other ids."""


def good_row(i: int, chance: Random) -> dict[str, Any]:
    """A row that runs: greedy or seeded, text, ids or a chat."""
    text = " ".join(chance.choices(WORDS, k=chance.randint(1, 12)))
    prompts: list[dict[str, Any]] = [
        {"prompt": text},
        {"messages": [{"role": "user", "content": text}]},
        {"tokens": tiny_model().encode(text)},
    ]
    row = {"id": f"row {i}", **prompts[i % 3], "max_tokens": chance.randint(1, 12)}
    if i % 2:
        row |= {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "seed": i}
    return row


Line = tuple[bytes | dict[str, Any], str | None, str]
"""What stands on it, and the code of its error and words of the message; None for a good one."""


def make_lines() -> list[Line]:
    """The input."""
    chance = Random(3)
    lines: list[Line] = [(good_row(i, chance), None, "") for i in range(NUM_ROWS - 2 * len(FAULTS))]
    for again in ("", " again"):
        for fault, code, said in FAULTS:
            line = fault if isinstance(fault, bytes) else {**fault, "id": fault["id"] + again}
            lines.insert(chance.randrange(len(lines)), (line, code, said))
    return lines


def run_job(lines: list[Line], place: Path) -> tuple[int, str]:
    """Exit code and stderr of the command; prints what it took."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line, _, _ in lines]
    (place / "in.jsonl").write_bytes(b"".join(line + b"\n" for line in raw))
    overrides = [f"{name}={value}" for name, value in OPTIONS.items()]
    words = command("generate", tiny_model().config, *overrides, "--no-progress")
    words += ["-i", str(place / "in.jsonl"), "-o", str(place / "out.jsonl")]
    started = time.monotonic()
    with open(place / "err", "wb") as err:
        process = subprocess.Popen(words, stderr=err, env=environment())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds, cpu_seconds = time.monotonic() - started, usage.ru_utime + usage.ru_stime
    print(f"\n{len(lines)} rows: {seconds:.1f} s, {cpu_seconds:.1f} s of processor time, ", end="")
    print(f"peak RSS {usage.ru_maxrss / 1024:.0f} MiB")
    return process.returncode, (place / "err").read_text()


def check_answers(lines: list[Line], place: Path, said_aloud: str) -> dict[int, dict[str, Any]]:
    """Every line has one record, and the right one; they are returned by their lines."""
    raw = (place / "out.jsonl").read_bytes()
    by_line = {record["line"]: record for record in records(raw)}
    assert raw.count(b"\n") == len(by_line) == len(lines)
    for number, (line, code, said) in enumerate(lines, start=1):
        record = by_line[number]
        assert record["index"] == number - 1
        if code is None:
            assert isinstance(line, dict)
            assert record["error"] is None and record["id"] == line["id"] and record["text"] is not None
            assert 1 <= len(record["token_ids"]) <= line["max_tokens"]
        else:
            assert record["error"]["code"] == code and said in record["error"]["message"], record
            assert record["status_code"] == 400 and record["text"] is None
            assert f"in.jsonl:{number}: " in said_aloud or code == "context_length_exceeded"
    return by_line


def check_alone(lines: list[Line], by_line: dict[int, dict[str, Any]]) -> None:
    """Some of the good rows give, each alone in another engine and through Python, what they gave in the file."""
    good = [(number, line) for number, (line, code, _) in enumerate(lines, start=1) if code is None]
    with OfflineEngine(tiny_model().config, overrides=OPTIONS) as engine:
        for number, line in Random(4).sample(good, NUM_ALONE):
            [alone] = engine.generate([line])
            assert alone.ok and alone.token_ids.tolist() == by_line[number]["token_ids"], line
            assert alone.text == by_line[number]["text"]


def test_each_of_two_thousand_rows_is_answered_once_the_good_as_alone_the_bad_by_name(tmp_path: Path) -> None:
    lines = make_lines()
    code, said_aloud = run_job(lines, tmp_path)
    print("\n".join(said_aloud.splitlines()[-14:]))
    assert code == 1, said_aloud
    check_alone(lines, check_answers(lines, tmp_path, said_aloud))
