"""``maxtext-paged generate``: a file of prompts in, a file of completions out.

For:        the job: check, open the model, run every row, write every record, say how it went.
Not for:    the parts: lines (formats), tokens and limits (intake), the loop (worker), what is shown (progress).
May import: maxtext_paged; MaxText through ``import_maxtext`` only.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO

from kv_common.errors import ConfigError, UnsupportedError
from maxtext_paged.cli import CommandError, ExitCode, one_line, say
from maxtext_paged.cli.configuration import check_arguments, keep_every_program, load_configuration
from maxtext_paged.cli.environment import import_maxtext, prepare_environment
from maxtext_paged.cli.files import check_paths, claim_output, open_input
from maxtext_paged.cli.interruption import Interrupted, Interruption
from maxtext_paged.cli.progress import JobCounts, JobProgress
from maxtext_paged.formats import BadRow, Choice, InputRow, RowError, read_rows, record, write_line
from maxtext_paged.intake import IdCheck, Intake, RepeatedIds, completion_text
from maxtext_paged.rows import Row, RowResult

if TYPE_CHECKING:
    from maxtext_paged.session import PagedSession
    from maxtext_paged.tokenizer import HfTokenizer
    from maxtext_paged.worker import PagedInferenceWorker


class OutputFailed(Exception):
    """A record could not be written: the disk is full, or the reader went away."""


def run(arguments: argparse.Namespace) -> int:
    """Run the job; the exit code says how it ended."""
    check_arguments(arguments.config, arguments.overrides)
    check_paths(arguments.input, arguments.output, overwrite=arguments.overwrite)
    with Interruption() as interruption, claim_output(arguments.output, overwrite=arguments.overwrite) as create:
        try:
            return _run(arguments, interruption, create)
        except Interrupted:
            began = "" if interruption.patient else "; no row was run"
            say(f"{interruption.asked.name if interruption.asked else 'interrupted'}: stopped{began}")
            return interruption.exit_code


def _run(arguments: argparse.Namespace, interruption: Interruption, create: Callable[[], BinaryIO]) -> int:
    prepare_environment()
    import_maxtext()
    from maxtext_paged.sampling_defaults import default_sampling
    from maxtext_paged.session import assemble, start_session
    from maxtext_paged.tokenizer import load_tokenizer
    from maxtext_paged.worker import PagedInferenceWorker

    config = load_configuration(arguments.config, arguments.overrides)
    tokenizer = load_tokenizer(config)
    intake = Intake(
        tokenizer,
        default_sampling(config),
        vocab_size=int(config.vocab_size),
        max_model_len=int(config.max_target_length),
    )
    assembly = assemble(config)
    say(keep_every_program())
    with open_input(arguments.input) as source:
        start = source.tell()
        num_rows, repeated = check(arguments.input, source, intake if arguments.strict else None)
        source.seek(start)
        try:
            session = start_session(assembly)
        except (ConfigError, UnsupportedError):
            raise
        except Exception as error:
            traceback.print_exc()
            raise CommandError(f"the engine did not start: {_named(error)}", ExitCode.ENGINE) from error
        say(f"end tokens: {sorted(tokenizer.eos_ids) or 'none'}")
        job = Job(
            worker=PagedInferenceWorker(session, stop_token_ids=tokenizer.eos_ids),
            session=session,
            tokenizer=tokenizer,
            intake=replace(intake, repeated=repeated),
            total=num_rows,
            output=create(),
            interruption=interruption,
            progress=JobProgress(num_rows, sys.stderr, enabled=not arguments.no_progress),
        )
        code = job.run(source)
    for line in job.counts.summary():
        say(line)
    return code


def check(name: str, source: BinaryIO, intake: Intake | None) -> tuple[int, RepeatedIds]:
    """Read the input once before anything runs.

    Args:
      name: of the input, for messages.
      intake: judge every row with it, tokens and limits included, and refuse the whole file if one is unusable;
        None only counts rows and compares ids.

    Returns:
      ``(num_rows, repeated ids)``.

    Raises:
      CommandError: strict, and some rows are unusable; each was named on stderr.
    """
    ids, num_rows, start = IdCheck(), 0, source.tell()
    for row in read_rows(source):
        ids.add(row.id, row.line)
        num_rows += 1
    repeated = ids.repeated()
    if intake is None:
        return num_rows, repeated
    source.seek(start)
    num_bad = 0
    for row in read_rows(source):
        error = repeated.error(row.id, row.line)
        judged = row if error is not None else intake.row(row)
        if isinstance(judged, BadRow):
            error = judged.error
        if error is not None:
            num_bad += 1
            say(f"{name}:{row.line}: {one_line(error.message)}")
    if num_bad:
        raise CommandError(f"--strict: {num_bad} of {num_rows} rows are unusable; nothing was run")
    return num_rows, repeated


class Job:
    """One pass over the input: every row gets exactly one record, in order of completion."""

    def __init__(
        self,
        *,
        worker: PagedInferenceWorker,
        session: PagedSession,
        tokenizer: HfTokenizer,
        intake: Intake,
        total: int,
        output: BinaryIO,
        interruption: Interruption,
        progress: JobProgress,
    ) -> None:
        self.counts = JobCounts(total=total)
        self._worker = worker
        self._session = session
        self._tokenizer = tokenizer
        self._intake = intake
        self._output = output
        self._interruption = interruption
        self._progress = progress
        self._sources: dict[int, InputRow] = {}
        self._started = time.monotonic()

    def run(self, lines: BinaryIO) -> ExitCode:
        """Run all rows, or as many as there is time for."""
        self._started = time.monotonic()
        where = f"after {{}} of {self.counts.total} rows; what was written is good"
        try:
            with self._progress:
                self._interruption.patient = True
                rows = self._worker.in_file_order(self._rows(lines))
                for result in self._worker.complete(rows, on_step=self._after_step):
                    self._finish(result)
        except Interrupted:
            pass
        except OutputFailed as error:
            self._gather()
            say(f"error: the output failed {where.format(self.counts.done)}: {one_line(error)}")
            return ExitCode.ENGINE
        except Exception as error:
            self._gather()
            traceback.print_exc()
            say(f"error: the engine failed {where.format(self.counts.done)}: {_named(error)}")
            return ExitCode.ENGINE
        self._gather()
        if self._interruption.asked is not None and self.counts.done < self.counts.total:
            say(f"{self._interruption.asked.name}: the output is incomplete: stopped {where.format(self.counts.done)}")
            return self._interruption.exit_code
        return ExitCode.ROWS_FAILED if self.counts.failed else ExitCode.OK

    def _rows(self, lines: BinaryIO) -> Iterator[Row]:
        """The rows that can run; the others get their records on the way."""
        for source in read_rows(lines):
            if self._interruption.asked is not None:
                return
            row = self._intake.row(source)
            if isinstance(row, BadRow):
                self._write(row)
                continue
            assert isinstance(source, InputRow)
            self._sources[source.index] = source
            yield row

    def _after_step(self, worker: PagedInferenceWorker) -> None:
        if self._interruption.asked is not None:
            # What this step finished still comes out of the worker; the rest ends here, without a record.
            worker.stop_drawing()
            driver = self._session.driver
            for request in (*driver.scheduler.running, *driver.scheduler.waiting):
                driver.cancel(request.id)
        self._gather()
        self._progress.show(self.counts)

    def _finish(self, result: RowResult) -> None:
        source = self._sources.pop(result.row.index)
        if result.finish_reason == "cancelled":
            return
        choices = [self._choice(sample) for sample in result.samples]
        first = choices[0] if choices else self._choice(result)
        error = next((choice.error for choice in choices or [first] if choice.error is not None), None)
        self.counts.cached_tokens += result.usage.cached_tokens
        if error is None:
            self.counts.prompt_tokens += result.usage.prompt_tokens
            self.counts.generated_tokens += result.usage.completion_tokens
        self._write(
            source,
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            usage=result.usage,
            error=error,
            choices=choices,
        )

    def _choice(self, result: RowResult) -> Choice:
        text, error = None, None
        if result.error is not None or result.finish_reason == "error":
            error = RowError(result.error or "the row failed", "generation_failed", "server_error")
        else:
            try:
                text = completion_text(self._tokenizer, result)
            except Exception as fault:
                error = RowError(
                    f"the completion could not be decoded: {_named(fault)}", "cannot_decode", "server_error"
                )
        return Choice(text, result.completion_ids.tolist(), result.finish_reason, error)

    def _write(self, row: InputRow | BadRow, **outcome: object) -> None:
        written = record(row, **outcome)  # type: ignore[arg-type]
        try:
            write_line(self._output, written)
        except OSError as error:
            raise OutputFailed(error.strerror or str(error)) from error
        if written["error"] is None:
            self.counts.ok += 1
        else:
            self.counts.failed += 1

    def _gather(self) -> None:
        """Take the loop's own counts."""
        counts, control = self.counts, self._session.control
        driver, runtime = self._session.driver, self._session.runtime.metrics()
        counts.seconds = time.monotonic() - self._started
        counts.sampled_tokens = driver.metrics.num_generated_tokens
        counts.running, counts.waiting = driver.scheduler.num_running, driver.scheduler.num_waiting
        counts.num_pages = control.num_pages
        counts.pages_held = control.num_pages - control.num_free_pages
        counts.steps = driver.metrics.num_steps
        counts.preemptions = driver.metrics.num_preemptions
        counts.peak_pages = driver.metrics.peak_pages_held
        counts.scrubbed_pages = runtime.num_scrubbed_pages
        counts.backends = runtime.steps_by_backend
        counts.decodes = runtime.decodes_by_kind
        counts.programs = runtime.compiled
        counts.shares = control.prefix_index is not None
        counts.attainable_tokens = self._worker.attainable_tokens
        counts.evictions = runtime.control.num_evictions
        counts.hit_rate = runtime.control.page_hit_rate


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
