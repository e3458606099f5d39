"""From a vLLM-shaped step, row-padded block tables, to this project's packed pages: in jnp, inside the caller's jit.

For:        callers whose scheduler is another's: they hand over ``block_tables``, ``seq_lens``, ``query_start_loc``.
Not for:    our own steps (kv_control packs those in numpy), or the caches themselves (kv_caches.py).
May import: kv_common, kv_control, jax.

Which rows are real is data, so nothing here can raise for it: shapes are checked while tracing, contents decide what
is written and read. Padding is whatever cannot be a row: no new token, no length, or behind ``request_distribution``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kv_common.errors import UnsupportedError
from kv_execution.metadata import PageMetadata

FIELDS = ("block_tables", "seq_lens", "query_start_loc")
"""What is read of a caller's metadata; ``request_distribution`` too, where it is given."""

_REFUSED_FIELDS = {
    "pcp": "prefill context parallelism splits one prompt over devices",
    "mamba_state_indices": "recurrent layers keep state outside the page table",
    "k_scale_cache": "scales of quantised K are not kept",
    "v_scale_cache": "scales of quantised V are not kept",
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class BlockTableStep:
    """A step as the attention layers read it.

    Attributes:
      pages: the packed page table: ``T`` tokens, ``R`` rows, ``R * max_blocks`` page references.
      refused: bool ``[T]``, tokens from the first row on that makes no sense (see ``pack_block_tables``). They write
        nothing and attend to nothing; the caller should let them be seen.
    """

    pages: PageMetadata
    refused: jax.Array


def pack_block_tables(metadata: Any, *, num_tokens: int, num_pages: int, tokens_per_page: int) -> BlockTableStep:
    """Pack a step's block tables; every shape follows from the arguments' shapes, so one program serves all contents.

    Of row ``i``, ``query_start_loc[i] .. query_start_loc[i + 1]`` are new tokens, its last ones; ``seq_lens[i]`` counts
    all of its tokens once they are written; its table lists their pages from position 0. What stands in a table behind
    those pages is never looked at. Positions follow from the lengths: ``input_positions`` is not read.

    A row makes no sense if it has more new tokens than tokens, more tokens than its table has pages for, a page
    outside the pool, or tokens past ``num_tokens``. Rows are laid end to end, so it ends the step: what follows runs
    as padding.

    Args:
      metadata: any object or mapping with integer arrays ``block_tables`` (``[R, max_blocks]``, or flat
        ``[R * max_blocks]``), ``seq_lens`` (``[R]``) and ``query_start_loc`` (``[R + 1]``). If it has
        ``request_distribution``, that one's last number counts the real rows; otherwise every row with new tokens is.
      num_tokens: ``T``, the step's tokens with padding. num_pages, tokens_per_page: of the pool.

    Raises:
      UnsupportedError: a field is missing or has another shape, or one is set that is not served; it is named.
    """
    tables, seq_lens, starts = _checked(metadata)
    num_rows, max_blocks = tables.shape
    row = jnp.arange(num_rows, dtype=jnp.int32)
    new = jnp.diff(starts)
    num_real = _field(metadata, "request_distribution")
    counted = row < (num_rows if num_real is None else jnp.asarray(num_real, jnp.int32).reshape(-1)[-1])

    used = -(-seq_lens // tokens_per_page)
    is_used = jnp.arange(max_blocks, dtype=jnp.int32) < used[:, None]
    outside = ((tables < 0) | (tables >= num_pages)) & is_used
    nonsense = (new > seq_lens) | (used > max_blocks) | outside.any(axis=1)
    nonsense |= (starts[1:] > num_tokens) | (starts[0] != 0)
    nonsense &= counted & (new > 0) & (seq_lens > 0)
    ends = nonsense | ~counted | (starts[1:] < starts[:-1]) | ((new > 0) & (seq_lens <= 0))
    live = (jnp.cumsum(ends) == 0) & (new > 0)

    zero = jnp.zeros(1, jnp.int32)
    query_start_loc = jnp.concatenate([zero, jnp.cumsum(jnp.where(live, new, 0), dtype=jnp.int32)])
    pages_per_row = jnp.where(live, used, 0)
    kv_indptr = jnp.concatenate([zero, jnp.cumsum(pages_per_row, dtype=jnp.int32)])
    capacity = num_rows * max_blocks
    target = jnp.where(is_used & live[:, None], kv_indptr[:-1, None] + jnp.arange(max_blocks), capacity)
    kv_indices = jnp.full(capacity, num_pages, jnp.int32).at[target.reshape(-1)].set(tables.reshape(-1), mode="drop")

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    is_real = token < query_start_loc[-1]
    # Rows without tokens end where they begin, and are passed over; past all rows this is R.
    row_of_token = jnp.searchsorted(query_start_loc[1:], token, side="right").astype(jnp.int32)
    own = jnp.minimum(row_of_token, num_rows - 1)
    position = jnp.where(is_real, seq_lens[own] - query_start_loc[own + 1] + token, 0)
    page = tables[own, jnp.minimum(position // tokens_per_page, max_blocks - 1)]
    slot = page * tokens_per_page + position % tokens_per_page
    pages = PageMetadata(
        query_start_loc=query_start_loc,
        seq_lens=jnp.where(live, seq_lens, 0),
        positions=position,
        slot_mapping=jnp.where(is_real, slot, num_pages * tokens_per_page),
        row_of_token=row_of_token,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_last_page_len=jnp.where(live, seq_lens - (used - 1) * tokens_per_page, 0),
        kv_first_page_offset=jnp.zeros(num_rows, jnp.int32),
    )
    first_ended = jnp.argmax(ends)
    return BlockTableStep(pages, refused=nonsense[first_ended] & ~is_real)


def _field(metadata: Any, name: str) -> Any:
    """A field of an object or a mapping; None where it is absent."""
    return metadata.get(name) if isinstance(metadata, Mapping) else getattr(metadata, name, None)


def _checked(metadata: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``block_tables [R, max_blocks]``, ``seq_lens [R]`` and ``query_start_loc [R + 1]``, or a refusal by name."""
    if isinstance(metadata, Mapping) and metadata and not set(FIELDS) & set(metadata):
        raise UnsupportedError(
            f"attention metadata comes per layer ({', '.join(list(map(str, metadata))[:3])}, ...): one page table "
            "serves all layers here; switch the caller's hybrid KV-cache groups off"
        )
    for name, why in _REFUSED_FIELDS.items():
        if _field(metadata, name) is not None:
            raise UnsupportedError(f"attention metadata sets {name}: {why}, which is not served")
    arrays = []
    for name in FIELDS:
        value = _field(metadata, name)
        if value is None:
            raise UnsupportedError(f"attention metadata has no {name}: {', '.join(FIELDS)} are needed")
        array = jnp.asarray(value)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise UnsupportedError(f"{name} is {array.dtype}: integers are needed")
        arrays.append(array.astype(jnp.int32))
    tables, seq_lens, starts = arrays
    if seq_lens.ndim != 1 or starts.ndim != 1 or starts.size != seq_lens.size + 1:
        raise UnsupportedError(
            f"query_start_loc {starts.shape} does not fit seq_lens {seq_lens.shape}: one axis each, one more offset "
            "than rows (a list per data-parallel rank is not served: run one engine per replica)"
        )
    num_rows = seq_lens.size
    if tables.ndim == 1 and tables.size % max(num_rows, 1) == 0:
        tables = tables.reshape(num_rows, tables.size // max(num_rows, 1))
    if tables.ndim != 2 or tables.shape[0] != num_rows or not tables.size:
        raise UnsupportedError(
            f"block_tables {arrays[0].shape} does not fit {num_rows} rows: axis 0 is rows, axis 1 pages of a row, or "
            "both flattened into one"
        )
    return tables, seq_lens, starts
