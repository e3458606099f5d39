"""Pools and weights come to their devices in shards: no device ever holds one whole, not even while they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.sharding import MeshCase, dense_of, options_of
from maxtext_paged.assembly import assemble
from maxtext_paged.loading import load_params, params_from_tree
from maxtext_paged.model import MaxTextPagedModel
from tests.largest_array import largest_array_on_a_device
from tests.maxtext.test_loading import linen, save
from tests.tiny_models import DenseModel, make_config, mesh_of

pytestmark = [pytest.mark.maxtext, pytest.mark.multi_device, pytest.mark.slow]

CASE = MeshCase({"tensor": 4, "fsdp": 2}, 4)
NUM_PAGES = 512
"""One pool, 512 x 4 x 4 x 16 elements, is larger than any weight: 256 x 64."""
POOL, WEIGHT = NUM_PAGES * 4 * 4 * 16, 256 * 64


def model(**options: Any) -> MaxTextPagedModel:
    sizes = options_of("llama2", CASE.kv_heads)
    config = make_config("llama2", **sizes, paged_num_pages=NUM_PAGES, paged_tokens_per_page=4, **options)
    return assemble(config, mesh=mesh_of(config, CASE.sizes)).model


def test_creating_pools_never_holds_one_whole() -> None:
    built = model()
    with largest_array_on_a_device() as watch:
        pools = built.create_pools()
    assert watch.looks > 20
    assert watch.elements == POOL // 4
    assert all(leaf.size == POOL for leaf in jax.tree.leaves(pools))


def test_pools_made_whole_and_then_spread_would_be_seen() -> None:
    built = model()
    with largest_array_on_a_device() as watch:
        pools = [jax.device_put(jnp.zeros(built.layout.pool_shape), built.pool_sharding) for _ in range(2)]
    assert watch.elements == POOL
    assert all(max(shard.data.size for shard in pool.addressable_shards) == POOL // 4 for pool in pools)


@pytest.mark.parametrize("source", ["scanned checkpoint", "trainer", "scanned trainer"])
def test_loading_weights_never_holds_one_whole(source: str, tmp_path: Path) -> None:
    scanned = "scanned" in source
    dense = DenseModel("llama2", scan_layers=True, **options_of("llama2", 4)) if scanned else dense_of("llama2", 4)
    if "checkpoint" in source:
        built = model(load_parameters_path=save(tmp_path / "items", linen(dense.params)))
    else:
        built = model()
    with largest_array_on_a_device() as watch:
        params = params_from_tree(built, dense.params) if "trainer" in source else load_params(built)
    assert watch.looks > 20
    largest = max(leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(params))
    # A stacked weight holds two layers; its shard is twice a layer's.
    assert watch.elements <= (2 if scanned else 1) * WEIGHT // 8, f"{watch.elements}, {largest}"


def test_weights_loaded_whole_and_then_spread_would_be_seen() -> None:
    built, params = model(), dense_of("llama2", 4).params
    with largest_array_on_a_device() as watch:
        params_from_tree(built, jax.tree.map(jnp.asarray, params))
    assert watch.elements >= WEIGHT


def test_a_trainers_sharded_weights_are_never_gathered() -> None:
    """Scanned, sharded arrays, as a trainer on the same devices holds them."""
    dense = DenseModel("llama2", scan_layers=True, **options_of("llama2", 4))
    built = model()
    config = make_config("llama2", scan_layers=True, **options_of("llama2", 4))
    trainer = assemble_scanned(config, dense.params)
    with largest_array_on_a_device() as watch:
        params_from_tree(built, trainer)
    assert watch.looks > 20
    assert watch.elements <= WEIGHT // 8


def assemble_scanned(config: Any, params: Any) -> Any:
    """The scanned weights under the shardings that MaxText itself gives them on the same mesh."""
    from flax import nnx
    from flax.core.spmd import logical_axis_rules
    from maxtext.utils.sharding import nnx_construct_named_sharding

    from maxtext_paged.geometry import _model_maker

    mesh = mesh_of(config, CASE.sizes)
    with logical_axis_rules(config.logical_axis_rules):
        state = nnx.state(nnx.eval_shape(_model_maker(config, mesh)), nnx.Param)
        shardings = nnx.to_pure_dict(nnx_construct_named_sharding(state, mesh))
    return jax.tree.map(lambda leaf, sharding: jax.device_put(np.asarray(leaf), sharding), params, shardings)
