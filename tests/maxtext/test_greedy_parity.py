"""Greedy tokens are the same through fused native kernels and through the jnp reference, and each arm ran its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.parity import Arm, ParityError, check_parity, compare, mixed_prompts
from kv_execution.native.library import LaunchCounts, native_available
from tests.tiny_models import dense_model, make_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.maxtext,
    pytest.mark.skipif(native_available() is not None, reason=str(native_available())),
]


@pytest.mark.parametrize("block", ["llama2", pytest.param("gemma2", marks=pytest.mark.long)])
def test_fused_and_gathered_decodes_choose_the_same_tokens(block: str) -> None:
    def config(options: Mapping[str, Any]) -> Any:
        shape = {"max_target_length": 160, "paged_max_num_seqs": 4, "paged_max_num_batched_tokens": 64}
        return make_config(block, **shape, **options)

    prompts = mixed_prompts(300, 4, 256)
    fused, gather = compare(config, prompts, 32, params=dense_model(block).params)
    assert [len(tokens) for tokens in fused.tokens] == [32] * 4
    assert fused.tokens == gather.tokens
    assert fused.launches.fused == fused.expected_launches > 0
    assert set(gather.decodes) == {"gather"}


def test_prompts_differ_in_length_and_sum_to_what_was_asked() -> None:
    lengths = [len(prompt) for prompt in mixed_prompts(8192, 4, 1000)]
    assert (sum(lengths), len(set(lengths))) == (8192, 4)


def test_the_harness_fails_for_each_reason_it_exists() -> None:
    """The control: a null result must not pass for parity."""
    idle, busy = LaunchCounts(0, 0, 0, 0, 0, 0), LaunchCounts(6, 0, 6, 0, 4, 0)
    fused = Arm("native", [[1, 2]], {"fused": 3}, busy, 6, 0.1, 0.0, 1.0)
    gather = Arm("reference", [[1, 2]], {"gather": 3}, idle, 6, 0.1, 0.0, 1.0)
    check_parity(fused, gather)
    for wrong_fused, wrong_gather, why in (
        (replace(fused, tokens=[[1, 3]]), gather, "request 0 differs from generated token 1: 3 and 2"),
        (replace(fused, launches=idle), gather, "the fused arm launched"),
        (replace(fused, launches=replace(busy, whole=1)), gather, "the fused arm launched"),
        (replace(fused, decodes={"fused": 2, "gather": 1}), gather, "the fused arm launched"),
        (fused, replace(gather, launches=busy), "the gather arm ran native kernels"),
    ):
        with pytest.raises(ParityError, match=why):
            check_parity(wrong_fused, wrong_gather)
