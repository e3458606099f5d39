"""KV-head axes come from the logical axis rules, as MaxText's own resolver reads them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path

import jax
import pytest
from flax.linen import logical_to_mesh_axes
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from kv_common.errors import ConfigError, LayoutError
from kv_common.layout import KvStorageLayoutV1
from kv_execution.sharding import (
    KV_KERNEL_AXES,
    check_head_sharding,
    head_shards,
    kv_head_axes,
    kv_pool_sharding,
    pool_replicas,
    resolve_logical_axes,
)


def mesh_of(sizes: Mapping[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


names = st.sampled_from(["embed_attn", "kv_heads", "kv_head_dim", "mlp"])
axes = st.sampled_from(["data", "fsdp", "tensor", "expert", "model"])
targets = st.one_of(st.none(), axes, st.lists(axes, unique=True, max_size=3).map(tuple))


@given(st.lists(st.tuples(names, targets), max_size=8), st.permutations(KV_KERNEL_AXES))
def test_rules_resolve_as_flax_resolves_them(rules, kernel_axes):
    flax_spec = logical_to_mesh_axes(tuple(kernel_axes), rules=rules)
    wanted = [() if x is None else (x,) if isinstance(x, str) else tuple(x) for x in flax_spec]
    assert list(resolve_logical_axes(kernel_axes, rules)) == wanted


def test_a_mesh_axis_taken_by_the_embedding_shards_no_heads():
    rules = [("embed_attn", ("fsdp", "model")), ("kv_heads", "model"), ("kv_heads", "tensor")]
    assert kv_head_axes(mesh_of({"fsdp": 2, "model": 2, "tensor": 2}), rules) == ("tensor",)


def test_axes_of_size_one_and_axes_the_mesh_lacks_shard_nothing():
    rules = [("kv_heads", ("tensor", "tensor_sequence", "autoregressive"))]
    assert kv_head_axes(mesh_of({"tensor": 2, "tensor_sequence": 1, "fsdp": 4}), rules) == ("tensor",)
    assert kv_head_axes(mesh_of({"tensor": 1, "fsdp": 4}), rules) == ()


def test_an_expert_axis_shards_heads_where_the_rules_say_so_and_only_there():
    mesh = mesh_of({"model": 2, "expert": 2})
    assert kv_head_axes(mesh, [("kv_heads", ("model", "expert"))]) == ("model", "expert")
    assert kv_head_axes(mesh, [("batch", "expert"), ("kv_heads", ("model",))]) == ("model",)


def test_a_kernel_without_a_kv_heads_axis_is_replicated():
    assert kv_head_axes(mesh_of({"tensor": 2}), [("kv_heads", "tensor")], (None, None, None)) == ()


def test_a_rule_that_names_no_mesh_axis_is_refused():
    with pytest.raises(ConfigError, match="logical_axis_rules: 3"):
        resolve_logical_axes(("kv_heads",), [("kv_heads", 3)])


@given(st.dictionaries(axes, st.integers(1, 4), min_size=1), st.data())
def test_shards_times_replicas_is_the_mesh(sizes, data):
    mesh = mesh_of(sizes)
    head_axes = data.draw(st.lists(st.sampled_from(sorted(sizes)), unique=True))
    assert head_shards(mesh, head_axes) == math.prod(sizes[axis] for axis in head_axes)
    assert head_shards(mesh, head_axes) * pool_replicas(mesh, head_axes) == math.prod(sizes.values())


def test_an_axis_the_mesh_does_not_have_is_refused_by_name():
    with pytest.raises(ConfigError, match="no axis 'tensor': its axes are data, model"):
        head_shards(mesh_of({"data": 2, "model": 2}), ("tensor",))


@pytest.mark.parametrize(("heads", "shards"), [(2, 4), (2, 8), (6, 4), (3, 2), (1, 2)])
def test_more_shards_than_whole_heads_are_refused_with_both_numbers_and_a_way_out(heads, shards):
    with pytest.raises(LayoutError, match=rf"{heads} KV heads .* {shards} shards .*tensor.*fsdp"):
        check_head_sharding(heads, mesh_of({"tensor": shards}), ("tensor",))


@pytest.mark.parametrize(("heads", "shards"), [(2, 1), (2, 2), (8, 4), (6, 3)])
def test_whole_heads_per_shard_are_accepted(heads, shards):
    check_head_sharding(heads, mesh_of({"tensor": shards}), ("tensor",))


def test_a_layout_that_counts_other_shards_than_the_mesh_is_refused():
    mesh = jax.make_mesh((1, 1), ("tensor", "fsdp"), devices=jax.devices()[:1])
    layout = KvStorageLayoutV1(1, 4, 4, num_kv_heads=4, head_dim=8, dtype="float32", head_shards=2)
    with pytest.raises(LayoutError, match=r"2 head shards x 1 replicas, the mesh has 1 x 1 .*tensor"):
        kv_pool_sharding(mesh, layout, ("tensor",))


@pytest.mark.multi_device
def test_each_device_holds_its_heads_and_replicas_hold_the_same():
    mesh = jax.make_mesh((2, 2, 2), ("data", "model", "expert"), axis_types=(AxisType.Auto,) * 3)
    layout = KvStorageLayoutV1(1, 4, 4, num_kv_heads=8, head_dim=8, dtype="float32", head_shards=4, pool_replicas=2)
    sharding = kv_pool_sharding(mesh, layout, ("model", "expert"))
    assert sharding.spec == PartitionSpec(None, None, ("model", "expert"), None)
    heads = [index[2] for index in sharding.devices_indices_map(layout.pool_shape).values()]
    assert sorted((h.start, h.stop) for h in heads) == sorted([(0, 2), (2, 4), (4, 6), (6, 8)] * 2)
    assert kv_pool_sharding(
        mesh, KvStorageLayoutV1(1, 4, 4, num_kv_heads=8, head_dim=8, dtype="float32", pool_replicas=8), ()
    ).is_fully_replicated


def _rules_of(config: str) -> tuple[list[str], list[tuple[str, tuple[str, ...]]]]:
    """``mesh_axes`` and ``logical_axis_rules`` of one of MaxText's own YAML files."""
    from omegaconf import OmegaConf

    spec = importlib.util.find_spec("maxtext")
    assert spec is not None and spec.submodule_search_locations
    data = OmegaConf.load(Path(spec.submodule_search_locations[0]) / "configs" / config)
    base = OmegaConf.load(Path(spec.submodule_search_locations[0]) / "configs" / "base.yml")
    rules = [(r[0], r[1] if isinstance(r[1], str) else tuple(r[1])) for r in data.logical_axis_rules]
    return list(data.get("mesh_axes", base.mesh_axes)), rules


@pytest.mark.slow
@pytest.mark.maxtext
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("base.yml", {"tensor", "tensor_sequence", "autoregressive"}),
        ("inference/inference.yml", {"tensor", "tensor_transpose", "tensor_sequence", "autoregressive"}),
        ("inference/vllm.yml", {"model", "expert"}),
        ("custom_mesh_and_rule/pipeline-large-moe.yml", {"tensor"}),
        ("custom_mesh_and_rule/ep-as-cp.yml", set()),
    ],
)
def test_maxtext_s_own_resolver_agrees_on_its_own_rules(config, expected):
    from maxtext.utils import sharding as maxtext_sharding

    mesh_axes, rules = _rules_of(config)
    every_axis = {axis: 2 for axis in mesh_axes}
    meshes = [every_axis, *({**{a: 1 for a in mesh_axes}, axis: 4} for axis in mesh_axes)]
    meshes += [{axis: 2 for axis in mesh_axes if axis != absent} for absent in mesh_axes]
    for sizes in meshes:
        mesh = mesh_of(sizes)
        spec = maxtext_sharding.logical_to_mesh_axes(KV_KERNEL_AXES, mesh, rules=rules)
        wanted = spec[KV_KERNEL_AXES.index("kv_heads")] or ()
        assert kv_head_axes(mesh, rules) == ((wanted,) if isinstance(wanted, str) else tuple(wanted)), sizes
    assert set(kv_head_axes(mesh_of(every_axis), rules)) == expected & set(mesh_axes)
