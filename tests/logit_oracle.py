"""What options do to logits, once more and by hand: numpy, one request, one token after another.

For:        what tokens a request with penalties, bias and min_tokens must get.
Not for:    jax, rows, pages or batches: nothing here is shared with what it judges.
May import: numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def changed_logits(
    logits: NDArray,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    banned: Sequence[int] = (),
) -> NDArray:
    """float32 logits as vLLM documents them: bias and bans, then repetition, frequency and presence."""
    changed = np.array(logits, np.float32)
    for token, bias in (logit_bias or {}).items():
        changed[token] += np.float32(bias)
    for token in banned:
        changed[token] = -np.inf
    for token in {*prompt, *output}:
        if changed[token] > 0:
            changed[token] /= np.float32(repetition_penalty)
        else:
            changed[token] *= np.float32(repetition_penalty)
    for token in set(output):
        changed[token] -= np.float32(frequency_penalty) * np.float32(list(output).count(token))
        changed[token] -= np.float32(presence_penalty)
    return changed


def greedy_completion(
    model: Callable[[Sequence[int]], NDArray],
    prompt: Sequence[int],
    max_tokens: int,
    *,
    stop_token_ids: Sequence[int] = (),
    min_tokens: int = 0,
    **options: object,
) -> list[int]:
    """What a greedy request generates.

    Args:
      model: float32 ``[vocab]`` logits after a sequence of tokens.
    """
    output: list[int] = []
    while len(output) < max_tokens:
        banned = stop_token_ids if len(output) < min_tokens else ()
        logits = changed_logits(model([*prompt, *output]), prompt, output, banned=banned, **options)  # type: ignore[arg-type]
        output.append(int(np.argmax(logits)))
        if output[-1] in stop_token_ids:
            break
    return output
