"""The whole paged step of a MaxText model, lowered for GPUs on a machine that has none, eight KV head shards."""

from __future__ import annotations

import re
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
from tests.tiny_models import make_config, mesh_of

not_here = triton_bridge.missing(route="xla")
pytestmark = [
    pytest.mark.maxtext,
    pytest.mark.multi_device,
    pytest.mark.skipif(not_here is not None, reason=str(not_here)),
]

LAYERS, PAGES, MAX_SEQS = 2, 24, 4
CASE = MeshCase({"tensor": 8}, 8)
COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "collective_permute",
    "reduce_scatter",
    "sdy.all",
    "sharding_constraint",
)
H100, MI300X = GpuTarget("cuda", "90", 132, "xla"), GpuTarget("rocm", "gfx942", 304, "xla")


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


if __name__ == "__main__":
    open("/tmp/t/step.txt", "w").write(lowered_step(H100, "llama2"))
