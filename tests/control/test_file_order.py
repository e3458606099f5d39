"""The order of a known queue: everything once, sharers side by side, and a bound that brute force agrees with."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_control.file_order import prefix_order
from kv_control.metrics import ControlMetrics
from kv_control.plan import RequestId
from kv_control.request import Request
from tests.strategies import control_of, loop_of

prompts_of = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6)


def avoided(prompts: list[list[int]], page: int) -> int:
    """What a cache that keeps every page avoids when prompts run one after another."""
    seen: set[tuple[int, ...]] = set()
    total = 0
    for prompt in prompts:
        whole = [tuple(prompt[:end]) for end in range(page, len(prompt) + 1, page)]
        hits = len(list(itertools.takewhile(seen.__contains__, whole)))
        total += min(hits, (len(prompt) - 1) // page) * page
        seen.update(whole)
    return total


@settings(max_examples=200, deadline=None)
@given(prompts_of, st.integers(1, 4))
def test_attainable_is_what_the_best_of_all_orders_avoids_and_the_order_attains_it(prompts, page):
    found = prefix_order([np.array(prompt) for prompt in prompts], [1] * len(prompts), page)
    assert sorted(found.order.tolist()) == list(range(len(prompts)))
    assert avoided([prompts[i] for i in found.order], page) == found.attainable_tokens
    assert found.attainable_tokens == max(avoided(list(order), page) for order in itertools.permutations(prompts))


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_families_with_long_outputs_come_first_and_the_rest_as_they_came(prefix):
    prompts = [np.array([10 * family + 7, *range(prefix), row]) for family in (3, 1, 2) for row in (2, 1)]
    order = prefix_order(prompts, [5, 5, None, 1, 5, 5], 1).order.tolist()
    assert order == [3, 2, 1, 0, 5, 4]


def test_behind_one_common_beginning_long_outputs_still_come_first():
    system = list(range(8))
    prompts = [np.array([*system, 30 + row]) for row in range(6)]
    found = prefix_order(prompts, [1, 1, 1, 1, 999, None], 4)
    assert found.order.tolist() == [5, 4, 0, 1, 2, 3]
    assert found.attainable_tokens == 5 * 8


def test_no_rows_are_an_empty_order():
    found = prefix_order([], [], 4)
    assert (found.order.tolist(), found.attainable_tokens, found.num_prompt_tokens) == ([], 0, 0)


def test_large_token_ids_sort_as_numbers():
    prompts = [np.array([300]), np.array([2]), np.array([70_000])]
    assert prefix_order(prompts, [1, 1, 1], 1).order.tolist() == [0, 1, 2]


def metrics_after(prompts: list[np.ndarray], order: np.ndarray) -> ControlMetrics:
    loop = loop_of(control_of(14, 4, max_num_seqs=2, max_model_len=24, prefix_cache=True))
    for i in order.tolist():
        loop.scheduler.submit(Request(RequestId(i), prompts[i], max_tokens=1))
    loop.drain()
    return loop.engine.control.metrics()


def test_a_small_pool_attains_the_bound_in_prefix_order_and_misses_it_in_the_order_of_the_file():
    rng = np.random.default_rng(0)
    families = [rng.integers(0, 50, 16) for _ in range(6)]
    prompts = [np.concatenate([families[i % 6], rng.integers(0, 50, 2)]) for i in range(24)]
    found = prefix_order(prompts, [1] * 24, 4)
    assert found.attainable_tokens == 18 * 16
    assert metrics_after(prompts, found.order).num_cached_tokens == found.attainable_tokens
    assert metrics_after(prompts, np.arange(24)).num_cached_tokens < found.attainable_tokens / 2
