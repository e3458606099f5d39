"""Pages of layers with a sliding window: how many they get beside the others', and what requests then fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kv_common.errors import ConfigError
from kv_common.layout import KvStorageLayoutV1
from kv_common.window_group import WindowGroup
from kv_control.bucketing import token_ladder
from kv_control.control_plane import ControlPlane
from kv_control.plan import RequestSlice
from maxtext_paged.sizing import PoolSize, pool_size, requests_at_once
from maxtext_paged.window_sizing import GroupDemand

PAGE, WINDOW, STEP = 16, 512, 512
ROWS, CONTEXT = 32, 2048
FULL = KvStorageLayoutV1(3, 1, PAGE, num_kv_heads=1, head_dim=256, dtype="float32")
"""Gemma 3 270M: 3 global layers, 15 with a window of 512, one KV head of 256."""
LOCAL = replace(FULL, num_layers=15)
FULL_BYTES, LOCAL_BYTES = 2 * 3 * PAGE * 256 * 4, 2 * 15 * PAGE * 256 * 4


def demand(*, rows: int = ROWS, context: int = CONTEXT, prefix_cache: bool = False) -> GroupDemand:
    return GroupDemand.of(
        WindowGroup(WINDOW, LOCAL),
        max_num_seqs=rows,
        max_model_len=context,
        step_tokens=STEP,
        prefix_cache=prefix_cache,
    )


def size(*, rows: int = ROWS, context: int = CONTEXT, prefix_cache: bool = False, **options: int) -> PoolSize:
    unset = {"num_pages": 0, "budget_bytes": 0}
    demands = [demand(rows=rows, context=context, prefix_cache=prefix_cache)]
    return pool_size(FULL, max_num_seqs=rows, max_model_len=context, demands=demands, **(unset | options))


def bytes_of(pool: PoolSize) -> int:
    [group] = pool.window_groups
    return pool.num_pages * FULL_BYTES + group.layout.num_pages * LOCAL_BYTES


def pages_of(pool: PoolSize) -> tuple[int, int]:
    [group] = pool.window_groups
    return pool.num_pages, group.layout.num_pages


def test_what_is_unlimited_gets_every_full_context_and_every_window() -> None:
    """33 pages hold 512 positions however they lie; one to grow into; 32 for the chunk of one step."""
    assert pages_of(size(rows=2)) == (2 * 128, 2 * 34 + 32)


def test_a_count_of_pages_counts_the_other_layers_and_windows_get_as_many_as_they_can_use() -> None:
    assert pages_of(size(num_pages=200)) == (200, 200)
    assert pages_of(size(num_pages=4000)) == (4000, 32 * 34 + 32)
    assert pages_of(size(num_pages=4000, prefix_cache=True)) == (4000, 64 * 34 + 32)


@pytest.mark.parametrize("budget_mib", [40, 100, 300, 1000])
def test_a_budget_is_spent_and_never_exceeded(budget_mib: int) -> None:
    budget = budget_mib * 2**20
    pool = size(budget_bytes=budget)
    assert budget - 2 * (FULL_BYTES + LOCAL_BYTES) < bytes_of(pool) <= budget
    assert pages_of(pool)[1] >= min(pages_of(pool)[0], 34 + 32), "one request fits"


def test_a_budget_holds_more_long_requests_than_full_pages_of_all_layers_do() -> None:
    budget = 400 * 2**20
    pool = size(budget_bytes=budget)
    layout = replace(FULL, num_pages=pool.num_pages)
    whole = replace(FULL, num_layers=18, num_pages=budget // (FULL_BYTES + LOCAL_BYTES))
    for tokens, gain in ((2048, 1.5), (1024, 1.5), (512, 0.75)):
        windowed = requests_at_once(layout, tokens, 99, pool.window_groups, STEP)
        assert windowed >= gain * requests_at_once(whole, tokens, 99), tokens


def test_the_smallest_budget_that_works_holds_a_page_of_each() -> None:
    one = FULL_BYTES + LOCAL_BYTES
    with pytest.raises(ConfigError, match=f"one page of 16 tokens is {one} bytes .* smallest budget .* {one}"):
        size(budget_bytes=one - 1)
    assert pages_of(size(budget_bytes=one)) == (1, 1)


@pytest.mark.parametrize("context", [600, 1024, 2048, 32768])
@pytest.mark.parametrize("rows", [1, 4, 32])
@pytest.mark.parametrize("pages", [1, 5, 40, 70, 3000])
def test_every_division_is_one_that_the_control_plane_takes(context: int, rows: int, pages: int) -> None:
    """So that any request that fits the one pool fits the other, alone."""
    for pool in (
        size(rows=rows, context=context, num_pages=pages),
        size(rows=rows, context=context, budget_bytes=pages * (FULL_BYTES + LOCAL_BYTES)),
    ):
        ControlPlane(
            replace(FULL, num_pages=pool.num_pages),
            max_num_seqs=rows,
            max_model_len=context,
            token_ladder=token_ladder(STEP),
            window_groups=pool.window_groups,
        )


def test_gemma_3_holds_two_fifths_of_the_pages_at_2048_tokens() -> None:
    """Page counts of one request: 128 pages of 3 layers and 33 of 15, where every layer had 128."""
    pool = size()
    control = ControlPlane(
        replace(FULL, num_pages=pool.num_pages),
        max_num_seqs=ROWS,
        max_model_len=CONTEXT,
        token_ladder=token_ladder(STEP),
        window_groups=pool.window_groups,
    )
    handle = control.open()
    for n in (512, 512, 512, 511, 1):
        piece = RequestSlice(handle, control.num_written(handle), np.zeros(n, np.int32))
        reservation = control.reserve([piece])
        assert reservation is not None
        control.commit(control.plan(control.confirm_scrubbed(reservation)))
    [window] = control.metrics().windows
    full, local = control.pages_held(handle), window.num_held_pages
    assert (full, local) == (128, 32), "the next query, at 2048, sees 1537 .. 2047"
    assert (window.peak_pages_held, window.num_passed_pages) == (64, 96)
    layer_pages = 3 * full + 15 * local
    assert layer_pages == 864 and 18 * full == 2304
