"""A step that was dispatched, and its results once they are read.

For:        putting what the device returns for the rows that sample back beside the slices of the batch.
Not for:    dispatching (runtime.py), or what becomes of a token (driver.py).
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from numpy.typing import NDArray

from kv_control.plan import RequestSlice, StepPlan, StepResults
from kv_execution.dispatch import DispatchOutcome
from kv_execution.step import StepOutputs


@dataclass(frozen=True, slots=True)
class SliceResult:
    """What one slice of a step brought.

    Attributes:
      slice: the slice it belongs to: results are attributed by the batch that ran, never by a cursor.
      token: the sampled token, None where the slice did not sample.
      logprob: its logprob under the unmodified model distribution.
      ok: False where the logits were not finite; then ``token`` means nothing.
      target_logprobs: float32 ``[n]`` beside ``slice.targets``, NaN where none was wanted; None without targets.
    """

    slice: RequestSlice
    token: int | None
    logprob: float
    ok: bool
    target_logprobs: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A step that was dispatched; its results may still be on their way.

    Attributes:
      plan: the batch as it ran.
      outputs: device arrays.
      backend: name of the attention backend that ran.
      decode: what became of its decode rows, one outcome for each attention window of the model.
    """

    plan: StepPlan
    outputs: StepOutputs
    backend: str
    decode: tuple[DispatchOutcome, ...]

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Tokens each slice ran."""
        return tuple(self.plan.slices.num_tokens.tolist())

    def results(self) -> StepResults:
        """Wait for the step; its results beside ``plan.slices``. One small read."""
        batch = self.plan.slices
        outputs = self.outputs
        wants_top = batch.options is not None and batch.options.num_top.any()
        samples, scored, top_ids, top = jax.device_get(
            (
                outputs.samples,
                outputs.target_logprobs if batch.targets is not None else None,
                outputs.top_ids if wants_top else None,
                outputs.top_logprobs if wants_top else None,
            )
        )
        sampled, num_sampled = batch.samples, int(batch.samples.sum())
        results = StepResults(
            tokens=np.zeros(len(batch), np.int32),
            logprobs=np.full(len(batch), np.nan, np.float32),
            ok=np.ones(len(batch), np.bool_),
            target_logprobs=None if batch.targets is None else np.full(len(batch.tokens), np.nan, np.float32),
            top_ids=np.zeros((len(batch), top.shape[1]), np.int32) if wants_top else None,
            top_logprobs=np.full((len(batch), top.shape[1]), np.nan, np.float32) if wants_top else None,
        )
        tokens, logprobs, ok = samples[:, :num_sampled]
        results.tokens[sampled] = tokens
        results.logprobs[sampled] = logprobs.view(np.float32)
        results.ok[sampled] = ok != 0
        if results.top_ids is not None and results.top_logprobs is not None:
            results.top_ids[sampled], results.top_logprobs[sampled] = top_ids[:num_sampled], top[:num_sampled]
        if batch.targets is not None and results.target_logprobs is not None:
            wanted = batch.targets >= 0
            results.target_logprobs[wanted] = scored[: int(wanted.sum())]
            bad = wanted & ~np.isfinite(results.target_logprobs)
            results.ok[np.repeat(np.arange(len(batch)), batch.num_tokens)[bad]] = False
        return results

    def read(self) -> list[SliceResult]:
        """``results`` one by one, in batch order."""
        results, batch = self.results(), self.plan.slices
        read = []
        for i, (piece, end) in enumerate(zip(batch, batch.ends.tolist(), strict=True)):
            scored = results.target_logprobs
            read.append(
                SliceResult(
                    slice=piece,
                    token=int(results.tokens[i]) if batch.samples[i] else None,
                    logprob=float(results.logprobs[i]),
                    ok=bool(results.ok[i]),
                    target_logprobs=scored[end - piece.num_tokens : end]
                    if scored is not None and piece.targets is not None
                    else None,
                )
            )
        return read
