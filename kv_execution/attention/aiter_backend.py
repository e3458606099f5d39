"""The aiter backend: AMD's own kernels behind the protocol, through an XLA FFI shim.

For:        bfloat16 and float16 pools on AMD GPUs whose aiter libraries were built and named; asked for by name only.
Not for:    the shim (native/csrc/aiter_handlers.cc) or finding libraries (native/aiter_library.py).
May import: kv_common, kv_control, jax.

A step's leading rows of one new token go to ``pa_ragged``, all others to ``mha_batch_prefill``. Neither knows a row
without keys, so padding rows are given one key of page 0, and what comes of them is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from kv_common.errors import ConfigError, UnsupportedError
from kv_common.page_table import KvPageTableV1
from kv_control.bucketing import Ladder
from kv_execution.attention.capabilities import Capabilities, check_options
from kv_execution.metadata import PageMetadata
from kv_execution.native.aiter_library import (
    APPEND_TARGET,
    ATTEND_TARGET,
    DECODE_TARGET,
    PARTITION_TOKENS,
    DecodeKernel,
    open_decode_kernel,
)
from kv_execution.quantised import KvPool, unscaled
from kv_execution.split_plan import SplitPlan

AITER_CAPABILITIES = Capabilities(
    head_sizes=frozenset({64, 128, 256}),
    page_sizes=frozenset({16}),
    dtypes=frozenset({"bfloat16", "float16"}),
    sliding_window=False,
    soft_cap=False,
    sinks=False,
    max_pages=65_536,
    max_pool_bytes=2**31 - 1,
)
"""What both launchers take. Pages and bytes were real faults: page ids of 17 bits, and offsets past 2 GiB."""

AITER_PROVEN_DEVICES: frozenset[str] = frozenset()
"""Architectures on which the conformance suite has passed on the device: there ``auto`` may take it. None so far."""

MAX_GROUP_SIZE = 16
"""Query heads of a KV head: rows of the matrix instruction that ``pa_ragged`` is made of."""


def context_ladder(max_model_len: int) -> Ladder:
    """Rungs of ``max_seqlen_k``, which is static in a program: doubling from one partition to all of a context.

    >>> context_ladder(1000).rungs, context_ladder(100).rungs
    ((256, 512, 1000), (100,))
    """
    rungs, rung = [], PARTITION_TOKENS
    while rung < max_model_len:
        rungs.append(rung)
        rung *= 2
    return Ladder([*rungs, max_model_len])


@dataclass(frozen=True, slots=True)
class AiterPlans:
    """``SplitPlans`` of ``pa_ragged``: every row is cut into partitions of 256 keys, so there is nothing to keep."""

    @property
    def where(self) -> str:
        """What the pieces are."""
        return f"partitions of {PARTITION_TOKENS} tokens"

    def plan(self, table: KvPageTableV1, window: int | None, block_epoch: int) -> tuple[SplitPlan, bool]:
        """The pieces of a step's rows of one token, and that nothing had to be built for them on the host.

        >>> from kv_common.page_table import PageRow, pack_page_table
        >>> rows = [PageRow(299, 1, np.arange(19)), PageRow(0, 1, np.arange(19, 20))]
        >>> table = pack_page_table(
        ...     rows, num_pages=20, tokens_per_page=16, token_rung=2, row_rung=2, index_capacity=20)
        >>> AiterPlans().plan(table, None, 0)[0]
        SplitPlan(num_chunks=3, num_merged_rows=1)
        """
        del window, block_epoch
        single = np.diff(table.query_start_loc) == 1
        pieces = -(-table.seq_lens[single].astype(np.int64) // PARTITION_TOKENS)
        return SplitPlan(int(pieces.sum()), int((pieces > 1).sum())), False


@dataclass(frozen=True, slots=True)
class AiterBackend:
    """``PagedAttentionBackend`` by aiter's launchers.

    Attributes:
      kv_heads: KV heads of one shard; a pool with another number is refused at trace time. None: not checked.
      door: of the shim's targets: ``""``, or ``"_host"`` in tests, where no device has a stream.
    """

    kv_heads: int | None = None
    door: str = ""

    @property
    def name(self) -> str:
        """``"aiter"``."""
        return "aiter"

    def append(
        self,
        k_pool: KvPool,
        v_pool: KvPool,
        key: jax.Array,
        value: jax.Array,
        slot_mapping: jax.Array,
    ) -> tuple[KvPool, KvPool]:
        """See ``PagedAttentionBackend.append``. aiter drops negative slots only: those past the pool become -1."""
        k_pool, v_pool = unscaled(k_pool), unscaled(v_pool)
        self._check_pools(k_pool, v_pool)
        num_slots = k_pool.shape[0] * k_pool.shape[1]
        slots = jnp.asarray(slot_mapping)
        slots = jnp.where((slots < 0) | (slots >= num_slots), -1, slots)
        key, value = (jnp.asarray(new).astype(k_pool.dtype) for new in (key, value))
        structs = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (k_pool, v_pool)]
        call = jax.ffi.ffi_call(APPEND_TARGET + self.door, structs, input_output_aliases={0: 0, 1: 1})
        k_pool, v_pool = call(k_pool, v_pool, key, value, slots, _one())
        return k_pool, v_pool

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
        """See ``PagedAttentionBackend.attend``."""
        k_pool, v_pool = unscaled(k_pool), unscaled(v_pool)
        self._check(query, k_pool, v_pool, scale, sliding_window, soft_cap, sinks)
        starts = jnp.asarray(pages.query_start_loc)
        num_rows, num_tokens = starts.shape[0] - 1, query.shape[0]
        # Decodes come first in a step; a row of one token behind a longer one is the other launcher's.
        leading = jnp.sum(jnp.cumprod(jnp.diff(starts) == 1), dtype=jnp.int32)
        lists = self._lists(pages, k_pool.shape[1])
        decoded = self._decode_rows(query, k_pool, v_pool, pages, lists, scale)
        pooled = query.astype(k_pool.dtype)
        call = jax.ffi.ffi_call(ATTEND_TARGET + self.door, jax.ShapeDtypeStruct(pooled.shape, pooled.dtype))
        ragged = call(pooled, k_pool, v_pool, jnp.maximum(starts, leading), *lists, scale=np.float32(scale))
        token = jnp.arange(num_tokens)
        mine = (token < leading)[:, None, None]
        output = jnp.where(mine, decoded[jnp.minimum(token, num_rows - 1)], ragged)
        return jnp.where((token < starts[-1])[:, None, None], output, 0).astype(query.dtype)

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
        """See ``PagedAttentionBackend.decode``: row ``i`` is token ``i``."""
        k_pool, v_pool = unscaled(k_pool), unscaled(v_pool)
        self._check(query, k_pool, v_pool, scale, sliding_window, soft_cap, sinks)
        starts = jnp.asarray(pages.query_start_loc)
        rows = self._decode_rows(query, k_pool, v_pool, pages, self._lists(pages, k_pool.shape[1]), scale)
        token = jnp.arange(query.shape[0])
        output = rows[jnp.minimum(token, rows.shape[0] - 1)]
        return jnp.where((token < starts[-1])[:, None, None], output, 0).astype(query.dtype)

    def _decode_rows(
        self,
        query: jax.Array,
        k_pool: jax.Array,
        v_pool: jax.Array,
        pages: PageMetadata,
        lists: Sequence[jax.Array],
        scale: float,
    ) -> jax.Array:
        """``[R, heads, head_dim]``: each row's first new token over all of the row's keys; right for rows of one."""
        num_rows, heads, head_dim = pages.seq_lens.shape[0], query.shape[1], query.shape[2]
        longest = pages.max_seqlen_k
        if longest is None:
            longest = pages.kv_indices.shape[0] * k_pool.shape[1]
        kernel = DecodeKernel.of(
            group_size=heads // k_pool.shape[2],
            head_dim=head_dim,
            page_size=k_pool.shape[1],
            dtype=k_pool.dtype.name,
            max_seqlen_k=longest,
        )
        first = jnp.minimum(jnp.asarray(pages.query_start_loc)[:-1], query.shape[0] - 1)
        rows = query[first].astype(k_pool.dtype)
        space = workspace_bytes(num_rows=num_rows, query_heads=heads, head_dim=head_dim, max_seqlen_k=longest)
        structs = [jax.ShapeDtypeStruct(rows.shape, rows.dtype), jax.ShapeDtypeStruct((space,), jnp.uint8)]
        output, _ = jax.ffi.ffi_call(DECODE_TARGET + self.door, structs)(
            rows,
            k_pool,
            v_pool,
            *lists,
            _one(),
            kernel=open_decode_kernel(kernel),
            scale=np.float32(scale),
            max_seqlen_k=np.int64(longest),
        )
        return output

    def _lists(self, pages: PageMetadata, page_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """``kv_indptr``, ``kv_indices`` and ``kv_last_page_len`` in which every padding row has one key, of page 0."""
        starts, indptr = jnp.asarray(pages.query_start_loc), jnp.asarray(pages.kv_indptr)
        num_rows = starts.shape[0] - 1
        padding = jnp.diff(starts) == 0
        extra = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(padding, dtype=jnp.int32)])
        listed = jnp.pad(jnp.asarray(pages.kv_indices), (0, num_rows))
        listed = jnp.where(jnp.arange(listed.shape[0]) < indptr[-1], listed, 0)
        return indptr + extra, listed, jnp.where(padding, 1, jnp.asarray(pages.kv_last_page_len))

    def _check(
        self,
        query: jax.Array,
        k_pool: jax.Array,
        v_pool: jax.Array,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: jax.Array | None,
    ) -> None:
        check_options(scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)
        self._check_pools(k_pool, v_pool)
        if sliding_window is not None or soft_cap is not None or sinks is not None:
            raise ConfigError("paged_backend=aiter: it has no window, cap or sinks (AITER_CAPABILITIES)")
        if query.shape[1] > MAX_GROUP_SIZE * k_pool.shape[2]:
            raise UnsupportedError(
                f"paged_backend=aiter: {query.shape[1]} query heads over {k_pool.shape[2]} KV heads: allowed are at "
                f"most {MAX_GROUP_SIZE} for each"
            )

    def _check_pools(self, *pools: jax.Array) -> None:
        for pool in pools:
            if self.kv_heads is not None and pool.shape[2] != self.kv_heads:
                raise UnsupportedError(
                    f"a pool of {pool.shape[2]} KV heads was handed to kernels of {self.kv_heads} heads a shard: a "
                    "sharded pool must enter through jax.shard_map (paged_attention's mesh and head_axes), or XLA "
                    "gathers all of it on every device"
                )


def workspace_bytes(*, num_rows: int, query_heads: int, head_dim: int, max_seqlen_k: int) -> int:
    """Bytes of a decode's pieces: a float32 sum and maximum each, and a vector in half.

    >>> workspace_bytes(num_rows=2, query_heads=4, head_dim=64, max_seqlen_k=300)
    2176
    """
    partitions = -(-max_seqlen_k // PARTITION_TOKENS)
    return num_rows * query_heads * partitions * (2 * 4 + 2 * head_dim)


def _one() -> jax.Array:
    """The scales of K and V, read by the kernels even where nothing is quantised."""
    return jnp.ones(1, jnp.float32)
