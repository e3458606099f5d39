"""The values that pass through one step, in the order in which a step must happen.

For:        carrying *reserve, scrub, confirm, plan* in types: only a scrubbed reservation can be planned.
Not for:    making those decisions (scheduler, control_plane) or running them (kv_execution).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import NewType, overload

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import RequestError
from kv_common.page_table import KvPageTableV1
from kv_control.logit_options import StepOptions

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

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


@dataclass(frozen=True, slots=True, eq=False)
class SamplingColumns:
    """``SamplingSpec`` of several rows, one array per field.

    Attributes:
      temperature, top_p, min_p: float32 ``[n]``. top_k, sample_index: int32 ``[n]``. seed: uint32 ``[n]``.
    """

    temperature: NDArray[np.float32]
    top_k: Int32
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint32]
    sample_index: Int32

    @classmethod
    def greedy(cls, n: int) -> SamplingColumns:
        """``n`` rows of the defaults."""
        return cls.of([GREEDY]).take(np.zeros(n, np.int64))

    @classmethod
    def of(cls, specs: Sequence[SamplingSpec]) -> SamplingColumns:
        """The columns of ``specs``."""
        return cls(
            temperature=np.array([spec.temperature for spec in specs], np.float32),
            top_k=np.array([spec.top_k for spec in specs], np.int32),
            top_p=np.array([spec.top_p for spec in specs], np.float32),
            min_p=np.array([spec.min_p for spec in specs], np.float32),
            seed=np.array([spec.seed for spec in specs], np.uint32),
            sample_index=np.array([spec.sample_index for spec in specs], np.int32),
        )

    def take(self, rows: Int64) -> SamplingColumns:
        """The columns at ``rows``, copied."""
        return SamplingColumns(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seed[rows],
            self.sample_index[rows],
        )

    def put(self, row: int, spec: SamplingSpec) -> None:
        """Overwrite one row."""
        for column in fields(self):
            getattr(self, column.name)[row] = getattr(spec, column.name)

    def spec(self, row: int) -> SamplingSpec:
        """One row as a value (as float32 holds its numbers)."""
        return SamplingSpec(**{column.name: getattr(self, column.name)[row].item() for column in fields(self)})


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch(Sequence[RequestSlice]):
    """The slices of one step as arrays: what the loop builds, plans and accounts for without looking at each.

    As a sequence it gives ``RequestSlice`` values, made when asked for.

    Attributes:
      rows, epochs: int64 ``[n]``, the requests' handles.
      start: int64 ``[n]``, position of each request's first fed token.
      num_tokens: int64 ``[n]``, tokens each request runs.
      tokens: int32 ``[sum(num_tokens)]``, request after request; an entry of ``previous_sample`` replaces its own.
      samples: bool ``[n]``, whether a token is chosen behind the last fed one.
      sampling: how, per request (rows that do not sample hold anything).
      previous_sample: int32 ``[n]``, see ``RequestSlice.previous_sample``; -1 for none.
      targets: int32 ``[sum(num_tokens)]``, see ``RequestSlice.targets``; None where nobody wants any.
      options: what is done to logits and reported of them; None where nobody asks for anything. Slices do not show it.
    """

    rows: Int64
    epochs: Int64
    start: Int64
    num_tokens: Int64
    tokens: Int32
    samples: NDArray[np.bool_]
    sampling: SamplingColumns
    previous_sample: Int32
    targets: Int32 | None = None
    options: StepOptions | None = None

    @classmethod
    def of(cls, slices: Iterable[RequestSlice]) -> StepBatch:
        """The arrays of ``slices``; a batch is returned as it is."""
        if isinstance(slices, StepBatch):
            return slices
        pieces = tuple(slices)
        previous = [-1 if piece.previous_sample is None else piece.previous_sample for piece in pieces]
        targets = [np.full(len(p.tokens), -1, np.int32) if p.targets is None else p.targets for p in pieces]
        nothing = np.zeros(0, np.int32)
        return cls(
            rows=np.array([piece.handle.row for piece in pieces], np.int64),
            epochs=np.array([piece.handle.epoch for piece in pieces], np.int64),
            start=np.array([piece.start for piece in pieces], np.int64),
            num_tokens=np.array([len(piece.tokens) for piece in pieces], np.int64),
            tokens=np.concatenate([nothing, *(piece.tokens for piece in pieces)]).astype(np.int32),
            samples=np.array([piece.sample is not None for piece in pieces], np.bool_),
            sampling=SamplingColumns.of([piece.sample or GREEDY for piece in pieces]),
            previous_sample=np.array(previous, np.int32),
            targets=np.concatenate(targets).astype(np.int32) if any(p.targets is not None for p in pieces) else None,
        )

    @property
    def ends(self) -> Int64:
        """int64 ``[n]``, where each request's tokens end in ``tokens``."""
        return np.cumsum(self.num_tokens)

    def handle(self, i: int) -> RequestHandle:
        """Whose slice ``i`` is."""
        return RequestHandle(int(self.rows[i]), int(self.epochs[i]))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> RequestSlice: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RequestSlice, ...]: ...
    def __getitem__(self, index: int | slice) -> RequestSlice | tuple[RequestSlice, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        i = range(len(self))[index]
        end = int(self.num_tokens[: i + 1].sum())
        fed = slice(end - int(self.num_tokens[i]), end)
        targets = None if self.targets is None else self.targets[fed]
        return RequestSlice(
            handle=self.handle(i),
            start=int(self.start[i]),
            tokens=self.tokens[fed],
            previous_sample=None if self.previous_sample[i] < 0 else int(self.previous_sample[i]),
            sample=self.sampling.spec(i) if self.samples[i] else None,
            targets=targets if targets is not None and (targets >= 0).any() else None,
        )

    def __iter__(self) -> Iterator[RequestSlice]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True, slots=True, eq=False)
class StepResults:
    """What a step brought, beside the batch that ran (never beside later state).

    Attributes:
      tokens: int32 ``[n]``, the token chosen for each slice; means nothing where it did not sample.
      logprobs: float32 ``[n]``, of those tokens under the unmodified model distribution.
      ok: bool ``[n]``, False where a slice's logits were not finite.
      target_logprobs: float32 ``[sum(num_tokens)]`` beside ``batch.targets``, NaN where none was wanted; None where
        the batch has no targets.
      top_ids, top_logprobs: int32 and float32 ``[n, k]``, the most likely tokens at each sampled one, likeliest first;
        a slice has as many as it asked for. None where none did.
    """

    tokens: Int32
    logprobs: NDArray[np.float32]
    ok: NDArray[np.bool_]
    target_logprobs: NDArray[np.float32] | None = None
    top_ids: Int32 | None = None
    top_logprobs: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """A scheduling decision: how many tokens each request runs now, decodes first.

    Attributes:
      ids: int64 ``[n]``, the requests, in batch order. rows, epochs: int64 ``[n]``, their handles.
      counts: int64 ``[n]``, tokens each runs. Prefill, chunked prefill and decode are values of this one number.
    """

    ids: Int64
    rows: Int64
    epochs: Int64
    counts: Int64

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> Mapping[RequestId, int]:
        """Request id to tokens, in batch order."""
        pairs = zip(self.ids.tolist(), self.counts.tolist(), strict=True)
        return MappingProxyType({RequestId(request_id): count for request_id, count in pairs})

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole step."""
        return int(self.counts.sum())


@dataclass(frozen=True, slots=True, eq=False)
class PageChores:
    """What must be done to the pools of one group before a step.

    Attributes:
      dirty_pages, copies: as in ``Reservation``.
    """

    dirty_pages: Int32
    copies: Int32


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Pages for a step's slices are held; some of them may still carry another request's K/V.

    Attributes:
      slices: the step, in batch order.
      dirty_pages: int32, pages of this reservation that must be scrubbed before they are used.
      copies: int32 ``[2, n]``, pages to copy whole, from the first row to the second, after the scrub.
      serial: which reservation this is; each is confirmed and planned at most once.
      windows: the same for the pools of each window group.
    """

    slices: StepBatch
    dirty_pages: Int32
    copies: Int32
    serial: int
    windows: tuple[PageChores, ...] = ()

    @property
    def chores(self) -> tuple[PageChores, ...]:
        """Of all groups: layers without a window, then each window group."""
        return (PageChores(self.dirty_pages, self.copies), *self.windows)


@dataclass(frozen=True, slots=True, eq=False)
class ScrubbedReservation:
    """A reservation whose dirty pages were overwritten; made only by ``ControlPlane.confirm_scrubbed``."""

    slices: StepBatch
    serial: int


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """A step that is ready to run.

    Attributes:
      slices: the step, in batch order (a snapshot: results are attributed by it, never by later state).
      table: the page bookkeeping, padded to ``(token_rung, row_rung)``.
      token_rung: the only traced size, ``T``.
      row_rung: request rows ``R``, a function of the token rung.
      block_epoch: the page map's when the table was packed; while it stands still, no page has moved.
      window_tables: the same bookkeeping for the pools of each window group.
    """

    slices: StepBatch
    table: KvPageTableV1
    token_rung: int
    row_rung: int
    block_epoch: int
    window_tables: tuple[KvPageTableV1, ...] = ()
