"""Quantised pools: K and V in 8 bits, each page with a block of scales of its own.

For:        what one K or V pool is when its dtype needs scales, and the one rule by which numbers enter and leave it.
Not for:    which slots are written or read (attention/), or how many bytes that is (kv_common.layout).
May import: kv_common, kv_control, jax.

A pool is two arrays with the same first three axes::

    values  [num_pages, tokens_per_page, kv_heads, head_dim]   int8, or uint8: the bits of float8_e4m3fn
    scales  [num_pages, tokens_per_page, kv_heads, 1]          float32

*A page's scales are its own.* The page is the first axis of both arrays, and both have the rank, the axes and the
sharding of every other pool. So whatever is done to a page (scrub, poison, copy on write, eviction, a cache hit) is
done to its scales by the same operation on the same page number: there is no second table to keep in step.

*One scale for each token within a page's block, not one for the page.* A page is filled by several steps, and a scale
over the whole page would grow while it fills. The page would be quantised again, twice rounded, so that its bits told
how its tokens had come: in one chunk, in many, or one by one after a preemption. Here a token's bits follow from its
own K and V alone; what was written is never touched again, and a hit reads exactly what a miss wrote
(docs/adr/0008-quantised-kv.md has the price and what else was weighed).

*The rule.* For one head of one token, with ``largest`` = 127 (int8) or 448 (fp8)::

    amax    = max |x|                           scale = amax * float32(1 / largest)
    stored  = x * float32(1 / scale), to the nearest, ties to even
    read as stored * scale

- Nothing saturates: the scale is rounded, so ``amax * (1 / scale)`` may pass ``largest``, but by less than a millionth
  of it, and is rounded to it.
- ``amax`` below 2**-100 is a row of zeros, with scale 0: no division by nothing, no subnormal scale, which some
  threads flush and others do not.
- A row with a NaN or an infinity has the scale NaN, and so is NaN throughout: 8 bits cannot hold either, and a number
  that looks healthy would hide a sick request.
- Every operation in it is exactly rounded or exact, so the same row gives the same bits in every program. That is why
  it multiplies: a division by a scale that many numbers share is a multiplication by its reciprocal once XLA has
  simplified it, and rounds otherwise near a tie.

A zeroed page reads as zeros and a poisoned one (scale NaN) as NaN, as in any pool. fp8 is held as bits because XLA:CPU
converts a whole fp8 array, twice, wherever an operation of its own touches a part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kv_common.errors import ConfigError, UnsupportedError

SMALLEST_AMAX = 2.0**-100
"""A row whose numbers are all smaller is stored as zeros."""

_FLOAT8 = jnp.float8_e4m3fn
_STORAGE: dict[str, tuple[Any, float]] = {"int8": (jnp.int8, 127.0), "float8_e4m3fn": (jnp.uint8, 448.0)}
"""dtype to what its values are held in, and the largest of them."""

QUANTISED_DTYPES = tuple(_STORAGE)
_INFINITY_BITS = np.uint32(0x7F800000)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class QuantisedPool:
    """One layer's K or V pool with its scales. Leaves may be arrays or ``jax.ShapeDtypeStruct``.

    Attributes:
      values: int8, or uint8 for fp8, ``[num_pages, tokens_per_page, kv_heads, head_dim]``.
      scales: float32 ``[num_pages, tokens_per_page, kv_heads, 1]``.
    """

    values: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return tuple(self.values.shape)

    @property
    def dtype(self) -> np.dtype:
        """What the values mean: int8 or float8_e4m3fn."""
        return np.dtype(_FLOAT8 if self.values.dtype == jnp.uint8 else jnp.int8)


KvPool = jax.Array | QuantisedPool
"""One layer's K or V pool, of any dtype."""


def unscaled(pool: KvPool) -> jax.Array:
    """The array that a pool without scales is, for kernels that read no scale.

    Raises:
      UnsupportedError: it has scales.
    """
    if isinstance(pool, QuantisedPool):
        raise UnsupportedError(f"a pool of {pool.dtype} was handed to kernels that read no scales")
    return pool


def storage_dtype(dtype: str) -> np.dtype:
    """What the values of a quantised pool are held in.

    Raises:
      ConfigError: the dtype is not one of ``QUANTISED_DTYPES``.
    """
    return np.dtype(_storage(dtype)[0])


def quantise(rows: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Values and scales of rows ``[..., head_dim]``: see the module for the rule.

    Returns:
      ``(values [..., head_dim], scales float32 [..., 1])``.

    >>> values, scales = quantise(jnp.array([[127.0, -63.5, 0.4]]), "int8")
    >>> values.tolist(), scales.tolist()
    ([[127, -64, 0]], [[1.0]])
    """
    held, largest = _storage(dtype)
    rows = rows.astype(jnp.float32)
    # As integers: magnitudes have the order of their bits, and no NaN or subnormal is treated by anyone's rules.
    magnitude = jnp.max(lax.bitcast_convert_type(rows, jnp.uint32) & np.uint32(0x7FFFFFFF), axis=-1, keepdims=True)
    finite = magnitude < _INFINITY_BITS
    live = finite & (magnitude >= np.float32(SMALLEST_AMAX).view(np.uint32))
    # A constant's reciprocal, as XLA would make of a division by it: said here so that everyone multiplies.
    scale = lax.bitcast_convert_type(magnitude, jnp.float32) * np.float32(1.0 / largest)
    scaled = jnp.where(live, rows * (1.0 / jnp.where(live, scale, 1.0)), 0.0)
    values = jnp.round(scaled).astype(held) if held == jnp.int8 else _bits_of_float8(scaled)
    return values, jnp.where(live, scale, jnp.where(finite, 0.0, jnp.nan))


def dequantise(values: jax.Array, scales: jax.Array) -> jax.Array:
    """float32 rows ``[..., head_dim]`` of values and scales as ``quantise`` gives them."""
    if values.dtype == jnp.uint8:
        values = lax.bitcast_convert_type(values, _FLOAT8)
    return values.astype(jnp.float32) * scales


def _bits_of_float8(scaled: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(scaled.astype(_FLOAT8), jnp.uint8)


def _storage(dtype: str) -> tuple[Any, float]:
    if dtype not in _STORAGE:
        raise ConfigError(f"paged_kv_dtype={dtype!r}: quantised pools are {' or '.join(QUANTISED_DTYPES)}")
    return _STORAGE[dtype]
