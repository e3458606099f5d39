"""A MaxText model as shapes alone: built without a weight, and what its attention and its weights say of it.

For:        what can be known, and refused, before anything is allocated.
Not for:    running it (model.py), page counts and budgets (sizing.py, assembly.py).
May import: kv_common, kv_control, kv_execution, jax, flax, maxtext.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import Mesh
from maxtext.common.common_types import MODEL_MODE_PREFILL
from maxtext.utils import model_creation_utils
from maxtext.utils.sharding import nnx_construct_named_sharding

from kv_common.errors import ConfigError, LayoutError, UnsupportedError
from kv_common.layout import KvStorageLayoutV1
from kv_execution.attention.api import AttentionOptions
from kv_execution.pool import pool_dtype
from kv_execution.sharding import (
    KV_KERNEL_AXES,
    check_head_sharding,
    head_shards,
    kv_head_axes,
    pool_replicas,
)
from maxtext_paged.binding import attention_geometry, attention_modules, attention_options
from maxtext_paged.families import require_supported_block
from maxtext_paged.mesh_axes import check_mesh, check_weights_divide


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
        weights = abstract_params_of(config, mesh, nnx.state(model, nnx.Param))
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


def abstract_params_of(config: Any, mesh: Mesh, params: nnx.State) -> nnx.State:
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


def kernels_in_bfloat16(abstract_params: nnx.State, layers: Sequence[str]) -> nnx.State:
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
