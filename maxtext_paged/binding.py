"""Binding: MaxText's own NNX model, with its attention and its dense cache exchanged for a paged pool.

Nothing of MaxText is patched. A built (or abstract) model is walked, and in each supported
``maxtext.layers.attentions.Attention`` the module ``attention_op`` is replaced by ``PagedAttentionOp``
and ``KVCache_0`` by ``NoDenseCache``. The decoder's final norm is replaced by a subclass that first
selects the rows to be sampled, because it is the one call site in front of the output head. Parameter
paths stay what they were, so checkpoints, ``update_params`` and weight maps do not notice.

For:        deciding what may be bound, and binding it.
Not for:    running a step (model.py) or loading weights (loading.py).
May import: kv_common, kv_control, kv_execution, jax, flax, maxtext, maxtext_paged.families.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from maxtext.common.common_types import AttentionType
from maxtext.layers.attentions import Attention
from maxtext.layers.normalizations import RMSNorm

from kv_common.errors import UnsupportedError
from kv_common.layout import KvStorageLayoutV1
from kv_common.window_group import WindowGroup
from kv_execution.attention.api import AttentionOptions, PagedAttentionBackend, paged_attention
from kv_execution.metadata import PageMetadata
from kv_execution.pool import pool_struct
from maxtext_paged.families import require_supported_attention, require_supported_block

_QUERIES_ARRIVE_SCALED = 1.0
"""MaxText folds ``1/sqrt(head_dim)`` into the query projection (or its ``query_pre_attn_scalar``)."""


class PagePool(nnx.Cache):
    """One layer's K or V pool, ``[num_pages, tokens_per_page, kv_heads, head_dim]``; a ``QuantisedPool`` has scales."""


class StepVariable(nnx.Variable):
    """An array of the running step: entered by the caller, shared by all layers, never kept."""


class StepBinding(nnx.Module):
    """The running step, as the bound modules see it. One instance is shared by the whole model.

    Attributes:
      pages: ``PageMetadata`` of the step.
      rows: int32 ``[S]``, token rows that go through the output head.
      num_rows: int32 ``[]``, how many of ``rows`` are real.
      hidden: ``[1, T, emb]``, left by the final norm for heads that run on other rows later.
      num_live: int32 ``[]``, real rows of what the layers compute now: the step's tokens, then ``num_rows``.
    """

    def __init__(self) -> None:
        one = jnp.zeros(1, jnp.int32)
        self.num_rows = StepVariable(one[0])
        self.num_live = StepVariable(one[0])
        self.pages = StepVariable(PageMetadata(one, one, one, one, one, one, one, one, one))
        self.rows = StepVariable(one)
        self.hidden = StepVariable(jnp.zeros((1, 1, 1), jnp.float32))


class NoDenseCache(nnx.Module):
    """Stands where MaxText keeps its dense cache; allocates nothing and caches nothing."""

    def __call__(self, **_: Any) -> tuple[None, None]:
        return None, None


def attention_options(attention: Attention) -> AttentionOptions:
    """Window, soft cap and scale, read off the module that is replaced."""
    local = attention.attention_type == AttentionType.LOCAL_SLIDING
    return AttentionOptions(
        scale=_QUERIES_ARRIVE_SCALED,
        sliding_window=attention.sliding_window_size if local else None,
        soft_cap=attention.attn_logits_soft_cap or None,
    )


class PagedAttentionOp(nnx.Module):
    """Attention over this layer's page pool, with the call signature of MaxText's ``AttentionOp``.

    ``group``: the window group whose pages the pool holds, from 1 on; 0: those of layers without one.
    """

    def __init__(
        self,
        attention: Attention,
        layout: KvStorageLayoutV1,
        *,
        step: StepBinding,
        backend: PagedAttentionBackend,
        mesh: Mesh,
        head_axes: tuple[str, ...],
        group: int = 0,
    ) -> None:
        self.options = attention_options(attention)
        self.group = group
        self.backend = backend
        self.mesh = mesh
        self.head_axes = head_axes
        self.step = step
        struct = pool_struct(layout)
        self.k_pool, self.v_pool = (
            PagePool(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), struct)) for _ in range(2)
        )

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        decoder_segment_ids: jax.Array | None,
        inputs_positions: jax.Array | None,
        model_mode: str,
        cached_values: Any = None,
        previous_chunk: Any = None,
        bidirectional_mask: Any = None,
        sinks: Any = None,
        **unknown: Any,
    ) -> jax.Array:
        """Append ``key``/``value`` ``[1, T, kv_heads, dim]`` to the pools and attend with ``query``."""
        if previous_chunk is not None or bidirectional_mask is not None or unknown:
            raise UnsupportedError(
                "attention=gpu_paged was called with previous_chunk, bidirectional_mask or "
                f"{sorted(unknown)}: paged attention keeps its context in the page table and is causal"
            )
        output, k_pool, v_pool = paged_attention(
            self.backend,
            self.options,
            query=query[0],
            key=key[0],
            value=value[0],
            k_pool=self.k_pool.get_value(),
            v_pool=self.v_pool.get_value(),
            pages=self.step.pages.get_value().of_group(self.group),
            sinks=None if sinks is None else jnp.asarray(getattr(sinks, "get_value", lambda: sinks)(), jnp.float32),
            mesh=self.mesh,
            head_axes=self.head_axes,
        )
        self.k_pool.set_value(k_pool)
        self.v_pool.set_value(v_pool)
        return output[None]


class RowSelectingRMSNorm(RMSNorm):
    """The decoder's final norm, run only on the rows whose logits are wanted; same parameter path."""

    def __init__(self, norm: RMSNorm, step: StepBinding) -> None:
        for name in (
            "num_features",
            "epsilon",
            "dtype",
            "weight_dtype",
            "shard_mode",
            "kernel_axes",
            "scale_init",
            "parameter_memory_host_offload",
            "scale_offset",
            "with_scale",
            "scale",
        ):
            setattr(self, name, getattr(norm, name))
        self.step = step

    def __call__(self, x: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Normalise rows ``step.rows`` of ``x`` ``[1, T, emb]``: ``[1, S, emb]``."""
        self.step.hidden.set_value(x)
        self.step.num_live.set_value(self.step.num_rows.get_value())
        return super().__call__(jnp.take(x, self.step.rows.get_value(), axis=1), out_sharding)


def attention_modules(model: nnx.Module) -> list[tuple[str, Attention]]:
    """Every attention of a model with its path, refusing by name what must not be bound.

    Exact classes are compared: MLA and compressed attention are subclasses with other calls.
    """
    require_supported_block(model.config)
    found = []
    for path, module in nnx.iter_modules(model):
        name = ".".join(map(str, path))
        if not isinstance(module, Attention):
            continue
        if type(module) is not Attention:
            raise UnsupportedError(f"{name} is a {type(module).__name__}: paged attention binds plain Attention only")
        require_supported_attention(name, module)
        if module.is_vision or module.share_kv_layer or module.use_mrope or module.is_qwen3_hybrid:
            raise UnsupportedError(
                f"{name} is a vision, KV-sharing, M-RoPE or gated layer: attention=gpu_paged declines it"
            )
        found.append((name, module))
    if not found:
        raise UnsupportedError("the model has no maxtext.layers.attentions.Attention to bind")
    return found


def attention_geometry(model: nnx.Module) -> tuple[int, int, int]:
    """``(layers, kv_heads, head_dim)`` of a model whose attentions all agree on the last two.

    Layers are bound modules, not decoder layers: gemma2 has two in one.
    """
    modules = attention_modules(model)
    shapes = {(attention.num_kv_heads, attention.head_dim) for _, attention in modules}
    if len(shapes) > 1:
        raise UnsupportedError(
            f"attention layers differ in (KV heads, head size): {sorted(shapes)}; one pool geometry serves one shape"
        )
    kv_heads, head_dim = shapes.pop()
    return len(modules), kv_heads, head_dim


def bind_paged_attention(
    model: nnx.Module,
    layout: KvStorageLayoutV1,
    *,
    backend: PagedAttentionBackend,
    mesh: Mesh,
    head_axes: tuple[str, ...],
    window_groups: Sequence[WindowGroup] = (),
) -> nnx.Module:
    """Exchange a model's attention, in place, and return it.

    Args:
      model: MaxText's ``Transformer``, built in a mode other than training; abstract inside ``nnx.eval_shape``.
      layout: geometry of the pools, ``num_layers`` of them, but for those of ``window_groups``.
      mesh, head_axes: the model's own mesh and its axes that shard KV heads.

    Raises:
      UnsupportedError: the model holds something off the allow-list.
    """
    step = StepBinding()
    modules = attention_modules(model)
    layouts = [layout, *(group.layout for group in window_groups)]
    numbers: dict[int | None, int] = {group.window: i for i, group in enumerate(window_groups, start=1)}
    groups = [numbers.get(attention_options(attention).sliding_window, 0) for _, attention in modules]
    for i, one in enumerate(layouts):
        if groups.count(i) != one.num_layers:
            raise UnsupportedError(
                f"the layout counts {one.num_layers} attention layers, the model has {groups.count(i)}"
            )
    for (_, attention), i in zip(modules, groups, strict=True):
        attention.attention_op = PagedAttentionOp(
            attention, layouts[i], step=step, backend=backend, mesh=mesh, head_axes=head_axes, group=i
        )
        attention.KVCache_0 = NoDenseCache()
    norm = model.decoder.decoder_norm
    if type(norm) is not RMSNorm:
        raise UnsupportedError(f"the decoder's final norm is a {type(norm).__name__}: only RMSNorm is supported")
    model.decoder.decoder_norm = RowSelectingRMSNorm(norm, step)
    leftovers = [
        ".".join(map(str, path))
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Cache))
        if not isinstance(variable, PagePool)
    ]
    if leftovers:
        raise UnsupportedError(f"the model keeps other caches that paging does not serve: {', '.join(leftovers[:4])}")
    return model
