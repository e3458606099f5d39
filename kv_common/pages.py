"""Page arithmetic: the one place that turns token counts into pages and slots.

For:        every ``ceil(tokens / tokens_per_page)`` of this project. No other module divides.
Not for:    knowing which pages are free or whose they are.
May import: the standard library, numpy.
"""

from __future__ import annotations

from typing import Any, overload

import numpy as np
from numpy.typing import NDArray


@overload
def pages_for_tokens(num_tokens: int, tokens_per_page: int) -> int: ...
@overload
def pages_for_tokens(num_tokens: NDArray[np.int64], tokens_per_page: int) -> NDArray[np.int64]: ...
def pages_for_tokens(num_tokens: Any, tokens_per_page: int) -> Any:
    """Pages that hold ``num_tokens`` tokens: of one request, or of each of an array of them.

    >>> [pages_for_tokens(n, 4) for n in (0, 1, 4, 5, 8, 10)]
    [0, 1, 1, 2, 2, 3]
    >>> pages_for_tokens(np.array([0, 4, 5]), 4).tolist()
    [0, 1, 2]
    """
    return -(-num_tokens // tokens_per_page)


@overload
def full_pages(num_tokens: int, tokens_per_page: int) -> int: ...
@overload
def full_pages(num_tokens: NDArray[np.int64], tokens_per_page: int) -> NDArray[np.int64]: ...
def full_pages(num_tokens: Any, tokens_per_page: int) -> Any:
    """Pages whose every slot is written once ``num_tokens`` tokens are.

    >>> [full_pages(n, 4) for n in (0, 3, 4, 7, 8)]
    [0, 0, 1, 1, 2]
    """
    return num_tokens // tokens_per_page


@overload
def last_page_len(num_tokens: int, tokens_per_page: int) -> int: ...
@overload
def last_page_len(num_tokens: NDArray[np.int64], tokens_per_page: int) -> NDArray[np.int64]: ...
def last_page_len(num_tokens: Any, tokens_per_page: int) -> Any:
    """Tokens in the last page, ``1..tokens_per_page``; 0 only for an empty request.

    >>> [last_page_len(n, 4) for n in (0, 1, 4, 5, 8)]
    [0, 1, 4, 1, 4]
    """
    earlier_pages = pages_for_tokens(num_tokens, tokens_per_page) - (num_tokens > 0)
    return num_tokens - earlier_pages * tokens_per_page


def page_and_offset(positions: NDArray[np.int64], tokens_per_page: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which page of its request each position lies on, and where on that page.

    >>> [part.tolist() for part in page_and_offset(np.array([0, 3, 4, 9]), 4)]
    [[0, 0, 1, 2], [0, 3, 0, 1]]
    """
    return positions // tokens_per_page, positions % tokens_per_page


def slots_of(pages: NDArray[np.int32], start: int, num_tokens: int, tokens_per_page: int) -> NDArray[np.int32]:
    """Slots of tokens ``start .. start + num_tokens - 1`` of a request that holds ``pages``.

    Args:
      pages: int32 ``[>= pages_for_tokens(start + num_tokens)]``, the request's pages in order.

    Returns:
      int32 ``[num_tokens]``, each ``page * tokens_per_page + offset``.

    >>> slots_of(np.array([7, 2], np.int32), 3, 3, 4).tolist()
    [31, 8, 9]
    """
    page, offset = page_and_offset(np.arange(start, start + num_tokens), tokens_per_page)
    return (pages[page].astype(np.int64) * tokens_per_page + offset).astype(np.int32)
