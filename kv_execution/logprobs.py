"""Logprobs of given next tokens (prompt logprobs), in row blocks.

For:        ``log_softmax(logits)[target]`` of many rows without ever holding ``[T, vocab]``.
Not for:    the sampled token's logprob (sampling), or choosing which rows are wanted.
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def target_logprobs(
    head: Callable[[jax.Array], jax.Array],
    target_rows: jax.Array,
    targets: jax.Array,
    num_targets: jax.Array,
    *,
    block: int,
) -> jax.Array:
    """Logprob of each wanted token under the raw model distribution.

    Args:
      head: logits ``[block, vocab]`` of token rows, int32 ``[block]``; traced once, called
        ``ceil(num_targets / block)`` times, not at all for 0 targets.
      target_rows: int32 ``[T]``, token rows, the wanted ones first.
      targets: int32 ``[T]``, the wanted token of each.
      num_targets: int32 ``[]``, how many are wanted.
      block: rows per head call.

    Returns:
      float32 ``[T]`` in the order of ``target_rows``; NaN where nothing was wanted.
    """
    num_rows = target_rows.shape[0]
    block = min(block, num_rows)
    padding = -num_rows % block
    rows, wanted = jnp.pad(target_rows, (0, padding)), jnp.pad(targets, (0, padding))

    def run_block(i: jax.Array, result: jax.Array) -> jax.Array:
        start = i * block
        logits = head(lax.dynamic_slice_in_dim(rows, start, block)).astype(jnp.float32)
        tokens = lax.dynamic_slice_in_dim(wanted, start, block)
        values = chosen_logprobs(logits, tokens)
        real = start + jnp.arange(block, dtype=jnp.int32) < num_targets
        return lax.dynamic_update_slice_in_dim(result, jnp.where(real, values, jnp.nan), start, axis=0)

    nothing = jnp.full(num_rows + padding, jnp.nan, jnp.float32)
    num_blocks = -(-jnp.asarray(num_targets, jnp.int32) // block)
    # A loop that does not turn is not free: XLA lifts what does not depend on the turn (with one block the
    # whole head, always its weights' casts) in front of it. It lifts nothing out of a branch.
    result = lax.cond(num_blocks > 0, lambda: lax.fori_loop(0, num_blocks, run_block, nothing), lambda: nothing)
    return result[:num_rows]


def chosen_logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """``log_softmax(logits)[row, tokens[row]]``: float32 ``[S]`` of float32 ``[S, vocab]``."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1, mode="clip")[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
