"""What a backend can do, as a table that is checked before the first page is allocated.

For:        declining or refusing, by name and with the allowed values, what a kernel does not know.
Not for:    choosing among backends (select).
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kv_common.dtypes import bytes_of
from kv_common.errors import ConfigError
from kv_common.layout import KvStorageLayoutV1
from kv_execution.attention.api import AttentionOptions
from kv_execution.quantised import QUANTISED_DTYPES


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one backend serves. ``None`` stands for "any".

    Attributes:
      head_sizes: head dimensions. page_sizes: tokens per page. dtypes: pool element types.
      sliding_window, soft_cap, sinks: whether the option is implemented.
      max_pages: pages of one pool. max_pool_bytes: bytes of one layer's K pool on one device.
    """

    head_sizes: frozenset[int] | None
    page_sizes: frozenset[int] | None
    dtypes: frozenset[str]
    sliding_window: bool
    soft_cap: bool
    sinks: bool
    max_pages: int | None
    max_pool_bytes: int | None

    def refusal(self, layout: KvStorageLayoutV1, options: AttentionOptions, *, has_sinks: bool = False) -> str | None:
        """Why this backend cannot serve such a layer: the option and what is allowed; None if it can.

        >>> from dataclasses import replace
        >>> table = replace(REFERENCE_CAPABILITIES, head_sizes=frozenset({64, 128}))
        >>> layout = KvStorageLayoutV1(1, 8, 16, num_kv_heads=2, head_dim=80, dtype="float32")
        >>> table.refusal(layout, AttentionOptions(scale=1.0, sliding_window=None, soft_cap=None))
        'head_dim=80: allowed are 64, 128'
        """
        pages, page_size = layout.num_pages, layout.tokens_per_page
        pool_bytes = bytes_of(pages * page_size * layout.heads_per_shard() * layout.head_dim, layout.dtype)
        if self.head_sizes is not None and layout.head_dim not in self.head_sizes:
            return f"head_dim={layout.head_dim}: allowed are {_listed(self.head_sizes)}"
        if self.page_sizes is not None and page_size not in self.page_sizes:
            return f"paged_tokens_per_page={page_size}: allowed are {_listed(self.page_sizes)}"
        if layout.dtype not in self.dtypes:
            return f"paged_kv_dtype={layout.dtype}: allowed are {', '.join(sorted(self.dtypes))}"
        if options.sliding_window is not None and not self.sliding_window:
            return f"sliding_window={options.sliding_window}: allowed is None (full attention)"
        if options.soft_cap is not None and not self.soft_cap:
            return f"soft_cap={options.soft_cap}: allowed is None (no cap)"
        if has_sinks and not self.sinks:
            return "attention sinks: allowed is none"
        if self.max_pages is not None and pages > self.max_pages:
            return f"paged_num_pages={pages}: allowed are at most {self.max_pages}"
        if self.max_pool_bytes is not None and pool_bytes > self.max_pool_bytes:
            return f"{pool_bytes} bytes per pool ({pages} pages): allowed are at most {self.max_pool_bytes}"
        return None


REFERENCE_CAPABILITIES = Capabilities(
    head_sizes=None,
    page_sizes=None,
    dtypes=frozenset({"float32", "bfloat16", "float16", *QUANTISED_DTYPES}),
    sliding_window=True,
    soft_cap=True,
    sinks=True,
    max_pages=None,
    max_pool_bytes=None,
)

FLASHINFER_CAPABILITIES = Capabilities(
    head_sizes=frozenset({64, 128, 256}),
    page_sizes=None,
    dtypes=frozenset({"bfloat16", "float16"}),
    sliding_window=True,
    soft_cap=True,
    sinks=False,
    max_pages=None,
    max_pool_bytes=None,
)
"""Of kernels that nothing here calls yet: an entry, so that asking for them is answered by name."""


def check_options(*, scale: float, sliding_window: int | None, soft_cap: float | None) -> None:
    """Refuse numbers that mean "off" somewhere and "all masked" elsewhere; off is None, here and everywhere.

    Raises:
      ConfigError: the window is below 1, or the cap or the scale is not a positive finite number.
    """
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f"scale={scale!r}: attention needs a positive finite scale")
    if sliding_window is not None and sliding_window < 1:
        raise ConfigError(f"sliding_window={sliding_window!r}: a token sees at least itself; None is off")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ConfigError(f"soft_cap={soft_cap!r}: a cap is a positive finite number; None is off")


def _listed(values: frozenset[int]) -> str:
    return ", ".join(str(value) for value in sorted(values))
