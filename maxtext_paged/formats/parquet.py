"""Rows from Parquet, and records to it, a batch of rows at a time.

For:        columns as the keys of rows, and records as columns.
Not for:    what a row says (own.py, openai_batch.py); crash safety (cli/output.py: a Parquet file is whole or nothing).
May import: the standard library, kv_common, maxtext_paged.formats; pyarrow inside functions.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import batched
from typing import Any, BinaryIO

from kv_common.errors import UnsupportedError
from maxtext_paged.formats.lines import OWN, Form, file_digest, row_of
from maxtext_paged.formats.own import BadRow, InputRow
from maxtext_paged.row_fields import UNSUPPORTED

MAGIC = b"PAR1"
SUFFIX = ".parquet"
_BATCH_ROWS = 256
_GROUP_BYTES = 8 * 2**20
"""Of a row group that is written, as Arrow holds it: Python's objects for it would be several times that."""


def require_pyarrow(name: str) -> None:
    """Refuse ``name`` where there is nothing to read or write it with.

    Raises:
      UnsupportedError: says what to install.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise UnsupportedError(f"{name}: Parquet needs pyarrow: pip install 'maxtext-paged[parquet]'")


class ParquetRows:
    """Rows of a Parquet file; a column that is null is a key that is not there. ``line`` is the row's number, from 1.

    Args:
      name: for messages. file: can seek, and stands at its beginning.
      form_of: recognises the form by columns.
    """

    def __init__(self, name: str, file: BinaryIO, form_of: Callable[[Mapping[str, Any]], Form | None]) -> None:
        """Open it.

        Raises:
          UnsupportedError: it is broken, or has columns that nothing reads.
        """
        require_pyarrow(name)
        import pyarrow
        import pyarrow.parquet

        self._file = file
        try:
            self._parquet = pyarrow.parquet.ParquetFile(file)
        except pyarrow.ArrowException as error:
            raise UnsupportedError(f"{name}: not a readable Parquet file: {error}") from error
        columns = self._parquet.schema_arrow.names
        self._maps = [field.name for field in self._parquet.schema_arrow if pyarrow.types.is_map(field.type)]
        self.form = form_of(dict.fromkeys(columns)) or OWN
        unknown = [column for column in columns if column not in self.form.columns and column not in UNSUPPORTED]
        if unknown:
            raise UnsupportedError(
                f"{name}: nothing reads the columns {', '.join(unknown)}: leave them out; known are "
                f"{', '.join(self.form.columns)}"
            )

    def rows(self) -> Iterator[InputRow | BadRow]:
        """All of them, from the first."""
        index = 0
        for batch in self._parquet.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
            for row in batch.to_pylist():
                row |= {name: dict(row[name]) for name in self._maps if row[name] is not None}
                yield row_of(_without_nulls(row), index=index, line=index + 1, form=self.form)
                index += 1

    def digest(self) -> str:
        """Of the file's bytes."""
        return file_digest(self._file)


def _without_nulls(value: Any) -> Any:
    """A struct's fields are in every row, asked for or not."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_nulls(part) for part in value]
    return value


# --- records -----------------------------------------------------------------------------------------------


def write_records(path: str, read: Callable[[], Iterable[bytes]]) -> None:
    """Write records to a Parquet file.

    Ids are whole numbers where all are, and text otherwise. A response's body is JSON text: its keys vary.

    Args:
      path: a new file.
      read: the records, a line each, from the first each time it is called.
    """
    import pyarrow
    import pyarrow.parquet

    kinds, batch, extra = _kinds(read())
    schema = _schema(pyarrow, kinds, batch=batch, extra=extra)
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        group: list[Any] = []
        for lines in batched(read(), _BATCH_ROWS):
            rows = [_flat(json.loads(line), text_ids=kinds != {int}) for line in lines]
            group.append(pyarrow.Table.from_pylist(rows, schema=schema))
            if sum(table.nbytes for table in group) >= _GROUP_BYTES:
                writer.write_table(pyarrow.concat_tables(group))
                group.clear()
        if group:
            writer.write_table(pyarrow.concat_tables(group))


def _kinds(lines: Iterable[bytes]) -> tuple[set[type], bool, set[str]]:
    """Types of the ids, whether these are records of the batch form, and the keys that only some records have."""
    kinds: set[type] = set()
    extra: set[str] = set()
    batch = False
    for line in lines:
        record = json.loads(line)
        batch = batch or "custom_id" in record
        extra.update(key for key in _SOME if key in record)
        kinds.add(type(record["custom_id"] if batch else record["id"]))
    return kinds - {type(None)}, batch, extra


_SOME = ("choices", "logprobs", "top_logprobs", "prompt_token_ids", "prompt_logprobs")
"""Keys of records that ask for them."""


def _schema(pyarrow: Any, kinds: set[type], *, batch: bool, extra: set[str]) -> Any:
    text, whole = pyarrow.string(), pyarrow.int64()
    ids = pyarrow.list_(pyarrow.int32())
    error = pyarrow.struct([(name, text) for name in ("message", "type", "code")])
    places = [("index", whole), ("line", whole)]
    if batch:
        response = pyarrow.struct([("status_code", pyarrow.int32()), ("request_id", text), ("body", text)])
        return pyarrow.schema([("id", text), ("custom_id", text), ("response", response), ("error", error), *places])
    usage = ["prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens"]
    fields = [
        ("id", whole if kinds == {int} else text),
        *places,
        ("text", text),
        ("token_ids", ids),
        ("finish_reason", text),
        ("usage", pyarrow.struct([(name, whole) for name in usage])),
        ("status_code", pyarrow.int32()),
        ("error", error),
    ]
    number = pyarrow.float64()
    alternative = pyarrow.struct([("id", pyarrow.int32()), ("logprob", number)])
    kinds_of_some = {
        "logprobs": pyarrow.list_(number),
        "top_logprobs": pyarrow.list_(pyarrow.list_(alternative)),
        "prompt_token_ids": ids,
        "prompt_logprobs": pyarrow.list_(number),
    }
    some = [(name, kind) for name, kind in kinds_of_some.items() if name in extra]
    fields += some
    if "choices" in extra:
        choice = [("index", whole), ("text", text), ("token_ids", ids), ("finish_reason", text), ("error", error)]
        choice += [(name, kind) for name, kind in some if not name.startswith("prompt")]
        fields.append(("choices", pyarrow.list_(pyarrow.struct(choice))))
    return pyarrow.schema(fields)


def _flat(record: dict[str, Any], *, text_ids: bool) -> dict[str, Any]:
    if "custom_id" in record:
        body = record["response"]["body"]
        record["response"]["body"] = None if body is None else json.dumps(body, ensure_ascii=False)
    elif text_ids and record["id"] is not None:
        record["id"] = str(record["id"])
    return record
