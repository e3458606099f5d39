"""Prompt logprobs in row blocks: right, only where wanted, and never the whole ``[T, vocab]``."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kv_execution.logprobs import target_logprobs

ROWS, EMB, VOCAB = 24, 5, 37


def problem() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hidden rows, a head, and float64 logprobs of every (row, token)."""
    rng = np.random.default_rng(8)
    hidden, weights = rng.normal(size=(ROWS, EMB)), rng.normal(size=(EMB, VOCAB))
    logits = hidden @ weights
    return hidden, weights, logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("block", [1, 5, 8, 24, 100])
def test_each_wanted_token_gets_its_logprob_and_the_rest_nan(block):
    hidden, weights, exact = problem()

    @jax.jit
    def run(rows, targets, num_targets):
        logits = jnp.asarray(hidden @ weights, jnp.float32)
        return target_logprobs(lambda r: logits[r], rows, targets, num_targets, block=block)

    for num_targets in (0, 1, 5, 8, 9, 23, 24):
        rng = np.random.default_rng(num_targets)
        rows, targets = np.zeros((2, ROWS), np.int32)
        rows[:num_targets] = rng.permutation(ROWS)[:num_targets]
        targets[:num_targets] = rng.integers(0, VOCAB, num_targets)
        result = np.asarray(run(rows, targets, np.int32(num_targets)))
        wanted = exact[rows[:num_targets], targets[:num_targets]]
        np.testing.assert_allclose(result[:num_targets], wanted, rtol=0, atol=4e-6)
        assert (result.dtype, result.shape) == (np.float32, (ROWS,))
        assert np.isnan(result[num_targets:]).all()


def test_the_head_runs_once_per_started_block():
    seen = []

    def head(rows):
        jax.debug.callback(lambda rows: seen.append(rows), rows)
        return jnp.zeros((rows.shape[0], VOCAB))

    rows = np.arange(ROWS, dtype=np.int32)
    program = jax.jit(lambda count: target_logprobs(head, rows, rows, count, block=8))
    for num_targets, calls in [(0, 0), (1, 1), (8, 1), (9, 2), (24, 3)]:
        seen.clear()
        jax.block_until_ready(program(np.int32(num_targets)))
        jax.effects_barrier()
        assert len(seen) == calls


def test_without_targets_nothing_of_the_head_runs_not_even_what_a_loop_could_share():
    def head(rows):
        table = jnp.ones((EMB, 1024), jnp.bfloat16).astype(jnp.float32)  # a cast that every block repeats
        return jnp.sin(rows[:, None] + jnp.ones((ROWS, EMB))) @ table

    rows = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    program = jax.jit(lambda rows, count: target_logprobs(head, rows, rows, count, block=ROWS))
    text = program.lower(rows, count).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    assert "conditional(" in entry
    assert not re.search(rf"= f32\[({ROWS}|{EMB}),\d+\]", entry)


def test_one_program_serves_every_number_of_targets():
    traced = []

    @jax.jit
    def run(num_targets):
        traced.append(num_targets)
        rows = jnp.arange(ROWS, dtype=jnp.int32)
        return target_logprobs(lambda r: jnp.zeros((8, VOCAB)) + r[:, None], rows, rows, num_targets, block=8)

    for count in range(ROWS + 1):
        run(np.int32(count))
    assert len(traced) == 1


def test_no_array_of_every_row_and_the_vocabulary_ever_exists():
    num_rows, vocab, block = 512, 50_000, 16

    def run(hidden, weights, rows, targets, num_targets):
        return target_logprobs(lambda r: hidden[r] @ weights, rows, targets, num_targets, block=block)

    f32, i32 = jnp.float32, jnp.int32
    struct = jax.ShapeDtypeStruct
    arguments = (
        struct((num_rows, 8), f32),
        struct((8, vocab), f32),
        struct((num_rows,), i32),
        struct((num_rows,), i32),
        struct((), i32),
    )
    memory = jax.jit(run).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3 * block * vocab * 4
