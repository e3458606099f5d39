"""Padding of step shapes to short ladders, so that a run compiles a handful of programs and then none.

For:        choosing the padded size of a step.
Not for:    counting compiles (that is done by compile events) or building arrays.
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise

from kv_common.errors import ConfigError

DECODE_RUNGS = (1, 4)
"""Rungs below the smallest regular one, for the few rows at the end of a job. A step's matrix products are bound by
reading weights there, but not on every platform as they should be: SmolLM2-135M's take XLA:CPU 33 ms for 1 row, 34 for
2, 48 for 4, 54 for 8 and 72 for 16 (two cores, float32)."""

MAX_RUNGS = 7
"""Regular rungs: each costs a program to trace, compile and keep."""


class Ladder:
    """Increasing sizes; ``rung(n)`` is the smallest that holds ``n``, and the top is the cap.

    >>> ladder = Ladder([8, 32, 128])
    >>> ladder.rung(1), ladder.rung(8), ladder.rung(9), ladder.top
    (8, 8, 32, 128)
    >>> sorted(ladder.observed_shapes)
    [8, 32]
    """

    __slots__ = ("_observed", "_rungs")

    def __init__(self, rungs: Iterable[int]) -> None:
        self._rungs = tuple(rungs)
        if not self._rungs or self._rungs[0] < 1 or any(a >= b for a, b in pairwise(self._rungs)):
            raise ConfigError(f"a ladder needs increasing rungs of at least 1, not {list(self._rungs)}")
        self._observed: set[int] = set()

    @property
    def rungs(self) -> tuple[int, ...]:
        """All rungs, smallest first; warm-up walks them."""
        return self._rungs

    @property
    def top(self) -> int:
        """The cap."""
        return self._rungs[-1]

    @property
    def observed_shapes(self) -> frozenset[int]:
        """The rungs that were used so far."""
        return frozenset(self._observed)

    def rung(self, n: int) -> int:
        """The smallest rung that holds ``n``.

        Raises:
          ConfigError: ``n`` is above the cap; a step this large has no program.
        """
        if n > self.top:
            raise ConfigError(f"a step of {n} tokens is above the ladder's cap of {self.top} tokens")
        rung = self._rungs[bisect_left(self._rungs, n)]
        self._observed.add(rung)
        return rung


def token_ladder(max_num_batched_tokens: int, smallest: int = 8) -> Ladder:
    """At most seven rungs from ``smallest`` to the cap, doubling where that is enough, else a larger factor; and below
    them ``DECODE_RUNGS``.

    >>> token_ladder(512).rungs, token_ladder(8192).rungs
    ((1, 4, 8, 16, 32, 64, 128, 256, 512), (1, 4, 8, 24, 80, 256, 816, 2584, 8192))
    >>> token_ladder(100).rungs, token_ladder(5).rungs
    ((1, 4, 8, 16, 32, 56, 100), (1, 4, 5))
    """
    if max_num_batched_tokens < 1 or smallest < 1:
        raise ConfigError(
            f"paged_max_num_batched_tokens={max_num_batched_tokens}, smallest rung {smallest}: both must be at least 1"
        )
    below = {rung for rung in DECODE_RUNGS if rung < smallest}
    if max_num_batched_tokens > smallest:
        num_factors = min(MAX_RUNGS - 1, ((max_num_batched_tokens - 1) // smallest).bit_length())
        factor = (max_num_batched_tokens / smallest) ** (1 / num_factors)
        below |= {smallest * round(factor**i) for i in range(num_factors)}
    return Ladder([*sorted(rung for rung in below if rung < max_num_batched_tokens), max_num_batched_tokens])


def row_rung(token_rung: int, max_num_seqs: int) -> int:
    """Request rows of a step of ``token_rung`` tokens: every row has a token, so rows are no second ladder.

    >>> row_rung(8, 32), row_rung(128, 32)
    (8, 32)
    """
    return min(token_rung, max_num_seqs)
