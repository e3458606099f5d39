"""Requests through a paged session, with the time of every token in a table of its own.

For:        the paged arm of every benchmark that runs whole requests.
Not for:    loops of its own: it submits to the session's driver and watches.
May import: the standard library, numpy, kv_control, maxtext_paged, benchmarks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.records import WrongPath
from kv_control.plan import RequestId
from kv_control.request import Request
from maxtext_paged.session import PagedSession


class TokenClock:
    """When each token was there, by request id: a side table, so that requests carry no clocks."""

    def __init__(self, requests: Sequence[Request], start: float) -> None:
        self.times: dict[int, list[float]] = {request.id: [] for request in requests}
        self._open = list(requests)
        self._start = start

    def __call__(self, _: Any = None) -> None:
        """Note what came since the last call."""
        now = time.perf_counter() - self._start
        for request in self._open:
            times = self.times[request.id]
            times += [now] * (request.num_generated - len(times))
        self._open = [request for request in self._open if request.finish_reason is None]


@dataclass(frozen=True, slots=True)
class Counts:
    """What the session counted during one run."""

    steps: int
    prefill_tokens: int
    recomputed_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    pages_held_after: int
    leaked_pages: int
    compile_events: int
    compiled: dict[str, int]
    decodes: dict[str, int]
    steps_by_rung: dict[int, int]

    def check(self, *, pages_kept: bool = False) -> None:
        """Raises:
        WrongPath: pages stayed held, or a program was obtained after warm-up.
        """
        if self.leaked_pages or self.pages_held_after:
            raise WrongPath(f"{self.pages_held_after} pages held and {self.leaked_pages} leaked after the last request")
        if self.compile_events:
            raise WrongPath(f"{self.compile_events} programs were obtained after warm-up: {self.compiled}")


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Pages as they stood after each step of a run; only ``watch_pages`` looks, no timed run does.

    Attributes:
      page_overhead: token slots of held pages over tokens written in them, both summed over the steps.
      worst_page_overhead: of one step in which at least half the most pages were held.
      mean_running, peak_running: requests at once. mean_occupancy, peak_occupancy: share of the pool.
      tracking_error: most pages that were held beside those that the live tokens need, over all steps.
    """

    page_overhead: float
    worst_page_overhead: float
    mean_running: float
    peak_running: int
    mean_occupancy: float
    peak_occupancy: float
    tracking_error: int


def make_requests(prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[Request]:
    """Greedy requests that no end token ends."""
    return [
        Request(RequestId(i), np.asarray(prompt), max_tokens=limit, ignore_eos=True)
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]


def run_requests(
    session: PagedSession,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    on_step: Callable[[PagedSession, Sequence[Request]], None] | None = None,
) -> tuple[list[list[float]], list[list[int]], Counts]:
    """Everything at once, from an empty prefix cache: token times, generated tokens, and what was counted.

    Raises:
      WrongPath: a request ended otherwise than by its length.
    """
    session.runtime.reset_prefix_cache()
    before, requests = session.runtime.metrics(), make_requests(prompts, limits)
    clock = TokenClock(requests, time.perf_counter())
    for request in requests:
        session.driver.submit(request)

    def watch(_: Any) -> None:
        clock()
        if on_step is not None:
            on_step(session, requests)

    for _ in session.driver.run(on_step=watch):
        pass
    clock()
    for request in requests:
        if request.finish_reason != "length" or request.num_generated != limits[request.id]:
            raise WrongPath(
                f"request {request.id} ended by {request.finish_reason} ({request.error}) after "
                f"{request.num_generated} of {limits[request.id]} tokens"
            )
    after = session.runtime.metrics()
    new, old = after.control, before.control
    counts = Counts(
        steps=after.num_steps - before.num_steps,
        prefill_tokens=new.num_prefill_tokens - old.num_prefill_tokens,
        recomputed_tokens=new.num_recomputed_tokens - old.num_recomputed_tokens,
        cached_tokens=new.num_cached_tokens - old.num_cached_tokens,
        generated_tokens=new.num_generated_tokens - old.num_generated_tokens,
        preemptions=new.num_preemptions - old.num_preemptions,
        pages_held_after=new.num_held_pages,
        leaked_pages=new.num_leaked_pages,
        compile_events=after.num_compile_events - before.num_compile_events,
        compiled=_difference(after.compiled, before.compiled),
        decodes=_difference(after.decodes_by_kind, before.decodes_by_kind),
        steps_by_rung=_difference(after.steps_by_rung, before.steps_by_rung),
    )
    tokens = [request.tokens[len(request.prompt) :].tolist() for request in requests]
    return [clock.times[request.id] for request in requests], tokens, counts


def watch_pages(session: PagedSession, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> Occupancy:
    """One run that is not timed, with a look at the pages after each step."""
    layout = session.control.layout
    size, num_pages = layout.tokens_per_page, layout.num_pages
    seen: list[tuple[int, float, int, int]] = []

    def look(session: PagedSession, requests: Sequence[Request]) -> None:
        pages, running = session.control.metrics(), session.driver.scheduler.num_running
        if not running or pages.fragmentation != pages.fragmentation:
            return
        used = num_pages - pages.num_free_pages
        # fragmentation: slots of pages that requests read over tokens written; so its slots are known, and its tokens
        read = used - pages.num_evictable_pages
        live = read * size / pages.fragmentation
        needed = sum(-(-(request.num_tokens + 1) // size) for request in requests if request.handle is not None)
        seen.append((read * size, live, running, read - needed))

    run_requests(session, prompts, limits, on_step=look)
    slots, tokens, running, extra = (list(column) for column in zip(*seen, strict=True))
    full = [(s, t) for s, t in zip(slots, tokens, strict=True) if 2 * s >= max(slots)]
    return Occupancy(
        page_overhead=sum(slots) / sum(tokens),
        worst_page_overhead=max(s / t for s, t in full),
        mean_running=fmean(running),
        peak_running=max(running),
        mean_occupancy=fmean(slots) / size / num_pages,
        peak_occupancy=max(slots) / size / num_pages,
        tracking_error=max(extra),
    )


def _difference(after: dict[Any, int], before: dict[Any, int]) -> dict[Any, int]:
    return {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}
