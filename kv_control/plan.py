"""The values that pass through one step, in the order in which a step must happen.

For:        carrying *reserve, scrub, confirm, plan* in types: only a scrubbed reservation can be planned.
Not for:    making those decisions (scheduler, control_plane) or running them (kv_execution).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import RequestError
from kv_common.page_table import KvPageTableV1

RequestId = NewType("RequestId", int)
"""Internal, unique per driver; a caller's own id is data on the request."""


@dataclass(frozen=True, slots=True)
class RequestHandle:
    """A request's row in the page map, good until the request is released.

    Attributes:
      row: index of the row, ``0..max_num_seqs - 1``.
      epoch: which tenant of that row this is; a stale epoch is refused everywhere.
    """

    row: int
    epoch: int


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How to choose a request's next token. "Off" is temperature 0, top-k 0, top-p 1, min-p 0.

    Attributes:
      temperature: 0 chooses the most likely token.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of likeliest tokens whose probabilities sum to at least this.
      min_p: drop tokens less likely than this share of the likeliest.
      seed: uint32; together with sample index and absolute position it fixes the random number.
      sample_index: which of a prompt's ``n`` samples this is.

    Raises:
      RequestError: a value is outside its range; the message names it.

    >>> SamplingSpec(temperature=-1.0)
    Traceback (most recent call last):
    kv_common.errors.RequestError: temperature=-1.0: must be a finite number of at least 0
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0

    def __post_init__(self) -> None:
        for name, good, wanted in (
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a finite number of at least 0"),
            ("top_k", self.top_k >= 0, "at least 0, where 0 keeps every token"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1, where 1 keeps every token"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1, where 0 keeps every token"),
            ("seed", 0 <= self.seed < 1 << 32, "a number of 32 bits"),
            ("sample_index", 0 <= self.sample_index < 1 << 31, "at least 0"),
        ):
            if not good:
                raise RequestError(f"{name}={getattr(self, name)}: must be {wanted}")


GREEDY = SamplingSpec()


@dataclass(frozen=True, slots=True)
class RequestSlice:
    """One request's share of a step: the tokens to feed and what to read back.

    Attributes:
      handle: the request's row.
      start: position of the first fed token, equal to the tokens already written.
      tokens: int32 ``[n]``, the tokens to feed. Ignored where ``previous_sample`` is given.
      previous_sample: feed, instead of ``tokens[0]``, entry ``previous_sample`` of the tokens that the
        previous step sampled and that may still be on the device. Then ``n`` is 1.
      sample: how to choose the token after the last fed one; None samples nothing (a chunk that does
        not finish its prompt).
      targets: int32 ``[n]`` or None: for each fed token the token that follows it, whose logprob is
        wanted; -1 where none is wanted.
    """

    handle: RequestHandle
    start: int
    tokens: NDArray[np.int32]
    previous_sample: int | None = None
    sample: SamplingSpec | None = None
    targets: NDArray[np.int32] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens this request runs this step."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A scheduling decision: how many tokens each request runs now, decodes first.

    Attributes:
      num_tokens: request id to tokens, in batch order. Prefill, chunked prefill and decode are values
        of this one number.
    """

    num_tokens: Mapping[RequestId, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole step."""
        return sum(self.num_tokens.values())


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages for a step's slices are held; some of them may still carry another request's K/V.

    Attributes:
      slices: the step, in batch order.
      dirty_pages: int32, pages of this reservation that must be scrubbed before they are used.
      serial: which reservation this is; each is confirmed and planned at most once.
    """

    slices: tuple[RequestSlice, ...]
    dirty_pages: NDArray[np.int32]
    serial: int


@dataclass(frozen=True, slots=True)
class ScrubbedReservation:
    """A reservation whose dirty pages were overwritten; made only by ``ControlPlane.confirm_scrubbed``."""

    slices: tuple[RequestSlice, ...]
    serial: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step that is ready to run.

    Attributes:
      slices: the step, in batch order (a snapshot: results are attributed by it, never by later state).
      table: the page bookkeeping, padded to ``(token_rung, row_rung)``.
      token_rung: the only traced size, ``T``.
      row_rung: request rows ``R``, a function of the token rung.
    """

    slices: tuple[RequestSlice, ...]
    table: KvPageTableV1
    token_rung: int
    row_rung: int
