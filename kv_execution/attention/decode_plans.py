"""What a chosen backend's fused decodes come to on the host: their plans and the memory of their pieces.

For:        the assembly of a runtime, which asks one place whatever the backend.
Not for:    either rule (split_plan.py on CPUs, triton_plan.py on GPUs), or choosing a backend (select.py).
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

from kv_common.layout import KvStorageLayoutV1
from kv_control.bucketing import Ladder
from kv_execution.attention import aiter_backend
from kv_execution.attention.aiter_backend import AiterBackend, AiterPlans
from kv_execution.attention.api import PagedAttentionBackend
from kv_execution.attention.native import NativeBackend, native_threads
from kv_execution.attention.triton_backend import TritonBackend
from kv_execution.attention.triton_plan import TritonPlans
from kv_execution.dispatch import SplitFloors
from kv_execution.split_plan import SplitPlanCache, SplitPlans, split_kv_workspace_bytes


def has_split_kv(backend: PagedAttentionBackend) -> bool:
    """Whether a backend cuts decode rows over their keys."""
    return isinstance(backend, NativeBackend | TritonBackend | AiterBackend)


def decode_floors(backend: PagedAttentionBackend, floors: SplitFloors) -> SplitFloors:
    """The floors that a backend goes by: none where it cuts every row."""
    return SplitFloors() if isinstance(backend, AiterBackend) else floors


def context_ladder(backend: PagedAttentionBackend, max_model_len: int) -> Ladder | None:
    """Rungs of the longest context, for kernels that are compiled for one."""
    return aiter_backend.context_ladder(max_model_len) if isinstance(backend, AiterBackend) else None


def decode_plans(
    backend: PagedAttentionBackend, layout: KvStorageLayoutV1, query_heads: int, query_dtype: str
) -> SplitPlans:
    """How a backend cuts decode rows of ``query_heads`` heads of one shard; unused where it cuts none."""
    if isinstance(backend, TritonBackend):
        return TritonPlans.of(backend.resolved_target(), layout, query_heads, query_dtype)
    if isinstance(backend, AiterBackend):
        return AiterPlans()
    return SplitPlanCache(native_threads(), layout.tokens_per_page)


def decode_workspace_bytes(
    backend: PagedAttentionBackend,
    layout: KvStorageLayoutV1,
    query_heads: int,
    query_dtype: str,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """Most bytes of partial results that one step holds at a time on one device."""
    if isinstance(backend, TritonBackend):
        plans = TritonPlans.of(backend.resolved_target(), layout, query_heads, query_dtype)
        return plans.workspace_bytes(max_num_seqs=max_num_seqs, query_heads=query_heads, head_dim=layout.head_dim)
    if isinstance(backend, AiterBackend):
        return aiter_backend.workspace_bytes(
            num_rows=max_num_seqs, query_heads=query_heads, head_dim=layout.head_dim, max_seqlen_k=max_model_len
        )
    if isinstance(backend, NativeBackend):
        return split_kv_workspace_bytes(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            tokens_per_page=layout.tokens_per_page,
            query_heads=query_heads,
            head_dim=layout.head_dim,
            threads=native_threads(),
        )
    return 0
