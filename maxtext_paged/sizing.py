"""How many pages a pool gets, and a line that says what decided it.

For:        turning ``paged_num_pages`` / ``paged_kv_budget_bytes`` into a page count, or a refusal with numbers.
Not for:    allocating.
May import: kv_common.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_common.errors import ConfigError
from kv_common.layout import KvStorageLayoutV1

DEFAULT_BUDGET_BYTES = 1 << 30
"""Most bytes per device that a pool takes when neither option is set."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A page count and the reason for it."""

    num_pages: int
    reason: str


def pool_size(
    one_page: KvStorageLayoutV1, *, num_pages: int, budget_bytes: int, max_num_seqs: int, max_model_len: int
) -> PoolSize:
    """Pages of a pool.

    Args:
      one_page: the layout with ``num_pages=1``, for its bytes per page.
      num_pages: ``paged_num_pages``, 0 if unset. budget_bytes: ``paged_kv_budget_bytes``, 0 if unset.

    Raises:
      ConfigError: the budget does not hold one page; names the smallest that works.
    """
    if num_pages:
        return PoolSize(num_pages, f"paged_num_pages={num_pages}")
    page_bytes = one_page.page_bytes()
    if budget_bytes:
        if budget_bytes < page_bytes:
            raise ConfigError(
                f"paged_kv_budget_bytes={budget_bytes} holds no page: one page of {one_page.tokens_per_page} tokens is "
                f"{page_bytes} bytes over all layers; the smallest budget that works is {page_bytes}"
            )
        return PoolSize(budget_bytes // page_bytes, f"paged_kv_budget_bytes={budget_bytes}")
    wanted = max_num_seqs * one_page.pages_for(max_model_len)
    affordable = max(DEFAULT_BUDGET_BYTES // page_bytes, one_page.pages_for(max_model_len))
    if wanted <= affordable:
        return PoolSize(wanted, f"{max_num_seqs} requests of {max_model_len} tokens at once")
    return PoolSize(affordable, "the default budget of 1 GiB a device; set paged_num_pages or paged_kv_budget_bytes")
