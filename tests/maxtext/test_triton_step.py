"""The whole paged step of a MaxText model, lowered for GPUs on a machine that has none, eight KV head shards."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.sharding import MeshCase, options_of
from kv_control.bucketing import token_ladder
from kv_control.control_plane import ControlPlane
from kv_control.plan import RequestSlice, SamplingSpec
from kv_execution.attention import triton_bridge
from kv_execution.attention.triton_backend import TritonBackend
from kv_execution.attention.triton_bridge import JAX_TRITON_TARGET, XLA_TARGET, GpuTarget
from kv_execution.step import make_step_program
from kv_execution.step_inputs import build_step_inputs
from maxtext_paged.model import MaxTextPagedModel, model_geometry
from maxtext_paged.session import run_key
from tests.stablehlo import check_in_place
from tests.tiny_models import make_config, mesh_of

not_here = triton_bridge.missing(route="xla")
pytestmark = [
    pytest.mark.maxtext,
    pytest.mark.multi_device,
    pytest.mark.skipif(not_here is not None, reason=str(not_here)),
]

PAGES, MAX_SEQS, DIM = 24, 4, 16
CASE = MeshCase({"tensor": 8}, 8)
POOLS = {"local_pool": f"tensor<{PAGES}x16x1x{DIM}xbf16>", "whole_pool": f"tensor<{PAGES}x16x8x{DIM}xbf16>"}
TARGETS = {
    "cuda": GpuTarget("cuda", "90", 132, "xla"),
    "rocm": GpuTarget("rocm", "gfx942", 304, "xla"),
    "cuda-jax_triton": GpuTarget("cuda", "90", 132, "jax_triton"),
}
no_jax_triton = triton_bridge.missing_cuda_plugin()


@cache
def lowered_step(target: GpuTarget, block: str) -> str:
    """The step of two prompts as StableHLO; nothing is allocated but tiny pools."""
    config = make_config(block, **options_of(block, CASE.kv_heads), dtype="bfloat16")
    mesh = mesh_of(config, CASE.sizes)
    geometry = model_geometry(config, mesh)
    layout = geometry.layout(mesh, num_pages=PAGES, tokens_per_page=16, dtype="bfloat16")
    backend = TritonBackend(kv_heads=layout.heads_per_shard(), target=target)
    model = MaxTextPagedModel(config, mesh, layout=layout, head_axes=geometry.head_axes, backend=backend)
    control = ControlPlane(layout, max_num_seqs=MAX_SEQS, max_model_len=64, token_ladder=token_ladder(8))
    slices = []
    for num_tokens in (5, 3):
        handle = control.open()
        assert handle is not None
        tokens = np.arange(1, 1 + num_tokens, dtype=np.int32)
        slices.append(RequestSlice(handle, 0, tokens, sample=SamplingSpec(temperature=0.0)))
    reservation = control.reserve(slices)
    assert reservation is not None
    inputs = build_step_inputs(control.plan(control.confirm_scrubbed(reservation)))
    program: Any = make_step_program(model, max_num_seqs=MAX_SEQS)
    previous = jax.device_put(np.zeros(MAX_SEQS, np.int32), NamedSharding(mesh, PartitionSpec()))
    arguments = (model.abstract_params, model.create_pools(), inputs, previous, run_key(None, mesh))
    return program.trace(*arguments).lower(lowering_platforms=(target.vendor,)).as_text()


@pytest.mark.parametrize(
    "name",
    [
        "cuda",
        "rocm",
        pytest.param("cuda-jax_triton", marks=pytest.mark.skipif(no_jax_triton is not None, reason=str(no_jax_triton))),
    ],
)
def test_a_step_on_eight_gpus_writes_its_pools_in_place_and_talks_nowhere_between(name: str) -> None:
    target = TARGETS[name]
    foreign = {"xla": XLA_TARGET, "jax_triton": JAX_TRITON_TARGET}[target.effective_route]
    check_in_place(lowered_step(target, "llama2"), foreign, **POOLS)


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
