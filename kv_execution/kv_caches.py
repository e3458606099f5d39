"""KV caches that a vLLM-shaped caller owns, one entry per layer: which are taken as the pool, and which refused.

For:        checking shapes while tracing, so that a wrong layout is an error that names its axis.
Not for:    allocating (pool.py), or copying another layout into ours: a step may not move a pool.
May import: kv_common, kv_control, jax.

An entry is a pair ``(k_cache, v_cache)``, each ``[num_blocks, block_size, kv_heads, head_dim]`` (NHD): two buffers,
since a kernel that appends in place can neither slice one out of a joint array nor put it back without moving the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kv_common.errors import UnsupportedError
from kv_common.layout import KvStorageLayoutV1

_AXES = ("num_blocks", "block_size", "kv_heads", "head_dim")
_WANTED = "each layer needs a pair (k_cache, v_cache) of [num_blocks, block_size, kv_heads, head_dim]"


def layout_of_kv_caches(kv_caches: Sequence[Any], layout: KvStorageLayoutV1) -> KvStorageLayoutV1:
    """``layout`` with the page count of ``kv_caches``, once every cache is found to be one of its pools.

    Args:
      kv_caches: one entry per attention layer, in layer order. layout: of the model, with any page count.

    Raises:
      UnsupportedError: another number of layers, another layout, shape or dtype; the layer and the axis are named.

    >>> import numpy as np
    >>> one_page = KvStorageLayoutV1(1, 1, 16, num_kv_heads=2, head_dim=64, dtype="float32")
    >>> cache = np.zeros((9, 16, 2, 64), np.float32)
    >>> layout_of_kv_caches([(cache, cache)], one_page).num_pages
    9
    """
    if len(kv_caches) != layout.num_layers:
        raise UnsupportedError(f"{len(kv_caches)} KV caches for {layout.num_layers} attention layers: {_WANTED}")
    num_pages = None
    for i, entry in enumerate(kv_caches):
        if hasattr(entry, "shape"):
            raise UnsupportedError(
                f"KV cache {i} is one array {tuple(entry.shape)}: {_joint_axis(entry.shape)}; {_WANTED}"
            )
        if not isinstance(entry, Sequence) or len(entry) != 2:
            raise UnsupportedError(f"KV cache {i} is a {type(entry).__name__}: {_WANTED}")
        for name, cache in zip("kv", entry, strict=True):
            problem = _problem(cache, layout, num_pages)
            if problem is not None:
                raise UnsupportedError(f"KV cache {i}, {name}: {problem}; {_WANTED}")
            num_pages = cache.shape[0]
    return layout if num_pages is None else replace(layout, num_pages=int(num_pages))


def in_layer_order(layer_to_index: Any, num_layers: int) -> tuple[int, ...]:
    """For each layer, which of the caller's caches is its own.

    Args:
      layer_to_index: a mapping or pairs of ``"layer.3"`` (any name with one number in it) and an index; None is layer
        order.

    Raises:
      UnsupportedError: a layer is missing or named twice, or two share a cache.
    """
    if layer_to_index is None:
        return tuple(range(num_layers))
    pairs = list(layer_to_index.items() if isinstance(layer_to_index, Mapping) else layer_to_index)
    numbered = [(_layer_number(name), int(index)) for name, index in pairs]
    layers, indices = sorted(number for number, _ in numbered), sorted(index for _, index in numbered)
    if layers != list(range(num_layers)) or indices != layers:
        raise UnsupportedError(
            f"layer_name_to_kvcache_index {dict(pairs)}: each of layers 0..{num_layers - 1} needs a cache of its own"
        )
    return tuple(index for _, index in sorted(numbered))


def _layer_number(name: Any) -> int:
    numbers = [part for part in str(name).split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise UnsupportedError(f"layer_name_to_kvcache_index names {name!r}: one number is needed, as in 'layer.3'")
    return int(numbers[0])


def _joint_axis(shape: Sequence[int]) -> str:
    """Which axis of one array holds both K and V, for the layouts in use elsewhere."""
    for axis in (0, 1):
        if len(shape) == 5 and shape[axis] == 2:
            return f"its axis {axis} stacks K and V"
    return "its head axis (axis 2) interleaves K and V"


def _problem(cache: Any, layout: KvStorageLayoutV1, num_pages: int | None) -> str | None:
    shape = tuple(cache.shape)
    if len(shape) != len(_AXES):
        return f"shape {shape} has {len(shape)} axes"
    wanted = layout.pool_shape[1:]
    if shape[1:] != wanted and (shape[2], shape[1], shape[3]) == wanted:
        return f"shape {shape} has heads before tokens (HND): exchange axes 1 and 2"
    for axis, (got, need) in enumerate(zip(shape[1:], wanted, strict=True), start=1):
        if got != need:
            return f"axis {axis} ({_AXES[axis]}) of {shape} is {got}, the model's is {need}"
    if num_pages not in (None, shape[0]):
        return f"axis 0 (num_blocks) of {shape} is {shape[0]}, the caches before it have {num_pages}"
    if str(cache.dtype) != layout.dtype:
        return f"dtype {cache.dtype}, the model's pools are {layout.dtype}"
    return None
