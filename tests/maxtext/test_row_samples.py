"""Rows of several samples, and rows of a known input in prefix order, through the worker over the checksum model."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from maxtext_paged.row_order import ROWS_PER_STEP, WINDOW_ROWS, PrefixOrderedRows
from maxtext_paged.rows import Row
from maxtext_paged.worker import FIRST_WINDOW_PER_SEQ, PagedInferenceWorker
from tests.fakes import completion, make_driver

pytestmark = pytest.mark.maxtext


def worker(num_pages: int = 64, *, order: str = "auto", prefix_cache: bool = True, **options: Any) -> Any:
    driver = make_driver(num_pages, prefix_cache=prefix_cache, **options)
    session: Any = SimpleNamespace(
        driver=driver,
        control=driver.runtime.control,
        runtime=driver.runtime,
        max_num_seqs=4,
        options=SimpleNamespace(paged_file_order=order),
    )
    return PagedInferenceWorker(session)


def row(index: int, tokens: list[int], **options: Any) -> Row:
    return Row(index=index, tokens=np.array(tokens), max_tokens=options.pop("max_tokens", 4), **options)


# --- samples -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_pages", [64, 5])
def test_a_row_of_n_samples_is_one_result_with_each_sample_complete(num_pages: int, prefix_cache: bool) -> None:
    crew = worker(num_pages, prefix_cache=prefix_cache)
    rows = [row(0, [5, 6, 7, 8, 9], n=3), row(1, [1, 2], n=1), row(2, [3, 4, 5], n=2)]
    results = crew.run_inference(rows)
    assert [result.row.index for result in results] == [0, 1, 2]
    for asked, result in zip(rows, results, strict=True):
        alone = completion(asked.tokens, 4)
        assert result.completion_ids.tolist() == alone
        assert [sample.completion_ids.tolist() for sample in result.samples] == [alone] * (
            asked.n if asked.n > 1 else 0
        )
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(asked.tokens), 4 * asked.n)
        assert result.finish_reason == "length"
    metrics = crew.session.control.metrics()
    assert metrics.num_held_pages == 0 and metrics.num_leaked_pages == 0
    if num_pages == 64:
        assert metrics.num_shared_tokens >= 2 * 4  # the last sample enters when nobody of its group runs any more


def test_more_samples_than_run_at_once_are_all_returned() -> None:
    [result] = worker().run_inference([row(0, [5, 6, 7], n=11)])
    assert [sample.completion_ids.tolist() for sample in result.samples] == [completion([5, 6, 7], 4)] * 11


@pytest.mark.slow
def test_a_row_that_cannot_run_is_refused_once_whatever_its_n() -> None:
    results = worker(2).run_inference([row(0, [1] * 20, n=3), row(1, [1, 2], n=2)])
    assert [result.finish_reason for result in results] == ["error", "length"]
    assert results[0].samples == () and len(results[1].samples) == 2


@pytest.mark.slow
def test_a_failed_sample_is_the_rows_error_and_the_others_keep_their_tokens() -> None:
    crew = worker(nan_token=completion([5, 6, 7], 2)[1])  # the second token turns every sample's logits into NaN
    [result] = crew.run_inference([row(0, [5, 6, 7], n=2, max_tokens=4)])
    assert result.finish_reason == "error" and "not finite" in (result.error or "")
    assert [len(sample.completion_ids) for sample in result.samples] == [2, 2]


# --- order -------------------------------------------------------------------------------------------------


def started(crew: Any, rows: Iterator[Row] | list[Row]) -> list[int]:
    """Rows in the order in which they first ran."""
    order: list[int] = []
    submit = crew.session.driver.submit

    def noting(request: Any) -> None:
        order.append(int(request.prompt[-1]))
        submit(request)

    crew.session.driver.submit = noting
    assert len(crew.run_inference(crew.in_file_order(rows))) == len(set(order))
    return order


def mixed_rows(n: int) -> list[Row]:
    """Three families, interleaved; the last token is the row's number."""
    return [row(i, [20 + i % 3] * 8 + [i % 90], max_tokens=1 + (i % 3 == 2)) for i in range(n)]


@pytest.mark.slow
def test_auto_orders_a_known_input_where_the_cache_is_on_and_leaves_it_alone_where_it_is_off() -> None:
    assert started(worker(), mixed_rows(9)) == [2, 5, 8, 0, 3, 6, 1, 4, 7]
    assert started(worker(prefix_cache=False), mixed_rows(9)) == list(range(9))
    assert started(worker(order="input"), mixed_rows(9)) == list(range(9))
    assert started(worker(order="prefix", prefix_cache=False), mixed_rows(9)) == [2, 5, 8, 0, 3, 6, 1, 4, 7]


def test_what_sharing_attains_is_counted_beside_what_it_could() -> None:
    crew = worker()
    results = crew.run_inference(crew.in_file_order(mixed_rows(9)))
    assert crew.attainable_tokens == 6 * 8 == sum(result.usage.cached_tokens for result in results)
    crew.run_inference(mixed_rows(9))
    crew.in_file_order([])
    assert crew.attainable_tokens == 0


def test_the_first_window_is_small_and_reading_ahead_is_bounded() -> None:
    drawn = 0

    def endless() -> Iterator[Row]:
        nonlocal drawn
        while True:
            drawn += 1
            yield row(drawn, [1, 2, 3])

    ordered = PrefixOrderedRows(endless(), 4, first_window=8)
    next(ordered)
    assert drawn == 8
    ordered.read_ahead()
    assert drawn == 8 + ROWS_PER_STEP
    for _ in range(WINDOW_ROWS):
        ordered.read_ahead()
    assert drawn == 8 + WINDOW_ROWS


def test_a_result_comes_before_the_input_is_read_to_its_end() -> None:
    crew, drawn = worker(), 0

    def rows() -> Iterator[Row]:
        nonlocal drawn
        for i in range(5000):
            drawn += 1
            yield row(i, [1, 2, i % 90], max_tokens=1)

    results = crew.complete(crew.in_file_order(rows()))
    next(results)
    assert drawn <= FIRST_WINDOW_PER_SEQ * 4 + 8 * ROWS_PER_STEP
    results.close()
    assert crew.session.control.metrics().num_held_pages == 0


def test_rows_that_are_no_tokens_are_refused_in_their_turn() -> None:
    crew = worker()
    bad = Row(index=1, tokens=np.array([[1, 2], [3, 4]]))
    results = crew.run_inference(crew.in_file_order([row(0, [1, 2]), bad, row(2, [1, 3])]))
    assert [result.finish_reason for result in results] == ["length", "error", "length"]


# --- direct callers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["input", "prefix"])
@pytest.mark.parametrize(
    "bad",
    [
        {"n": 0},
        {"n": -1},
        {"n": 129},
        {"n": True},
        {"n": 2.5},
        {"n": "3"},
        {"max_tokens": "4"},
        {"max_tokens": 2.5},
        {"max_tokens": float("nan")},
        {"max_tokens": True},
        {"tokens": [[1], [2, 3]]},
        {"min_tokens": 1.5},
    ],
    ids=str,
)
def test_a_row_that_makes_no_sense_is_refused_and_the_others_run(bad: dict[str, Any], order: str) -> None:
    crew = worker(order=order)
    odd = Row(**{"index": 1, "tokens": [1, 2], "max_tokens": 2, **bad})
    results = crew.run_inference(crew.in_file_order([row(0, [1, 2]), odd, row(2, [1, 3])]))
    assert [result.finish_reason for result in results] == ["length", "error", "length"]
    assert next(iter(bad)) in (results[1].error or "") or "token ids" in (results[1].error or "")


def test_a_prompt_that_one_sample_had_to_compute_is_not_reported_as_cached() -> None:
    crew = worker(5)
    [result] = crew.run_inference([row(0, list(range(1, 14)), n=3)])
    assert [len(sample.completion_ids) for sample in result.samples] == [4] * 3
    assert result.usage.cached_tokens == 0


def test_a_row_whose_first_sample_had_a_hit_says_so_whatever_its_other_samples_shared() -> None:
    crew = worker()
    crew.run_inference([row(0, [*range(1, 9), 50])])
    [result] = crew.run_inference([row(0, [*range(1, 9), 60, 61], n=3)])
    assert [sample.usage.cached_tokens for sample in result.samples] == [8, 9, 9]
    assert result.usage.cached_tokens == 8
