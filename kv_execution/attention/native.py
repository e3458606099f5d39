"""The native backend: C++ kernels for CPUs, called through XLA's foreign function interface.

For:        float32, bfloat16, int8 and fp8 pools on any CPU that jax runs on.
Not for:    the kernels (kv_execution/native/csrc) or finding the library (kv_execution/native/library.py).
May import: kv_common, kv_control, jax.

One ``attend`` call serves a step whatever it mixes: inside, a work list gives each row to the kernel that fits it.
Rows of one token are cut over their keys and merged (split-KV), longer rows are tiled. Quantised pools are read as they
are: a key's scale is put to its score, a value's to its weight. They are written by the rule of
kv_execution/quantised.py, so that both backends leave the same bits.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from kv_common.errors import ConfigError, UnsupportedError
from kv_execution.attention.capabilities import Capabilities, check_options
from kv_execution.metadata import PageMetadata
from kv_execution.native.library import APPEND_TARGET, ATTEND_TARGET, native_library
from kv_execution.quantised import QUANTISED_DTYPES, KvPool, QuantisedPool, quantise

NATIVE_CAPABILITIES = Capabilities(
    head_sizes=frozenset(range(16, 257, 16)),
    page_sizes=None,
    dtypes=frozenset({"float32", "bfloat16", *QUANTISED_DTYPES}),
    sliding_window=True,
    soft_cap=True,
    sinks=True,
    max_pages=None,
    max_pool_bytes=None,
)

_BEST = -1
_ACTIVATIONS = (jnp.float32, jnp.bfloat16)


def native_threads() -> int:
    """Threads of the pool on which XLA runs the kernels: one a CPU this process may use, at least one a device.

    ``PJRT_NPROC`` and ``NPROC`` are XLA's own variables for the number of CPUs: the first that holds a whole number
    counts, signs and blanks allowed, and a negative one is 0.
    """
    values = (os.environ.get(name, "").strip() for name in ("PJRT_NPROC", "NPROC"))
    told = next((int(value) for value in values if re.fullmatch(r"[+-]?[0-9]+", value)), None)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(usable if told is None else told, jax.local_device_count("cpu"))


@dataclass(frozen=True, slots=True)
class NativeBackend:
    """``PagedAttentionBackend`` in C++.

    Attributes:
      kv_heads: KV heads of one shard, as ``KvStorageLayoutV1.heads_per_shard()`` counts them. A pool with another
        number is a sharded one that was handed over whole, outside ``jax.shard_map``: it is refused at trace time,
        because XLA would gather it to every device without a word. None: not checked.
      split_min_tokens: visible KV tokens from which one request alone is cut over its keys.
      split_min_tokens_per_request: the same per request where several decode in a step. Floors change the work list,
        never the traced program.
      instruction_set: one of ``native_library().builds``; None takes the best this machine runs.
    """

    kv_heads: int | None = None
    split_min_tokens: int = 0
    split_min_tokens_per_request: int = 0
    instruction_set: str | None = None

    @property
    def name(self) -> str:
        """``"native"``."""
        return "native"

    def append(
        self,
        k_pool: KvPool,
        v_pool: KvPool,
        key: jax.Array,
        value: jax.Array,
        slot_mapping: jax.Array,
    ) -> tuple[KvPool, KvPool]:
        """See ``PagedAttentionBackend.append``. Slots outside the pool, negative ones too, are dropped."""
        self._check_pools(k_pool, v_pool)
        native_library()
        key, value = jnp.asarray(key), jnp.asarray(value)
        if isinstance(k_pool, QuantisedPool):
            assert isinstance(v_pool, QuantisedPool)  # K and V are of one dtype
            (keys, key_scales), (values, value_scales) = (quantise(new, k_pool.dtype.name) for new in (key, value))
            k_values, v_values = _write(k_pool.values, v_pool.values, keys, values, slot_mapping)
            k_scales, v_scales = _write(k_pool.scales, v_pool.scales, key_scales, value_scales, slot_mapping)
            return QuantisedPool(k_values, k_scales), QuantisedPool(v_values, v_scales)
        assert not isinstance(v_pool, QuantisedPool)
        return _write(k_pool, v_pool, key.astype(k_pool.dtype), value.astype(k_pool.dtype), slot_mapping)

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
        check_options(scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)
        self._check_pools(k_pool, v_pool)
        dtype = query.dtype
        if dtype not in _ACTIVATIONS:
            query = query.astype(jnp.float32)
        (k_values, k_scales), (v_values, v_scales) = _arrays(k_pool), _arrays(v_pool)
        output = jax.ffi.ffi_call(ATTEND_TARGET, jax.ShapeDtypeStruct(query.shape, query.dtype))(
            query,
            k_values,
            v_values,
            k_scales,
            v_scales,
            pages.query_start_loc,
            pages.seq_lens,
            pages.kv_indptr,
            pages.kv_indices,
            pages.kv_first_page_offset,
            jnp.zeros(0, jnp.float32) if sinks is None else jnp.asarray(sinks, jnp.float32),
            scale=np.float32(scale),
            soft_cap=np.float32(0.0 if soft_cap is None else soft_cap),
            window=np.int64(0 if sliding_window is None else sliding_window),
            min_tokens=np.int64(self.split_min_tokens),
            min_tokens_per_request=np.int64(self.split_min_tokens_per_request),
            build=np.int64(self._build()),
        )
        return output.astype(dtype)

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
        """See ``PagedAttentionBackend.decode``: the same call, since the work list finds rows of one token itself."""
        return self.attend(
            query,
            k_pool,
            v_pool,
            pages,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
        )

    def _build(self) -> int:
        library = native_library()
        if self.instruction_set is None:
            return _BEST
        if self.instruction_set not in library.builds:
            raise ConfigError(
                f"instruction_set={self.instruction_set!r}: this machine runs {', '.join(library.builds)}"
            )
        return library.builds[self.instruction_set]

    def _check_pools(self, *pools: KvPool) -> None:
        for pool in jax.tree.leaves(pools):
            if self.kv_heads is not None and pool.shape[2] != self.kv_heads:
                raise UnsupportedError(
                    f"a pool of {pool.shape[2]} KV heads was handed to kernels of {self.kv_heads} heads a shard: a "
                    "sharded pool must enter through jax.shard_map (paged_attention's mesh and head_axes), or XLA "
                    "gathers all of it on every device"
                )
            # A traced pool's sharding is not known before XLA has decided it; an array's is.
            if not isinstance(pool, jax.core.Tracer) and isinstance(pool, jax.Array) and not pool.is_fully_replicated:
                raise UnsupportedError(
                    f"a pool sharded as {pool.sharding} was handed over outside jax.shard_map: XLA would gather all "
                    "of it on every device; pass paged_attention's mesh and head_axes"
                )


def _write(
    k_pool: jax.Array, v_pool: jax.Array, key: jax.Array, value: jax.Array, slot_mapping: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Rows of bytes to their slots, in place: the same call for elements and for scales."""
    pools = tuple(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (k_pool, v_pool))
    call = jax.ffi.ffi_call(APPEND_TARGET, pools, input_output_aliases={0: 0, 1: 1})
    k_pool, v_pool = call(k_pool, v_pool, key, value, slot_mapping)
    return k_pool, v_pool


def _arrays(pool: KvPool) -> tuple[jax.Array, jax.Array]:
    """What the kernel reads: elements, and scales or an array of none."""
    if isinstance(pool, QuantisedPool):
        return pool.values, pool.scales
    return pool, jnp.zeros(0, jnp.float32)
