"""What the Triton kernels' programs do in a step: tiles of queries, and decode rows cut over their keys.

Both lists are made on the device from the page table, by a few small operations that all layers of one window share;
their lengths, and how many pieces a row may have, follow from static facts alone. An entry without work ends its
program at once.

For:        the kernels' work lists, as jnp, and the static numbers behind their grids.
Not for:    the kernels (triton_kernels) or their tile sizes (triton_tiles.py).
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kv_execution.dispatch import SplitFloors
from kv_execution.metadata import PageMetadata
from kv_execution.quantised import QUANTISED_DTYPES

TILE_FIELDS = ("first_token", "num_tokens", "first_index", "num_listed", "position")
"""Of a tile: its first flat token and how many it has (0: no tile), its request's part of ``kv_indices``, and the
first token's position counted from the first listed page."""

ROW_FIELDS = ("token", "first_index", "num_listed", "low", "high", "piece")
"""Of a request row: its one new token, its part of ``kv_indices``, the keys it sees (``low <= t < high``, counted from
the first listed page; empty where the row has not exactly one new token), and how many of them one piece has."""

PROGRAMS_PER_SM, MIN_PIECE_TOKENS, MAX_SPLITS = 4, 256, 64
"""Programs that a decode launch aims at, the shortest piece of a row, and the most pieces."""

_INT32_MAX = 2**31 - 1
HALF_TYPES = ("bfloat16", "float16")


def is_exact(pool_dtype: str, query_dtype: str) -> bool:
    """Whether products are made of float32 numbers: everywhere but where queries and pools share a half type.

    What a quantised pool stores is exact in any half type, so there the query's alone decides.
    """
    return query_dtype not in HALF_TYPES or pool_dtype not in (query_dtype, *QUANTISED_DTYPES)


def num_tiles(num_tokens: int, num_rows: int, tile_tokens: int) -> int:
    """Tiles that any step of ``T`` tokens and ``R`` rows fits: full ones, and one begun by each row of several tokens.

    >>> num_tiles(64, 4, 16), num_tiles(8, 8, 16)
    (8, 4)
    """
    return num_tokens // tile_tokens + min(num_rows, max(1, num_tokens // 2))


def num_splits(
    *, num_rows: int, row_programs: int, max_tokens: int, num_sms: int, min_piece_tokens: int = MIN_PIECE_TOKENS
) -> int:
    """Most pieces a decode row is cut into: enough to fill the device, none shorter than the minimum.

    Args:
      num_rows: ``R`` of the step. row_programs: programs of one row and piece, one a KV head.
      max_tokens: keys that a row can see, at most.

    >>> num_splits(num_rows=8, row_programs=8, max_tokens=32768, num_sms=132)
    9
    >>> num_splits(num_rows=256, row_programs=8, max_tokens=32768, num_sms=132)
    1
    """
    filling = -(-PROGRAMS_PER_SM * num_sms // (num_rows * row_programs))
    return max(1, min(filling, max_tokens // min_piece_tokens, MAX_SPLITS))


def workspace_bytes(*, num_splits: int, num_rows: int, query_heads: int, head_dim: int) -> int:
    """Bytes of one launch's pieces: a float32 maximum, sum and vector each; nothing where rows stay whole."""
    if num_splits == 1:
        return 0
    return num_splits * num_rows * query_heads * (head_dim + 2) * np.dtype(np.float32).itemsize


def attend_tiles(pages: PageMetadata, *, tile_tokens: int) -> jax.Array:
    """int32 ``[num_tiles, 5]``: the tiles of all rows that have several new tokens, then entries without tokens."""
    starts = jnp.asarray(pages.query_start_loc)
    num_rows, num_tokens = starts.shape[0] - 1, pages.positions.shape[0]
    new = jnp.diff(starts)
    tiles_of_row = jnp.where(new > 1, (new + tile_tokens - 1) // tile_tokens, 0)
    ends = jnp.cumsum(tiles_of_row)
    tile = jnp.arange(num_tiles(num_tokens, num_rows, tile_tokens), dtype=jnp.int32)
    row = jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    real, row = row < num_rows, jnp.minimum(row, num_rows - 1)
    first = (tile - (ends - tiles_of_row)[row]) * tile_tokens
    seen = jnp.asarray(pages.seq_lens) - jnp.asarray(pages.kv_first_page_offset)
    fields = {
        "first_token": starts[row] + first,
        "num_tokens": jnp.minimum(new[row] - first, tile_tokens),
        "first_index": jnp.asarray(pages.kv_indptr)[row],
        "num_listed": jnp.diff(pages.kv_indptr)[row],
        "position": (seen - new)[row] + first,
    }
    return _listed([fields[name] for name in TILE_FIELDS], real)


def decode_rows(
    pages: PageMetadata,
    *,
    sliding_window: int | None,
    num_splits: int,
    block_tokens: int,
    floors: SplitFloors,
    min_piece_tokens: int = MIN_PIECE_TOKENS,
) -> jax.Array:
    """int32 ``[R, 6]``: the rows that have one new token, each with the length of its pieces.

    Rows below ``floors`` have one piece, as ``kv_execution.dispatch.decide`` says; the rule is part of the data, so
    that no floor is in a traced shape.
    """
    new = jnp.diff(pages.query_start_loc)
    single = new == 1
    high = jnp.asarray(pages.seq_lens) - jnp.asarray(pages.kv_first_page_offset)
    visible = high if sliding_window is None else jnp.minimum(high, sliding_window)
    visible = jnp.where(single, visible, 0)
    batch = jnp.sum(single, dtype=jnp.int32)
    # Whole numbers, as the host's rule has them; a step whose keys would not fit is far above any floor.
    total = jnp.sum(jnp.minimum(visible, _INT32_MAX // visible.shape[0]), dtype=jnp.int32)
    floor = jnp.where(batch == 1, min(floors.min_tokens, _INT32_MAX), min(floors.min_tokens_per_request, _INT32_MAX))
    parts = jnp.where(total // jnp.maximum(batch, 1) >= floor, num_splits, 1)
    wanted = jnp.maximum((visible + parts - 1) // parts, min_piece_tokens)
    piece = jnp.where(parts > 1, wanted, jnp.maximum(visible, 1))
    fields = {
        "token": pages.query_start_loc[:-1],
        "first_index": pages.kv_indptr[:-1],
        "num_listed": jnp.diff(pages.kv_indptr),
        "low": high - visible,
        "high": high,
        "piece": (piece + block_tokens - 1) // block_tokens * block_tokens,
    }
    return _listed([fields[name] for name in ROW_FIELDS], single)


def _listed(fields: list[jax.Array], real: jax.Array) -> jax.Array:
    return jnp.where(real[:, None], jnp.stack(fields, axis=1), 0).astype(jnp.int32)
