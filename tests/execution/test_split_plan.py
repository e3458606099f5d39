"""A fused launch's plan is what the kernel cuts, is kept while pages stand still, and its workspace is reserved."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kv_common.page_table import PageRow, pack_page_table
from kv_control.page_map import PageMap
from kv_control.plan import RequestHandle, RequestId
from kv_control.request import Request
from kv_execution.attention.native import NativeBackend, native_threads
from kv_execution.dispatch import DecodeDispatch, SplitFloors
from kv_execution.native.library import native_available, native_library
from kv_execution.split_plan import PageRanges, SplitPlan, SplitPlanCache, split_kv_workspace_bytes, split_plan
from tests.execution.paged_steps import make_request, make_step, run
from tests.fakes import make_driver, run_all

built = pytest.mark.skipif(native_available() is not None, reason=str(native_available()))
PAGE = 16


def pieces_of(lengths: list[int], threads: int, page: int) -> int:
    """Partial results of one call, as work_list.h cuts rows, written again."""
    slots = [-(-length // page) * page for length in lengths]
    keys = -(-max(256, sum(slots) // (4 * threads) + 1) // 64) * 64
    return sum(-(-n // keys) for n in slots if n > keys)


def table_of(lengths: list[int]):
    rows, page = [], 0
    for length in lengths:
        count = -(-length // PAGE)
        rows.append(PageRow(length - 1, 1, np.arange(page, page + count, dtype=np.int32)))
        page += count
    return pack_page_table(rows, num_pages=4096, tokens_per_page=PAGE, token_rung=8, row_rung=8, index_capacity=4096)


@built
@pytest.mark.skipif(native_threads() < 2, reason="one thread cuts nothing")
@pytest.mark.parametrize("lengths", [[6000], [300, 4000, 900], [257] * 5])
def test_rows_are_cut_into_as_many_pieces_as_the_plan_says(lengths):
    """The kernel's own counts confirm the rule, and with it the number of XLA's threads."""
    rng = np.random.default_rng(7)
    step = make_step([make_request(rng, length, 1, dim=16) for length in lengths], page_size=64, num_pages=256)
    before = native_library().counts()
    run(NativeBackend(), step)
    counts = native_library().counts().since(before)
    plan = split_plan(PageRanges.of(step.table, None, 64), 64, native_threads())
    assert (counts.chunks, counts.merged_rows) == (plan.num_chunks, plan.num_merged_rows)
    # Rows that stay whole are one chunk each and need no workspace.
    assert counts.chunks - (len(lengths) - counts.merged_rows) == pieces_of(lengths, native_threads(), 64)


def test_one_thread_cuts_nothing():
    ranges = PageRanges.of(table_of([6000, 300]), None, PAGE)
    assert split_plan(ranges, PAGE, 1) == SplitPlan(num_chunks=2, num_merged_rows=0)
    assert split_plan(ranges, PAGE, 2).num_merged_rows == 1


@pytest.mark.parametrize("threads", [1, 2, 3, 16, 96])
def test_no_step_needs_more_workspace_than_is_reserved_for_it(threads):
    numbers = np.random.default_rng(threads)
    reached = 0.0
    for _ in range(2000):
        rows, longest = int(numbers.integers(1, 70)), int(numbers.integers(1, 9000))
        page = int(numbers.choice([1, 16, 256]))
        reserved = split_kv_workspace_bytes(
            max_num_seqs=rows,
            max_model_len=longest,
            tokens_per_page=page,
            query_heads=6,
            head_dim=32,
            threads=threads,
        )
        lengths = numbers.integers(1, longest + 1, int(numbers.integers(1, rows + 1))).tolist()
        lengths = [longest] * len(lengths) if numbers.random() < 0.3 else lengths
        needed = pieces_of(lengths, threads, page) * 6 * (32 + 2) * 4 if threads > 1 else 0
        assert needed <= reserved
        reached = max(reached, needed / reserved if reserved else 0.0)
    assert reached == 1.0 or threads == 1, "the bound is met, not just generous"


def test_a_plan_is_kept_inside_a_page_and_built_again_at_the_boundary():
    cache = SplitPlanCache(2, PAGE)
    built = [cache.plan(table_of([length, 700]), None, block_epoch=5)[1] for length in range(1020, 1030)]
    assert [length for length, new in zip(range(1020, 1030), built, strict=True) if new] == [1020, 1025]
    for length in (1020, 1024, 1025, 1040, 1041):
        kept, _ = cache.plan(table_of([length, 700]), None, block_epoch=5)
        assert kept == split_plan(PageRanges.of(table_of([length, 700]), None, PAGE), PAGE, 2)


def test_a_window_slides_over_page_boundaries_at_both_ends():
    cache = SplitPlanCache(2, PAGE)
    built = [length for length in range(500, 533) if cache.plan(table_of([length]), 300, block_epoch=1)[1]]
    assert built == [500, *(n for n in range(501, 533) if n % PAGE == 1 or (n - 300) % PAGE == 0)]


def test_each_window_keeps_a_plan_of_its_own():
    cache, table = SplitPlanCache(2, PAGE), table_of([4000])
    assert [cache.plan(table, window, 1)[1] for window in (None, 64, None, 64)] == [True, True, False, False]
    assert cache.plan(table, None, 1)[0].num_chunks > cache.plan(table, 64, 1)[0].num_chunks


MUTATORS: dict[str, Callable[[PageMap, list[RequestHandle]], object]] = {
    "acquire": lambda page_map, held: page_map.acquire(),
    "release": lambda page_map, held: page_map.release(held[1]),
    "extend": lambda page_map, held: page_map.extend(held[0], [60]),
    "truncate": lambda page_map, held: page_map.truncate(held[0], 1),
    "replace": lambda page_map, held: page_map.replace(held[0], 0, 61),
    "extend_rows": lambda page_map, held: page_map.extend_rows(np.array([0]), np.array([1]), np.array([62], np.int32)),
}


@pytest.mark.parametrize("mutator", MUTATORS)
def test_every_change_of_pages_or_rows_forgets_the_kept_plan(mutator):
    """Even where the page ranges happen to be the same: the page map's epoch is part of the key."""
    page_map = PageMap(max_num_seqs=4, max_pages_per_request=8)
    held = [handle for handle in (page_map.acquire(), page_map.acquire()) if handle is not None]
    page_map.extend(held[0], [0, 1])
    page_map.extend(held[1], [2])
    cache, table = SplitPlanCache(2, PAGE), table_of([20, 5])
    assert cache.plan(table, None, page_map.block_epoch)[1]
    assert not cache.plan(table, None, page_map.block_epoch)[1]
    MUTATORS[mutator](page_map, held)
    assert cache.plan(table, None, page_map.block_epoch)[1]
    assert not cache.plan(table, None, page_map.block_epoch)[1]


def test_the_mutators_above_are_all_there_are():
    """A method that is added to the page map must be named here as one that only reads, or be tried above."""
    public = {name for name in vars(PageMap) if not name.startswith("_") and callable(vars(PageMap)[name])}
    readers = {"is_live", "pages", "page_at", "num_pages", "rows_of", "require_live", "first_pages"}
    assert public - readers == set(MUTATORS)


@pytest.mark.slow
def test_plans_are_built_at_most_once_a_page_boundary_and_counted_only_where_fused_ran():
    fused = DecodeDispatch(floors=SplitFloors(), plans=SplitPlanCache(2, 4))
    driver = make_driver(num_pages=32, decode=fused)
    requests = [Request(RequestId(i), np.arange(1, 4 + 3 * i), max_tokens=20) for i in range(3)]
    page = driver.runtime.control.layout.tokens_per_page
    run_all(driver, requests)
    metrics = driver.runtime.metrics()
    crossings = sum(-(-request.num_tokens // page) for request in requests)
    assert metrics.decodes_by_kind == {"fused": metrics.num_steps - 1}
    opened_and_released = 2 * len(requests)
    assert 0 < metrics.num_plans_built <= crossings + opened_and_released
    assert metrics.num_plans_built < metrics.decodes_by_kind["fused"]
    declined = DecodeDispatch(floors=SplitFloors(10**6, 10**6), plans=SplitPlanCache(2, 4))
    driver = make_driver(num_pages=32, decode=declined)
    run_all(driver, [Request(RequestId(0), np.arange(1, 6), max_tokens=20)])
    assert driver.runtime.metrics().num_plans_built == 0
    assert set(driver.runtime.metrics().decodes_by_kind) == {"gather"}
