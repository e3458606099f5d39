"""What a configuration says of decodes reaches the kernels and the host's account of them alike."""

from __future__ import annotations

import pytest

from kv_execution.attention.native import NativeBackend, native_threads
from kv_execution.dispatch import MEASURED_FLOORS, SplitFloors
from kv_execution.native.library import native_available
from kv_execution.split_plan import SplitPlanCache
from maxtext_paged.assembly import PagedAssembly, assemble
from tests.tiny_models import make_config, make_mesh

pytestmark = [
    pytest.mark.maxtext,
    pytest.mark.skipif(native_available() is not None, reason=str(native_available())),
]


def assembled(**options: object) -> PagedAssembly:
    config = make_config(max_target_length=64, **options)
    return assemble(config, mesh=make_mesh(config))


def test_plans_are_for_xla_s_threads_and_the_pools_own_pages():
    assembly = assembled(paged_tokens_per_page=8)
    assert assembly.decode.plans == SplitPlanCache(native_threads(), 8)


@pytest.mark.parametrize(
    ("options", "floors"),
    [
        ({}, MEASURED_FLOORS["cpu"]),
        ({"paged_split_kv_min_tokens": 7}, SplitFloors(7, MEASURED_FLOORS["cpu"].min_tokens_per_request)),
        ({"paged_split_kv_min_tokens": 0, "paged_split_kv_min_tokens_per_request": 9}, SplitFloors(0, 9)),
    ],
    ids=["the device's", "one given", "both given"],
)
def test_floors_are_the_options_or_the_devices_in_the_kernels_and_on_the_host(options, floors):
    assembly = assembled(**options)
    backend = assembly.backend.backend
    assert assembly.decode.floors == floors
    assert isinstance(backend, NativeBackend)
    assert (backend.split_min_tokens, backend.split_min_tokens_per_request) == (
        floors.min_tokens,
        floors.min_tokens_per_request,
    )
