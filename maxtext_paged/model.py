"""A bound MaxText model as the runtime's ``PagedModel``: two pure functions over params and pools.

For:        merging, calling and splitting the NNX model inside the step's jit.
Not for:    what may be bound (binding.py), weights (loading.py), the loop (kv_execution).
May import: kv_common, kv_control, kv_execution, jax, flax, maxtext.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import Mesh, NamedSharding
from maxtext.common.common_types import MODEL_MODE_PREFILL
from maxtext.utils import model_creation_utils
from maxtext.utils.sharding import nnx_construct_named_sharding

from kv_common.errors import ConfigError, LayoutError, UnsupportedError
from kv_common.layout import KvStorageLayoutV1
from kv_common.window_group import WindowGroup
from kv_execution.attention.api import AttentionOptions, PagedAttentionBackend
from kv_execution.metadata import PageMetadata, StepInputs
from kv_execution.pool import create_zeroed, pool_dtype
from kv_execution.products import XLA_PRODUCTS, ProductChoice
from kv_execution.sharding import (
    KV_KERNEL_AXES,
    check_head_sharding,
    head_shards,
    kv_head_axes,
    kv_pool_sharding,
    pool_replicas,
)
from maxtext_paged.binding import (
    PagedAttentionOp,
    PagePool,
    StepVariable,
    attention_geometry,
    attention_modules,
    attention_options,
    bind_paged_attention,
)
from maxtext_paged.families import require_supported_block
from maxtext_paged.mesh_axes import check_mesh, check_weights_divide
from maxtext_paged.products import bind_products


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What an unbound model says about its KV, before any page is counted.

    Attributes:
      num_layers: attention modules. num_kv_heads, head_dim: of each of them.
      head_axes: mesh axes (of size above one) that shard KV heads.
      layer_options: attention arithmetic of each module. has_sinks: whether they use attention sinks.
      num_query_heads: the most of any attention module. weight_bytes: of all weights as they are held, on one device.
      model: the unbound model itself, abstract. To build it takes seconds, so ``MaxTextPagedModel`` takes this one.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    head_axes: tuple[str, ...]
    layer_options: tuple[AttentionOptions, ...]
    has_sinks: bool
    num_query_heads: int
    weight_bytes: int
    model: nnx.Module = field(repr=False, compare=False)

    def window_layers(self, max_model_len: int) -> dict[int, int]:
        """Window to layers that have it: those that can keep fewer pages than the layers without a window.

        Empty where no layer sees everything: then nothing else keeps a request's pages in order. A window that no
        context outgrows keeps nothing back.
        """
        windows = Counter(layer.sliding_window for layer in self.layer_options)
        if None not in windows:
            return {}
        return {w: n for w, n in sorted(windows.items(), key=lambda item: item[0] or 0) if w and w < max_model_len}

    def layout(self, mesh: Mesh, *, num_pages: int, tokens_per_page: int, dtype: str) -> KvStorageLayoutV1:
        """The pool geometry of ``num_pages`` pages on ``mesh``.

        Raises:
          ConfigError: the heads cannot be spread over the mesh, or the dtype cannot be a pool's.
        """
        pool_dtype(dtype)
        check_head_sharding(self.num_kv_heads, mesh, self.head_axes)
        return KvStorageLayoutV1(
            num_layers=self.num_layers,
            num_pages=num_pages,
            tokens_per_page=tokens_per_page,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            head_shards=head_shards(mesh, self.head_axes),
            pool_replicas=pool_replicas(mesh, self.head_axes),
        )


def model_geometry(config: Any, mesh: Mesh) -> ModelGeometry:
    """Build MaxText's model abstractly and read its attention off it.

    Raises:
      ConfigError: the mesh is not served (mesh_axes.py), or MaxText cannot build the model on it.
      UnsupportedError: the model holds something off the allow-list (binding.py).
    """
    require_supported_block(config)
    check_mesh(config, mesh)
    with logical_axis_rules(config.logical_axis_rules):
        try:
            model = abstract_model(config, mesh)
        except ValueError as error:
            # Heads that do not divide are found by MaxText itself first; its advice is the one to give.
            kind = LayoutError if "num_kv_heads" in str(error) else ConfigError
            raise kind(f"MaxText refuses this model on this mesh: {error}") from error
        weights = _abstract_params(config, mesh, nnx.state(model, nnx.Param))
    num_layers, num_kv_heads, head_dim = attention_geometry(model)
    check_weights_divide({".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(weights)})
    head_axes = kv_head_axes(mesh, config.logical_axis_rules)
    modules = attention_modules(model)
    for name, _ in modules:
        # The pool must be sharded as MaxText shards the K projection; axis names alone lie (DESIGN 3).
        axes = k_projection_head_axes(weights, name, mesh)
        if axes is not None and axes != head_axes:
            raise UnsupportedError(
                f"{name}: MaxText shards its K projection's heads over {axes or 'no axis'}, "
                f"the pool would be sharded over {head_axes or 'no axis'}"
            )
    return ModelGeometry(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_axes=head_axes,
        layer_options=tuple(attention_options(attention) for _, attention in modules),
        has_sinks=any(attention.sinks is not None for _, attention in modules),
        num_query_heads=max(int(attention.num_query_heads) for _, attention in modules),
        weight_bytes=weight_device_bytes(weights),
        model=model,
    )


def abstract_model(config: Any, mesh: Mesh, mode: str = MODEL_MODE_PREFILL) -> nnx.Module:
    """MaxText's own model, unbound, of shapes alone; called under the configuration's logical axis rules."""
    return nnx.eval_shape(_model_maker(config, mesh, mode))


def k_projection_head_axes(abstract_params: nnx.State, attention: str, mesh: Mesh) -> tuple[str, ...] | None:
    """Mesh axes, of more than one device, over which the heads of one attention's K kernel really lie.

    Args:
      abstract_params: weights with their shardings. attention: the module's path, joined by dots.

    Returns:
      None where Q, K and V are one kernel (``fused_qkv``, served on one device only).
    """
    for path, variable in nnx.to_flat_state(abstract_params):
        if ".".join(map(str, path)) == f"{attention}.key.kernel":
            spec = variable.get_value().sharding.spec
            index = KV_KERNEL_AXES.index("kv_heads")
            axes = spec[index] if index < len(spec) else None
            return tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if mesh.shape[axis] > 1)
    return None


def weight_device_bytes(abstract_params: nnx.State) -> int:
    """Bytes of the weights on one device, from shapes, dtypes and shardings alone."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(abstract_params)
    )


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
            self.abstract_params = _abstract_params(config, mesh, params)
        if products.half_weights:
            self.abstract_params = _kernels_in_bfloat16(self.abstract_params, self.products.native)
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


def _abstract_params(config: Any, mesh: Mesh, params: nnx.State) -> nnx.State:
    """Shape, held dtype and sharding of each weight; called under the configuration's logical axis rules."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, _held_dtype(config, path, leaf.dtype), sharding=sharding
        ),
        params,
        nnx_construct_named_sharding(params, mesh),
    )


def _held_dtype(config: Any, path: Any, dtype: Any) -> Any:
    """Weights that a layer casts to ``dtype`` before use are held in it: no cast every step, half the memory."""
    names = jax.tree_util.keystr(path)
    if config.logits_dot_in_fp32 and ("logits_dense" in names or "embedding" in names):
        return dtype
    cast_by_layer = any(f"'{name}'" in names for name in ("kernel", "embedding", "wi_0", "wi_1", "wo"))
    wider = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > jnp.dtype(config.dtype).itemsize
    return config.dtype if cast_by_layer and wider and "norm" not in names else dtype


class _SameKey(nnx.RngStream):
    """Gives one key again and again: for shapes, nobody looks at a number.

    Counting keys costs more than all the rest of building a model abstractly: flax asks the counter, a tracer, for its
    sharding, and jax answers with an error whose text retells every equation so far. The cost is quadratic in layers.
    """

    def __call__(self) -> jax.Array:
        return self.key[...]


def _kernels_in_bfloat16(abstract_params: nnx.State, layers: Sequence[str]) -> nnx.State:
    kernels = {f"{layer}.kernel" for layer in layers}
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=leaf.sharding)
            if ".".join(str(getattr(key, "key", "")) for key in path if hasattr(key, "key")) in kernels
            else leaf
        ),
        abstract_params,
    )


def _model_maker(config: Any, mesh: Mesh, mode: str = MODEL_MODE_PREFILL) -> Any:
    """Makes MaxText's model inside ``nnx.eval_shape``; not for weights, which would all be drawn from one key."""

    def create() -> Any:
        rngs = nnx.Rngs(params=0)
        rngs.params = _SameKey(jax.random.key(0), tag="params")
        return model_creation_utils.from_config(config, mesh=mesh, model_mode=mode, rngs=rngs, quant_mode_str="train")

    return create


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
