"""Overwriting pages where layers of different windows have pools of their own.

For:        scrubbing, poisoning and copying pages of one group, of all its layers in one dispatch.
Not for:    knowing which pages (kv_control), or one group's programs (pool.py).
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from kv_execution.pool import Scrubber

Leaves = Sequence[jax.Array]


class GroupScrubber:
    """One ``Scrubber`` a group, each over the leaves that hold its pages.

    Args:
      num_pages: pages of each group, that without a window first.
      leaf_groups: the group of each leaf; None where there is one group: then every leaf is its own.
    """

    def __init__(self, num_pages: Sequence[int], leaf_groups: Sequence[int] | None) -> None:
        self._scrubbers = [Scrubber(n) for n in num_pages]
        self._leaves = (
            None
            if leaf_groups is None
            else [[i for i, own in enumerate(leaf_groups) if own == group] for group in range(len(num_pages))]
        )

    def scrub(self, leaves: Leaves, pages: NDArray[np.int32], group: int = 0) -> Leaves:
        """Zero exactly ``pages`` (int32 ``[n]``) of the group's leaves, which are donated."""
        return self._within(leaves, group, lambda own: self._scrubbers[group].scrub(own, pages))

    def poison(self, leaves: Leaves, pages: NDArray[np.int32], group: int = 0) -> Leaves:
        """Fill exactly ``pages`` of the group's leaves with NaN."""
        return self._within(leaves, group, lambda own: self._scrubbers[group].poison(own, pages))

    def copy(self, leaves: Leaves, copies: NDArray[np.int32], group: int = 0) -> Leaves:
        """Copy pages within the group's leaves (int32 ``[2, n]``, sources and targets)."""
        return self._within(leaves, group, lambda own: self._scrubbers[group].copy(own, *copies))

    def warm_up(self, leaves: Leaves) -> Leaves:
        """Compile every program, changing nothing."""
        for group, scrubber in enumerate(self._scrubbers):
            leaves = self._within(leaves, group, scrubber.warm_up)
        return leaves

    def _within(self, leaves: Leaves, group: int, change: Callable[[Any], Any]) -> Leaves:
        if self._leaves is None:
            changed: Leaves = change(leaves)
            return changed
        own = self._leaves[group]
        result = list(leaves)
        for i, leaf in zip(own, change([leaves[i] for i in own]), strict=True):
            result[i] = leaf
        return result
