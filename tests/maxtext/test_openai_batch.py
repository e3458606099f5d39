"""OpenAI's batch form: what is read, what is refused by name, and what is written; no MaxText involved."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest

from kv_control.logit_options import Alternatives
from maxtext_paged.formats import OWN, BadRow, Choice, InputRow, RowError, parse_row
from maxtext_paged.formats.lines import bounded_lines, read_rows
from maxtext_paged.formats.openai_batch import BatchForm
from maxtext_paged.formats.scores import Scores
from maxtext_paged.formats.sources import open_source
from maxtext_paged.row_fields import BATCH_LABELS, BATCH_NAMES, BATCH_PROMPTS, OPTIONS, UNSUPPORTED
from maxtext_paged.rows import Usage

FORM = BatchForm("run", clock=lambda: 1234.5)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def request(url: str = TEXT, **body: Any) -> dict[str, Any]:
    prompt = (
        {} if "prompt" in body or "messages" in body else {"prompt": "x"} if url == TEXT else {"messages": MESSAGES}
    )
    return {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "m", **prompt, **body}}


def parse(row: Any) -> InputRow | BadRow:
    return parse_row(json.dumps(row).encode(), index=3, line=5, form=FORM)


def read(row: Any) -> InputRow:
    parsed = parse(row)
    assert isinstance(parsed, InputRow), parsed
    return parsed


def refusal(row: Any) -> RowError:
    parsed = parse(row)
    assert isinstance(parsed, BadRow), f"{row} was accepted"
    return parsed.error


# --- requests ------------------------------------------------------------------------------------------------


def test_vllms_own_example_is_read() -> None:
    line = (
        b'{"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "some/model", '
        b'"messages": [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": '
        b'"Hello world!"}], "max_completion_tokens": 1000}}'
    )
    row = parse_row(line, index=0, line=1, form=FORM)
    assert isinstance(row, InputRow)
    assert (row.id, row.max_tokens) == ("request-1", 1000)
    assert row.messages is not None and row.messages[1] == {"role": "user", "content": "Hello world!"}


def test_every_option_of_our_own_rows_has_its_name_here_too() -> None:
    values = {
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
    }
    assert {name for name in OPTIONS if name in values} == set(values)
    for url in (CHAT, TEXT):
        row = read(request(url, **values))
        assert {name: getattr(row, name) for name in values} == values
        for name in OPTIONS:  # whoever adds one gets it here by its line in the table
            assert refusal(request(url, **{name: {"no": "value"}})).message.startswith(f"body.{name}=")


@pytest.mark.parametrize(
    ("prompt", "field", "value"),
    [
        ("hi", "prompt", "hi"),
        (["hi"], "prompt", "hi"),
        ([1, 2], "tokens", [1, 2]),
        ([[1, 2]], "tokens", [1, 2]),
    ],
)
def test_a_completions_prompt_is_text_or_ids_alone_or_in_a_list(prompt: Any, field: str, value: Any) -> None:
    row = read(request(prompt=prompt))
    assert getattr(row, field) == value
    assert [getattr(row, other) for other in ("prompt", "tokens", "messages") if other != field] == [None, None]


def test_contents_in_parts_are_their_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    row = read(request(CHAT, messages=[{"role": "user", "content": parts}]))
    assert row.messages == [{"role": "user", "content": "one\ntwo"}]


def test_a_silent_body_means_what_that_interface_documents() -> None:
    assert read(request(TEXT)).max_tokens == 16
    assert read(request(TEXT, max_tokens=5)).max_tokens == 5
    assert read(request(TEXT, max_tokens=None)).max_tokens == 16
    assert read(request(CHAT)).max_tokens is None
    assert read(request(CHAT, max_tokens=7, max_completion_tokens=7)).max_tokens == 7


def test_a_completions_logprobs_are_a_number_and_a_chats_are_two_fields() -> None:
    for k in (0, 5):
        row = read(request(TEXT, logprobs=k, echo=True, prompt_logprobs=0))
        assert (row.logprobs, row.top_logprobs, row.echo, row.prompt_logprobs) == (True, k, True, True)
    row = read(request(CHAT, logprobs=True, top_logprobs=3, prompt_logprobs=0, logit_bias={"5": -100}, stop="a"))
    assert (row.logprobs, row.top_logprobs, row.prompt_logprobs) == (True, 3, True)
    assert (row.logit_bias, row.stop) == ({"5": -100}, "a")


def test_what_changes_nothing_passes() -> None:
    labels = dict.fromkeys(BATCH_LABELS, "x")
    idle = {name: values[0] for name, (_, values) in UNSUPPORTED.items() if values and name not in labels}
    for url in (CHAT, TEXT):
        assert read(request(url, **labels, **idle)) == read(request(url, model="x"))
        assert read(request(url, **dict.fromkeys(OPTIONS), stream_options=None)) == read(request(url))


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"custom_id": None}, "missing_field", "missing here: custom_id"),
        ({"method": None, "url": None}, "missing_field", "missing here: method, url"),
        ({"body": None}, "missing_field", "missing here: body"),
        ({"custom_id": 5}, "bad_value", "custom_id=5: must be a string"),
        ({"custom_id": ["a"]}, "bad_value", "custom_id="),
        ({"custom_id": ""}, "bad_value", "must not be empty"),
        ({"custom_id": "a\nb"}, "bad_value", 'custom_id="a\\nb": must be without line breaks'),
        ({"custom_id": "a" * 513}, "bad_value", "must be at most 512 characters"),
        ({"method": "GET"}, "bad_value", 'method="GET": must be POST'),
        ({"url": "/v1/embeddings"}, "unsupported_url", 'url="/v1/embeddings"'),
        ({"url": ["/v1/completions"]}, "unsupported_url", "url="),
        ({"body": "s"}, "bad_value", 'body="s": must be an object'),
        ({"priority": 5}, "unknown_field", "priority"),
        ({"prompt": "x"}, "unknown_field", "options in its body"),
    ],
)
def test_an_unusable_request_is_refused_by_what_is_wrong_with_it(change: dict[str, Any], code: str, words: str) -> None:
    row = {key: value for key, value in {**request(), **change}.items() if value is not None}
    error = refusal(row)
    assert error.code == code and words in error.message


@pytest.mark.parametrize(
    ("url", "body", "code", "words"),
    [
        (TEXT, {"prompt": None}, "no_prompt", "body.prompt is missing"),
        (CHAT, {"messages": None}, "no_prompt", "body.messages is missing"),
        (CHAT, {"prompt": "x", "messages": MESSAGES}, "unknown_field", "body.prompt"),
        (TEXT, {"tokens": [1]}, "unknown_field", "did you mean prompt?"),
        (TEXT, {"prompt": "x", "messages": MESSAGES}, "unknown_field", "body.messages"),
        (TEXT, {"prompt": ["a", "b"]}, "unsupported_field", "body.prompt has 2 prompts"),
        (TEXT, {"prompt": [1, "b"]}, "bad_value", "body.prompt="),
        (TEXT, {"prompt": []}, "empty_prompt", "body.prompt is empty"),
        (TEXT, {"prompt": [""]}, "empty_prompt", "body.prompt is empty"),
        (TEXT, {"prompt": {"a": 1}}, "bad_value", "body.prompt="),
        (CHAT, {"messages": []}, "empty_prompt", "body.messages is empty"),
        (CHAT, {"messages": "hi"}, "bad_value", "body.messages="),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "unsupported_field", "[0]"),
        (CHAT, {"messages": [{"role": "user", "content": ["x"]}]}, "unsupported_field", "content[0]"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "bad_value", "body.messages[0].content=null"),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 8}, "bad_value", "body.max_completion_tokens=8"),
        (CHAT, {"tools": [{"type": "function"}]}, "unsupported_field", "body.tools="),
        (CHAT, {"response_format": {"type": "json_object"}}, "unsupported_field", "body.response_format="),
        (TEXT, {"logprobs": True}, "bad_value", "body.logprobs=true: must be a whole number in 0..20"),
        (TEXT, {"logprobs": 21}, "bad_value", "body.logprobs=21"),
        (TEXT, {"logprobs": -1}, "bad_value", "body.logprobs=-1"),
        (TEXT, {"top_logprobs": 3}, "unsupported_field", "body.top_logprobs=3: completions have `logprobs`"),
        (CHAT, {"logprobs": 5}, "bad_value", "body.logprobs=5: must be true or false"),
        (CHAT, {"top_logprobs": 5}, "bad_value", "body.top_logprobs=5: must come with logprobs=true"),
        (CHAT, {"echo": True}, "unsupported_field", "body.echo=true"),
        (CHAT, {"prompt_logprobs": 2}, "unsupported_field", "body.prompt_logprobs=2"),
        (TEXT, {"logit_bias": {"a": 1}}, "bad_value", "body.logit_bias="),
        (TEXT, {"stop": [""]}, "bad_value", "body.stop="),
        (TEXT, {"guided_json": {"type": "object"}}, "unsupported_field", "body.guided_json="),
        (TEXT, {"best_of": 3}, "unsupported_field", "body.best_of=3"),
        (TEXT, {"temperature": -1}, "bad_value", "body.temperature=-1: must be"),
        (TEXT, {"temprature": 1}, "unknown_field", "did you mean temperature?"),
        (TEXT, {"id": "x"}, "unknown_field", '"body.id"'),
        (TEXT, {"model": 5}, "bad_value", "body.model=5"),
    ],
)
def test_what_a_body_cannot_ask_for_is_refused_with_its_place_and_value(
    url: str, body: dict[str, Any], code: str, words: str
) -> None:
    error = refusal(request(url, **body))
    assert error.code == code and words in error.message, error


def test_names_of_both_forms_do_not_contradict_each_other() -> None:
    assert not {*BATCH_NAMES, *BATCH_LABELS} & set(OPTIONS)
    assert set(BATCH_NAMES.values()) <= set(OPTIONS)
    assert set(BATCH_PROMPTS) == {TEXT, CHAT}


# --- records -------------------------------------------------------------------------------------------------


def test_an_answer_is_the_object_that_a_server_would_have_sent() -> None:
    row = read(request(CHAT, model="some/model"))
    record = FORM.record(row, text="hello", token_ids=[5], finish_reason="stop", usage=Usage(4, 1, 0, 2))
    assert record == {
        "id": "batch_req_run-3",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "req_run-3",
            "body": {
                "id": "chatcmpl-run-3",
                "object": "chat.completion",
                "created": 1234,
                "model": "some/model",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "hello"},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {
                    "prompt_tokens": 4,
                    "completion_tokens": 1,
                    "total_tokens": 5,
                    "prompt_tokens_details": {"cached_tokens": 2},
                },
            },
        },
        "error": None,
        "index": 3,
        "line": 5,
    }
    body = FORM.record(read(request(TEXT)), text="hello", finish_reason="length")["response"]["body"]
    assert (body["object"], body["id"]) == ("text_completion", "cmpl-run-3")
    assert body["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length"}]


def test_samples_are_choices() -> None:
    choices = [Choice("a", [5], "length"), Choice("b", [6], "stop")]
    record = FORM.record(read(request(TEXT, n=2)), text="a", token_ids=[5], choices=choices)
    found = record["response"]["body"]["choices"]
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in found] == [
        (0, "a", "length"),
        (1, "b", "stop"),
    ]


def scores(*, top: bool) -> Scores:
    """Of the tokens "a", the first half of "é", its second half, and one of probability 0."""
    pieces = {5: b"a", 6: b"\xc3", 7: b"\xa9", 8: b"b"}
    best = [
        None,
        *(Alternatives(np.array(ids), np.array([-0.5, -1.5], np.float32)) for ids in ([6, 5], [5, 8], [8, 6])),
    ]
    return Scores([5, 6, 7, 8], [float("nan"), -0.5, -2.0, -np.inf], pieces.__getitem__, best if top else ())


def test_a_completions_logprobs_have_openais_shape() -> None:
    row = read(request(TEXT, logprobs=2))
    record = FORM.record(row, text="aéb", token_ids=[5, 6, 7, 8], finish_reason="length", scores=scores(top=True))
    [choice] = record["response"]["body"]["choices"]
    assert choice["logprobs"] == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "b"],
        "token_logprobs": [None, -0.5, -2.0, -9999.0],
        "top_logprobs": [
            None,
            {"bytes:\\xc3": -0.5, "a": -1.5},
            {"a": -0.5, "b": -1.5, "bytes:\\xa9": -2.0},  # the chosen one too, where it is not among the best
            {"b": -0.5, "bytes:\\xc3": -1.5},
        ],
        "text_offset": [0, 1, 1, 2],
    }
    json.dumps(record, allow_nan=False)
    plain = FORM.record(row, text="aéb", token_ids=[5], scores=scores(top=False))["response"]["body"]["choices"][0]
    assert plain["logprobs"]["top_logprobs"] is None


def test_a_chats_logprobs_have_openais_shape() -> None:
    row = read(request(CHAT, logprobs=True, top_logprobs=2))
    body = FORM.record(row, text="aéb", token_ids=[5, 6, 7, 8], scores=scores(top=True))["response"]["body"]
    content = body["choices"][0]["logprobs"]["content"]
    assert content[0] == {"token": "a", "logprob": None, "bytes": [97], "top_logprobs": []}
    assert content[2] == {
        "token": "bytes:\\xa9",
        "logprob": -2.0,
        "bytes": [0xA9],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }


def test_prompt_logprobs_have_vllms_shape_in_both_interfaces() -> None:
    wanted = [None, {"6": {"logprob": -0.5, "decoded_token": "bytes:\\xc3"}}]
    for url in (TEXT, CHAT):
        row = read(request(url, prompt_logprobs=0))
        body = FORM.record(row, text="x", token_ids=[5], prompt=scores(top=False))["response"]["body"]
        found = body["choices"][0]["prompt_logprobs"] if url == TEXT else body["prompt_logprobs"]
        assert found[:2] == wanted and len(found) == 4


def test_a_failure_has_one_shape_in_whatever_stage_it_happened() -> None:
    unread = FORM.record(parse({**request(), "method": "GET"}))
    nameless = FORM.record(parse([1]))
    late = FORM.record(read(request()), text=None, error=RowError("no", "cannot_decode", "server_error"))
    for record, status in ((unread, 400), (nameless, 400), (late, 500)):
        assert list(record) == ["id", "custom_id", "response", "error", "index", "line"]
        assert record["response"] == {"status_code": status, "request_id": "req_run-3", "body": None}
        assert set(record["error"]) == {"message", "type", "code"}
    assert (unread["custom_id"], nameless["custom_id"]) == ("a", None)


# --- which form a file has -----------------------------------------------------------------------------------


def lines(*rows: Any) -> io.BytesIO:
    raw = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    return io.BytesIO(b"\n".join(raw))


@pytest.mark.parametrize(
    ("rows", "batch"),
    [
        ([request()], True),
        ([b"", b"broken", [1], {"id": 1}, request()], True),
        ([b'\xef\xbb\xbf{"body": "s"}'], True),
        ([{"prompt": "x"}, request()], False),
        ([{"prompt": "x", "body": 1}, request()], True),  # both: the next line decides
        ([], False),
        ([{}], False),
    ],
)
def test_the_first_row_with_keys_of_one_form_decides(rows: list[Any], batch: bool) -> None:
    assert (open_source("in", lines(*rows)).form is not OWN) == batch


def test_a_row_of_the_other_form_is_refused_and_says_why() -> None:
    _, other = open_source("in", lines({"prompt": "x"}, request())).rows()
    assert isinstance(other, BadRow) and "one form a file" in other.error.message
    _, other = open_source("in", lines(request(), {"prompt": "x"})).rows()
    assert isinstance(other, BadRow) and "a request has custom_id, method, url, body" in other.error.message


def test_rows_can_be_read_as_often_as_wanted_from_where_the_file_stood() -> None:
    file = lines({"prompt": "not mine"}, {"prompt": "a"}, {"prompt": "b"})
    file.readline()
    source = open_source("in", file)
    for _ in range(2):
        assert [row.prompt for row in source.rows() if isinstance(row, InputRow)] == ["a", "b"]
    assert source.digest() == open_source("in", lines({"prompt": "a"}, {"prompt": "b"})).digest()


def test_a_line_beyond_the_limit_is_one_bad_row_and_is_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxtext_paged.formats.lines.MAX_LINE_BYTES", 40)
    raw = b'{"prompt": "a"}\n{"prompt": "' + b"x" * 1000 + b'"}\n{"prompt": "b"}\n{"prompt": "' + b"y" * 1000
    pieces = list(bounded_lines(io.BytesIO(raw), 40))
    assert len(pieces) == 4 and max(map(len, pieces)) == 42
    rows = list(read_rows(pieces))
    assert [row.line for row in rows] == [1, 2, 3, 4]
    assert [row.error.code for row in rows if isinstance(row, BadRow)] == ["too_long", "too_long"]
    exact = b'{"prompt": "' + b"x" * 26 + b'"}'
    assert len(exact) == 40
    assert isinstance(next(read_rows(bounded_lines(io.BytesIO(exact + b"\n"), 40))), InputRow)
