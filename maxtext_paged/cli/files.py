"""The paths of a job, before any work is done, and its input.

For:        refusing what would lose somebody's data; an input that can be read twice.
Not for:    what stands in it (formats), or the output (output.py).
May import: the standard library.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from maxtext_paged.cli import CommandError
from maxtext_paged.formats.parquet import SUFFIX, require_pyarrow

STANDARD = "-"


def check_paths(input_path: str, output_path: str, *, overwrite: bool, resume: bool = False) -> None:
    """Refuse a missing input, an existing output unless it may be replaced or gone on with, and one that is the input.

    Raises:
      CommandError: which, and what to do.
    """
    source = Path(input_path)
    if input_path != STANDARD:
        if source.is_dir():
            raise CommandError(f"{input_path} is a directory: the input is a file")
        if not source.exists():
            raise CommandError(f"{input_path}: no such input file")
        if not os.access(source, os.R_OK):
            raise CommandError(f"{input_path}: the input file cannot be read")
    if overwrite and resume:
        raise CommandError("--overwrite begins anew and --resume goes on: which?")
    if output_path == STANDARD:
        if resume:
            raise CommandError("--resume goes on with a file: -o - has none")
        return
    target = Path(output_path)
    if target.is_dir():
        raise CommandError(f"{output_path} is a directory: the output is a file")
    if not target.parent.is_dir():
        raise CommandError(f"{output_path}: there is no directory {target.parent}")
    if target.is_file():
        if _same_file(input_path, target):
            raise CommandError(f"{output_path} is the input: the output would overwrite it")
        if not (overwrite or resume):
            raise CommandError(f"{output_path} exists: choose another output, or --resume or --overwrite it")
    elif resume and target.exists():
        raise CommandError(f"{output_path} is not a file: there is nothing to --resume")
    unfinished = rows_path(output_path)
    if unfinished != output_path:
        require_pyarrow(output_path)
        if Path(unfinished).exists() and not (overwrite or resume):
            raise CommandError(f"{unfinished} exists: --resume its job, --overwrite it or choose another output")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise CommandError(f"{output_path}: cannot be written")


def rows_path(output: str) -> str:
    """Where records are appended: the output itself, or a file beside it where that cannot be appended to."""
    return f"{output}.unfinished.jsonl" if output.endswith(SUFFIX) else output


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
