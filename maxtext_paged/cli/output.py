"""The output of a job: whole records appended to a file, or written to stdout.

For:        claiming it, taking up what is there, and leaving whole lines whatever happens while one is written.
Not for:    what a record says (formats) or which run it belongs to (run_file.py).
May import: the standard library, maxtext_paged.cli and formats.

A Parquet file is nothing until its last byte: its records are appended to JSON lines beside it, and converted when all
are there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from maxtext_paged.cli import CommandError
from maxtext_paged.cli.earlier import EarlierRecords, read_earlier
from maxtext_paged.cli.files import STANDARD, rows_path
from maxtext_paged.cli.run_file import Fingerprint, RunFile, check_same_run
from maxtext_paged.formats import Writable
from maxtext_paged.formats.parquet import write_records
from maxtext_paged.intake import IdCheck


class RecordFile:
    """A file that ends with a whole record, also when writing one fails half way: what had got there is cut off again.

    Nothing is buffered: a record that was written is in the operating system's hands.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._end = os.fstat(descriptor).st_size

    def write(self, data: bytes) -> int:
        """Append ``data``: all of it, or nothing and an exception."""
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except BaseException:  # a full disk; a signal that does not wait
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing waits."""


class Output:
    """An output that was claimed: nobody else writes it meanwhile, and until ``begin`` nothing is changed.

    Attributes:
      keeps_runs: True: a later run can go on with it.
    """

    keeps_runs = True

    def __init__(self, path: str, *, overwrite: bool, resume: bool, anyway: bool) -> None:
        self._path, self._overwrite, self._anyway = path, overwrite, anyway
        self._rows_path = rows_path(path)
        self._descriptor: int | None = None
        self._run_file = RunFile(path)
        self._run_file.read()
        self._earlier = EarlierRecords()
        if resume and Path(self._rows_path).exists():
            self._descriptor = self._open(os.O_RDWR | os.O_APPEND)

    def take_up(self, fingerprint: Fingerprint, ids: IdCheck) -> EarlierRecords:
        """The records that are there already; without ``--resume`` there are none.

        Args:
          fingerprint: what is known of this run so far.
          ids: of the input's rows.

        Raises:
          CommandError: they are another run's, or no records of ours.
        """
        if self._descriptor is None:
            if self._rows_path != self._path and Path(self._path).exists() and not self._overwrite:
                self._take_whole(fingerprint, ids)
            return self._earlier
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            if os.fstat(file.fileno()).st_size and not self._anyway:
                check_same_run(self._path, self._run_file.last, fingerprint)
            self._earlier = read_earlier(self._rows_path, file, ids)
        return self._earlier

    def begin(self, fingerprint: Fingerprint, made_with: Mapping[str, Any] | None = None) -> Writable:
        """Note which run this is, and open the output behind the records that are there.

        Args:
          made_with: where configuration and input are, as ``RunFile`` has it.

        Raises:
          CommandError: it is another run's, somebody created or writes it, or it cannot be written.
        """
        if self._descriptor is not None and self._earlier.num and not self._anyway:
            check_same_run(self._path, self._run_file.last, fingerprint)
        runs = list(self._run_file.runs) if self._earlier.num else []
        if not runs or runs[-1] != fingerprint:
            runs.append(fingerprint)
        self._run_file.made_with = made_with
        try:
            self._run_file.stage(runs)
            if self._descriptor is None:
                if self._rows_path != self._path and not self._overwrite and Path(self._path).exists():
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._path)
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | (0 if self._overwrite else os.O_EXCL)
                self._descriptor = self._open(flags)
            os.ftruncate(self._descriptor, self._earlier.end)  # a torn record; all there is, if that is not wanted
            self._run_file.commit()
        except FileExistsError as error:
            raise CommandError(
                f"{error.filename} exists: choose another output, or --resume or --overwrite it"
            ) from None
        except OSError as error:
            raise CommandError(f"{self._path}: cannot be written: {error.strerror}") from error
        finally:
            self._run_file.unstage()
        return RecordFile(self._descriptor)

    def finish(self, *, ok: int, failed: int) -> None:
        """Every row has its record: make sure that they stay, and note it.

        Raises:
          OSError: the disk is full or gone. Nothing is lost: ``--resume`` ends the job.
        """
        if self._descriptor is None:
            return
        os.fsync(self._descriptor)
        if self._rows_path != self._path:
            self._convert()
        self._run_file.stage(self._run_file.runs, {"ok": ok, "failed": failed})
        self._run_file.commit()
        if self._rows_path != self._path:
            os.unlink(self._rows_path)

    def _take_whole(self, fingerprint: Fingerprint, ids: IdCheck) -> None:
        """A Parquet file is there only once its job is complete, and cannot be added to."""
        check_same_run(self._path, self._run_file.last, fingerprint)
        if self._run_file.finished is None:
            raise CommandError(f"{self._path} is complete, and its run file does not know it: choose another output")
        for index in range(len(ids)):
            self._earlier.add(index, failed=index < self._run_file.finished["failed"])

    def _convert(self) -> None:
        """Put the records into a Parquet file, which appears whole."""

        def read() -> Iterator[bytes]:
            with open(self._rows_path, "rb") as file:
                yield from file

        staged = f"{self._path}.new"
        try:
            write_records(staged, read)
            with open(staged, "rb") as file:
                os.fsync(file.fileno())
            os.replace(staged, self._path)
        except BaseException:
            Path(staged).unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Let others have it."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _open(self, flags: int) -> int:
        descriptor = os.open(self._rows_path, flags | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise CommandError(f"{self._rows_path}: another process is writing it") from None
        except OSError:  # a file system without locks
            pass
        return descriptor


class PipedOutput:
    """stdout, a pipe or a device: records leave and nothing is kept of them.

    Attributes:
      keeps_runs: False.
    """

    keeps_runs = False

    def __init__(self, stream: Callable[[], BinaryIO]) -> None:
        self._stream = stream

    def take_up(self, fingerprint: Fingerprint, ids: IdCheck) -> EarlierRecords:
        """No records."""
        return EarlierRecords()

    def begin(self, fingerprint: Fingerprint, made_with: Mapping[str, Any] | None = None) -> Writable:
        """The stream."""
        return self._stream()

    def finish(self, *, ok: int, failed: int) -> None:
        """Nothing."""


@contextmanager
def claim_output(
    path: str, *, overwrite: bool = False, resume: bool = False, anyway: bool = False
) -> Iterator[Output | PipedOutput]:
    """The output, to begin when there is something to run: until then no file appears or changes.

    Where records go to stdout, nothing else may: from now on whatever prints there is shown on stderr.

    Args:
      overwrite: replace what is there. resume: go on with it. anyway: also if another run began it.

    Raises:
      CommandError: it cannot be had.
    """
    if path == STANDARD:
        sys.stdout.flush()
        keep = os.dup(1)
        os.dup2(2, 1)
        records = os.fdopen(keep, "wb")
        try:
            yield PipedOutput(lambda: records)
        finally:
            sys.stdout.flush()
            os.dup2(keep, 1)
            with suppress(OSError):  # a reader that went away was reported when it was written to
                records.close()
        return
    if Path(path).exists() and not Path(path).is_file():
        with ExitStack() as opened:
            yield PipedOutput(lambda: opened.enter_context(_open_device(path)))
        return
    output = Output(path, overwrite=overwrite, resume=resume, anyway=anyway)
    try:
        yield output
    finally:
        output.close()


@contextmanager
def _open_device(path: str) -> Iterator[BinaryIO]:
    try:
        file = open(path, "wb")  # noqa: SIM115
    except OSError as error:
        raise CommandError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        yield file
    finally:
        with suppress(OSError):  # as above
            file.close()
