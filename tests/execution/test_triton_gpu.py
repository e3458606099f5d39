"""The Triton kernels keep every backend's promises on a device, in the element types that devices run."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from kv_execution.attention import triton_bridge
from kv_execution.attention.triton_backend import TritonBackend
from kv_execution.dispatch import SplitFloors
from tests.execution.conformance import BackendConformance
from tests.execution.numpy_model import UNIT_ROUNDOFF, float32_bound
from tests.execution.numpy_quantised import DTYPES, numbers
from tests.execution.paged_steps import PLAIN, expected, make_request, make_step, rounded, run
from tests.execution.quantised_steps import as_read, run_quantised

not_here = triton_bridge.missing()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not_here is not None, reason=str(not_here)),
    pytest.mark.usefixtures("gpu_device"),
]


class TestTritonOnDevice(BackendConformance):
    backend = TritonBackend()
    head_dim = 64
    head_dims = (64, 80, 96, 128, 256)
    test_sharded_heads_equal_dense_attention = None  # multi_device: needs eight GPUs


class TestTritonOnDeviceWithoutCuts(TestTritonOnDevice):
    backend = TritonBackend(floors=SplitFloors(1 << 40, 1 << 40))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (8, 1), (40, 2)])
def test_half_precision_equals_dense_attention_rounded_once(gpu_device, dtype, dim, heads, kv_heads):
    """Tensor cores add products in float32 and weights come in two parts: past one rounding, float32's own bound."""
    rng = np.random.default_rng(6)
    pairs = [(2100, 1), (300, 1), (64, 1), (1, 1), (275, 150)]
    requests = [make_request(rng, *pair, heads=heads, kv_heads=kv_heads, dim=dim) for pair in pairs]
    step = make_step(rounded(requests, dtype), page_size=32)
    options = replace(PLAIN, scale=dim**-0.5)
    output = run(TritonBackend(), step, options, dtype=dtype, activations=dtype)
    for i, request in enumerate(step.requests):
        wanted = expected(request, options)
        bound = float32_bound(request.query, request.key, request.value, options.scale)
        assert (np.abs(output[step.rows(i)] - wanted) - UNIT_ROUNDOFF[dtype] * np.abs(wanted)).max() <= bound


def test_the_device_is_read_as_it_is(gpu_device):
    target = triton_bridge.local_target()
    assert target.vendor == ("rocm" if "AMD" in gpu_device.device_kind else "cuda")
    assert target.num_sms == gpu_device.core_count > 1
    assert target.arch.startswith("gfx") if target.vendor == "rocm" else target.arch.isdigit()
    assert jax.default_backend() == "gpu"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activations", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_quantised_pools_equal_dense_attention_over_what_they_hold(gpu_device, dtype, activations, dim):
    """All but the last token were stored by the numpy model; that one's bits are read back from the device's pools."""
    rng = np.random.default_rng(8)
    requests = [make_request(rng, n, 1, heads=8, kv_heads=2, dim=dim) for n in (2100, 300, 64, 1)]
    step, options = make_step(rounded(requests, activations), page_size=32), replace(PLAIN, scale=dim**-0.5)
    output, *pools = run_quantised(TritonBackend(), step, dtype, options, activations=activations)
    slots = [numbers(np.asarray(pool.values), np.asarray(pool.scales)).reshape(-1, 2, dim) for pool in pools]
    for i, request in enumerate(as_read(step, dtype).requests):
        written = int(step.table.slot_mapping[step.rows(i)][0])
        request.key[-1], request.value[-1] = (held[written] for held in slots)
        wanted = expected(request, options)
        bound = float32_bound(request.query, request.key, request.value, options.scale)
        if activations != "float32":
            bound = bound + UNIT_ROUNDOFF[activations] * np.abs(wanted) + 2.0**-16 * np.abs(request.value).max()
        assert (np.abs(output[step.rows(i)] - wanted) <= bound).all()
