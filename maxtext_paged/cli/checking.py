"""Reading the input once before anything runs.

For:        counting rows, comparing their ids, and listing every line that cannot run.
Not for:    what is wrong with a line (formats, intake).
May import: the standard library, maxtext_paged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from maxtext_paged.cli import CommandError, one_line, say
from maxtext_paged.formats import BadRow, InputRow
from maxtext_paged.intake import IdCheck, RepeatedIds
from maxtext_paged.rows import Row

MAX_LISTED = 1000
"""Bad lines that are listed where the job runs all the same: each has its own record anyway."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What one reading found. ``ids`` has one entry for each row."""

    num_rows: int
    ids: IdCheck
    repeated: RepeatedIds


def check(
    name: str,
    read: Callable[[], Iterable[InputRow | BadRow]],
    *,
    judge: Callable[[InputRow], Row | BadRow] | None = None,
) -> Checked:
    """Read every row, and list the bad ones on stderr with their line numbers.

    Args:
      name: of the input, for messages.
      read: the rows, from the first one each time it is called.
      judge: what is asked of rows that are in order by themselves (tokens, a model's limits). With it, one bad row is
        enough to refuse the whole file; without it only the rows themselves are looked at, since tokenizing a long
        file twice takes its time.

    Raises:
      CommandError: there is a ``judge`` and some rows are bad.
    """
    ids = IdCheck()
    num_bad = 0
    for row in read():
        ids.add(row.id, row.line)
        num_bad += isinstance(row, BadRow)
    repeated = ids.repeated()
    checked = Checked(len(ids), ids, repeated)
    if not len(ids):
        say(f"{name} has no rows: there is nothing to run")
    if not num_bad and not repeated.lines and judge is None:
        return checked
    num_bad = 0
    for row in read():
        error = repeated.error(row.id, row.line)
        if error is None:
            judged = row if judge is None or isinstance(row, BadRow) else judge(row)
            error = judged.error if isinstance(judged, BadRow) else None
        if error is not None:
            num_bad += 1
            if judge is not None or num_bad <= MAX_LISTED:
                say(f"{name}:{row.line}: {one_line(error.message)}")
    if num_bad and judge is not None:
        raise CommandError(f"--strict: {num_bad} of {checked.num_rows} rows are unusable; nothing was run")
    if num_bad:
        more = f", {num_bad - MAX_LISTED} of them not listed" if num_bad > MAX_LISTED else ""
        say(f"{num_bad} of {checked.num_rows} rows cannot run{more}: each gets an error record (--strict runs nothing)")
    return checked
