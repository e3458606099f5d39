"""``SamplingParams``: a row's options as one typed value.

For:        Python callers of ``generate`` and ``stream``; the fields are the options of a row, by the same names.
Not for:    what they mean (docs/row-options.md), or checks: row_fields.OPTIONS has those of both interfaces.
May import: the standard library, numpy, pydantic, kv_common, maxtext_paged.formats and row_fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel

from kv_common.errors import RequestError
from maxtext_paged.formats.own import Refused, input_row, shown
from maxtext_paged.row_fields import PROMPTS


class SamplingParams(BaseModel, extra="forbid", frozen=True):
    """What is asked of one prompt; where it is None, the configuration's ``decode_sampling_*`` apply.

    Immutable, and checked once, when it is made, with the words a row of a file gets:

    >>> SamplingParams(max_tokens=8, temperature=0.7).options()
    {'max_tokens': 8, 'temperature': 0.7}
    >>> SamplingParams(temperature=-1)
    Traceback (most recent call last):
    kv_common.errors.RequestError: temperature=-1: must be a finite number of at least 0

    Attributes:
      max_tokens: most tokens to generate; 0 only scores the prompt, None is as many as fit.
      temperature: 0 chooses the likeliest token.
      top_k: keep the k likeliest tokens; 0 keeps all.
      top_p: keep the likeliest tokens whose probabilities sum to at least this.
      min_p: drop tokens less likely than this share of the likeliest.
      seed: any whole number; None makes one from the prompt's place in the call.
      stop_token_ids: tokens that end the row, besides the engine's end tokens.
      ignore_eos: the engine's end tokens do not end the row; its own do.
      min_tokens: no token that would end the row is chosen before so many, and no string counts.
      n: samples, each from a stream of its own under the one seed.
      stop: a string, or several, that end the row; text is cut before them.
      include_stop_str_in_output: text keeps the string that ended it.
      repetition_penalty, presence_penalty, frequency_penalty, logit_bias: what is done to logits; docs/row-options.md.
      logprobs: taken as a file's rows have it; generations always carry their tokens' logprobs.
      top_logprobs: alternatives at each generated token.
      prompt_logprobs: the prompt's tokens are scored too.
      echo: text begins with the prompt's.

    Raises:
      RequestError: an option is unknown, or a value is not as it should be; the message names both (a ValueError too).
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[str | int, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: bool | None = None
    echo: bool | None = None

    if not TYPE_CHECKING:  # type checkers read the fields

        def __init__(self, **given: Any) -> None:
            options = {name: plain_value(value) for name, value in given.items()}
            prompts = [name for name in options if name in ("id", *PROMPTS)]
            if prompts:
                raise RequestError(f"unknown option {shown(prompts[0])}: it belongs to a prompt, not to its sampling")
            try:
                input_row({**options, "prompt": "-"}, index=0, line=0, id=None)
            except Refused as refused:
                raise RequestError(refused.error.message) from None
            super().__init__(**{name: _frozen(value) for name, value in options.items()})

    def options(self) -> dict[str, Any]:
        """The options that are set, as a row of a file has them."""
        return {name: plain_value(value) for name, value in self if value is not None}


def plain_value(value: Any) -> Any:
    """A value as JSON would have it: numpy's scalars and arrays, tuples and mappings become plain ones."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, tuple | frozenset | set):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
