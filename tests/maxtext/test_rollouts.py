"""The loop of a trainer: weights exchanged and pools given back between rollouts, and the sampler's numbers trusted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kv_common.errors import KvCacheError
from kv_execution.compile_events import CompileCounter
from maxtext_paged import OfflineEngine, SamplingParams
from tests.parity import log_softmax
from tests.tiny_models import DenseModel, dense_model, make_config, make_mesh, mesh_of

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]

PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8], [3, 1, 4, 1, 5, 9, 2, 6]]
PARAMS = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(engine_options: dict[str, Any]) -> Iterator[OfflineEngine]:
    config = make_config(**engine_options, paged_enable_prefix_cache=True)
    engine = OfflineEngine(config, params=dense_model().params, eos_ids=[], mesh=make_mesh(config))
    yield engine
    engine.close()


def tokens_of(engine: OfflineEngine) -> list[list[int]]:
    return [result.token_ids.tolist() for result in engine.generate(PROMPTS, PARAMS)]


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


def test_a_sleeping_engine_holds_no_pool_and_a_woken_one_gives_the_same_tokens_and_compiles_nothing(
    engine: OfflineEngine,
) -> None:
    before = tokens_of(engine)
    engine.sleep()
    engine.wake()
    assert tokens_of(engine) == before
    counter, held = CompileCounter(), live_bytes()
    freed = engine.sleep()
    assert engine.asleep and freed == engine.session.model.layout.total_pool_bytes() > 0
    assert held - live_bytes() >= freed, "the memory did come back"
    assert engine.sleep() == 0, "once is enough"
    engine.wake()
    engine.wake()
    assert live_bytes() >= held and not engine.asleep
    assert tokens_of(engine) == before
    assert counter.by_function() == {}, "nothing compiles"


def test_no_cached_page_outlives_a_sleep(engine: OfflineEngine) -> None:
    long = [list(range(3, 40))]
    engine.generate(long, PARAMS)
    [warm] = engine.generate(long, PARAMS)
    assert warm.usage.cached_tokens > 0, "the prefix cache is on"
    engine.sleep()
    engine.wake()
    [cold] = engine.generate(long, PARAMS)
    assert cold.usage.cached_tokens == 0
    assert cold.token_ids.tolist() == warm.token_ids.tolist()


def test_asleep_only_weights_are_taken_and_they_count_after_waking(engine: OfflineEngine) -> None:
    before = tokens_of(engine)
    other = DenseModel("llama2", seed=5)
    engine.sleep()
    try:
        for use in (
            lambda: engine.generate(PROMPTS, PARAMS),
            lambda: next(engine.stream(PROMPTS, PARAMS)),
            lambda: engine.batch_inference(PROMPTS),
        ):
            with pytest.raises(KvCacheError, match="asleep: wake"):
                use()
        engine.update_params(other.params)
    finally:
        engine.wake()
    try:
        assert tokens_of(engine) != before
        assert engine.logprob_gap(engine.generate(PROMPTS, PARAMS)).largest < 1e-3
    finally:
        engine.update_params(dense_model().params)
    assert tokens_of(engine) == before


def test_an_engine_with_requests_under_way_does_not_sleep(engine: OfflineEngine) -> None:
    with engine.stream([[3, 1]] * 12, SamplingParams(max_tokens=20, ignore_eos=True)) as results:
        next(results)
        with pytest.raises(KvCacheError, match="finish or cancel them before sleep"):
            engine.sleep()
    engine.sleep()
    engine.wake()


def test_the_gap_is_that_of_maxtexts_own_forward_and_stale_weights_show_in_it(engine: OfflineEngine) -> None:
    results = engine.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True, n=2))
    gap = engine.logprob_gap(results)
    assert gap.num_tokens == 2 * 8 * len(PROMPTS)
    expected = []
    for result in results:
        for sample in result.samples:
            tokens = np.concatenate([sample.prompt_token_ids, sample.token_ids])
            dense = log_softmax(dense_model().logits(tokens, pad_to=64))
            rows = np.arange(len(sample.prompt_token_ids) - 1, len(tokens) - 1)
            expected.append(np.abs(dense[rows, tokens[rows + 1]] - sample.logprobs).max())
    assert gap.largest == pytest.approx(max(expected), abs=1e-5) and gap.largest < 1e-4
    engine.update_params(DenseModel("llama2", seed=6).params)
    try:
        stale = engine.logprob_gap(results)
    finally:
        engine.update_params(dense_model().params)
    assert stale.largest > 0.01, "a rollout of other weights"
    assert stale.index is not None and stale.place is not None
    assert engine.logprob_gap([]).num_tokens == 0


def sharded_elsewhere(params: Any, mesh: Mesh) -> Any:
    """A trainer's tree on its own mesh: stacked layers, each array split along its longest axis that divides."""
    size = mesh.shape["fsdp"]

    def place(leaf: Any) -> jax.Array:
        axes = [axis for axis in range(leaf.ndim) if leaf.shape[axis] % size == 0]
        longest = max(axes, key=lambda axis: leaf.shape[axis], default=None)
        spec = [("fsdp" if axis == longest else None) for axis in range(leaf.ndim)]
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(place, params)


@pytest.mark.multi_device
def test_scanned_parameters_of_another_mesh_are_taken_again_and_again_without_compiling(
    engine_options: dict[str, Any],
) -> None:
    config = make_config(**engine_options, ici_tensor_parallelism=2)
    engine = OfflineEngine(config, params=dense_model().params, eos_ids=[], mesh=mesh_of(config, {"tensor": 2}))
    trainer = Mesh(np.array(jax.devices()[2:6]), ("fsdp",))
    policies = [DenseModel("llama2", seed=seed, scan_layers=True) for seed in (3, 4)]
    trees = [sharded_elsewhere(policy.params, trainer) for policy in policies]
    assert "layers" in policies[0].params["decoder"]
    tokens_of(engine)
    engine.update_params(trees[0])  # the first time, arrays are cut into layers by small programs
    counter = CompileCounter()
    for policy, tree in zip(policies[::-1], trees[::-1], strict=True):
        engine.sleep()
        engine.update_params(tree)
        engine.wake()
        results = engine.generate(PROMPTS, PARAMS)
        for result in results:
            tokens = np.concatenate([result.prompt_token_ids, result.token_ids])
            dense = log_softmax(policy.logits(tokens, pad_to=64))
            rows = np.arange(len(result.prompt_token_ids) - 1, len(tokens) - 1)
            np.testing.assert_allclose(result.logprobs, dense[rows, tokens[rows + 1]], atol=1e-3)
    compiled = {name: count for name, count in counter.by_function().items() if "step" in name or name != "_call"}
    assert "paged_step" not in compiled
    assert sum(compiled.values()) <= 1, compiled  # pools made for the first time by `wake`
    engine.close()
