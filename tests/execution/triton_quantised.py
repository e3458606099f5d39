"""Quantised pools under the Triton kernels, run by Triton's interpreter: a process of its own.

For:        ``tests/execution/test_triton_interpreted.py``, which starts pytest on it with ``TRITON_INTERPRET=1``.
Not for:    pytest's own collection (see triton_conformance.py), or pools without scales.
May import: numpy, jax, pytest, kv_execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kv_common.errors import UnsupportedError
from kv_execution.attention.api import AttentionOptions
from kv_execution.attention.triton_backend import TritonBackend
from kv_execution.dispatch import SplitFloors
from kv_execution.metadata import PageMetadata
from tests.execution import paged_steps
from tests.execution import test_quantised_pools as promises
from tests.execution.numpy_model import UNIT_ROUNDOFF, float32_bound
from tests.execution.numpy_quantised import DTYPES
from tests.execution.paged_steps import EVERYTHING, PLAIN, Request, Step, expected, make_request, make_step, rounded
from tests.execution.quantised_steps import as_read, pool_of, run_quantised
from tests.execution.triton_conformance import BACKEND, SMALL

WHOLE = replace(SMALL, floors=SplitFloors(1 << 30, 1 << 30))
"""No row is cut."""
TWO_PARTS = 2.0**-16
"""Most that two parts of 8 bits leave of a weight: what half-precision queries may lose more than float32 ones."""
SMALLEST_ROUNDING = {"bfloat16": 0.0, "float16": 2.0**-25}
"""Half the distance of subnormal numbers."""

long = pytest.mark.long
parametrized = pytest.mark.parametrize("dtype", DTYPES)
rng = promises.rng


@pytest.fixture
def backend() -> TritonBackend:
    return SMALL


any_build = backend


@pytest.fixture(autouse=True)
def small_rungs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with less padding, as in triton_conformance.py."""
    if request.node.get_closest_marker("long") is None:
        monkeypatch.setattr(paged_steps, "TOKEN_RUNG", 48)
        monkeypatch.setattr(paged_steps, "ROW_RUNG", 8)


test_every_value = promises.test_every_value_there_is_reads_as_the_number_it_stands_for
test_append = promises.test_appending_drops_padding_and_touches_no_other_slot
test_attention = long(promises.test_attention_is_dense_attention_over_what_the_pool_holds)
test_each_way_of_sharing_keys = long(promises.test_each_way_of_sharing_keys_reads_each_head_with_its_own_scale)
test_sick = long(promises.test_a_sick_request_shows_and_its_neighbours_do_not_notice)
test_reused_page = long(promises.test_a_page_that_was_evicted_and_reused_keeps_nothing_of_its_old_scales)


def uneven(rng: np.random.Generator, sizes: Sequence[tuple[int, int]], **shape: int) -> list[Request]:
    """Requests whose heads and tokens differ by a factor of up to 256, K and V apart."""
    requests = [make_request(rng, length, num_new, **shape) for length, num_new in sizes]
    for request in requests:
        for rows in (request.key, request.value):
            rows *= np.exp2(rng.integers(-6, 2, size=(*rows.shape[:2], 1))).astype(np.float32)
    return requests


def assert_equals_dense(
    output: Any, read: Step, options: AttentionOptions, sinks: Any = None, half: str = "", skip: Sequence[int] = ()
) -> None:
    """Within float32's bound; where activations are ``half``, also one rounding and what two parts leave."""
    for i in set(range(len(read.requests))) - set(skip):
        request = read.requests[i]
        wanted = expected(request, options, sinks)
        bound = float32_bound(request.query, request.key, request.value, options.scale)
        if half:
            rounding = np.maximum(UNIT_ROUNDOFF[half] * np.abs(wanted), SMALLEST_ROUNDING[half])
            bound = bound + rounding + TWO_PARTS * np.abs(request.value).max()
        worst = (np.abs(output[read.rows(i)] - wanted) / bound).max()
        assert worst <= 1, f"request {i}: {worst:.2f} of the bound"
    assert not output[read.table.num_tokens :].any(), "padding rows must be zeros"


def compare(
    backend: TritonBackend, step: Step, dtype: str, options: AttentionOptions, sinks: Any = None, half: str = ""
) -> None:
    output, *_ = run_quantised(backend, step, dtype, options, sinks=sinks, activations=half or "float32")
    assert_equals_dense(output, as_read(step, dtype), options, sinks, half)


FORMS = {"cut": SMALL, "whole": WHOLE}


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        ("int8", "cut"),
        ("float8_e4m3fn", "whole"),
        pytest.param("int8", "whole", marks=long),
        pytest.param("float8_e4m3fn", "cut", marks=long),
    ],
)
def test_rows_cut_or_whole_read_each_head_and_token_with_its_own_scale(rng, dtype, form):
    """Pieces end inside a page and inside a block; pages of 7, which no block divides."""
    step = make_step(uneven(rng, [(97, 1), (33, 1), (1, 1), (40, 1)]), page_size=7)
    compare(FORMS[form], step, dtype, PLAIN)


@parametrized
def test_prompts_chunks_and_decodes_share_a_step_with_a_window_a_cap_and_sinks(rng, dtype):
    """Poison beside them, in slots and in padding, has NaN for a scale."""
    step = make_step(uneven(rng, [(9, 1), (30, 1), (17, 17), (41, 22), (13, 1), (5, 3)]), page_size=16)
    compare(SMALL, step, dtype, EVERYTHING, rng.normal(size=4).astype(np.float32))


@parametrized
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_half_precision_queries_lose_one_rounding_and_what_two_parts_of_a_weight_leave(rng, dtype, half):
    """Scales between 2**-14 and 2**-22, which float16 holds with a few bits, if at all."""
    requests = uneven(rng, [(40, 1), (1, 1), (21, 9)])
    for request in requests:
        request.value[:] = request.value * 2.0**-8
    compare(SMALL, make_step(rounded(requests, half), page_size=16), dtype, PLAIN, half=half)


@parametrized
@pytest.mark.parametrize("num_new", [1, 5], ids=["decode", "tile"])
def test_a_row_that_is_not_a_number_shows_in_its_request_and_heads_alone(rng, dtype, num_new):
    """A NaN in one row of K or V is that row's scale."""
    for name in ("key", "value"):
        step = make_step([make_request(rng, 20, num_new) for _ in range(3)], page_size=16)
        getattr(step.requests[1], name)[19, 1, 3] = np.nan
        step = make_step(step.requests, page_size=16)
        output, *_ = run_quantised(SMALL, step, dtype)
        read = as_read(step, dtype)
        last, wanted = output[step.rows(1)][-1], expected(read.requests[1])[-1]
        assert np.isnan(last[2:]).all()
        np.testing.assert_allclose(last[:2], wanted[:2], rtol=0, atol=1e-5)
        assert_equals_dense(output, read, PLAIN, skip=[1])


@long
@parametrized
@pytest.mark.parametrize("half", ["", "bfloat16", "float16"], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 80, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (40, 2)])
def test_every_head_size_and_group_in_the_tiles_of_a_device(rng, dtype, half, dim, heads, kv_heads):
    sizes, shape = [(300, 1), (64, 1), (1, 1), (75, 20)], {"heads": heads, "kv_heads": kv_heads, "dim": dim}
    requests = uneven(rng, sizes, **shape)
    step = make_step(rounded(requests, half) if half else requests, page_size=16)
    compare(BACKEND, step, dtype, replace(PLAIN, scale=dim**-0.5), half=half)


def test_pools_without_the_scales_they_need_are_refused_and_not_read(rng):
    step = make_step([make_request(rng, 9, 1)], page_size=16)
    pool = pool_of(step.k_pool, "int8")
    pages, short = PageMetadata.from_table(step.table), replace(pool, scales=pool.scales[1:])
    other, plain = pool_of(step.v_pool, "float8_e4m3fn"), jnp.asarray(step.k_pool)
    options: dict[str, Any] = {"scale": 1.0, "sliding_window": None, "soft_cap": None, "sinks": None}
    for k_pool, v_pool in ((pool.values, pool), (short, pool), (pool, short), (pool, other), (pool, plain)):
        with pytest.raises(UnsupportedError, match=r"with scales|must be alike"):
            BACKEND.attend(jnp.asarray(step.query), k_pool, v_pool, pages, **options)
        with pytest.raises(UnsupportedError, match=r"with scales|must be alike"):
            BACKEND.append(k_pool, v_pool, jnp.asarray(step.key), jnp.asarray(step.value), step.table.slot_mapping)
