"""What aiter's launchers are given: order, types, strides, scales; and that wrong shapes never reach them."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kv_common.errors import ConfigError, UnsupportedError
from kv_common.layout import KvStorageLayoutV1
from kv_execution.attention import select
from kv_execution.attention.aiter_backend import AITER_CAPABILITIES, AITER_PROVEN_DEVICES, AiterBackend
from kv_execution.attention.api import AttentionOptions
from kv_execution.attention.select import choose_backend
from kv_execution.metadata import PageMetadata
from kv_execution.native import aiter_library
from kv_execution.native.aiter_library import ATTEND_TARGET, FOLDER_VARIABLE, TARGETS
from tests.execution.aiter_stub import HOST, built_stub, not_here, stub
from tests.execution.numpy_model import UNIT_ROUNDOFF, float32_bound
from tests.execution.paged_steps import (
    EVERYTHING,
    NUM_PAGES,
    PLAIN,
    ROW_RUNG,
    TOKEN_RUNG,
    Step,
    expected,
    make_request,
    make_step,
    mixed_requests,
    rounded,
    run,
)

__all__ = ["built_stub", "stub"]
pytestmark = pytest.mark.skipif(not_here() is not None, reason=str(not_here()))

BACKEND = AiterBackend(door=HOST)
SCALED = replace(PLAIN, scale=1.0)
BFLOAT16, FLOAT16, INT32 = 3, 2, 8
"""Numbers of aiter's element types."""


def step_of(dtype: str, *, dim: int = 64, heads: int = 4, kv_heads: int = 2, decodes: bool = False) -> Step:
    rng = np.random.default_rng(3)
    requests = mixed_requests(rng, dim=dim, heads=heads, kv_heads=kv_heads)
    if decodes:
        requests = [make_request(rng, n, 1, dim=dim, heads=heads, kv_heads=kv_heads) for n in (9, 1, 40, 16)]
    return make_step(rounded(requests, dtype), page_size=16)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("bfloat16", {"dim": 64, "heads": 4, "kv_heads": 2}),
        ("bfloat16", {"dim": 128, "heads": 3, "kv_heads": 3}),
        ("float16", {"dim": 128, "heads": 8, "kv_heads": 2}),
    ],
    ids=["grouped", "one each", "float16"],
)
@pytest.mark.parametrize("decodes", [False, True], ids=["mixed", "decodes"])
def test_read_as_it_is_handed_over_a_step_equals_dense_attention(stub, dtype, shape, decodes):
    """Pages that nobody owns, padding queries and padding slots hold NaN, and nothing of them shows."""
    step = step_of(dtype, **shape, decodes=decodes)
    output = run(BACKEND, step, SCALED, dtype=dtype, activations=dtype)
    for i, request in enumerate(step.requests):
        wanted = expected(request, SCALED)
        bound = float32_bound(request.query, request.key, request.value, 1.0)
        assert (np.abs(output[step.rows(i)] - wanted) - UNIT_ROUNDOFF[dtype] * np.abs(wanted)).max() <= bound
    assert not output[step.table.num_tokens :].any(), "padding rows must be zeros"
    assert not [line for line in stub.take_log() if "has no page" in line]


def test_append_is_handed_keys_values_and_pools_with_their_strides_and_unit_scales(stub):
    step = step_of("bfloat16")
    run(BACKEND, step, SCALED, dtype="bfloat16", activations="bfloat16")
    [line] = [line for line in stub.take_log() if line.startswith("append")]
    new = f"={BFLOAT16}[{TOKEN_RUNG},2,64]/[128,64,1]#{TOKEN_RUNG * 128}@0"
    pool = f"={BFLOAT16}[{NUM_PAGES},16,2,64]/[2048,128,64,1]#{NUM_PAGES * 2048}@0"
    assert line.startswith(
        f"append key{new} value{new} key_cache{pool} value_cache{pool} "
        f"slot_mapping={INT32}[{TOKEN_RUNG}]/[1]#{TOKEN_RUNG}@0 kv_cache_dtype=auto k_scale=1 v_scale=1 stream=0x57 "
    )
    slots = [int(slot) for slot in line.partition("slots=")[2].split(",")]
    real = step.table.num_tokens
    assert slots[:real] == step.table.slot_mapping[:real].tolist()
    assert set(slots[real:]) == {-1}, "one past the end is a slot to aiter, which it would write"


def test_decode_is_handed_queries_strides_partitions_and_the_scale_as_it_is(stub):
    run(BACKEND, step_of("bfloat16"), SCALED, dtype="bfloat16", activations="bfloat16")
    [line] = [line for line in stub.take_log() if line.startswith("decode")]
    partitions = 16 * step_of("bfloat16").table.kv_indices.shape[0] // 256
    assert line == (
        f"decode alibi=0 q_scale=0 k_scale=1 v_scale=1 out_scale=0 scale=1 cap=0 rows={ROW_RUNG} heads=4,2 "
        f"partitions={partitions} strides=256,2048,64,128 stream=0x57"
    )


def test_attend_is_handed_a_causal_group_of_paged_rows_and_the_scale_as_it_is(stub):
    run(BACKEND, step_of("bfloat16"), replace(PLAIN, scale=0.5), dtype="bfloat16", activations="bfloat16")
    [line] = [line for line in stub.take_log() if line.startswith("attend")]
    assert line == (
        "attend dtype=bf16 group=1 mask=2 bias=0 lse=0 quant=0 asm=0 stream=0x57 timed=0 "
        f"q={TOKEN_RUNG},{TOKEN_RUNG} batch={ROW_RUNG} dims=64,64 heads=4,2 pages={NUM_PAGES},16,1,1 "
        "scales=0.5,1,1 cap=0 token_strides=256,128,128,256 head_strides=64,64,64,64 page_strides=2048,2048 "
        "window=-1,0 sink=0,0 dropout=0"
    )


def test_a_geometry_without_a_kernel_is_an_error_and_not_an_answer(stub):
    step = step_of("float16")
    with pytest.raises(jax.errors.JaxRuntimeError, match="attend: it has no kernel for head_dim 64"):
        run(BACKEND, step, SCALED, dtype="float16", activations="float16")


POOL = jax.ShapeDtypeStruct((8, 16, 2, 64), jnp.bfloat16)
LISTS = {"indptr": (5,), "indices": (9,), "last": (4,)}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"v": (8, 16, 2, 128)}, "K and V pools must be"),
        ({"k": (8, 16, 2, 64, 1), "v": (8, 16, 2, 64, 1)}, "K and V pools must be"),
        ({"dtype": jnp.float32}, "K and V pools must be"),
        ({"query": (6, 4, 128)}, "query heads must be a multiple"),
        ({"query": (6, 3, 64)}, "query heads must be a multiple"),
        ({"query": (6, 256)}, "query and output must be"),
        ({"query_dtype": jnp.float16}, "query and output must be"),
        ({"starts": (4,)}, "page table arrays have the wrong length"),
        ({"last": (3,)}, "page table arrays have the wrong length"),
        ({"indptr": (4,)}, "page table arrays have the wrong length"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_shape_never_reaches_a_launcher(stub, change, complaint):
    shapes = {"query": (6, 4, 64), "k": POOL.shape, "v": POOL.shape, "starts": (5,), **LISTS, **change}
    dtype = shapes.pop("dtype", jnp.bfloat16)
    query_dtype = shapes.pop("query_dtype", dtype)
    halves = [jnp.zeros(shapes[name], query_dtype if name == "query" else dtype) for name in ("query", "k", "v")]
    integers = [jnp.zeros(shapes[name], jnp.int32) for name in ("starts", *LISTS)]
    call = jax.ffi.ffi_call(ATTEND_TARGET + HOST, jax.ShapeDtypeStruct(shapes["query"], query_dtype))
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"attend: .*{complaint}"):
        jax.block_until_ready(jax.jit(lambda *x: call(*x, scale=np.float32(1)))(*halves, *integers))
    assert stub.take_log() == []


def test_a_workspace_too_small_and_a_kernel_that_is_not_loaded_never_reach_a_launcher(stub):
    one, zeros = jnp.ones(1, jnp.float32), jnp.zeros
    arrays = [zeros((4, 4, 64), jnp.bfloat16), *[zeros(POOL.shape, jnp.bfloat16)] * 2]
    arrays += [zeros(LISTS[name], jnp.int32) for name in LISTS]

    def call(space: int, kernel: str):
        structs = [jax.ShapeDtypeStruct((4, 4, 64), jnp.bfloat16), jax.ShapeDtypeStruct((space,), jnp.uint8)]
        target = jax.ffi.ffi_call(TARGETS[2] + HOST, structs)
        settings = {"kernel": kernel, "scale": np.float32(1), "max_seqlen_k": np.int64(300)}
        return jax.block_until_ready(jax.jit(lambda *x: target(*x, **settings))(*arrays, one))

    enough = 4 * 4 * 2 * (8 + 128)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"a workspace of {enough - 1} bytes, it needs {enough}"):
        call(enough - 1, "maxtext_paged_pa_ragged_g2_d64_p16_bfloat16_l1")
    with pytest.raises(jax.errors.JaxRuntimeError, match="decode: other is not loaded"):
        call(enough, "other")
    assert stub.take_log() == []


def test_the_doors_of_a_gpu_ask_for_xlas_stream(stub):
    """On a CPU, which has none, the call is refused before anything else."""
    shim = aiter_library._load(str(stub.folder))
    jax.ffi.register_ffi_target("aiter_gpu_door", jax.ffi.pycapsule(getattr(shim, ATTEND_TARGET)), platform="cpu")
    arrays = [jnp.zeros((6, 4, 64), jnp.bfloat16), *[jnp.zeros(POOL.shape, jnp.bfloat16)] * 2]
    arrays += [jnp.zeros(shape, jnp.int32) for shape in ((5,), *LISTS.values())]
    call = jax.ffi.ffi_call("aiter_gpu_door", jax.ShapeDtypeStruct((6, 4, 64), jnp.bfloat16))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)stream"):
        jax.block_until_ready(call(*arrays, scale=np.float32(1)))
    assert stub.take_log() == []


def test_a_step_for_amd_names_the_shims_targets_and_writes_its_pools_in_place(stub):
    step = step_of("bfloat16")
    pages = PageMetadata.from_table(step.table)
    pools = [jax.ShapeDtypeStruct(step.k_pool.shape, jnp.bfloat16)] * 2
    new = jax.ShapeDtypeStruct(step.key.shape, jnp.bfloat16)
    query = jax.ShapeDtypeStruct(step.query.shape, jnp.bfloat16)

    def forward(query, key, value, k_pool, v_pool):
        backend = AiterBackend()
        k_pool, v_pool = backend.append(k_pool, v_pool, key, value, pages.slot_mapping)
        options = {"scale": 1.0, "sliding_window": None, "soft_cap": None, "sinks": None}
        return backend.attend(query, k_pool, v_pool, pages, **options), k_pool, v_pool

    traced = jax.jit(forward, donate_argnums=(3, 4)).trace(query, new, new, *pools)
    text = traced.lower(lowering_platforms=("rocm",)).as_text()
    assert sorted(re.findall(r"custom_call @(maxtext_paged_aiter_\w+)", text)) == sorted(TARGETS)
    [append] = [line for line in text.splitlines() if f"@{TARGETS[0]}" in line]
    aliases = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", append)
    assert aliases == [("0", "0"), ("1", "1")]
    written = re.search(r"(%\d+):2 = stablehlo.custom_call", append)[1]
    for target in TARGETS[1:]:
        [line] = [line for line in text.splitlines() if f"@{target}(" in line]
        assert f"{written}#0, {written}#1" in line


LAYOUT = KvStorageLayoutV1(2, 64, 16, num_kv_heads=2, head_dim=128, dtype="bfloat16")


def test_it_runs_where_it_is_named_and_never_by_default(stub):
    choice = choose_backend("aiter", "rocm", LAYOUT)
    assert (choice.name, choice.backend, choice.declined) == ("aiter", AiterBackend(2), None)
    assert "no device proven" in choice.reason and not AITER_PROVEN_DEVICES
    assert choose_backend("auto", "rocm", LAYOUT).name != "aiter"
    with pytest.raises(UnsupportedError, match="it runs on AMD GPUs, not on cuda"):
        choose_backend("aiter", "cuda", LAYOUT)


@pytest.mark.parametrize(
    ("change", "options", "why"),
    [
        ({"head_dim": 80}, {}, "head_dim=80: allowed are 64, 128, 256"),
        ({"tokens_per_page": 32}, {}, "paged_tokens_per_page=32: allowed are 16"),
        ({"dtype": "float32"}, {}, "paged_kv_dtype=float32: allowed are bfloat16, float16"),
        ({"num_pages": 65_537, "head_dim": 64}, {}, "paged_num_pages=65537: allowed are at most 65536"),
        ({"num_pages": 65_000, "num_kv_heads": 16, "head_dim": 128}, {}, "4259840000 bytes per pool"),
        ({}, {"sliding_window": 512}, "sliding_window=512: allowed is None"),
        ({}, {"soft_cap": 50.0}, "soft_cap=50.0: allowed is None"),
    ],
)
def test_what_its_kernels_cannot_do_is_refused_by_name(stub, change, options, why):
    layer = AttentionOptions(**{"scale": 1.0, "sliding_window": None, "soft_cap": None, **options})
    with pytest.raises(UnsupportedError, match=rf"paged_backend=aiter: it cannot serve {why}"):
        choose_backend("aiter", "rocm", replace(LAYOUT, **change), [layer])


def test_what_the_table_cannot_say_is_refused_when_a_step_is_traced(stub):
    step = step_of("bfloat16", heads=34)
    with pytest.raises(UnsupportedError, match="34 query heads over 2 KV heads: allowed are at most 16 for each"):
        run(BACKEND, step, SCALED, dtype="bfloat16", activations="bfloat16")
    with pytest.raises(ConfigError, match="it has no window, cap or sinks"):
        run(BACKEND, step_of("bfloat16"), EVERYTHING, dtype="bfloat16", activations="bfloat16")
    assert AITER_CAPABILITIES.max_pool_bytes == 2**31 - 1
    with pytest.raises(UnsupportedError, match=r"of 2 KV heads was handed to kernels of 1 heads a shard"):
        run(replace(BACKEND, kv_heads=1), step_of("bfloat16"), SCALED, dtype="bfloat16", activations="bfloat16")


def test_a_decode_kernel_that_was_not_built_names_the_command_that_builds_it(stub):
    with pytest.raises(UnsupportedError, match=r"build it: python3 -m csrc.cpp_itfs.pa.pa_ragged --gqa_ratio=8 .*l1\b"):
        run(BACKEND, step_of("bfloat16", heads=16), SCALED, dtype="bfloat16", activations="bfloat16")


def test_without_its_libraries_the_variable_or_the_file_is_named(stub, monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    with pytest.raises(UnsupportedError, match=rf"aiter: it is not built \({FOLDER_VARIABLE} names no folder"):
        choose_backend("aiter", "rocm", LAYOUT)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"module_cache\.so: cannot open shared object file"):
        choose_backend("aiter", "rocm", LAYOUT)


def test_a_library_that_hides_its_stream_is_refused(stub, tmp_path, monkeypatch):
    """Its kernels would run on the default stream, unordered with XLA's."""
    source = tmp_path / "hidden.cc"
    source.write_text(
        '#include "aiter_types.h"\nusing Tensor = aiter_tensor_t;\nnamespace aiter { void reshape_and_cache_flash('
        "Tensor&, Tensor&, Tensor&, Tensor&, Tensor&, const std::string&, Tensor&, Tensor&) {} }\n"
    )
    command = ["g++", "-std=c++17", "-fPIC", "-shared", f"-I{aiter_library.shim_path().parent / 'csrc'}", str(source)]
    subprocess.run([*command, "-o", str(tmp_path / aiter_library.APPEND_LIBRARY)], check=True)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert "does not export the stream" in str(aiter_library.aiter_available())


def test_flashinfer_is_an_entry_that_is_declined_by_name():
    assert "flashinfer" in select._CAPABILITIES
    with pytest.raises(UnsupportedError, match=r"flashinfer: it is not built \(no version of this package"):
        choose_backend("flashinfer", "cuda", LAYOUT)
