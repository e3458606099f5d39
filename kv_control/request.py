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
from kv_control.plan import GREEDY, RequestHandle, RequestId, SamplingSpec

FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestStatus(enum.Enum):
    """Where a request stands; a preempted one is WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class GrowingArray[Scalar: np.generic]:
    """A one-dimensional array that appends in amortised constant time and never changes what it holds.

    >>> array = GrowingArray(np.array([3, 4], np.int32))
    >>> before = array.view
    >>> array.append(5)
    >>> array.view.tolist(), before.tolist()
    ([3, 4, 5], [3, 4])
    """

    __slots__ = ("_buffer", "_size")

    def __init__(self, initial: NDArray[Scalar]) -> None:
        self._buffer = initial  # full, so the first append moves on to a buffer of our own
        self._size = len(initial)

    def __len__(self) -> int:
        return self._size

    @property
    def view(self) -> NDArray[Scalar]:
        """What was appended so far, not copied; a later append leaves this view as it is."""
        return self._buffer[: self._size]

    def append(self, value: float) -> None:
        """Add one value at the end."""
        if self._size == len(self._buffer):
            grown = np.empty(max(16, 2 * self._size), self._buffer.dtype)
            grown[: self._size] = self._buffer
            self._buffer = grown
        self._buffer[self._size] = value
        self._size += 1


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and what has become of it. Generated tokens join ``tokens``, so nothing that counts
    them (``min_tokens``, ``max_tokens``, positions) starts again after a preemption.

    Attributes:
      id: internal id, unique per driver.
      prompt: int32 ``[num_prompt_tokens]``.
      sampling: how to choose its tokens.
      max_tokens: most tokens to generate; 0 only scores the prompt. ``Scheduler.submit`` lowers it to
        what the context leaves.
      stop_token_ids: tokens that end it; the ending token is kept.
      ignore_eos: no token ends it.
      min_tokens: generated tokens before a stop token may end it: the first that can is number
        ``min_tokens + 1``.
      want_prompt_logprobs: fill ``prompt_logprobs``.
      prompt_logprobs: float32 ``[num_prompt_tokens]``, logprob of each prompt token given those before
        it; NaN where not (yet) known, and always at position 0.
      num_computed: tokens whose K/V is written or in flight; the next step starts there.
      status, handle: its state, and its row while RUNNING.
      finish_reason, error: why it ended, and the text where that is "error".
      num_preemptions: times it was sent back.
      arrival: place in the order of submission; -1 before.

    >>> request = Request(RequestId(1), np.array([5, 6, 7]), max_tokens=2, stop_token_ids=frozenset({9}))
    >>> request.append(8, -0.5)
    >>> request.tokens.tolist(), request.num_generated, request.ended()
    ([5, 6, 7, 8], 1, None)
    >>> request.append(9, -0.25)
    >>> request.ended(), request.logprobs.tolist()
    ('stop', [-0.5, -0.25])

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
    num_computed: int = field(default=0, init=False)
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    handle: RequestHandle | None = field(default=None, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)
    num_preemptions: int = field(default=0, init=False)
    arrival: int = field(default=-1, init=False)
    prompt_logprobs: NDArray[np.float32] = field(init=False)
    _num_prompt_logprobs: int = field(default=1, init=False)
    _tokens: GrowingArray[np.int32] = field(init=False)
    _logprobs: GrowingArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        prompt = np.asarray(self.prompt)
        if prompt.ndim != 1 or (prompt.size and not np.issubdtype(prompt.dtype, np.integer)):
            raise RequestError(f"a prompt is a one-dimensional array of token ids, not {prompt.dtype} {prompt.shape}")
        if prompt.size and (prompt.min() < 0 or prompt.max() > np.iinfo(np.int32).max):
            raise RequestError(f"token ids lie in 0..2**31-1, not {prompt.min()}..{prompt.max()}")
        for name in ("max_tokens", "min_tokens"):
            if getattr(self, name) < 0:
                raise RequestError(f"{name}={getattr(self, name)}: must be at least 0")
        self.prompt = prompt.astype(np.int32)
        self.prompt_logprobs = np.full(len(prompt), np.nan, np.float32)
        self._tokens = GrowingArray(self.prompt)
        self._logprobs = GrowingArray(np.zeros(0, np.float32))

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32 ``[num_tokens]``, prompt and generated tokens; a view that later tokens leave as it is."""
        return self._tokens.view

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """float32 ``[num_generated]``, logprob of each generated token."""
        return self._logprobs.view

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self._tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, before and after any preemption."""
        return len(self._logprobs)

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be fed; 1 is a decode, more is a prefill."""
        return len(self._tokens) - self.num_computed

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens whose K/V it will ever hold: the last generated token is never fed."""
        return len(self.prompt) + max(self.max_tokens - 1, 0)

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    def append(self, token: int, logprob: float) -> None:
        """Take a newly sampled token."""
        self._tokens.append(token)
        self._logprobs.append(logprob)

    def ended(self) -> FinishReason | None:
        """Whether its tokens say that it is done, and why."""
        generated = self.num_generated
        if generated > self.min_tokens and not self.ignore_eos and int(self._tokens.view[-1]) in self.stop_token_ids:
            return "stop"
        if generated >= self.max_tokens and (generated or self.num_uncomputed == 0):
            return "length"  # a request that only scores has no token to end with: its prompt must be through
        return None

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
