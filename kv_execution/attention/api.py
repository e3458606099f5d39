"""Paged attention: the backend protocol, and the one place that builds a backend's arguments.

For:        appending a step's K/V and attending over pages, sharded or not, through any backend.
Not for:    any kernel; one file beside this one per backend.
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kv_common.errors import LayoutError
from kv_execution.metadata import PageMetadata
from kv_execution.quantised import KvPool


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """One layer's attention arithmetic. Every field is stated; kernels may not default any of them.

    Attributes:
      scale: factor on ``query @ key``. MaxText's queries arrive scaled, so its layers say 1.0.
      sliding_window: a token sees itself and the ``sliding_window - 1`` before it; None sees all.
      soft_cap: scores become ``cap * tanh(score / cap)``; None leaves them.
    """

    scale: float
    sliding_window: int | None
    soft_cap: float | None


class PagedAttentionBackend(Protocol):
    """Three operations over NHD pools ``[num_pages, tokens_per_page, kv_heads, head_dim]`` of one shard.

    Rows of padding (``slot_mapping`` one past the last slot, ``row_of_token == R``) write nothing and
    produce zeros. Keys are cast to the pool's dtype, or quantised into it; scores and sums are float32.
    """

    @property
    def name(self) -> str:
        """Short name, as in the ``paged_backend`` option and in reports."""
        ...

    def append(
        self,
        k_pool: KvPool,
        v_pool: KvPool,
        key: jax.Array,
        value: jax.Array,
        slot_mapping: jax.Array,
    ) -> tuple[KvPool, KvPool]:
        """Write each new token's key and value (``[T, kv_heads, head_dim]``) to its slot."""
        ...

    def attend(
        self,
        query: jax.Array,
        k_pool: KvPool,
        v_pool: KvPool,
        pages: PageMetadata,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: jax.Array | None,
    ) -> jax.Array:
        """Attention of ragged queries ``[T, heads, head_dim]`` over their requests' pages, causal.

        ``sinks``: float32 ``[heads]`` or None, one extra logit per head in the softmax's denominator.
        """
        ...

    def decode(
        self,
        query: jax.Array,
        k_pool: KvPool,
        v_pool: KvPool,
        pages: PageMetadata,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: jax.Array | None,
    ) -> jax.Array:
        """As ``attend``, for steps in which every request has exactly one new token."""
        ...


def paged_attention(
    backend: PagedAttentionBackend,
    options: AttentionOptions,
    *,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    k_pool: KvPool,
    v_pool: KvPool,
    pages: PageMetadata,
    sinks: jax.Array | None,
    mesh: Mesh | None,
    head_axes: tuple[str, ...],
) -> tuple[jax.Array, KvPool, KvPool]:
    """Append this step's K/V to the pools, then attend.

    Args:
      query: ``[T, heads, head_dim]``. key, value: ``[T, kv_heads, head_dim]``.
      k_pool, v_pool: with as many heads as ``key``; or, where shards are more than heads, a multiple of them: then
        consecutive pool heads are copies of one head, as ``KvStorageLayoutV1`` lays them out.
      sinks: ``[heads]`` or None.
      mesh, head_axes: with mesh axes that shard KV heads the whole runs under ``jax.shard_map`` with
        only those axes manual and no collective between append and attention; otherwise as is.

    Returns:
      ``(output [T, heads, head_dim], k_pool, v_pool)``; the pools alias their inputs under donation.
    """

    def local(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        k_pool: KvPool,
        v_pool: KvPool,
        pages: PageMetadata,
        *sinks: jax.Array,
    ) -> tuple[jax.Array, KvPool, KvPool]:
        k_pool, v_pool = backend.append(k_pool, v_pool, key, value, pages.slot_mapping)
        output = backend.attend(
            query,
            k_pool,
            v_pool,
            pages,
            scale=options.scale,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
            sinks=sinks[0] if sinks else None,
        )
        return output, k_pool, v_pool

    pool_heads, kv_heads = k_pool.shape[2], key.shape[1]
    if pool_heads % kv_heads:
        raise LayoutError(f"a pool of {pool_heads} heads cannot hold {kv_heads} KV heads, nor copies of them")
    if pool_heads > kv_heads:
        key, value = (jnp.repeat(new, pool_heads // kv_heads, axis=1) for new in (key, value))
    arguments: tuple[Any, ...] = (query, key, value, k_pool, v_pool, pages) + (() if sinks is None else (sinks,))
    if mesh is None or not head_axes:
        return local(*arguments)
    heads, pool = PartitionSpec(None, head_axes, None), PartitionSpec(None, None, head_axes, None)
    # One spec serves a quantised pool's two arrays: they have the same axes.
    in_specs = (heads, heads, heads, pool, pool, PartitionSpec()) + (
        () if sinks is None else (PartitionSpec(head_axes),)
    )
    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=(heads, pool, pool),
        axis_names=set(head_axes),
        check_vma=False,
    )
    return sharded(*arguments)
