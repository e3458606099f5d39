"""The prefix cache under MaxText's models: warm equals cold, wherever its pages come from."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from kv_control.plan import RequestId, SamplingSpec
from kv_control.request import Request
from maxtext_paged.session import PagedSession, open_session
from tests.parity import assert_teacher_forced
from tests.tiny_models import dense_model, make_config, make_mesh

pytestmark = pytest.mark.maxtext

PREFIX = np.random.default_rng(5).integers(1, 255, 24)
"""Three pages of eight tokens."""


def session(block: str = "llama2", devices: int = 1, **overrides: Any) -> PagedSession:
    options = {
        "paged_tokens_per_page": 8,
        "paged_num_pages": 40,
        "paged_max_num_seqs": 8,
        "paged_max_num_batched_tokens": 32,
        "paged_enable_prefix_cache": True,
        "paged_check_invariants": True,
        "paged_poison_on_free": True,
        **overrides,
    }
    config = make_config(block, **options)
    return open_session(config, mesh=make_mesh(config, jax.devices()[:devices]), params=dense_model(block).params)


def run(engine: PagedSession, requests: list[Request], *, at_most: int | None = None) -> list[Request]:
    for request in requests:
        engine.driver.submit(request)
    assert len(list(engine.driver.run())) == len(requests)
    metrics = engine.runtime.metrics().control
    assert metrics.num_leaked_pages == 0 and metrics.num_held_pages == 0
    return requests


def rows(n: int, *, first_id: int = 0, own: int = 5, new: int = 12, **options: Any) -> list[Request]:
    """Prompts that share PREFIX and go on differently; the same for the same ids modulo 100."""
    return [
        Request(
            RequestId(first_id + i),
            np.concatenate([PREFIX, np.random.default_rng(i).integers(1, 255, own)]),
            max_tokens=new,
            **options,
        )
        for i in range(n)
    ]


@pytest.fixture(
    scope="module",
    params=[
        "llama2",
        pytest.param("gemma2", marks=pytest.mark.slow),
        pytest.param("gpt_oss", marks=pytest.mark.long),
    ],
)
def block(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(block: str) -> PagedSession:
    return session(block)


def test_a_warm_run_is_teacher_forced_equal_to_dense_and_its_tokens_are_the_cold_ones(engine, block):  # CASES 43
    engine.reset_prefix_cache()
    cold = run(engine, rows(1) + rows(4, first_id=10)[1:])
    warm = run(engine, rows(4, first_id=100))
    assert [request.num_cached_tokens for request in warm] == [24] * 4
    assert_teacher_forced([*cold, *warm], dense_model(block), relative=2e-5)
    assert [one.tokens.tolist() for one in cold] == [other.tokens.tolist() for other in warm]


def test_prompt_logprobs_from_the_cache_are_those_of_dense(engine, block):  # CASES 87
    engine.reset_prefix_cache()
    run(engine, rows(1, want_prompt_logprobs=True))
    again = run(engine, rows(3, first_id=100, want_prompt_logprobs=True))
    assert [request.num_cached_tokens for request in again] == [16] * 3  # the third page again, for what follows it
    assert_teacher_forced(again, dense_model(block), relative=2e-5)


@pytest.mark.slow
def test_preempted_requests_that_had_a_hit_and_chunks_and_evictions_change_no_token(block):  # CASES 61
    small = session(block, paged_num_pages=9, paged_max_num_seqs=4, paged_prefill_chunk_tokens=7)
    requests = run(small, rows(6, new=30))
    metrics = small.runtime.metrics().control
    assert metrics.num_preemptions and metrics.num_evictions and metrics.num_cached_tokens
    assert_teacher_forced(requests, dense_model(block), relative=2e-5)


def test_samples_of_one_prompt_share_its_pages_and_each_is_what_it_would_be_alone(engine, block):
    engine.reset_prefix_cache()
    prompt = rows(1)[0].prompt
    spec = {"temperature": 1.0, "seed": 7}

    def sample(i: int, group: int | None, first_id: int) -> Request:
        sampling = SamplingSpec(sample_index=i, **spec)
        return Request(RequestId(first_id + i), prompt, sampling=sampling, max_tokens=10, group=group)

    together = run(engine, [sample(i, 1, 0) for i in range(4)])
    alone = []
    for i in range(4):
        engine.reset_prefix_cache()
        alone += run(engine, [sample(i, None, 100)])
    assert [request.num_shared_tokens for request in together] == [0, 28, 28, 28]
    assert [r.tokens.tolist() for r in together] == [r.tokens.tolist() for r in alone]
    assert len({tuple(r.tokens.tolist()) for r in together}) == 4
    num_groups = 1 + len(tuple(engine.control.windows))
    assert engine.runtime.metrics().num_copied_pages == 3 * num_groups


def test_new_weights_find_no_page_of_the_old_ones():  # CASES 33, 41
    engine = session()
    run(engine, rows(2))
    before = engine.control.prefix_namespace
    other = jax.tree.map(lambda leaf: np.asarray(leaf) * 1.01, dense_model().params)
    engine.update_params(other)
    assert engine.control.prefix_namespace != before
    again = run(engine, rows(2, first_id=100))
    assert [request.num_cached_tokens for request in again] == [0, 24]
    engine.update_params(dense_model().params)  # the same weights again are a new revision all the same
    assert engine.control.prefix_namespace not in (before, None)
    assert engine.reset_prefix_cache() == 0


@pytest.mark.slow
def test_nothing_compiles_once_a_warmed_engine_shares_forks_evicts_and_preempts():
    engine = session(paged_num_pages=12, paged_max_num_seqs=4, paged_tokens_per_page=7)
    engine.runtime.warm_up()
    before = engine.runtime.metrics().num_compile_events
    group = [Request(RequestId(50 + i), PREFIX, max_tokens=9, group=3) for i in range(3)]
    run(engine, rows(6, new=30) + group)
    metrics = engine.runtime.metrics()
    assert metrics.control.num_preemptions and metrics.num_copied_pages and metrics.control.num_evictions
    assert metrics.num_compile_events == before


@pytest.mark.slow
@pytest.mark.multi_device
def test_sharing_on_shards_is_sharing_on_one_device_and_pools_stay_where_they_are() -> None:
    engine = session(devices=4, ici_tensor_parallelism=2, ici_fsdp_parallelism=2, paged_num_pages=12)

    def addresses() -> list[int]:
        leaves = jax.tree.leaves(engine.runtime.pools)
        return [shard.data.unsafe_buffer_pointer() for leaf in leaves for shard in leaf.addressable_shards]

    before = addresses()
    group = [Request(RequestId(50 + i), PREFIX, max_tokens=9, group=3) for i in range(3)]
    requests = run(engine, rows(6, new=30, want_prompt_logprobs=True) + group)
    metrics = engine.runtime.metrics()
    assert metrics.control.num_cached_tokens and metrics.control.num_evictions and metrics.num_copied_pages
    assert_teacher_forced(requests, dense_model(), relative=2e-5)
    assert addresses() == before, "scrubs, copies and steps all reuse the donated pools"
    assert metrics.compiled["paged_step"] == len(metrics.steps_by_rung), "outputs re-enter as they left"
