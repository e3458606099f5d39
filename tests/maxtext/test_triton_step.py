"""The whole paged step of a MaxText model, lowered for GPUs on a machine that has none, eight KV head shards."""

from __future__ import annotations

import re

import pytest

from kv_execution.attention import triton_bridge
from kv_execution.attention.triton_bridge import JAX_TRITON_TARGET, XLA_TARGET
from tests.lowered_step import INT8_POOLS, LOWERING, POOLS, TARGETS, lowered_elsewhere, lowered_step
from tests.stablehlo import check_in_place

not_here = triton_bridge.missing(route="xla")
pytestmark = [
    pytest.mark.maxtext,
    pytest.mark.multi_device,
    pytest.mark.skipif(not_here is not None, reason=str(not_here)),
]


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_a_step_on_eight_gpus_writes_its_pools_in_place_and_talks_nowhere_between(name: str) -> None:
    check_in_place(lowered_step(TARGETS[name], "llama2"), XLA_TARGET, **POOLS)


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_quantised_pools_and_their_scales_are_written_in_place_and_never_widened(name: str) -> None:
    """Values and scales of K and V: eight arrays of two layers, each touched by its append, decode and attend alone."""
    check_in_place(lowered_step(TARGETS[name], "llama2", "int8"), XLA_TARGET, **INT8_POOLS)


@pytest.mark.slow
@pytest.mark.skipif(not LOWERING.exists(), reason="jax's CUDA lowering code is not in .venv/lowering: make venv")
def test_so_does_the_step_of_the_route_that_is_the_default_on_nvidia() -> None:
    """In a process of its own: where jax finds its CUDA code, it looks for a GPU and says so."""
    check_in_place(lowered_elsewhere("bfloat16"), JAX_TRITON_TARGET, **POOLS)


@pytest.mark.parametrize(
    ("found", "instead"),
    [
        (r"( +)(sdy\.return)", r'\1%x = "stablehlo.all_reduce"(%arg47)\n\1\2'),
        (r"( +)(sdy\.return)", r"\1%x = stablehlo.copy %arg50 : LOCAL\n\1\2"),
        (r"(%\w+:3) = sdy\.manual_computation", r"%x = stablehlo.copy %arg21 : WHOLE\n  \1 = sdy.manual_computation"),
        (r"(output_tuple_indices = \[0\], operand_index = )3", r"\g<1>2"),
        (r"tf\.aliasing_output = 2 : i32", "jax.arg = 2"),
        (r"__gpu\$xla\.gpu\.triton", "another"),
    ],
    ids=["exchange", "copy", "copy of the whole", "wrong alias", "not donated", "another kernel"],
)
def test_what_must_not_be_there_would_be_seen(found: str, instead: str) -> None:
    """The control: each thing that the check forbids, put into the program that passes it."""
    program = lowered_step(TARGETS["cuda"], "llama2")
    instead = instead.replace("LOCAL", POOLS["local_pool"]).replace("WHOLE", POOLS["whole_pool"])
    changed, times = re.subn(found, instead, program, count=1)
    assert times == 1
    with pytest.raises(AssertionError):
        check_in_place(changed, XLA_TARGET, **POOLS)
