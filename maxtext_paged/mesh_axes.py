"""Which meshes a model may run on: an axis of several devices must be one whose meaning is known here.

A mesh may come from a caller and have any axes, so it is judged itself; options.py judges the ``ici_*`` options.

For:        refusing, by the axis's name, a mesh that would not do what its axes promise.
Not for:    which axes shard KV heads (kv_execution.sharding), or making meshes (assembly.py).
May import: kv_common, kv_execution, jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from kv_common.errors import ConfigError
from kv_execution.sharding import AnyMesh, resolve_logical_axes, unnamed_axes

_SPLITS_A_SEQUENCE = "it splits a sequence, whose pages are kept whole"
REFUSED_AXES = {
    "context": _SPLITS_A_SEQUENCE,
    "context_usp_ulysses": _SPLITS_A_SEQUENCE,
    "context_autoregressive": _SPLITS_A_SEQUENCE,
    "stage": "it splits the layers of a step over devices (pipeline parallelism)",
    "diloco": "it belongs to training",
}
"""Mesh axes of MaxText that stay at one device, and why."""


def check_mesh(config: Any, mesh: AnyMesh) -> None:
    """Refuse a mesh on which the model would give other answers, fail in a step, or silently be copied.

    Raises:
      ConfigError: names each axis or option, its size, and what to do.
    """
    rules = config.logical_axis_rules
    problems = [
        f"mesh axis {axis!r} of size {mesh.shape[axis]}: no rule of logical_axis_rules names it, so nothing would be "
        "sharded over it, KV heads neither; use the axes of the configuration's own rules"
        for axis in unnamed_axes(mesh, rules)
    ]
    problems += [
        f"mesh axis {axis!r} of size {mesh.shape[axis]} is not served: {why}; set it to 1"
        for axis, why in REFUSED_AXES.items()
        if mesh.shape.get(axis, 1) > 1
    ]
    if config.fused_qkv and mesh.size > 1:
        problems.append(
            f"fused_qkv=true on {mesh.size} devices: MaxText cuts the fused projection on each shard by itself, so its "
            "columns mean other heads than on one device; set fused_qkv=false"
        )
    if (config.num_experts or 1) > 1 and config.sparse_matmul:
        axes = {"expert", *resolve_logical_axes(("exp",), rules)[0]}
        problems += [
            f"sparse_matmul=true with mesh axis {axis!r} of size {mesh.shape[axis]}: MaxText exchanges tokens between "
            "experts by ragged-all-to-all, which XLA has not on CPUs and which was not tested elsewhere; set "
            "sparse_matmul=false, or use an axis that does not shard experts (tensor, fsdp)"
            for axis in sorted(axes)
            if mesh.shape.get(axis, 1) > 1
        ]
    if problems:
        raise ConfigError("attention=gpu_paged refuses this mesh: " + "; ".join(problems))


def check_weights_divide(weights: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Refuse weights that their axes do not cut evenly, before anything is loaded.

    Raises:
      ConfigError: names the weights, their shapes and how they would be cut.
    """
    uneven = []
    for name, weight in weights.items():
        try:
            weight.sharding.shard_shape(weight.shape)
        except ValueError:
            uneven.append(f"{name} {tuple(weight.shape)} by {weight.sharding.spec}")
    if uneven:
        more = f" (and {len(uneven) - 4} more)" if len(uneven) > 4 else ""
        raise ConfigError(
            f"this mesh does not cut all weights evenly: {'; '.join(uneven[:4])}{more}: lower the parallelism of those "
            "axes"
        )
