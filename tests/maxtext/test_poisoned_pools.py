"""Every slot that nobody owns holds poison in every step; none of it reaches an output."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kv_control.plan import RequestId
from kv_control.request import Request
from maxtext_paged.session import PagedSession, open_session
from tests.parity import assert_teacher_forced
from tests.tiny_models import dense_model, make_config, make_mesh

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]


def owned_slots(engine: PagedSession, slices: Any) -> np.ndarray:
    """bool ``[num_slots]``: slots that a request has written or writes in this step, and those of cached pages."""
    control = engine.control
    page = control.layout.tokens_per_page
    owned = np.zeros(control.layout.num_slots, np.bool_)
    written = control.written
    for i, row in enumerate(slices.rows.tolist()):
        written[row] = max(written[row], slices.start[i] + slices.num_tokens[i])
    for row in control.page_map.live_rows.tolist():
        pages = control.page_map.table[row, : control.page_map.counts[row]]
        slots = (pages[:, None] * page + np.arange(page)).reshape(-1)
        owned[slots[: written[row]]] = True
    for cached in control.prefix_index.pages.tolist():
        owned[cached * page : (cached + 1) * page] = True
    return owned


def run_poisoned(engine: PagedSession, requests: list[Request], poison: float) -> int:
    """The driver's loop, with poison put into the pools before every step."""
    scheduler, runtime = engine.driver.scheduler, engine.runtime
    for request in requests:
        engine.driver.submit(request)
    num_poisoned = 0
    while scheduler.has_work:
        slices = scheduler.slices(scheduler.schedule())
        prepared = runtime.prepare_step(slices) if slices else None
        if prepared is None:
            assert scheduler.preempt_newest() is not None
            continue
        keep = owned_slots(engine, slices).reshape(engine.control.num_pages, -1, 1, 1)
        num_poisoned += int((~keep).sum())
        runtime.pools = jax.tree.map(lambda pool, keep=keep: jnp.where(keep, pool, poison), runtime.pools)
        outcome = runtime.run_step(prepared)
        scheduler.advance(slices)
        scheduler.record_step(slices, outcome.results())
    return num_poisoned


@pytest.mark.parametrize(
    ("block", "poison"), [("llama2", float("nan")), pytest.param("gemma2", 3e38, marks=pytest.mark.long)]
)
def test_no_poison_reaches_an_output_of_the_reference_backend(block: str, poison: float) -> None:
    config = make_config(
        block,
        paged_backend="reference",
        paged_tokens_per_page=8,
        paged_num_pages=12,
        paged_max_num_seqs=4,
        paged_max_num_batched_tokens=32,
        paged_enable_prefix_cache=True,
        paged_check_invariants=True,
    )
    engine = open_session(config, mesh=make_mesh(config, jax.devices()[:1]), params=dense_model(block).params)
    rng = np.random.default_rng(3)
    shared = rng.integers(1, 255, 17)
    requests = [
        Request(RequestId(i), np.concatenate([shared[: 17 - i], rng.integers(1, 255, 2)]), max_tokens=34)
        for i in range(6)
    ]
    requests += [Request(RequestId(10 + i), shared[:11], max_tokens=9, group=1) for i in range(2)]
    assert run_poisoned(engine, requests, poison) > 500
    metrics = engine.control.metrics()
    assert metrics.num_preemptions and metrics.num_cached_tokens and metrics.num_shared_tokens
    assert_teacher_forced(requests, dense_model(block), relative=2e-5)
    engine.close()
