"""Geometry of the KV page pool: how K and V are stored, and what that costs.

For:        sizing a pool, describing it to whoever allocates it, and counting its bytes.
Not for:    allocating, or knowing any kernel's strides, packing or vendor shapes.
May import: the standard library, numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_common.dtypes import bytes_of, element_bits, scale_bits
from kv_common.errors import LayoutError
from kv_common.pages import pages_for_tokens

MAX_SLOTS = 2**31 - 1
"""Slots of the largest pool: the pad slot, one past the last, must still be an int32."""


@dataclass(frozen=True, slots=True)
class KvStorageLayoutV1:
    """One K pool and one V pool per layer, each ``[num_pages, tokens_per_page, heads, head_dim]`` (NHD).

    Pools of 8 bits an element have scales beside them, one per token and head: ``scales_shape``, page first like the
    pool, so that what is done to a page is done to its scales.

    KV heads over shards come in three regimes. Heads partition (``num_kv_heads`` is a multiple of
    ``head_shards``); one head each (they are equal); or heads replicate (``head_shards`` is a
    multiple of ``num_kv_heads``): then each shard holds the one head its queries map to, and
    ``replication_factor()`` consecutive ranks hold the same head. Anything else is refused.

    Attributes:
      num_layers: attention layers that own a pool.
      num_pages: pages of each pool; none is reserved.
      tokens_per_page: tokens of one page.
      num_kv_heads: KV heads of the model, before sharding.
      head_dim: elements of one head.
      dtype: element type, a key of ``kv_common.dtypes.ELEMENT_BITS``.
      head_shards: devices over which KV heads are spread.
      pool_replicas: devices that hold the same shard because their mesh axes do not shard heads.

    >>> layout = KvStorageLayoutV1(2, 8, 16, num_kv_heads=2, head_dim=64, dtype="float32", head_shards=4)
    >>> layout.heads_per_shard(), layout.replication_factor()
    (1, 2)
    >>> layout.total_pool_bytes() == layout.device_pool_bytes() * layout.num_devices
    True
    """

    num_layers: int
    num_pages: int
    tokens_per_page: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    head_shards: int = 1
    pool_replicas: int = 1

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "num_pages",
            "tokens_per_page",
            "num_kv_heads",
            "head_dim",
            "head_shards",
            "pool_replicas",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LayoutError(f"{name}={value!r}: a pool needs a whole number of at least 1")
        element_bits(self.dtype)
        if self.num_slots > MAX_SLOTS:
            raise LayoutError(
                f"{self.num_pages} pages of {self.tokens_per_page} tokens are {self.num_slots} slots, slot numbers "
                f"are int32 and end at {MAX_SLOTS}: lower `paged_num_pages`"
            )
        heads, shards = self.num_kv_heads, self.head_shards
        if heads % shards and shards % heads:
            raise LayoutError(
                f"{heads} KV heads cannot be spread over {shards} shards: neither divides the other. "
                "Use a tensor parallelism that divides the KV heads, or move it to an axis that does "
                "not shard heads (fsdp)"
            )

    def heads_per_shard(self) -> int:
        """KV heads that one shard holds."""
        return max(1, self.num_kv_heads // self.head_shards)

    def replication_factor(self) -> int:
        """Shards that hold the same KV head (consecutive ranks share it)."""
        return max(1, self.head_shards // self.num_kv_heads)

    @property
    def num_devices(self) -> int:
        """Devices that hold a part of the pool."""
        return self.head_shards * self.pool_replicas

    @property
    def num_slots(self) -> int:
        """Token slots of one pool, ``num_pages * tokens_per_page``: also the pad slot, one past the end."""
        return self.num_pages * self.tokens_per_page

    @property
    def pool_shape(self) -> tuple[int, int, int, int]:
        """Global shape of one layer's K pool, replicated heads counted once per shard that holds them."""
        return (
            self.num_pages,
            self.tokens_per_page,
            self.heads_per_shard() * self.head_shards,
            self.head_dim,
        )

    @property
    def scales_shape(self) -> tuple[int, int, int, int] | None:
        """Global shape of the scales of one layer's K pool; None where the dtype has none."""
        return (*self.pool_shape[:3], 1) if scale_bits(self.dtype) else None

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens."""
        return pages_for_tokens(num_tokens, self.tokens_per_page)

    def _page_bytes_of_a_head(self) -> int:
        """Bytes of one head's part of one page, of K alone: its elements, in whole bytes, and its scales."""
        tokens = self.tokens_per_page
        return bytes_of(tokens * self.head_dim, self.dtype) + tokens * scale_bits(self.dtype) // 8

    def page_bytes(self) -> int:
        """Bytes of one page on one device: K and V, all layers, scales included."""
        return 2 * self.num_layers * self.heads_per_shard() * self._page_bytes_of_a_head()

    def device_pool_bytes(self) -> int:
        """Bytes of all pools on one device."""
        return self.num_pages * self.page_bytes()

    def total_pool_bytes(self) -> int:
        """Bytes of all pools on all devices; the two replications multiply."""
        one_copy = 2 * self.num_layers * self.num_pages * self.num_kv_heads * self._page_bytes_of_a_head()
        return one_copy * self.replication_factor() * self.pool_replicas
