"""The C++ backend keeps every backend's promises, in each instruction-set build this machine runs, and its own."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kv_common.errors import ConfigError, UnsupportedError
from kv_execution.attention.native import NativeBackend, native_threads
from kv_execution.metadata import PageMetadata
from kv_execution.native import library
from kv_execution.native.library import native_available, native_library
from tests.execution.conformance import BackendConformance
from tests.execution.numpy_model import float32_bound
from tests.execution.paged_steps import (
    EVERYTHING,
    PLAIN,
    assert_equals_dense,
    expected,
    make_request,
    make_step,
    mixed_requests,
    program_of,
    rounded,
    run,
)

pytestmark = pytest.mark.skipif(native_available() is not None, reason=str(native_available()))


NUM_THREADS = len(os.sched_getaffinity(0))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


class TestNativeBackend(BackendConformance):
    backend = NativeBackend()
    head_dims = tuple(range(16, 257, 16))


@pytest.mark.skipif("baseline" == getattr(library._load(), "best", ""), reason="the best build is this one")
class TestNativeBackendBaseline(BackendConformance):
    backend = NativeBackend(instruction_set="baseline")


@pytest.mark.skipif(
    "x86_64_v3" not in getattr(library._load(), "builds", {}), reason="this machine does not run x86-64-v3"
)
class TestNativeBackendV3(BackendConformance):
    backend = NativeBackend(instruction_set="x86_64_v3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (4, 1), (10, 2), (16, 2)])
def test_each_way_of_sharing_keys_among_query_heads_equals_dense_attention(rng, heads, kv_heads, dim, dtype):
    """Head sizes and groups that have loops of their own, over several blocks and both ways of reading ahead."""
    sizes = [(300, 1), (65, 1), (64, 1), (1, 1), (140, 77)]
    requests = [
        make_request(rng, length, num_new, heads=heads, kv_heads=kv_heads, dim=dim) for length, num_new in sizes
    ]
    step, options = make_step(requests, page_size=16, num_pages=128), replace(PLAIN, scale=dim**-0.5)
    stored = replace(step, requests=rounded(step.requests, dtype, ("key", "value")))
    assert_equals_dense(run(NativeBackend(), step, options, dtype=dtype), stored, options)


def test_more_query_heads_than_a_tile_has_rows_share_a_kv_head(rng):
    step = make_step(
        [make_request(rng, length, num_new, heads=100, kv_heads=1) for length, num_new in ((9, 1), (9, 3))]
    )
    assert_equals_dense(run(NativeBackend(), step), step)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [[(1900, 1)], [(700, 1), (5, 1), (1100, 1), (40, 10)]], ids=["alone", "several"])
def test_split_over_keys_or_walked_whole_a_decode_is_the_same(rng, dtype, sizes):
    """Three instruction sets, cut and whole, with a window, a cap and sinks: dense is the judge of each."""
    requests = [make_request(rng, length, num_new, heads=6, kv_heads=2, dim=32) for length, num_new in sizes]
    step, sinks = make_step(requests, page_size=16, num_pages=256), rng.normal(size=6).astype(np.float32)
    stored = replace(step, requests=rounded(step.requests, dtype, ("key", "value")))
    options = replace(EVERYTHING, sliding_window=600)
    for name in native_library().builds:
        for floor in (0, 10**6):
            backend = NativeBackend(split_min_tokens=floor, split_min_tokens_per_request=floor, instruction_set=name)
            before = native_library().counts()
            assert_equals_dense(run(backend, step, options, sinks=sinks, dtype=dtype), stored, options, sinks=sinks)
            counts = native_library().counts().since(before)
            assert (counts.fused, counts.whole) == ((1, 0) if floor == 0 else (0, 1))
            if NUM_THREADS > 1:
                assert (counts.merged_rows > 0) == (floor == 0)


@pytest.mark.parametrize("where", [3, 700, 1390])
def test_a_nan_in_any_part_of_a_cut_decode_shows(rng, where):
    requests = [make_request(rng, length, 1, dim=32) for length in (1400, 900)]
    requests[0].key[where] = np.nan
    step = make_step(requests, page_size=16, num_pages=256)
    output = run(NativeBackend(), step)
    assert np.isnan(output[0]).all()
    assert_equals_dense(output, step, skip=[0])


@pytest.mark.parametrize("window", [None, 4])
def test_a_nan_value_shows_in_the_tokens_that_see_it_and_in_no_other(rng, window):
    """Six query heads a KV head: one token is one block of the tile's rows, and what it masks is not multiplied."""
    request = make_request(rng, 90, 90, heads=12, kv_heads=2)
    for sick in (10, 70):
        value = request.value.copy()
        value[sick] = np.nan
        step = make_step([replace(request, value=value)])
        output = run(NativeBackend(), step, replace(PLAIN, sliding_window=window))[:90]
        seen = [i for i in range(90) if sick <= i and (window is None or i < sick + window)]
        assert np.flatnonzero(np.isnan(output).any((1, 2))).tolist() == seen
        assert np.isnan(output[seen]).all()


@pytest.mark.parametrize("num_new", [1, 2], ids=["decode", "tile"])
def test_bfloat16_results_round_ties_to_even_and_stay_nan(rng, num_new):
    """Equal keys weigh a half each; values one bfloat16 step apart meet exactly between two."""
    request = make_request(rng, 2, num_new, dim=16)
    request.key[:] = 1.0
    request.value[0], request.value[1] = 1.0 + np.arange(16) / 128, 1.0 + np.arange(1, 17) / 128
    step = make_step([request])
    output = run(NativeBackend(), step, activations="bfloat16")[num_new - 1]
    middle = jnp.asarray((request.value[0, 0] + request.value[1, 0]) / 2)
    np.testing.assert_array_equal(output, np.broadcast_to(middle.astype(jnp.bfloat16).astype(jnp.float32), (4, 16)))
    sick = make_request(rng, 9, num_new, dim=16)
    sick.value.view(np.uint32)[3] = 0x7FFFFFFF  # a NaN that rounding up would carry over into a zero
    output = run(NativeBackend(), make_step([sick]), activations="bfloat16")[:num_new]
    assert np.isnan(output).all()


@pytest.mark.parametrize(
    ("told", "threads"),
    [
        ({"NPROC": "3"}, 3),
        ({"PJRT_NPROC": "5", "NPROC": "3"}, 5),
        ({"PJRT_NPROC": "many", "NPROC": " 3"}, 3),
        ({"PJRT_NPROC": "-1", "NPROC": "3"}, 1),
        ({"PJRT_NPROC": "0"}, 1),
        ({"PJRT_NPROC": ""}, NUM_THREADS),
    ],
    ids=str,
)
def test_the_threads_are_those_that_xla_starts(monkeypatch, told, threads):
    """XLA reads its variables when the process starts; here is what it was seen to make of them."""
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert native_threads() == max(threads, jax.local_device_count())


@pytest.mark.parametrize(
    ("count", "length", "fused"), [(1, 4095, 0), (1, 4096, 1), (4, 956, 1), (4, 511, 0), (2, 512, 1)]
)
def test_the_floors_hold_to_the_token(rng, count, length, fused):
    backend = NativeBackend(split_min_tokens=4096, split_min_tokens_per_request=512)
    requests = [make_request(rng, length, 1, heads=2, kv_heads=1, dim=16) for _ in range(count)]
    step = make_step([*requests, make_request(rng, 5000, 2, heads=2, kv_heads=1, dim=16)], page_size=64, num_pages=256)
    before = native_library().counts()
    output = run(backend, step)
    counts = native_library().counts().since(before)
    assert (counts.fused, counts.whole) == (fused, 1 - fused)
    assert counts.tiles == 1
    assert_equals_dense(output, step)


def test_offsets_past_32_bits_are_read_where_they_are(rng, tmp_path: Path):
    """Sparse files of 140 GB hold two pools; only the pages that are used exist. 32-bit offsets would read zeros."""
    shape = (70_000, 256, 8, 128)
    ids = np.array([69_999, 4_097, 16_385], np.int32)  # ids * 256 * 8 * 128 pass 2^31, 2^32 and 2^34
    request = make_request(rng, 600, 1, heads=8, kv_heads=8, dim=128)
    pools = []
    for name, new in (("k", request.key), ("v", request.value)):
        try:
            pool = np.memmap(tmp_path / name, np.float32, "w+", shape=shape)
        except OSError as error:
            pytest.skip(f"no sparse files of this size here: {error}")
        (tmp_path / name).unlink()
        for i, page in enumerate(ids):
            part = new[i * 256 : (i + 1) * 256]
            pool[page, : len(part)] = part
        pools.append(jnp.from_dlpack(np.asarray(pool)))
    i32 = lambda *values: jnp.asarray(values, jnp.int32)  # noqa: E731
    pages = PageMetadata(
        query_start_loc=i32(0, 1),
        seq_lens=i32(600),
        positions=i32(599),
        slot_mapping=i32(0),
        row_of_token=i32(0),
        kv_indptr=i32(0, 3),
        kv_indices=jnp.asarray(ids),
        kv_last_page_len=i32(88),
        kv_first_page_offset=i32(0),
    )
    for name in native_library().builds:
        attend = jax.jit(
            lambda q, k, v, name=name: NativeBackend(instruction_set=name).attend(
                q, k, v, pages, scale=0.25, sliding_window=None, soft_cap=None, sinks=None
            )
        )
        output = np.asarray(attend(request.query[-1:], *pools))
        bound = float32_bound(request.query, request.key, request.value, 0.25)
        np.testing.assert_allclose(output, expected(request), rtol=0, atol=bound)


def test_append_writes_slots_past_4_gib(tmp_path: Path):
    row_bytes, num_slots = 4096, 70_000 * 256
    pool = np.memmap(tmp_path / "pool", np.uint8, "w+", shape=(num_slots, row_bytes))
    (tmp_path / "pool").unlink()
    row = np.arange(row_bytes, dtype=np.int64).astype(np.uint8)
    write = native_library().handle.maxtext_paged_write_row
    write.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64]
    for slot in (num_slots - 1, 2**20 + 1, -1, num_slots):
        write(pool.ctypes.data, row.ctypes.data, slot, num_slots, row_bytes)
    for slot in (num_slots - 1, 2**20 + 1):
        np.testing.assert_array_equal(pool[slot], row)
    assert not pool[1].any()
    assert not pool[(num_slots - 1) * row_bytes % 2**32 // row_bytes].any()


def test_a_bfloat16_pool_is_never_widened(rng):
    """XLA:CPU turns bfloat16 arrays that its own operations touch into float32; custom calls read and write them."""
    step = make_step(mixed_requests(rng))
    pools = [jnp.asarray(pool, jnp.bfloat16) for pool in (step.k_pool, step.v_pool)]
    program = program_of(NativeBackend(), PLAIN, None, ())
    arguments = (step.query, step.key, step.value, *pools, PageMetadata.from_table(step.table), None)
    text = program.lower(*arguments).compile().as_text()
    shape = ",".join(map(str, pools[0].shape))
    assert f"bf16[{shape}]" in text
    assert f"f32[{shape}]" not in text


@pytest.mark.parametrize("page", [128, -1])
def test_a_page_outside_the_pool_is_an_error_and_no_stray_read(rng, page):
    step = make_step(mixed_requests(rng))
    indices = step.table.kv_indices.copy()
    indices[2] = page
    pages = replace(PageMetadata.from_table(step.table), kv_indices=indices)
    program = program_of(NativeBackend(), PLAIN, None, ())
    pools = [jnp.asarray(pool) for pool in (step.k_pool, step.v_pool)]
    with pytest.raises(Exception, match=f"row 0 names page {page} of a pool of 128"):
        jax.block_until_ready(program(step.query, step.key, step.value, *pools, pages, None))


def test_a_row_with_fewer_pages_than_tokens_is_an_error_and_never_reads_its_neighbour_s(rng):
    step = make_step([make_request(rng, 20, 1), make_request(rng, 20, 1)], page_size=16)
    indptr = step.table.kv_indptr.copy()
    indptr[1] = 1  # of two pages
    pages = replace(PageMetadata.from_table(step.table), kv_indptr=indptr)
    program = program_of(NativeBackend(), PLAIN, None, ())
    pools = [jnp.asarray(pool) for pool in (step.k_pool, step.v_pool)]
    with pytest.raises(Exception, match="row 0 has fewer pages than its tokens take"):
        jax.block_until_ready(program(step.query, step.key, step.value, *pools, pages, None))


def test_an_instruction_set_that_is_not_here_is_refused_with_those_that_are(rng):
    with pytest.raises(ConfigError, match="instruction_set='sve': this machine runs baseline"):
        run(NativeBackend(instruction_set="sve"), make_step(mixed_requests(rng)))


@pytest.mark.multi_device
def test_a_sharded_pool_outside_shard_map_is_refused_and_would_have_been_gathered(rng):
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",))
    step = make_step(mixed_requests(rng, heads=8, kv_heads=4))
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "tensor", None))
    pools = [jax.device_put(pool, sharding) for pool in (step.k_pool, step.v_pool)]
    pages = PageMetadata.from_table(step.table)
    arguments = (step.query, step.key, step.value, *pools, pages, None)
    with pytest.raises(UnsupportedError, match=r"4 KV heads was handed to kernels of 1 heads a shard.*shard_map"):
        program_of(NativeBackend(kv_heads=1), PLAIN, None, ()).lower(*arguments)
    output, *_ = program_of(NativeBackend(kv_heads=1), PLAIN, mesh, ("tensor",))(*arguments)
    assert_equals_dense(np.asarray(output), step)
    with pytest.raises(UnsupportedError, match=r"outside jax\.shard_map"):
        NativeBackend().append(
            *[jax.device_put(p, sharding) for p in (step.k_pool, step.v_pool)],
            step.key,
            step.value,
            step.table.slot_mapping,
        )
    unguarded = [jax.device_put(pool, sharding) for pool in (step.k_pool, step.v_pool)]
    lowered = program_of(NativeBackend(), PLAIN, None, ()).lower(
        step.query, step.key, step.value, *unguarded, pages, None
    )
    assert "all-gather" in lowered.compile().as_text(), "the control: without the check XLA gathers the pool"
