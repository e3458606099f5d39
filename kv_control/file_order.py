"""In which order a queue that is known in advance shares the most: along its prefix tree, long outputs early.

For:        ordering the rows of a file, and saying how much of its prompts sharing can avoid at best.
Not for:    the order among running requests (scheduler), or reading files.
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class FileOrder:
    """An order of rows, and what it makes possible.

    Attributes:
      order: int64 ``[n]``, the rows, first to run first.
      num_prompt_tokens: of all rows.
      attainable_tokens: prompt tokens that need not be run if every page of the rows' prefix tree is computed once
        and kept. No order avoids more: a page has to be computed once, and a prompt's last token always runs.
    """

    order: NDArray[np.int64]
    num_prompt_tokens: int
    attainable_tokens: int


def prefix_order(
    prompts: Sequence[NDArray[np.integer[Any]]], max_tokens: Sequence[int | None], tokens_per_page: int
) -> FileOrder:
    """Rows that share pages side by side, shorter before longer; of those families the ones with the longest outputs
    first, and otherwise as they came.

    A family is the rows that share more pages with each other than all rows do: behind one common system prompt,
    families are told apart by what follows it. Sorted prompts share most with their neighbour: what a row can find is
    the whole pages it has in common with the row before it.

    Args:
      prompts: token ids, ``[n_i]`` each. max_tokens: most tokens each generates; None is as many as fit.

    >>> prompts = [np.array(p) for p in ([7, 7, 1], [5, 5, 5], [7, 7, 2, 2], [5, 5])]
    >>> found = prefix_order(prompts, [4, 9, 4, 2], tokens_per_page=2)
    >>> found.order.tolist(), found.attainable_tokens, found.num_prompt_tokens
    ([3, 1, 0, 2], 4, 12)
    """
    keys = [np.asarray(prompt).astype(">u4").tobytes() for prompt in prompts]  # bytes compare as the tokens do
    by_prompt = sorted(range(len(keys)), key=keys.__getitem__)
    shared = [_common_tokens(keys[a], keys[b]) // tokens_per_page for a, b in pairwise(by_prompt)]
    everywhere = min(shared, default=0)
    families = [by_prompt[:1]] if by_prompt else []
    attainable = 0
    for row, common in zip(by_prompt[1:], shared, strict=True):
        attainable += min(common, max(len(prompts[row]) - 1, 0) // tokens_per_page) * tokens_per_page
        if common > everywhere:
            families[-1].append(row)
        else:
            families.append([row])
    endless = np.iinfo(np.int64).max

    def longest_output(family: list[int]) -> int:
        return max(endless if (limit := max_tokens[row]) is None else limit for row in family)

    def has_more(family: list[int]) -> bool:
        """Whether its shortest row goes on behind what all rows share; one that ends there has to come first."""
        return len(prompts[family[0]]) > everywhere * tokens_per_page

    families.sort(key=lambda family: (has_more(family), -longest_output(family), min(family)))
    return FileOrder(
        order=np.array([row for family in families for row in family], np.int64),
        num_prompt_tokens=sum(map(len, prompts)),
        attainable_tokens=attainable,
    )


def _common_tokens(one: bytes, other: bytes) -> int:
    """Leading tokens that two keys have in common."""
    size = min(len(one), len(other)) // 4
    differ = np.frombuffer(one, ">u4", size) != np.frombuffer(other, ">u4", size)
    return int(differ.argmax()) if differ.any() else size
