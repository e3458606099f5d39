"""How many pages a window group gets beside the pages of layers that see everything.

For:        dividing page counts and budgets between groups, and what requests then fit.
Not for:    what decides the whole (sizing.py), or allocating.
May import: kv_common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kv_common.layout import KvStorageLayoutV1
from kv_common.window_group import WindowGroup


@dataclass(frozen=True, slots=True)
class GroupDemand:
    """What a window group can use.

    Attributes:
      group: its window and layout, of one page.
      most: pages beyond which more are of no use. least: pages that one request needs, at most.
      share: of the pages of other layers, for requests of half the context: what both kinds run out of together.
    """

    group: WindowGroup
    most: int
    least: int
    share: float

    @classmethod
    def of(
        cls, group: WindowGroup, *, max_num_seqs: int, max_model_len: int, step_tokens: int, prefix_cache: bool
    ) -> GroupDemand:
        """The demand of ``max_num_seqs`` rows; with a prefix cache as much again for windows that nobody reads now."""
        context = group.layout.pages_for(max_model_len)
        rows = max_num_seqs * (2 if prefix_cache else 1)
        most = min(max_num_seqs * context, group.step_pages(num_rows=rows, num_tokens=step_tokens))
        least = min(context, group.step_pages(num_rows=1, num_tokens=step_tokens))
        half = group.layout.pages_for(max(1, max_model_len // 2))
        return cls(group, max(most, least), least, min(1.0, group.row_pages / half))

    def pages_beside(self, num_pages: int, *, ample: bool) -> int:
        """Pages of the group beside ``num_pages`` of other layers: never more than those, since no row needs more.

        Args:
          ample: memory is no limit: as many as can be of use. Otherwise its share.
        """
        wanted = num_pages if ample else max(round(self.share * num_pages), self.least)
        return min(num_pages, self.most, wanted)


def bytes_of_pools(one_page: KvStorageLayoutV1, demands: Sequence[GroupDemand], num_pages: int, *, ample: bool) -> int:
    """Bytes of all pools on one device, ``num_pages`` of layers that see everything and each group's own."""
    groups = sum(one.pages_beside(num_pages, ample=ample) * one.group.layout.page_bytes() for one in demands)
    return num_pages * one_page.page_bytes() + groups


def most_pages(budget_bytes: int, cost: Callable[[int], int]) -> int:
    """The most pages whose ``cost``, which grows with them, is within a budget; 0 where one is above it.

    >>> most_pages(100, lambda n: 7 * n), most_pages(6, lambda n: 7 * n)
    (14, 0)
    """
    low, high = 0, 1
    while cost(high) <= budget_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= budget_bytes else (low, middle)
    return low


def groups_beside(demands: Sequence[GroupDemand], num_pages: int, *, ample: bool) -> tuple[WindowGroup, ...]:
    """The groups with their page counts."""
    return tuple(
        replace(one.group, layout=replace(one.group.layout, num_pages=one.pages_beside(num_pages, ample=ample)))
        for one in demands
    )


def rows_that_fit(group: WindowGroup, num_tokens: int, step_tokens: int) -> int:
    """Requests of so many tokens that a group's pool holds at once, sharing nothing."""
    pages, layout = group.layout.num_pages, group.layout
    windows = (pages - layout.pages_for(step_tokens)) // group.row_pages
    return max(pages // layout.pages_for(num_tokens), windows)


def describe_group(group: WindowGroup) -> str:
    """A group's pools, for a report."""
    layout = group.layout
    return (
        f"{layout.num_pages} pages for {layout.num_layers} layers with a window of {group.window} tokens, "
        f"{layout.device_pool_bytes() / 2**20:.1f} MiB a device, {layout.total_pool_bytes() / 2**20:.1f} MiB in all"
    )
