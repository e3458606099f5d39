"""The paged loop end to end over a model whose tokens prove which pages it read."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kv_common.errors import ConfigError, RequestError, RequestTooLarge, StaleHandleError
from kv_control.plan import RequestId, RequestSlice, SamplingSpec
from kv_control.request import Request
from kv_control.scheduler import max_steps
from tests.fakes import VOCAB, completion, make_driver, run_all


def requests_of(sizes: list[tuple[int, int]], seed: int = 0, **options: object) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(RequestId(i), rng.integers(0, VOCAB, prompt), max_tokens=new, **options)  # type: ignore[arg-type]
        for i, (prompt, new) in enumerate(sizes)
    ]


def assert_as_alone(requests: list[Request]) -> None:
    for request in requests:
        alone = completion(request.prompt, request.num_generated)
        assert request.tokens[len(request.prompt) :].tolist() == alone, request.id


MIXED = [(3, 9), (8, 5), (1, 12), (5, 5), (12, 4), (4, 8), (7, 1), (2, 17)]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_requests_at_once_give_the_tokens_they_give_alone(count: int) -> None:
    driver = make_driver(num_pages=64, max_num_seqs=8)
    requests = requests_of(MIXED[:count])
    run_all(driver, requests)
    assert_as_alone(requests)
    assert [request.num_generated for request in requests] == [new for _, new in MIXED[:count]]
    assert driver.metrics.num_preemptions == 0


@pytest.mark.parametrize("chunk", [1, 3, 7, None])
def test_chunks_give_the_same_tokens(chunk: int | None) -> None:
    driver = make_driver(num_pages=64, prefill_chunk_tokens=chunk)
    requests = requests_of(MIXED)
    run_all(driver, requests)
    assert_as_alone(requests)


@pytest.mark.parametrize(
    "num_pages", [5, 6, pytest.param(7, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow)]
)
def test_a_pool_too_small_for_all_preempts_and_gives_the_same_tokens_in_bounded_steps(num_pages: int) -> None:
    driver = make_driver(num_pages=num_pages)
    requests = requests_of(MIXED)
    run_all(driver, requests)
    assert_as_alone(requests)
    assert driver.metrics.num_steps <= max_steps(requests)
    assert driver.metrics.num_preemptions == sum(request.num_preemptions for request in requests)
    assert driver.metrics.num_preempted_requests == sum(request.num_preemptions > 0 for request in requests)
    assert driver.runtime.control.num_free_pages == num_pages


@pytest.mark.parametrize("chunk", [1, 3, None])
def test_prefill_tokens_are_the_prompts_tokens_however_they_are_chunked(chunk: int | None) -> None:
    driver = make_driver(num_pages=64, prefill_chunk_tokens=chunk)
    requests = requests_of(MIXED[:3])
    run_all(driver, requests)
    assert driver.metrics.num_prefill_tokens == sum(len(request.prompt) for request in requests)
    assert driver.metrics.num_generated_tokens == sum(request.num_generated for request in requests)


def test_a_tight_pool_really_preempts() -> None:
    """The control of the test above: its equality would be empty if nothing was ever preempted."""
    driver = make_driver(num_pages=6)
    requests = requests_of([(4, 16)] * 3)
    run_all(driver, requests)
    assert driver.metrics.num_preemptions > 0
    assert_as_alone(requests)
    assert all(request.num_generated == 16 and len(request.logprobs) == 16 for request in requests)


def test_prompt_logprobs_are_whole_through_chunks_and_preemption() -> None:
    def scored(**options: int) -> list[np.ndarray]:
        driver = make_driver(**options)  # type: ignore[arg-type]
        requests = requests_of([(9, 9), (7, 9), (8, 9)], want_prompt_logprobs=True)
        run_all(driver, requests)
        return [np.concatenate([request.prompt_logprobs, request.logprobs]) for request in requests]

    whole = scored(num_pages=64)
    tight = scored(num_pages=6, prefill_chunk_tokens=2)
    for expected, got in zip(whole, tight, strict=True):
        assert np.isnan(expected[0])
        assert np.isfinite(expected[1:]).all()
        np.testing.assert_array_equal(expected, got)


def test_recycled_pages_carry_nothing_over() -> None:
    """One tenant fills the pool; the next takes a page for one token. Freed pages hold NaN until scrubbed."""
    driver = make_driver(num_pages=5)
    run_all(driver, requests_of([(16, 4)]))
    [request] = requests_of([(1, 6)], seed=1)
    driver.submit(request)
    driver.step()
    control = driver.runtime.control
    pages, written = control.page_map.pages(request.handle), control.num_written(request.handle)
    for pool in driver.runtime.pools.values():
        slots = np.asarray(pool)[pages].reshape(-1)
        assert slots[:written].all() and not slots[written:].any(), "zeros behind what it wrote itself"
    run_all(driver, [])
    assert_as_alone([request])
    assert driver.runtime.metrics().num_scrubbed_pages > 0


@pytest.mark.slow
def test_one_row_with_nan_fails_alone() -> None:
    driver = make_driver(num_pages=64, nan_token=13)
    good = Request(RequestId(1), np.array([1, 2, 3]), max_tokens=6)
    bad = Request(RequestId(2), np.array([5, 13]), max_tokens=6)
    finished = run_all(driver, [good, bad])
    assert finished[bad.id].finish_reason == "error"
    assert "not finite" in (bad.error or "")
    assert finished[good.id].finish_reason == "length"
    assert_as_alone([good])
    assert driver.metrics.num_failed == 1


def test_a_nan_anywhere_in_a_scored_prompt_fails_the_row() -> None:
    driver = make_driver(num_pages=64, nan_token=13)
    bad = Request(RequestId(2), np.array([5, 13, 6, 7]), max_tokens=1, want_prompt_logprobs=True)
    run_all(driver, [bad])
    assert bad.finish_reason == "error"


def test_what_can_never_fit_is_refused_at_submit_and_others_run_on() -> None:
    driver = make_driver(num_pages=8)
    with pytest.raises(RequestTooLarge, match=r"10 pages for 39 tokens, the pool has 8"):
        driver.submit(Request(RequestId(1), np.arange(20), max_tokens=20))
    with pytest.raises(RequestError, match=r"token id 97 is outside the vocabulary of 97"):
        driver.submit(Request(RequestId(2), np.array([97])))
    with pytest.raises(RequestError, match="empty"):
        driver.submit(Request(RequestId(3), np.array([], np.int32)))
    good = Request(RequestId(4), np.array([1, 2]), max_tokens=3)
    run_all(driver, [good])
    assert_as_alone([good])


def test_stop_tokens_end_a_request_and_free_its_pages_in_that_step() -> None:
    prompt = np.array([4, 9, 2])
    tokens = completion(prompt, 8)
    stop = tokens[3]
    expected = tokens[: tokens.index(stop) + 1]
    driver = make_driver(num_pages=16)
    request = Request(RequestId(1), prompt, max_tokens=8, stop_token_ids=frozenset({stop}))
    driver.submit(request)
    while not request.finished:
        driver.step()
    assert request.finish_reason == "stop"
    assert request.tokens[3:].tolist() == expected
    assert driver.runtime.control.num_free_pages == 16


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancelling_in_any_state_returns_its_pages(steps: int) -> None:
    driver = make_driver(num_pages=6, prefill_chunk_tokens=3)
    requests = requests_of([(8, 10), (8, 10), (8, 10)])
    for request in requests:
        driver.submit(request)
    for _ in range(steps):
        driver.step()
    for request in requests[::-1]:
        driver.cancel(request.id)
    assert driver.runtime.control.num_free_pages == 6
    assert {request.finish_reason for request in driver.pop_finished()} == {"cancelled"}
    assert driver.cancel(requests[0].id) is None


@pytest.mark.slow
def test_seeded_sampling_does_not_depend_on_batch_chunks_or_preemption() -> None:
    def sampled(only: int | None = None, **options: object) -> dict[int, list[int]]:
        driver = make_driver(**options)  # type: ignore[arg-type]
        requests = [
            Request(RequestId(i), np.array([i, 3 * i + 1]), SamplingSpec(temperature=30.0, seed=5), max_tokens=14)
            for i in range(4)
            if only is None or i == only
        ]
        run_all(driver, requests)
        return {request.id: request.tokens.tolist() for request in requests}

    batch = sampled(num_pages=64)
    assert len({tuple(tokens[2:]) for tokens in batch.values()}) == 4
    assert batch == sampled(num_pages=7, prefill_chunk_tokens=1)
    for i in range(4):
        assert sampled(only=i, num_pages=64)[i] == batch[i]


def test_a_token_may_come_from_the_previous_step_without_a_read_back() -> None:
    driver = make_driver(num_pages=16)
    runtime = driver.runtime
    prompt = np.array([7, 11, 2], np.int32)
    handle = runtime.open()
    assert handle is not None
    first = runtime.prepare_step([RequestSlice(handle, 0, prompt, sample=SamplingSpec())])
    assert first is not None
    outcomes = [runtime.run_step(first)]
    for position in range(3, 6):
        piece = RequestSlice(handle, position, np.zeros(1, np.int32), previous_sample=0, sample=SamplingSpec())
        prepared = runtime.prepare_step([piece])
        assert prepared is not None
        outcomes.append(runtime.run_step(prepared))
    tokens = [outcome.read()[0].token for outcome in outcomes]
    assert tokens == completion(prompt, 4)


def test_no_room_is_none_and_changes_nothing() -> None:
    driver = make_driver(num_pages=2)
    runtime = driver.runtime
    handle = runtime.open()
    assert handle is not None
    assert runtime.prepare_step([RequestSlice(handle, 0, np.arange(9, dtype=np.int32))]) is None
    assert runtime.control.num_free_pages == 2
    assert runtime.control.num_written(handle) == 0


def test_a_released_handle_is_refused() -> None:
    driver = make_driver(num_pages=4)
    handle = driver.runtime.open()
    assert handle is not None
    driver.runtime.release(handle)
    with pytest.raises(StaleHandleError):
        driver.runtime.release(handle)
    with pytest.raises(StaleHandleError):
        driver.runtime.prepare_step([RequestSlice(handle, 0, np.array([1], np.int32))])


@pytest.mark.slow
def test_outcomes_carry_the_batch_that_ran() -> None:
    driver = make_driver(num_pages=16)
    handles = [driver.runtime.open() for _ in range(2)]
    slices = [RequestSlice(h, 0, np.arange(n, dtype=np.int32)) for h, n in zip(handles, (3, 2), strict=True) if h]
    prepared = driver.runtime.prepare_step(slices)
    assert prepared is not None
    outcome = driver.runtime.run_step(prepared)
    assert outcome.query_lens == (3, 2)
    assert outcome.backend == "checksum"
    assert [result.slice.handle for result in outcome.read()] == handles
    assert [result.token for result in outcome.read()] == [None, None]


@pytest.mark.slow
def test_a_churn_of_requests_compiles_one_program_per_rung_then_nothing() -> None:
    driver = make_driver(num_pages=40, max_num_seqs=6, max_num_batched_tokens=64)
    rng = np.random.default_rng(3)
    sizes = [(int(rng.integers(1, 40)), int(rng.integers(1, 20))) for _ in range(24)]
    run_all(driver, requests_of(sizes))
    compiled = driver.runtime.metrics().compiled
    rungs = len(driver.runtime.metrics().steps_by_rung)
    assert compiled["paged_step"] == rungs <= 9
    run_all(driver, requests_of(sizes, seed=9))
    again = driver.runtime.metrics()
    assert again.compiled == compiled
    assert len(again.steps_by_rung) == rungs


def test_a_program_obtained_before_the_weights_are_there_is_the_one_the_first_step_runs() -> None:
    driver = make_driver(num_pages=64)
    runtime = driver.runtime
    params = jax.device_put(runtime.params, jax.devices()[0])  # committed, as loaded weights are
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)
    runtime.params = shapes
    runtime.compile_step(5)
    obtained = runtime.metrics().compiled["paged_step"]
    assert obtained == 1 and runtime.metrics().num_steps == 0
    runtime.params = params
    requests = requests_of([(5, 1)])
    run_all(driver, requests)
    assert_as_alone(requests)
    assert runtime.metrics().compiled["paged_step"] == obtained
    with pytest.raises(ConfigError, match="above the ladder's cap"):
        runtime.compile_step(10_000)
