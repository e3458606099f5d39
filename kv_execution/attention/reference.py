"""The reference backend: paged attention in plain jnp, the yardstick of every other backend.

For:        any platform jax runs on; every head size, page size and option this project serves.
Not for:    speed records; a native kernel is another file behind the same protocol.
May import: kv_common, kv_control, jax.

Both loops walk a request's KV in blocks of ``block_tokens`` with an online float32 softmax, so memory
does not grow with the longest context, and skip what no query can see. Which loop serves a request is
chosen per request, on the device, from ``query_start_loc``::

    flat tokens   d d d d d | c c c c c c c c . . .      d: the leading requests of one new token each
                  decode loop  chunk loop     padding    c: all others

- the decode loop gathers per token, a few tokens a tile, because single-token requests share no keys;
- the chunk loop gathers per (tile of queries, request), because neighbours in a chunk share them all.

Masks select, they never add or multiply: a slot nobody owns, another request's NaN or a padding row can
hold anything without reaching a live row. A request's own NaN does reach it, and is meant to be seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from kv_execution.attention.capabilities import check_options
from kv_execution.metadata import Array, PageMetadata
from kv_execution.quantised import KvPool, QuantisedPool, dequantise, quantise

_EXACT = lax.Precision.HIGHEST
"""float32 products stay float32 (accelerators would otherwise round them to tf32 or bfloat16)."""


@dataclass(frozen=True, slots=True)
class ReferenceBackend:
    """``PagedAttentionBackend`` in jnp.

    Attributes:
      block_tokens: KV tokens read at a time, rounded down to whole pages (at least one page).
      decode_tile: tokens of single-token requests handled together.
      chunk_tile: neighbouring tokens of longer requests handled together.
    """

    block_tokens: int = 128
    decode_tile: int = 8
    chunk_tile: int = 64

    @property
    def name(self) -> str:
        """``"reference"``."""
        return "reference"

    def append(
        self,
        k_pool: KvPool,
        v_pool: KvPool,
        key: jax.Array,
        value: jax.Array,
        slot_mapping: jax.Array,
    ) -> tuple[KvPool, KvPool]:
        """See ``PagedAttentionBackend.append``. Slots outside the pool, negative ones too, are dropped."""
        return _write(k_pool, key, slot_mapping), _write(v_pool, value, slot_mapping)

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
        options = self._options(k_pool, scale, sliding_window, soft_cap)
        return _attend(options, query, k_pool, v_pool, pages, sinks)

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
        """See ``PagedAttentionBackend.decode``: ``attend`` without the chunk loop."""
        options = self._options(k_pool, scale, sliding_window, soft_cap)
        return _decode(options, query, k_pool, v_pool, pages, sinks)

    def _options(self, k_pool: KvPool, scale: float, sliding_window: int | None, soft_cap: float | None) -> _Options:
        check_options(scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)
        num_pages, tokens_per_page = k_pool.shape[:2]
        pages_per_block = min(max(1, self.block_tokens // tokens_per_page), num_pages)
        return _Options(pages_per_block, self.decode_tile, self.chunk_tile, scale, sliding_window, soft_cap)


@dataclass(frozen=True, slots=True)
class _Options:
    """What a program is compiled for."""

    pages_per_block: int
    decode_tile: int
    chunk_tile: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None


# jit inside the step's jit: layers that share options are traced and lowered once, not once each.
@partial(jax.jit, static_argnums=0)
def _attend(
    options: _Options,
    query: jax.Array,
    k_pool: KvPool,
    v_pool: KvPool,
    pages: PageMetadata,
    sinks: jax.Array | None,
) -> jax.Array:
    call = _Call(options, k_pool, v_pool, pages, sinks)
    single = jnp.diff(pages.query_start_loc) == 1
    # The leading requests of one token each; as many tokens as requests.
    rows = jnp.arange(single.shape[0], dtype=jnp.int32)
    num_decodes = jnp.min(jnp.where(single, single.shape[0], rows))
    tile = min(options.chunk_tile, query.shape[0])
    output = _decode_loop(call, query, num_decodes, extra_rows=tile)
    output = _chunk_loop(call, query, output, num_decodes, tile)
    return output[: query.shape[0]]


@partial(jax.jit, static_argnums=0)
def _decode(
    options: _Options,
    query: jax.Array,
    k_pool: KvPool,
    v_pool: KvPool,
    pages: PageMetadata,
    sinks: jax.Array | None,
) -> jax.Array:
    call = _Call(options, k_pool, v_pool, pages, sinks)
    return _decode_loop(call, query, pages.query_start_loc[-1], extra_rows=0)[: query.shape[0]]


@dataclass(frozen=True, slots=True)
class _Call:
    """What both loops read, and what they do with it alike."""

    options: _Options
    k_pool: KvPool
    v_pool: KvPool
    pages: PageMetadata
    sinks: jax.Array | None

    @property
    def block_tokens(self) -> int:
        return self.options.pages_per_block * self.k_pool.shape[1]

    def first_block(self, position: jax.Array) -> jax.Array:
        """Block of the oldest key that a query at ``position`` (from the first listed page) sees."""
        if self.options.sliding_window is None:
            return jnp.zeros_like(position)
        return jnp.maximum(position - self.options.sliding_window + 1, 0) // self.block_tokens

    def visible(self, key_position: jax.Array, position: jax.Array) -> jax.Array:
        """Causal and window mask; both positions count from the first listed page."""
        mask = key_position <= position
        if self.options.sliding_window is not None:
            mask &= key_position > position - self.options.sliding_window
        return mask

    def read(self, first_index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """K and V, ``[..., block_tokens, kv_heads, head_dim]``, of a block of ``kv_indices``.

        What lies past the request's list is some other page: callers mask it.
        """
        index = first_index[..., None] + jnp.arange(self.options.pages_per_block, dtype=jnp.int32)
        ids = jnp.asarray(self.pages.kv_indices).at[index].get(mode="clip")

        def tokens(array: jax.Array) -> jax.Array:
            shape = (*first_index.shape, self.block_tokens, *array.shape[2:])
            return array.at[ids].get(mode="clip").reshape(shape)

        def numbers(pool: KvPool) -> jax.Array:
            if isinstance(pool, QuantisedPool):
                return dequantise(tokens(pool.values), tokens(pool.scales))
            return tokens(pool).astype(jnp.float32)

        return numbers(self.k_pool), numbers(self.v_pool)

    def logits(self, products: jax.Array) -> jax.Array:
        """``query @ key``, scaled and capped."""
        scale, cap = self.options.scale, self.options.soft_cap
        scores = products if scale == 1.0 else products * scale
        return scores if cap is None else cap * jnp.tanh(scores / cap)


def _write(pool: KvPool, new: jax.Array, slot_mapping: jax.Array) -> KvPool:
    """Write ``new`` (``[T, kv_heads, head_dim]``) to its slots, in place when ``pool`` is donated."""
    if isinstance(pool, QuantisedPool):
        values, scales = quantise(new, pool.dtype.name)
        return QuantisedPool(
            _write_rows(pool.values, values, slot_mapping), _write_rows(pool.scales, scales, slot_mapping)
        )
    return _write_rows(pool, new, slot_mapping)


def _write_rows(pool: jax.Array, new: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    slots = pool.reshape(-1, *pool.shape[2:])
    # wrap_negative_indices=False: otherwise slot -1 would become the last slot before mode="drop" sees it.
    written = slots.at[slot_mapping].set(new.astype(pool.dtype), mode="drop", wrap_negative_indices=False)
    return written.reshape(pool.shape)


def _rescale(old_max: jax.Array, block_max: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Running maximum, the finite number to subtract from scores, and the factor for the old sums."""
    new_max = jnp.maximum(old_max, block_max)
    # Nothing seen yet: subtract 0, so that exp(-inf - 0) is 0 where exp(-inf + inf) would be NaN.
    shift = jnp.where(new_max == -jnp.inf, 0.0, new_max)
    return new_max, shift, jnp.exp(old_max - shift)


def _finish(maximum: jax.Array, total: jax.Array, acc: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """``acc / total`` with the sinks in the denominator; zeros where no key was visible."""
    nothing = total == 0
    if sinks is not None:
        maximum, _, factor = _rescale(maximum, jnp.broadcast_to(sinks, maximum.shape))
        shift = jnp.where(maximum == -jnp.inf, 0.0, maximum)
        acc = acc * factor[..., None]
        total = total * factor + jnp.exp(sinks - shift)
    return jnp.where(nothing[..., None], 0.0, acc / jnp.where(nothing, 1.0, total)[..., None])


def _decode_loop(call: _Call, query: jax.Array, num_decodes: jax.Array, *, extra_rows: int) -> jax.Array:
    """Attention of the first ``num_decodes`` tokens, each a request of its own.

    Returns:
      ``[>= T + extra_rows, heads, head_dim]``; rows from ``num_decodes`` on are zeros.
    """
    num_tokens, num_heads, head_dim = query.shape
    kv_heads = call.k_pool.shape[2]
    group = num_heads // kv_heads
    tile = min(call.options.decode_tile, num_tokens)
    padding = -num_tokens % tile
    pages, block = call.pages, call.block_tokens

    row = jnp.minimum(pages.row_of_token, pages.seq_lens.shape[0] - 1)
    first_index = pages.kv_indptr[row]
    position = pages.positions - pages.kv_first_page_offset[row]
    per_token = [_pad_rows(x, padding) for x in (query, first_index, position)]
    sinks = None if call.sinks is None else call.sinks.astype(jnp.float32).reshape(kv_heads, group)

    def run_tile(i: jax.Array, output: jax.Array) -> jax.Array:
        q, first, pos = (lax.dynamic_slice_in_dim(x, i * tile, tile) for x in per_token)
        q = q.reshape(tile, 1, kv_heads, group, head_dim).astype(jnp.float32)
        live = i * tile + jnp.arange(tile, dtype=jnp.int32) < num_decodes
        low = call.first_block(pos)
        num_blocks = jnp.max(jnp.where(live, pos // block - low + 1, 0))

        def run_block(step: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            maximum, total, acc = sums
            k, v = call.read(first + (low + step) * call.options.pages_per_block)
            key_pos = ((low + step) * block)[:, None] + jnp.arange(block, dtype=jnp.int32)
            mask = (call.visible(key_pos, pos[:, None]) & live[:, None])[:, :, None, None]
            # Multiply and sum, not einsum: XLA:CPU has no fast path for matrices of 1..4 rows.
            scores = jnp.where(mask, call.logits(jnp.sum(q * k[:, :, :, None], axis=-1)), -jnp.inf)
            maximum, shift, factor = _rescale(maximum, jnp.max(scores, axis=1))
            weights = jnp.exp(scores - shift[:, None])
            total = total * factor + jnp.sum(weights, axis=1)
            seen = jnp.where(mask, v, 0.0)[:, :, :, None]
            return maximum, total, acc * factor[..., None] + jnp.sum(weights[..., None] * seen, axis=1)

        empty = _empty_sums((tile, kv_heads, group), head_dim)
        maximum, total, acc = lax.fori_loop(0, num_blocks, run_block, empty)
        result = _finish(maximum, total, acc, sinks).reshape(tile, num_heads, head_dim).astype(output.dtype)
        return lax.dynamic_update_slice_in_dim(output, result, i * tile, axis=0)

    output = jnp.zeros((num_tokens + max(padding, extra_rows), num_heads, head_dim), query.dtype)
    return lax.fori_loop(0, -(-num_decodes // tile), run_tile, output)


def _chunk_loop(call: _Call, query: jax.Array, output: jax.Array, first_token: jax.Array, tile: int) -> jax.Array:
    """Fill in the tokens from ``first_token`` on; ``output`` has ``tile`` rows to spare at its end."""
    _, num_heads, head_dim = query.shape
    kv_heads = call.k_pool.shape[2]
    group = num_heads // kv_heads
    pages, block = call.pages, call.block_tokens
    num_live = pages.query_start_loc[-1]
    # Tiles start anywhere, so the last may reach past the end.
    query = _pad_rows(query, tile)
    row_of_token = _pad_rows(pages.row_of_token, tile, fill=pages.seq_lens.shape[0])
    positions = _pad_rows(pages.positions, tile)
    sinks = None if call.sinks is None else call.sinks.astype(jnp.float32).reshape(kv_heads, 1, group)

    def run_tile(i: jax.Array, output: jax.Array) -> jax.Array:
        start = first_token + i * tile
        q, rows, pos = (lax.dynamic_slice_in_dim(x, start, tile) for x in (query, row_of_token, positions))
        q = jnp.moveaxis(q.reshape(tile, kv_heads, group, head_dim), 0, 1).astype(jnp.float32)
        last_row = row_of_token[jnp.minimum(start + tile, num_live) - 1]

        def run_row(row: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            mine = rows == row
            offset = pages.kv_first_page_offset[row]
            relative, written = pos - offset, pages.seq_lens[row] - offset
            oldest = jnp.min(jnp.where(mine, relative, written))
            newest = jnp.max(jnp.where(mine, relative, -1))

            def run_block(b: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                maximum, total, acc = sums
                k, v = call.read(pages.kv_indptr[row] + b * call.options.pages_per_block)
                key_pos = b * block + jnp.arange(block, dtype=jnp.int32)
                mask = (call.visible(key_pos, relative[:, None]) & mine[:, None])[None, :, None, :]
                products = jnp.einsum("kqgd,lkd->kqgl", q, k, precision=_EXACT)
                scores = jnp.where(mask, call.logits(products), -jnp.inf)
                maximum, shift, factor = _rescale(maximum, jnp.max(scores, axis=-1))
                weights = jnp.exp(scores - shift[..., None])
                total = total * factor + jnp.sum(weights, axis=-1)
                v = jnp.where((key_pos < written)[:, None, None], v, 0.0)
                added = jnp.einsum("kqgl,lkd->kqgd", weights, v, precision=_EXACT)
                # Other requests' tokens sit in this tile: 0 * NaN must not reach them.
                acc = jnp.where(mine[:, None, None], acc * factor[..., None] + added, acc)
                return maximum, total, acc

            return lax.fori_loop(call.first_block(oldest), newest // block + 1, run_block, sums)

        empty = _empty_sums((kv_heads, tile, group), head_dim)
        maximum, total, acc = lax.fori_loop(rows[0], last_row + 1, run_row, empty)
        result = jnp.moveaxis(_finish(maximum, total, acc, sinks), 1, 0).reshape(tile, num_heads, head_dim)
        return lax.dynamic_update_slice_in_dim(output, result.astype(output.dtype), start, axis=0)

    return lax.fori_loop(0, -(-(num_live - first_token) // tile), run_tile, output)


def _empty_sums(shape: tuple[int, ...], head_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Maximum, sum of weights and weighted values before any key."""
    return (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )


def _pad_rows(array: Array, num_rows: int, fill: int = 0) -> jax.Array:
    """``array`` with ``num_rows`` rows of ``fill`` after its last."""
    widths = [(0, num_rows)] + [(0, 0)] * (array.ndim - 1)
    return jnp.pad(array, widths, constant_values=fill)
