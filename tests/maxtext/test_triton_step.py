"""The whole paged step of a MaxText model, lowered for GPUs on a machine that has none, eight KV head shards."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
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
from kv_execution.attention.triton_bridge import JAX_TRITON_TARGET, XLA_TARGET, GpuTarget, KernelLaunch, Launcher
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

PAGES, MAX_SEQS, DIM = 24, 4, 16
CASE = MeshCase({"tensor": 8}, 8)
LOCAL_POOL, WHOLE_POOL = f"tensor<{PAGES}x16x1x{DIM}xbf16>", f"tensor<{PAGES}x16x8x{DIM}xbf16>"
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "collective_", "reduce_scatter")
TARGETS = {
    "cuda": GpuTarget("cuda", "90", 132, "xla"),
    "rocm": GpuTarget("rocm", "gfx942", 304, "xla"),
    "cuda-jax_triton": GpuTarget("cuda", "90", 132, "jax_triton"),
}
no_jax_triton = triton_bridge.missing_cuda_plugin()


def lowered_step(target: GpuTarget, block: str, launcher: Launcher = triton_bridge.launch) -> str:
    """The step of two prompts as StableHLO; nothing is allocated but tiny pools."""
    config = make_config(block, **options_of(block, CASE.kv_heads), dtype="bfloat16")
    mesh = mesh_of(config, CASE.sizes)
    geometry = model_geometry(config, mesh)
    layout = geometry.layout(mesh, num_pages=PAGES, tokens_per_page=16, dtype="bfloat16")
    backend = TritonBackend(kv_heads=layout.heads_per_shard(), target=target, launcher=launcher)
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


@dataclass(frozen=True)
class Launched:
    """One custom call of StableHLO: its target, operands, results, and ``(result, operand)`` for each alias."""

    target: str
    operands: tuple[str, ...]
    result: str
    aliases: tuple[tuple[int, int], ...]


def launched(line: str) -> Launched:
    found = re.search(r"(%\w+)(?::\d+)? = stablehlo\.custom_call @([\w.$]+)\(([^)]*)\)", line)
    assert found is not None
    pairs = re.findall(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)", line)
    aliases = tuple((int(result or 0), int(operand)) for result, operand in pairs)
    return Launched(found[2], tuple(found[3].split(", ")), found[1], aliases)


def attention_regions(hlo: str) -> list[list[str]]:
    """Lines of each ``shard_map`` body, the one that opens it included."""
    regions, inside = [], False
    for line in hlo.splitlines():
        if "sdy.manual_computation" in line:
            inside = True
            regions.append([])
        if inside:
            regions[-1].append(line)
            inside = "sdy.return" not in line
    return regions


def check_in_place(hlo: str, target: str) -> None:
    """A layer's pools go from append to decode to attend to the way out, and nothing else touches them."""
    regions = attention_regions(hlo)
    assert len(regions) == 2, "one of each layer"
    for header, *body in regions:
        assert not [line for line in body if any(name in line for name in COLLECTIVES)]
        touching = [line for line in body if LOCAL_POOL in line]
        *calls, last = touching
        assert all("custom_call" in line for line in calls), "a pool is read or copied elsewhere"
        append, decode, attend = map(launched, calls)
        assert {append.target, decode.target, attend.target} == {target}
        assert len(re.findall(rf"(%arg\d+): {re.escape(LOCAL_POOL)}", header)) == 2
        pools = tuple(re.findall(rf"(%arg\d+): {re.escape(LOCAL_POOL)}", header))
        assert append.operands[3:] == pools and append.aliases == ((0, 3), (1, 4))
        written = (f"{append.result}#0", f"{append.result}#1")
        assert decode.operands[1:3] == attend.operands[1:3] == written
        assert decode.aliases == attend.aliases == ((0, 6),)
        assert attend.operands[6] == decode.result, "rows of one token and longer ones fill one output"
        assert f"sdy.return {attend.result}, {written[0]}, {written[1]} :" in last
    outside = [line for line in hlo.splitlines() if WHOLE_POOL in line and not re.match(r"\s*(}|return|func)", line)]
    assert all("sdy.manual_computation" in line for line in outside), "a whole pool is read or copied"
    [main] = [line for line in hlo.splitlines() if "func public @main" in line]
    donated = re.findall(rf"{re.escape(WHOLE_POOL)} {{[^%]*tf.aliasing_output = (\d+)", main)
    assert donated == ["0", "1", "2", "3"]


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
    check_in_place(lowered_step(target, "llama2"), foreign)


def test_a_copy_and_an_exchange_would_be_seen() -> None:
    """The control: the pools are touched, and queries averaged over the shards, before each launch."""

    def meddling(call: KernelLaunch, target: GpuTarget) -> tuple[jax.Array, ...]:
        query, *rest = call.inputs
        return triton_bridge.launch(replace(call, inputs=(jax.lax.pmean(query, "tensor"), *rest)), target)

    def copying(call: KernelLaunch, target: GpuTarget) -> tuple[jax.Array, ...]:
        return triton_bridge.launch(replace(call, in_place=[array * 1 for array in call.in_place]), target)

    for launcher in (meddling, copying):
        with pytest.raises(AssertionError):
            check_in_place(lowered_step(TARGETS["cuda"], "llama2", launcher), XLA_TARGET)
