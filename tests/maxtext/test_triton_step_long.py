"""The whole paged step over int8 pools, lowered by the route that is NVIDIA's default, in a process of its own."""

from __future__ import annotations

import pytest

from kv_execution.attention import triton_bridge
from kv_execution.attention.triton_bridge import JAX_TRITON_TARGET
from tests.lowered_step import INT8_POOLS, LOWERING, lowered_elsewhere
from tests.stablehlo import check_in_place

not_here = triton_bridge.missing(route="xla")
pytestmark = [
    pytest.mark.maxtext,
    pytest.mark.long,  # and not multi_device, which `make test-long` leaves out: the devices are the other process's
    pytest.mark.skipif(not_here is not None, reason=str(not_here)),
    pytest.mark.skipif(not LOWERING.exists(), reason="jax's CUDA lowering code is not in .venv/lowering: make venv"),
]


def test_quantised_pools_and_their_scales_are_written_in_place_by_jax_triton() -> None:
    check_in_place(lowered_elsewhere("int8"), JAX_TRITON_TARGET, **INT8_POOLS)
