"""Pool arrays: made under their sharding, scrubbed and poisoned page by page, all layers in one dispatch.

For:        the K and V arrays of every layer and the overwriting of recycled pages.
Not for:    knowing which pages are dirty (kv_control) or how heads are spread (sharding).
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray

from kv_common.errors import ConfigError
from kv_common.layout import KvStorageLayoutV1
from kv_execution.quantised import QUANTISED_DTYPES, QuantisedPool, storage_dtype

Pools = Any
"""A pytree of pool arrays, each ``[num_pages, tokens_per_page, heads, head_dim]``, scales with a last axis of 1."""

POOL_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
PAGE_RUNGS = (8, 64, 512)
"""Lengths to which page lists are padded: one compiled program each, longer lists go in pieces."""
COPY_RUNG = 8
"""Page copies of one dispatch: a group's samples need one each."""


def pool_dtype(dtype: str) -> np.dtype:
    """The dtype in which the values of a pool are held.

    Raises:
      ConfigError: the dtype is one that no pool is made of (int4, float8_e5m2).
    """
    if dtype in QUANTISED_DTYPES:
        return storage_dtype(dtype)
    if dtype not in POOL_DTYPES:
        raise ConfigError(
            f"paged_kv_dtype={dtype!r} is not served; choose one of {', '.join([*POOL_DTYPES, *QUANTISED_DTYPES])}"
        )
    return np.dtype(POOL_DTYPES[dtype])


def pool_struct(layout: KvStorageLayoutV1, sharding: Sharding | None = None) -> Any:
    """Shape, dtype and sharding of one layer's K pool (V's are the same): a ``jax.ShapeDtypeStruct``, or a
    ``QuantisedPool`` of two, under one sharding."""
    values = jax.ShapeDtypeStruct(layout.pool_shape, pool_dtype(layout.dtype), sharding=sharding)
    if layout.scales_shape is None:
        return values
    return QuantisedPool(values, jax.ShapeDtypeStruct(layout.scales_shape, jnp.float32, sharding=sharding))


def create_zeroed(structs: Any) -> Any:
    """Zeroed arrays for a pytree of ``ShapeDtypeStruct``, each created under its own sharding.

    No device ever holds more than its shards: the zeros are made there, not made whole and spread.
    """
    leaves, structure = jax.tree.flatten(structs)
    make = _zeros_maker(tuple((leaf.shape, jnp.dtype(leaf.dtype), leaf.sharding) for leaf in leaves))
    return jax.tree.unflatten(structure, make())


@functools.lru_cache(maxsize=8)
def _zeros_maker(leaves: tuple[tuple[tuple[int, ...], jnp.dtype, Sharding | None], ...]) -> Callable[[], Any]:
    """One program for arrays of these shapes, kept: pools that are made again compile nothing."""
    return jax.jit(
        lambda: [jnp.zeros(shape, dtype) for shape, dtype, _ in leaves],
        out_shardings=[sharding for _, _, sharding in leaves],
    )


def create_pools(layout: KvStorageLayoutV1, sharding: Sharding | None = None) -> tuple[tuple[Any, Any], ...]:
    """Zeroed ``(k_pool, v_pool)`` of each of ``layout.num_layers`` layers: arrays, or ``QuantisedPool``."""
    struct = pool_struct(layout, sharding)
    return create_zeroed(tuple((struct, struct) for _ in range(layout.num_layers)))


class Scrubber:
    """Overwrites whole pages of every pool in one donated dispatch.

    At most ``len(PAGE_RUNGS)`` programs exist for a given pytree of pools, however many pages are
    named; scrubbing and poisoning share them. Copying pages within the pools is one more.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._overwrite = jax.jit(_overwrite_pages, donate_argnums=0)
        self._copy = jax.jit(_copy_pages, donate_argnums=0)

    def scrub(self, pools: Pools, pages: NDArray[np.int32]) -> Pools:
        """Zero exactly ``pages`` (int32 ``[n]``, in range) of every leaf; the arguments are donated."""
        return self._run(pools, pages, 0.0)

    def poison(self, pools: Pools, pages: NDArray[np.int32]) -> Pools:
        """Fill exactly ``pages`` with NaN, so that a stray read shows (``paged_poison_on_free``). Integers become 0:
        what a quantised page reads as is NaN by its scales."""
        return self._run(pools, pages, np.nan)

    def copy(self, pools: Pools, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> Pools:
        """Overwrite each page of ``targets`` by that of ``sources`` (int32 ``[n]``, in range, no page in both)."""
        for source, target in zip(pieces_of(sources, COPY_RUNG), pieces_of(targets, COPY_RUNG), strict=True):
            padded = np.full((2, COPY_RUNG), self._num_pages, np.int32)
            padded[:, : len(source)] = source, target
            pools = self._copy(pools, padded)
        return pools

    def warm_up(self, pools: Pools) -> Pools:
        """Compile every program, changing nothing."""
        pools = self._copy(pools, np.full((2, COPY_RUNG), self._num_pages, np.int32))
        for rung in PAGE_RUNGS:
            pools = self._overwrite(pools, self._padding(rung), np.float32(0.0))
        return pools

    def _run(self, pools: Pools, pages: NDArray[np.int32], value: float) -> Pools:
        for piece in pieces_of(np.asarray(pages, np.int32)):
            padded = self._padding(next(rung for rung in PAGE_RUNGS if len(piece) <= rung))
            padded[: len(piece)] = piece
            pools = self._overwrite(pools, padded, np.float32(value))
        return pools

    def _padding(self, rung: int) -> NDArray[np.int32]:
        return np.full(rung, self._num_pages, np.int32)


def pieces_of(pages: NDArray[np.int32], at_most: int = PAGE_RUNGS[-1]) -> Iterator[NDArray[np.int32]]:
    """``pages`` in pieces of at most the longest rung; nothing for an empty list.

    >>> [len(piece) for piece in pieces_of(np.arange(1030, dtype=np.int32))]
    [512, 512, 6]
    """
    for start in range(0, len(pages), at_most):
        yield pages[start : start + at_most]


def _overwrite_pages(pools: Pools, pages: jax.Array, value: jax.Array) -> Pools:
    """``pages``: int32, padded with ``num_pages``, one past the end, which ``mode="drop"`` discards."""

    def overwrite(pool: jax.Array) -> jax.Array:
        # A NaN has no integer: what a cast makes of it is the platform's affair.
        new = value if jnp.issubdtype(pool.dtype, jnp.floating) else jnp.where(jnp.isnan(value), 0.0, value)
        return pool.at[pages].set(new.astype(pool.dtype), mode="drop", wrap_negative_indices=False)

    return jax.tree.map(overwrite, pools)


def _copy_pages(pools: Pools, pages: jax.Array) -> Pools:
    """``pages``: int32 ``[2, n]``, sources and targets, padded as in ``_overwrite_pages``."""
    return jax.tree.map(
        lambda pool: pool.at[pages[1]].set(
            pool.at[pages[0]].get(mode="fill", fill_value=0, wrap_negative_indices=False),
            mode="drop",
            wrap_negative_indices=False,
        ),
        pools,
    )
