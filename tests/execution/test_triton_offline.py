"""What Triton makes of our kernels for five GPUs, none of which is here: no spills, and no more than the ceilings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.triton_offline import (
    CASES,
    SHARED_LIMITS,
    TARGETS,
    Case,
    ceilings,
    compile_launch,
    compiled,
    complaint,
    page,
    recorded_launches,
)
from kv_execution.attention import triton_bridge
from kv_execution.attention.triton_backend import TRITON_CAPABILITIES, TritonBackend
from kv_execution.attention.triton_tiles import Tile

not_here = triton_bridge.missing(route="xla")
pytestmark = [pytest.mark.skipif(not_here is not None, reason=str(not_here)), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
ORDINARY = Case("bfloat16", 128, 4)
QUANTISED = Case("float8_e4m3fn", 64, 4)


@pytest.mark.parametrize(
    "case", [ORDINARY, pytest.param(QUANTISED, marks=pytest.mark.long)], ids=["plain", "quantised"]
)
@pytest.mark.parametrize("name", TARGETS)
def test_the_common_geometry_keeps_within_its_ceilings(name, case):
    found = list(compiled([name], [case]))
    assert {one.kernel for one in found} == set(case.kernels)
    assert [complaint(one, ceilings()) for one in found] == [None] * len(found)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", TARGETS)
def test_every_recorded_geometry_keeps_within_its_ceilings(name):
    complaints = [complaint(one, ceilings()) for one in compiled([name], CASES)]
    assert [one for one in complaints if one is not None] == []


def test_every_head_size_and_element_type_that_is_served_has_ceilings_for_every_target():
    assert {case.head_dim for case in CASES} == TRITON_CAPABILITIES.head_sizes
    assert {case.dtype for case in CASES} == TRITON_CAPABILITIES.dtypes
    wanted = {f"{case.name} {kernel}" for case in CASES for kernel in case.kernels}
    for name in TARGETS:
        recorded = ceilings()[name]
        assert recorded.keys() == wanted
        assert {spilled for _, spilled, _ in recorded.values()} == {0}
        assert max(shared for _, _, shared in recorded.values()) <= SHARED_LIMITS[name]


def test_the_page_says_what_is_recorded():
    """Rewrite it with ``python -m benchmarks.triton_offline --page docs/gpu-kernels.md``."""
    assert (ROOT / "docs" / "gpu-kernels.md").read_text(encoding="utf-8") == page(ceilings())


def test_a_tile_too_large_for_a_device_and_a_missing_ceiling_are_found():
    backend = TritonBackend(attend_tile=Tile(128, 128, 4, 2), decode_tile=Tile(128, 128, 4, 2))
    attend = recorded_launches(ORDINARY, TARGETS["sm_90"], backend=backend)["attend_kernel"]
    one = compile_launch(attend, "sm_90", ORDINARY.name, "attend_kernel")
    assert one.spilled_bytes > 0 and "local memory" in str(complaint(one, ceilings()))
    kept = replace(one, spilled_bytes=0)
    assert "the ceiling is" in str(complaint(kept, ceilings()))
    assert "no ceiling is recorded" in str(complaint(kept, {}))
    assert "the device has" in str(complaint(replace(kept, shared_bytes=300 << 10), ceilings()))
