"""A bound MaxText model as the runtime's ``PagedModel``: two pure functions over params and pools.

For:        merging, calling and splitting the NNX model inside the step's jit.
Not for:    what may be bound (binding.py), weights (loading.py), the loop (kv_execution).
May import: kv_common, kv_control, kv_execution, jax, flax, maxtext.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import Mesh, NamedSharding
from maxtext.common.common_types import MODEL_MODE_PREFILL

from kv_common.errors import UnsupportedError
from kv_common.layout import KvStorageLayoutV1
from kv_common.window_group import WindowGroup
from kv_execution.attention.api import PagedAttentionBackend
from kv_execution.metadata import PageMetadata, StepInputs
from kv_execution.pool import create_zeroed
from kv_execution.products import XLA_PRODUCTS, ProductChoice
from kv_execution.sharding import (
    kv_pool_sharding,
)
from maxtext_paged.binding import (
    PagedAttentionOp,
    PagePool,
    StepVariable,
    bind_paged_attention,
)
from maxtext_paged.geometry import abstract_model, abstract_params_of, kernels_in_bfloat16
from maxtext_paged.products import bind_products


class MaxTextPagedModel:
    """MaxText's ``Transformer`` with paged attention, held abstractly: no weight and no pool is allocated here.

    Attributes:
      config: MaxText's configuration.
      mesh: the mesh the model was built for.
      layout: geometry of the pools, but for those of ``window_groups``.
      window_groups: layers with a sliding window that have pools of their own.
      head_axes: mesh axes (of size above one) that shard KV heads.
      products: which matrix products run natively, and why.
      abstract_params: ``nnx.State`` of ``jax.ShapeDtypeStruct`` with shardings, the restore target.
    """

    def __init__(
        self,
        config: Any,
        mesh: Mesh,
        *,
        layout: KvStorageLayoutV1,
        head_axes: tuple[str, ...],
        backend: PagedAttentionBackend,
        products: ProductChoice = XLA_PRODUCTS,
        model: nnx.Module | None = None,
        window_groups: Sequence[WindowGroup] = (),
    ) -> None:
        """Bind a model.

        Args:
          products: which matrix products the dense layers run.
          model: ``ModelGeometry.model`` of the same configuration and mesh, which stays as it is; built if None.
        """
        self.config = config
        self.mesh = mesh
        self.layout = layout
        self.window_groups = tuple(window_groups)
        self.head_axes = head_axes
        with logical_axis_rules(config.logical_axis_rules):
            bound = nnx.eval_shape(
                lambda model: bind_paged_attention(
                    model, layout, backend=backend, mesh=mesh, head_axes=head_axes, window_groups=self.window_groups
                ),
                abstract_model(config, mesh) if model is None else model,
            )
            self.products = bind_products(bound, products, bound.decoder.decoder_norm.step)
            graph, params, pools, step, rest = nnx.split(bound, nnx.Param, PagePool, StepVariable, ...)
            self._graph, self._pools, self._step = graph, pools, step
            self._layer_paths = _attention_paths(bound)
            self._groups = {path: bound_op.group for path, bound_op in _attention_ops(bound)}
            self.abstract_params = abstract_params_of(config, mesh, params)
        if products.half_weights:
            self.abstract_params = kernels_in_bfloat16(self.abstract_params, self.products.native)
        self._rest = materialize_rng_state(rest)

    @property
    def num_layers(self) -> int:
        """Attention layers, with a window or without."""
        return self.layout.num_layers + sum(group.layout.num_layers for group in self.window_groups)

    def device_pool_bytes(self) -> int:
        """Bytes of all pools on one device."""
        return self.layout.device_pool_bytes() + sum(group.layout.device_pool_bytes() for group in self.window_groups)

    def total_pool_bytes(self) -> int:
        """Bytes of all pools on all devices."""
        return self.layout.total_pool_bytes() + sum(group.layout.total_pool_bytes() for group in self.window_groups)

    @property
    def vocab_size(self) -> int:
        """Logits per row."""
        return int(self.config.vocab_size)

    def create_pools(self) -> nnx.State:
        """Zeroed pools of every layer, each created under its sharding in one compiled call."""
        return create_zeroed(
            jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.pool_sharding),
                self._pools,
            )
        )

    @property
    def pool_sharding(self) -> NamedSharding:
        """Sharding of every pool."""
        return kv_pool_sharding(self.mesh, self.layout, self.head_axes)

    @property
    def leaf_groups(self) -> tuple[int, ...]:
        """The group of each leaf of the pools: see ``PagedModel``."""
        flat = nnx.to_flat_state(self._pools)
        return tuple(
            group
            for path, group in ((path, self._groups[path[:-1]]) for path, _ in flat)
            for _ in jax.tree.leaves(dict(flat)[path])
        )

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The attention modules in the order in which a step runs them."""
        return tuple(".".join(map(str, path[:-1])) for path in self._layer_paths)

    def pools_of_layers(self, layers: Sequence[tuple[jax.Array, jax.Array]]) -> nnx.State:
        """Pools from each layer's ``(k_pool, v_pool)``, in the order of ``layer_names``."""
        arrays = {
            (*path, name): pool
            for path, pair in zip(self._layer_paths, layers, strict=True)
            for name, pool in zip(_POOL_NAMES, pair, strict=True)
        }
        flat = nnx.to_flat_state(self._pools)
        return nnx.from_flat_state([(path, variable.replace(arrays[path])) for path, variable in flat])

    def layers_of_pools(self, pools: nnx.State) -> list[tuple[jax.Array, jax.Array]]:
        """Each layer's ``(k_pool, v_pool)``: the inverse of ``pools_of_layers``."""
        flat = {path: variable.get_value() for path, variable in nnx.to_flat_state(pools)}
        return [(flat[*path, _POOL_NAMES[0]], flat[*path, _POOL_NAMES[1]]) for path in self._layer_paths]

    def forward(
        self, params: nnx.State, pools: nnx.State, token_ids: jax.Array, inputs: StepInputs
    ) -> tuple[jax.Array, jax.Array, nnx.State]:
        """One flat step in MaxText's prefill mode; see ``kv_execution.model.PagedModel.forward``."""
        rows = inputs.sample_rows, inputs.num_samples
        return self._forward(params, pools, token_ids, inputs.pages, inputs.segment_ids, *rows)

    def hidden_states(
        self, params: nnx.State, pools: nnx.State, token_ids: jax.Array, pages: PageMetadata
    ) -> tuple[jax.Array, nnx.State]:
        """A step for callers who choose rows and sample themselves: ``(hidden [T, emb], pools)``, for ``head``."""
        num_rows = pages.seq_lens.shape[0]
        segment_ids = jnp.where(pages.row_of_token < num_rows, pages.row_of_token + 1, 0)
        # Nobody reads these logits, so XLA drops the head.
        none = jnp.zeros(1, jnp.int32), jnp.int32(0)
        _, hidden, pools = self._forward(params, pools, token_ids, pages, segment_ids, *none)
        return hidden, pools

    def _forward(
        self,
        params: nnx.State,
        pools: nnx.State,
        token_ids: jax.Array,
        pages: PageMetadata,
        segment_ids: jax.Array,
        rows: jax.Array,
        num_rows: jax.Array,
    ) -> tuple[jax.Array, jax.Array, nnx.State]:
        model = self._merge(params, pools)
        step = model.decoder.decoder_norm.step
        step.pages.set_value(pages)
        step.num_live.set_value(pages.query_start_loc[-1])
        step.rows.set_value(rows)
        step.num_rows.set_value(num_rows)
        with logical_axis_rules(self.config.logical_axis_rules):
            logits = model(
                token_ids[None],
                pages.positions[None],
                decoder_segment_ids=segment_ids[None],
                enable_dropout=False,
                model_mode=MODEL_MODE_PREFILL,
            )
        hidden = step.hidden.get_value()[0]
        return logits[0].astype(jnp.float32), hidden, nnx.state(model, PagePool)

    def head(self, params: nnx.State, hidden: jax.Array, rows: jax.Array) -> jax.Array:
        """MaxText's own output head on ``rows`` of ``hidden``; see ``PagedModel.head``."""
        model = self._merge(params, self._pools)
        step = model.decoder.decoder_norm.step
        step.rows.set_value(rows)
        step.num_rows.set_value(jnp.int32(rows.shape[0]))
        step.num_live.set_value(jnp.int32(rows.shape[0]))
        with logical_axis_rules(self.config.logical_axis_rules):
            logits = model.decoder.apply_output_head(
                shared_embedding=model.token_embedder,
                y=hidden[None],
                deterministic=True,
                model_mode=MODEL_MODE_PREFILL,
            )
        return logits[0].astype(jnp.float32)

    def _merge(self, params: nnx.State, pools: nnx.State) -> Any:
        # copy=True: a variable made in one trace must not be met again in the next.
        return nnx.merge(self._graph, params, pools, self._step, self._rest, copy=True)


_POOL_NAMES = ("k_pool", "v_pool")


def _attention_ops(model: nnx.Module) -> list[tuple[tuple[Any, ...], PagedAttentionOp]]:
    """The bound attentions with their paths."""
    return [(path, module) for path, module in nnx.iter_modules(model) if isinstance(module, PagedAttentionOp)]


def _attention_paths(model: nnx.Module) -> tuple[tuple[Any, ...], ...]:
    """Paths of the bound attentions, as a step runs them."""
    found = [
        (running_order(".".join(map(str, path)), module.options.sliding_window is not None), path)
        for path, module in _attention_ops(model)
    ]
    return tuple(path for _, path in sorted(found, key=lambda item: item[0]))


def running_order(path: str, has_window: bool) -> tuple[list[int], bool]:
    """Sorts attention modules into running order: by layer number, in a block with two (gemma2) the local one first.

    >>> names = [("layers_10.attention", False), ("layers_2.global", False), ("layers_2.local", True)]
    >>> [name for name, has_window in sorted(names, key=lambda item: running_order(*item))]
    ['layers_2.local', 'layers_2.global', 'layers_10.attention']
    """
    return [int(number) for number in re.findall(r"\d+", path)], not has_window


def materialize_rng_state(rest: nnx.State) -> nnx.State:
    """The model's non-parameter, non-pool state: random streams only, which a forward pass never draws from."""
    unknown = [
        ".".join(map(str, path)) for path, variable in nnx.to_flat_state(rest) if not isinstance(variable, nnx.RngState)
    ]
    if unknown:
        raise UnsupportedError(
            f"the model holds state that is neither weights, pools nor random streams: {', '.join(unknown[:4])}"
        )

    def concrete(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), leaf.shape) if leaf.shape else jax.random.key(0)
        return jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree.map(concrete, rest)
