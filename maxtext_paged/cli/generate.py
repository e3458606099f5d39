"""``maxtext-paged generate``: a file of prompts in, a file of completions out.

For:        the job: check, open the model, run every row, write every record, say how it went.
Not for:    the parts: lines (formats), tokens and limits (intake), the loop (worker), what is shown (progress).
May import: maxtext_paged; MaxText through ``import_maxtext`` only.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from maxtext_paged.cli import ExitCode, one_line, say
from maxtext_paged.cli.checking import check
from maxtext_paged.cli.configuration import check_arguments
from maxtext_paged.cli.files import check_paths, open_input
from maxtext_paged.cli.interruption import Interrupted, Interruption
from maxtext_paged.cli.model import open_model
from maxtext_paged.cli.output import Output, PipedOutput, claim_output
from maxtext_paged.cli.progress import PLAIN_INTERVAL_S, JobProgress
from maxtext_paged.cli.run_file import run_id
from maxtext_paged.cli.warming import warm_up
from maxtext_paged.cli.watching import Watching, check_shown_paths
from maxtext_paged.collector import collector_paused
from maxtext_paged.formats import OWN, BadRow, Choice, Form, InputRow, RowError, Writable, write_line
from maxtext_paged.formats.sources import open_source
from maxtext_paged.intake import Intake, Tokenizer, completion_text
from maxtext_paged.report.counts import JobCounts
from maxtext_paged.report.looks import gather, step_view
from maxtext_paged.report.recorder import Recorder
from maxtext_paged.row_scores import listed_scores, prompt_scores
from maxtext_paged.rows import Row, RowResult

if TYPE_CHECKING:
    from maxtext_paged.session import PagedSession
    from maxtext_paged.worker import PagedInferenceWorker


class OutputFailed(Exception):
    """A record could not be written: the disk is full, or the reader went away."""


def run(arguments: argparse.Namespace) -> int:
    """Run the job; the exit code says how it ended."""
    resume = arguments.resume or arguments.resume_anyway
    check_arguments(arguments.config, arguments.overrides)
    check_paths(arguments.input, arguments.output, overwrite=arguments.overwrite, resume=resume)
    check_shown_paths(arguments)
    claimed = claim_output(
        arguments.output, overwrite=arguments.overwrite, resume=resume, anyway=arguments.resume_anyway
    )
    with Interruption() as interruption, claimed as output:
        try:
            return _run(arguments, interruption, output)
        except Interrupted:
            began = "" if interruption.patient else "; no row was run"
            say(f"{interruption.asked.name if interruption.asked else 'interrupted'}: stopped{began}")
            return interruption.exit_code


def _run(arguments: argparse.Namespace, interruption: Interruption, output: Output | PipedOutput) -> int:
    with collector_paused(freeze=arguments.own_process):
        model = open_model(arguments.config, arguments.overrides)
    with open_input(arguments.input) as file:
        source = open_source(arguments.input, file)
        if source.form is not OWN:
            say(f"{arguments.input} has rows of the {source.form.name} form; so have the records")
        checked = check(arguments.input, source.rows, judge=model.intake.row if arguments.strict else None)
        run = {**model.identity, "input": {"sha256": source.digest(), "rows": checked.num_rows}}
        earlier = output.take_up(run, checked.ids)
        if earlier.num_torn:
            say(f"{arguments.output}: its last record is torn ({earlier.num_torn} bytes): that row is run again")
        counts = JobCounts(total=checked.num_rows, earlier=earlier.num, earlier_failed=earlier.num_failed)
        if 0 < earlier.num == checked.num_rows:
            say(f"{arguments.output} is complete: nothing is left to do")
            return _complete(counts, output)
        with collector_paused(freeze=arguments.own_process):
            intake = replace(model.intake, repeated=checked.repeated)
            sources = (row for row in source.rows() if row.index not in earlier)
            first = first_rows(sources, intake, model.max_num_batched_tokens)
            engine = model.start(num_tokens(first, model.max_num_batched_tokens))
            if arguments.warmup:
                warm_up(engine.session, sys.stderr, enabled=not arguments.no_progress)
        run["model"] = {"weights": engine.weights}
        recorder = Recorder(counts)
        watching = Watching(recorder, arguments, run, model.facts)
        interval = arguments.progress_interval or PLAIN_INTERVAL_S
        job = Job(
            worker=engine.worker,
            session=engine.session,
            tokenizer=model.tokenizer,
            intake=intake,
            first=first,
            recorder=recorder,
            watching=watching,
            earlier=earlier,
            output=output.begin(run),
            form=source.form.of_run(run_id(run)),
            interruption=interruption,
            progress=JobProgress(checked.num_rows, sys.stderr, enabled=not arguments.no_progress, interval=interval),
        )
        code = job.run(source.rows())
        if counts.done == counts.total:
            code = _complete(counts, output)
        elif output.keeps_runs:
            say("the same command with --resume runs the rest")
    watching.finish(code, job.stopped, resumable=output.keeps_runs)
    for line in job.counts.summary():
        say(line)
    return code


_MOST_FIRST_ROWS = 64


def first_rows(sources: Iterable[InputRow | BadRow], intake: Intake, most: int) -> dict[int, Row | BadRow]:
    """By index, the rows that the first step of up to ``most`` tokens is about made of, as the job will take them."""
    first: dict[int, Row | BadRow] = {}
    for source in islice(sources, _MOST_FIRST_ROWS):
        first[source.index] = intake.row(source)
        if num_tokens(first, most) == most:
            break
    return first


def num_tokens(rows: dict[int, Row | BadRow], most: int) -> int:
    """Prompt tokens of the rows that can run, up to ``most``."""
    return min(most, sum(len(row.tokens) for row in rows.values() if isinstance(row, Row)))


def _complete(counts: JobCounts, output: Output | PipedOutput) -> ExitCode:
    failed = counts.failed + counts.earlier_failed
    try:
        output.finish(ok=counts.total - failed, failed=failed)
    except OSError as error:
        say(f"error: the output failed after its last row: {error.strerror}; --resume ends it")
        return ExitCode.ENGINE
    return ExitCode.ROWS_FAILED if failed else ExitCode.OK


class Job:
    """One pass over the input: every row gets exactly one record, in order of completion.

    Args:
      earlier: indices of rows that have theirs already.
      form: of the records. first: rows that were tokenised already, by index.
      recorder: is told of everything that happens. watching: what is written of it meanwhile.

    Attributes:
      stopped: why it ended before its last row, if it did.
    """

    def __init__(
        self,
        *,
        worker: PagedInferenceWorker,
        session: PagedSession,
        tokenizer: Tokenizer,
        intake: Intake,
        recorder: Recorder,
        output: Writable,
        interruption: Interruption,
        progress: JobProgress,
        watching: Watching | None = None,
        earlier: Container[int] = (),
        first: dict[int, Row | BadRow] | None = None,
        form: Form = OWN,
    ) -> None:
        self.recorder = recorder
        self.stopped: str | None = None
        self._watching = watching
        self._worker = worker
        self._session = session
        self._tokenizer = tokenizer
        self._intake = intake
        self._output = output
        self._interruption = interruption
        self._progress = progress
        self._earlier = earlier
        self._first = first or {}
        self._form = form
        self._sources: dict[int, InputRow] = {}
        self._products_before = 0

    @property
    def counts(self) -> JobCounts:
        """Where the job stands."""
        return self.recorder.counts

    def run(self, sources: Iterable[InputRow | BadRow]) -> ExitCode:
        """Run all rows but the earlier ones, or as many as there is time for."""
        self.recorder.start()
        self._products_before = self._session.num_native_products()
        where = f"after {{}} of {self.counts.total} rows; what was written is good"
        try:
            with self._progress:
                self._interruption.patient = True
                rows = self._worker.in_file_order(self._rows(sources))
                for result in self._worker.complete(rows, on_step=self._after_step, watch=self.recorder):
                    self._finish(result)
        except Interrupted:
            pass
        except OutputFailed as error:
            self._gather()
            return self._failed(f"the output failed {where.format(self.counts.done)}: {one_line(error)}")
        except Exception as error:
            self._gather()
            traceback.print_exc()
            return self._failed(f"the engine failed {where.format(self.counts.done)}: {_named(error)}")
        self._gather()
        if self._interruption.asked is not None and self.counts.done < self.counts.total:
            say(f"{self._interruption.asked.name}: the output is incomplete: stopped {where.format(self.counts.done)}")
            return self._interruption.exit_code
        return ExitCode.ROWS_FAILED if self.counts.failed else ExitCode.OK

    def _failed(self, why: str) -> ExitCode:
        self.stopped = why
        say(f"error: {why}")
        return ExitCode.ENGINE

    def _rows(self, sources: Iterable[InputRow | BadRow]) -> Iterator[Row]:
        """The rows that can run; the others get their records on the way."""
        for source in sources:
            if self._interruption.asked is not None:
                return
            if source.index in self._earlier:
                continue
            row = self._first.pop(source.index, None) or self._intake.row(source)
            if isinstance(row, BadRow):
                self._write(row)
                continue
            assert isinstance(source, InputRow)
            self._sources[source.index] = source
            yield row

    def _after_step(self, worker: PagedInferenceWorker) -> None:
        if self._interruption.asked is not None:
            # What this step finished, and the one dispatched behind it, still comes out of the worker; the rest ends
            # here, without a record.
            worker.stop_drawing()
            worker.settle()
            driver = self._session.driver
            for request in (*driver.scheduler.running, *driver.scheduler.waiting):
                driver.cancel(request.id)
        self.recorder.step_ended(step_view(self._session))
        watching = self._watching
        if self._progress.due or (watching is not None and watching.due):
            self._gather()
            self._progress.show(self.counts)
            if watching is not None:
                watching.write()

    def _finish(self, result: RowResult) -> None:
        source = self._sources.pop(result.row.index)
        if result.finish_reason == "cancelled":
            self.recorder.row_dropped(result.row.index)
            return
        choices = [self._choice(source, sample) for sample in result.samples]
        first = choices[0] if choices else self._choice(source, result)
        error = next((choice.error for choice in choices or [first] if choice.error is not None), None)
        self._write(
            source,
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            usage=result.usage,
            error=error,
            choices=choices,
            scores=first.scores,
            prompt=prompt_scores(self._tokenizer, source, result),
        )

    def _choice(self, source: InputRow, result: RowResult) -> Choice:
        text, error = None, None
        if result.error is not None or result.finish_reason == "error":
            error = RowError(result.error or "the row failed", "generation_failed", "server_error")
        else:
            try:
                text = completion_text(self._tokenizer, result)
                if source.echo:
                    prompt = result.token_ids[: len(result.row.tokens)].tolist()
                    text = (self._tokenizer.decode(prompt) if source.prompt is None else source.prompt) + text
            except Exception as fault:
                error = RowError(
                    f"the completion could not be decoded: {_named(fault)}", "cannot_decode", "server_error"
                )
        ids = (result.token_ids if source.echo else result.completion_ids).tolist()
        return Choice(text, ids, result.finish_reason, error, listed_scores(self._tokenizer, source, result))

    def _write(self, row: InputRow | BadRow, **outcome: Any) -> None:
        written = self._form.record(row, **outcome)
        try:
            write_line(self._output, written)
        except OSError as error:
            raise OutputFailed(error.strerror or str(error)) from error
        failure = row.error if isinstance(row, BadRow) else outcome["error"]
        ended_by = outcome.get("finish_reason", "error")
        self.recorder.row_written(row, outcome.get("usage"), failure, finish_reason=ended_by)

    def _gather(self) -> None:
        """Take the loop's own counts."""
        gather(self.counts, self._session)
        self.counts.seconds = self.recorder.seconds
        self.counts.attainable_tokens = self._worker.attainable_tokens
        self.counts.native_products = self._session.num_native_products() - self._products_before


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
