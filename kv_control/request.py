"""A request: its tokens, how far it has got, and when it is done.

For:        the one mutable object per request that scheduler and driver share.
Not for:    pages (page_map), order of service (scheduler) or text.
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import InvariantError, RequestError
from kv_control.logit_options import NO_LOGIT_OPTIONS, Alternatives, LogitOptions, banned_tokens
from kv_control.plan import GREEDY, RequestHandle, RequestId, SamplingSpec
from kv_control.request_table import NOBODY, RequestTable

FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestStatus(enum.Enum):
    """Where a request stands; a preempted one is WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and what has become of it. Generated tokens join ``tokens``, so nothing that counts
    them (``min_tokens``, ``max_tokens``, positions) starts again after a preemption.

    While it runs, its tokens and counts live in the scheduler's ``RequestTable``, where a step changes those of
    all requests at once; ``enter`` and ``leave`` move them.

    Attributes:
      id: internal id, unique per driver.
      prompt: int32 ``[num_prompt_tokens]``.
      sampling: how to choose its tokens.
      max_tokens: most tokens to generate; 0 only scores the prompt. ``Scheduler.submit`` lowers it to
        what the context leaves.
      stop_token_ids: tokens that end it; the ending token is kept.
      ignore_eos: no token ends it.
      min_tokens: generated tokens before a stop token may be chosen: the first that can is number
        ``min_tokens + 1``.
      options: what else is done to its logits, and how many alternatives are reported.
      want_prompt_logprobs: fill ``prompt_logprobs``.
      group: requests of one group have equal prompts and different ``sampling.sample_index``: the first to run
        computes the prompt, the others share its pages.
      waited_for_prefix: it waited while another request computed the beginning of its prompt.
      page_keys, keys_namespace: the prefix index's names of its whole pages, as far as they were needed.
      prompt_logprobs: float32 ``[num_prompt_tokens]``, logprob of each prompt token given those before
        it; NaN where not (yet) known, and always at position 0.
      alternatives: one entry for each generated token, where ``options.top_logprobs`` asks for them.
      status, handle: its state, and its row while RUNNING.
      finish_reason, error: why it ended, and the text where that is "error".
      num_preemptions: times it was sent back.
      num_cached_tokens: prompt tokens whose K/V it found in the prefix cache when it was first let in.
      num_shared_tokens: prompt tokens whose K/V it took over from its group then.
      arrival: place in the order of submission; -1 before.

    >>> request = Request(RequestId(1), np.array([5, 6, 7]), max_tokens=2)
    >>> request.num_tokens, request.max_kv_tokens, request.prompt_targets(0, 3)
    (3, 4, None)

    Raises:
      RequestError: the prompt is not one-dimensional integers, or a count is negative.
    """

    id: RequestId
    prompt: NDArray[np.int32]
    sampling: SamplingSpec = GREEDY
    max_tokens: int = 16
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    want_prompt_logprobs: bool = False
    group: int | None = None
    options: LogitOptions = NO_LOGIT_OPTIONS
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    handle: RequestHandle | None = field(default=None, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)
    num_preemptions: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    num_shared_tokens: int = field(default=0, init=False)
    arrival: int = field(default=-1, init=False)
    prompt_logprobs: NDArray[np.float32] = field(init=False)
    alternatives: list[Alternatives] = field(default_factory=list, init=False, repr=False)
    waited_for_prefix: bool = field(default=False, init=False, repr=False)
    page_keys: list[bytes] = field(default_factory=list, init=False, repr=False)
    keys_namespace: bytes | None = field(default=None, init=False, repr=False)
    _num_seen: int = field(default=0, init=False, repr=False)
    _num_prompt_logprobs: int = field(default=1, init=False)
    _tokens: NDArray[np.int32] = field(init=False, repr=False)
    _logprobs: NDArray[np.float32] = field(init=False, repr=False)
    _table: RequestTable | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            prompt = np.asarray(self.prompt)
        except ValueError as error:
            raise RequestError(f"a prompt is a one-dimensional array of token ids: {error}") from None
        if prompt.ndim != 1 or (prompt.size and not np.issubdtype(prompt.dtype, np.integer)):
            raise RequestError(f"a prompt is a one-dimensional array of token ids, not {prompt.dtype} {prompt.shape}")
        if prompt.size and (prompt.min() < 0 or prompt.max() > np.iinfo(np.int32).max):
            raise RequestError(f"token ids lie in 0..2**31-1, not {prompt.min()}..{prompt.max()}")
        for name in ("max_tokens", "min_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 0:
                raise RequestError(f"{name}={value!r}: must be a whole number of at least 0")
            setattr(self, name, int(value))
        self.prompt = prompt.astype(np.int32)
        unknown = np.broadcast_to(np.float32(np.nan), (len(prompt),))  # one number, however long the prompt
        self.prompt_logprobs = unknown.copy() if self.want_prompt_logprobs else unknown
        self._tokens = self.prompt
        self._logprobs = np.zeros(0, np.float32)

    # --- tokens and counts, wherever they are ----------------------------------------------------------

    @property
    def _row(self) -> int:
        assert self.handle is not None  # a request is in a table exactly while it has a row
        return self.handle.row

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32 ``[num_tokens]``, prompt and generated tokens; later tokens leave it as it is."""
        if self._table is None:
            return self._tokens
        return self._table.tokens[self._row, : self.num_tokens].copy()  # the row will be another request's

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """float32 ``[num_generated]``, logprob of each generated token."""
        if self._table is None:
            return self._logprobs
        return self._table.logprobs[self._row, len(self.prompt) : self.num_tokens].copy()

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self._tokens) if self._table is None else int(self._table.num_tokens[self._row])

    @property
    def num_computed(self) -> int:
        """Tokens whose K/V is written or in flight; the next step starts there."""
        return 0 if self._table is None else int(self._table.num_computed[self._row])

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def ran(self) -> bool:
        """Whether any step ran a token of it."""
        return bool(self._num_seen if self._table is None else self._table.num_seen[self._row])

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, before and after any preemption."""
        return self.num_tokens - len(self.prompt)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens still to be fed; 1 is a decode, more is a prefill, -1 a decode ahead of its last token."""
        return self.num_tokens - self.num_computed

    def token_at(self, position: int) -> int:
        """One token, without copying the others."""
        return int(self._tokens[position] if self._table is None else self._table.tokens[self._row, position])

    def logprob_at(self, position: int) -> float:
        """The logprob of the generated token at a position, without copying the others."""
        if self._table is None:
            return float(self._logprobs[position - len(self.prompt)])
        return float(self._table.logprobs[self._row, position])

    def enter(self, table: RequestTable, handle: RequestHandle, num_computed: int) -> None:
        """Start to run: tokens and counts move to the handle's row of ``table``."""
        row, num_prompt, num_tokens = handle.row, len(self.prompt), len(self._tokens)
        table.ids[row], table.epochs[row] = self.id, handle.epoch
        table.num_tokens[row], table.num_computed[row], table.num_prompt[row] = num_tokens, num_computed, num_prompt
        table.num_in_flight[row] = 0
        table.end_at[row] = num_prompt + self.max_tokens
        never = np.iinfo(np.int64).max
        stops = bool(self.stop_token_ids) and not self.ignore_eos
        table.may_stop_at[row] = num_prompt + self.min_tokens + 1 if stops else never
        table.max_kv_tokens[row] = self.max_kv_tokens
        table.wants_targets[row] = self.want_prompt_logprobs and self._num_prompt_logprobs < num_prompt
        table.num_published[row] = 0
        table.num_seen[row] = self._num_seen
        table.sampling.put(row, self.sampling)
        table.has_options[row] = self.options.changes_logits or bool(banned_tokens(self))
        table.counts_tokens[row] = self.options.counts_tokens
        table.num_top[row] = self.options.top_logprobs
        table.options_sent[row] = False
        table.num_with_options += self._has_options
        table.tokens[row, :num_tokens] = self._tokens
        table.logprobs[row, num_prompt:num_tokens] = self._logprobs
        self._table, self.handle, self.status = table, handle, RequestStatus.RUNNING

    def leave(self) -> RequestHandle | None:
        """Stop running: tokens move back here, what was computed is given up. Returns the handle it held."""
        if self._table is None:
            return None
        self._tokens, self._logprobs, self._num_seen = self.tokens, self.logprobs, int(self._table.num_seen[self._row])
        handle, self.handle = self.handle, None
        assert handle is not None
        self._table.ids[handle.row] = NOBODY
        self._table.num_with_options -= self._has_options
        self._table = None
        return handle

    @property
    def _has_options(self) -> bool:
        return self.options.changes_logits or self.options.top_logprobs > 0 or bool(banned_tokens(self))

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens whose K/V it will ever hold: the last generated token is never fed."""
        return len(self.prompt) + max(self.max_tokens - 1, 0)

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    def ended(self) -> FinishReason | None:
        """Whether its tokens say that it is done, and why."""
        generated = self.num_generated
        may_stop = generated > self.min_tokens and not self.ignore_eos
        if may_stop and self.token_at(self.num_tokens - 1) in self.stop_token_ids:
            return "stop"
        if generated >= self.max_tokens and (generated or self.num_uncomputed == 0):
            return "length"  # a request that only scores has no token to end with: its prompt must be through
        return None

    @property
    def num_known_prompt_logprobs(self) -> int:
        """Leading prompt positions whose logprob is known (position 0 has none and counts)."""
        return self._num_prompt_logprobs

    def take_prompt_logprobs(self, values: NDArray[np.float32]) -> None:
        """Take the logprobs of prompt positions ``0 .. len(values) - 1`` from whoever computed them before."""
        first, last = self._num_prompt_logprobs, min(len(values), len(self.prompt))
        if last > first and self.want_prompt_logprobs:
            self.prompt_logprobs[first:last] = values[first:last]
            self._num_prompt_logprobs = last

    def prompt_targets(self, start: int, num_tokens: int) -> NDArray[np.int32] | None:
        """For each token fed from ``start`` on: the prompt token behind it, if its logprob is still wanted.

        Returns:
          int32 ``[num_tokens]``, -1 where none is wanted; None where none is wanted at all.
        """
        first = max(start, self._num_prompt_logprobs - 1)
        last = min(start + num_tokens, len(self.prompt) - 1)
        if not self.want_prompt_logprobs or first >= last:
            return None
        targets = np.full(num_tokens, -1, np.int32)
        targets[first - start : last - start] = self.prompt[first + 1 : last + 1]
        return targets

    def record_prompt_logprobs(self, start: int, targets: NDArray[np.int32], values: NDArray[np.float32]) -> None:
        """Take the logprobs of ``targets`` as ``prompt_targets(start, ...)`` gave them, each position once.

        Args:
          values: float32 ``[len(targets)]``; entries without a target are ignored.

        Raises:
          InvariantError: a position was skipped or is already known (results of another step).
        """
        wanted = np.flatnonzero(targets >= 0)
        positions = start + 1 + wanted
        if not len(wanted):
            return
        first, last = int(positions[0]), int(positions[-1])
        if first != self._num_prompt_logprobs or last >= len(self.prompt) or last - first + 1 != len(wanted):
            raise InvariantError(
                f"request {self.id}: prompt logprobs of positions {first}..{last} arrived, "
                f"position {self._num_prompt_logprobs} of {len(self.prompt)} is next"
            )
        self.prompt_logprobs[positions] = np.asarray(values)[wanted]
        self._num_prompt_logprobs = last + 1
        if self._table is not None:
            self._table.wants_targets[self._row] = last + 1 < len(self.prompt)
