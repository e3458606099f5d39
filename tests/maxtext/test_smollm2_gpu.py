"""SmolLM2-135M on a GPU: fused split-KV, whole rows and the gather give dense's tokens; pools stay where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from maxtext.configs import pyconfig

from benchmarks.sharding import addresses
from kv_execution.attention import triton_bridge
from maxtext_paged.config import PagedMaxTextConfig
from maxtext_paged.session import PagedSession, open_session
from tests.maxtext.test_smollm2_paged import (
    LOGIT_ERROR,
    OPTIONS,
    RECORDS,
    TIE,
    Dense,
    dense,
    directory,
    requests_of_the_records,
    run,
)
from tests.parity import assert_teacher_forced

__all__ = ["dense", "directory"]
not_here = triton_bridge.missing()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.maxtext,
    pytest.mark.skipif(not_here is not None, reason=str(not_here)),
    pytest.mark.usefixtures("gpu_device"),
]

NEVER = 1 << 30
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "fused": ("fused", {"paged_backend": "triton", "paged_attention_native": 1}),
    "whole": (
        "gather",
        {
            "paged_backend": "triton",
            "paged_split_kv_min_tokens": NEVER,
            "paged_split_kv_min_tokens_per_request": NEVER,
        },
    ),
    "gather": ("gather", {"paged_backend": "reference"}),
}
"""What becomes of decode rows, and the options that make it so."""


@pytest.fixture(autouse=True, scope="module")
def exact_products() -> Iterator[None]:
    """float32 products of GPUs round their factors to 10 bits unless told not to."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module", params=ARMS)
def arm(request: pytest.FixtureRequest, directory: Path) -> tuple[str, PagedSession]:
    kind, chosen = ARMS[request.param]
    options = {**OPTIONS, **chosen, "hardware": "gpu", "log_config": "false", "base_output_directory": "unused"}
    arguments = ["test", str(directory / "config.yml"), "run_name=t", *(f"{key}={x}" for key, x in options.items())]
    return kind, open_session(pyconfig.initialize(arguments, config_class=PagedMaxTextConfig))


def test_greedy_tokens_and_logprobs_are_denses_and_pools_stay_where_they_are(
    arm: tuple[str, PagedSession], dense: Dense
) -> None:
    kind, session = arm
    before = addresses(session.runtime.pools)
    session.reset_prefix_cache()
    requests = run(session.driver, requests_of_the_records())
    assert addresses(session.runtime.pools) == before
    assert set(session.runtime.metrics().decodes_by_kind) == {kind}
    for request, record in zip(requests, RECORDS, strict=False):
        new = request.tokens[len(record["prompt"]) :].tolist()
        different = [i for i, (got, want) in enumerate(zip(new, record["new"], strict=True)) if got != want]
        assert not different or record["margins"][different[0]] < TIE, (record["name"], different)
    worst = assert_teacher_forced(requests, dense, relative=LOGIT_ERROR, pad_to=96)
    print(f"{session.backend.name}, {kind}: worst |logprob - dense| {worst:.2e}")
