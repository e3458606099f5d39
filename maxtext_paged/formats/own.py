"""Our own form of rows, and the values that every form is read into.

For:        checking one row key by key, refusing by name what is wrong with it, and what is written about it.
Not for:    files and lines (lines.py), the OpenAI form (openai_batch.py), tokens and limits (intake.py).
May import: the standard library, kv_control, maxtext_paged.formats.scores, rows and row_fields.

A row is one JSON object with exactly one of ``prompt``, ``messages`` and ``tokens``, and any of the options in
``row_fields.OPTIONS``. ``null`` is the same as leaving a key out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

from kv_control.request import FinishReason
from maxtext_paged.formats.scores import Scores, own_scores
from maxtext_paged.printable import printable
from maxtext_paged.row_fields import KEYS, MAX_ID_CHARACTERS, OPTIONS, OTHER_NAMES, PROMPTS, UNSUPPORTED, token_ids
from maxtext_paged.row_limits import too_many
from maxtext_paged.rows import Usage

_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class InputRow:
    """A line that is in order as far as it can be judged without a model.

    Attributes:
      index: 0-based among the rows. line: 1-based in the file, blank lines counted.
      id: the caller's name for it, or None.
      prompt, messages, tokens: exactly one is not None.
      max_tokens ... echo: as given; None where the row is silent.
      request: what its form has to know to write its record.
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
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: bool | None = None
    echo: bool | None = None
    request: Any = None


@dataclass(frozen=True, slots=True)
class RowError:
    """What is wrong with a row, as its record says it.

    Attributes:
      message: one sentence, naming the field and its value.
        It is made fit to be shown (printable.py): a row may hold anything, and messages are read in terminals.
      code: a word for programs, such as ``bad_value``.
      type: ``invalid_request_error`` where the row is to blame, ``server_error`` where it is not.
    """

    message: str
    code: str
    type: str = "invalid_request_error"

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", printable(self.message))

    @property
    def status_code(self) -> int:
        """As HTTP has it."""
        return 400 if self.type == "invalid_request_error" else 500


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that cannot run. ``id`` is kept where it could be read."""

    index: int
    line: int
    error: RowError
    id: str | int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a row's samples, as its record says it; ``text`` is None exactly where ``error`` is not.

    ``scores`` are of the tokens that are listed, where the row asks for logprobs; they begin with the prompt's where it
    is repeated.
    """

    text: str | None
    token_ids: Sequence[int]
    finish_reason: FinishReason
    error: RowError | None = None
    scores: Scores | None = None


class Refused(Exception):
    """Raised while a row is read; it becomes a ``BadRow``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.error = RowError(message, code)


def refuse(code: str, message: str) -> NoReturn:
    """Give up on the row that is read."""
    raise Refused(code, message)


# --- reading -----------------------------------------------------------------------------------------------


def row_id(key: str, value: Any) -> str | int | None:
    """A row's id, checked: results are matched by it, so it has to survive every tool on the way."""
    if value is None:
        return None
    if type(value) not in (str, int):
        refuse("bad_value", f"{key}={shown(value)}: must be a string or a whole number")
    if isinstance(value, str):
        _check_text(key, value)
        if len(value) > MAX_ID_CHARACTERS:
            refuse("bad_value", f"{key}={shown(value)}: must be at most {MAX_ID_CHARACTERS} characters long")
        if any(letter < " " or "\x7f" <= letter <= "\x9f" for letter in value):
            refuse("bad_value", f"{key}={shown(value)}: must be without line breaks and control characters")
    elif abs(value) >= 2**63:
        refuse("bad_value", f"{key}={shown(value)}: must fit 64 bits")
    return value


def input_row(
    row: Mapping[str, Any],
    *,
    index: int,
    line: int,
    id: str | int | None,
    prompts: Sequence[str] = PROMPTS,
    where: str = "",
    request: Any = None,
) -> InputRow:
    """A row of checked values.

    Args:
      row: prompt and options by their own names.
      prompts: which of the prompts there may be.
      where: stands before names in messages. request: as ``InputRow`` has it.

    Raises:
      Refused: one of them is not as it should be.
    """
    known = (*prompts, *OPTIONS)
    for key, value in row.items():
        if key not in known:
            _unknown(where + key, key, value, known)
    given = {key: value for key, value in row.items() if value is not None and key in known}
    found = [key for key in prompts if key in given]
    if len(found) != 1:
        which = f"not {' and '.join(found)}" if found else "and it has none of them"
        if len(prompts) == 1:
            refuse("no_prompt", f"{where}{prompts[0]} is missing")
        refuse("no_prompt", f"a row has exactly one of {', '.join(prompts[:-1])} and {prompts[-1]}, {which}")
    beyond = too_many(given)
    if beyond is not None:
        refuse("too_long", f"{where}{beyond[0]} {beyond[1]}")
    _check_prompt(where, found[0], given[found[0]])
    for key, check in OPTIONS.items():
        wanted = check(given[key]) if key in given else None
        if wanted is not None:
            refuse("bad_value", f"{where}{key}={shown(given[key])}: must be {wanted}")
    most, least = given.get("max_tokens"), given.get("min_tokens", 0)
    if most is not None and least > most:
        refuse("bad_value", f"{where}min_tokens={least}: exceeds max_tokens={most}")
    if given.get("top_logprobs") and not given.get("logprobs"):
        refuse("bad_value", f"{where}top_logprobs={given['top_logprobs']}: must come with logprobs=true")
    return InputRow(index=index, line=line, id=id, request=request, **given)


def _check_prompt(where: str, key: str, value: Any) -> None:
    if key == "prompt":
        if not isinstance(value, str):
            refuse("bad_value", f"{where}prompt={shown(value)}: must be a string")
        _check_text(where + key, value)
        empty = not value
    elif key == "tokens":
        wanted = token_ids(value)
        if wanted is not None:
            refuse("bad_value", f"{where}tokens={shown(value)}: must be {wanted}")
        empty = not value
    else:
        if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
            refuse("bad_value", f"{where}messages={shown(value)}: must be a list of {{role, content}} objects")
        for place, message in enumerate(value):
            for part in ("role", "content"):
                if not isinstance(message.get(part), str):
                    refuse("bad_value", f"{where}messages[{place}].{part}={shown(message.get(part))}: must be a string")
                _check_text(f"{where}messages[{place}].{part}", message[part])
        empty = not value
    if empty:
        refuse("empty_prompt", f"{where}{key} is empty: a model needs at least one token to continue")


def _check_text(key: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        refuse("bad_value", f"{key} holds half of a surrogate pair at character {error.start}: not text")


def _unknown(named: str, key: str, value: Any, known: Sequence[str]) -> None:
    """Refuse a key that is not ours, unless its value asks for nothing."""
    if key in UNSUPPORTED:
        why, idle = UNSUPPORTED[key]
        # 0 == False in Python, and `"logprobs": 0` does ask for something.
        harmless = any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in idle)
        if value is not None and not harmless:
            refuse("unsupported_field", f"{named}={shown(value)}: {why}")
        return
    meant = OTHER_NAMES.get(key)
    meant = meant if meant in known else next(iter(get_close_matches(key, known, n=1)), None)
    hint = f"did you mean {meant}?" if meant else f"known are {', '.join(known)}"
    refuse("unknown_field", f"unknown key {shown(named)}; {hint}")


def shown(value: Any) -> str:
    """A value as messages name it, in part if it is long."""
    if isinstance(value, str):
        value = value[: _SHOWN_CHARACTERS + 1]  # not a copy of megabytes for some letters
    try:
        text = json.dumps(value, ensure_ascii=True, default=str)
    except (ValueError, RecursionError):  # a Python caller's: circular, or nested for ever
        text = f"a {type(value).__name__}"
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
    scores: Scores | None = None,
    prompt: Scores | None = None,
) -> dict[str, Any]:
    """What is written about a row, the same keys whatever became of it, and those of scores where there are any.

    ``text`` is null exactly where ``error`` is not.

    Args:
      text: the completion, without the token that ended it.
      token_ids: the completion's ids, with it.
      usage: None counts nothing.
      error: why it failed; a ``BadRow`` brings its own.
      choices: where the row asked for several samples; then the record has the key ``choices`` too, and what stands
        beside it is the first one's.
      scores: of ``token_ids``. prompt: of the prompt's tokens.
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
        "status_code": 200 if error is None else error.status_code,
        "error": error_object(error),
    }
    if scores is not None:
        written |= own_scores(scores)
    if prompt is not None:
        written["prompt_token_ids"] = [int(token) for token in prompt.token_ids]
        written["prompt_logprobs"] = own_scores(prompt)["logprobs"]
    if choices:
        written["choices"] = [
            {
                "index": index,
                "text": None if choice.error is not None else choice.text,
                "token_ids": [int(token) for token in choice.token_ids],
                "finish_reason": "error" if choice.error is not None else choice.finish_reason,
                "error": error_object(choice.error),
                **({} if choice.scores is None else own_scores(choice.scores)),
            }
            for index, choice in enumerate(choices)
        ]
    return written


def error_object(error: RowError | None) -> dict[str, str] | None:
    """What is written of an error, alike in every form."""
    return None if error is None else {"message": error.message, "type": error.type, "code": error.code}


class OwnForm:
    """Rows as this package has them; see ``Form``."""

    name = "rows"
    columns = KEYS

    def of_run(self, run_id: str) -> OwnForm:
        """The same: our records have no such id."""
        return self

    def id_of(self, row: Mapping[str, Any]) -> str | int | None:
        """``id``."""
        return row_id("id", row.get("id"))

    def parse(self, row: Mapping[str, Any], *, index: int, line: int, id: str | int | None) -> InputRow:
        """The row that an object is."""
        return input_row({key: row[key] for key in row if key != "id"}, index=index, line=line, id=id)

    def record(self, row: InputRow | BadRow, **outcome: Any) -> dict[str, Any]:
        """As the function of that name."""
        return record(row, **outcome)
