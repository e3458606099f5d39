"""How fused decode rows are cut over their keys: the native work list's rule, kept on the host while pages stand still.

A plan follows from the pages that each row reads (``ceil`` to whole pages), so it changes only where a row crosses a
page boundary or the pool's block epoch moves. It holds no page ids: a stale one could misreport, never misread.

For:        counting the pieces of a launch before it runs, and the memory that its partial results take.
Not for:    deciding whether rows are cut (dispatch.py) or cutting them (native/csrc/work_list.h).
May import: numpy, kv_common.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kv_common.page_table import KvPageTableV1

MIN_CHUNK_TOKENS, PIECES_PER_THREAD, BLOCK_TOKENS = 256, 4, 64
"""The work list's: the shortest piece of a decode, pieces made for each thread, and what pieces are rounded to."""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """What a fused launch comes to.

    Attributes:
      num_chunks: pieces of all rows. num_merged_rows: rows of several pieces, put together by their log-sum-exp.
    """

    num_chunks: int
    num_merged_rows: int

    @property
    def merge(self) -> str:
        """``"on"`` where any row is merged."""
        return "on" if self.num_merged_rows else "off"


@dataclass(frozen=True, slots=True)
class PageRanges:
    """Which of its own pages each decode row of a step reads, int64 ``[n]`` each; ``last_page`` included.

    Attributes:
      pages: pages that the row's list has. visible: pages it reads.
    """

    pages: NDArray[np.int64]
    first_page: NDArray[np.int64]
    last_page: NDArray[np.int64]
    visible: NDArray[np.int64]

    @classmethod
    def of(cls, table: KvPageTableV1, window: int | None, tokens_per_page: int) -> PageRanges:
        """The ranges of the rows that have one new token."""
        count = table.num_reqs
        single = np.diff(table.query_start_loc[: count + 1]) == 1
        last_position = (table.seq_lens[:count] - table.kv_first_page_offset[:count])[single].astype(np.int64) - 1
        oldest = np.zeros_like(last_position) if window is None else np.maximum(last_position - window + 1, 0)
        first, last = oldest // tokens_per_page, last_position // tokens_per_page
        return cls(np.diff(table.kv_indptr[: count + 1])[single].astype(np.int64), first, last, last - first + 1)

    def fingerprint(self) -> Hashable:
        """Equal where every row reads the same range of a list of the same length."""
        return tuple(array.tobytes() for array in (self.pages, self.first_page, self.last_page, self.visible))


def split_plan(ranges: PageRanges, tokens_per_page: int, threads: int) -> SplitPlan:
    """The pieces of these rows on ``threads`` threads: about ``PIECES_PER_THREAD`` a thread, none below the minimum.

    >>> ranges = PageRanges(*np.array([[256], [0], [255], [256]]))
    >>> split_plan(ranges, tokens_per_page=16, threads=2)
    SplitPlan(num_chunks=8, num_merged_rows=1)
    """
    extents = ranges.visible * tokens_per_page
    wanted = max(MIN_CHUNK_TOKENS, int(extents.sum()) // (PIECES_PER_THREAD * threads) + 1)
    chunk = -(-wanted // BLOCK_TOKENS) * BLOCK_TOKENS
    pieces = -(-extents // chunk) if threads > 1 else np.ones_like(extents)
    return SplitPlan(int(pieces.sum()), int((pieces > 1).sum()))


class SplitPlans(Protocol):
    """Plans of a runtime's fused launches."""

    @property
    def where(self) -> str:
        """What the pieces run on, such as ``"4 threads"``."""
        ...

    def plan(self, table: KvPageTableV1, window: int | None, block_epoch: int) -> tuple[SplitPlan, bool]:
        """The plan of a step's decode rows, and whether it had to be built."""
        ...


@dataclass(slots=True)
class SplitPlanCache:
    """The last plan of each attention window, reused while the block epoch and the page ranges stand still.

    Attributes:
      threads: of the pool that runs the pieces; one cuts nothing. tokens_per_page: of the pool that they read.
    """

    threads: int = 1
    tokens_per_page: int = 1
    _plans: dict[int | None, tuple[Hashable, SplitPlan]] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """What the pieces run on."""
        return f"{self.threads} threads"

    def plan(self, table: KvPageTableV1, window: int | None, block_epoch: int) -> tuple[SplitPlan, bool]:
        """The plan of a step's decode rows, and whether it had to be built.

        Args:
          block_epoch: of the page map when the table was packed (``StepPlan.block_epoch``).
        """
        ranges = PageRanges.of(table, window, self.tokens_per_page)
        key = (block_epoch, ranges.fingerprint())
        kept = self._plans.get(window)
        if kept is not None and kept[0] == key:
            return kept[1], False
        plan = split_plan(ranges, self.tokens_per_page, self.threads)
        self._plans[window] = (key, plan)
        return plan, True


def split_kv_workspace_bytes(
    *, max_num_seqs: int, max_model_len: int, tokens_per_page: int, query_heads: int, head_dim: int, threads: int
) -> int:
    """Most bytes of partial results that one step holds at a time on one device: an upper bound of the work list's.

    Each piece of a decode keeps a float32 maximum and sum per query head, and one weighted value vector. Layers run
    one after the other and each frees its own. A piece is at least ``1 / (4 * threads)`` of all token slots read and at
    least 256, so rows that are cut are fewer than ``4 * threads``, and their pieces fewer than that plus one a row.

    Args:
      max_num_seqs: decode rows of a step. max_model_len: keys that one of them sees at most.
      query_heads: of one shard. threads: of XLA's pool; one thread cuts nothing.

    >>> split_kv_workspace_bytes(
    ...     max_num_seqs=1, max_model_len=512, tokens_per_page=16, query_heads=4, head_dim=16, threads=2)
    576
    """
    longest = -(-max_model_len // tokens_per_page) * tokens_per_page
    pieces_of_longest = -(-longest // MIN_CHUNK_TOKENS)
    if threads < 2 or pieces_of_longest < 2:
        return 0
    made = PIECES_PER_THREAD * threads
    pieces = min(made + min(max_num_seqs, made), max_num_seqs * pieces_of_longest)
    return pieces * query_heads * (head_dim + 2) * np.dtype(np.float32).itemsize
