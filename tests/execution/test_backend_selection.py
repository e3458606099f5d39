"""The backend is a value with a reason, or a refusal that names what was asked for."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest

from kv_common.errors import ConfigError, UnsupportedError
from kv_common.layout import KvStorageLayoutV1
from kv_execution.attention import select, triton_bridge
from kv_execution.attention.api import AttentionOptions
from kv_execution.attention.capabilities import REFERENCE_CAPABILITIES
from kv_execution.attention.native import NativeBackend
from kv_execution.attention.reference import ReferenceBackend
from kv_execution.attention.select import choose_backend
from kv_execution.attention.triton_backend import TritonBackend
from kv_execution.dispatch import SplitFloors
from kv_execution.native.library import native_available, native_library

LAYOUT = KvStorageLayoutV1(2, 64, 16, num_kv_heads=2, head_dim=80, dtype="float32")
PLAIN = AttentionOptions(scale=1.0, sliding_window=None, soft_cap=None)


NO_TRITON = "triton is not installed"
NOT_BUILT = "the C++ kernels are not built: install a C++17 compiler"
built = pytest.mark.skipif(native_available() is not None, reason=str(native_available()))


@pytest.fixture
def without_native(monkeypatch):
    """Nothing but the reference is built."""
    monkeypatch.setattr(select, "native_available", lambda: NOT_BUILT)
    monkeypatch.setattr(triton_bridge, "missing", lambda: NO_TRITON)


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(triton_bridge, "missing", lambda: None)


@pytest.mark.parametrize("platform", ["gpu", "cuda", "rocm"])
def test_auto_takes_triton_on_a_gpu_with_the_floors_as_data(platform, with_triton, announced):
    floors = SplitFloors(4096, 512)
    choice = choose_backend("auto", platform, LAYOUT, floors=floors)
    assert (choice.name, choice.backend, choice.declined) == ("triton", TritonBackend(2, floors), None)
    assert choice.reason == "the default on GPUs; Triton kernels"
    forced = choose_backend("triton", platform, LAYOUT, floors=floors, native_switch=1)
    assert (forced.backend, forced.reason) == (TritonBackend(2), "asked for by paged_backend=triton; Triton kernels")
    assert [record.levelname for record in announced.records] == ["INFO", "INFO"]
    assert choose_backend("auto", platform, LAYOUT, native_switch=0).name == "reference"


def test_triton_is_refused_on_a_cpu_and_for_heads_it_was_not_compiled_for(with_triton, announced):
    with pytest.raises(UnsupportedError, match="paged_backend=triton: it runs on GPUs, not on cpu"):
        choose_backend("triton", "cpu", LAYOUT)
    choice = choose_backend("auto", "gpu", replace(LAYOUT, head_dim=72))
    assert (choice.name, choice.backend) == ("reference", ReferenceBackend())
    assert "triton cannot serve head_dim=72: allowed are 64, 80, 96, 128, 256" in choice.reason
    assert [record.levelname for record in announced.records] == ["WARNING"]


@pytest.mark.parametrize("requested", ["flashinfer", "aiter"])
def test_an_entry_without_kernels_is_declined_by_name(requested, with_triton):
    with pytest.raises(
        UnsupportedError, match=rf"paged_backend={requested}: it is not built \(.*\)\. Built here: .*triton"
    ):
        choose_backend(requested, "gpu", LAYOUT)


@pytest.fixture
def announced(caplog, monkeypatch):
    monkeypatch.setattr(select, "_announced", set())
    with caplog.at_level(logging.INFO, logger="kv_execution"):
        yield caplog


@built
def test_auto_takes_the_native_kernels_on_a_cpu_and_names_the_instruction_set():
    choice = choose_backend("auto", "cpu", LAYOUT)
    assert (choice.name, choice.backend, choice.declined) == ("native", NativeBackend(kv_heads=2), None)
    assert choice.backend.name == choice.name
    assert choice.reason == f"the default on CPUs; C++ kernels for {native_library().best}"
    named = choose_backend("native", "cpu", LAYOUT)
    assert (named.backend, "asked for by paged_backend=native" in named.reason) == (choice.backend, True)


@built
def test_floors_reach_the_kernels_and_force_bypasses_them():
    floors = SplitFloors(4096, 512)
    assert choose_backend("auto", "cpu", LAYOUT, floors=floors).backend == NativeBackend(2, 4096, 512)
    forced = choose_backend("auto", "cpu", LAYOUT, floors=floors, native_switch=1)
    assert forced.backend == NativeBackend(2, 0, 0)


@pytest.mark.parametrize(
    ("platform", "why"),
    [
        ("cpu", NOT_BUILT),
        ("cuda", f"triton is not built ({NO_TRITON})"),
        ("gpu", f"triton is not built ({NO_TRITON})"),
        ("rocm", f"triton is not built ({NO_TRITON})"),
        ("tpu", "no kernel is made for tpu"),
    ],
)
def test_auto_takes_the_reference_and_says_what_is_missing(platform, why, without_native):
    choice = choose_backend("auto", platform, LAYOUT)
    assert (choice.name, choice.backend) == ("reference", ReferenceBackend())
    assert choice.backend.name == choice.name
    assert why in choice.reason


@built
def test_what_the_native_kernels_cannot_serve_runs_the_reference_and_says_so(announced):
    choice = choose_backend("auto", "cpu", replace(LAYOUT, head_dim=72))
    assert (choice.name, choice.backend) == ("reference", ReferenceBackend())
    assert "native cannot serve head_dim=72: allowed are 16, 32" in choice.reason
    assert [record.levelname for record in announced.records] == ["WARNING"]
    with pytest.raises(UnsupportedError, match="paged_backend=native: it cannot serve head_dim=72"):
        choose_backend("native", "cpu", replace(LAYOUT, head_dim=72))


@pytest.mark.parametrize(
    ("requested", "platform"), [("native", "cpu"), ("triton", "gpu"), ("aiter", "rocm"), ("flashinfer", "cuda")]
)
def test_a_backend_asked_for_by_name_is_never_replaced(requested, platform, without_native):
    with pytest.raises(UnsupportedError, match=rf"paged_backend={requested}: it is not built.*reference"):
        choose_backend(requested, platform, LAYOUT)
    with pytest.raises(UnsupportedError, match=rf"{requested}: it is forbidden by paged_attention_native=0"):
        choose_backend(requested, platform, LAYOUT, native_switch=0)


def test_native_kernels_are_refused_on_another_platform():
    with pytest.raises(UnsupportedError, match="paged_backend=native: it runs on CPUs, not on cuda"):
        choose_backend("native", "cuda", LAYOUT)


@pytest.mark.parametrize(
    ("requested", "devices"), [("aiter", "AMD GPUs"), ("flashinfer", "NVIDIA GPUs"), ("triton", "GPUs")]
)
def test_kernels_of_gpus_are_refused_on_a_cpu(requested, devices):
    with pytest.raises(UnsupportedError, match=f"paged_backend={requested}: it runs on {devices}, not on cpu"):
        choose_backend(requested, "cpu", LAYOUT)


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"paged_backend='pallas'.*auto, reference, native"):
        choose_backend("pallas", "cpu", LAYOUT)


@pytest.mark.parametrize("requested", ["auto", "reference"])
def test_the_kill_switch_wins_and_is_part_of_the_reason(requested):
    killed = choose_backend(requested, "cpu", LAYOUT, native_switch=0)
    assert (killed.name, killed.backend) == ("reference", ReferenceBackend())
    assert "paged_attention_native=0" in killed.reason
    assert "paged_attention_native" not in choose_backend(requested, "cpu", LAYOUT, native_switch=1).reason


def test_each_kind_of_choice_is_announced_once_and_louder_where_it_disappoints(announced, without_native):
    for requested, platform in [("auto", "cpu"), ("auto", "cpu"), ("reference", "cpu"), ("auto", "cuda")]:
        choose_backend(requested, platform, LAYOUT)
    assert [record.levelname for record in announced.records] == ["WARNING", "INFO", "WARNING"]
    assert announced.records[0].getMessage() == (
        f"paged attention backend: reference (native is not built ({NOT_BUILT}): the jnp reference serves cpu)"
    )


def test_a_geometry_the_reference_cannot_store_is_refused_at_start():
    allowed = "bfloat16, float16, float32, float8_e4m3fn, int8"
    with pytest.raises(UnsupportedError, match=f"paged_kv_dtype=int4: allowed are {allowed}$"):
        choose_backend("auto", "cpu", replace(LAYOUT, dtype="int4"))


@built
def test_a_dtype_that_only_the_reference_stores_is_declined_by_name():
    layout, allowed = replace(LAYOUT, dtype="float16"), "bfloat16, float32, float8_e4m3fn, int8"
    choice = choose_backend("auto", "cpu", layout)
    assert choice.name == "reference"
    assert f"native cannot serve paged_kv_dtype=float16: allowed are {allowed}: the jnp reference" in choice.reason
    with pytest.raises(UnsupportedError, match=f"it cannot serve paged_kv_dtype=float16: allowed are {allowed}"):
        choose_backend("native", "cpu", layout)
    for dtype in ("bfloat16", "float8_e4m3fn", "int8"):
        assert choose_backend("auto", "cpu", replace(LAYOUT, dtype=dtype)).name == "native"


@pytest.mark.parametrize(
    ("platform", "dtype", "warned"),
    [
        ("cpu", "bfloat16", True),
        ("cpu", "float16", False),
        ("cpu", "float32", False),
        ("cuda", "bfloat16", False),
    ],
)
def test_a_dtype_that_works_but_costs_dearly_is_said_aloud(platform, dtype, warned, without_native):
    reason = choose_backend("auto", platform, replace(LAYOUT, dtype=dtype)).reason
    assert ("slow with paged_kv_dtype=bfloat16" in reason) is warned


@pytest.mark.parametrize(
    ("limit", "layer", "has_sinks", "names"),
    [
        ({"head_sizes": frozenset({64, 128})}, PLAIN, False, r"head_dim=80: allowed are 64, 128"),
        (
            {"page_sizes": frozenset({128, 32})},
            PLAIN,
            False,
            r"paged_tokens_per_page=16: allowed are 32, 128",
        ),
        ({"dtypes": frozenset({"bfloat16"})}, PLAIN, False, r"paged_kv_dtype=float32: allowed are bfloat16"),
        ({"sliding_window": False}, replace(PLAIN, sliding_window=8), False, r"sliding_window=8: .*None"),
        ({"soft_cap": False}, replace(PLAIN, soft_cap=30.0), False, r"soft_cap=30.0: .*None"),
        ({"sinks": False}, PLAIN, True, r"attention sinks: allowed is none"),
        ({"max_pages": 63}, PLAIN, False, r"paged_num_pages=64: allowed are at most 63"),
        ({"max_pool_bytes": 64 * 16 * 2 * 80 * 4 - 1}, PLAIN, False, r"655360 bytes .* at most 655359"),
    ],
)
def test_what_a_backend_lacks_is_named_with_what_is_allowed(limit, layer, has_sinks, names):
    refusal = replace(REFERENCE_CAPABILITIES, **limit).refusal(LAYOUT, layer, has_sinks=has_sinks)
    assert refusal is not None
    assert re.search(names, refusal)
    assert REFERENCE_CAPABILITIES.refusal(LAYOUT, layer, has_sinks=has_sinks) is None


def test_the_limit_itself_is_allowed():
    table = replace(REFERENCE_CAPABILITIES, max_pages=64, max_pool_bytes=64 * 16 * 2 * 80 * 4)
    assert table.refusal(LAYOUT, PLAIN) is None
