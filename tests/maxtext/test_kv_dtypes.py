"""MaxText's model on pools of every dtype: a hit is a miss, and batches, preemptions and forks change no token."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from kv_common.errors import UnsupportedError
from kv_control.plan import RequestId, SamplingSpec
from kv_control.request import Request
from kv_execution.native.library import native_available
from maxtext_paged.assembly import assemble
from maxtext_paged.session import PagedSession, open_session
from tests.parity import assert_teacher_forced
from tests.tiny_models import dense_model, make_config, make_mesh

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]

PREFIX = np.random.default_rng(5).integers(1, 255, 24)
"""Three pages of eight tokens."""

ERROR = {"bfloat16": 0.004, "int8": 0.008, "float8_e4m3fn": 0.04}
"""Bound on a logit's error, as a share of the largest |logit|: once or twice what storing may move a number."""

OPTIONS = {
    "paged_tokens_per_page": 8,
    "paged_num_pages": 15,
    "paged_max_num_seqs": 4,
    "paged_max_num_batched_tokens": 8,
    "paged_enable_prefix_cache": True,
    "paged_check_invariants": True,
    "paged_poison_on_free": True,
}
"""A step is one page of a prompt; the pool holds two requests of this file and a half."""


def config_of(dtype: str, **overrides: Any) -> Any:
    return make_config(**{**OPTIONS, "paged_kv_dtype": dtype, **overrides})


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("native", "bfloat16"), id="native-bfloat16", marks=pytest.mark.long),
        pytest.param(("native", "int8"), id="native-int8"),
        pytest.param(("native", "float8_e4m3fn"), id="native-float8_e4m3fn"),
        pytest.param(("reference", "int8"), id="reference-int8", marks=pytest.mark.long),
    ],
)
def engine(request: pytest.FixtureRequest) -> Iterator[PagedSession]:
    backend, dtype = request.param
    if backend == "native" and native_available() is not None:
        pytest.skip(str(native_available()))
    config = config_of(dtype, paged_backend=backend)
    session = open_session(config, mesh=make_mesh(config, jax.devices()[:1]), params=dense_model().params)
    yield session
    session.close()


def run(engine: PagedSession, requests: list[Request]) -> list[Request]:
    for request in requests:
        engine.driver.submit(request)
    assert len(list(engine.driver.run())) == len(requests)
    assert engine.runtime.metrics().control.num_leaked_pages == 0
    return requests


def prompts(n: int, *, first_id: int = 0, new: int = 9, **options: Any) -> list[Request]:
    """PREFIX and five tokens of each one's own; equal for equal ids modulo 100."""
    own = [np.random.default_rng((first_id + i) % 100).integers(1, 255, 5) for i in range(n)]
    return [
        Request(RequestId(first_id + i), np.concatenate([PREFIX, own[i]]), max_tokens=new, **options) for i in range(n)
    ]


def assert_same(ones: list[Request], others: list[Request], *, within: float) -> None:
    assert [one.tokens.tolist() for one in ones] == [other.tokens.tolist() for other in others]
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=within)


@pytest.fixture
def alone(engine: PagedSession) -> list[Request]:
    """Five requests, each by itself on an empty cache."""
    found = []
    for i in range(5):
        engine.reset_prefix_cache()
        found += run(engine, prompts(1, first_id=100 + i, new=24))
    return found


def test_a_hit_is_a_miss_bit_for_bit(engine: PagedSession) -> None:  # CASES 148
    engine.reset_prefix_cache()
    miss = run(engine, prompts(1, first_id=1))
    hit = run(engine, prompts(1, first_id=101))
    assert (miss[0].num_cached_tokens, hit[0].num_cached_tokens) == (0, 24)
    assert miss[0].tokens.tolist() == hit[0].tokens.tolist()
    assert miss[0].logprobs.view(np.uint32).tolist() == hit[0].logprobs.view(np.uint32).tolist()


def test_what_is_read_is_the_model_s_to_the_dtype_s_own_rounding(engine: PagedSession) -> None:
    engine.reset_prefix_cache()
    dtype = engine.model.layout.dtype
    requests = run(engine, prompts(3, want_prompt_logprobs=True))
    worst = assert_teacher_forced(requests, dense_model(), relative=ERROR[dtype])
    assert worst > 1e-4, "the pools were not quantised"


def test_a_batch_that_is_preempted_and_evicted_gives_each_row_what_it_gives_alone(
    engine: PagedSession, alone: list[Request]
) -> None:
    engine.reset_prefix_cache()
    before = engine.runtime.metrics().control
    together = run(engine, prompts(5, new=24))
    after = engine.runtime.metrics().control
    assert after.num_preemptions > before.num_preemptions and after.num_cached_tokens > before.num_cached_tokens
    assert after.num_evictions > before.num_evictions
    assert_same(together, alone, within=5e-3)


def test_samples_that_share_pages_by_copy_on_write_are_what_they_are_alone(engine: PagedSession) -> None:
    prompt = prompts(1)[0].prompt

    def sample(i: int, group: int | None, first_id: int) -> Request:
        spec = SamplingSpec(temperature=1.0, seed=7, sample_index=i)
        return Request(RequestId(first_id + i), prompt, sampling=spec, max_tokens=9, group=group)

    engine.reset_prefix_cache()
    copied = engine.runtime.metrics().num_copied_pages
    together = run(engine, [sample(i, 1, 0) for i in range(3)])
    assert engine.runtime.metrics().num_copied_pages == copied + 2, "the page that all had begun"
    alone = []
    for i in range(3):
        engine.reset_prefix_cache()
        alone += run(engine, [sample(i, None, 100)])
    assert_same(together, alone, within=5e-3)
    assert len({tuple(r.tokens.tolist()) for r in together}) == 3


def test_planned_bytes_are_the_arrays_bytes_and_a_budget_buys_as_many_pages(engine: PagedSession) -> None:  # CASES 150
    layout = engine.model.layout
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runtime.pools))
    assert held == layout.device_pool_bytes() == 15 * layout.page_bytes()
    budget = 7 * layout.page_bytes() + engine.pool.workspace_bytes
    options = {"paged_num_pages": 0, "paged_backend": engine.backend.name}
    for short, pages in ((0, 7), (1, 6)):
        config = config_of(layout.dtype, paged_kv_budget_bytes=budget - short, **options)
        assert assemble(config, mesh=engine.model.mesh).model.layout.num_pages == pages


def test_the_start_says_what_is_stored_and_that_the_cache_is_on(caplog: pytest.LogCaptureFixture) -> None:  # CASES 149
    config = config_of("int8", paged_num_pages=2)
    with caplog.at_level(logging.INFO, logger="maxtext_paged.session"):
        open_session(config, mesh=make_mesh(config, jax.devices()[:1]), params=dense_model().params).close()
    assert "int8 with a float32 scale per token and head" in caplog.text
    assert "prefix cache: on" in caplog.text


def test_callers_caches_have_no_place_for_scales_and_are_refused_by_name() -> None:
    from maxtext_paged.vllm import MaxTextPagedForCausalLM
    from tests.vllm_shapes import vllm_config

    with pytest.raises(UnsupportedError, match="paged_kv_dtype=int8: a caller's caches have no place for scales"):
        MaxTextPagedForCausalLM(vllm_config(cache_dtype="int8"))


def test_scales_of_window_layers_live_and_die_with_their_own_groups_pages() -> None:
    """Gemma 3 on int8 pools whose freed pages hold NaN: of both kinds are recycled, with window groups and without."""
    options = {"paged_tokens_per_page": 4, "paged_num_pages": 24, "paged_max_num_batched_tokens": 8}
    found = []
    for switch in ("auto", "off"):
        config = make_config("gemma3", **OPTIONS | options, paged_kv_dtype="int8", paged_window_pages=switch)
        session = open_session(config, mesh=make_mesh(config, jax.devices()[:1]), params=dense_model("gemma3").params)
        leaves = jax.tree.leaves(session.runtime.pools)
        groups = session.model.leaf_groups if session.model.window_groups else (0,) * len(leaves)
        pages = [session.model.layout.num_pages, *(group.layout.num_pages for group in session.model.window_groups)]
        assert [leaf.shape[0] for leaf in leaves] == [pages[group] for group in groups]
        assert sum(leaf.nbytes for leaf in leaves) == session.model.total_pool_bytes()
        requests = run(session, prompts(5, new=24)) + run(session, prompts(3, first_id=50, new=12))
        assert session.runtime.metrics().num_scrubbed_pages
        found.append(requests)
        session.close()
    assert_same(*found, within=1e-5)


@pytest.mark.multi_device
def test_sharded_pools_take_their_scales_along_and_stay_where_they_are() -> None:
    config = config_of("int8", ici_tensor_parallelism=2, ici_fsdp_parallelism=2)
    engine = open_session(config, mesh=make_mesh(config, jax.devices()[:4]), params=dense_model().params)

    def shards() -> list[Any]:
        return [shard.data for leaf in jax.tree.leaves(engine.runtime.pools) for shard in leaf.addressable_shards]

    before = [shard.unsafe_buffer_pointer() for shard in shards()]
    assert sum(shard.nbytes for shard in shards()) == engine.model.layout.total_pool_bytes()
    group = [Request(RequestId(50 + i), PREFIX, max_tokens=9, group=3) for i in range(3)]
    requests = run(engine, prompts(4, new=24) + group)
    metrics = engine.runtime.metrics()
    assert metrics.control.num_preemptions and metrics.num_copied_pages and metrics.control.num_cached_tokens
    assert_teacher_forced(requests, dense_model(), relative=ERROR["int8"])
    assert [shard.unsafe_buffer_pointer() for shard in shards()] == before
    engine.close()


@pytest.mark.long
@pytest.mark.skipif(native_available() is not None, reason="no native kernels")
def test_the_benchmark_compares_pages_of_each_dtype_with_float32_and_writes_between_its_markers() -> None:
    from benchmarks.kv_dtype import NotMeasured, accuracies, accuracy_table, filled, options_for, read_text

    tokens = np.random.default_rng(2).integers(1, 255, 41)

    def config(extra: Any) -> Any:
        return make_config(**{**options_for(len(tokens)), **extra})

    exact, int8 = accuracies(config, tokens, backends=["native"], dtypes=["int8"], params=dense_model().params)
    assert (exact.dtype, exact.top1, exact.worst_difference, exact.num_tokens) == ("float32", 1.0, 0.0, 40)
    assert 0 < int8.mean_difference <= int8.worst_difference < 0.02 and int8.top1 > 0.9
    assert int8.share_of_bytes == (16 + 4) / 64
    page = filled("before\n<!-- accuracy -->\nold\n<!-- end -->\nafter\n", "accuracy", accuracy_table([exact, int8]))
    assert page.startswith("before\n<!-- accuracy -->\n| backend |") and page.endswith("|\n<!-- end -->\nafter\n")
    assert "| native | `int8` | 160 | 0.312 |" in page and "old" not in page
    session = open_session(config({"paged_backend": "reference"}), params=dense_model().params)
    with pytest.raises(NotMeasured, match="paged_backend=native ran reference"):
        read_text(session, "native", tokens)
    session.close()
