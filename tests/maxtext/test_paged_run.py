"""Whole runs over MaxText's tiny models: teacher-forced against dense, alone against in company."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from kv_common.errors import KvCacheError
from kv_control.plan import RequestId, SamplingSpec
from kv_control.request import Request
from kv_control.scheduler import Scheduler, max_steps
from kv_execution.driver import PagedDriver
from maxtext_paged.session import PagedSession, open_session
from tests.parity import assert_teacher_forced
from tests.tiny_models import dense_model, make_config, make_mesh

pytestmark = pytest.mark.maxtext

SIZES = [(3, 20), (17, 12), (30, 9), (8, 8), (1, 25), (23, 15), (16, 16), (9, 4)]
"""Prompt and completion lengths; with 8 tokens a page most contexts cross at least four pages."""

GROWING = [(3, 30), (5, 30), (4, 28), (6, 26), (2, 33), (9, 24)]
"""Short prompts and long completions: admitted together, they outgrow a small pool."""


def session(block: str = "llama2", devices: int = 1, **overrides: Any) -> PagedSession:
    options = {
        "paged_tokens_per_page": 8,
        "paged_num_pages": 64,
        "paged_max_num_seqs": 8,
        "paged_max_num_batched_tokens": 64,
        "paged_check_invariants": True,
        "paged_poison_on_free": True,
        **overrides,
    }
    config = make_config(block, **options)
    return open_session(config, mesh=make_mesh(config, jax.devices()[:devices]), params=dense_model(block).params)


def run(
    engine: PagedSession,
    sizes: list[tuple[int, int]],
    only: int | None = None,
    chunk: int | None = None,
    **options: Any,
) -> list[Request]:
    """Run requests on an engine; with ``chunk`` under another scheduler over the same runtime."""
    rng = np.random.default_rng(0)
    requests = [
        Request(RequestId(i), rng.integers(1, 255, prompt), max_tokens=new, want_prompt_logprobs=True, **options)
        for i, (prompt, new) in enumerate(sizes)
    ]
    if only is not None:
        requests = [requests[only]]
    driver = engine.driver
    if chunk is not None:
        limits = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 64}
        scheduler = Scheduler(
            engine.control, **limits, prefill_chunk_tokens=chunk or None, release=engine.runtime.release
        )
        driver = PagedDriver(engine.runtime, scheduler, check=True)
    for request in requests:
        driver.submit(request)
    assert len(list(driver.run())) == len(requests)
    assert engine.control.num_free_pages == engine.control.num_pages
    return requests


@pytest.fixture(scope="module")
def engine() -> PagedSession:
    """The engine of all tests that do not need a pool of their own."""
    return session()


@pytest.fixture(scope="module")
def small_pool() -> PagedSession:
    """An engine whose pool must preempt: 7 pages, one request needs up to 5."""
    return session(paged_num_pages=7)


@pytest.fixture(scope="module")
def alone(engine: PagedSession) -> list[Request]:
    return [run(engine, SIZES, only=i)[0] for i in range(len(SIZES))]


def assert_same(got: list[Request], expected: list[Request]) -> None:
    """Same tokens up to ties: the first difference, if any, must be one that dense calls a tie."""
    dense = dense_model()
    for request, reference in zip(got, expected, strict=True):
        assert request.num_generated == reference.num_generated
        different = np.flatnonzero(request.tokens != reference.tokens)
        if len(different):
            at = int(different[0])
            logits = dense.logits(request.tokens[:at], pad_to=64)[-1]
            margin = abs(float(logits[request.tokens[at]] - logits[reference.tokens[at]]))
            assert margin <= 4e-5 * np.abs(logits).max(), f"request {request.id} differs at {at} by {margin}"


@pytest.mark.parametrize(
    "block",
    [
        "llama2",
        pytest.param("gemma2", marks=pytest.mark.slow),
        pytest.param("qwen3", marks=pytest.mark.long),
        pytest.param("gpt_oss", marks=pytest.mark.long),
    ],
)
def test_every_token_is_the_dense_models_argmax(block: str, engine: PagedSession) -> None:
    requests = run(engine if block == "llama2" else session(block), SIZES)
    worst = assert_teacher_forced(requests, dense_model(block), relative=2e-5)
    print(f"{block}: worst |logprob - dense| {worst:.2e}")


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_requests_at_once_give_the_tokens_they_give_alone(
    count: int, engine: PagedSession, alone: list[Request]
) -> None:
    assert_same(run(engine, SIZES[:count]), alone[:count])


@pytest.mark.parametrize("chunk", [1, 7, 16, 0])
def test_chunk_sizes_give_the_same_tokens(chunk: int, engine: PagedSession, alone: list[Request]) -> None:
    assert_same(run(engine, SIZES, chunk=chunk), alone)


@pytest.mark.slow
def test_a_pool_that_must_preempt_gives_the_same_tokens_in_bounded_steps(
    small_pool: PagedSession, engine: PagedSession
) -> None:
    alone = [run(engine, GROWING, only=i)[0] for i in range(len(GROWING))]
    before = replace(small_pool.driver.metrics)
    requests = run(small_pool, GROWING)
    after = small_pool.driver.metrics
    assert after.num_preemptions > before.num_preemptions
    assert after.num_preemptions - before.num_preemptions == sum(request.num_preemptions for request in requests)
    assert after.num_steps - before.num_steps <= max_steps(requests)
    assert_same(requests, alone)
    assert_teacher_forced(requests, dense_model(), relative=2e-5)


def test_seeded_rows_do_not_depend_on_their_company(engine: PagedSession, small_pool: PagedSession) -> None:
    spec = SamplingSpec(temperature=1.0, top_k=50, top_p=0.95, seed=11)
    together = run(small_pool, GROWING, chunk=5, sampling=spec)
    assert sum(request.num_preemptions for request in together) > 0
    assert len({tuple(request.tokens[-4:].tolist()) for request in together}) == len(GROWING)
    for i in range(len(GROWING)):
        [request] = run(engine, GROWING, only=i, sampling=spec)
        assert request.tokens.tolist() == together[i].tokens.tolist()


@pytest.mark.slow
def test_a_churn_of_24_requests_compiles_nothing_after_at_most_7_warmed_forward_programs() -> None:
    engine = session(paged_num_pages=10)
    engine.runtime.warm_up()
    warmed = engine.runtime.metrics().compiled
    assert warmed["paged_step"] == len(engine.control.token_ladder.rungs) <= 9
    rng = np.random.default_rng(5)
    sizes = [(int(rng.integers(1, 16)), int(rng.integers(10, 40))) for _ in range(24)]
    sizes[:2] = [(40, 5), (20, 9)]
    run(engine, sizes)
    run(engine, sizes, sampling=SamplingSpec(temperature=0.7, top_k=5))
    assert engine.driver.metrics.num_preemptions > 0
    assert engine.runtime.metrics().compiled == warmed
    assert engine.runtime.metrics().num_scrubbed_pages > 0


def test_updated_weights_take_effect_and_compile_nothing(engine: PagedSession) -> None:
    before = [request.tokens.tolist() for request in run(engine, SIZES[:2])]
    compiled = engine.runtime.metrics().compiled
    changed = jax.tree.map(lambda leaf: np.flip(leaf, axis=0).copy(), dense_model().params)
    engine.update_params(changed)
    after = run(engine, SIZES[:2])
    assert [request.tokens.tolist() for request in after] != before
    assert engine.runtime.metrics().compiled == compiled
    engine.update_params(dense_model().params)
    assert [request.tokens.tolist() for request in run(engine, SIZES[:2])] == before


def test_weights_cannot_change_under_a_request_that_is_under_way(engine: PagedSession) -> None:
    """Half of its K/V would be the old weights' and half the new: the output of neither model."""
    request = Request(RequestId(1), np.array([5, 6, 7]), max_tokens=9)
    engine.driver.submit(request)
    engine.driver.step()
    with pytest.raises(KvCacheError, match="1 requests run and 0 wait"):
        engine.update_params(dense_model().params)
    engine.driver.cancel(request.id)
    engine.update_params(dense_model().params)


@pytest.mark.slow
@pytest.mark.multi_device
def test_a_run_at_tensor_2_times_fsdp_2_is_the_dense_models(block: str = "llama2") -> None:
    """With preemptions; test_sharded_runs.py has other models and meshes."""
    limits = {"paged_num_pages": 9, "paged_max_num_batched_tokens": 16}  # two rungs
    engine = session(block, devices=4, ici_tensor_parallelism=2, ici_fsdp_parallelism=2, **limits)
    requests = run(engine, GROWING)
    assert engine.driver.metrics.num_preemptions > 0
    assert_teacher_forced(requests, dense_model(block), relative=2e-5)
    compiled = engine.runtime.metrics()
    assert compiled.compiled["paged_step"] == len(compiled.steps_by_rung), "outputs re-enter as they left"
