"""The one jitted program of a step: take the buffer apart, fill in tokens, forward, sample, score.

For:        everything between a step's inputs and its small outputs, on the device.
Not for:    building inputs (step_inputs.py) or deciding what runs (runtime.py, driver.py).
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from kv_execution.logit_adjust import OptionRows
from kv_execution.logprobs import target_logprobs
from kv_execution.metadata import StepInputs
from kv_execution.model import PagedModel
from kv_execution.packing import Packing
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
      samples: int32 ``[3, max_num_seqs]``, what the host reads, in one piece: the tokens, the bits of their float32
        logprobs under the unmodified model distribution, and whether the row's logits were finite (0 or 1).
      target_logprobs: float32 ``[T]``, of the wanted prompt tokens, packed first; NaN elsewhere.
      top_ids, top_logprobs: int32 and float32 ``[max_num_seqs, MAX_TOP_LOGPROBS]``, as ``top_logprobs`` gives them.
    """

    tokens: jax.Array
    samples: jax.Array
    target_logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


Leaves = Sequence[jax.Array]


def make_step_program(model: PagedModel, *, params: Any, pools: Any, max_num_seqs: int) -> jax.stages.Wrapped:
    """The step as one function ``(param_leaves, pool_leaves, buffer, previous_tokens, options, run_key, packing) ->
    (pool_leaves, outputs)``. Flat arrays: hundreds of weights in modules cost milliseconds a call to take apart.

    Pools are donated. One program is compiled per token rung (its ``packing`` of ``StepInputs``) and nothing else is
    traced: whether a batch samples, filters or scores is decided inside by its data.

    Args:
      params, pools: trees of the structure of the weights and pools, whatever their leaves.
    """
    params_structure, pools_structure = jax.tree.structure(params), jax.tree.structure(pools)

    def paged_step(
        param_leaves: Leaves,
        pool_leaves: Leaves,
        buffer: jax.Array,
        previous_tokens: jax.Array,
        options: OptionRows,
        run_key: jax.Array,
        packing: Packing,
    ) -> tuple[Leaves, StepOutputs]:
        params = jax.tree.unflatten(params_structure, param_leaves)
        pools = jax.tree.unflatten(pools_structure, pool_leaves)
        inputs: StepInputs = packing.unpack(buffer)
        token_ids = jnp.where(
            inputs.previous_index >= 0,
            previous_tokens[jnp.maximum(inputs.previous_index, 0)],
            inputs.token_ids,
        )
        logits, hidden, pools = model.forward(params, pools, token_ids, inputs)
        tokens, logprobs, ok = sample(logits, inputs.sampling, run_key, options)
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

        tokens = widened(tokens)
        samples = jnp.stack(
            [tokens, lax.bitcast_convert_type(widened(logprobs), jnp.int32), widened(ok).astype(jnp.int32)]
        )
        return jax.tree.leaves(pools), StepOutputs(tokens, samples, scored, widened(top_ids), widened(top))

    # Stated, so that a step's outputs re-enter the next step exactly as they left (no second compile).
    shardings: Any = {}
    if model.mesh is not None:
        shardings["out_shardings"] = model.pool_sharding, NamedSharding(model.mesh, PartitionSpec())
    return jax.jit(paged_step, donate_argnums=1, static_argnums=6, **shardings)
