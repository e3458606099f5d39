"""JSON lines: the rows of a file one at a time, and one line for each record.

For:        reading lines whatever is wrong with them, and writing them so that every reader finds one.
Not for:    what a row may say (own.py, openai_batch.py) or Parquet (parquet.py).
May import: the standard library, maxtext_paged.formats.

A byte order mark, CRLF, blank lines (skipped, but counted) and a missing last newline are fine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NoReturn, Protocol

from maxtext_paged.formats.own import BadRow, InputRow, OwnForm, Refused, refuse, shown
from maxtext_paged.row_limits import MAX_DEPTH, depth_beyond

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is refused, and never held in memory."""
_BLANK = b" \t\r\n\v\f"


class Form(Protocol):
    """How a row is written as an object, and what is written about it.

    Attributes:
      name: for messages. columns: the keys it reads.
    """

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    def of_run(self, run_id: str) -> Form:
        """The form for the records of one run."""
        ...

    def id_of(self, row: Mapping[str, Any]) -> str | int | None:
        """The caller's name for the row; Refused where it is none."""
        ...

    def parse(self, row: Mapping[str, Any], *, index: int, line: int, id: str | int | None) -> InputRow:
        """The row; Refused where something is wrong with it."""
        ...

    @property
    def record(self) -> Callable[..., dict[str, Any]]:
        """What is written about a row; arguments as those of ``own.record``."""
        ...


OWN: Form = OwnForm()


def bounded_lines(file: BinaryIO, limit: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """The lines of a file; of one beyond ``limit`` bytes only a little more than that."""
    while line := file.readline(limit + 2):
        yield line
        if len(line) > limit:
            while line and not line.endswith(b"\n"):
                line = file.readline(limit)


def file_digest(file: BinaryIO, start: int = 0) -> str:
    """A digest of a file's bytes from ``start`` on."""
    whole = hashlib.sha256()
    file.seek(start)
    while piece := file.read(2**20):
        whole.update(piece)
    return whole.hexdigest()


def read_rows(lines: Iterable[bytes], form: Form = OWN) -> Iterator[InputRow | BadRow]:
    """The rows of a file, one at a time; whatever is wrong with a line becomes a ``BadRow``.

    Args:
      lines: raw lines as a binary file yields them.

    >>> [row] = read_rows([b'\\r\\n', b'{"prompt": "Hi", "temperature": -1}'])
    >>> row.line, row.error.message
    (2, 'temperature=-1: must be a finite number of at least 0')
    """
    index = 0
    for line, raw in enumerate(lines, start=1):
        if line == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if raw.strip(_BLANK):
            yield parse_row(raw, index=index, line=line, form=form)
            index += 1


def parse_row(raw: bytes, *, index: int, line: int, form: Form = OWN) -> InputRow | BadRow:
    """One line that is not blank."""
    try:
        row = parse_object(raw)
    except Refused as refused:
        return BadRow(index, line, refused.error)
    return row_of(row, index=index, line=line, form=form)


def row_of(row: Mapping[str, Any], *, index: int, line: int, form: Form) -> InputRow | BadRow:
    """One object."""
    row_id = None
    try:
        row_id = form.id_of(row)
        return form.parse(row, index=index, line=line, id=row_id)
    except Refused as refused:
        return BadRow(index, line, refused.error, row_id)


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object on a line.

    Raises:
      Refused: there is none.
    """
    if len(raw) > MAX_LINE_BYTES + 1:
        refuse("too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        refuse("invalid_utf8", f"the line is not UTF-8: {error.reason} at byte {error.start}")
    try:
        value = json.loads(text, object_pairs_hook=_pairs, parse_constant=_not_json)
    except RecursionError:
        refuse("invalid_json", "the line is not usable JSON: nested too deeply")
    except ValueError as error:
        refuse("invalid_json", f"the line is not JSON: {error}")
    # Counting is quicker than walking: most rows have few brackets, however long they are.
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and depth_beyond(value):
        refuse("invalid_json", f"the line is not usable JSON: nested more than {MAX_DEPTH} deep")
    if not isinstance(value, dict):
        refuse("not_an_object", f"the line must be a JSON object, not {shown(value)}")
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {shown(repeated)} stands twice in one object")
    return value


def _not_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


# --- writing -----------------------------------------------------------------------------------------------


# JSON leaves these as they are, but many readers of lines (str.splitlines among them) end a line there, and terminals
# obey the controls beyond ASCII as they do those within it.
_ESCAPED = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}


def dump_line(value: dict[str, Any]) -> bytes:
    """One record as one line of UTF-8, whatever characters it holds; NaN is refused (ValueError).

    >>> dump_line({"text": "a\\u2028b é"}).decode()
    '{"text": "a\\\\u2028b é"}\\n'
    """
    return (json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_ESCAPED) + "\n").encode(
        "utf-8",
        "backslashreplace",  # half a surrogate pair, as JSON itself would write it
    )


class Writable(Protocol):
    """A file, as far as records need one."""

    def write(self, data: bytes, /) -> object:
        """Take all of it."""
        ...

    def flush(self) -> object:
        """Hand it on."""
        ...


def write_line(file: Writable, value: dict[str, Any]) -> None:
    """Write one record and hand it to the operating system, so that a crash loses no finished row."""
    file.write(dump_line(value))
    file.flush()
