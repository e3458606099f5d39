"""JSON lines: prompts in, one record per prompt out.

For:        reading a file of rows line by line, refusing by name what is wrong with one, and writing records.
Not for:    tokens, models or limits that depend on them (intake.py); the job itself (cli/generate.py).
May import: the standard library, kv_control, maxtext_paged.rows and row_fields.

A line is one JSON object with exactly one of ``prompt``, ``messages`` and ``tokens``, and any of the options in
``row_fields.OPTIONS``. ``null`` is the same as leaving a key out. Blank lines are skipped, but counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn, Protocol

from kv_control.request import FinishReason
from maxtext_paged.row_fields import KEYS, OPTIONS, OTHER_NAMES, PROMPTS, UNSUPPORTED, token_ids
from maxtext_paged.rows import Usage

_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class InputRow:
    """A line that is in order as far as it can be judged without a model.

    Attributes:
      index: 0-based among the rows. line: 1-based in the file, blank lines counted.
      id: the caller's name for it, or None.
      prompt, messages, tokens: exactly one is not None.
      max_tokens ... n: as given; None where the row is silent.
    """

    index: int
    line: int
    id: str | int | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[int] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    n: int | None = None


@dataclass(frozen=True, slots=True)
class RowError:
    """What is wrong with a row, as its record says it.

    Attributes:
      message: one sentence, naming the field and its value.
      code: a word for programs, such as ``bad_value``.
      type: ``invalid_request_error`` where the row is to blame, ``server_error`` where it is not.
    """

    message: str
    code: str
    type: str = "invalid_request_error"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that cannot run. ``id`` is kept where it could be read."""

    index: int
    line: int
    error: RowError
    id: str | int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a row's samples, as its record says it; ``text`` is None exactly where ``error`` is not."""

    text: str | None
    token_ids: Sequence[int]
    finish_reason: FinishReason
    error: RowError | None = None


class _Refused(Exception):
    """Raised inside ``parse_row`` only."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.error = RowError(message, code)


def _refuse(code: str, message: str) -> NoReturn:
    raise _Refused(code, message)


# --- reading -----------------------------------------------------------------------------------------------


def read_rows(lines: Iterable[bytes]) -> Iterator[InputRow | BadRow]:
    """The rows of a file, one at a time; whatever is wrong with a line becomes a ``BadRow``.

    Args:
      lines: raw lines as a binary file yields them. A byte order mark, CRLF and a missing last newline are fine.

    >>> [row] = read_rows([b'\\r\\n', b'{"prompt": "Hi", "temperature": -1}'])
    >>> row.line, row.error.message
    (2, 'temperature=-1: must be a finite number of at least 0')
    """
    index = 0
    for line, raw in enumerate(lines, start=1):
        if line == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if raw.strip(b" \t\r\n\v\f"):
            yield parse_row(raw, index=index, line=line)
            index += 1


def parse_row(raw: bytes, *, index: int, line: int) -> InputRow | BadRow:
    """One line that is not blank."""
    row_id = None
    try:
        row = _object(raw)
        row_id = _id(row)
        return _input_row(row, index=index, line=line)
    except _Refused as refused:
        return BadRow(index, line, refused.error, row_id)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse("invalid_utf8", f"the line is not UTF-8: {error.reason} at byte {error.start}")
    try:
        value = json.loads(text, object_pairs_hook=_pairs, parse_constant=_not_json)
    except RecursionError:
        _refuse("invalid_json", "the line is not usable JSON: nested too deeply")
    except ValueError as error:
        _refuse("invalid_json", f"the line is not JSON: {error}")
    if not isinstance(value, dict):
        _refuse("not_an_object", f"the line must be a JSON object, not {_shown(value)}")
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {_shown(repeated)} stands twice in one object")
    return value


def _not_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _id(row: dict[str, Any]) -> str | int | None:
    value = row.get("id")
    if value is not None and type(value) not in (str, int):
        _refuse("bad_value", f"id={_shown(value)}: must be a string or a whole number")
    if isinstance(value, str):
        _check_text("id", value)
    return value


def _input_row(row: dict[str, Any], *, index: int, line: int) -> InputRow:
    for key, value in row.items():
        if key not in KEYS:
            _unknown(key, value)
    given = {key: value for key, value in row.items() if value is not None}
    prompts = [key for key in PROMPTS if key in given]
    if len(prompts) != 1:
        found = f"not {' and '.join(prompts)}" if prompts else "and it has none of them"
        _refuse("no_prompt", f"a row has exactly one of prompt, messages and tokens, {found}")
    _check_prompt(prompts[0], given[prompts[0]])
    for key, check in OPTIONS.items():
        wanted = check(given[key]) if key in given else None
        if wanted is not None:
            _refuse("bad_value", f"{key}={_shown(given[key])}: must be {wanted}")
    most, least = given.get("max_tokens"), given.get("min_tokens", 0)
    if most is not None and least > most:
        _refuse("bad_value", f"min_tokens={least}: exceeds max_tokens={most}")
    return InputRow(index=index, line=line, **{key: given[key] for key in KEYS if key in given})


def _check_prompt(key: str, value: Any) -> None:
    if key == "prompt":
        if not isinstance(value, str):
            _refuse("bad_value", f"prompt={_shown(value)}: must be a string")
        _check_text(key, value)
        empty = not value
    elif key == "tokens":
        wanted = token_ids(value)
        if wanted is not None:
            _refuse("bad_value", f"tokens={_shown(value)}: must be {wanted}")
        empty = not value
    else:
        if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
            _refuse("bad_value", f"messages={_shown(value)}: must be a list of {{role, content}} objects")
        for place, message in enumerate(value):
            for part in ("role", "content"):
                if not isinstance(message.get(part), str):
                    _refuse("bad_value", f"messages[{place}].{part}={_shown(message.get(part))}: must be a string")
                _check_text(f"messages[{place}].{part}", message[part])
        empty = not value
    if empty:
        _refuse("empty_prompt", f"{key} is empty: a model needs at least one token to continue")


def _check_text(key: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        _refuse("bad_value", f"{key} holds half of a surrogate pair at character {error.start}: not text")


def _unknown(key: str, value: Any) -> None:
    """Refuse a key that is not ours, unless its value asks for nothing."""
    if key in UNSUPPORTED:
        why, idle = UNSUPPORTED[key]
        # 0 == False in Python, and `"logprobs": 0` does ask for something.
        harmless = any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in idle)
        if value is not None and not harmless:
            _refuse("unsupported_field", f"{key}={_shown(value)}: {why}")
        return
    meant = OTHER_NAMES.get(key) or next(iter(get_close_matches(key, KEYS, n=1)), None)
    hint = f"did you mean {meant}?" if meant else f"known are {', '.join(KEYS)}"
    _refuse("unknown_field", f"unknown key {_shown(key)}; {hint}")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


# --- writing -----------------------------------------------------------------------------------------------


def record(
    row: InputRow | BadRow,
    *,
    text: str | None = None,
    token_ids: Iterable[int] = (),
    finish_reason: FinishReason = "error",
    usage: Usage | None = None,
    error: RowError | None = None,
    choices: Sequence[Choice] = (),
) -> dict[str, Any]:
    """What is written about a row, the same keys whatever became of it.

    ``text`` is null exactly where ``error`` is not.

    Args:
      text: the completion, without the token that ended it.
      token_ids: the completion's ids, with it.
      usage: None counts nothing.
      error: why it failed; a ``BadRow`` brings its own.
      choices: where the row asked for several samples; then the record has the key ``choices`` too, and what stands
        beside it is the first one's.
    """
    if isinstance(row, BadRow):
        error = row.error
    usage = usage or Usage(0, 0)
    written: dict[str, Any] = {
        "id": row.id,
        "index": row.index,
        "line": row.line,
        "text": None if error is not None else text,
        "token_ids": [int(token) for token in token_ids],
        "finish_reason": "error" if error is not None else finish_reason,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "error": _error(error),
    }
    if choices:
        written["choices"] = [
            {
                "index": index,
                "text": None if choice.error is not None else choice.text,
                "token_ids": [int(token) for token in choice.token_ids],
                "finish_reason": "error" if choice.error is not None else choice.finish_reason,
                "error": _error(choice.error),
            }
            for index, choice in enumerate(choices)
        ]
    return written


def _error(error: RowError | None) -> dict[str, str] | None:
    return None if error is None else {"message": error.message, "type": error.type, "code": error.code}


# JSON leaves these as they are, but many readers of lines (str.splitlines among them) end a line there.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def dump_line(value: dict[str, Any]) -> bytes:
    """One record as one line of UTF-8, whatever characters it holds; NaN is refused (ValueError).

    >>> dump_line({"text": "a\\u2028b é"}).decode()
    '{"text": "a\\\\u2028b é"}\\n'
    """
    return (json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS) + "\n").encode(
        "utf-8",
        "backslashreplace",  # half a surrogate pair, as JSON itself would write it
    )


class Writable(Protocol):
    """A file, as far as records need one."""

    def write(self, data: bytes, /) -> object:
        """Take all of it."""
        ...

    def flush(self) -> object:
        """Hand it on."""
        ...


def write_line(file: Writable, value: dict[str, Any]) -> None:
    """Write one record and hand it to the operating system, so that a crash loses no finished row."""
    file.write(dump_line(value))
    file.flush()
