"""From a step's plan to the arrays that enter the device: numpy in, numpy out.

For:        tokens, segment ids, sampling parameters and score targets of one flat step.
Not for:    pages (kv_control plans them) or running anything.
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_control.plan import GREEDY, StepPlan
from kv_execution.metadata import PageMetadata, SamplingInputs, StepInputs


def build_step_inputs(plan: StepPlan, max_seqlen_k: int | None = None) -> StepInputs:
    """The arrays of a planned step, all of shapes fixed by ``(plan.token_rung, plan.row_rung)``.

    Rows to sample are packed in batch order: the ``i``-th slice that samples is entry ``i`` of the outputs.

    Args:
      max_seqlen_k: see ``PageMetadata``.
    """
    num_tokens, num_rows, batch = plan.token_rung, plan.row_rung, plan.slices
    sampled = np.flatnonzero(batch.samples)
    last_rows = batch.ends - 1
    previous_index = np.full(num_tokens, -1, np.int32)
    previous_index[batch.ends - batch.num_tokens] = batch.previous_sample
    wanted = np.zeros(0, np.int64) if batch.targets is None else np.flatnonzero(batch.targets >= 0)
    targets = wanted if batch.targets is None else batch.targets[wanted]
    segment_ids = np.where(plan.table.row_of_token < num_rows, plan.table.row_of_token + 1, 0).astype(np.int32)
    sampling, options = batch.sampling.take(sampled), batch.options
    nobody = np.zeros(0, np.int32)
    return StepInputs(
        token_ids=_padded(batch.tokens, num_tokens),
        previous_index=previous_index,
        segment_ids=segment_ids,
        pages=PageMetadata.from_table(plan.table, max_seqlen_k, plan.window_tables),
        sample_rows=_padded(last_rows[sampled], num_rows),
        num_samples=np.asarray(len(sampled), np.int32),
        sampling=SamplingInputs(
            temperature=_padded(sampling.temperature, num_rows, GREEDY.temperature),
            top_k=_padded(sampling.top_k, num_rows, GREEDY.top_k),
            top_p=_padded(sampling.top_p, num_rows, GREEDY.top_p),
            min_p=_padded(sampling.min_p, num_rows, GREEDY.min_p),
            seed=_padded(sampling.seed, num_rows, GREEDY.seed),
            sample_index=_padded(sampling.sample_index, num_rows, GREEDY.sample_index),
            position=_padded((batch.start + batch.num_tokens)[sampled], num_rows),
            options_row=_padded(nobody if options is None else options.rows[sampled], num_rows, -1),
            num_top=_padded(nobody if options is None else options.num_top[sampled], num_rows),
        ),
        target_rows=_padded(wanted, num_tokens),
        targets=_padded(targets, num_tokens),
        num_targets=np.asarray(len(wanted), np.int32),
    )


def _padded(values: NDArray[Any], size: int, fill: float = 0) -> NDArray[Any]:
    """``[size]``, beginning with ``values``; int64 becomes int32, the only integers a step knows."""
    dtype = np.dtype(np.int32) if values.dtype == np.int64 else values.dtype
    padded = np.full(size, fill, dtype)
    padded[: len(values)] = values
    return padded
