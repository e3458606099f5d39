"""Quantised pools under both backends: attention over what they hold, and pages whose scales go where they go."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from kv_common.layout import KvStorageLayoutV1
from kv_execution.attention.native import NativeBackend
from kv_execution.attention.reference import ReferenceBackend
from kv_execution.metadata import PageMetadata
from kv_execution.native.library import native_available, native_library
from kv_execution.pool import Scrubber, create_pools
from kv_execution.quantised import QuantisedPool
from tests.execution.numpy_quantised import DTYPES, numbers, stored
from tests.execution.paged_steps import (
    EVERYTHING,
    NUM_PAGES,
    PLAIN,
    assert_equals_dense,
    expected,
    make_request,
    make_step,
    mixed_requests,
    program_of,
)
from tests.execution.quantised_steps import as_read, pool_of, run_quantised, written

BUILDS = tuple(native_library().builds) if native_available() is None else ()
ALL = {"reference": ReferenceBackend()} | {name: NativeBackend(instruction_set=name) for name in BUILDS}
BACKENDS = {"reference": ReferenceBackend()} | ({"native": NativeBackend()} if BUILDS else {})


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(23)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest):
    return BACKENDS[request.param]


@pytest.fixture(params=ALL)
def any_build(request: pytest.FixtureRequest):
    """The reference, and the kernels of each instruction set: where arithmetic differs between them."""
    return ALL[request.param]


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_dense_attention_over_what_the_pool_holds(rng, backend, dtype):
    """Prompts, chunks and decodes; the poison beside them has NaN scales."""
    step = make_step(mixed_requests(rng, dim=64, heads=6, kv_heads=2), page_size=16)
    sinks = rng.normal(size=6).astype(np.float32)
    for options, own in ((PLAIN, None), (EVERYTHING, sinks)):
        output, k_pool, _ = run_quantised(backend, step, dtype, options, sinks=own)
        assert_equals_dense(output, as_read(step, dtype), options, sinks=own)
        assert np.abs(output[step.rows(2)] - expected(step.requests[2], options, own)).max() > 1e-4, "not quantised"
        assert k_pool.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 128), (9, 3, 64), (10, 2, 48)])
def test_each_way_of_sharing_keys_reads_each_head_with_its_own_scale(rng, any_build, dtype, heads, kv_heads, dim):
    """Heads and tokens of very different sizes: a scale of another head or token would be far off (CASES 146)."""
    sizes = [(530, 1), (65, 1), (1, 1), (140, 7)]
    requests = [make_request(rng, length, new, heads=heads, kv_heads=kv_heads, dim=dim) for length, new in sizes]
    for request in requests:
        for rows in (request.key, request.value):
            rows *= np.exp2(rng.integers(-6, 2, size=(*rows.shape[:2], 1))).astype(np.float32)
    step, options = make_step(requests, page_size=16), replace(PLAIN, scale=dim**-0.5)
    output, *_ = run_quantised(any_build, step, dtype, options)
    assert_equals_dense(output, as_read(step, dtype), options)


@pytest.mark.parametrize("num_new", [1, 2], ids=["decode", "tile"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_there_is_reads_as_the_number_it_stands_for(any_build, dtype, num_new):
    """One visible key: its value is the output, exactly, whatever the weight's exponential was."""
    codes = np.arange(256, dtype=np.uint8)
    codes = np.delete(codes, [128] if dtype == "int8" else [0x7F, 0xFF])  # -128 and NaN, which nobody writes
    values = np.zeros((1, 16, 1, 256), np.uint8)
    values[0, num_new - 1, 0, : len(codes)] = codes
    values = values.view(np.int8) if dtype == "int8" else values
    scales = np.zeros((1, 16, 1, 1), np.float32)
    scales[0, num_new - 1] = 0.25
    request = make_request(np.random.default_rng(0), num_new, num_new, heads=1, kv_heads=1, dim=256)
    step = make_step([request], page_size=16, num_pages=1)
    pages = PageMetadata.from_table(step.table)
    pools = (QuantisedPool(jnp.asarray(values), jnp.asarray(scales)) for _ in range(2))
    output = jax.jit(
        lambda query, k_pool, v_pool: any_build.attend(
            query, k_pool, v_pool, pages, scale=1.0, sliding_window=1, soft_cap=None, sinks=None
        )
    )(step.query, *pools)
    wanted = numbers(values, scales)[0, num_new - 1, 0]
    np.testing.assert_array_equal(np.asarray(output)[num_new - 1, 0], wanted)
    assert len(set(wanted[: len(codes)].tolist())) == len(codes) - (dtype != "int8")  # fp8 has two zeros


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_tokens_leave_the_same_bits_in_one_chunk_or_many_and_under_any_backend(rng, dtype):
    request = make_request(rng, 27, 27, dim=48)
    request.key[20] *= 1000  # late and large: a scale for the page would have grown
    wanted, wanted_scales = stored(request.key, dtype)
    for backend in BACKENDS.values():
        for chunks in ([27], [1] * 27, [16, 11], [5, 1, 12, 9]):
            pool = written(backend, request, chunks, dtype)
            np.testing.assert_array_equal(np.asarray(pool.values).reshape(32, 2, 48)[:27], wanted)
            np.testing.assert_array_equal(np.asarray(pool.scales).reshape(32, 2, 1)[:27], wanted_scales)
            assert not np.asarray(pool.values).reshape(32, -1)[27:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sick", [np.nan, np.inf])
def test_a_sick_request_shows_and_its_neighbours_do_not_notice(rng, backend, dtype, sick):
    requests = mixed_requests(rng, dim=32)
    for i in (2, 4):
        requests[i].value[3, 1, 5] = sick
        requests[i].key[5, 0, 2] = sick
    step = make_step(requests, page_size=16)
    output, *_ = run_quantised(backend, step, dtype)
    assert_equals_dense(output, as_read(step, dtype), skip=(2, 4))
    for i in (2, 4):
        assert np.isnan(output[step.rows(i)][-1]).all(axis=-1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scrubbing_poisoning_and_copying_a_page_take_its_scales_along(rng, dtype):  # CASES 147
    layout = KvStorageLayoutV1(2, NUM_PAGES, 4, num_kv_heads=2, head_dim=16, dtype=dtype)
    pools = tuple(
        tuple(pool_of(rng.normal(size=layout.pool_shape).astype(np.float32), dtype) for _ in range(2))
        for _ in range(layout.num_layers)
    )
    before = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(pools)]
    scrubber = Scrubber(NUM_PAGES)
    pools = scrubber.copy(pools, np.array([5, 7], np.int32), np.array([0, NUM_PAGES - 1], np.int32))
    pools = scrubber.poison(pools, np.array([9, 10], np.int32))
    pools = scrubber.scrub(pools, np.array([3, 10], np.int32))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(pools)]
    assert len(leaves) == 4 * layout.num_layers
    for was, now in zip(before, leaves, strict=True):
        wanted = was.copy()
        wanted[[0, NUM_PAGES - 1]] = was[[5, 7]]
        wanted[9] = np.nan if was.dtype == np.float32 else 0
        wanted[[3, 10]] = 0
        np.testing.assert_array_equal(now, wanted)
    for values, scales in zip(leaves[::2], leaves[1::2], strict=True):
        assert np.isnan(numbers(values, scales)[9]).all()
        assert not numbers(values, scales)[[3, 10]].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_that_was_evicted_and_reused_keeps_nothing_of_its_old_scales(rng, backend, dtype):
    """The last owner's numbers were a million times larger; the next one half fills the page."""
    old, new = make_request(rng, 32, 32), make_request(rng, 21, 21)
    old.key[:], old.value[:] = old.key * 1e6, old.value * 1e6
    scrubber = Scrubber(2)
    pools = tuple(pool_of(np.zeros((2, 16, 2, 16), np.float32), dtype) for _ in range(2))
    everything = np.arange(32, dtype=np.int32)
    pools = backend.append(*pools, jnp.asarray(old.key), jnp.asarray(old.value), everything)
    pools = scrubber.scrub(pools, np.array([0, 1], np.int32))
    pools = backend.append(*pools, jnp.asarray(new.key), jnp.asarray(new.value), everything[:21])
    fresh = written(backend, new, [21], dtype)
    for got, wanted in zip(jax.tree.leaves(pools[0]), jax.tree.leaves(fresh), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


@pytest.mark.parametrize("dtype", DTYPES)
def test_appending_drops_padding_and_touches_no_other_slot(rng, backend, dtype):
    rows = rng.normal(size=(2, 6, 2, 16)).astype(np.float32)
    filled = rng.normal(size=(3, 4, 2, 16)).astype(np.float32)
    slots = np.array([11, 0, 5, 12, -1, 2**31 - 1], np.int32)
    pools = backend.append(pool_of(filled, dtype), pool_of(filled, dtype), *map(jnp.asarray, rows), slots)
    for pool, new in zip(pools, rows, strict=True):
        wanted = filled.reshape(12, 2, 16).copy()
        wanted[slots[:3]] = new[:3]
        values, scales = stored(wanted, dtype)
        np.testing.assert_array_equal(np.asarray(pool.values).reshape(values.shape), values)
        np.testing.assert_array_equal(np.asarray(pool.scales).reshape(scales.shape), scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_write_both_arrays_of_a_pool_in_place_and_never_widen_it(rng, backend, dtype):
    step = make_step(mixed_requests(rng), page_size=16)
    pools = [pool_of(pool, dtype) for pool in (step.k_pool, step.v_pool)]
    pools = jax.tree.map(lambda leaf: leaf + 0, pools)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pools)]
    program, pages = program_of(backend, PLAIN, None, ()), PageMetadata.from_table(step.table)
    compiled = program.lower(step.query, step.key, step.value, *pools, pages, None).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(pools))
    for shape in (step.k_pool.shape, (NUM_PAGES * 16, *step.k_pool.shape[2:])):
        whole = rf"(f32|f16|bf16|f8e4m3fn)\[{','.join(map(str, shape))}\]"
        assert not re.search(whole, compiled.as_text()), "the whole pool is converted"
    for _ in range(3):
        _, *pools = program(step.query, step.key, step.value, *pools, pages, None)
        assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pools)] == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_pools_take_the_bytes_their_layout_counts_and_read_as_zeros(dtype):  # CASES 150
    layout = KvStorageLayoutV1(2, 5, 4, num_kv_heads=3, head_dim=8, dtype=dtype)
    leaves = jax.tree.leaves(create_pools(layout))
    assert [leaf.shape for leaf in leaves] == 4 * [layout.pool_shape, layout.scales_shape]
    assert sum(leaf.nbytes for leaf in leaves) == layout.total_pool_bytes() == 2 * 2 * 5 * 4 * 3 * (8 + 4)
    assert not any(np.asarray(leaf).any() for leaf in leaves)


@pytest.mark.skipif(not BUILDS, reason="no native kernels")
def test_a_pool_whose_scales_are_missing_or_of_another_shape_is_an_error_and_no_stray_read(rng):
    step = make_step(mixed_requests(rng), page_size=16)
    pool = pool_of(step.k_pool, "int8")
    pages, short = PageMetadata.from_table(step.table), replace(pool, scales=pool.scales[1:])
    for k_pool, v_pool in ((pool.values, pool), (short, pool), (pool, short)):
        with pytest.raises(Exception, match=r"scales must be \[pages, tokens, heads\]"):
            NativeBackend().attend(
                jnp.asarray(step.query),
                k_pool,
                v_pool,
                pages,
                scale=1.0,
                sliding_window=None,
                soft_cap=None,
                sinks=None,
            ).block_until_ready()


@pytest.mark.multi_device
@pytest.mark.parametrize("dtype", DTYPES)
def test_sharded_heads_take_their_scales_along_without_a_collective(rng, backend, dtype):
    mesh = jax.make_mesh((2, 4), ("tensor", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    step = make_step(mixed_requests(rng, heads=8, kv_heads=4), page_size=16)
    sharding = NamedSharding(mesh, PartitionSpec(None, None, ("tensor",), None))
    pools = jax.device_put([pool_of(pool, dtype) for pool in (step.k_pool, step.v_pool)], sharding)
    program, pages = program_of(backend, PLAIN, mesh, ("tensor",)), PageMetadata.from_table(step.table)
    text = program.lower(step.query, step.key, step.value, *pools, pages, None).compile().as_text()
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in text
    before = _addresses(pools)
    output, *pools = program(step.query, step.key, step.value, *pools, pages, None)
    assert_equals_dense(np.asarray(output), as_read(step, dtype))
    assert _addresses(pools) == before


def _addresses(pools) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(pools) for shard in x.addressable_shards]
