"""MaxText's ``CompletionOutput``, and why a row ended.

For:        what ``batch_inference`` returns: MaxText's contract with our additions.
Not for:    what ``generate`` and ``stream`` return (generation.py).
May import: maxtext_paged.rows; MaxText's offline engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_control.logit_options import Alternatives
from kv_control.request import FinishReason
from maxtext_paged.imports import import_dense_engine
from maxtext_paged.rows import RowResult, Usage

maxtext_engine = import_dense_engine()


@dataclass(kw_only=True, eq=False)
class CompletionOutput(maxtext_engine.CompletionOutput):  # type: ignore[name-defined]
    """MaxText's completion, and why it ended.

    Attributes:
      index: the row's id as text; an array's id is its place in the call.
      token_ids: int32 ``[n]``, prompt and completion; a token that ended it is kept.
      logprobs: float32 ``[n]``, under the unmodified model distribution (before temperature and filters); NaN at
        position 0, and wherever a failed row has none.
      prompt_length: tokens of the prompt; splits both arrays.
      finish_reason: "stop", "length", "cancelled" or "error".
      usage: its tokens, what the cache had of them, and how often it was preempted.
      error: why, where the reason is "error".
      text: the completion's text where a stop string ended it, cut before that; None leaves it to the tokenizer.
      alternatives: the likeliest tokens at each generated one, where ``LogitOptions.top_logprobs`` asks for them.
      samples: where several were asked for: one output each, in order; the fields beside them are the first one's, but
        ``finish_reason`` and ``error`` tell of any that failed.
    """

    finish_reason: FinishReason
    usage: Usage
    error: str | None = None
    samples: tuple[CompletionOutput, ...] = ()
    text: str | None = None
    alternatives: tuple[Alternatives, ...] = ()

    @classmethod
    def of(cls, result: RowResult) -> CompletionOutput:
        """A row's result in MaxText's shape."""
        return cls(
            index=str(result.row.id),
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            prompt_length=result.usage.prompt_tokens,
            finish_reason=result.finish_reason,
            usage=result.usage,
            error=result.error,
            samples=tuple(map(cls.of, result.samples)),
            text=result.text,
            alternatives=result.alternatives,
        )
