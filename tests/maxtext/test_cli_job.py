"""``maxtext-paged generate`` over one file with everything in it that can be wrong with a row, run once."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli_runs import CHECKS, CONTEXT, POOL, Finished, driver, environment, finished, records, tiny_model
from tests.tiny_gguf import TOKENS, VOCAB

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]

IM_END = TOKENS.index("<|im_end|>")
PROMPT = "the cat and the dog"


@dataclass(frozen=True)
class MixedJob:
    """A job over ``lines``; ``by_line`` are its records, ``home`` all it could have written to."""

    finished: Finished
    lines: dict[int, Any]
    by_line: dict[int, dict[str, Any]]
    records: list[dict[str, Any]]
    home: Path
    imports: Path

    def by_id(self, row_id: Any) -> dict[str, Any]:
        [found] = [row for row in self.records if row["id"] == row_id and type(row["id"]) is type(row_id)]
        return found


def mixed_lines() -> list[Any]:
    """One entry per line of the file: an object, raw bytes, or None for a blank line."""
    tokens = tiny_model().encode(PROMPT)
    third = tiny_model().greedy(tokens, 3)[2]
    return [
        {"id": "text", "prompt": PROMPT, "max_tokens": 12},
        None,
        {"id": "tokens", "tokens": tokens, "max_tokens": 12},
        [1],
        "x",
        b"null",
        {"body": "s"},
        b'{"id": "broken", ',
        b"   ",
        {"id": "cold", "prompt": "x", "temperature": -1},
        b'{"prompt": "\xff\xfe"}',
        {"id": "twin", "prompt": "a", "max_tokens": 2},
        {"id": 1, "prompt": "abc", "max_tokens": 2},
        {"id": "1", "prompt": "abc", "max_tokens": 2},
        {"id": "twin", "prompt": "b", "max_tokens": 2},
        {"id": "long", "tokens": [5] * (CONTEXT + 1)},
        {"id": "foreign", "tokens": [VOCAB]},
        {"id": "chat", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 6},
        {"id": "undecodable", "prompt": "the dog", "max_tokens": 4},
        {"id": "stopped", "tokens": tokens, "max_tokens": 12, "stop_token_ids": [third]},
        {"id": "none wanted", "prompt": "abc", "max_tokens": 0},
        {"id": "seed 5", "prompt": "abc", "max_tokens": 8, "temperature": 1, "seed": 5},
        {"id": "seed 6", "prompt": "abc", "max_tokens": 8, "temperature": 1, "seed": 6},
        {"id": "seed 5 again", "prompt": "abc", "max_tokens": 8, "temperature": 1.0, "seed": 5},
        {"id": "two", "prompt": "x", "best_of": 2},
        {"id": "typo", "prompt": "x", "max_token": 2},
        {"id": "silent", "prompt": "the"},
    ]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> MixedJob:
    """A first run for a user whose home is empty and who has torch and JetStream installed."""
    place = tmp_path_factory.mktemp("mixed")
    home, imports = place / "home", place / "imports.log"
    for name in ("home", "home/cwd", "home/tmp", "packages"):
        (place / name).mkdir()
    for package in ("torch", "torchvision", "jetstream"):
        install_fake(place / "packages", package)
    lines = mixed_lines()
    raw = [line if isinstance(line, bytes) else b"" if line is None else json.dumps(line).encode() for line in lines]
    (place / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(raw))  # no last line end
    words = ["generate", tiny_model().config, *POOL, *CHECKS]
    words += ["-i", str(place / "in.jsonl"), "-o", str(home / "out.jsonl")]
    env = environment(
        PYTHONPATH=str(place / "packages"),
        HOME=str(home),
        XDG_CACHE_HOME=str(home / "cache"),
        TMPDIR=str(home / "tmp"),
        IMPORT_LOG=str(imports),
    )
    for name in ("JAX_COMPILATION_CACHE_DIR", "DECOUPLE_GCLOUD"):
        env.pop(name, None)
    process = subprocess.run(
        driver(place, [words], undecodable=["undecodable"]),
        capture_output=True,
        cwd=home / "cwd",
        env=env,
        check=False,
    )
    ended = finished(process, place)
    assert (home / "out.jsonl").exists(), ended.err
    out = records((home / "out.jsonl").read_bytes())
    numbered = {number: line for number, line in enumerate(lines, start=1) if raw[number - 1].strip()}
    return MixedJob(ended, numbered, {row["line"]: row for row in out}, out, home, imports)


def install_fake(site: Path, package: str) -> None:
    """An installed package, as transformers looks for one, that writes down when it is imported."""
    (site / package).mkdir()
    (site / package / "__init__.py").write_text(
        "import os\n"
        f"with open(os.environ['IMPORT_LOG'], 'a') as log:\n    log.write('{package}\\n')\n"
        "__version__ = '99.0'\n"
    )
    (site / f"{package}-99.0.dist-info").mkdir()
    (site / f"{package}-99.0.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: 99.0\n"
    )


def test_every_row_has_exactly_one_record_with_its_index_line_and_id(mixed: MixedJob) -> None:
    assert sorted(row["line"] for row in mixed.records) == list(mixed.lines)
    for index, (number, line) in enumerate(mixed.lines.items()):
        row = mixed.by_line[number]
        assert row["index"] == index
        assert row["id"] == (line.get("id") if isinstance(line, dict) else None)


def test_all_records_have_one_shape(mixed: MixedJob) -> None:
    for row in mixed.records:
        assert list(row) == [
            "id",
            "index",
            "line",
            "text",
            "token_ids",
            "finish_reason",
            "usage",
            "status_code",
            "error",
        ]
        assert row["usage"]["total_tokens"] == row["usage"]["prompt_tokens"] + row["usage"]["completion_tokens"]
        if row["error"] is None:
            assert isinstance(row["text"], str)
            assert row["finish_reason"] in ("stop", "length")
            assert len(row["token_ids"]) == row["usage"]["completion_tokens"]
        else:
            assert set(row["error"]) == {"message", "type", "code"}
            assert (row["text"], row["finish_reason"]) == (None, "error")


def test_a_bad_row_says_what_is_wrong_and_the_others_are_answered(mixed: MixedJob) -> None:
    codes = {number: row["error"]["code"] for number, row in mixed.by_line.items() if row["error"]}
    assert codes == {
        4: "not_an_object",
        5: "not_an_object",
        6: "not_an_object",
        7: "unsupported_field",
        8: "invalid_json",
        10: "bad_value",
        11: "invalid_utf8",
        12: "duplicate_id",
        15: "duplicate_id",
        16: "context_length_exceeded",
        17: "bad_value",
        19: "cannot_decode",
        25: "unsupported_field",
        26: "unknown_field",
    }
    assert mixed.by_id("cold")["error"]["message"].startswith("temperature=-1: ")


def test_both_rows_of_an_id_name_both_lines_while_a_word_and_a_number_are_two_ids(mixed: MixedJob) -> None:
    for number in (12, 15):
        assert "lines 12 and 15" in mixed.by_line[number]["error"]["message"]
    assert mixed.by_id(1)["token_ids"] == mixed.by_id("1")["token_ids"] != []


def test_greedy_completions_are_those_of_an_independent_implementation(
    mixed: MixedJob,
) -> None:
    expected = tiny_model().greedy(PROMPT, 12)
    assert mixed.by_id("text")["token_ids"] == expected
    assert mixed.by_id("tokens")["token_ids"] == expected
    assert mixed.by_id("text")["usage"]["prompt_tokens"] == len(tiny_model().encode(PROMPT))
    assert mixed.by_id("text")["finish_reason"] == "length"


def test_messages_are_written_with_the_models_own_template(
    mixed: MixedJob,
) -> None:
    prompt = tiny_model().encode("<|im_start|>user\nthe cat<|im_end|>\n")
    assert mixed.by_id("chat")["usage"]["prompt_tokens"] == len(prompt)
    assert mixed.by_id("chat")["token_ids"] == tiny_model().greedy(prompt, 6)


def test_the_text_is_the_ids_decoded_at_once(
    mixed: MixedJob,
) -> None:
    decoder = tiny_model().tokenizer
    for row_id in ("text", "chat", "seed 6"):
        assert mixed.by_id(row_id)["text"] == decoder.decode(mixed.by_id(row_id)["token_ids"])


def test_a_row_that_cannot_be_decoded_fails_alone_and_keeps_its_ids(mixed: MixedJob) -> None:
    row = mixed.by_id("undecodable")
    assert "a fault in the tokenizer" in row["error"]["message"]
    assert row["error"]["type"] == "server_error"
    assert len(row["token_ids"]) == 4


def test_a_stop_token_ends_a_row_stays_in_its_ids_and_out_of_its_text(
    mixed: MixedJob,
) -> None:
    decoder = tiny_model().tokenizer
    row = mixed.by_id("stopped")
    assert row["finish_reason"] == "stop"
    assert row["token_ids"] == mixed.by_id("tokens")["token_ids"][: len(row["token_ids"])]
    assert len(row["token_ids"]) <= 3
    assert row["text"] == decoder.decode(row["token_ids"][:-1])


def test_a_row_that_wants_nothing_gets_nothing_and_a_silent_one_runs_to_the_end(mixed: MixedJob) -> None:
    assert mixed.by_id("none wanted")["token_ids"] == []
    assert mixed.by_id("none wanted")["error"] is None
    silent = mixed.by_id("silent")
    ended = silent["token_ids"][-1] == IM_END
    assert silent["finish_reason"] == ("stop" if ended else "length")
    assert ended or silent["usage"]["total_tokens"] == CONTEXT


def test_a_seed_gives_its_tokens_again_and_another_seed_gives_others(mixed: MixedJob) -> None:
    assert mixed.by_id("seed 5")["token_ids"] == mixed.by_id("seed 5 again")["token_ids"]
    assert mixed.by_id("seed 5")["token_ids"] != mixed.by_id("seed 6")["token_ids"]


def test_some_failed_rows_make_exit_code_1_and_the_summary_counts_what_was_written(mixed: MixedJob) -> None:
    good = [row["usage"] for row in mixed.records if row["error"] is None]
    failed = len(mixed.records) - len(good)
    assert mixed.finished.code == 1
    [rows, loop] = mixed.finished.messages[-2:]
    prompt, generated = (sum(usage[key] for usage in good) for key in ("prompt_tokens", "completion_tokens"))
    assert f"{len(mixed.records)} rows: {len(good)} ok, {failed} failed; " in rows
    assert f"{prompt} prompt and {generated} generated tokens in " in rows
    found = re.search(
        r"(\d+) steps, .* at most (\d+) of 64 pages held, (\d+) scrubbed; attention: (\w+) \1 steps; "
        r"decodes: (\d+) gather; products: (\d+) native; ",
        loop,
    )
    assert found is not None
    assert 0 < int(found[2]) <= 64
    assert 0 < int(found[5]) <= int(found[1]), "every decode of so short a context is below the floors"
    assert "paged_step" in loop


def test_stderr_says_each_choice_once_and_nothing_of_upstream(mixed: MixedJob) -> None:
    messages = mixed.finished.messages
    assert [line for line in messages if not line.startswith("maxtext-paged: ")] == []
    for start in ("KV pool: 64 pages of 4 tokens", "paged attention backend: ", "compiled programs are kept in "):
        assert sum(line.startswith(f"maxtext-paged: {start}") for line in messages) == 1
    [pool] = [line for line in messages if "KV pool: " in line]
    assert "MiB a device" in pool and pool.endswith("(paged_num_pages=64)")
    assert f"maxtext-paged: end tokens: [{IM_END}]" in messages


def test_neither_torch_nor_jetstream_is_imported_even_where_they_are_installed(mixed: MixedJob) -> None:
    assert not mixed.imports.exists()
    assert not {"torch", "torchvision", "jetstream"} & set(mixed.finished.report["packages"])
    assert "maxtext" in mixed.finished.report["packages"]


def test_nothing_is_unpickled_and_only_the_renderer_of_templates_is_started(mixed: MixedJob) -> None:
    seen = mixed.finished.report["seen"]
    assert [event for event in seen if "template_worker.py" not in event] == []
    assert len(seen) == 1, "the row with messages"


def test_nothing_is_left_on_disk_but_the_output_its_run_file_and_the_compiled_programs(mixed: MixedJob) -> None:
    files = [path.relative_to(mixed.home) for path in mixed.home.rglob("*") if path.is_file()]
    cached = [path for path in files if path.is_relative_to("cache/maxtext-paged/jax")]
    assert sorted(str(path) for path in files if path not in cached) == ["out.jsonl", "out.jsonl.run.json"]
    assert any("paged_step" in path.name for path in cached)
