"""What a request may ask of its logits beside temperature and filters, and how a step hands it to the device.

For:        penalties, logit bias, the ban of stop tokens before ``min_tokens``, and how many alternatives to report.
Not for:    the arithmetic (kv_execution.logit_adjust), or stop strings (maxtext_paged.stop_strings).
May import: the standard library, numpy, kv_common.

Everything of a request that stays as it is lives on the device, in the request's row, and is sent once: with the first
step that samples for it after it was let in. A step then names the rows whose options act, and nothing else. What
changes is the history that penalties count. The device keeps a copy of the row's tokens: what the host knows is sent
with the options, and every later token is noted when it is fed, which is before it is first counted. A step that runs
ahead of the last token's reading feeds that token from the device and notes it from there, so a penalty is exact
although the host does not know the token yet. Nothing is counted up: preemption, a prefix hit, chunks or a group's
shared prompt change nothing, for whoever is let in (again) is sent again as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import RequestError

if TYPE_CHECKING:
    from kv_control.request import Request
    from kv_control.request_table import RequestTable

MAX_LOGIT_BIAS = 300
"""Most tokens of one request's ``logit_bias``."""
MAX_BANNED = 64
"""Most stop tokens that ``min_tokens`` can hold back."""
MAX_TOP_LOGPROBS = 20
"""Most alternatives at one token."""
MAX_ABS_BIAS = 100.0

FOR_EVER = np.iinfo(np.int32).max


class Alternatives(NamedTuple):
    """The most likely tokens at one place, likeliest first, under the unmodified model distribution.

    Attributes:
      ids: int32 ``[k]``. logprobs: float32 ``[k]``.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LogitOptions:
    """What is done to a request's logits before temperature and filters, and what is reported of them.

    The logits of the model, ``l``, become in this order: ``l + logit_bias``; of tokens in prompt or completion
    ``l / repetition_penalty`` where ``l > 0`` and ``l * repetition_penalty`` elsewhere; of tokens in the completion
    ``l - frequency_penalty * count - presence_penalty``. Greedy requests choose the largest of these. Reported logprobs
    stay those of the model.

    Attributes:
      repetition_penalty: above 0; 1 is off. presence_penalty, frequency_penalty: 0 is off.
      logit_bias: token id to what is added.
      top_logprobs: alternatives reported at each generated token, besides the token itself.

    Raises:
      RequestError: a value is outside its range; the message names it.

    >>> LogitOptions(logit_bias={7: -100.0}).changes_logits, LogitOptions(top_logprobs=2).changes_logits
    (True, False)
    >>> LogitOptions(repetition_penalty=0.0)
    Traceback (most recent call last):
    kv_common.errors.RequestError: repetition_penalty=0.0: must be a finite number above 0, where 1 is off
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        k, bias = self.top_logprobs, self.logit_bias
        whole = isinstance(k, int | np.integer) and not isinstance(k, bool)
        for name, good, wanted in (
            ("repetition_penalty", _finite(self.repetition_penalty) and self.repetition_penalty > 0, _ABOVE_0),
            ("presence_penalty", _finite(self.presence_penalty), "a finite number, where 0 is off"),
            ("frequency_penalty", _finite(self.frequency_penalty), "a finite number, where 0 is off"),
            ("top_logprobs", whole and 0 <= k <= MAX_TOP_LOGPROBS, f"a whole number in 0..{MAX_TOP_LOGPROBS}"),
        ):
            if not good:
                raise RequestError(f"{name}={getattr(self, name)!r}: must be {wanted}")
        if len(bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias names {len(bias)} tokens: at most {MAX_LOGIT_BIAS} are served")
        for token, value in bias.items():
            if not _whole(token) or not 0 <= token < 2**31 or not _finite(value) or abs(value) > MAX_ABS_BIAS:
                raise RequestError(
                    f"logit_bias={{{token!r}: {value!r}}}: must be token ids with numbers from -{MAX_ABS_BIAS:g} to "
                    f"{MAX_ABS_BIAS:g}"
                )

    @property
    def counts_tokens(self) -> bool:
        """Whether it depends on the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def changes_logits(self) -> bool:
        """Whether it acts on logits at all."""
        return self.counts_tokens or bool(self.logit_bias)


_ABOVE_0 = "a finite number above 0, where 1 is off"


def _whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _finite(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and math.isfinite(value)


NO_LOGIT_OPTIONS = LogitOptions()


def banned_tokens(request: Request) -> list[int]:
    """Stop tokens that may not be chosen before ``request.min_tokens`` others are."""
    return sorted(request.stop_token_ids) if request.min_tokens and not request.ignore_eos else []


def check_logit_options(request: Request, vocab_size: int) -> None:
    """Refuse what this model or a row of the device cannot hold.

    Raises:
      RequestError: names the option and its value.
    """
    options = request.options
    beyond = max(options.logit_bias, default=0)
    if beyond >= vocab_size:
        raise RequestError(f"logit_bias: id {beyond} is outside the vocabulary of {vocab_size}")
    if options.top_logprobs > vocab_size:
        raise RequestError(f"top_logprobs={options.top_logprobs}: the vocabulary has {vocab_size} tokens")
    num_banned = len(banned_tokens(request))
    if num_banned > MAX_BANNED:
        raise RequestError(
            f"min_tokens={request.min_tokens}: {num_banned} stop tokens would have to be held back, {MAX_BANNED} are "
            "served: name fewer in `stop_token_ids`"
        )


@dataclass(frozen=True, slots=True, eq=False)
class RowOptions:
    """One request's options as the device's row ``row`` takes them.

    Attributes:
      ids, values, until: int32, float32 and int32 ``[k]``: what is added to which token's logit as long as the position
        of the token to be chosen is below ``until``.
      penalties: float32 ``[3]``: repetition, presence, frequency.
      num_prompt: tokens of the prompt. tokens: int32 ``[n]``, all that are known; none where nothing counts them.
    """

    row: int
    ids: NDArray[np.int32]
    values: NDArray[np.float32]
    until: NDArray[np.int32]
    penalties: NDArray[np.float32]
    num_prompt: int
    tokens: NDArray[np.int32]

    @classmethod
    def of(cls, request: Request) -> RowOptions:
        """A running request's."""
        assert request.handle is not None
        options, banned = request.options, banned_tokens(request)
        bias = options.logit_bias
        penalties = [options.repetition_penalty, options.presence_penalty, options.frequency_penalty]
        ready = request.num_prompt_tokens + request.min_tokens
        return cls(
            row=request.handle.row,
            ids=np.array([*bias, *banned], np.int32),
            values=np.array([*bias.values(), *(-np.inf for _ in banned)], np.float32),
            until=np.array([*(FOR_EVER for _ in bias), *(ready for _ in banned)], np.int32),
            penalties=np.array(penalties, np.float32),
            num_prompt=request.num_prompt_tokens,
            tokens=request.tokens if options.counts_tokens else np.zeros(0, np.int32),
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepOptions:
    """The options that act in one step, beside its batch of ``n`` slices.

    Attributes:
      rows: int32 ``[n]``, the row whose options act on what the slice samples; -1 for none.
      num_top: int32 ``[n]``, alternatives wanted beside the sampled token.
      loads: rows that the device has not been sent yet.
      notes: bool ``[n]``, the token that the slice feeds is new to the device's copy of its row's tokens.
    """

    rows: NDArray[np.int32]
    num_top: NDArray[np.int32]
    loads: tuple[RowOptions, ...]
    notes: NDArray[np.bool_]


def step_options(
    table: RequestTable, rows: NDArray[np.int64], samples: NDArray[np.bool_], request_of: list[Request | None]
) -> StepOptions | None:
    """The options of a step over these rows of the table; None, at the cost of one look, where nobody has any.

    Args:
      samples: bool ``[n]``, which of them sample. request_of: the request behind each row of the table.
    """
    if not table.num_with_options:
        return None
    acts = samples & table.has_options[rows]
    num_top = np.where(samples, table.num_top[rows], 0).astype(np.int32)
    if not acts.any() and not num_top.any():
        return None
    new = acts & ~table.options_sent[rows]
    requests = [request_of[row] for row in rows[new].tolist()]
    return StepOptions(
        rows=np.where(acts, rows, -1).astype(np.int32),
        num_top=num_top,
        loads=tuple(RowOptions.of(request) for request in requests if request is not None),
        notes=acts & ~new & table.counts_tokens[rows],
    )
