"""Comparing a paged run with a dense forward, token by token and number by number.

Greedy tokens are compared teacher-forced: the run's own tokens go through the dense model, and each must be its
argmax up to a tie. Free-running trajectories of two programs are never compared beyond ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kv_control.request import Request


class Dense(Protocol):
    """Whoever gives the logits of a whole context."""

    def logits(self, tokens: np.ndarray, pad_to: int | None = None) -> np.ndarray:
        """float32 ``[len(tokens), vocab]``."""
        ...


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, over the last axis."""
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def assert_teacher_forced(
    requests: Sequence[Request], dense: Dense, *, relative: float, pad_to: int = 64, greedy: bool = True
) -> float:
    """Every generated token is the dense argmax up to a tie, and every logprob is dense's.

    Args:
      relative: bound on a logit's error, as a share of the largest |logit|. A tie is a margin of twice that (two
        logits may each be off); a logprob may be off by twice that too (a logit, and the normaliser).

    Returns:
      The worst logprob error seen.
    """
    worst = 0.0
    for request in requests:
        tokens = request.tokens
        logits = dense.logits(tokens, pad_to=pad_to)
        bound = 2 * relative * float(np.abs(logits).max())
        first = len(request.prompt) - 1
        rows = np.arange(first, len(tokens) - 1)
        if greedy:
            margin = logits[rows].max(axis=-1) - logits[rows, tokens[rows + 1]]
            assert (margin <= bound).all(), f"request {request.id}: not dense's argmax, by up to {margin.max()}"
        expected = log_softmax(logits)[np.arange(len(tokens) - 1), tokens[1:]]
        got = np.concatenate([request.prompt_logprobs, request.logprobs])
        assert np.isnan(got[0])
        known = np.arange(1, len(tokens)) if request.want_prompt_logprobs else rows + 1
        error = np.abs(got[known] - expected[known - 1])
        assert (error <= bound).all(), f"request {request.id}: a logprob is off by {error.max()}, allowed {bound}"
        worst = max(worst, float(error.max()))
    return worst
