"""Layers with a sliding window keep their window only, and every token is still that of MaxText's dense forward.

test_families.py runs every family with windows through chunks, mixed steps and preemptions on small pools whose freed
pages hold NaN, on both backends and on two devices; here are the other ways in which requests share and end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kv_control.bucketing import token_ladder
from kv_control.control_plane import ControlPlane
from kv_control.plan import RequestId, SamplingSpec
from kv_control.request import Request
from kv_execution.packing import pack
from kv_execution.step_inputs import build_step_inputs
from maxtext_paged.assembly import assemble
from maxtext_paged.session import PagedSession, open_session
from tests.parity import assert_teacher_forced
from tests.tiny_models import dense_model, make_config, make_mesh

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]

FAMILY, WINDOW, RELATIVE_ERROR = "gemma3", 8, 2e-5
POOL = {
    "paged_tokens_per_page": 4,
    "paged_num_pages": 48,
    "paged_max_num_seqs": 4,
    "paged_max_num_batched_tokens": 8,
    "paged_check_invariants": True,
    "paged_poison_on_free": True,
    "paged_enable_prefix_cache": True,
}


def opened(**options: Any) -> PagedSession:
    config = make_config(FAMILY, **POOL | options)
    return open_session(config, mesh=make_mesh(config), params=dense_model(FAMILY).params)


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.long)], ids=["ahead", "in turn"])
def session(request: pytest.FixtureRequest) -> Iterator[PagedSession]:
    session = opened(paged_async_scheduling=request.param)
    yield session
    session.close()


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 255, length).astype(np.int32)


NUMBERS = iter(range(1_000_000))


def run(session: PagedSession, *prompts: np.ndarray, max_tokens: int, group: int | None = None) -> list[Request]:
    requests = [
        Request(
            RequestId(next(NUMBERS)),
            tokens,
            max_tokens=max_tokens,
            group=group,
            sampling=SamplingSpec(sample_index=i if group is not None else 0),
        )
        for i, tokens in enumerate(prompts)
    ]
    for request in requests:
        session.driver.submit(request)
    list(session.driver.run())
    assert not [request.error for request in requests if request.error]
    assert_teacher_forced(requests, dense_model(FAMILY), relative=RELATIVE_ERROR)
    return requests


def test_local_layers_have_a_pool_of_their_own_and_global_ones_have_the_other(session: PagedSession) -> None:
    [group] = session.model.window_groups
    assert (group.window, group.layout.num_layers, session.model.layout.num_layers) == (WINDOW, 6, 1)
    assert group.layout.num_pages == 2 * 4 * 4 + 2, "two windows a row with the prefix cache, and a step's chunk"
    shapes = [pool.shape[0] for pair in session.model.layers_of_pools(session.runtime.pools) for pool in pair]
    assert shapes == [34, 34] * 5 + [48, 48] + [34, 34]
    assert sum(shape == 34 for shape in shapes) == sum(session.model.leaf_groups)
    held = sum(leaf.nbytes for pair in session.model.layers_of_pools(session.runtime.pools) for leaf in pair)
    assert session.model.total_pool_bytes() == held
    assert session.sleep() == held
    session.wake()


def test_prefix_hits_inside_and_far_outside_the_window_are_denses(session: PagedSession) -> None:
    whole = prompt(1, 40)
    before = session.control.counters.num_cached_tokens
    run(session, whole, max_tokens=9)
    run(session, *(np.append(whole[:n], [7, n]) for n in (6, 17, 39)), max_tokens=12)
    assert session.control.counters.num_cached_tokens - before == 4 + 16 + 36


def test_samples_of_one_prompt_are_denses(session: PagedSession) -> None:
    before = session.control.counters.num_shared_tokens
    requests = run(session, *[prompt(2, 15)] * 3, max_tokens=12, group=1)
    assert session.control.counters.num_shared_tokens - before == 2 * 14
    assert len({tuple(request.tokens.tolist()) for request in requests}) == 1, "greedy samples are one"


def test_windows_hold_a_few_pages_of_a_long_request_and_full_tables_hold_all() -> None:
    """The same request, beside a session whose every layer keeps every page."""
    peaks, tokens = [], []
    for switch in ("auto", "off"):
        session = opened(paged_window_pages=switch, paged_enable_prefix_cache=False)
        [request] = run(session, prompt(3, 40), max_tokens=20)
        metrics = session.runtime.metrics().control
        assert session.driver.metrics.peak_pages_held == 15
        peaks.append([window.peak_pages_held for window in metrics.windows])
        tokens.append(request.tokens.tolist())
        session.close()
    assert peaks == [[4], []], "8 keys and 8 new ones lie on 4 pages"
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama2", {}), ("gemma2", {"paged_window_pages": "off"}), ("gemma2", {"max_target_length": 8})],
    ids=["no windows", "switched off", "a context within the window"],
)
def test_without_window_groups_a_steps_arrays_are_what_they_were(family: str, options: dict[str, Any]) -> None:
    """Nine arrays of pages among the step's; with a group five more."""
    options = {"max_prefill_predict_length": 4, **options}
    assembly = assemble(make_config(family, **options), mesh=make_mesh(make_config(family, **options)))
    assert assembly.model.window_groups == () and assembly.pool.window_groups == ()
    assert set(assembly.model.leaf_groups) == {0}
    assert assembly.model.layout.num_layers == len(assembly.model.layer_names)


def test_a_group_adds_five_arrays_to_a_step_and_none_of_them_grows_with_the_context() -> None:
    sizes = []
    for context in (64, 256):
        config = make_config(FAMILY, **POOL | {"max_target_length": context, "paged_num_pages": 200})
        assembly = assemble(config, mesh=make_mesh(config))
        control = ControlPlane(
            assembly.model.layout,
            max_num_seqs=4,
            max_model_len=context,
            token_ladder=token_ladder(8),
            window_groups=assembly.model.window_groups,
        )
        plan = control.plan(control.confirm_scrubbed(control.reserve([])), min_token_rung=8)
        inputs = build_step_inputs(plan)
        [window] = inputs.pages.windows
        sizes.append(pack(window)[1].num_words)
        assert pack(inputs)[1].num_words > sizes[-1]
    assert sizes[0] == sizes[1] == 8 + 5 + 4 + 4 + (4 * 4 + 2)
