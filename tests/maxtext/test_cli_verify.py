"""``maxtext-paged verify``: an output that this package wrote agrees with MaxText's dense forward, a changed one does
not."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from maxtext_paged.cli.sampled_records import SampledRecords
from maxtext_paged.cli.verify import Findings, lines
from maxtext_paged.dense_forward import DenseForward
from maxtext_paged.replay import judge
from tests.cli_runs import POOL, driver, environment, finished, records, tiny_model
from tests.parity import log_softmax
from tests.tiny_models import dense_model, make_config, make_mesh

pytestmark = pytest.mark.maxtext

PROMPT = "the cat and the dog"
ROWS: list[dict[str, Any]] = [
    {"id": "greedy", "prompt": PROMPT, "max_tokens": 10},
    {"id": "greedy, scored", "prompt": "the dog", "max_tokens": 6, "logprobs": True, "prompt_logprobs": True},
    {"id": "echo", "prompt": "the cat", "max_tokens": 5, "echo": True, "logprobs": True},
    {"id": "two", "prompt": "abc", "max_tokens": 4, "n": 2},
    {"id": "sampled", "prompt": "abc", "max_tokens": 6, "temperature": 1},
    {"id": "sampled, scored", "prompt": "abc", "max_tokens": 6, "temperature": 1, "logprobs": True},
    {"id": "penalties", "prompt": PROMPT, "max_tokens": 6, "repetition_penalty": 1.5},
    {"id": "bias", "prompt": PROMPT, "max_tokens": 4, "logit_bias": {"7": 50}},
    {"id": "min", "prompt": PROMPT, "max_tokens": 4, "min_tokens": 2},
    {"id": "none", "prompt": "abc", "max_tokens": 0},
    {"id": "failed", "prompt": "abc", "max_tokens": -1},
    {"id": "last", "prompt": "a cat", "max_tokens": 8},
    {"id": "next", "prompt": "the dog and a cat", "max_tokens": 8},
]


def changed(place: Path) -> Path:
    """A copy of the output in which every change was made, each to rows of its own."""
    found = {record["id"]: record for record in records((place / "out.jsonl").read_bytes())}
    for change in CHANGES:
        change(found)
    path = place / "changed.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in found.values()))
    shutil.copy(place / "out.jsonl.run.json", f"{path}.run.json")
    return path


def another_token(found: dict[str, dict[str, Any]]) -> None:
    """One token of one row, and the text with it."""
    row = found["greedy"]
    row["token_ids"][4] = row["token_ids"][4] % 50 + 20
    row["text"] = tiny_model().tokenizer.decode(row["token_ids"])


def another_text(found: dict[str, dict[str, Any]]) -> None:
    found["sampled"]["text"] += "x"


def another_sampled_token(found: dict[str, dict[str, Any]]) -> None:
    row = found["sampled, scored"]
    row["token_ids"][2] = row["token_ids"][2] % 50 + 20
    row["text"] = tiny_model().tokenizer.decode(row["token_ids"])


def another_prompt_logprob(found: dict[str, dict[str, Any]]) -> None:
    found["greedy, scored"]["prompt_logprobs"][1] -= 0.01


def other_places(found: dict[str, dict[str, Any]]) -> None:
    """Two answers exchanged, as a careless join would."""
    one, two = found["next"], found["last"]
    for key in ("text", "token_ids", "finish_reason", "usage"):
        one[key], two[key] = two[key], one[key]


CHANGES = [another_token, another_text, another_sampled_token, another_prompt_logprob, other_places]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A job, a copy of its output with one thing changed in each of some rows, and what ``verify`` says of both."""
    place = tmp_path_factory.mktemp("verify")
    (place / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = ["generate", tiny_model().config, "-i", "in.jsonl", "-o", "out.jsonl", *POOL, "--no-progress"]
    ended = finished(
        subprocess.run(driver(place, [words]), capture_output=True, cwd=place, env=environment(), check=False), place
    )
    assert ended.code == 1, ended.err  # one row failed
    (place / "other.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    all_rows = ["--sample", "100%"]
    path = str(changed(place))
    commands = {
        "whole": ["verify", str(place / "out.jsonl"), *all_rows, "--json"],
        "other input": ["verify", str(place / "out.jsonl"), *all_rows, "-i", str(place / "other.jsonl")],
        "changed": ["verify", path, *all_rows, "--json"],
    }
    (place / "elsewhere").mkdir()
    process = subprocess.run(
        driver(place, list(commands.values()), capture=True),
        capture_output=True,
        cwd=place / "elsewhere",
        env=environment(),
        check=False,
    )
    report = finished(process, place).report
    assert report, process.stderr.decode()
    return dict(zip(commands, report["commands"], strict=True))


def shown(job: dict[str, Any]) -> list[str]:
    """What the command prints of the changed file without ``--json``: the same findings as lines."""
    content = json.loads(job["changed"]["out"])
    counts = SimpleNamespace(num_records=content.pop("records"), num_failed=content.pop("failed"))
    error = content.pop("logit_error")
    content["differ"] = {wrong.pop("index"): wrong for wrong in content["differ"]}
    for name in ("worst_margin", "worst_logprob"):
        content[name] = content[name]["value"], content[name]["index"]
    found = Findings(**{**content, "without": Counter(content["without"])})
    return list(lines("changed.jsonl", cast("SampledRecords", counts), found, error))


@pytest.mark.long
def test_every_row_of_a_run_agrees_and_those_that_cannot_be_verified_are_counted(job: dict[str, Any]) -> None:
    assert job["whole"]["code"] == 0, job["whole"]["err"]
    found = json.loads(job["whole"]["out"])
    assert (found["records"], found["failed"], found["drawn"]) == (13, 1, 12)
    assert found["differ"] == []
    assert found["without"] == {
        "sampled": 1,
        "penalties": 1,
        "logit_bias": 1,
        "min_tokens": 1,
        "nothing was generated": 1,
    }
    assert found["replayed"] == 7 and found["by_logprobs"] == 1
    assert found["tokens"] == 10 + 6 + 5 + 2 * 4 + 8 + 8  # tokens of the greedy rows, if none ended early
    assert found["worst_margin"]["value"] < 1e-4
    assert found["logprobs"] > 20 and 0 < found["worst_logprob"]["value"] < 1e-4


@pytest.mark.long
def test_one_changed_token_is_found_and_named(job: dict[str, Any]) -> None:
    assert job["changed"]["code"] == 1
    [wrong] = [wrong for wrong in json.loads(job["changed"]["out"])["differ"] if wrong["id"] == "greedy"]
    assert (wrong["index"], wrong["place"]) == (0, 4)
    assert wrong["best"] != wrong["token"] and wrong["margin"] > 100 * wrong["bound"]
    assert any('row 0 (line 1) id="greedy": a token is not the likeliest: token 4 is ' in line for line in shown(job))


@pytest.mark.long
def test_other_changes_are_found_too_and_nothing_else_is(job: dict[str, Any]) -> None:
    differ = {wrong["id"]: wrong["what"] for wrong in json.loads(job["changed"]["out"])["differ"]}
    found = {
        "greedy": "a token is not the likeliest",
        "sampled": "its text is not that of its tokens",
        "sampled, scored": "logprobs differ",
        "greedy, scored": "1 logprobs differ",
        "next": "a token is not the likeliest",
        "last": "a token is not the likeliest",
    }
    assert sorted(differ) == sorted(found)
    assert all(says in differ[name] for name, says in found.items()), differ


@pytest.mark.long
def test_another_input_is_refused_by_what_differs(job: dict[str, Any]) -> None:
    assert job["other input"]["code"] == 2
    assert "was made with something else: input sha256" in job["other input"]["err"]


@pytest.mark.long
def test_what_is_shown_names_each_count_once(job: dict[str, Any]) -> None:
    shown_lines = shown(job)
    assert shown_lines[0].endswith("12 of 12 answered rows drawn, 7 replayed")
    assert "are the dense forward's likeliest, 0 within a tie" in shown_lines[1]
    assert "not verifiable: 1 rows (penalties, and no logprobs)" in shown_lines
    assert "rows that differ beyond ties: 6" in shown_lines


# --- the yardstick ---------------------------------------------------------------------------------------------


@functools.cache
def forward_of(block: str) -> DenseForward:
    config = make_config(block)
    return DenseForward(config, make_mesh(config))


@pytest.mark.parametrize("block", ["llama2", pytest.param("gemma2", marks=pytest.mark.long)])
def test_dense_scores_are_those_of_maxtexts_forward_in_training_mode(block: str) -> None:
    """Against a model that MaxText itself made, with other code around it (tests/tiny_models.py)."""
    dense = dense_model(block)
    forward = forward_of(block)
    tokens = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)
    scores = forward.scores(dense._params, tokens)
    logits = dense.logits(tokens, pad_to=64)
    assert scores.best.tolist() == logits[:-1].argmax(axis=-1).tolist()
    rows = np.arange(len(tokens) - 1)
    np.testing.assert_allclose(scores.logprobs, log_softmax(logits)[rows, tokens[1:]], atol=1e-5)
    np.testing.assert_allclose(scores.margins, logits[:-1].max(axis=-1) - logits[rows, tokens[1:]], atol=1e-5)
    assert scores.scale == pytest.approx(np.abs(logits).max(), rel=1e-5)


@pytest.mark.slow
def test_a_tie_is_no_difference_and_what_is_beyond_it_is_one() -> None:
    dense = dense_model()
    forward = forward_of("llama2")
    prompt = [5, 6, 7]
    tokens = np.array([*prompt, *np.argsort(dense.logits(prompt)[-1])[-2:-1]], np.int32)  # the second best
    scores = forward.scores(dense._params, tokens)
    margin = float(scores.margins[-1])
    assert margin > 0
    tie = margin / scores.scale / 2
    within = judge(scores, tokens, 3, error=tie * 1.01, argmax=True)
    assert within.agrees and within.num_ties == 1 and within.worst_margin == pytest.approx(margin)
    beyond = judge(scores, tokens, 3, error=tie * 0.99, argmax=True)
    assert not beyond.agrees and beyond.num_ties == 0
    assert beyond.difference is not None and beyond.difference.place == 0
    assert judge(scores, tokens, 3, error=tie * 0.99, argmax=False).agrees
