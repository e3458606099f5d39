"""Prompts as Python callers have them, made into the rows that files have.

For:        one reading of text, token ids, chats and whole rows, so that both interfaces refuse with the same words.
Not for:    tokens and limits (intake.py) or MaxText's inputs of ``batch_inference`` (batch_rows.py).
May import: the standard library, numpy, kv_common, maxtext_paged.formats, sampling_params and tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import RequestError
from maxtext_paged.formats import OWN, BadRow, InputRow, RowError
from maxtext_paged.formats.lines import row_of
from maxtext_paged.sampling_params import SamplingParams, plain_value
from maxtext_paged.tokenizer import as_token_ids

Prompt = str | Sequence[int] | NDArray[np.integer] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text; token ids ``[n]`` or ``[1, n]``; a chat's messages; or an object with the keys of a row (docs/files.md)."""

_WANTED = "a prompt is text, token ids, a list of {role, content} messages or an object with a row's keys"


def row_of_prompt(prompt: Any, params: SamplingParams | None, index: int) -> InputRow | BadRow:
    """A prompt as a row; whatever is wrong with it becomes a ``BadRow``.

    Args:
      params: its options, where the prompt itself is silent.

    >>> row_of_prompt("Hi", SamplingParams(max_tokens=4), 0).max_tokens
    4
    >>> row_of_prompt({"prompt": "Hi", "max_tokens": -1}, None, 0).error.message
    'max_tokens=-1: must be a whole number of at least 0'
    """
    try:
        row = _as_row(prompt)
    except RequestError as error:
        return BadRow(index, index + 1, RowError(str(error), "bad_value"))
    except Exception as error:  # whatever an object does when it is read is that prompt's fault alone
        message = f"the prompt cannot be read: {type(error).__name__}: {error}"
        return BadRow(index, index + 1, RowError(message, "bad_value"))
    options = {} if params is None else params.options()
    return row_of({**options, **row}, index=index, line=index + 1, form=OWN)


def _as_row(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping) and "input_ids" not in prompt:
        return {str(name): plain_value(value) for name, value in prompt.items() if value is not None}
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping):
        return {"messages": list(prompt)}
    if isinstance(prompt, bytes) or not (isinstance(prompt, Sequence | Mapping) or hasattr(prompt, "__array__")):
        raise RequestError(f"{_WANTED}, not {type(prompt).__name__}")
    plain = isinstance(prompt, list | tuple) and all(type(token) is int for token in prompt)
    return {"tokens": list(prompt) if plain else as_token_ids(prompt)}


def with_params(
    prompts: Iterable[Prompt], params: SamplingParams | Iterable[SamplingParams | None] | None
) -> Iterator[tuple[Any, SamplingParams | None]]:
    """Each prompt beside its options, both drawn one at a time.

    Raises:
      ValueError: ``prompts`` is one prompt, or ``params`` neither options nor an iterable of them. From the iterator:
        one of the ``params`` is something else, or there are fewer or more of them than prompts.
    """
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be an iterable of prompts, not one {type(prompts).__name__}")
    if params is None or isinstance(params, SamplingParams):
        return ((prompt, params) for prompt in prompts)
    if isinstance(params, str | bytes | Mapping) or not isinstance(params, Iterable):
        raise ValueError(f"params must be SamplingParams, or an iterable of them, not {type(params).__name__}")
    return _pairs(prompts, params)


def _pairs(
    prompts: Iterable[Any], params: Iterable[SamplingParams | None]
) -> Iterator[tuple[Any, SamplingParams | None]]:
    count, rest = 0, iter(params)
    for prompt in prompts:
        own = next(rest, _NONE_LEFT)
        if own is _NONE_LEFT:
            raise ValueError(f"params ended after {count}, before the prompts did: give one, or one for each prompt")
        if own is not None and not isinstance(own, SamplingParams):
            raise ValueError(f"params must be SamplingParams, not {type(own).__name__}")
        yield prompt, own
        count += 1
    if next(rest, _NONE_LEFT) is not _NONE_LEFT:
        raise ValueError(f"params has more than the {count} prompts: give one, or one for each prompt")


_NONE_LEFT: Any = object()
