"""The records that an output holds already.

For:        which rows need not run again, whose records these are, and where the last whole one ends.
Not for:    writing (output.py) or whether they belong to this run (run_file.py).
May import: the standard library, msgspec, maxtext_paged.cli and intake.
"""

from __future__ import annotations

from typing import Any, BinaryIO

import msgspec

from maxtext_paged.cli import CommandError
from maxtext_paged.intake import IdCheck


class _Record(msgspec.Struct):
    """What is read of a record, in whichever form it is written."""

    index: int
    error: Any
    id: Any = None
    custom_id: Any = msgspec.UNSET


_decoder = msgspec.json.Decoder(_Record)


class EarlierRecords:
    """A bit for each row: memory does not grow with what stands in the records.

    Attributes:
      num: whole records. num_failed: those with an error.
      end: offset behind the last whole one. num_torn: bytes behind it, of a record whose writing was interrupted.
    """

    def __init__(self) -> None:
        self.num = self.num_failed = self.end = self.num_torn = 0
        self._present = bytearray()

    def __contains__(self, index: object) -> bool:
        if not isinstance(index, int):
            return False
        place, bit = divmod(index, 8)
        return place < len(self._present) and bool(self._present[place] >> bit & 1)

    def __len__(self) -> int:
        return self.num

    def add(self, index: int, *, failed: bool) -> None:
        """Take the record of row ``index``, which has none yet."""
        place, bit = divmod(index, 8)
        self._present.extend(bytes(max(0, place + 1 - len(self._present))))
        self._present[place] |= 1 << bit
        self.num += 1
        self.num_failed += failed


def read_earlier(name: str, file: BinaryIO, ids: IdCheck) -> EarlierRecords:
    """The records of an output, read from its beginning.

    Only the last line may be torn: this command appends whole lines and nothing else.

    Args:
      ids: of the input's rows.

    Raises:
      CommandError: some other line is no record of one of these rows, or a row has two.
    """
    found = EarlierRecords()
    for number, line in enumerate(file, start=1):
        try:
            if not line.endswith(b"\n"):
                if line.lstrip(b"\0")[:1] not in (b"", b"{"):
                    raise ValueError("not JSON")
                found.num_torn = len(line)
                break
            record = _decoder.decode(line)
            row_id = record.id if record.custom_id is msgspec.UNSET else record.custom_id
            if not 0 <= record.index < len(ids):
                raise ValueError(f"index={record.index}, and the input has {len(ids)} rows")
            if record.index in found:
                raise ValueError(f"index={record.index} has a record above")
            if not ids.is_of(record.index, row_id):
                raise ValueError(f"id={str(row_id)[:80]!r}, and row {record.index} of the input has another")
        except ValueError as error:  # msgspec's errors are ValueErrors
            raise CommandError(f"{name}:{number}: no record of this input: {error}: it is left as it is") from error
        found.add(record.index, failed=record.error is not None)
        found.end += len(line)
    return found
