"""The whole paged step of a tiny MaxText model on eight KV head shards, lowered for a GPU that this machine has not.

For:        ``tests/maxtext/test_triton_step.py``; as a program, for the one route that needs jax's CUDA lowering code,
            which stands beside the environment (``.venv/lowering``, see ``scripts/make-venv``).
Not for:    judging the program (stablehlo.py).
May import: numpy, jax, benchmarks, all rooms.

    PYTHONPATH=.venv/lowering python -m tests.lowered_step cuda-jax_triton llama2 [KV_DTYPE]
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.sharding import MeshCase, options_of
from kv_control.bucketing import token_ladder
from kv_control.control_plane import ControlPlane
from kv_control.plan import RequestSlice, SamplingSpec
from kv_execution.attention.triton_backend import TritonBackend
from kv_execution.attention.triton_bridge import GpuTarget
from kv_execution.logit_adjust import OptionTable
from kv_execution.packing import pack
from kv_execution.step import make_step_program
from kv_execution.step_inputs import build_step_inputs
from maxtext_paged.geometry import model_geometry
from maxtext_paged.model import MaxTextPagedModel
from maxtext_paged.session import run_key
from tests.tiny_models import make_config, mesh_of

PAGES, MAX_SEQS, DIM = 24, 4, 16
CASE = MeshCase({"tensor": 8}, 8)
POOLS = {"local_pool": f"tensor<{PAGES}x16x1x{DIM}xbf16>", "whole_pool": f"tensor<{PAGES}x16x8x{DIM}xbf16>"}
INT8_POOLS = {
    "local_pool": f"tensor<{PAGES}x16x1x{DIM}xi8>",
    "whole_pool": f"tensor<{PAGES}x16x8x{DIM}xi8>",
    "local_scales": f"tensor<{PAGES}x16x1x1xf32>",
    "whole_scales": f"tensor<{PAGES}x16x8x1xf32>",
}
TARGETS = {
    "cuda": GpuTarget("cuda", "90", 132, "xla"),
    "rocm": GpuTarget("rocm", "gfx942", 304, "xla"),
    "cuda-jax_triton": GpuTarget("cuda", "90", 132, "jax_triton"),
}
LOWERING = Path(sys.prefix) / "lowering"


@cache
def lowered_step(target: GpuTarget, block: str, kv_dtype: str = "bfloat16") -> str:
    """The step of two prompts as StableHLO; nothing is allocated but tiny pools."""
    config = make_config(block, **options_of(block, CASE.kv_heads), dtype="bfloat16")
    mesh = mesh_of(config, CASE.sizes)
    geometry = model_geometry(config, mesh)
    layout = geometry.layout(mesh, num_pages=PAGES, tokens_per_page=16, dtype=kv_dtype)
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
    buffer, packing = pack(build_step_inputs(control.plan(control.confirm_scrubbed(reservation))))
    params, pools = model.abstract_params, model.create_pools()
    program: Any = make_step_program(model, params=params, pools=pools, max_num_seqs=MAX_SEQS)
    previous = jax.device_put(np.zeros(MAX_SEQS, np.int32), NamedSharding(mesh, PartitionSpec()))
    options = OptionTable(max_num_seqs=MAX_SEQS, max_model_len=64, mesh=mesh).rows
    leaves = jax.tree.leaves(params), jax.tree.leaves(pools)
    arguments = (*leaves, buffer, previous, options, run_key(None, mesh), packing)
    return program.trace(*arguments).lower(lowering_platforms=(target.vendor,)).as_text()


def lowered_elsewhere(kv_dtype: str) -> str:
    """The step of the ``jax_triton`` route, lowered by this file as a program on eight virtual devices."""
    root = Path(__file__).parents[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(LOWERING)]), "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.lowered_step", "cuda-jax_triton", "llama2", kv_dtype]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


if __name__ == "__main__":
    print(lowered_step(TARGETS[sys.argv[1]], *sys.argv[2:]))
