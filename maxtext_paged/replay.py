"""Whether tokens that were written down are the ones a model chooses: a finished row against its dense scores.

For:        what can be asked of a row, and the verdict on one replayed sequence.
Not for:    computing scores (dense_forward.py), files and samples of them (cli/verify.py).
May import: the standard library, numpy, maxtext_paged.dense_forward and rows.

Two programs that compute the same logits round differently, so where two tokens are almost equally likely either may
be chosen: that is a tie, and no difference. How far two correct programs can be apart is a share of the largest logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from maxtext_paged.rows import Row

if TYPE_CHECKING:
    from maxtext_paged.dense_forward import DenseScores

LOGIT_ERRORS = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}
"""How far a logit may be off, as a share of the largest, by the narrowest dtype that a run computes or caches in.

Estimates for up to 100 layers, derived in docs/verify.md; ``verify --tolerance`` sets another."""
IMPOSSIBLE = -9999.0
"""How records write the logarithm of 0."""


def logit_error(*dtypes: str) -> float:
    """The bound for a run of these dtypes: that of the narrowest."""
    return max(LOGIT_ERRORS.get(dtype, LOGIT_ERRORS["bfloat16"]) for dtype in dtypes)


def why_not_argmax(row: Row) -> str | None:
    """Why a row's tokens need not be the likeliest ones; None where they must be.

    >>> why_not_argmax(Row(index=0, tokens=np.array([1], np.int32)))
    """
    options = row.options
    asked = {
        "sampled": row.sampling.temperature > 0,
        "penalties": options.repetition_penalty != 1 or options.presence_penalty or options.frequency_penalty,
        "logit_bias": bool(options.logit_bias),
        "min_tokens": row.min_tokens > 0,
    }
    return ", ".join(name for name, is_set in asked.items() if is_set) or None


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of a sequence that cannot be what it should be.

    Attributes:
      place: among the tokens that were generated, from 0. token: what is written.
      best: what the model finds likeliest. margin: by how much. bound: what a tie may have.
    """

    place: int
    token: int
    best: int
    margin: float
    bound: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a replay found.

    Attributes:
      num_tokens: tokens that had to be the likeliest. num_ties: those that are not, within rounding.
      worst_margin: the largest margin of a token that had to be the likeliest.
      num_logprobs: logprobs that were compared. worst_logprob: the largest difference among them.
      difference: the first token that differs beyond ties. wrong_logprobs: differences beyond rounding.
    """

    num_tokens: int = 0
    num_ties: int = 0
    worst_margin: float = 0.0
    num_logprobs: int = 0
    worst_logprob: float = 0.0
    difference: Difference | None = None
    wrong_logprobs: int = 0

    @property
    def agrees(self) -> bool:
        """Whether nothing differs beyond ties and rounding."""
        return self.difference is None and not self.wrong_logprobs

    @property
    def checked(self) -> bool:
        """Whether there was anything to compare."""
        return bool(self.num_tokens or self.num_logprobs)


def judge(
    scores: DenseScores,
    tokens: NDArray[np.int32],
    num_prompt: int,
    *,
    error: float,
    argmax: bool,
    logprobs: Sequence[float | None] = (),
    first_logprob: int | None = None,
) -> Verdict:
    """Compare a sequence with its scores.

    Args:
      tokens: int32 ``[n]``, prompt and completion. num_prompt: how many of them are the prompt.
      error: how far a logit may be off, as a share of the largest.
      argmax: whether every generated token must be the likeliest.
      logprobs: as written; None where there is no number. first_logprob: the place among ``tokens`` of the first one.

    >>> from maxtext_paged.dense_forward import DenseScores
    >>> scores = DenseScores(np.array([7, 8]), np.array([0.0, 3.0]), np.array([-0.1, -3.2]), scale=10.0)
    >>> judge(scores, np.array([1, 7, 9]), 1, error=1e-3, argmax=True).difference
    Difference(place=1, token=9, best=8, margin=3.0, bound=0.02)
    """
    bound = 2 * error * scores.scale  # two logits may be off; and a logprob by a logit and its normaliser
    margins = scores.margins[num_prompt - 1 :] if argmax else scores.margins[:0]
    beyond = np.flatnonzero(margins > bound)
    difference = None
    if len(beyond):
        place = int(beyond[0])
        where = num_prompt - 1 + place
        difference = Difference(
            place, int(tokens[where + 1]), int(scores.best[where]), float(scores.margins[where]), bound
        )
    first = num_prompt if first_logprob is None else first_logprob
    pairs = [
        (value, scores.logprobs[place - 1])
        for place, value in enumerate(logprobs, start=first)
        if place > 0 and value is not None
    ]
    off = np.array([abs(value - max(float(dense), IMPOSSIBLE)) for value, dense in pairs])
    return Verdict(
        num_tokens=len(margins),
        num_ties=int((margins > 0).sum()) - len(beyond),
        worst_margin=float(margins.max(initial=0.0)),
        num_logprobs=len(off),
        worst_logprob=float(off.max(initial=0.0)),
        difference=difference,
        wrong_logprobs=int((off > bound).sum()),
    )
