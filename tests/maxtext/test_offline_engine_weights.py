"""Weights and neighbours: update_params, scanned parameters, two engines in one process, closing."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from kv_common.errors import ConfigError, KvCacheError
from kv_execution.compile_events import CompileCounter
from maxtext_paged import OfflineEngine, Row
from tests.completions import PROMPTS, as_request, assert_whole, token_lists
from tests.parity import assert_teacher_forced
from tests.tiny_models import DenseModel, dense_model, make_config, make_mesh

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]

OPTIONS: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def scanned() -> DenseModel:
    """MaxText's own scanned model with other weights: its parameters and its dense forward."""
    return DenseModel("llama2", seed=3, scan_layers=True)


@pytest.fixture(scope="module")
def scanned_engine(scanned: DenseModel, engine_options: dict[str, Any]) -> OfflineEngine:
    """An engine made with scanned parameters and a scanned configuration, of another shape than the shared one."""
    config = make_config(**{**engine_options, "paged_tokens_per_page": 4, "scan_layers": True})
    return OfflineEngine(config, params=scanned.params, eos_ids=[], mesh=make_mesh(config))


@pytest.mark.parametrize("kind", ["numpy", "jax", "state"])
def test_updated_weights_count_from_the_next_call_and_compile_no_step(
    offline_engine: OfflineEngine, scanned_engine: OfflineEngine, scanned: DenseModel, kind: str
) -> None:
    assert "layers" in scanned.params["decoder"], "this test is about stacked parameters"
    before = offline_engine.batch_inference(PROMPTS, **OPTIONS)
    given = {
        "numpy": lambda: scanned.params,
        "jax": lambda: jax.tree.map(jax.numpy.asarray, scanned.params),
        "state": lambda: scanned._params,
    }[kind]()
    counter = CompileCounter()
    try:
        offline_engine.update_params(given)
        after = offline_engine.batch_inference(PROMPTS, **OPTIONS)
        compiled = counter.by_function()
    finally:
        offline_engine.update_params(dense_model().params)
    if kind == "numpy":
        assert compiled == {}, "nothing compiles"
    assert "paged_step" not in compiled
    assert token_lists(after) != token_lists(before)
    assert token_lists(after) == token_lists(scanned_engine.batch_inference(PROMPTS, **OPTIONS)), "as a fresh engine's"
    assert_teacher_forced([as_request(output) for output in after], scanned, relative=2e-5)
    assert token_lists(offline_engine.batch_inference(PROMPTS, **OPTIONS)) == token_lists(before)


def test_params_are_the_weights_in_use(offline_engine: OfflineEngine) -> None:
    assert offline_engine.params is offline_engine.session.runtime.params
    held = offline_engine.params
    offline_engine.update_params(dense_model().params)
    assert offline_engine.params is not held
    assert offline_engine.params is offline_engine.session.runtime.params


def test_parameters_of_another_model_are_refused_and_change_nothing(offline_engine: OfflineEngine) -> None:
    before = offline_engine.batch_inference(PROMPTS[:1], **OPTIONS)
    broken = {**dense_model().params, "token_embedder": {"embedding": np.zeros((255, 64), np.float32)}}
    with pytest.raises(ConfigError, match="token_embedder"):
        offline_engine.update_params(broken)
    assert token_lists(offline_engine.batch_inference(PROMPTS[:1], **OPTIONS)) == token_lists(before)


def test_two_engines_in_one_process_do_not_disturb_each_other(
    offline_engine: OfflineEngine, scanned_engine: OfflineEngine, scanned: DenseModel
) -> None:
    """Other weights, other pages; calls interleave, and so do single rows."""
    for _ in range(2):
        ours = offline_engine.batch_inference(PROMPTS[:3], **OPTIONS)
        theirs = scanned_engine.batch_inference(PROMPTS, **OPTIONS)
        assert (len(ours), len(theirs)) == (3, 6)
        assert_whole([*ours, *theirs])
        assert_teacher_forced([as_request(output) for output in ours], dense_model(), relative=2e-5)
        assert_teacher_forced([as_request(output) for output in theirs], scanned, relative=2e-5)


def test_rows_of_two_engines_interleave_step_by_step(
    offline_engine: OfflineEngine, scanned_engine: OfflineEngine
) -> None:
    alone = [token_lists(engine.batch_inference(PROMPTS, **OPTIONS)) for engine in (offline_engine, scanned_engine)]
    rows = [Row(index=i, tokens=prompt, max_tokens=6, ignore_eos=True) for i, prompt in enumerate(PROMPTS)]
    streams = [engine.worker.complete(iter(rows)) for engine in (offline_engine, scanned_engine)]
    got: list[dict[int, list[int]]] = [{}, {}]
    for results in zip(*streams, strict=True):
        for mine, result in zip(got, results, strict=True):
            mine[result.row.index] = result.token_ids.tolist()
    assert [[mine[i] for i in range(len(PROMPTS))] for mine in got] == alone


def test_two_iterators_over_one_engine_get_their_own_rows(offline_engine: OfflineEngine) -> None:
    alone = token_lists(offline_engine.batch_inference(PROMPTS, **OPTIONS))
    rows = [Row(index=i, tokens=prompt, max_tokens=6, ignore_eos=True) for i, prompt in enumerate(PROMPTS)]
    worker = offline_engine.worker
    first, second = worker.complete(rows[:3]), worker.complete(rows[3:])
    got = {next(second).row.index, next(first).row.index}
    results = [*first, *second]
    assert len(got) == 2 and sorted([*got, *(result.row.index for result in results)]) == [0, 1, 2, 3, 4, 5]
    assert all(result.token_ids.tolist() == alone[result.row.index] for result in results)


def test_a_closed_engine_gives_its_pool_back_and_says_so(engine_options: dict[str, Any]) -> None:
    config = make_config(**engine_options)
    params = dense_model().params
    engine = OfflineEngine(config, params=params, eos_ids=[], mesh=make_mesh(config))
    pools = jax.tree.leaves(engine.session.runtime.pools)
    weights = jax.tree.leaves(nnx.to_pure_dict(engine.params))
    assert not any(leaf.is_deleted() for leaf in pools)
    engine.close()
    engine.close()
    assert all(leaf.is_deleted() for leaf in pools)
    assert not any(leaf.is_deleted() for leaf in weights), "they may be the caller's"
    for use in (lambda: engine.batch_inference([[3]]), lambda: engine.update_params(params)):
        with pytest.raises(KvCacheError, match="closed"):
            use()
