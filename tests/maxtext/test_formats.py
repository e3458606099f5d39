"""Rows of a file: what is read, what is refused by name, and what is written; no MaxText involved."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kv_common.errors import ConfigError
from kv_control.logit_options import LogitOptions
from kv_control.plan import GREEDY, SamplingSpec
from maxtext_paged.formats import (
    BadRow,
    Choice,
    InputRow,
    RowError,
    dump_line,
    parse_row,
    read_rows,
    record,
    write_line,
)
from maxtext_paged.formats.own import shown
from maxtext_paged.intake import IdCheck, Intake, completion_text
from maxtext_paged.row_fields import KEYS, OPTIONS, UNSUPPORTED
from maxtext_paged.rows import Row, RowResult, Usage


def parse(row: Any) -> InputRow | BadRow:
    return parse_row(json.dumps(row).encode(), index=0, line=1)


def refusal(row: Any) -> RowError:
    parsed = parse(row)
    assert isinstance(parsed, BadRow), f"{row} was accepted"
    return parsed.error


# --- lines -------------------------------------------------------------------------------------------------


def test_mark_line_ends_and_blank_lines_are_no_rows_and_line_numbers_count_them() -> None:
    text = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n   \n{"prompt": "b"}\n\t\n{"prompt": "c"}'
    rows = list(read_rows(io.BytesIO(text)))
    assert [(row.index, row.line, row.prompt) for row in rows] == [(0, 1, "a"), (1, 4, "b"), (2, 6, "c")]


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"[1]", "not_an_object"),
        (b'"x"', "not_an_object"),
        (b"null", "not_an_object"),
        (b"7", "not_an_object"),
        (b'{"prompt": "x"', "invalid_json"),
        (b'{"prompt": "x"} trailing', "invalid_json"),
        (b'{"prompt": "x", "temperature": NaN}', "invalid_json"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"prompt": ' + b"[" * 200_000, "invalid_json"),
        (b'{"prompt": "x", "prompt": "y"}', "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_utf8"),
        ('{"prompt": "x"}'.encode("utf-16"), "invalid_utf8"),
        (b'{"prompt": "half \\ud800"}', "bad_value"),
        (b'{"prompt": "x", "temperature": 1e999}', "bad_value"),
    ],
)
def test_an_unreadable_line_is_one_bad_row_and_the_next_line_is_read(raw: bytes, code: str) -> None:
    bad, good = read_rows([raw + b"\n", b'{"prompt": "ok"}\n'])
    assert isinstance(bad, BadRow)
    assert bad.error.code == code
    assert isinstance(good, InputRow)
    assert good.line == 2


@given(st.binary(max_size=60).filter(lambda raw: b"\n" not in raw))
def test_no_line_can_raise(raw: bytes) -> None:
    assert isinstance(parse_row(raw, index=0, line=1), InputRow | BadRow)


def test_every_key_is_read_as_given() -> None:
    row = {
        "id": "a b",
        "prompt": "x",
        "max_tokens": 3,
        "temperature": 0.5,
        "top_k": 2,
        "top_p": 1,
        "min_p": 0,
        "seed": -4,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "min_tokens": 2,
        "n": 3,
        "stop": ["a", "b c"],
        "include_stop_str_in_output": True,
        "repetition_penalty": 1.2,
        "presence_penalty": -2,
        "frequency_penalty": 0.5,
        "logit_bias": {"0": -100, "2147483647": 1.5},
        "logprobs": True,
        "top_logprobs": 20,
        "prompt_logprobs": True,
        "echo": True,
    }
    parsed = parse(row)
    assert isinstance(parsed, InputRow)
    assert {key: getattr(parsed, key) for key in row} == row
    assert set(row) | {"messages", "tokens"} == set(KEYS)  # a new key belongs in this test


def test_null_is_the_same_as_leaving_a_key_out() -> None:
    assert parse({"prompt": "x", **dict.fromkeys([*OPTIONS, "id", "tokens", "messages", "n"])}) == parse(
        {"prompt": "x"}
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("id", True),
        ("id", 1.5),
        ("id", ["a"]),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("max_tokens", 4.0),
        ("max_tokens", "4"),
        ("temperature", -0.1),
        ("temperature", True),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", 1.0),
        ("seed", True),
        ("stop_token_ids", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [2**31]),
        ("ignore_eos", 1),
        ("min_tokens", -1),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["a", 5]),
        ("stop", {"a": 1}),
        ("stop", ["a"] * 65),
        ("stop", "half \ud800"),
        ("include_stop_str_in_output", "yes"),
        ("repetition_penalty", 0),
        ("repetition_penalty", True),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"05": 1}),
        ("logit_bias", {"2147483648": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": True}),
        ("logit_bias", {"5": None}),
        ("logit_bias", [5]),
        ("logprobs", 0),
        ("logprobs", 1),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("top_logprobs", True),
        ("top_logprobs", 1.0),
        ("prompt_logprobs", 1),
        ("echo", "x"),
        ("tokens", ["a"]),
        ("tokens", [1, -2]),
        ("tokens", [[1, 2]]),
        ("tokens", {"input_ids": [1]}),
        ("prompt", 5),
        ("prompt", ["a", "b"]),
        ("messages", "hi"),
        ("messages", ["hi"]),
    ],
)
def test_a_value_of_the_wrong_kind_or_size_is_refused_with_its_field_and_value(key: str, value: Any) -> None:
    prompt = {} if key in ("prompt", "tokens", "messages") else {"prompt": "x"}
    error = refusal({**prompt, key: value})
    assert error.code == "bad_value"
    assert error.message.startswith(f"{key}={shown(value)}: must be ")


def test_more_biases_than_a_row_holds_are_refused_by_name() -> None:
    assert parse({"prompt": "x", "logit_bias": {str(i): 1 for i in range(300)}}).logit_bias is not None
    error = refusal({"prompt": "x", "logit_bias": {str(i): 1 for i in range(301)}})
    assert error.message.startswith("logit_bias=") and "at most 300 token ids" in error.message


def test_alternatives_come_with_logprobs() -> None:
    assert refusal({"prompt": "x", "top_logprobs": 2}).message == "top_logprobs=2: must come with logprobs=true"
    assert isinstance(parse({"prompt": "x", "top_logprobs": 0}), InputRow)


def test_a_long_value_is_named_in_part() -> None:
    assert len(refusal({"prompt": "x", "top_k": "9" * 10_000}).message) < 200


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({}, "no_prompt"),
        ({"id": "a"}, "no_prompt"),
        ({"prompt": "x", "tokens": [1]}, "no_prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}], "tokens": [1]}, "no_prompt"),
        ({"prompt": ""}, "empty_prompt"),
        ({"tokens": []}, "empty_prompt"),
        ({"messages": []}, "empty_prompt"),
        ({"messages": [{"role": "user"}]}, "bad_value"),
        ({"messages": [{"role": "user", "content": "x"}, {"content": "y"}]}, "bad_value"),
        ({"prompt": "x", "max_tokens": 2, "min_tokens": 3}, "bad_value"),
        ({"prompt": "x", "max_token": 2}, "unknown_field"),
        ({"prompt": "x", "Temperature": 2}, "unknown_field"),
    ],
)
def test_a_row_without_one_clear_prompt_or_with_unknown_keys_is_refused(row: dict[str, Any], code: str) -> None:
    assert refusal(row).code == code


def test_an_unknown_key_comes_with_the_closest_known_one() -> None:
    assert "did you mean max_tokens?" in refusal({"prompt": "x", "max_completion_tokens": 2}).message
    assert "did you mean stop_token_ids?" in refusal({"prompt": "x", "stop_tokens_ids": [2]}).message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("best_of", 2),
        ("tenant", "a"),
        ("cache_salt", "b"),
        ("best_of", 3),
        ("bad_words", ["a"]),
        ("guided_json", {}),
        ("guided_regex", "a"),
        ("structured_outputs", {"json": {}}),
        ("tools", [{"type": "function"}]),
        ("audio", {"voice": "a"}),
        ("length_penalty", 2),
        ("response_format", {"type": "json_object"}),
        ("lora", "a"),
        ("custom_id", "a"),
        ("body", {}),
    ],
)
def test_what_other_tools_know_is_refused_by_name_when_it_asks_for_something(key: str, value: Any) -> None:
    error = refusal({"prompt": "x", key: value})
    assert error.code == "unsupported_field"
    assert error.message.startswith(f"{key}={json.dumps(value)}: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("best_of", 1),
        ("bad_words", []),
        ("tools", []),
        ("response_format", {"type": "text"}),
    ],
)
def test_what_asks_for_nothing_passes(key: str, value: Any) -> None:
    assert parse({"prompt": "x", key: value}) == parse({"prompt": "x"})


def test_no_key_is_both_read_and_refused() -> None:
    assert not set(KEYS) & set(UNSUPPORTED)


def test_a_bad_row_keeps_its_id_where_that_can_be_read() -> None:
    assert parse({"id": 5, "prompt": "x", "top_k": -1}).id == 5
    assert parse({"id": [5], "prompt": "x"}).id is None


# --- ids ---------------------------------------------------------------------------------------------------


def repeated(*ids: str | int | None) -> list[str | None]:
    """The message for each line."""
    check = IdCheck()
    for line, row_id in enumerate(ids, start=1):
        check.add(row_id, line)
    found = check.repeated()
    errors = [found.error(row_id, line) for line, row_id in enumerate(ids, start=1)]
    return [None if error is None else error.message for error in errors]


def test_every_line_that_shares_an_id_is_refused_with_the_numbers_of_both() -> None:
    messages = repeated("a", "b", "a")
    assert messages[1] is None
    assert messages[0] == messages[2] == 'id="a" stands on lines 1 and 3: ids must be unique'


def test_a_word_and_a_number_are_different_ids_and_rows_without_one_never_clash() -> None:
    assert repeated("1", 1, None, None) == [None] * 4
    check = IdCheck()
    for line in range(3):
        check.add(None, line)
    assert not check.repeated().lines  # else the file would be read once more for nothing


@given(st.lists(st.integers(0, 5) | st.sampled_from(["a", "b"]), max_size=12))
def test_exactly_the_ids_that_stand_more_than_once_are_refused(ids: list[str | int]) -> None:
    assert [message is not None for message in repeated(*ids)] == [ids.count(row_id) > 1 for row_id in ids]


def test_an_id_on_many_lines_says_how_many_and_names_its_own_line() -> None:
    message = repeated("b", "a", "a", "b", "a", "a")[5]
    assert message == 'id="a" stands on 4 lines, this one (6) among them, 2 and 3 the first: ids must be unique'
    many = repeated(*(str(line % 7) for line in range(5000)))[4999]
    assert many is not None and "2 and 9 the first" in many  # 4999 % 7 == 1


# --- what a model makes of a row ---------------------------------------------------------------------------


class LetterTokenizer:
    """One id per letter; chats are their contents joined; some texts and ids make it trip."""

    def encode(self, text: str) -> list[int]:
        if text == "trip":
            raise KeyError("vocabulary")
        return [ord(letter) for letter in text]

    def encode_chat(self, messages: Any) -> list[int]:
        if messages[0]["role"] == "nobody":
            raise ConfigError("no chat template: looked everywhere")
        return [ord(letter) for message in messages for letter in message["content"]]

    def decode(self, ids: Any) -> str:
        return "".join(chr(token) for token in ids)


def intake(defaults: SamplingSpec = GREEDY, *repeats: str) -> Intake:
    check = IdCheck()
    for line, row_id in enumerate(repeats, start=1):
        check.add(row_id, line)
    return Intake(LetterTokenizer(), defaults, vocab_size=128, max_model_len=8, repeated=check.repeated())


def made(row: dict[str, Any], defaults: SamplingSpec = GREEDY, index: int = 0) -> Row:
    result = intake(defaults).row(parse_row(json.dumps(row).encode(), index=index, line=1))
    assert isinstance(result, Row), result
    return result


def test_the_three_kinds_of_prompt_become_the_same_tokens() -> None:
    for prompt in ({"prompt": "hi"}, {"tokens": [104, 105]}, {"messages": [{"role": "user", "content": "hi"}]}):
        row = made(prompt)
        assert row.tokens.dtype == np.int32
        assert row.tokens.tolist() == [104, 105]


def test_a_silent_row_takes_the_configured_sampling_and_a_row_that_speaks_its_own() -> None:
    defaults = SamplingSpec(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
    silent = made({"prompt": "x", "seed": 3}, defaults).sampling
    assert silent == SamplingSpec(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3)
    spoken = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0}
    assert made({"prompt": "x", "seed": 3, **spoken}, defaults).sampling == SamplingSpec(seed=3)


def test_rows_without_a_seed_differ_by_place_and_never_share_the_stream_of_one_with_a_seed() -> None:
    seeds = [made({"prompt": "x"}, index=index).sampling.seed for index in range(3)]
    assert len({*seeds, *(made({"prompt": "x", "seed": seed}).sampling.seed for seed in range(3))}) == 6


def test_options_reach_the_row_and_none_leaves_the_length_to_the_context() -> None:
    row = made({"prompt": "x", "stop_token_ids": [5, 5], "ignore_eos": True, "min_tokens": 2, "id": "me"}, index=4)
    assert (row.index, row.id, row.max_tokens, row.min_tokens, row.ignore_eos) == (4, "me", None, 2, True)
    assert row.stop_token_ids == {5}
    assert made({"prompt": "x", "max_tokens": 0}).max_tokens == 0
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": -1}
    rest = {"logit_bias": {"5": 2, "6": 0}, "logprobs": True, "top_logprobs": 3}
    assert made({"prompt": "x", **penalties, **rest}).options == LogitOptions(1.5, 1.0, -1.0, {5: 2.0}, 3)
    assert made({"prompt": "x", "stop": "ab", "include_stop_str_in_output": True}).stop == ("ab",)
    assert made({"prompt": "x", "stop": ["a", "b"]}).stop == ("a", "b")
    asks = [{}, {"logprobs": True}, {"echo": True}, {"echo": True, "logprobs": True}, {"prompt_logprobs": True}]
    assert [made({"prompt": "x", **ask}).want_prompt_logprobs for ask in asks] == [False, False, False, True, True]
    assert made({"prompt": "x", "top_k": 10**12}).sampling.top_k == 128


@pytest.mark.parametrize(
    ("row", "code", "words"),
    [
        ({"prompt": "trip"}, "cannot_encode", "KeyError"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "cannot_encode", "no chat template"),
        ({"messages": [{"role": "user", "content": ""}]}, "empty_prompt", "no tokens"),
        ({"tokens": [128]}, "bad_value", "tokens: id 128 is outside the vocabulary of 128"),
        ({"prompt": "é"}, "bad_value", "prompt: id 233 is outside the vocabulary of 128"),
        ({"prompt": "x", "stop_token_ids": [128]}, "bad_value", "stop_token_ids: id 128"),
        ({"prompt": "x", "logit_bias": {"128": 1}}, "bad_value", "logit_bias: id 128"),
        ({"prompt": "123456789"}, "context_length_exceeded", "9 tokens, the context holds 8"),
        ({"prompt": "x", "id": "twin"}, "duplicate_id", "lines 1 and 2"),
        ({"prompt": 5, "id": "twin"}, "duplicate_id", "lines 1 and 2"),
        ({"prompt": 5}, "bad_value", "prompt=5"),
    ],
)
def test_what_this_model_cannot_run_is_refused_and_nothing_raises(row: dict[str, Any], code: str, words: str) -> None:
    bad = intake(GREEDY, "twin", "twin").row(parse(row))
    assert isinstance(bad, BadRow)
    assert bad.error.code == code
    assert words in bad.error.message
    assert bad.error.type == ("server_error" if "KeyError" in words else "invalid_request_error")
    assert bad.id == row.get("id")


def test_a_prompt_of_exactly_the_context_is_let_through() -> None:
    assert len(made({"prompt": "12345678"}).tokens) == 8


# --- records -----------------------------------------------------------------------------------------------


def result_of(ids: list[int], finish_reason: Any) -> RowResult:
    row = Row(index=0, tokens=np.array([104], np.int32))
    tokens = np.array([104, *ids], np.int32)
    return RowResult(row, tokens, np.zeros(len(tokens), np.float32), finish_reason, Usage(1, len(ids)))


def test_the_ending_token_is_kept_in_the_ids_and_left_out_of_the_text() -> None:
    ended, cut = result_of([105, 33], "stop"), result_of([105, 33], "length")
    assert completion_text(LetterTokenizer(), ended) == "i"
    assert completion_text(LetterTokenizer(), cut) == "i!"
    assert ended.completion_ids.tolist() == [105, 33]


def test_a_record_has_the_same_keys_and_types_whether_the_row_failed_or_not() -> None:
    good = record(InputRow(0, 1, id="a"), text="", token_ids=[], finish_reason="length", usage=Usage(2, 0))
    bad = record(BadRow(0, 1, RowError("no", "bad_value")))
    late = record(InputRow(0, 1), text="x", token_ids=[5], usage=Usage(2, 1), error=RowError("no", "cannot_decode"))
    assert list(good) == list(bad) == list(late)
    assert list(good) == ["id", "index", "line", "text", "token_ids", "finish_reason", "usage", "status_code", "error"]
    assert good["usage"] == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2, "cached_tokens": 0}
    assert good["error"] is None and good["text"] == ""
    for failed in (bad, late):
        assert set(failed["error"]) == {"message", "type", "code"}
        assert failed["text"] is None and failed["finish_reason"] == "error"
    assert late["token_ids"] == [5]


def test_a_record_of_several_samples_has_a_choice_for_each_and_the_first_ones_values_beside_them() -> None:
    choices = [Choice("a", [5], "length"), Choice(None, [], "error", RowError("no", "generation_failed"))]
    row = InputRow(0, 1, id="a", n=2)
    written = record(row, text="a", token_ids=[5], finish_reason="length", usage=Usage(2, 1, 0, 2), choices=choices)
    assert written["choices"] == [
        {"index": 0, "text": "a", "token_ids": [5], "finish_reason": "length", "error": None},
        {
            "index": 1,
            "text": None,
            "token_ids": [],
            "finish_reason": "error",
            "error": {"message": "no", "type": "invalid_request_error", "code": "generation_failed"},
        },
    ]
    assert written["usage"]["cached_tokens"] == 2
    del written["choices"]
    assert list(written) == list(record(InputRow(0, 1)))


@pytest.mark.parametrize("n", [0, -1, 129, 1.0, True, "2"])
def test_a_number_of_samples_that_is_none_is_refused(n: Any) -> None:
    refused = parse({"prompt": "x", "n": n})
    assert isinstance(refused, BadRow) and "n=" in refused.error.message and "1..128" in refused.error.message


@given(st.text(max_size=30))
@example("half a pair: \ud800")
@example("\x85\u2028\u2029\x1e\n")
def test_any_text_is_one_line_for_every_reader_and_comes_back_unchanged(text: str) -> None:
    line = dump_line({"text": text}).decode("utf-8")
    assert line.endswith("\n") and len(line.splitlines()) == 1
    assert json.loads(line)["text"].encode("utf-8", "surrogatepass") == text.encode("utf-8", "surrogatepass")


def test_nan_never_becomes_json() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump_line({"logprob": math.nan})


def test_a_written_record_has_left_our_buffers() -> None:
    raw = io.BytesIO()
    file = io.BufferedWriter(raw)  # type: ignore[arg-type]
    write_line(file, {"a": 1})
    assert raw.getvalue() == b'{"a": 1}\n'
