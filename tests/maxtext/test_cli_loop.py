"""The job over the real worker, scheduler and pages, with a model that is a checksum: signals, faults, laziness."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kv_control.plan import GREEDY
from maxtext_paged.cli import ExitCode
from maxtext_paged.cli.generate import Job
from maxtext_paged.cli.interruption import Interrupted, Interruption
from maxtext_paged.cli.progress import JobProgress
from maxtext_paged.formats import read_rows
from maxtext_paged.intake import Intake
from maxtext_paged.report.counts import JobCounts
from maxtext_paged.report.recorder import Recorder
from tests.fakes import VOCAB, completion, make_driver

pytestmark = pytest.mark.maxtext  # the worker's module imports MaxText


class NumberTokenizer:
    """Texts are numbers with spaces between."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def encode_chat(self, messages: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Any) -> str:
        return " ".join(str(token) for token in ids)


class Lines:
    """A binary file of rows that knows how far it was read."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.num_read = rows, 0

    def __iter__(self) -> Iterator[bytes]:
        for row in self.rows:
            self.num_read += 1
            yield json.dumps(row).encode() + b"\n"


class Setting:
    """A job over ``rows`` and what there is to look at."""

    def __init__(
        self,
        rows: list[Any],
        *,
        num_pages: int = 64,
        output: Any = None,
        nan_token: int | None = None,
        prefix_cache: bool = False,
    ) -> None:
        from maxtext_paged.worker import PagedInferenceWorker

        self.driver = make_driver(num_pages, max_num_seqs=2, nan_token=nan_token, prefix_cache=prefix_cache)
        control = self.driver.runtime.control
        self.session: Any = SimpleNamespace(
            driver=self.driver,
            control=control,
            runtime=self.driver.runtime,
            max_num_seqs=2,
            options=SimpleNamespace(paged_file_order="auto"),
            num_native_products=lambda: 0,
        )
        self.lines: Any = Lines(rows)
        self.output = io.BytesIO() if output is None else output
        self.interruption = Interruption()
        self.shown = io.StringIO()
        self.job = Job(
            worker=PagedInferenceWorker(self.session),
            session=self.session,
            tokenizer=NumberTokenizer(),  # type: ignore[arg-type]
            intake=Intake(NumberTokenizer(), GREEDY, vocab_size=VOCAB, max_model_len=64),
            recorder=Recorder(JobCounts(total=len(rows))),
            output=self.output,
            interruption=self.interruption,
            progress=JobProgress(len(rows), self.shown),
        )

    def run(self) -> ExitCode:
        with self.interruption:
            return self.job.run(read_rows(self.lines))

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.getvalue().splitlines()]

    def before_step(self, number: int, action: Callable[[], None]) -> None:
        """Do something when the driver is asked for its ``number``-th step, from 1."""
        step, counted = self.driver.step, [0]

        def stepping() -> Any:
            counted[0] += 1
            if counted[0] == number:
                action()
            return step()

        self.driver.step = stepping  # type: ignore[method-assign]

    def all_pages_returned(self) -> bool:
        control = self.driver.runtime.control
        return control.num_free_pages == control.num_pages


def row(prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, **more}


def test_rows_are_answered_in_order_of_completion_and_text_is_that_of_the_ids() -> None:
    setting = Setting([row("3 4 5", 9), row("6 7", 2), row("8", 3)])
    assert setting.run() is ExitCode.OK
    assert [record["index"] for record in setting.records] == [1, 2, 0]
    for record, prompt in zip(setting.records, ([6, 7], [8], [3, 4, 5]), strict=True):
        assert record["token_ids"] == completion(prompt, record["usage"]["completion_tokens"])
        assert record["text"] == " ".join(map(str, record["token_ids"]))


@pytest.mark.slow
def test_a_row_whose_logits_are_not_finite_fails_alone() -> None:
    setting = Setting([row("3 4", 4), row("5 90", 4), row("6", 4)], nan_token=90)
    assert setting.run() is ExitCode.ROWS_FAILED
    errors = {record["index"]: record["error"] for record in setting.records}
    assert errors[0] is None and errors[2] is None
    assert errors[1]["type"] == "server_error" and "not finite" in errors[1]["message"]


def test_a_row_that_the_pool_can_never_hold_fails_alone() -> None:
    setting = Setting([row("3 4", 4), row("5 " * 20, 30), row("6", 4)], num_pages=4)
    assert setting.run() is ExitCode.ROWS_FAILED
    assert [record["index"] for record in setting.records if record["error"]] == [1]
    assert (setting.job.counts.ok, setting.job.counts.failed) == (2, 1)


def test_input_is_read_as_rows_find_room_not_ahead() -> None:
    setting = Setting([row("3", 4) for _ in range(50)])
    seen: list[int] = []
    setting.before_step(1, lambda: seen.append(setting.lines.num_read))
    assert setting.run() is ExitCode.OK
    assert seen[0] <= 7  # two running, four queued, and the one that found no room
    assert setting.lines.num_read == 50


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_the_job_after_its_step_and_keeps_what_is_done(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = Setting([row("3", 1), *(row(str(prompt), 30) for prompt in range(4, 23))])
    setting.before_step(3, lambda: os.kill(os.getpid(), number))
    assert setting.run() == 128 + number
    # Row 0 ended in the first step. The third ran to its end; nothing but whole rows has a record.
    assert [record["index"] for record in setting.records] == [0]
    assert setting.driver.metrics.num_steps == 3
    assert setting.all_pages_returned()
    said = capsys.readouterr().err
    assert f"{number.name}: the output is incomplete: stopped after 1 of 20 rows" in said


def test_a_signal_ends_the_job_after_its_step_whatever_was_read_ahead_for_the_order_of_the_file() -> None:
    setting = Setting([row(str(prompt % 90), 30) for prompt in range(4, 400)], prefix_cache=True)
    setting.before_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert setting.run() is ExitCode.TERMINATED
    assert setting.driver.metrics.num_steps == 3
    assert setting.records == []


def test_a_row_that_ends_in_the_interrupted_step_still_gets_its_record() -> None:
    setting = Setting([row("3", 2), row("4", 30)])
    setting.before_step(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert setting.run() is ExitCode.TERMINATED
    assert [record["index"] for record in setting.records] == [0]
    assert setting.records[0]["token_ids"] == completion([3], 2)


def test_a_signal_during_the_last_row_changes_nothing() -> None:
    setting = Setting([row("3", 2)])
    setting.before_step(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert setting.run() is ExitCode.OK
    assert len(setting.records) == 1


def test_a_second_signal_does_not_wait_for_the_step() -> None:
    setting = Setting([row("3", 30), row("4", 30)])

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the step went on")

    setting.before_step(3, twice)
    assert setting.run() is ExitCode.INTERRUPTED
    assert setting.driver.metrics.num_steps == 2


def test_before_the_job_runs_one_signal_is_enough_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted), Interruption():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_fault_of_the_engine_ends_the_job_at_once_and_keeps_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    setting = Setting([row("3", 1), row("4", 30), row("5", 30)])

    def fail() -> None:
        raise RuntimeError("the device is gone")

    setting.before_step(4, fail)
    assert setting.run() is ExitCode.ENGINE
    assert [record["index"] for record in setting.records] == [0]
    last = capsys.readouterr().err.splitlines()[-1]
    assert "the engine failed after 1 of 3 rows" in last and "the device is gone" in last


class FullDisk(io.BytesIO):
    """Takes one record."""

    def write(self, data: Any) -> int:
        if self.tell():
            raise OSError(28, "No space left on device")
        return super().write(data)


def test_an_output_that_cannot_be_written_ends_the_job_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    setting = Setting([row("3", 1), row("4", 2), row("5", 30)], output=FullDisk())
    assert setting.run() is ExitCode.ENGINE
    assert [record["index"] for record in setting.records] == [0]
    assert "the output failed after 1 of 3 rows" in capsys.readouterr().err
    assert setting.job.counts.ok == 1


# --- what is shown ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interval", "shown_at"), [(None, [60, 120, 180]), (75.0, [75, 150])])
def test_without_a_terminal_there_is_a_line_at_most_every_minute_or_as_asked(
    interval: float | None, shown_at: list[int]
) -> None:
    now = [0.0]
    shown = io.StringIO()
    counts = JobCounts(total=5)
    asked = {} if interval is None else {"interval": interval}
    with JobProgress(5, shown, clock=lambda: now[0], **asked) as progress:
        for second in range(200):
            now[0], counts.ok = float(second), second
            progress.show(counts)
    lines = shown.getvalue().splitlines()
    assert [int(line.split(": ")[1].split("/")[0]) for line in lines] == shown_at


def test_progress_that_is_switched_off_shows_nothing() -> None:
    now = [0.0]
    shown = io.StringIO()
    with JobProgress(5, shown, enabled=False, clock=lambda: now[0]) as progress:
        now[0] = 100.0
        progress.show(JobCounts())
    assert shown.getvalue() == ""
