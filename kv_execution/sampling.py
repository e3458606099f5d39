"""On-device sampling: one token per row, under each row's own parameters and its own random key.

For:        greedy, temperature, top-k, top-p, min-p, and the logprob of the chosen token.
Not for:    deciding who samples (kv_control) or when a request stops (driver).
May import: kv_common, kv_control, jax.

A row's key is folded from the run key, its seed, its sample index and the absolute position of the token,
so its token does not depend on row index, batch mates, padding, chunking or preemption. Filters act in
this order: temperature, top-k, top-p over what top-k left, min-p. Of equally likely tokens the smaller id
is the likelier one, as in argmax. A row with options of its own (logit_adjust.py) chooses from logits that were
changed first; what is reported of its token is still the model's.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from kv_execution.logit_adjust import OptionRows, adjust_logits
from kv_execution.logprobs import chosen_logprobs
from kv_execution.metadata import Array, SamplingInputs

ROWS_PER_BLOCK = 8
"""Rows that sample, and filter or change their logits if they ask for it, together; plain greedy rows are in no
block."""


def sample(
    logits: jax.Array, sampling: SamplingInputs, run_key: jax.Array, options: OptionRows | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose a token for each row.

    Args:
      logits: float32 ``[S, vocab]``.
      sampling: per-row parameters, ``[S]``. ``temperature <= 0`` is greedy, ``top_k <= 0`` and
        ``>= vocab`` keep all, ``top_p >= 1`` keeps all and ``<= 0`` the likeliest, ``min_p <= 0`` keeps all.
      run_key: a jax PRNG key.
      options: what ``sampling.options_row`` points into; None where no row has any.

    Returns:
      ``(tokens, logprobs, ok)``: int32, float32 and bool ``[S]``. ``logprobs`` are of the raw model
      distribution, before temperature and filters. ``ok`` is False where a logit is NaN or +inf or all
      are -inf: such a row has token 0 and logprob NaN, and must be failed.
    """
    # max() propagates NaN, so one reduction tells NaN, +inf and "all -inf" apart from a usable row.
    ok = jnp.isfinite(jnp.max(logits, axis=-1))
    greedy = _likeliest(logits)
    # The loop inside would not turn for a greedy batch, but where one block holds all rows XLA lifts its
    # body out as loop-invariant, and everybody pays. It lifts nothing out of a branch.
    tokens = lax.cond(
        jnp.any((sampling.temperature > 0) | _is_adjusted(sampling, options)),
        lambda: _chosen_rows(logits, sampling, run_key, greedy, options),
        lambda: greedy,
    )
    tokens = jnp.where(ok, tokens, 0)
    return tokens, jnp.where(ok, chosen_logprobs(logits, tokens), jnp.nan), ok


def _is_adjusted(sampling: SamplingInputs, options: OptionRows | None) -> Array:
    return False if options is None else jnp.asarray(sampling.options_row) >= 0


def _chosen_rows(
    logits: jax.Array, sampling: SamplingInputs, run_key: jax.Array, greedy: jax.Array, options: OptionRows | None
) -> jax.Array:
    """``greedy`` with the rows of positive temperature or changed logits replaced, a block of rows at a time."""
    num_rows, vocab = logits.shape
    block = min(ROWS_PER_BLOCK, num_rows)
    sampling = jax.tree.map(jnp.asarray, sampling)
    sampled = sampling.temperature > 0
    filtered = sampled & (_wants_top_k(sampling, vocab) | _wants_top_p(sampling) | (sampling.min_p > 0))
    chosen_here = sampled | _is_adjusted(sampling, options)
    # Rows that filter first, rows that only sample next, so that few blocks pay for filters or noise.
    order = jnp.where(filtered, 0, jnp.where(sampled, 1, jnp.where(chosen_here, 2, 3)))
    order = jnp.argsort(order, stable=True).astype(jnp.int32)
    order = jnp.pad(order, (0, -num_rows % block), constant_values=num_rows)

    def run_block(i: jax.Array, tokens: jax.Array) -> jax.Array:
        rows = lax.dynamic_slice_in_dim(order, i * block, block)
        mine = jax.tree.map(lambda x: x.at[rows].get(mode="clip"), sampling)
        active = mine.temperature > 0
        raw = logits.at[rows].get(mode="clip")
        if options is not None:
            raw = lax.cond(
                jnp.any(mine.options_row >= 0),
                lambda: adjust_logits(raw, options, mine.options_row, mine.position),
                lambda: raw,
            )
        # Distance from the likeliest, so that a tiny temperature cannot overflow. Rows that are greedy or
        # padding divide by 1; their result is not used.
        distance = (jnp.max(raw, axis=-1, keepdims=True) - raw) / jnp.where(active, mine.temperature, 1.0)[:, None]
        distance = _filter(distance, mine, active)
        keys = jax.vmap(_row_key, in_axes=(None, 0, 0, 0))(run_key, mine.seed, mine.sample_index, mine.position)
        noise = jnp.where(active[:, None], jax.vmap(_gumbel, in_axes=(0, None))(keys, vocab), 0.0)
        # Without the barrier XLA:CPU draws the noise inside the reduction, one number at a time.
        chosen = _likeliest(lax.optimization_barrier(noise - distance))
        replaced = active | _is_adjusted(mine, options)
        return tokens.at[jnp.where(replaced, rows, num_rows)].set(chosen, mode="drop")

    num_chosen = jnp.sum(chosen_here, dtype=jnp.int32)
    return lax.fori_loop(0, -(-num_chosen // block), run_block, greedy)


def _likeliest(scores: jax.Array) -> jax.Array:
    """``argmax`` of each row of ``[B, vocab]``, as two plain reductions: a quarter of its time on CPU."""
    ids = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    best = jnp.max(scores, axis=-1, keepdims=True)
    return jnp.min(jnp.where(scores == best, ids, scores.shape[-1]), axis=-1)


def _row_key(run_key: jax.Array, seed: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
    key = jax.random.fold_in(run_key, seed)
    return jax.random.fold_in(jax.random.fold_in(key, sample_index), position)


def _gumbel(key: jax.Array, vocab: int) -> jax.Array:
    """Standard Gumbel noise, float32 ``[vocab]``, finite.

    ``jax.random.gumbel`` draws on a grid of 2**-23: over a large vocabulary two tokens share the top
    value often enough to bias the winner. Here the grid is 2**-32 where it matters, for the same bits.
    """
    bits = jax.random.bits(key, (vocab,), jnp.uint32)
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _wants_top_k(sampling: SamplingInputs, vocab: int) -> Array:
    return (sampling.top_k > 0) & (sampling.top_k < vocab)


def _wants_top_p(sampling: SamplingInputs) -> Array:
    return sampling.top_p < 1


def _filter(distance: jax.Array, sampling: SamplingInputs, active: jax.Array) -> jax.Array:
    """``distance`` (``[B, vocab]``, 0 at the likeliest) with inf wherever a row's filters drop a token."""
    vocab = distance.shape[-1]
    top_k, top_p = active & _wants_top_k(sampling, vocab), active & _wants_top_p(sampling)
    distance = lax.cond(
        jnp.any(top_k),
        lambda: jnp.where(top_k[:, None], _keep_top_k(distance, sampling.top_k), distance),
        lambda: distance,
    )
    distance = lax.cond(
        jnp.any(top_p),
        lambda: jnp.where(top_p[:, None], _keep_top_p(distance, sampling.top_p), distance),
        lambda: distance,
    )
    likely = (jnp.exp(-distance) >= sampling.min_p[:, None]) | (distance == 0)
    return jnp.where(likely, distance, jnp.inf)


def _keep_top_k(distance: jax.Array, top_k: Array) -> jax.Array:
    """Keep the ``top_k`` (``[B]``, ``1..vocab-1``) likeliest tokens of each row."""

    def num_within(edge: jax.Array) -> jax.Array:
        return jnp.sum(distance <= edge[:, None], axis=-1, dtype=jnp.int32)

    edge = _smallest_edge(num_within, top_k)[:, None]
    nearer = jnp.sum(distance < edge, axis=-1, dtype=jnp.int32)
    return _keep_within(distance, edge, top_k - nearer)


def _keep_top_p(distance: jax.Array, top_p: Array) -> jax.Array:
    """Keep the fewest likeliest tokens of each row whose probabilities reach ``top_p`` (``[B]``)."""
    weights = jnp.exp(-distance)
    # More than nothing, so that top_p <= 0 keeps the likeliest.
    goal = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny) * jnp.sum(weights, axis=-1)

    def mass_within(edge: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(distance <= edge[:, None], weights, 0.0), axis=-1)

    edge = _smallest_edge(mass_within, goal)[:, None]
    nearer = jnp.sum(jnp.where(distance < edge, weights, 0.0), axis=-1)
    num_tied = jnp.ceil((goal - nearer) / jnp.exp(-edge[:, 0]))
    return _keep_within(distance, edge, jnp.maximum(num_tied, 1.0).astype(jnp.int32))


def _smallest_edge(measure: Callable[[jax.Array], jax.Array], goal: Array) -> jax.Array:
    """Per row the smallest distance with ``measure(distance) >= goal > 0``; ``measure`` never falls.

    Floats that are not negative are ordered as their bits are, so 31 halvings find the exact float. A sort
    of the vocabulary would find it too, in about ten times the time (XLA:CPU, 49152 tokens).
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        reached = measure(lax.bitcast_convert_type(middle, jnp.float32)) >= goal
        return jnp.where(reached, low, middle), jnp.where(reached, middle, high)

    infinity = lax.bitcast_convert_type(jnp.float32(jnp.inf), jnp.int32)
    low, high = jnp.full(goal.shape, -1, jnp.int32), jnp.full(goal.shape, infinity, jnp.int32)
    _, high = lax.fori_loop(0, 31, halve, (low, high))
    return lax.bitcast_convert_type(high, jnp.float32)


def _keep_within(distance: jax.Array, edge: jax.Array, num_tied: Array) -> jax.Array:
    """Keep what is nearer than ``edge`` (``[B, 1]``) and the first ``num_tied`` (``[B]``) tokens on it."""
    tied = distance == edge
    first = jnp.cumsum(tied, axis=-1, dtype=jnp.int32) <= num_tied[:, None]
    return jnp.where((distance < edge) | (tied & first), distance, jnp.inf)
