"""Some of the records of an output, chosen by chance and found again by their row.

For:        ``verify``: a sample that is the same whenever it is drawn, in memory that the sample decides.
Not for:    what the records say (verify.py), or records that are to be gone on with (earlier.py).
May import: the standard library, msgspec, maxtext_paged.cli; pyarrow in a function.
"""

from __future__ import annotations

import heapq
import math
import re
from array import array
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from maxtext_paged.cli import CommandError
from maxtext_paged.cli.files import rows_path


class _Head(msgspec.Struct):
    """What decides whether a record can be drawn."""

    index: int
    error: Any


_heads = msgspec.json.Decoder(_Head)
_whole = msgspec.json.Decoder(dict)


class Share:
    """How many of some records: a number of them, or a percentage.

    >>> Share.parse("1%").of(1000), Share.parse("1%").of(3), Share.parse("20").of(1000), Share.parse("100%").of(7)
    (10, 1, 20, 7)
    """

    def __init__(self, *, count: int | None = None, percent: float = 100.0) -> None:
        self._count, self._percent = count, percent

    @classmethod
    def parse(cls, text: str) -> Share:
        """ValueError where it is neither."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
        if found and 0 < float(found[1]) <= 100:
            return cls(percent=float(found[1]))
        if re.fullmatch(r"[1-9]\d*", text):
            return cls(count=int(text))
        raise ValueError(f"{text!r}: must be a number of rows, or a percentage such as 1%")

    def of(self, total: int) -> int:
        """At least one of any."""
        wanted = math.ceil(total * self._percent / 100) if self._count is None else self._count
        return min(wanted, total)


class SampledRecords:
    """The records that were drawn, by the index of their row.

    Attributes:
      num_records: whole records of the output. num_failed: those of them with an error, which are never drawn.
    """

    def __init__(self, output: str, share: Share, seed: int) -> None:
        """Look at all of them once, and draw.

        Raises:
          CommandError: the output cannot be read, or holds something else.
        """
        path = Path(output if Path(output).exists() else rows_path(output))
        self._path, self._parquet = path, path.name.endswith(".parquet")
        self.num_records = self.num_failed = 0
        indices, places = array("q"), array("q")
        try:
            for place, index, failed in self._parquet_heads() if self._parquet else self._line_heads():
                self.num_records += 1
                self.num_failed += failed
                if not failed:
                    indices.append(index)
                    places.append(place)
        except OSError as error:
            raise CommandError(f"{path}: cannot be read: {error.strerror}") from error
        wanted = share.of(len(indices))
        drawn = heapq.nsmallest(wanted, range(len(indices)), key=lambda i: _lot(seed, indices[i]))
        self._places = {indices[i]: places[i] for i in drawn}
        self._held = self._take_parquet(set(self._places.values())) if self._parquet else {}
        if len(self._places) != wanted:
            raise CommandError(f"{path}: two records are of one row: this is no output of one job")

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, index: int) -> bool:
        return index in self._places

    @property
    def indices(self) -> set[int]:
        """Of their rows."""
        return set(self._places)

    def record(self, index: int) -> dict[str, Any]:
        """The record of a row that was drawn."""
        if self._parquet:
            return self._held[self._places[index]]
        with open(self._path, "rb") as file:
            file.seek(self._places[index])
            return _whole.decode(file.readline())

    # --- how -----------------------------------------------------------------------------------------

    def _line_heads(self) -> Any:
        at = 0
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return  # torn: it was never whole
                try:
                    head = _heads.decode(line)
                except ValueError as error:  # msgspec's are
                    raise CommandError(f"{self._path}:{number}: no record of this command: {error}") from error
                yield at, head.index, head.error is not None
                at += len(line)

    def _parquet_heads(self) -> Any:
        place = 0
        for batch in self._opened().iter_batches(columns=["index", "error"], use_threads=False):
            for row in batch.to_pylist():
                yield place, row["index"], row["error"] is not None
                place += 1

    def _take_parquet(self, places: set[int]) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        place = 0
        for batch in self._opened().iter_batches(use_threads=False):
            here = [at for at in range(batch.num_rows) if place + at in places]
            found |= {place + at: row for at, row in zip(here, batch.take(here).to_pylist(), strict=True)}
            place += batch.num_rows
        return found

    def _opened(self) -> Any:
        from maxtext_paged.formats.parquet import require_pyarrow

        require_pyarrow(str(self._path))
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.ParquetFile(self._path)
        except pyarrow.ArrowException as error:
            raise CommandError(f"{self._path}: not a readable Parquet file: {error}") from error


def _lot(seed: int, index: int) -> bytes:
    """A row's lot: the smallest are drawn."""
    return blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
