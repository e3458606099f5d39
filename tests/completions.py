"""Prompts for tiny models, and ways to look at the completions of ``OfflineEngine``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from maxtext_paged import CompletionOutput

_RNG = np.random.default_rng(7)
PROMPTS = [_RNG.integers(3, 255, n).astype(np.int32) for n in (9, 2, 33, 1, 17, 8)]
"""Six prompts over tokens 3..254; with pages of 8 they take one to five of them."""


def as_request(output: CompletionOutput) -> Any:
    """An output as ``tests.parity.assert_teacher_forced`` looks at requests."""
    n = output.prompt_length
    return SimpleNamespace(
        id=output.index,
        prompt=output.token_ids[:n],
        tokens=output.token_ids,
        prompt_logprobs=output.logprobs[:n],
        logprobs=output.logprobs[n:],
        want_prompt_logprobs=True,
    )


def token_lists(outputs: list[CompletionOutput]) -> list[list[int]]:
    """Prompt and completion of each output."""
    return [output.token_ids.tolist() for output in outputs]


def assert_whole(outputs: list[CompletionOutput]) -> None:
    """What holds for every row that did not fail."""
    for output in outputs:
        assert output.error is None and output.finish_reason in ("stop", "length")
        assert len(output.logprobs) == len(output.token_ids)
        assert np.flatnonzero(np.isnan(output.logprobs)).tolist() == [0]
        assert output.usage.prompt_tokens == output.prompt_length
        assert output.usage.total_tokens == len(output.token_ids)
