"""Pools: created in place, scrubbed and poisoned exactly, in few programs, without moving."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from kv_common.errors import ConfigError
from kv_common.layout import KvStorageLayoutV1
from kv_execution import pool as pool_module
from kv_execution.compile_events import CompileCounter
from kv_execution.pool import PAGE_RUNGS, Scrubber, create_pools, create_zeroed, pool_dtype, pool_struct
from kv_execution.sharding import kv_pool_sharding

NUM_PAGES = 600
LAYOUT = KvStorageLayoutV1(3, NUM_PAGES, 2, num_kv_heads=4, head_dim=4, dtype="float32")


def filled_pools(layout: KvStorageLayoutV1 = LAYOUT) -> tuple[tuple[jax.Array, ...], list[np.ndarray]]:
    """Pools of distinct numbers, and copies of them."""
    rng = np.random.default_rng(3)
    arrays = [rng.normal(size=layout.pool_shape).astype(np.float32) for _ in range(2 * layout.num_layers)]
    return tuple(jnp.array(array, copy=True) for array in arrays), arrays


def per_layer_loop(arrays: list[np.ndarray], pages: np.ndarray, value: float) -> list[np.ndarray]:
    """What overwriting must do, the slow way."""
    result = [array.copy() for array in arrays]
    for array in result:
        for page in pages:
            array[page, :, :, :] = value
    return result


def addresses(pools) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(pools) for shard in x.addressable_shards]


@pytest.mark.parametrize("count", [1, 3, 8, 9, 64, 65, 512, 513, NUM_PAGES])
@pytest.mark.parametrize(("method", "value"), [("scrub", 0.0), ("poison", np.nan)])
def test_exactly_the_named_pages_change_in_every_layer(count, method, value):
    pools, before = filled_pools()
    pages = np.random.default_rng(count).permutation(NUM_PAGES)[:count].astype(np.int32)
    pools = getattr(Scrubber(NUM_PAGES), method)(pools, pages)
    for pool, wanted in zip(pools, per_layer_loop(before, pages, value), strict=True):
        np.testing.assert_array_equal(np.asarray(pool), wanted)


def test_page_0_and_the_last_page_are_scrubbed_like_any_other():
    pools, before = filled_pools()
    pages = np.array([NUM_PAGES - 1, 0], np.int32)
    pools = Scrubber(NUM_PAGES).scrub(pools, pages)
    for pool, wanted in zip(pools, per_layer_loop(before, pages, 0.0), strict=True):
        np.testing.assert_array_equal(np.asarray(pool), wanted)


def test_a_scrub_cures_nan():
    pools, _ = filled_pools()
    scrubber, pages = Scrubber(NUM_PAGES), np.array([7, 9], np.int32)
    pools = scrubber.poison(pools, pages)
    assert np.isnan(np.asarray(pools[0])[pages]).all()
    pools = scrubber.scrub(pools, pages)
    assert all((np.asarray(pool)[pages] == 0).all() for pool in pools)


def test_no_pages_costs_no_dispatch():
    pools, _ = filled_pools()
    assert Scrubber(NUM_PAGES).scrub(pools, np.zeros(0, np.int32)) is pools
    assert not any(pool.is_deleted() for pool in pools)


def test_scrubbing_keeps_every_pool_where_it_is():
    pools, _ = filled_pools()
    before, scrubber = addresses(pools), Scrubber(NUM_PAGES)
    for pages in (np.arange(3), np.arange(NUM_PAGES)):
        pools = scrubber.scrub(pools, pages.astype(np.int32))
        assert addresses(pools) == before
    undonated = jax.jit(lambda pools: tuple(pool.at[0].set(0) for pool in pools))(pools)
    assert not set(addresses(undonated)) & set(before), "control: without donation they move"


def test_warm_up_compiles_every_program_and_changes_nothing():
    # A geometry that no other test uses: jit keeps its programs for the whole process.
    layout = KvStorageLayoutV1(2, NUM_PAGES, 3, num_kv_heads=1, head_dim=7, dtype="float32")
    pools, before = filled_pools(layout)
    scrubber, compiled = Scrubber(NUM_PAGES), CompileCounter()
    pools = scrubber.warm_up(pools)
    assert compiled.by_function() == {"_overwrite_pages": len(PAGE_RUNGS), "_copy_pages": 1}
    for pool, array in zip(pools, before, strict=True):
        np.testing.assert_array_equal(np.asarray(pool), array)
    compiled = CompileCounter()
    for count in (1, 2, 8, 9, 63, 64, 65, 500, 512, 513, NUM_PAGES):
        pages = np.arange(count, dtype=np.int32)
        pools = scrubber.poison(scrubber.scrub(pools, pages), pages)
    assert compiled.total() == 0


def test_any_pytree_of_pools_is_scrubbed_whole():
    struct = pool_struct(LAYOUT)
    pools = create_zeroed({"layers": [{"k": struct, "v": struct}], "other": (struct,)})
    pools = Scrubber(NUM_PAGES).poison(pools, np.array([5], np.int32))
    leaves = jax.tree.leaves(pools)
    assert len(leaves) == 3
    assert all(np.isnan(np.asarray(leaf)[5]).all() and not np.asarray(leaf)[4].any() for leaf in leaves)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_pool_has_the_layout_s_shape_dtype_and_bytes_and_is_zero(dtype):
    layout = KvStorageLayoutV1(2, 5, 4, num_kv_heads=3, head_dim=8, dtype=dtype)
    pools = create_pools(layout)
    assert len(pools) == 2
    leaves = jax.tree.leaves(pools)
    assert {(leaf.shape, leaf.dtype.name) for leaf in leaves} == {(layout.pool_shape, dtype)}
    assert sum(leaf.nbytes for leaf in leaves) == layout.total_pool_bytes()
    assert not any(np.asarray(leaf, np.float32).any() for leaf in leaves)
    assert len(set(addresses(pools))) == 4, "pools that share a buffer cannot be donated"


@pytest.mark.parametrize("dtype", ["int4", "float8_e5m2"])
def test_dtypes_that_no_pool_is_made_of_are_refused_by_name(dtype):
    with pytest.raises(ConfigError, match=f"paged_kv_dtype='{dtype}' is not served.*float32, .*int8, float8_e4m3fn"):
        pool_dtype(dtype)


@pytest.mark.multi_device
def test_pools_are_born_sharded_and_scrubbed_where_they_are():
    mesh = jax.make_mesh((2, 4), ("tensor", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    layout = KvStorageLayoutV1(
        2, NUM_PAGES, 2, num_kv_heads=4, head_dim=4, dtype="float32", head_shards=2, pool_replicas=4
    )
    pools = create_pools(layout, kv_pool_sharding(mesh, layout, ("tensor",)))
    leaves = jax.tree.leaves(pools)
    assert all(shard.data.shape == (NUM_PAGES, 2, 2, 4) for x in leaves for shard in x.addressable_shards)
    held = sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards)
    assert held == layout.total_pool_bytes()
    before, scrubber, pages = addresses(pools), Scrubber(NUM_PAGES), np.array([0, 3, NUM_PAGES - 1], np.int32)
    pools = scrubber.poison(pools, pages)
    wanted = np.zeros(layout.pool_shape, np.float32)
    wanted[pages] = np.nan
    assert all(np.array_equal(np.asarray(x), wanted, equal_nan=True) for x in jax.tree.leaves(pools))
    assert addresses(pools) == before
    assert all(x.sharding == leaves[0].sharding for x in jax.tree.leaves(pools))


@pytest.mark.multi_device
def test_creating_a_sharded_pool_never_holds_it_whole():
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Auto,))
    layout = KvStorageLayoutV1(1, NUM_PAGES, 2, num_kv_heads=8, head_dim=4, dtype="float32", head_shards=8)
    sharding = kv_pool_sharding(mesh, layout, ("tensor",))
    struct = pool_struct(layout, sharding)
    program = pool_module._zeros_maker(((struct.shape, struct.dtype, struct.sharding),))  # what `create_pools` runs
    memory = program.lower().compile().memory_analysis()
    whole = layout.num_pages * 2 * 8 * 4 * 4
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes <= whole // 8
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(create_pools(layout, sharding)))


@pytest.mark.multi_device
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("head_dim", [16, 80, 256])
@pytest.mark.parametrize(
    ("kv_heads", "shards"), [(8, 2), (4, 4), (2, 8), (2, 4), (3, 1)], ids=["split", "each", "copied", "both", "whole"]
)
def test_the_layout_counts_the_bytes_that_the_devices_hold(dtype, head_dim, kv_heads, shards):
    replicas = 8 // shards
    mesh = jax.make_mesh((shards, replicas), ("tensor", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    layout = KvStorageLayoutV1(2, 3, 4, kv_heads, head_dim, dtype, head_shards=shards, pool_replicas=replicas)
    pools = create_pools(layout, kv_pool_sharding(mesh, layout, ("tensor",)))
    held = dict.fromkeys(mesh.devices.flat, 0)
    for leaf in jax.tree.leaves(pools):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert set(held.values()) == {layout.device_pool_bytes()}
    assert sum(held.values()) == layout.total_pool_bytes()
