"""The GPU benchmark as far as a CPU runs it: it says that there is no GPU, and finds an arm that ran another kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from benchmarks import attention, attention_gpu
from benchmarks.attention_gpu import WrongKernel, check_arm, measure, tables
from kv_execution.attention import triton_bridge
from kv_execution.attention.reference import ReferenceBackend
from kv_execution.attention.triton_backend import TritonBackend
from kv_execution.attention.triton_bridge import GpuTarget
from kv_execution.metadata import PageMetadata

not_here = triton_bridge.missing(route="xla")


def test_without_a_gpu_it_says_so_and_leaves_with_2(capsys):
    assert attention.main(["--device", "gpu"]) == 2
    assert "no GPU" in capsys.readouterr().err


def lowered(backend, platform: str) -> str:
    [table, *_], num_pages = tables(32, 2, token_bytes=1 << 28)
    pool = jnp.zeros((num_pages, 16, 2, 64), jnp.bfloat16)
    query, pages = jnp.zeros((2, 4, 64), jnp.bfloat16), PageMetadata.from_table(table)
    options = {"scale": 1.0, "sliding_window": None, "soft_cap": None, "sinks": None}
    traced = jax.jit(lambda q, pool, pages: backend.decode(q, pool, pool, pages, **options)).trace(query, pool, pages)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.skipif(not_here is not None, reason=str(not_here))
def test_an_arm_that_runs_another_kernel_than_its_own_is_found():
    ours = lowered(TritonBackend(target=GpuTarget("cuda", "90", 132, "xla")), "cuda")
    plain = lowered(ReferenceBackend(), "cuda")
    check_arm("triton", ours)
    check_arm("triton-whole", ours)
    check_arm("reference", plain)
    for arm, program in [("reference", ours), ("triton", plain), ("triton-whole", plain), ("pallas", plain)]:
        with pytest.raises(WrongKernel, match=f"{arm}: its program calls"):
            check_arm(arm, program)


def test_a_cell_counts_the_bytes_of_visible_keys_values_queries_and_outputs(monkeypatch):
    monkeypatch.setattr(attention_gpu, "COLD_BYTES", 0)
    monkeypatch.setattr(attention_gpu, "CALLS", 2)
    [cell] = measure("9/3x64", "float32", 40, 3, copy=2.0, budget=0.0, arms=["reference"])
    moved = 3 * (40 * 2 * 3 * 64 + 2 * 9 * 64) * 4
    assert cell.gigabytes_per_second == pytest.approx(moved / cell.seconds / 1e9)
    assert cell.share_of_copy == pytest.approx(cell.gigabytes_per_second / 2.0)
    assert "the jnp reference" in cell.dispatch
