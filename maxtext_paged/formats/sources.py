"""An input file and the form of its rows, found by looking.

For:        choosing between JSON lines and Parquet, our own form and OpenAI's; reading the rows as often as wanted.
Not for:    opening files (cli/files.py) or what a row says.
May import: the standard library, kv_common, maxtext_paged.formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Protocol

from kv_common.errors import UnsupportedError
from maxtext_paged.formats import openai_batch, parquet
from maxtext_paged.formats.lines import OWN, Form, bounded_lines, file_digest, parse_object, read_rows
from maxtext_paged.formats.openai_batch import BatchForm
from maxtext_paged.formats.own import BadRow, InputRow, Refused
from maxtext_paged.row_fields import PROMPTS

_LOOKED_AT_LINES = 100
_OTHER_ENCODINGS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
}


class Source(Protocol):
    """Rows of one input.

    Attributes:
      form: of its rows.
    """

    form: Form

    def rows(self) -> Iterator[InputRow | BadRow]:
        """All of them, from the first."""
        ...

    def digest(self) -> str:
        """Of the bytes they are read from."""
        ...


class JsonLines:
    """Rows of a file of JSON lines, from where it stands now."""

    def __init__(self, file: BinaryIO, form: Form | None = None) -> None:
        self._file, self._start = file, file.tell()
        self.form = form or self._recognised()

    def rows(self) -> Iterator[InputRow | BadRow]:
        """All of them, from the first."""
        self._file.seek(self._start)
        return read_rows(bounded_lines(self._file), self.form)

    def digest(self) -> str:
        """Of the file's bytes."""
        return file_digest(self._file, self._start)

    def _recognised(self) -> Form:
        self._file.seek(self._start)
        for number, raw in enumerate(bounded_lines(self._file)):
            if number == _LOOKED_AT_LINES:
                break
            try:
                form = form_of(parse_object(raw.removeprefix(b"\xef\xbb\xbf")))
            except Refused:
                continue
            if form is not None:
                return form
        return OWN


def form_of(row: Mapping[str, Any]) -> Form | None:
    """The form whose keys an object has; None where it has none's or both's."""
    batch = any(key in row for key in openai_batch.KEYS)
    own = any(key in row for key in PROMPTS)
    if batch == own:
        return None
    return BatchForm() if batch else OWN


def open_source(name: str, file: BinaryIO) -> Source:
    """The rows of a file that can seek, from where it stands now.

    Raises:
      UnsupportedError: it is something else, as its first bytes say.
    """
    start = file.tell()
    head = file.read(4)
    file.seek(start)
    if head == parquet.MAGIC:
        return parquet.ParquetRows(name, file, form_of)
    for mark, what in _OTHER_ENCODINGS.items():
        if head.startswith(mark):
            raise UnsupportedError(f"{name} is {what}: the input is UTF-8 JSON lines or Parquet")
    return JsonLines(file)
