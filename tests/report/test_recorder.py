"""What is said of every row's time, against moments written down by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from maxtext_paged.formats import BadRow, InputRow, RowError
from maxtext_paged.report.counts import JobCounts
from maxtext_paged.report.histogram import DurationHistogram
from maxtext_paged.report.recorder import MAX_FAILURE_CODES, Recorder, StepView
from maxtext_paged.report.rows import MAX_ROWS
from maxtext_paged.rows import Usage


class Told:
    """A recorder whose clock is set by hand, and short words for what it is told."""

    def __init__(self, total: int = 0) -> None:
        self.now = 100.0
        self.recorder = Recorder(JobCounts(total=total), clock=lambda: self.now, wall=lambda: 1e9 + self.now)
        self.recorder.start()
        self.tokens = self.steps = 0

    def submit(self, now: float, index: int, *request_ids: int) -> None:
        self.now = now
        self.recorder.submitted(index, request_ids)

    def step(self, began: float, ended: float, generated: dict[int, int], ends: dict[int, int] | None = None) -> None:
        """One step, after which these requests run with so many tokens, and those have ended with so many."""
        self.now = began
        self.recorder.step_begins()
        self.now = ended
        self.steps += 1
        view = StepView(
            request_ids=np.array(list(generated), np.int64),
            num_generated=np.array(list(generated.values()), np.int64),
            waiting=0,
            pages_held=0,
            pages_needed=0,
            sampled_tokens=0,
            prompt_tokens=0,
            steps=self.steps,
            preemptions=0,
        )
        self.recorder.step_ended(view)
        for request_id, num_generated in (ends or {}).items():
            self.recorder.ended(request_id, num_generated, ran=True)

    def written(self, index: int, error: RowError | None = None, num_generated: int = 1) -> None:
        row = InputRow(index, index + 1, f"id {index}")
        self.recorder.row_written(row, Usage(3, num_generated), error, finish_reason="length")


def times(histogram: DurationHistogram) -> tuple[int, float, float, float]:
    """Count, sum, least and most, which are exact."""
    return histogram.count, histogram.sum, histogram.min, histogram.max


def test_queue_ttft_itl_and_latency_are_the_moments_of_the_row() -> None:
    told = Told()
    told.submit(101.0, 0, 7)
    told.step(103.0, 105.0, {7: 0})  # a chunk of the prompt
    told.step(105.0, 109.0, {7: 1})
    told.step(109.5, 110.0, {7: 2})
    told.step(110.0, 113.0, {}, {7: 3})
    told.now = 120.0  # writing takes its time, which is not the row's
    told.written(0)
    clocks = told.recorder.clocks
    assert times(clocks.queue) == (1, 2.0, 2.0, 2.0)
    assert times(clocks.ttft) == (1, 8.0, 8.0, 8.0)
    assert times(clocks.itl) == (2, 4.0, 1.0, 3.0)
    assert times(told.recorder.latency) == (1, 12.0, 12.0, 12.0)
    assert times(told.recorder.step) == (4, 9.5, 0.5, 4.0)


def test_a_row_of_one_step_has_all_its_moments_in_it() -> None:
    told = Told()
    told.submit(100.5, 0, 1)
    told.step(101.0, 102.0, {}, {1: 1})
    told.written(0)
    clocks = told.recorder.clocks
    assert [each.sum for each in (clocks.queue, clocks.ttft, told.recorder.latency)] == [0.5, 1.5, 1.5]
    assert clocks.itl.count == 0


def test_a_preempted_row_keeps_its_clock_and_its_gap_is_as_long_as_it_was_away() -> None:
    told = Told()
    told.submit(100.0, 0, 1)
    told.submit(100.0, 1, 2)
    told.step(100.0, 101.0, {1: 1, 2: 1})
    told.step(101.0, 102.0, {1: 2})  # 2 was sent back
    told.step(102.0, 103.0, {}, {1: 3})
    told.step(103.0, 108.0, {2: 1})  # computed again
    told.step(108.0, 109.0, {}, {2: 2})
    clocks = told.recorder.clocks
    assert (clocks.queue.count, clocks.ttft.count) == (2, 2)
    assert times(clocks.itl) == (3, 1.0 + 1.0 + 8.0, 1.0, 8.0)


def test_a_step_that_brings_one_row_a_token_is_none_of_another_rows_moments() -> None:
    told = Told()
    told.submit(100.0, 0, 1)
    told.submit(100.0, 1, 2)
    told.step(100.0, 101.0, {1: 1, 2: 0})  # 2 is still at its prompt
    told.step(101.0, 102.0, {1: 2, 2: 0})
    told.step(102.0, 103.0, {1: 3, 2: 1})
    assert times(told.recorder.clocks.ttft) == (2, 1.0 + 3.0, 1.0, 3.0)
    told.step(103.0, 104.0, {1: 4})  # 2 was sent back, and is computed again in two steps
    told.step(104.0, 105.0, {1: 5, 2: 1})
    told.step(105.0, 106.0, {1: 6, 2: 1})
    told.step(106.0, 107.0, {1: 7, 2: 2})
    assert times(told.recorder.clocks.itl) == (7, 6 * 1.0 + 4.0, 1.0, 4.0)


def test_samples_are_one_row_and_as_many_streams() -> None:
    told = Told()
    told.submit(100.0, 0, 1, 2)
    told.step(101.0, 102.0, {1: 1, 2: 0})
    told.step(102.0, 104.0, {2: 1}, {1: 2})
    told.step(104.0, 107.0, {}, {2: 2})
    told.written(0, num_generated=4)
    clocks = told.recorder.clocks
    assert times(clocks.queue) == (1, 1.0, 1.0, 1.0)
    assert times(clocks.ttft) == (1, 2.0, 2.0, 2.0)
    assert times(clocks.itl) == (2, 5.0, 2.0, 3.0)
    assert times(told.recorder.latency) == (1, 7.0, 7.0, 7.0)


def test_tokens_that_arrive_together_share_their_gap() -> None:
    told = Told()
    told.submit(100.0, 0, 1)
    told.step(100.0, 101.0, {1: 1})
    told.step(101.0, 104.0, {1: 4})
    assert times(told.recorder.clocks.itl) == (3, 3.0, 1.0, 1.0)


def test_a_row_that_never_ran_waited_for_nothing_and_one_that_failed_has_no_latency() -> None:
    told = Told()
    told.submit(100.0, 0, 1)
    told.step(100.0, 101.0, {})
    told.recorder.ended(1, 0, ran=False)
    told.written(0, num_generated=0)
    told.submit(101.0, 1, 2)
    told.step(101.0, 102.0, {}, {2: 1})
    told.written(1, RowError("NaN", "generation_failed"))
    clocks = told.recorder.clocks
    assert (clocks.queue.count, clocks.ttft.count, told.recorder.latency.count) == (1, 1, 1)
    [failed] = told.recorder.notable.failed
    assert failed.latency == 1.0 and failed.code == "generation_failed"


def test_requests_of_somebody_else_are_not_timed() -> None:
    told = Told()
    told.submit(100.0, 0, 5)
    told.step(100.0, 101.0, {3: 9, 5: 1, 8: 2})
    told.step(101.0, 103.0, {3: 10, 5: 2, 8: 3}, {99: 4})
    assert times(told.recorder.clocks.itl) == (1, 2.0, 2.0, 2.0)


@pytest.mark.parametrize("seed", range(3))
def test_over_any_traffic_there_is_one_ttft_a_row_and_one_gap_for_each_further_token_and_nothing_stays(
    seed: int,
) -> None:
    random, told = np.random.default_rng(seed), Told()
    wanted, running, ids, rows = {}, {}, itertools.count(1), itertools.count()
    row_of: dict[int, int] = {}
    left: dict[int, int] = {}
    while len(wanted) < 600 or running:
        while len(wanted) < 600 and len(running) < 9:
            samples = int(random.integers(1, 4))
            index, requests = next(rows), [next(ids) for _ in range(samples)]
            told.submit(told.now, index, *requests)
            left[index] = samples
            for request in requests:
                wanted[request], running[request], row_of[request] = int(random.integers(1, 6)), 0, index
        lucky = [request for request in running if random.random() < 0.7]  # the others are away or wait for a chunk
        for request in lucky:
            running[request] += 1
        ended = {request: wanted[request] for request in lucky if running[request] == wanted[request]}
        for request in ended:
            del running[request]
        told.step(
            told.now, told.now + 0.5, {request: running[request] for request in lucky if request in running}, ended
        )
        for request in ended:
            left[row_of[request]] -= 1
            if not left[row_of[request]]:
                told.written(row_of[request])
    clocks = told.recorder.clocks
    assert clocks.queue.count == clocks.ttft.count == told.recorder.latency.count == len(left)
    assert clocks.itl.count == sum(tokens - 1 for tokens in wanted.values())
    assert len(clocks) == 0 and not clocks._slots
    assert len(clocks._seen) <= 64  # as many as were under way at once, whatever came in all


# --- rows ---------------------------------------------------------------------------------------------------


def test_the_slowest_rows_and_the_first_failed_ones_are_kept_and_no_more() -> None:
    told, latencies = Told(), {}
    for index in np.random.default_rng(0).permutation(300).tolist():
        told.submit(told.now, index, index + 1)
        latencies[index] = ((index * 7919) % 300) / 10 + 0.1
        told.step(told.now, told.now + latencies[index], {}, {index + 1: 1})
        told.written(index, RowError("bad", "bad_value") if index % 2 else None)
    notable = told.recorder.notable
    by_time = sorted(latencies, key=lambda index: (-round(latencies[index], 6), index))
    assert [row.index for row in notable.slowest] == by_time[:MAX_ROWS]
    assert [row.index for row in notable.failed] == list(range(1, 2 * MAX_ROWS, 2))
    assert notable.slowest[0].latency == pytest.approx(latencies[by_time[0]])


def test_rows_are_counted_by_outcome_and_code_and_ids_are_kept_in_part() -> None:
    told = Told(total=5)
    told.recorder.row_written(InputRow(0, 1, "a"), Usage(3, 4, 0, 2), None, finish_reason="stop")
    told.recorder.row_written(
        BadRow(1, 2, RowError("m" * 9999, "bad_value"), "i" * 9999), None, RowError("m" * 9999, "bad_value")
    )
    told.recorder.row_written(InputRow(2, 3, 7), Usage(5, 1), RowError("x", "cannot_decode"))
    counts = told.recorder.counts
    assert (counts.ok, counts.failed, counts.done) == (1, 2, 3)
    assert counts.failures == {"bad_value": 1, "cannot_decode": 1}
    assert (counts.prompt_tokens, counts.generated_tokens, counts.cached_tokens) == (3, 4, 2)
    first, second = told.recorder.notable.failed
    assert len(str(first.id)) == 128 and len(first.message or "") == 400
    assert second.id == 7


def test_codes_that_nobody_foresaw_are_counted_together() -> None:
    told = Told()
    for index in range(100):
        told.written(index, RowError("x", f"code {index}"))
    assert len(told.recorder.counts.failures) == MAX_FAILURE_CODES + 1
    assert sum(told.recorder.counts.failures.values()) == told.recorder.counts.failed == 100


def test_the_time_that_is_left_follows_from_the_rows_of_this_run() -> None:
    counts = JobCounts(total=100, earlier=40)
    assert counts.eta_seconds is None
    counts.failed, counts.seconds = 2, 0.1  # faulty rows at the file's head take no time: they say nothing
    assert counts.eta_seconds is None
    counts.ok, counts.failed, counts.seconds = 18, 2, 30.0
    assert counts.eta_seconds == 60.0
    assert counts.state().endswith("ETA 0:01:00")
    counts.ok = 58
    assert counts.eta_seconds == 0.0 and "ETA" not in counts.state()
    assert JobCounts().eta_seconds is None


def test_the_running_line_has_the_hit_rate_where_pages_were_looked_up() -> None:
    assert "prefix hits" not in JobCounts().state()
    assert "42% prefix hits" in JobCounts(hit_rate=0.42).state()
