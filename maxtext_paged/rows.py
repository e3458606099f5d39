"""One row in, one row out: the values between files or Python callers and the paged loop.

For:        what a caller asks of a row, and what it gets back whatever happened to it.
Not for:    reading or writing files (formats) or MaxText's CompletionOutput (offline_engine.py).
May import: numpy, kv_common, kv_control.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from kv_control.logit_options import NO_LOGIT_OPTIONS, Alternatives, LogitOptions
from kv_control.plan import GREEDY, RequestId, SamplingSpec
from kv_control.request import FinishReason, Request

MAX_SAMPLES = 128
"""Most samples of one row."""

_SEED_BITS = 31


def row_seed(seed: int | None, ordinal: int) -> int:
    """The sampling seed of a row: its own, or one made from its place in the input.

    The two lie in different halves of uint32, so an explicit seed never shares its stream with a row that
    was given none.

    >>> row_seed(7, 3), row_seed(None, 7) - 2**31
    (7, 7)
    """
    mask = (1 << _SEED_BITS) - 1
    if seed is None:
        return (1 << _SEED_BITS) | (ordinal & mask)
    folded = abs(seed) * 2 + 1 if seed < 0 else seed
    while folded > mask:
        folded = (folded & mask) ^ (folded >> _SEED_BITS)
    return folded


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt and what is wanted for it.

    Attributes:
      index: its place in the input; results carry it.
      tokens: the prompt's ids, integers ``[n]``.
      id: the caller's own name for it.
      max_tokens: most tokens to generate; None means as many as the context and the pool have room for.
      sampling: how to choose them; ``sampling.seed`` comes from ``row_seed``.
      stop_token_ids: tokens that end it, besides the engine's end tokens.
      ignore_eos: the engine's end tokens do not end it; its own stop tokens and strings still do.
      min_tokens: until it has so many, no token that would end it is chosen, and no stop string counts.
      options: penalties, bias, and alternatives to report.
      stop: text that ends it; see stop_strings.py. include_stop: leave that in its text.
      want_prompt_logprobs: return the prompt tokens' logprobs too.
      n: samples of it, each from a stream of its own under the row's one seed. They share the prompt's pages.
    """

    index: int
    tokens: NDArray[np.integer]
    id: Hashable = None
    max_tokens: int | None = None
    sampling: SamplingSpec = GREEDY
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    want_prompt_logprobs: bool = False
    n: int = 1
    options: LogitOptions = NO_LOGIT_OPTIONS
    stop: tuple[str, ...] = ()
    include_stop: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a row; of several samples together, whose prompt counts once.

    Attributes:
      cached_tokens: prompt tokens that were not run: the prefix cache had them, or another sample of the row.
      num_preemptions: times it was sent back and computed again.
    """

    prompt_tokens: int
    completion_tokens: int
    num_preemptions: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class RowResult:
    """What became of a row; exactly one per row, whatever failed.

    Attributes:
      row: the row.
      token_ids: int32, prompt and completion; the ending token is kept.
      logprobs: float32 of the same length, under the unmodified model distribution; NaN at position 0, and over
        the whole prompt where prompt logprobs were not asked for.
      finish_reason: "stop", "length", "cancelled" or "error".
      error: why, where the reason is "error".
      text: the completion's text where a stop string ended it; None leaves it to whoever decodes ``completion_ids``.
      alternatives: one entry for each generated token, where ``row.options.top_logprobs`` asks for them.
      samples: where the row asked for several: one result each, in order; what stands beside them is the first
        sample's, and the first error of any.
    """

    row: Row
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    usage: Usage
    error: str | None = None
    samples: tuple[RowResult, ...] = ()
    text: str | None = None
    alternatives: tuple[Alternatives, ...] = ()

    @property
    def completion_ids(self) -> NDArray[np.int32]:
        """The generated tokens."""
        return self.token_ids[len(self.row.tokens) :]

    @classmethod
    def of(cls, row: Row, request: Request, text: str | None = None) -> RowResult:
        """The result of a finished request; ``text`` where a stop string ended it."""
        return cls(
            row=row,
            token_ids=request.tokens.copy(),
            logprobs=np.concatenate([request.prompt_logprobs, request.logprobs]),
            finish_reason=request.finish_reason or "error",
            usage=Usage(
                request.num_prompt_tokens,
                request.num_generated,
                request.num_preemptions,
                request.num_cached_tokens + request.num_shared_tokens,
            ),
            error=request.error,
            text=text,
            alternatives=tuple(request.alternatives),
        )

    @classmethod
    def of_samples(
        cls, row: Row, requests: Sequence[Request], texts: Mapping[RequestId, str | None] = MappingProxyType({})
    ) -> RowResult:
        """The result of a row whose samples have all finished, in their order; ``texts`` as in ``of``."""
        if len(requests) == 1:
            return cls.of(row, requests[0], texts.get(requests[0].id))
        samples = tuple(cls.of(row, request, texts.get(request.id)) for request in requests)
        failed = next((sample for sample in samples if sample.finish_reason in ("error", "cancelled")), samples[0])
        usage = Usage(
            samples[0].usage.prompt_tokens,
            sum(sample.usage.completion_tokens for sample in samples),
            sum(sample.usage.num_preemptions for sample in samples),
            min(sample.usage.cached_tokens for sample in samples),  # what one of them computed was run
        )
        return replace(samples[0], finish_reason=failed.finish_reason, error=failed.error, usage=usage, samples=samples)

    @classmethod
    def refused(cls, row: Row, error: str | None, reason: FinishReason = "error") -> RowResult:
        """The result of a row that was not run at all; it keeps its prompt where that consists of token ids."""
        try:
            tokens = np.asarray(row.tokens).reshape(-1)
        except ValueError:  # lists of different lengths
            tokens = np.zeros(0, np.int32)
        fits = np.issubdtype(tokens.dtype, np.integer) and bool((tokens == tokens.astype(np.int32)).all())
        tokens = tokens.astype(np.int32) if fits else np.zeros(0, np.int32)
        return cls(
            row=row,
            token_ids=tokens,
            logprobs=np.full(len(tokens), np.nan, np.float32),
            finish_reason=reason,
            usage=Usage(len(tokens), 0),
            error=error,
        )


@dataclass(slots=True)
class RequestIds:
    """Internal ids, unique whatever the callers' own ids are."""

    _next: int = field(default=0)

    def new(self) -> RequestId:
        """The next id."""
        self._next += 1
        return RequestId(self._next)
