"""Rows in and records out: our own form and OpenAI's batch form, as JSON lines or Parquet.

For:        everything about a row that can be judged without a model.
Not for:    tokens, models or limits that depend on them (intake.py); the job itself (cli/generate.py).
May import: the standard library, kv_common, kv_control, maxtext_paged.rows and row_fields; pyarrow in parquet.py.
"""

from maxtext_paged.formats.lines import OWN, Form, Writable, dump_line, parse_row, read_rows, write_line
from maxtext_paged.formats.own import BadRow, Choice, InputRow, RowError, record

__all__ = [
    "OWN",
    "BadRow",
    "Choice",
    "Form",
    "InputRow",
    "RowError",
    "Writable",
    "dump_line",
    "parse_row",
    "read_rows",
    "record",
    "write_line",
]
