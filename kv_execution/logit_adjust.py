"""Bias, bans and penalties: what is done to a row's logits before temperature and filters.

For:        the device's table of options, one row per running request, its two small programs, and the arithmetic.
Not for:    which row has which options (kv_control.logit_options), or choosing a token (sampling.py).
May import: kv_common, kv_control, jax.

The table is an input of every step, read only where a row of the step names it, and never an output: what changes it
runs in front of the step as a program of its own, and only in batches that have options. So a batch without them pays
for one comparison, and options never recompile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kv_control.logit_options import MAX_BANNED, MAX_LOGIT_BIAS, RowOptions
from kv_control.plan import StepBatch
from kv_execution.metadata import Array

ENTRIES = MAX_LOGIT_BIAS + MAX_BANNED
"""Tokens whose logits one row may change by a fixed amount."""
HISTORY_BLOCK = 512
"""Tokens of a row that are counted at a time: a short history costs a short loop, whatever the context."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class OptionRows:
    """Options of ``R`` rows; ``RowOptions`` has what they mean. A row without a tenant holds anything.

    Attributes:
      ids, until: int32 ``[R, ENTRIES]``. values: float32 beside them. Padding has ``until`` 0.
      penalties: float32 ``[R, 3]``.
      num_prompt: int32 ``[R]``.
      tokens: int32 ``[R, H]``, the tokens of the row as far as it has any.
    """

    ids: Array
    values: Array
    until: Array
    penalties: Array
    num_prompt: Array
    tokens: Array


def history_size(max_model_len: int) -> int:
    """Columns of ``OptionRows.tokens``: the context, in whole blocks."""
    block = min(HISTORY_BLOCK, max_model_len)
    return -(-max_model_len // block) * block


def table_bytes(max_num_seqs: int, max_model_len: int) -> int:
    """What the table takes on each device."""
    return max_num_seqs * (3 * 4 * ENTRIES + 3 * 4 + 4 + 4 * history_size(max_model_len))


class OptionTable:
    """The device's ``OptionRows``, kept up with the batches that are dispatched.

    Attributes:
      rows: what the next step reads.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, mesh: Mesh | None) -> None:
        self._max_num_seqs, self._history = max_num_seqs, history_size(max_model_len)
        everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        n, k = max_num_seqs, ENTRIES
        empty = OptionRows(
            ids=np.zeros((n, k), np.int32),
            values=np.zeros((n, k), np.float32),
            until=np.zeros((n, k), np.int32),
            penalties=np.zeros((n, 3), np.float32),
            num_prompt=np.zeros(n, np.int32),
            tokens=np.zeros((n, self._history), np.int32),
        )
        self.rows: OptionRows = jax.device_put(empty, everywhere)
        placed: dict[str, Any] = {} if everywhere is None else {"out_shardings": everywhere}
        self._load = jax.jit(load_option_row, donate_argnums=0, **placed)
        self._note = jax.jit(note_tokens, donate_argnums=0, **placed)

    def follow(self, batch: StepBatch, previous_tokens: jax.Array) -> None:
        """Take what a batch brings, right before it is dispatched.

        Args:
          previous_tokens: int32 ``[max_num_seqs]``, what the step before it sampled, read or not.
        """
        options = batch.options
        if options is None:
            return
        for load in options.loads:
            self.rows = self._load(self.rows, np.int32(load.row), self._padded(load))
        if options.notes.any():
            noted = np.flatnonzero(options.notes)
            ends = batch.ends[noted]
            self._run_note(
                rows=batch.rows[noted],
                positions=batch.start[noted] + batch.num_tokens[noted] - 1,
                tokens=batch.tokens[ends - 1],
                previous=batch.previous_sample[noted],
                previous_tokens=previous_tokens,
            )

    def warm_up(self, previous_tokens: jax.Array) -> None:
        """Obtain both programs; touches nothing that anybody reads."""
        nothing = np.zeros(0, np.int32)
        self._run_note(nothing, nothing, nothing, nothing, previous_tokens)
        empty = np.zeros(0, np.float32)
        blank = RowOptions(0, nothing, empty, nothing, np.zeros(3, np.float32), 0, nothing)
        self.rows = self._load(self.rows, np.int32(0), self._padded(blank))

    def _padded(self, load: RowOptions) -> OptionRows:
        def wide(values: Any, size: int) -> Any:
            padded = np.zeros(size, values.dtype)
            padded[: len(values)] = values
            return padded

        return OptionRows(
            ids=wide(load.ids, ENTRIES),
            values=wide(load.values, ENTRIES),
            until=wide(load.until, ENTRIES),
            penalties=load.penalties,
            num_prompt=np.int32(load.num_prompt),
            tokens=wide(load.tokens, self._history),
        )

    def _run_note(self, rows: Any, positions: Any, tokens: Any, previous: Any, previous_tokens: jax.Array) -> None:
        def wide(values: Any, fill: int) -> Any:
            padded = np.full(self._max_num_seqs, fill, np.int32)
            padded[: len(values)] = values
            return padded

        packed = np.stack([wide(rows, self._max_num_seqs), wide(positions, 0), wide(tokens, 0), wide(previous, -1)])
        self.rows = replace(self.rows, tokens=self._note(self.rows.tokens, packed, previous_tokens))


def load_option_row(rows: OptionRows, row: Array, one: OptionRows) -> OptionRows:
    """``rows`` with row ``row`` replaced."""
    return jax.tree.map(lambda table, value: table.at[row].set(value), rows, one)


def note_tokens(history: Array, packed: Array, previous_tokens: Array) -> Array:
    """Write one token each into rows of ``history``.

    Args:
      packed: int32 ``[4, n]``: row (one past the last drops), position, token, and the entry of ``previous_tokens``
        that is meant instead of the token; -1 for none.
    """
    row, position, token, previous = packed
    token = jnp.where(previous >= 0, previous_tokens[jnp.maximum(previous, 0)], token)
    return history.at[row, position].set(token, mode="drop")


def adjust_logits(logits: jax.Array, options: OptionRows, row: jax.Array, position: jax.Array) -> jax.Array:
    """The logits that tokens are chosen from.

    Args:
      logits: float32 ``[B, vocab]``, the model's.
      row: int32 ``[B]``, each one's row of ``options``; -1 leaves its logits as they are.
      position: int32 ``[B]``, of the token to be chosen: what lies before it is the history.
    """
    vocab, one = logits.shape[-1], jnp.arange(logits.shape[0])[:, None]
    mine = jax.tree.map(lambda table: table[jnp.maximum(row, 0)], options)
    # A negative index would wrap round to the vocabulary's end.
    acts = (row >= 0)[:, None] & (position[:, None] < mine.until) & (mine.ids >= 0)
    biased = logits.at[one, jnp.where(acts, mine.ids, vocab)].add(mine.values, mode="drop")
    repetition, presence, frequency = (jnp.where(row >= 0, mine.penalties[:, i], off) for i, off in enumerate(_OFF))
    counting = (repetition != 1) | (presence != 0) | (frequency != 0)

    def penalised() -> jax.Array:
        length = jnp.where(counting, position, 0)
        in_prompt, count = _history(mine.tokens, mine.num_prompt, length, vocab)
        factor = repetition[:, None]
        repeated = jnp.where(biased > 0, biased / factor, biased * factor)
        penalised = jnp.where(in_prompt | (count > 0), repeated, biased)
        penalised = penalised - frequency[:, None] * count
        penalised = penalised - presence[:, None] * (count > 0)
        return jnp.where(counting[:, None], penalised, biased)

    return lax.cond(jnp.any(counting), penalised, lambda: biased)


_OFF = (1.0, 0.0, 0.0)


def _history(tokens: jax.Array, num_prompt: jax.Array, length: jax.Array, vocab: int) -> tuple[jax.Array, jax.Array]:
    """Which tokens stand in each row's prompt, bool ``[B, vocab]``, and how often in its completion, int32 beside it.

    Args:
      tokens: int32 ``[B, H]``. length: int32 ``[B]``, how many of them are to be looked at.
    """
    num_rows, size = tokens.shape
    block = min(HISTORY_BLOCK, size)
    row = jnp.arange(num_rows)[:, None]

    def count_block(i: jax.Array, counts: jax.Array) -> jax.Array:
        ids = lax.dynamic_slice_in_dim(tokens, i * block, block, axis=1)
        place = i * block + jnp.arange(block)[None]
        kind = (place >= num_prompt[:, None]).astype(jnp.int32)
        ids = jnp.where(place < length[:, None], ids, vocab)
        return counts.at[row, kind, ids].add(1, mode="drop")

    nothing = jnp.zeros((num_rows, 2, vocab), jnp.int32)
    counts = lax.fori_loop(0, -(-jnp.max(length) // block), count_block, nothing)
    return counts[:, 0] > 0, counts[:, 1]
