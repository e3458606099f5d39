"""Reading a paged session's own figures.

For:        what one step changes (cheap, after every step) and the engine's counts (when something is shown).
Not for:    keeping them (recorder.py).
May import: numpy, kv_control; a session is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from kv_control.request_table import NOBODY
from maxtext_paged.report.counts import JobCounts
from maxtext_paged.report.recorder import StepView

if TYPE_CHECKING:
    from maxtext_paged.session import PagedSession


@runtime_checkable
class OwnFigures(Protocol):
    """A session that is several, elsewhere, and has their figures added up."""

    def step_view(self) -> StepView:
        """See the function of that name."""
        ...

    def gather(self, counts: JobCounts) -> None:
        """See the function of that name."""
        ...


def step_view(session: PagedSession | OwnFigures) -> StepView:
    """The engine as it stands after a step. Reads a few arrays of one entry per running request, and no pages."""
    if isinstance(session, OwnFigures):
        return session.step_view()
    control, scheduler = session.control, session.driver.scheduler
    table, counters = scheduler.table, control.counters
    rows = np.flatnonzero(table.ids != NOBODY)
    num_free, num_pages = control.num_free_pages, control.num_pages
    return StepView(
        request_ids=table.ids[rows],
        num_generated=table.num_tokens[rows] - table.num_prompt[rows],
        waiting=scheduler.num_waiting,
        pages_held=num_pages - num_free,
        pages_needed=num_pages - control.num_available_pages,
        sampled_tokens=counters.num_generated_tokens,
        prompt_tokens=counters.num_prefill_tokens + counters.num_recomputed_tokens,
        steps=counters.num_steps,
        preemptions=counters.num_preemptions,
    )


def gather(counts: JobCounts, session: PagedSession | OwnFigures) -> None:
    """Take the engine's own counts. Walks the pool's books: not for every step."""
    if isinstance(session, OwnFigures):
        session.gather(counts)
        return
    control, driver, runtime = session.control, session.driver, session.runtime.metrics()
    metrics = driver.metrics
    counts.sampled_tokens = metrics.num_generated_tokens
    counts.running, counts.waiting = driver.scheduler.num_running, driver.scheduler.num_waiting
    counts.num_pages = control.num_pages
    counts.pages_held = control.num_pages - control.num_free_pages
    counts.steps = metrics.num_steps
    counts.preemptions = metrics.num_preemptions
    counts.peak_pages = metrics.peak_pages_held
    counts.scrubbed_pages = runtime.num_scrubbed_pages
    windows = {str(one.window): one for one in runtime.control.windows}
    counts.window_pages = {window: one.num_pages for window, one in windows.items()}
    counts.window_pages_held = {window: one.num_pages - one.num_free_pages for window, one in windows.items()}
    counts.window_peak_pages = {window: one.peak_pages_held for window, one in windows.items()}
    counts.backends = runtime.steps_by_backend
    counts.decodes = runtime.decodes_by_kind
    counts.decode_causes = runtime.decodes_by_cause
    counts.programs = runtime.compiled
    counts.shares = control.prefix_index is not None
    counts.evictions = runtime.control.num_evictions
    counts.hit_rate = runtime.control.page_hit_rate
