"""The Triton kernels keep every backend's promises, run by Triton's interpreter: a process of its own.

For:        ``tests/execution/test_triton_interpreted.py``, which starts pytest on it with ``TRITON_INTERPRET=1``.
Not for:    pytest's own collection: the variable decides how kernels are made, at import, for the whole process.
May import: numpy, jax, pytest, kv_execution.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kv_execution.attention.triton_backend import TritonBackend
from kv_execution.attention.triton_bridge import GpuTarget
from kv_execution.attention.triton_tiles import Tile
from kv_execution.dispatch import SplitFloors
from tests.execution import conformance, paged_steps
from tests.execution.conformance import BackendConformance
from tests.execution.numpy_model import UNIT_ROUNDOFF, float32_bound
from tests.execution.paged_steps import (
    EVERYTHING,
    PLAIN,
    assert_equals_dense,
    expected,
    make_request,
    make_step,
    rounded,
    run,
    run_decode,
)
from tests.execution.triton_interpreter import launch_interpreted

BACKEND = TritonBackend(target=GpuTarget("cuda", "90", 132), launcher=launch_interpreted)
TINY_TILE = Tile(block_m=16, block_t=16, num_warps=1, num_stages=1)
TINY = replace(BACKEND, decode_tile=TINY_TILE, attend_tile=TINY_TILE, min_piece_tokens=16)
"""Every loop turns more than once in small steps, and rows of 17 keys are cut and merged."""
SMALL = replace(TINY, target=GpuTarget("cuda", "90", 16))
"""At most four pieces a row: fewer programs to interpret."""


@pytest.fixture
def small_rungs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with less padding: the interpreter takes a millisecond for a program that has nothing to do."""
    for module in (paged_steps, conformance):
        monkeypatch.setattr(module, "TOKEN_RUNG", 48)
        monkeypatch.setattr(module, "ROW_RUNG", 8)


@pytest.mark.long
class TestTritonInterpreted(BackendConformance):
    backend = BACKEND
    head_dims = (64, 80, 96, 128, 256)
    # A callback's arrays are copies: held by the lowered programs (test_triton_lowering) and on devices instead.
    test_appending_keeps_the_pools_where_they_are = None
    test_fifty_donated_steps_leave_the_pools_where_they_are = None
    test_sharded_heads_equal_dense_attention = None


@pytest.mark.long
class TestTritonInterpretedInTinyTiles(TestTritonInterpreted):
    backend = TINY


@pytest.mark.usefixtures("small_rungs")
class TestTritonInterpretedInShort:
    """What the ordinary run has time for."""

    backend = SMALL
    head_dim = 16
    rng = BackendConformance.rng
    test_append = BackendConformance.test_append_writes_the_given_slots_and_no_other
    test_mixed = BackendConformance.test_decodes_prompts_and_chunks_share_a_step
    test_options = BackendConformance.test_a_window_a_cap_and_sinks_act_together
    test_left_pages = BackendConformance.test_pages_that_left_the_window_are_not_needed
    test_sick = BackendConformance.test_a_sick_request_shows_and_its_neighbours_do_not_notice
    test_padding = BackendConformance.test_a_step_of_padding_alone_gives_zeros_and_writes_nothing
    test_half = BackendConformance.test_bfloat16_activations_are_computed_in_float32_and_rounded_once


small = pytest.mark.usefixtures("small_rungs")


def sizes(rng, pairs, **shape):
    return [make_request(rng, length, num_new, **shape) for length, num_new in pairs]


@small
def test_a_row_cut_into_pieces_equals_dense_attention():
    """Pieces that end inside a page and inside a block, one of a single key, and rows of one piece beside them."""
    rng = np.random.default_rng(3)
    step = make_step(sizes(rng, [(97, 1), (33, 1), (16, 1), (1, 1)]), page_size=16)
    sinks = rng.normal(size=4).astype(np.float32)
    assert_equals_dense(run_decode(SMALL, step, PLAIN, None), step)
    assert_equals_dense(run_decode(SMALL, step, EVERYTHING, sinks), step, EVERYTHING, sinks=sinks)


@small
def test_below_a_floor_rows_stay_whole_and_equal_dense_attention():
    rng = np.random.default_rng(4)
    step = make_step(sizes(rng, [(97, 1), (33, 1)]), page_size=16)
    backend = replace(SMALL, floors=SplitFloors(4096, 512))
    assert_equals_dense(run_decode(backend, step, PLAIN, None), step)


@small
@pytest.mark.parametrize(("fault", "num_new"), [("outside", 1), ("negative", 5), ("short", 1), ("short", 5)])
def test_a_page_that_is_not_there_shows_in_its_request_alone(fault, num_new):
    """Nothing is read past the pool, and nothing is left out without a word."""
    rng = np.random.default_rng(5)
    step = make_step(sizes(rng, [(20, num_new), (20, num_new)]), page_size=4)
    table = step.table
    first = int(table.kv_indptr[1])
    indices, indptr = table.kv_indices.copy(), table.kv_indptr.copy()
    if fault == "short":
        indptr[2:] -= 1
    else:
        indices[first + 2] = {"outside": step.k_pool.shape[0], "negative": -1}[fault]
    broken = replace(step, table=replace(table, kv_indices=indices, kv_indptr=indptr))
    output = run(SMALL, broken)
    assert_equals_dense(output, step, skip=[1])
    assert np.isnan(output[step.rows(1)]).all(axis=(1, 2)).any()


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (8, 1), (40, 2)])
def test_half_precision_pools_and_queries_equal_dense_attention_rounded_once(dtype, dim, heads, kv_heads):
    """Groups of one, three, eight and twenty query heads: the last take several tiles of 16 rows."""
    rng = np.random.default_rng(6)
    requests = sizes(rng, [(300, 1), (64, 1), (1, 1), (75, 20)], heads=heads, kv_heads=kv_heads, dim=dim)
    step, options = make_step(rounded(requests, dtype), page_size=16), replace(PLAIN, scale=dim**-0.5)
    output = run(BACKEND, step, options, dtype=dtype, activations=dtype)
    shares = []
    for i, request in enumerate(step.requests):
        wanted = expected(request, options)
        bound = float32_bound(request.query, request.key, request.value, options.scale)
        error = np.abs(output[step.rows(i)] - wanted)
        excess = (error - UNIT_ROUNDOFF[dtype] * np.abs(wanted)).max()
        shares.append((error.max(), excess / bound))
        assert excess <= bound
    most, share = np.max(shares, axis=0)
    print(f"{dtype} {dim} {heads}/{kv_heads}: error {most:.2e}, past one rounding {max(share, 0):.0%} of the bound")
