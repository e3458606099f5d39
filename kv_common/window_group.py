"""A group of layers with one sliding window: which pages they see, and the most that rows of them need.

For:        every page count that a window changes, beside the pools' own geometry.
Not for:    who holds the pages (kv_control) or layers that see everything (layout.py alone).
May import: the standard library, numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import LayoutError
from kv_common.layout import KvStorageLayoutV1
from kv_common.pages import full_pages, pages_for_tokens

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """Layers whose tokens see themselves and the ``window - 1`` before them, and the pools of these layers.

    Attributes:
      window: positions that a query sees, its own included.
      layout: of the group's own pools: its layers, its page count; all else as the model's other pools.

    >>> layout = KvStorageLayoutV1(5, 20, 4, num_kv_heads=1, head_dim=8, dtype="float32")
    >>> group = WindowGroup(8, layout)
    >>> group.first_pages(np.array([0, 7, 8, 11, 12])).tolist()
    [0, 0, 0, 1, 1]
    >>> group.row_pages, group.step_pages(num_rows=2, num_tokens=16)
    (4, 12)
    """

    window: int
    layout: KvStorageLayoutV1

    def __post_init__(self) -> None:
        if self.window < 1:
            raise LayoutError(f"sliding_window={self.window}: a token sees at least itself")

    def first_pages(self, positions: Int64) -> Int64:
        """Of each position, the oldest page that a query there sees; no later query sees an older one."""
        return full_pages(np.maximum(positions - self.window + 1, 0), self.layout.tokens_per_page)

    def first_page(self, position: int) -> int:
        """``first_pages`` of one position."""
        return full_pages(max(position - self.window + 1, 0), self.layout.tokens_per_page)

    @property
    def row_pages(self) -> int:
        """Most pages of a row that decodes: its window however it lies on pages, and one to grow into."""
        page = self.layout.tokens_per_page
        return pages_for_tokens(self.window + page - 1, page) + 1

    def step_pages(self, *, num_rows: int, num_tokens: int) -> int:
        """Most pages that the rows of one step need together.

        A row with ``n`` new tokens reads ``window - 1 + n`` positions: its share of them is ``n / tokens_per_page``.
        """
        return num_rows * self.row_pages + self.layout.pages_for(num_tokens)
