"""From a step's plan to the arrays that enter the device: numpy in, numpy out.

For:        tokens, segment ids, sampling parameters and score targets of one flat step.
Not for:    pages (kv_control plans them) or running anything.
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

import numpy as np

from kv_control.plan import GREEDY, StepPlan
from kv_execution.metadata import PageMetadata, SamplingInputs, StepInputs


def build_step_inputs(plan: StepPlan) -> StepInputs:
    """The arrays of a planned step, all of shapes fixed by ``(plan.token_rung, plan.row_rung)``.

    Rows to sample are packed in batch order: the ``i``-th slice that samples is entry ``i`` of the outputs.
    """
    num_tokens, num_rows = plan.token_rung, plan.row_rung
    token_ids = np.zeros(num_tokens, np.int32)
    previous_index = np.full(num_tokens, -1, np.int32)
    target_rows = np.zeros(num_tokens, np.int32)
    targets = np.zeros(num_tokens, np.int32)
    sample_rows = np.zeros(num_rows, np.int32)
    specs = [GREEDY] * num_rows
    sampled_position = np.zeros(num_rows, np.int32)

    token, num_sampled, num_targets = 0, 0, 0
    for request in plan.slices:
        end = token + request.num_tokens
        if request.previous_sample is None:
            token_ids[token:end] = request.tokens
        else:
            previous_index[token] = request.previous_sample
        if request.targets is not None:
            wanted = np.flatnonzero(request.targets >= 0)
            target_rows[num_targets : num_targets + len(wanted)] = token + wanted
            targets[num_targets : num_targets + len(wanted)] = request.targets[wanted]
            num_targets += len(wanted)
        if request.sample is not None:
            sample_rows[num_sampled] = end - 1
            specs[num_sampled] = request.sample
            sampled_position[num_sampled] = request.start + request.num_tokens
            num_sampled += 1
        token = end
    segment_ids = np.where(plan.table.row_of_token < num_rows, plan.table.row_of_token + 1, 0).astype(np.int32)
    return StepInputs(
        token_ids=token_ids,
        previous_index=previous_index,
        segment_ids=segment_ids,
        pages=PageMetadata.from_table(plan.table),
        sample_rows=sample_rows,
        sampling=SamplingInputs(
            temperature=np.array([spec.temperature for spec in specs], np.float32),
            top_k=np.array([spec.top_k for spec in specs], np.int32),
            top_p=np.array([spec.top_p for spec in specs], np.float32),
            min_p=np.array([spec.min_p for spec in specs], np.float32),
            seed=np.array([spec.seed for spec in specs], np.uint32),
            sample_index=np.array([spec.sample_index for spec in specs], np.int32),
            position=sampled_position,
        ),
        target_rows=target_rows,
        targets=targets,
        num_targets=np.asarray(num_targets, np.int32),
    )
