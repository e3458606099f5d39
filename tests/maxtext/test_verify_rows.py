"""What ``maxtext-paged verify`` says of each row, over a toy model whose next token anyone can compute.

The command itself over MaxText is for test_cli_verify.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxtext_paged.cli.files import open_input
from maxtext_paged.cli.sampled_records import SampledRecords, Share
from maxtext_paged.cli.verify import Findings, Yardstick, lines, verify_rows
from maxtext_paged.dense_forward import DenseScores
from maxtext_paged.formats.sources import open_source
from maxtext_paged.intake import Intake
from tests.fake_engine import GREEDY, ByteTokenizer

PROMPTS = ["first", "second", "third"]
NUM_TOKENS, MARGIN, LOGPROB = 4, 5.0, -0.25


def following(tokens: list[int]) -> int:
    """A printable byte."""
    return 40 + sum(tokens) * 7 % 80


def scores(tokens: Any) -> DenseScores:
    """The toy's: the next token is sure, any other one lies far behind."""
    ids = [int(token) for token in tokens]
    best = np.array([following(ids[: place + 1]) for place in range(len(ids) - 1)], np.int32)
    margins = np.where(best == np.array(ids[1:]), 0, MARGIN).astype(np.float32)
    return DenseScores(best, margins, LOGPROB - margins, scale=10.0)


def answer(index: int) -> dict[str, Any]:
    tokens = list(PROMPTS[index].encode())
    for _ in range(NUM_TOKENS):
        tokens.append(following(tokens))
    new = tokens[-NUM_TOKENS:]
    return {
        "index": index, "id": f"r{index}", "error": None, "token_ids": new, "text": bytes(new).decode(),
        "finish_reason": "length", "logprobs": [LOGPROB] * NUM_TOKENS,
    }  # fmt: skip


def found_in(place: Path, *answers: dict[str, Any], **asked: Any) -> tuple[Findings, list[str]]:
    rows = [{"id": f"r{i}", "prompt": prompt, "max_tokens": NUM_TOKENS, **asked} for i, prompt in enumerate(PROMPTS)]
    (place / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "out.jsonl").write_text("".join(json.dumps(record) + "\n" for record in answers))
    records = SampledRecords(str(place / "out.jsonl"), Share.parse("100%"), 0)
    tokenizer = ByteTokenizer()
    intake = Intake(tokenizer, GREEDY, vocab_size=256, max_model_len=512)
    yardstick = Yardstick(scores, 1e-3, tokenizer, intake, {})
    with open_input(str(place / "in.jsonl")) as file:
        found = verify_rows(open_source(str(place / "in.jsonl"), file).rows(), records, yardstick)
    return found, list(lines("out.jsonl", records, found, 1e-3))


def changed(row: int, **values: Any) -> dict[str, Any]:
    return {**answer(row), **values}


def test_rows_that_follow_from_their_prompts_agree(tmp_path: Path) -> None:
    found, shown = found_in(tmp_path, *map(answer, (2, 0, 1)))
    assert found.differ == {} and (found.drawn, found.replayed, found.tokens, found.logprobs) == (3, 3, 12, 12)
    assert shown[-1] == "rows that differ beyond ties: 0" and "12 of 12 (100.000%)" in shown[1]


def test_one_other_token_is_found_where_it_stands(tmp_path: Path) -> None:
    ids = list(answer(1)["token_ids"])
    ids[2] = 33
    found, shown = found_in(tmp_path, answer(0), changed(1, token_ids=ids, text=bytes(ids).decode()))
    assert list(found.differ) == [1]
    assert (found.differ[1]["place"], found.differ[1]["token"], found.differ[1]["margin"]) == (2, 33, MARGIN)
    assert found.differ[1]["best"] == answer(1)["token_ids"][2]
    assert 'row 1 (line 2) id="r1": a token is not the likeliest: token 2 is 33' in shown[-1]


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"text": "other"}, "its text is not that of its tokens"),
        ({"id": "r2"}, "the record's id is 'r2'"),
        ({"logprobs": [LOGPROB, LOGPROB - 0.1, LOGPROB, LOGPROB]}, "1 logprobs differ, by up to 0.1"),
        ({"index": 7, "id": "r7"}, "the input has no such row"),
        ({"choices": [answer(0), answer(0)]}, "the row asks for 1 samples, the record has 2"),
        ({"token_ids": [300], "text": "x"}, "its tokens cannot be this model's"),
        ({"token_ids": [-1], "text": "x"}, "its tokens cannot be this model's"),
    ],
)
def test_other_changes_are_found(tmp_path: Path, values: dict[str, Any], what: str) -> None:
    found, _ = found_in(tmp_path, changed(0, **values), answer(1))
    [wrong] = found.differ.values()
    assert wrong["what"] == what


def test_a_sampled_row_is_compared_by_its_logprobs_or_counted_with_the_reason(tmp_path: Path) -> None:
    bare = {name: value for name, value in answer(1).items() if name != "logprobs"}
    found, shown = found_in(tmp_path, answer(0), bare, temperature=1.0)
    assert (found.replayed, found.by_logprobs, found.tokens, found.logprobs) == (1, 1, 0, 4)
    assert "not verifiable: 1 rows (sampled, and no logprobs)" in shown
