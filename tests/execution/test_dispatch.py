"""A step's decode rows are dispatched by counts alone, aloud, and as the kernel's own work list then does it."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from kv_common.page_table import KvPageTableV1, PageRow, pack_page_table
from kv_control.plan import RequestId
from kv_control.request import Request
from kv_execution.attention.native import NativeBackend, native_threads
from kv_execution.attention.reference import ReferenceBackend
from kv_execution.dispatch import MEASURED_FLOORS, DecodeDispatch, SplitFloors, decide, floors_for
from kv_execution.native.library import native_available, native_library
from kv_execution.runtime import PagedRuntime
from kv_execution.split_plan import SplitPlan, SplitPlanCache
from tests.execution.paged_steps import PLAIN, assert_equals_dense, make_request, make_step, run
from tests.fakes import make_driver, run_all

FLOORS = SplitFloors(min_tokens=4096, min_tokens_per_request=512)
built = pytest.mark.skipif(native_available() is not None, reason=str(native_available()))


def table_of(sizes: list[tuple[int, int]]) -> KvPageTableV1:
    """A page table of ``(length, new tokens)`` requests on pages of 64 tokens."""
    rows, page = [], 0
    for length, num_new in sizes:
        count = -(-length // 64)
        rows.append(PageRow(length - num_new, num_new, np.arange(page, page + count, dtype=np.int32)))
        page += count
    return pack_page_table(rows, num_pages=2048, tokens_per_page=64, token_rung=64, row_rung=16, index_capacity=2048)


def outcome_of(sizes: list[tuple[int, int]], **options):
    return decide(table_of(sizes), **{"window": None, "fused_kernel": None, "floors": FLOORS, **options})


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ([(4096, 1)], "fused"),
        ([(4095, 1)], "gather"),
        ([(956, 1)] * 4, "fused"),
        ([(512, 1), (512, 1)], "fused"),
        ([(512, 1), (511, 1)], "gather"),
        ([(4000, 1), (3, 1)], "fused"),
        ([(9000, 20)], "none"),
        ([], "none"),
    ],
)
def test_the_floors_hold_to_the_token(sizes, kind):
    outcome = outcome_of(sizes)
    assert outcome.kind == kind
    assert outcome.batch == sum(num_new == 1 for _, num_new in sizes)


def test_floors_are_the_platform_s_own_unless_others_are_given():
    assert floors_for("cpu") == MEASURED_FLOORS["cpu"]
    assert floors_for("rocm") == floors_for("cuda") == FLOORS
    assert floors_for("cpu", 7, 0) == SplitFloors(7, 0)


def test_a_report_says_from_where_on_each_window_s_decodes_are_fused():
    plans = SplitPlanCache(2, 16)
    assert list(DecodeDispatch((None, 64), floors=FLOORS, plans=plans).describe()) == [
        f"{layers}: fused split-KV on 2 threads, for one request from 4096 visible KV tokens on "
        "(paged_split_kv_min_tokens), for several from 512 each (paged_split_kv_min_tokens_per_request); else gather"
        for layers in ("full attention", "window of 64")
    ]
    assert list(DecodeDispatch(forced=True, plans=plans).describe()) == [
        "full attention: fused split-KV on 2 threads, always (paged_attention_native=1)"
    ]
    assert list(DecodeDispatch(fused_kernel="not built").describe()) == ["full attention: gather, not built"]


def test_rows_with_several_tokens_neither_help_nor_hinder():
    alone, mixed = outcome_of([(4095, 1)]), outcome_of([(4095, 1), (8000, 30), (700, 2)])
    assert mixed == alone


def test_a_window_limits_what_counts_as_visible():
    assert outcome_of([(9000, 1)], window=4096).visible_tokens == 4096
    assert outcome_of([(9000, 1)], window=4095).kind == "gather"


def test_a_fused_launch_says_its_numbers_and_a_decline_its_own_fix():
    [fused] = DecodeDispatch(floors=FLOORS, plans=SplitPlanCache(4, 64)).outcomes(table_of([(956, 1)] * 3 + [(960, 1)]))
    assert fused.reason == "fused split-KV launch (batch 4, 3828 visible KV tokens, 16 chunks, merge on)"
    [whole] = DecodeDispatch(forced=True, plans=SplitPlanCache(4, 64)).outcomes(table_of([(30, 1)]))
    assert whole.reason == (
        "fused split-KV launch (batch 1, 30 visible KV tokens, floors bypassed by paged_attention_native=1, 1 chunks, "
        "merge off)"
    )
    decline = outcome_of([(100, 1), (30, 1)]).reason
    assert "batch 2, 130 visible KV tokens < 1024" in decline
    assert "lower it" in decline and "paged_split_kv_min_tokens_per_request=512" in decline
    assert "paged_split_kv_min_tokens=4096" in outcome_of([(100, 1)]).reason
    missing = outcome_of([(9000, 1)], fused_kernel="the reference backend has no split-KV")
    assert (missing.kind, "the reference backend has no split-KV" in missing.reason) == ("gather", True)


def test_force_bypasses_the_floors_but_not_a_missing_kernel():
    assert outcome_of([(1, 1)], forced=True).kind == "fused"
    assert outcome_of([(9000, 1)], forced=True, fused_kernel="not built").kind == "gather"


def test_deciding_touches_nothing():
    table = table_of([(100, 1), (30, 1)])
    before = {name: np.array(getattr(table, name)) for name in ("seq_lens", "kv_indices", "kv_indptr", "slot_mapping")}
    dispatch = DecodeDispatch(floors=FLOORS)
    [outcome] = dispatch.outcomes(table)
    assert (dispatch.counts, outcome.plan, outcome.plan_built) == ({}, None, False)
    for name, array in before.items():
        np.testing.assert_array_equal(getattr(table, name), array)


def test_each_cause_is_announced_once_at_info_and_every_launch_is_counted(caplog):
    dispatch = DecodeDispatch(windows=(None, 64), floors=FLOORS, plans=SplitPlanCache(2, 64))
    with caplog.at_level(logging.INFO, logger="kv_execution.dispatch"):
        for length in (5000, 5001, 100, 6000):
            dispatch.launched(dispatch.outcomes(table_of([(length, 1)])))
        dispatch.launched(dispatch.outcomes(table_of([(6000, 40)])))
    assert dispatch.counts == {"fused": 3, "gather": 5}
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "decode: fused split-KV launch (batch 1, 5000 visible KV tokens, 8 chunks, merge on)",
        "decode: gather (batch 1, 64 visible KV tokens < 4096): below paged_split_kv_min_tokens=4096; lower it, or "
        "bypass the floors with paged_attention_native=1",
    ]


@built
def test_the_kernel_does_what_was_decided():
    """The host's decision and the work list's are two computations: over ragged steps and windows they agree."""
    rng = np.random.default_rng(3)
    floors = SplitFloors(min_tokens=150, min_tokens_per_request=60)
    kinds = set()
    for window in (None, 70):
        options = replace(PLAIN, sliding_window=window)
        for _ in range(12):
            count = int(rng.integers(1, 4))
            sizes = [(int(rng.integers(1, 260)), 1) for _ in range(count)] + [(30, int(rng.integers(1, 4)))]
            requests = [make_request(rng, length, num_new, heads=2, kv_heads=1) for length, num_new in sizes]
            step = make_step(requests, page_size=16)
            before = native_library().counts()
            output = run(NativeBackend(None, floors.min_tokens, floors.min_tokens_per_request), step, options)
            counts = native_library().counts().since(before)
            assert_equals_dense(output, step, options)
            [outcome] = DecodeDispatch((window,), floors=floors, plans=SplitPlanCache(native_threads(), 16)).outcomes(
                step.table
            )
            assert (counts.fused, counts.whole) == (outcome.kind == "fused", outcome.kind == "gather"), outcome
            plan = outcome.plan or SplitPlan(0, 0)
            assert (counts.chunks, counts.merged_rows) == (plan.num_chunks, plan.num_merged_rows), outcome
            kinds.add((window, outcome.kind))
    assert kinds == {(None, "fused"), (None, "gather"), (70, "fused"), (70, "gather")}


@built
def test_below_the_floor_the_rows_equal_the_reference():
    rng = np.random.default_rng(5)
    step = make_step([make_request(rng, length, 1, dim=64) for length in (400, 3, 77)], page_size=16)
    declined, reference = run(NativeBackend(None, 10**6, 10**6), step), run(ReferenceBackend(), step)
    np.testing.assert_allclose(declined, reference, rtol=0, atol=2e-6)


@built
@pytest.mark.parametrize("window", [None, 37])
def test_where_no_rounding_happens_declined_and_fused_rows_equal_the_reference_to_the_bit(window):
    """Two kernels add in different orders, so in general they differ in the last bits. Not where every sum is exact:
    each query picks one key by a score that leaves the others no weight, and the values are integers."""
    rng = np.random.default_rng(11)
    requests = []
    for length in (1, 63, 64, 65, 700):
        request = make_request(rng, length, 1, heads=4, kv_heads=2, dim=64)
        request.value[:] = rng.integers(-(2**20), 2**20, request.value.shape)
        request.key[:] = rng.choice([-1.0, 1.0], request.key.shape)
        oldest = 0 if window is None else max(0, length - window)
        for head in range(4):
            request.query[:, head] = 64.0 * request.key[rng.integers(oldest, length), head // 2]
        requests.append(request)
    step, options = make_step(requests, page_size=16), replace(PLAIN, scale=1.0, sliding_window=window)
    reference = run(ReferenceBackend(), step, options)
    assert set(np.unique(np.mod(reference[: len(requests)], 1.0))) == {0.0}, "something was rounded"
    for floor in (10**6, 0):
        before = native_library().counts()
        np.testing.assert_array_equal(run(NativeBackend(None, floor, floor), step, options), reference)
        counts = native_library().counts().since(before)
        assert (counts.whole, counts.fused) == ((1, 0) if floor else (0, 1))


def test_a_runtime_counts_the_decodes_it_dispatched():
    driver = make_driver(num_pages=16)
    run_all(driver, [Request(RequestId(i), np.arange(1, 6), max_tokens=4) for i in range(2)])
    metrics = driver.runtime.metrics()
    assert metrics.decodes_by_kind == {"gather": 3}
    assert metrics.num_steps == 4


@pytest.mark.slow
def test_a_runtime_dispatches_by_the_block_epoch_of_each_plan_and_counts_no_warm_up(monkeypatch):
    given, packed = [], []
    outcomes, run_step = DecodeDispatch.outcomes, PagedRuntime.run_step

    def spied(dispatch, table, block_epoch=-1):
        given.append(block_epoch)
        return outcomes(dispatch, table, block_epoch)

    def spied_step(runtime, prepared, **options):
        packed.append(prepared.plan.block_epoch)
        return run_step(runtime, prepared, **options)

    monkeypatch.setattr(DecodeDispatch, "outcomes", spied)
    monkeypatch.setattr(PagedRuntime, "run_step", spied_step)
    driver = make_driver(num_pages=16)
    driver.runtime.warm_up()
    assert (driver.runtime.metrics().num_steps, given) == (0, [])
    run_all(driver, [Request(RequestId(0), np.arange(1, 6), max_tokens=9)])
    assert given == packed
    assert len(set(given)) > 1
