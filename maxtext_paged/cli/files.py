"""The input and the output of a job: files, or stdin and stdout.

For:        refusing what would lose somebody's data, before any work is done.
Not for:    what stands in them (formats.py).
May import: the standard library.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from maxtext_paged.cli import CommandError

STANDARD = "-"


def check_paths(input_path: str, output_path: str, *, overwrite: bool) -> None:
    """Refuse a missing input, an existing output, and an output that is the input.

    Raises:
      CommandError: which, and what to do.
    """
    source = Path(input_path)
    if input_path != STANDARD:
        if source.is_dir():
            raise CommandError(f"{input_path} is a directory: the input is a file of JSON lines")
        if not source.exists():
            raise CommandError(f"{input_path}: no such input file")
        if not os.access(source, os.R_OK):
            raise CommandError(f"{input_path}: the input file cannot be read")
    if output_path == STANDARD:
        return
    target = Path(output_path)
    if target.is_dir():
        raise CommandError(f"{output_path} is a directory: the output is a file")
    if not target.parent.is_dir():
        raise CommandError(f"{output_path}: there is no directory {target.parent}")
    if target.is_file():
        if _same_file(input_path, target):
            raise CommandError(f"{output_path} is the input: the output would overwrite it")
        if not overwrite:
            raise CommandError(f"{output_path} exists: choose another output, or --overwrite it")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise CommandError(f"{output_path}: cannot be written")


def _same_file(input_path: str, target: Path) -> bool:
    try:
        status = os.fstat(sys.stdin.fileno()) if input_path == STANDARD else os.stat(input_path)
    except (OSError, ValueError, AttributeError):  # no stdin
        return False
    return os.path.samestat(status, target.stat())


@contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """The input, so that it can be read twice: what cannot seek is spooled to a temporary file without a name."""
    try:
        source: BinaryIO = sys.stdin.buffer if path == STANDARD else open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise CommandError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        if source.seekable():
            yield source
        else:
            with tempfile.TemporaryFile() as spooled:
                shutil.copyfileobj(source, spooled)
                spooled.seek(0)
                yield spooled
    finally:
        if path != STANDARD:
            source.close()


@contextmanager
def claim_output(path: str, *, overwrite: bool) -> Iterator[Callable[[], BinaryIO]]:
    """A function that opens the output, to be called when there is something to run: until then no file appears.

    Where records go to stdout, nothing else may: from now on whatever prints there is shown on stderr.

    Raises:
      CommandError: by that function, when the file cannot be created.
    """
    if path == STANDARD:
        sys.stdout.flush()
        keep = os.dup(1)
        os.dup2(2, 1)
        records = os.fdopen(keep, "wb")
        try:
            yield lambda: records
        finally:
            sys.stdout.flush()
            os.dup2(keep, 1)
            with suppress(OSError):  # a reader that went away was reported when it was written to
                records.close()
        return
    opened: list[BinaryIO] = []

    def create() -> BinaryIO:
        replaces = overwrite or (Path(path).exists() and not stat.S_ISREG(os.stat(path).st_mode))
        try:
            opened.append(open(path, "wb" if replaces else "xb"))  # noqa: SIM115
        except FileExistsError:
            raise CommandError(f"{path} exists: choose another output, or --overwrite it") from None
        except OSError as error:
            raise CommandError(f"{path}: cannot be written: {error.strerror}") from error
        return opened[0]

    try:
        yield create
    finally:
        for file in opened:
            with suppress(OSError):  # as above
                file.close()
