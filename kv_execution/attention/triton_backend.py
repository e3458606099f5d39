"""The Triton backend: our GPU kernels behind the protocol, three operations and their launches.

For:        float32, bfloat16, float16, int8 and fp8 pools on NVIDIA and AMD GPUs.
Not for:    the kernels (triton_kernels), how they are launched (triton_bridge.py), or their sizes (triton_tiles.py).
May import: kv_common, kv_control, jax; the kernels, and with them triton, inside functions.

One ``attend`` serves a step whatever it mixes: rows of one new token go to the decode launch, longer ones to the
ragged launch, and a launch that finds no row of its kind ends at once. Quantised pools are read as they are: a key's
scale is put to its score, a value's to its weight. They are written by the rule of kv_execution/quantised.py, so that
every backend leaves the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kv_common.errors import UnsupportedError
from kv_execution.attention import triton_bridge, triton_tiles, triton_work
from kv_execution.attention.capabilities import Capabilities, check_options
from kv_execution.attention.triton_bridge import GpuTarget, KernelLaunch, Launcher
from kv_execution.dispatch import SplitFloors
from kv_execution.metadata import PageMetadata
from kv_execution.quantised import QUANTISED_DTYPES, KvPool, QuantisedPool, quantise

TRITON_CAPABILITIES = Capabilities(
    head_sizes=frozenset({64, 80, 96, 128, 256}),
    page_sizes=None,
    dtypes=frozenset({"float32", "bfloat16", "float16", *QUANTISED_DTYPES}),
    sliding_window=True,
    soft_cap=True,
    sinks=True,
    max_pages=None,
    max_pool_bytes=None,
)

WEIGHT_PARTS = {"bfloat16": 2, "float16": 2, "float32": 1, "int8": 2, "float8_e4m3fn": 2}
"""Half-precision parts that stand for a float32 weight where it meets half-precision values. Two keep the error under a
tenth of what float32 arithmetic may have (``tests/execution/numpy_model.py``); one would make it 14 times as large in
float16 and 140 times in bfloat16. Values of 8 bits meet their weights, times their scales, in bfloat16."""

STORED = {"int8": 1, "float8_e4m3fn": 2}
"""How the kernels read a quantised pool; 0 is one without scales."""

_APPEND_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class TritonBackend:
    """``PagedAttentionBackend`` in Triton.

    Attributes:
      kv_heads: KV heads of one shard; a pool with another number was handed over whole, outside ``jax.shard_map``, and
        is refused at trace time, because XLA would gather it to every device without a word. None: not checked.
      floors: when decode rows are cut over their keys; part of the work list, never of the traced program.
      target: what kernels are compiled for; None: this process's GPU.
      launcher: how a kernel enters the program.
      decode_tile, attend_tile: other tiles than ``triton_tiles``' own, for tests and tuning.
      min_piece_tokens: the shortest piece of a decode row.
    """

    kv_heads: int | None = None
    floors: SplitFloors = field(default_factory=SplitFloors)
    target: GpuTarget | None = None
    launcher: Launcher = triton_bridge.launch
    decode_tile: triton_tiles.Tile | None = None
    attend_tile: triton_tiles.Tile | None = None
    min_piece_tokens: int = triton_work.MIN_PIECE_TOKENS

    @property
    def name(self) -> str:
        """``"triton"``."""
        return "triton"

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
        key, value = jnp.asarray(key), jnp.asarray(value)
        if isinstance(k_pool, QuantisedPool):
            assert isinstance(v_pool, QuantisedPool)
            (keys, key_scales), (values, value_scales) = (quantise(new, k_pool.dtype.name) for new in (key, value))
            k_values, v_values = self._write(k_pool.values, v_pool.values, keys, values, slot_mapping)
            k_scales, v_scales = self._write(k_pool.scales, v_pool.scales, key_scales, value_scales, slot_mapping)
            return QuantisedPool(k_values, k_scales), QuantisedPool(v_values, v_scales)
        assert not isinstance(v_pool, QuantisedPool)
        return self._write(k_pool, v_pool, key, value, slot_mapping)

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
        step = self._step(query, k_pool, v_pool, pages, scale, sliding_window, soft_cap, sinks)
        return step.attend(step.decode(jnp.zeros_like(step.query)))

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
        """See ``PagedAttentionBackend.decode``: ``attend`` without the ragged launch."""
        step = self._step(query, k_pool, v_pool, pages, scale, sliding_window, soft_cap, sinks)
        return step.decode(jnp.zeros_like(step.query))

    def resolved_target(self) -> GpuTarget:
        """What kernels are compiled for."""
        return triton_bridge.local_target() if self.target is None else self.target

    def _write(
        self, k_pool: jax.Array, v_pool: jax.Array, key: jax.Array, value: jax.Array, slot_mapping: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Rows to their slots, in place: the same kernel for elements and for scales."""
        from kv_execution.attention.triton_kernels.append import append_kernel

        num_pages, page_size, kv_heads, row_size = k_pool.shape
        width = kv_heads * row_size
        block = min(_APPEND_BLOCK, triton_tiles.padded(width))
        k_pool, v_pool = self._launch(
            append_kernel,
            inputs=(key, value, jnp.asarray(slot_mapping)),
            in_place=(k_pool, v_pool),
            grid=(key.shape[0], -(-width // block)),
            constants={"NUM_SLOTS": num_pages * page_size, "WIDTH": width, "BLOCK": block},
            num_warps=4,
            num_stages=1,
        )
        return k_pool, v_pool

    def _step(
        self,
        query: jax.Array,
        k_pool: KvPool,
        v_pool: KvPool,
        pages: PageMetadata,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: jax.Array | None,
    ) -> _Step:
        check_options(scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)
        self._check_pools(k_pool, v_pool)
        return _Step(self, jnp.asarray(query), k_pool, v_pool, pages, scale, sliding_window, soft_cap, sinks)

    def _launch(
        self,
        kernel: Any,
        *,
        inputs: tuple[jax.Array, ...],
        in_place: tuple[jax.Array, ...] = (),
        outputs: tuple[jax.ShapeDtypeStruct, ...] = (),
        grid: tuple[int, ...],
        constants: dict[str, Any],
        num_warps: int,
        num_stages: int,
    ) -> tuple[jax.Array, ...]:
        call = KernelLaunch(kernel, inputs, in_place, outputs, grid, constants, num_warps, num_stages)
        return self.launcher(call, self.resolved_target())

    def _check_pools(self, *pools: KvPool) -> None:
        for pool in pools:
            scales = pool.scales.shape if isinstance(pool, QuantisedPool) else None
            if scales != ((*pool.shape[:3], 1) if pool.dtype.name in QUANTISED_DTYPES else None):
                raise UnsupportedError(
                    f"a pool of {pool.dtype} {pool.shape} with scales {scales}: they must be [pages, tokens, heads, 1] "
                    f"for {' and '.join(QUANTISED_DTYPES)}, and none for others"
                )
        if pools[0].dtype != pools[1].dtype:
            raise UnsupportedError(f"K and V pools are {pools[0].dtype} and {pools[1].dtype}: they must be alike")
        for pool in jax.tree.leaves(pools):
            if self.kv_heads is not None and pool.shape[2] != self.kv_heads:
                raise UnsupportedError(
                    f"a pool of {pool.shape[2]} KV heads was handed to kernels of {self.kv_heads} heads a shard: a "
                    "sharded pool must enter through jax.shard_map (paged_attention's mesh and head_axes), or XLA "
                    "gathers all of it on every device"
                )


@dataclass(frozen=True, slots=True)
class _Step:
    """One step's attention: its launches share what is said here once."""

    backend: TritonBackend
    query: jax.Array
    k_pool: KvPool
    v_pool: KvPool
    pages: PageMetadata
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: jax.Array | None

    def decode(self, output: jax.Array) -> jax.Array:
        """``output`` with the rows of one new token filled in."""
        from kv_execution.attention.triton_kernels import decode

        target = self.backend.resolved_target()
        head_dim, group_size, least = self.head_dim, self.group_size, self.backend.min_piece_tokens
        tile = self.backend.decode_tile or triton_tiles.decode_tile(target, **self.kind)
        group = triton_tiles.heads_per_tile(group_size, tile.block_m)
        row_programs = self.kv_heads * -(-group_size // group)
        num_rows = self.pages.seq_lens.shape[0]
        splits = triton_work.num_splits(
            num_rows=num_rows,
            row_programs=row_programs,
            max_tokens=self.most_visible,
            num_sms=target.num_sms,
            min_piece_tokens=least,
        )
        rows = triton_work.decode_rows(
            self.pages,
            sliding_window=self.sliding_window,
            num_splits=splits,
            block_tokens=tile.block_t,
            floors=self.backend.floors,
            min_piece_tokens=least,
        )
        launch: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        constants = self.constants(group, tile)
        if splits == 1:
            [output] = self.backend._launch(
                decode.decode_whole_kernel,
                inputs=(self.query, *self.elements, self.page_ids, rows, self.sink_logits, *self.scales),
                in_place=(output,),
                grid=(row_programs, num_rows),
                constants={**constants, "HAS_SINKS": self.sinks is not None},
                **launch,
            )
            return output
        heads = self.query.shape[1]
        part = (splits, num_rows, heads)
        maxima, totals, values = self.backend._launch(
            decode.decode_split_kernel,
            inputs=(self.query, *self.elements, self.page_ids, rows, *self.scales),
            outputs=(
                jax.ShapeDtypeStruct(part, jnp.float32),
                jax.ShapeDtypeStruct(part, jnp.float32),
                jax.ShapeDtypeStruct((*part, head_dim), jnp.float32),
            ),
            grid=(row_programs, splits, num_rows),
            constants=constants,
            **launch,
        )
        [output] = self.backend._launch(
            decode.merge_kernel,
            inputs=(maxima, totals, values, rows, self.sink_logits),
            in_place=(output,),
            grid=(heads, num_rows),
            constants={
                "NUM_HEADS": heads,
                "HEAD_DIM": head_dim,
                "PADDED_DIM": triton_tiles.padded(head_dim),
                "HAS_SINKS": self.sinks is not None,
            },
            num_warps=1,
            num_stages=1,
        )
        return output

    def attend(self, output: jax.Array) -> jax.Array:
        """``output`` with the rows of several new tokens filled in."""
        from kv_execution.attention.triton_kernels.attend import attend_kernel

        target = self.backend.resolved_target()
        group_size = self.group_size
        tile = self.backend.attend_tile or triton_tiles.attend_tile(target, **self.kind)
        group = triton_tiles.heads_per_tile(group_size, tile.block_m)
        tiles = triton_work.attend_tiles(self.pages, tile_tokens=tile.block_m // group)
        [output] = self.backend._launch(
            attend_kernel,
            inputs=(self.query, *self.elements, self.page_ids, tiles, self.sink_logits, *self.scales),
            in_place=(output,),
            grid=(self.kv_heads * -(-group_size // group), tiles.shape[0]),
            constants={
                **self.constants(group, tile),
                "WINDOW": self.sliding_window or 0,
                "HAS_SINKS": self.sinks is not None,
            },
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return output

    def constants(self, group: int, tile: triton_tiles.Tile) -> dict[str, Any]:
        """Compile-time parameters that attend and decode share."""
        num_pages, page_size = self.k_pool.shape[:2]
        return {
            "KV_HEADS": self.kv_heads,
            "GROUP_SIZE": self.group_size,
            "GROUP": group,
            "HEAD_DIM": self.head_dim,
            "PADDED_DIM": triton_tiles.padded(self.head_dim),
            "PAGE_SIZE": page_size,
            "NUM_PAGES": num_pages,
            "BLOCK_M": tile.block_m,
            "BLOCK_T": tile.block_t,
            "SCALE": float(self.scale),
            "SOFT_CAP": float(self.soft_cap or 0.0),
            "EXACT": self.exact,
            "PARTS": WEIGHT_PARTS[self.k_pool.dtype.name],
            "STORED": STORED.get(self.k_pool.dtype.name, 0),
        }

    @property
    def elements(self) -> tuple[jax.Array, jax.Array]:
        """What K and V pools hold, scales apart."""
        k, v = (pool.values if isinstance(pool, QuantisedPool) else pool for pool in (self.k_pool, self.v_pool))
        return k, v

    @property
    def scales(self) -> tuple[jax.Array, jax.Array]:
        """Scales of K and V; where there are none, arrays that are not read."""
        k, v = (
            pool.scales if isinstance(pool, QuantisedPool) else jnp.zeros(1, jnp.float32)
            for pool in (self.k_pool, self.v_pool)
        )
        return k, v

    @property
    def kv_heads(self) -> int:
        return self.k_pool.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k_pool.shape[3]

    @property
    def group_size(self) -> int:
        """Query heads of one KV head."""
        return self.query.shape[1] // self.kv_heads

    @property
    def kind(self) -> dict[str, Any]:
        """What tiles are chosen by."""
        quantised = isinstance(self.k_pool, QuantisedPool)
        return {"head_dim": self.head_dim, "exact": self.exact, "quantised": quantised}

    @property
    def exact(self) -> bool:
        """Whether products are made of float32 numbers."""
        return triton_work.is_exact(self.k_pool.dtype.name, self.query.dtype.name)

    @property
    def most_visible(self) -> int:
        """Keys that one query can see at most, from shapes alone."""
        listed = self.pages.kv_indices.shape[0] * self.k_pool.shape[1]
        return listed if self.sliding_window is None else min(listed, self.sliding_window)

    @property
    def page_ids(self) -> jax.Array:
        return jnp.asarray(self.pages.kv_indices)

    @property
    def sink_logits(self) -> jax.Array:
        return jnp.zeros(1, jnp.float32) if self.sinks is None else lax.convert_element_type(self.sinks, jnp.float32)
