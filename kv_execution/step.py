"""The one jitted program of a step: fill in tokens, forward, sample, score.

For:        everything between a step's inputs and its small outputs, on the device.
Not for:    building inputs (step_inputs.py) or deciding what runs (runtime.py, driver.py).
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from kv_execution.logprobs import target_logprobs
from kv_execution.metadata import StepInputs
from kv_execution.model import PagedModel, Params, Pools
from kv_execution.sampling import sample
from kv_execution.top_logprobs import top_logprobs

HEAD_BLOCK_ROWS = 64
"""Rows per output-head call when prompt logprobs are wanted: bounds memory at 64 x vocab float32."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step leaves on the device.

    Attributes:
      tokens: int32 ``[max_num_seqs]``, entry ``i`` for the ``i``-th sampled row; the next step may feed
        from it without a read-back, so its length does not depend on the rung.
      logprobs: float32 ``[max_num_seqs]``, the chosen tokens' under the unmodified model distribution.
      ok: bool ``[max_num_seqs]``, False where the row's logits were not finite.
      target_logprobs: float32 ``[T]``, of the wanted prompt tokens, packed first; NaN elsewhere.
      top_ids, top_logprobs: int32 and float32 ``[max_num_seqs, MAX_TOP_LOGPROBS]``, as ``top_logprobs`` gives them.
    """

    tokens: jax.Array
    logprobs: jax.Array
    ok: jax.Array
    target_logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


StepProgram = Callable[[Params, Pools, StepInputs, jax.Array, jax.Array], tuple[Pools, StepOutputs]]


def make_step_program(model: PagedModel, *, max_num_seqs: int) -> StepProgram:
    """The step as one function ``(params, pools, inputs, previous_tokens, run_key) -> (pools, outputs)``.

    Pools are donated. One program is compiled per token rung and nothing else is traced: whether a
    batch samples, filters or scores is decided inside by its data.
    """

    def paged_step(
        params: Params, pools: Pools, inputs: StepInputs, previous_tokens: jax.Array, run_key: jax.Array
    ) -> tuple[Pools, StepOutputs]:
        token_ids = jnp.where(
            inputs.previous_index >= 0,
            previous_tokens[jnp.maximum(inputs.previous_index, 0)],
            inputs.token_ids,
        )
        logits, hidden, pools = model.forward(params, pools, token_ids, inputs)
        tokens, logprobs, ok = sample(logits, inputs.sampling, run_key, inputs.options)
        top_ids, top = top_logprobs(logits, inputs.sampling.num_top)
        scored = target_logprobs(
            lambda rows: model.head(params, hidden, rows),
            inputs.target_rows,
            inputs.targets,
            inputs.num_targets,
            block=HEAD_BLOCK_ROWS,
        )

        def widened(array: jax.Array) -> jax.Array:
            return jnp.pad(array, [(0, max_num_seqs - array.shape[0]), *[(0, 0)] * (array.ndim - 1)])

        return pools, StepOutputs(
            widened(tokens), widened(logprobs), widened(ok), scored, widened(top_ids), widened(top)
        )

    if model.mesh is None:
        program: Any = jax.jit(paged_step, donate_argnums=1)
    else:
        # Stated, so that a step's outputs re-enter the next step exactly as they left (no second compile).
        replicated = NamedSharding(model.mesh, PartitionSpec())
        program = jax.jit(paged_step, donate_argnums=1, out_shardings=(model.pool_sharding, replicated))
    return program
