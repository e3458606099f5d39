"""Window groups through the runtime: pools of their own, scrubbed, copied and poisoned by themselves.

The model reads its window through the group's own table and adds it to its whole context: one page too few, too many
or too early changes a token. Freed pages hold NaN, so that reading one shows.
"""

from __future__ import annotations

import numpy as np
import pytest

from kv_control.plan import RequestId, SamplingSpec
from kv_control.request import Request
from kv_execution.compile_events import CompileCounter
from kv_execution.driver import PagedDriver
from tests.fakes import run_all
from tests.window_model import completion, make_driver

WINDOW = 6


def prompt(length: int, own: int = 0) -> np.ndarray:
    return np.array([(5 * i + i * i) % 90 for i in range(length - 1)] + [own], np.int32)


def request(i: int, tokens: np.ndarray, max_tokens: int, **options: object) -> Request:
    return Request(RequestId(i), tokens, max_tokens=max_tokens, **options)


def assert_as_alone(driver: PagedDriver, requests: list[Request]) -> None:
    """All ended, with the tokens of a request alone, and every page is back."""
    for one in requests:
        assert one.error is None
        assert one.tokens[len(one.prompt) :].tolist() == completion(one.prompt, one.max_tokens, WINDOW)
    control = driver.runtime.control
    control.reset_prefix_cache()
    for pages in (control, *(window.allocator for window in control.windows)):
        free = pages.num_free_pages if pages is control else pages.num_free
        assert free == pages.num_pages


SIZES = [(3, 25), (13, 6), (9, 20), (1, 9), (6, 25), (30, 8)]


@pytest.fixture(scope="module")
def drivers() -> dict[bool, PagedDriver]:
    """One driver that runs ahead and one that does not; pools that must preempt and recycle pages."""
    return {ahead: make_driver(14, window=WINDOW, window_pages=17, ahead=ahead) for ahead in (True, False)}


@pytest.mark.parametrize("ahead", [True, False])
def test_chunks_decodes_and_preemptions_give_the_tokens_of_a_request_alone(
    drivers: dict[bool, PagedDriver], ahead: bool
) -> None:
    driver = drivers[ahead]
    requests = [request(i, prompt(n, i), new) for i, (n, new) in enumerate(SIZES)]
    run_all(driver, requests)
    assert_as_alone(driver, requests)
    metrics = driver.runtime.metrics()
    [window] = metrics.control.windows
    assert metrics.control.num_preemptions > 0
    assert window.num_passed_pages > 20 and window.peak_pages_held <= 17
    assert metrics.num_scrubbed_pages > window.num_passed_pages


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("chunk", [5, 16])
def test_a_prefix_hit_gives_the_tokens_of_a_miss(ahead: bool, chunk: int) -> None:
    driver = make_driver(40, window=WINDOW, window_pages=40, prefix_cache=True, ahead=ahead, prefill_chunk_tokens=chunk)
    first = [request(0, prompt(30), 6)]
    run_all(driver, first)
    later = [request(i, np.append(prompt(30)[:length], i), 9) for i, length in enumerate((8, 17, 29), start=1)]
    run_all(driver, later)
    assert driver.metrics.num_cached_tokens == 8 + 16 + 28
    assert_as_alone(driver, first + later)


@pytest.mark.slow
def test_samples_of_a_prompt_fork_within_the_window() -> None:
    driver = make_driver(40, window=WINDOW, window_pages=24)
    requests = [request(i, prompt(15), 8, group=1, sampling=SamplingSpec(sample_index=i)) for i in range(4)]
    run_all(driver, requests)
    assert driver.metrics.num_shared_tokens == 3 * 14
    assert driver.runtime.metrics().num_copied_pages == 3 * 2, "a page of each group for each sample"
    assert_as_alone(driver, requests)


@pytest.mark.slow
def test_pages_that_leave_the_window_are_poisoned_and_only_those() -> None:
    driver = make_driver(16, window=WINDOW, window_pages=16, max_num_seqs=1)
    driver.submit(request(0, prompt(30), 6))
    for _ in range(4):
        driver.step()
    [pages] = driver.runtime.control.windows
    held = set(pages.table[0, pages.first[0] : pages.end[0]].tolist())
    bad = {name: set(np.unique(np.nonzero(np.isnan(pool))[0]).tolist()) for name, pool in driver.runtime.pools.items()}
    assert not bad["k"] | bad["v"], "the other layers' pages are all held"
    assert bad["window_k"] == bad["window_v"] and len(bad["window_k"]) >= 4
    assert not bad["window_k"] & held
    list(driver.run())


def test_after_warm_up_nothing_compiles() -> None:
    driver = make_driver(14, window=WINDOW, window_pages=17)
    driver.runtime.warm_up()
    counter = CompileCounter()
    requests = [request(i, prompt(n, i), new) for i, (n, new) in enumerate(SIZES)]
    run_all(driver, requests)
    assert driver.metrics.num_preemptions > 0
    assert not {name: n for name, n in counter.by_function().items() if "step" in name or "pages" in name}
