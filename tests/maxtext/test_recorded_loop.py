"""What the recorder says of a job over the real worker, scheduler and pages, against the requests themselves."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from maxtext_paged.cli import ExitCode
from tests.maxtext.test_cli_loop import Setting, row

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]  # the worker's module imports MaxText

ROWS = [row(" ".join(str(3 + (7 * i + j) % 90) for j in range(3 + i % 7)), 12 + (5 * i) % 8) for i in range(12)]


class Watched(Setting):
    """A job whose clock counts half steps, and when each of its requests' tokens were seen by that clock.

    Attributes:
      submitted: request id to its moment. tokens: request id to the moments of its tokens.
    """

    def __init__(self, rows: list[Any], **more: Any) -> None:
        super().__init__(rows, **more)
        self.now = 0.0
        recorder = self.job.recorder
        recorder._clock = lambda: self.now
        recorder.start()
        self.requests: list[Any] = []
        self.submitted: dict[int, float] = {}
        self.tokens: dict[int, list[float]] = {}
        submit, step = self.driver.submit, self.driver.step

        def submitting(request: Any) -> None:
            submit(request)
            self.requests.append(request)
            self.submitted[request.id], self.tokens[request.id] = self.now, []

        def stepping() -> Any:
            self.now += 1.0
            ended = step()
            for request in self.requests:
                moments = self.tokens[request.id]
                moments += [self.now] * (request.num_generated - len(moments))
            return ended

        self.driver.submit, self.driver.step = submitting, stepping  # type: ignore[method-assign]


@pytest.mark.parametrize(("num_pages", "prefix_cache"), [(64, True), (7, False)])
def test_times_counts_and_courses_are_those_of_the_requests(num_pages: int, prefix_cache: bool) -> None:
    setting = Watched(
        [*ROWS, row("5 6", 3, temperature=-1), row("", 3)], num_pages=num_pages, prefix_cache=prefix_cache
    )
    assert setting.run() is ExitCode.ROWS_FAILED
    recorder, counts = setting.job.recorder, setting.job.counts
    clocks, moments = recorder.clocks, setting.tokens
    assert (counts.preemptions > 0) == (num_pages == 7)
    assert (counts.ok, counts.failed) == (12, 2)
    ttft = [moments[request][0] - setting.submitted[request] for request in moments]
    assert (clocks.ttft.count, clocks.ttft.sum, clocks.ttft.max) == (12, sum(ttft), max(ttft))
    gaps = [gap for times in moments.values() for gap in np.diff(times).tolist()]
    assert (clocks.itl.count, clocks.itl.sum, clocks.itl.max) == (len(gaps), sum(gaps), max(gaps))
    latency = [moments[request][-1] - setting.submitted[request] for request in moments]
    assert (recorder.latency.count, recorder.latency.sum) == (12, sum(latency))
    assert len(clocks) == 0
    series, sampled = recorder.series, sum(len(times) for times in moments.values())
    assert counts.sampled_tokens == counts.generated_tokens == sampled
    assert series.sums("sampled_tokens").sum() == pytest.approx(sampled)
    assert series.sums("preemptions").sum() == pytest.approx(counts.preemptions)
    assert (series.sums("ok").sum(), series.sums("failed").sum()) == (12, 2)
    computed = setting.driver.metrics.num_prefill_tokens + setting.driver.metrics.num_recomputed_tokens
    assert series.sums("prompt_tokens").sum() == pytest.approx(computed)
    assert np.nanmax(series.means("pages_held")) <= counts.peak_pages <= num_pages
    assert (series.means("pages_needed") <= series.means("pages_held") + 1e-9).all()
    assert np.nanmax(series.means("running")) <= 2
    assert recorder.step.count == counts.steps


def test_a_row_waits_in_the_queue_until_the_first_step_that_runs_it() -> None:
    setting = Watched([row("3 4", 5), row("5 6", 5), row("7 8", 5)])  # two run at once
    assert setting.run() is ExitCode.OK
    queue = setting.job.recorder.clocks.queue
    first_two_end = min(times[-1] for times in list(setting.tokens.values())[:2])
    assert (queue.count, queue.max) == (3, first_two_end)


def test_a_request_that_was_refused_or_interrupted_leaves_nothing_behind() -> None:
    setting = Watched(
        [row("3", 1), row("5 " * 40, 30), *(row(str(prompt), 30) for prompt in range(4, 23))], num_pages=10
    )
    setting.before_step(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert setting.run() is ExitCode.INTERRUPTED
    recorder = setting.job.recorder
    assert len(recorder.clocks) == 0 and not recorder.clocks._slots
    assert recorder.latency.count == recorder.counts.ok == 1
    assert recorder.counts.failures == {"generation_failed": 1}


def test_samples_of_a_row_are_one_row() -> None:
    setting = Watched([row("3 4 5 6", 4, n=3, temperature=1.0), row("7", 2)])
    assert setting.run() is ExitCode.OK
    recorder = setting.job.recorder
    assert recorder.clocks.ttft.count == recorder.latency.count == recorder.clocks.queue.count == 2
    assert recorder.clocks.itl.count == sum(len(times) - 1 for times in setting.tokens.values()) == 3 * 3 + 1
