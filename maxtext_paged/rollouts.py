"""What a trainer needs of an engine between and after rollouts: memory that comes and goes, and one number to trust.

For:        ``OfflineEngine.sleep``, ``wake`` and ``logprob_gap``; weights come through ``update_params``.
Not for:    generating, or training.
May import: the standard library, numpy, kv_common, maxtext_paged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kv_common.errors import KvCacheError
from maxtext_paged.generation import Generation

if TYPE_CHECKING:
    from maxtext_paged.dense_forward import DenseForward
    from maxtext_paged.session import PagedSession

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """How far the sampler's logprobs are from those of MaxText's dense forward under the same weights.

    Attributes:
      largest: the largest |sampler logprob - dense logprob|; 0 without tokens. mean: of them.
      index, place: the result and the token, counted from 0, where it is largest.
      num_tokens: that were compared.
    """

    largest: float = 0.0
    mean: float = 0.0
    index: int | None = None
    place: int | None = None
    num_tokens: int = 0


class Rollouts:
    """The part of ``OfflineEngine`` that a training loop uses between its steps."""

    session: Any
    _turns: Any
    _dense: DenseForward | None = None

    if TYPE_CHECKING:

        def _paged_only(self, name: str) -> None: ...
        def _running_session(self) -> PagedSession: ...

    @property
    def asleep(self) -> bool:
        """Whether ``sleep`` gave the pool back."""
        return self._running_session().asleep

    def sleep(self) -> int:
        """Give the pool's memory back, for a training step; returns its bytes. Weights stay, cached pages go.

        Until ``wake`` only ``update_params``, ``logprob_gap``, ``metrics`` and ``close`` work. Asleep already, it does
        nothing.

        Raises:
          KvCacheError: a stream has requests under way: finish or close it.
        """
        self._paged_only("sleep")
        with self._turns:
            session = self._running_session()
            if session.asleep:
                return 0
            freed = session.sleep()
        logger.info("sleep: %.1f MiB of pages given back", freed / 2**20)
        return freed

    def wake(self) -> None:
        """Take the pool's memory again; nothing compiles. Awake already, it does nothing."""
        self._paged_only("wake")
        with self._turns:
            self._running_session().wake()

    def logprob_gap(self, results: Iterable[Generation]) -> LogprobGap:
        """Replay results, teacher-forced, through MaxText's own dense forward under the weights in use now.

        The metric of a rollout: what is above rounding means that trainer and sampler disagree about the policy, by a
        stale weight or a fault. Costs one dense forward a sample; call it before ``update_params``, also while asleep.
        """
        self._paged_only("logprob_gap")
        with self._turns:
            session = self._running_session()
            if self._dense is None:
                from maxtext_paged.dense_forward import DenseForward

                self._dense = DenseForward(session.config, session.model.mesh)
            gap, total = LogprobGap(), 0.0
            count, largest = 0, 0.0
            where: tuple[int | None, int | None] = (None, None)
            for result in _samples(results):
                tokens = np.concatenate([result.prompt_token_ids, result.token_ids])
                scores = self._dense.scores(session.runtime.params, tokens)
                off = np.abs(result.logprobs - scores.logprobs[len(result.prompt_token_ids) - 1 :])
                count, total = count + len(off), total + float(off.sum())
                worst = int(np.argmax(np.where(np.isnan(off), np.inf, off)))
                if not off[worst] <= largest:  # a number that is none is the worst
                    largest, where = float(off[worst]), (result.index, worst)
            if count:
                gap = LogprobGap(largest, total / count, *where, count)
        logger.info("logprob gap: at most %.3g over %d tokens", gap.largest, gap.num_tokens)
        return gap

    def _awake_session(self) -> PagedSession:
        session = self._running_session()
        if session.asleep:
            raise KvCacheError("this OfflineEngine is asleep: wake() it first")
        return session


def _samples(results: Iterable[Generation]) -> Iterator[Generation]:
    """Every sample that has tokens."""
    for result in results:
        for sample in result.samples or (result,):
            if sample.ok and len(sample.token_ids):
                yield sample
