"""How the Triton kernels cut a step's decode rows, on the host: the device's own rule (triton_work.py), in numpy.

For:        announcing and counting what a launch comes to, and the memory that its pieces take.
Not for:    the launch: its work list is made on the device, and this one could misreport, never misread.
May import: numpy, kv_common, kv_control, jax.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kv_common.layout import KvStorageLayoutV1
from kv_common.page_table import KvPageTableV1
from kv_execution.attention import triton_tiles, triton_work
from kv_execution.attention.triton_bridge import GpuTarget
from kv_execution.quantised import QUANTISED_DTYPES
from kv_execution.split_plan import SplitPlan


@dataclass(frozen=True, slots=True)
class TritonPlans:
    """Plans of fused decode launches; each step's is a few sums over its rows, so none is kept.

    Attributes:
      target: the device. row_programs: programs of one row and piece. block_tokens: what pieces are rounded up to.
      tokens_per_page: of the pool.
    """

    target: GpuTarget
    row_programs: int
    block_tokens: int
    tokens_per_page: int

    @classmethod
    def of(cls, target: GpuTarget, layout: KvStorageLayoutV1, query_heads: int, query_dtype: str) -> TritonPlans:
        """For pools of ``layout`` and ``query_heads`` heads of one shard."""
        exact = triton_work.is_exact(layout.dtype, query_dtype)
        quantised = layout.dtype in QUANTISED_DTYPES
        tile = triton_tiles.decode_tile(target, head_dim=layout.head_dim, exact=exact, quantised=quantised)
        group_size = query_heads // layout.heads_per_shard()
        blocks = -(-group_size // triton_tiles.heads_per_tile(group_size, tile.block_m))
        return cls(target, layout.heads_per_shard() * blocks, tile.block_t, layout.tokens_per_page)

    @property
    def where(self) -> str:
        """What the pieces run on."""
        return f"{self.target.num_sms} multiprocessors"

    def plan(self, table: KvPageTableV1, window: int | None, block_epoch: int) -> tuple[SplitPlan, bool]:
        """The plan of a step whose decode rows are cut, and that nothing had to be built for it on the host."""
        del block_epoch
        listed = len(table.kv_indices) * self.tokens_per_page
        splits = self.num_splits(len(table.seq_lens), listed if window is None else min(listed, window))
        single = np.diff(table.query_start_loc) == 1
        visible = (table.seq_lens - table.kv_first_page_offset)[single].astype(np.int64)
        if window is not None:
            visible = np.minimum(visible, window)
        piece = (
            np.maximum(visible, 1) if splits == 1 else np.maximum(-(-visible // splits), triton_work.MIN_PIECE_TOKENS)
        )
        pieces = -(-visible // (-(-piece // self.block_tokens) * self.block_tokens))
        return SplitPlan(int(pieces.sum()), int((pieces > 1).sum())), False

    def num_splits(self, num_rows: int, max_tokens: int) -> int:
        """Most pieces of a row in a step of ``num_rows``."""
        return triton_work.num_splits(
            num_rows=num_rows, row_programs=self.row_programs, max_tokens=max_tokens, num_sms=self.target.num_sms
        )

    def workspace_bytes(self, *, max_num_seqs: int, query_heads: int, head_dim: int) -> int:
        """Most bytes of pieces that one launch of any step holds, whatever its contexts."""
        any_context = triton_work.MAX_SPLITS * triton_work.MIN_PIECE_TOKENS
        return max(
            triton_work.workspace_bytes(
                num_splits=self.num_splits(num_rows, any_context),
                num_rows=num_rows,
                query_heads=query_heads,
                head_dim=head_dim,
            )
            for num_rows in range(1, max_num_seqs + 1)
        )
