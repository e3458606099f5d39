"""What the runtime needs of a model: two pure functions and a geometry.

For:        the seam between the paged loop and whoever owns the weights (MaxText, or a test's fake).
Not for:    pools, pages or sampling.
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
from jax.sharding import Mesh, Sharding

from kv_common.layout import KvStorageLayoutV1
from kv_execution.metadata import StepInputs

Params = Any
"""A pytree of weights; only the model looks inside."""

Pools = Any
"""A pytree whose leaves are the K and V pools of all layers, each ``[num_pages, tokens_per_page, heads, dim]``, and
their scales where they are quantised (``quantised.QuantisedPool``)."""


class PagedModel(Protocol):
    """A model bound to a paged KV pool. Both functions are pure and are traced inside the step's jit.

    One whose layers form window groups (``ControlPlane.windows``) also has ``leaf_groups``: for each leaf of its pools
    the group whose pages it holds, 0 for layers without a window.
    """

    @property
    def layout(self) -> KvStorageLayoutV1:
        """Geometry of the pools this model reads and writes."""
        ...

    @property
    def vocab_size(self) -> int:
        """Logits per row."""
        ...

    @property
    def mesh(self) -> Mesh | None:
        """The mesh the model runs on; None on a single default device."""
        ...

    @property
    def pool_sharding(self) -> Sharding | None:
        """Sharding of every pool; None on a single default device."""
        ...

    def create_pools(self) -> Pools:
        """Zeroed pools, created under their sharding."""
        ...

    def forward(
        self, params: Params, pools: Pools, token_ids: jax.Array, inputs: StepInputs
    ) -> tuple[jax.Array, jax.Array, Pools]:
        """Append the step's K/V, attend, and run the head on the rows to be sampled.

        Args:
          token_ids: int32 ``[T]``, with previous samples filled in.

        Returns:
          ``(logits, hidden, pools)``: float32 ``[S, vocab]`` of ``inputs.sample_rows``; ``[T, emb]``
          before the head; the updated pools.
        """
        ...

    def head(self, params: Params, hidden: jax.Array, rows: jax.Array) -> jax.Array:
        """Logits, float32 ``[B, vocab]``, of ``rows`` (int32 ``[B]``) of ``hidden`` as ``forward`` gave it."""
        ...
