"""OpenAI's batch form, as ``vllm run-batch`` reads and writes it.

For:        requests of custom_id, method, url and body in; id, custom_id, response and error out.
Not for:    files and lines (lines.py), the checks of prompts and options (own.py), the table of names (row_fields.py).
May import: the standard library, maxtext_paged.formats and row_fields.

A failed row has one shape: ``response.status_code`` says so, ``response.body`` is null and ``error`` is an object.
``index`` and ``line`` stand behind what that form has: rows that name no custom_id can be found by nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kv_control.request import FinishReason
from maxtext_paged.formats.own import (
    BadRow,
    Choice,
    InputRow,
    RowError,
    error_object,
    input_row,
    refuse,
    row_id,
    shown,
)
from maxtext_paged.formats.scores import Scores, chat_scores, completion_scores, prompt_scores
from maxtext_paged.row_fields import (
    BATCH_DEFAULTS,
    BATCH_LABELS,
    BATCH_NAMES,
    BATCH_PROMPTS,
    token_ids,
)
from maxtext_paged.row_fields import top_logprobs as check_top_logprobs
from maxtext_paged.rows import Usage

KEYS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What a record repeats of a row: where it was addressed, and the model it named."""

    url: str
    model: str | None


class BatchForm:
    """See ``Form``.

    Args:
      run_id: stands in the ids of records, so that those of different runs differ.
      clock: seconds since 1970, for ``created``.
    """

    name = "OpenAI batch"
    columns = KEYS

    def __init__(self, run_id: str = "", clock: Callable[[], float] = time.time) -> None:
        self._run_id = run_id
        self._clock = clock

    def of_run(self, run_id: str) -> BatchForm:
        """The same, with that id in its records."""
        return BatchForm(run_id, self._clock)

    def id_of(self, row: Mapping[str, Any]) -> str | int | None:
        """``custom_id``, a string."""
        value = row.get("custom_id")
        if value is not None and not isinstance(value, str):
            refuse("bad_value", f"custom_id={shown(value)}: must be a string")
        if value == "":
            refuse("bad_value", 'custom_id="": must not be empty')
        return row_id("custom_id", value)

    def parse(self, row: Mapping[str, Any], *, index: int, line: int, id: str | int | None) -> InputRow:
        """The row that a request is."""
        for key in row:
            if key not in KEYS:
                refuse(
                    "unknown_field", f"unknown key {shown(key)}; a request has {', '.join(KEYS)}, options in its body"
                )
        missing = [key for key in KEYS if row.get(key) is None]
        if missing:
            refuse("missing_field", f"a request has {', '.join(KEYS)}; missing here: {', '.join(missing)}")
        method, url, body = row["method"], row["url"], row["body"]
        if method != "POST":
            refuse("bad_value", f"method={shown(method)}: must be POST")
        if not isinstance(url, str) or url not in BATCH_PROMPTS:
            refuse("unsupported_url", f"url={shown(url)}: known are {' and '.join(BATCH_PROMPTS)}")
        if not isinstance(body, dict):
            refuse("bad_value", f"body={shown(body)}: must be an object")
        model = body.get("model")
        if model is not None and not isinstance(model, str):
            refuse("bad_value", f"body.model={shown(model)}: must be a string")
        prompt = BATCH_PROMPTS[url]
        values = {**BATCH_DEFAULTS[url], **_own_scores(_own_names(body), chat=prompt == "messages")}
        prompts: tuple[str, ...] = (prompt,)
        if "tokens" in body:
            refuse("unknown_field", 'unknown key "body.tokens"; did you mean prompt?')
        if values.get(prompt) is not None:
            prompts, value = (_prompt if prompt == "prompt" else _messages)(values.pop(prompt))
            values[prompts[0]] = value
        return input_row(
            values, index=index, line=line, id=id, prompts=prompts, where="body.", request=BatchRequest(url, model)
        )

    def record(
        self,
        row: InputRow | BadRow,
        *,
        text: str | None = None,
        token_ids: Iterable[int] = (),
        finish_reason: FinishReason = "error",
        usage: Usage | None = None,
        error: RowError | None = None,
        choices: Sequence[Choice] = (),
        scores: Scores | None = None,
        prompt: Scores | None = None,
    ) -> dict[str, Any]:
        """What is written about a row; arguments as in ``own.record``."""
        if isinstance(row, BadRow):
            error = row.error
        name = f"{self._run_id}-{row.index}"
        body = None
        if error is None and isinstance(row, InputRow):
            several = choices or [Choice(text, list(token_ids), finish_reason, scores=scores)]
            body = self._body(name, row.request, several, usage or Usage(0, 0), prompt)
        return {
            "id": f"batch_req_{name}",
            "custom_id": row.id,
            "response": {
                "status_code": 200 if error is None else error.status_code,
                "request_id": f"req_{name}",
                "body": body,
            },
            "error": error_object(error),
            "index": row.index,
            "line": row.line,
        }

    def _body(
        self, name: str, request: BatchRequest, choices: Sequence[Choice], usage: Usage, prompt: Scores | None
    ) -> dict[str, Any]:
        chat = BATCH_PROMPTS[request.url] == "messages"
        listed = []
        for index, choice in enumerate(choices):
            said: dict[str, Any] = {"text": choice.text}
            if chat:
                said = {"message": {"role": "assistant", "content": choice.text}}
            logprobs = None
            if choice.scores is not None:
                logprobs = chat_scores(choice.scores) if chat else completion_scores(choice.scores)
            listed.append({"index": index, **said, "logprobs": logprobs, "finish_reason": choice.finish_reason})
            if prompt is not None and not chat:
                listed[-1]["prompt_logprobs"] = prompt_scores(prompt)
        beside = {"prompt_logprobs": prompt_scores(prompt)} if prompt is not None and chat else {}
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(self._clock()),
            "model": request.model,
            "choices": listed,
            **beside,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.total_tokens,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            },
        }


def _own_names(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a body asks for, by our names; what it leaves open with null is not there."""
    values: dict[str, Any] = {}
    for key, value in body.items():
        name = BATCH_NAMES.get(key, key)
        if value is None or key in BATCH_LABELS:
            continue
        if name in values and values[name] != value:
            refuse("bad_value", f"body.{key}={shown(value)}: {name} stands there too, with another value")
        values[name] = value
    return values


def _own_scores(values: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    """Scores as our rows ask for them: a completion's ``logprobs`` is a number of alternatives, and vLLM's
    ``prompt_logprobs`` is one in both interfaces."""
    of_prompt = values.get("prompt_logprobs")
    if type(of_prompt) is int:
        if of_prompt != 0:
            refuse(
                "unsupported_field",
                f"body.prompt_logprobs={of_prompt}: 0 asks for the prompt tokens' own, alternatives are not reported",
            )
        values["prompt_logprobs"] = True
    if chat:
        if values.get("echo"):
            refuse("unsupported_field", "body.echo=true: only completions repeat their prompt")
        return values
    if "top_logprobs" in values:
        refuse("unsupported_field", f"body.top_logprobs={shown(values['top_logprobs'])}: completions have `logprobs`")
    if "logprobs" in values:
        wanted = check_top_logprobs(values["logprobs"])
        if wanted is not None:
            refuse("bad_value", f"body.logprobs={shown(values['logprobs'])}: must be {wanted}")
        values["logprobs"], values["top_logprobs"] = True, values["logprobs"]
    return values


def _prompt(value: Any) -> tuple[tuple[str, ...], Any]:
    """A completion's prompt: text, ids, or a list of one of these."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        if len(value) > 1:
            refuse("unsupported_field", f"body.prompt has {len(value)} prompts: one request, one prompt")
        [value] = value
    if isinstance(value, list) and value:
        if (wanted := token_ids(value)) is not None:
            refuse("bad_value", f"body.prompt={shown(value)}: must be a string or {wanted}")
        return ("tokens",), value
    return ("prompt",), value if value != [] else ""


def _messages(value: Any) -> tuple[tuple[str, ...], Any]:
    """Messages whose contents are text: a list of text parts is their text, a line each."""
    if not isinstance(value, list):
        return ("messages",), value  # refused as any other
    written = []
    for place, message in enumerate(value):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            for number, part in enumerate(content):
                if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    refuse(
                        "unsupported_field",
                        f"body.messages[{place}].content[{number}]={shown(part)}: only parts of type text are read",
                    )
            message = {**message, "content": "\n".join(part["text"] for part in content)}
        written.append(message)
    return ("messages",), written
