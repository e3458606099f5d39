"""A step is dispatched before the last one is read, and nobody can tell from the results."""

from __future__ import annotations

import numpy as np
import pytest

from kv_control.plan import GREEDY, RequestId, RequestSlice, SamplingSpec
from kv_control.request import Request
from kv_execution.driver import PagedDriver
from kv_execution.step_outcome import StepOutcome
from tests.fakes import completion, make_driver, run_all


def order_of_events(driver: PagedDriver, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """``d`` where a step is dispatched and ``r`` where one is read, as they happen."""
    events: list[str] = []
    run_step, results = driver.runtime.run_step, StepOutcome.results

    def dispatched(*args: object, **kwargs: object) -> StepOutcome:
        events.append("d")
        return run_step(*args, **kwargs)  # type: ignore[arg-type]

    def read(outcome: StepOutcome) -> object:
        events.append("r")
        return results(outcome)

    monkeypatch.setattr(driver.runtime, "run_step", dispatched)
    monkeypatch.setattr(StepOutcome, "results", read)
    return events


def mixed(**options: object) -> list[Request]:
    """Prompts of many lengths: some end at a stop token, some only score, some are samples of one prompt."""
    rng = np.random.default_rng(3)
    requests = []
    for i in range(12):
        prompt = rng.integers(0, 97, 1 + (5 * i) % 13)
        sampling = GREEDY if i % 3 else SamplingSpec(temperature=20.0, seed=i)
        stops = frozenset({completion(prompt, 9)[2 + i % 5]}) if i % 2 else frozenset()
        requests.append(
            Request(
                RequestId(i),
                prompt,
                sampling,
                max_tokens=[20, 1, 0, 20][i % 4],
                stop_token_ids=stops,
                min_tokens=i % 3,
                want_prompt_logprobs=i % 4 >= 2,
            )
        )
    shared = rng.integers(0, 97, 11)
    for i in range(12, 16):
        sampling = SamplingSpec(temperature=20.0, seed=1, sample_index=i - 12)
        requests.append(
            Request(RequestId(i), shared, sampling, max_tokens=6, want_prompt_logprobs=True, group=12, **options)  # type: ignore[arg-type]
        )
    return requests


def outcome_of(request: Request) -> tuple[object, ...]:
    return (
        request.tokens.tolist(),
        request.logprobs.tolist(),
        np.nan_to_num(request.prompt_logprobs, nan=1.0).tolist(),
        request.finish_reason,
    )


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize(("num_pages", "chunk"), [(64, None), (9, 2)])
def test_results_do_not_depend_on_running_ahead(num_pages: int, chunk: int | None, prefix_cache: bool) -> None:
    got = []
    for ahead in (True, False):
        driver = make_driver(num_pages, prefill_chunk_tokens=chunk, prefix_cache=prefix_cache, ahead=ahead)
        requests = mixed()
        run_all(driver, requests)
        got.append([outcome_of(request) for request in requests])
        assert driver.metrics.num_generated_tokens == sum(request.num_generated for request in requests)
        if not prefix_cache:
            assert driver.runtime.control.num_free_pages == num_pages
        if num_pages == 9:
            assert driver.metrics.num_preemptions > 0
    assert got[0] == got[1]


def test_a_step_is_dispatched_before_the_one_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = np.array([4, 9, 2])
    driver = make_driver(num_pages=16)
    events = order_of_events(driver, monkeypatch)
    run_all(driver, [Request(RequestId(1), prompt, max_tokens=4)])
    assert "".join(events) == "d" + "dr" * 3 + "r"  # the last token is known to be the last: nothing runs behind it
    driver = make_driver(num_pages=16, ahead=False)
    events = order_of_events(driver, monkeypatch)
    run_all(driver, [Request(RequestId(1), prompt, max_tokens=4)])
    assert "".join(events).replace("rr", "r") == "dr" * 4


def test_a_stop_that_is_found_late_costs_one_token_which_is_dropped_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = np.array([4, 9, 2])
    tokens = completion(prompt, 8)
    expected = tokens[: tokens.index(tokens[3]) + 1]
    driver = make_driver(num_pages=16)
    events = order_of_events(driver, monkeypatch)
    [request] = run_all(
        driver, [Request(RequestId(1), prompt, max_tokens=8, stop_token_ids=frozenset({tokens[3]}))]
    ).values()
    assert (request.tokens[3:].tolist(), request.finish_reason) == (expected, "stop")
    assert events.count("d") == len(expected) + 1
    assert events.count("r") == len(expected)
    assert driver.runtime.control.num_free_pages == 16


@pytest.mark.slow
def test_the_row_of_a_late_stop_can_be_anothers_before_its_extra_token_arrives() -> None:
    """Two requests, one row: the second is let in while the first one's dropped token is still in flight."""
    prompts = [np.array([4, 9, 2]), np.array([8, 1])]
    stop = completion(prompts[0], 8)[3]
    driver = make_driver(num_pages=3, max_num_seqs=1)
    first = Request(RequestId(1), prompts[0], max_tokens=8, stop_token_ids=frozenset({stop}))
    second = Request(RequestId(2), prompts[1], max_tokens=6)
    run_all(driver, [first, second])
    assert second.tokens[2:].tolist() == completion(prompts[1], 6)


def test_steps_of_others_between_two_of_the_loop_do_not_change_what_it_feeds() -> None:
    driver = make_driver(num_pages=16)
    runtime = driver.runtime
    prompt = np.array([4, 9, 2])
    request = Request(RequestId(1), prompt, max_tokens=6)
    driver.submit(request)
    handle = runtime.open()
    assert handle is not None
    position = 0
    while not request.finished:
        driver.step()
        prepared = runtime.prepare_step([RequestSlice(handle, position, np.array([50], np.int32), sample=GREEDY)])
        assert prepared is not None
        runtime.run_step(prepared)
        position += 1
    assert request.tokens[3:].tolist() == completion(prompt, 6)


def test_settling_reads_what_is_in_flight_and_the_loop_goes_on_from_there() -> None:
    prompt = np.array([4, 9, 2])
    driver = make_driver(num_pages=16)
    request = Request(RequestId(1), prompt, max_tokens=6)
    driver.submit(request)
    driver.step()
    assert (request.num_generated, driver.settle(), request.num_generated) == (0, [], 1)
    while not request.finished:
        driver.step()
        driver.settle()
    assert request.tokens[3:].tolist() == completion(prompt, 6)
    assert driver.settle() == []


@pytest.mark.parametrize("length", [12, 13])
def test_a_prompt_that_is_only_scored_ends_with_its_last_chunk_not_with_the_one_before(length: int) -> None:
    """When the last chunk but one is read, the last one is in flight: all is computed, and not all is known."""
    scored = []
    for ahead in (True, False):
        driver = make_driver(num_pages=16, prefill_chunk_tokens=2, ahead=ahead)
        request = Request(RequestId(1), np.arange(3, 3 + length), max_tokens=0, want_prompt_logprobs=True)
        run_all(driver, [request])
        assert np.isfinite(request.prompt_logprobs[1:]).all()
        scored.append(request.prompt_logprobs[1:].tolist())
    assert scored[0] == scored[1]


@pytest.mark.parametrize("ahead", [True, False])
def test_samples_of_a_prompt_wait_for_its_logprobs_that_are_in_flight(ahead: bool) -> None:
    """They would compute the prompt again otherwise, each for itself."""
    driver = make_driver(num_pages=64, ahead=ahead)
    prompt, sampling = np.arange(5, 17), SamplingSpec(temperature=20.0, seed=1)
    requests = [
        Request(
            RequestId(i),
            prompt,
            SamplingSpec(temperature=20.0, seed=1, sample_index=i) if i else sampling,
            max_tokens=4,
            want_prompt_logprobs=True,
            group=0,
        )
        for i in range(4)
    ]
    run_all(driver, requests)
    assert driver.metrics.num_shared_tokens == 3 * (len(prompt) - 1)
    assert driver.metrics.num_prefill_tokens == len(prompt) + 3
    for request in requests[1:]:
        np.testing.assert_array_equal(request.prompt_logprobs, requests[0].prompt_logprobs)
