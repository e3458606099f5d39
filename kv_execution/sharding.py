"""Which mesh axes shard KV heads, and how a pool is laid over the mesh.

For:        resolving MaxText-style logical axis rules without MaxText, and the pools' sharding.
Not for:    making meshes or arrays.
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from kv_common.errors import ConfigError, LayoutError
from kv_common.layout import KvStorageLayoutV1

AnyMesh = Mesh | AbstractMesh

LogicalRules = Sequence[Sequence[object]]
"""``(logical name, mesh axis | mesh axes | None)`` pairs, in order of precedence."""

KV_KERNEL_AXES = ("embed_attn", "kv_heads", "kv_head_dim")
"""Logical axes of MaxText's K projection kernel; the rules are resolved for all three together."""


def resolve_logical_axes(names: Sequence[str | None], logical_axis_rules: LogicalRules) -> tuple[tuple[str, ...], ...]:
    """Mesh axes of each logical axis of one array, by the rules' own order of precedence.

    Rules are tried in order. One applies if its logical name is in ``names`` and has no assignment
    yet, and none of its mesh axes is already taken by another axis of the array: a mesh axis shards at
    most one dimension. A rule passed over leaves its name to later rules.

    >>> resolve_logical_axes(("embed", "kv_heads"), [("embed", "fsdp"), ("kv_heads", ("tensor", "fsdp")),
    ...                                              ("kv_heads", "tensor")])
    (('fsdp',), ('tensor',))
    """
    assigned: dict[str, tuple[str, ...]] = {}
    for rule in logical_axis_rules:
        logical, mesh_axes = str(rule[0]), _as_axes(rule[1])
        taken = {axis for axes in assigned.values() for axis in axes}
        if logical in names and logical not in assigned and not taken & set(mesh_axes):
            assigned[logical] = mesh_axes
    return tuple(assigned.get(name, ()) if name is not None else () for name in names)


def kv_head_axes(
    mesh: AnyMesh,
    logical_axis_rules: LogicalRules,
    kernel_axes: Sequence[str | None] = KV_KERNEL_AXES,
) -> tuple[str, ...]:
    """Mesh axes, of more than one device, that shard the KV heads of the K projection.

    Axes that the mesh does not have, or has with size 1, shard nothing and are left out.

    Args:
      kernel_axes: the K kernel's logical axes; without ``"kv_heads"`` among them nothing is sharded.
    """
    if "kv_heads" not in kernel_axes:
        return ()
    axes = resolve_logical_axes(kernel_axes, logical_axis_rules)[list(kernel_axes).index("kv_heads")]
    return tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)


def unnamed_axes(mesh: AnyMesh, logical_axis_rules: LogicalRules) -> tuple[str, ...]:
    """Mesh axes, of more than one device, that no rule names: every array would be copied over them."""
    named = {axis for rule in logical_axis_rules for axis in _as_axes(rule[1])}
    return tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in named)


def head_shards(mesh: AnyMesh, head_axes: Iterable[str]) -> int:
    """Devices over which KV heads are spread.

    Raises:
      ConfigError: the mesh lacks one of the axes.
    """
    missing = [axis for axis in head_axes if axis not in mesh.shape]
    if missing:
        raise ConfigError(f"the mesh has no axis {missing[0]!r}: its axes are {', '.join(mesh.shape)}")
    return math.prod(mesh.shape[axis] for axis in head_axes)


def pool_replicas(mesh: AnyMesh, head_axes: Iterable[str]) -> int:
    """Devices that hold the same shard of a pool: the product of the mesh axes that shard no heads."""
    axes = tuple(head_axes)
    return mesh.size // head_shards(mesh, axes)


def check_head_sharding(num_kv_heads: int, mesh: AnyMesh, head_axes: Sequence[str]) -> None:
    """Refuse a mesh that cannot give every shard whole KV heads, as MaxText itself does.

    Raises:
      LayoutError: the combined size of ``head_axes`` does not divide ``num_kv_heads``.
    """
    shards = head_shards(mesh, head_axes)
    if num_kv_heads % shards:
        raise LayoutError(
            f"{num_kv_heads} KV heads do not split over {shards} shards (mesh axes {', '.join(head_axes)}): "
            "lower the parallelism of those axes, or move it to an axis that does not shard KV heads, "
            "such as fsdp"
        )


def kv_pool_sharding(mesh: Mesh, layout: KvStorageLayoutV1, head_axes: Sequence[str]) -> NamedSharding:
    """Sharding of one K or V pool: heads over ``head_axes``, everything else whole on each device.

    Raises:
      LayoutError: the layout counts other shards or replicas than this mesh has.
    """
    shards, replicas = head_shards(mesh, head_axes), pool_replicas(mesh, head_axes)
    if (layout.head_shards, layout.pool_replicas) != (shards, replicas):
        raise LayoutError(
            f"the layout says {layout.head_shards} head shards x {layout.pool_replicas} replicas, the mesh "
            f"has {shards} x {replicas} (head axes: {', '.join(head_axes) or 'none'})"
        )
    return NamedSharding(mesh, PartitionSpec(None, None, tuple(head_axes) or None, None))


def _as_axes(mesh_axes: object) -> tuple[str, ...]:
    if mesh_axes is None:
        return ()
    if isinstance(mesh_axes, str):
        return (mesh_axes,)
    if isinstance(mesh_axes, Iterable):
        return tuple(str(axis) for axis in mesh_axes if axis is not None)
    raise ConfigError(f"logical_axis_rules: {mesh_axes!r} is neither a mesh axis nor a list of them")
