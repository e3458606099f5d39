"""What became of one prompt: text, tokens, logprobs and why it ended.

For:        the values that ``OfflineEngine.generate`` and ``stream`` hand out.
Not for:    MaxText's type (completion_output.py) or records of files (formats): all three tell of one ``RowResult``.
May import: the standard library, numpy, kv_control, maxtext_paged.formats, intake and rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_control.logit_options import Alternatives
from kv_control.request import FinishReason
from maxtext_paged.formats import BadRow, RowError
from maxtext_paged.intake import Tokenizer, completion_text
from maxtext_paged.rows import Row, RowResult, Usage


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What became of one prompt; there is exactly one for each, whatever failed.

    Attributes:
      index: the prompt's place in the call, from 0.
      id: its own name, if it was given as an object with an ``id``.
      text: the completion as text, without the token or string that ended it and without special tokens, behind the
        prompt's where ``echo`` asks for that; None exactly where ``error`` is not, and everywhere if the engine has no
        tokenizer.
      token_ids: int32 ``[n]``, the completion's; a token that ended it is kept.
      logprobs: float32 ``[n]``, natural logarithms under the unmodified model distribution (before temperature and
        filters); NaN only where a row failed.
      prompt_token_ids: int32 ``[m]``; empty where the prompt could not be read.
      prompt_logprobs: float32 ``[m]`` beside them, NaN at position 0; None where nobody asked.
      alternatives: the likeliest tokens at each of ``token_ids``, where ``top_logprobs`` asks for them; else empty.
      finish_reason: "stop", "length", "cancelled" or "error".
      usage: counts of tokens.
      error: why there is no text: the object a record of a file has, with ``message``, ``code``, ``type`` and
        ``status_code``.
      samples: where several were asked for: one for each, in order; the fields beside them are the first one's, but
        ``finish_reason``, ``error`` and ``text`` tell of any that failed.
    """

    index: int
    id: str | int | None
    text: str | None
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    prompt_token_ids: NDArray[np.int32]
    finish_reason: FinishReason
    usage: Usage
    error: RowError | None = None
    prompt_logprobs: NDArray[np.float32] | None = None
    alternatives: tuple[Alternatives, ...] = ()
    samples: tuple[Generation, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return self.error is None

    @classmethod
    def of(
        cls, result: RowResult, tokenizer: Tokenizer | None, *, named: bool = True, echo: str | None = None
    ) -> Generation:
        """A row's result with its text, behind ``echo``; its id only where the caller gave it one (``named``)."""
        samples = tuple(cls.of(sample, tokenizer, named=named, echo=echo) for sample in result.samples)
        if samples:
            failed = next((sample for sample in samples if sample.error is not None), None)
            first = replace(samples[0], usage=result.usage, finish_reason=result.finish_reason, samples=samples)
            return first if failed is None else replace(first, error=failed.error, text=None, finish_reason="error")
        text, error = _text_of(result, tokenizer, echo)
        num_prompt = len(result.token_ids) - len(result.completion_ids)
        return cls(
            index=result.row.index,
            id=_id_of(result.row) if named else None,
            text=text,
            token_ids=result.completion_ids,
            logprobs=result.logprobs[num_prompt:],
            prompt_token_ids=result.token_ids[:num_prompt],
            finish_reason="error" if error is not None else result.finish_reason,
            usage=result.usage,
            error=error,
            prompt_logprobs=result.logprobs[:num_prompt] if result.row.want_prompt_logprobs else None,
            alternatives=result.alternatives,
        )

    @classmethod
    def refused(cls, row: BadRow) -> Generation:
        """A prompt that could not be run at all."""
        nothing = np.zeros(0, np.int32)
        return cls(
            index=row.index,
            id=row.id,
            text=None,
            token_ids=nothing,
            logprobs=np.zeros(0, np.float32),
            prompt_token_ids=nothing,
            finish_reason="error",
            usage=Usage(0, 0),
            error=row.error,
        )


def _text_of(result: RowResult, tokenizer: Tokenizer | None, echo: str | None) -> tuple[str | None, RowError | None]:
    if result.error is not None or result.finish_reason == "error":
        return None, RowError(result.error or "the row failed", "generation_failed", "server_error")
    if tokenizer is None:
        return None, None
    try:
        return (echo or "") + completion_text(tokenizer, result), None
    except Exception as fault:  # a stranger's tokenizer that trips over one row must not end the others
        message = f"the completion could not be decoded: {type(fault).__name__}: {fault}"
        return None, RowError(message, "cannot_decode", "server_error")


def _id_of(row: Row) -> Any:
    return row.id
