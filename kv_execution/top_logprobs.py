"""The most likely tokens at each sampled one, where somebody wants them.

For:        ids and logprobs of the best ``MAX_TOP_LOGPROBS`` tokens of rows that ask for any.
Not for:    the sampled token's own logprob (sampling.py) or prompt logprobs (logprobs.py).
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kv_control.logit_options import MAX_TOP_LOGPROBS

ROWS_PER_BLOCK = 8
"""Rows looked at together: one that asks does not make all the others pay."""


def top_logprobs(logits: jax.Array, num_top: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The likeliest tokens of each row that wants some, under the raw model distribution.

    Args:
      logits: float32 ``[S, vocab]``.
      num_top: int32 ``[S]``, how many a row wants; 0 for most.

    Returns:
      ``(ids, logprobs)``: int32 and float32 ``[S, MAX_TOP_LOGPROBS]``, likeliest first, of equally likely ones the
      smaller id first; 0 and NaN in rows that want none, and beyond the vocabulary.
    """
    num_rows, vocab = logits.shape
    k, block = min(MAX_TOP_LOGPROBS, vocab), min(ROWS_PER_BLOCK, num_rows)
    wanted = num_top > 0
    nothing = (
        jnp.zeros((num_rows, MAX_TOP_LOGPROBS), jnp.int32),
        jnp.full((num_rows, MAX_TOP_LOGPROBS), jnp.nan, jnp.float32),
    )

    def run() -> tuple[jax.Array, jax.Array]:
        order = jnp.argsort(~wanted, stable=True).astype(jnp.int32)
        order = jnp.pad(order, (0, -num_rows % block), constant_values=num_rows)

        def run_block(i: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            rows = lax.dynamic_slice_in_dim(order, i * block, block)
            raw = logits.at[rows].get(mode="clip")
            values, ids = lax.top_k(raw, k)
            values = values - jax.nn.logsumexp(raw, axis=-1, keepdims=True)
            place = jnp.where(wanted.at[rows].get(mode="clip"), rows, num_rows)
            return (
                found[0].at[place, :k].set(ids.astype(jnp.int32), mode="drop"),
                found[1].at[place, :k].set(values, mode="drop"),
            )

        return lax.fori_loop(0, -(-jnp.sum(wanted, dtype=jnp.int32) // block), run_block, nothing)

    return lax.cond(jnp.any(wanted), run, lambda: nothing)
