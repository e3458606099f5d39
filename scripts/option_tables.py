"""Writes the tables of docs/options.md from the code, between their markers.

.venv/bin/python scripts/option_tables.py docs/options.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from maxtext_paged.config import PagedOptions
from maxtext_paged.families import SUPPORTED_BLOCKS
from maxtext_paged.options import OPTION_TABLE


def paged_table() -> str:
    """The ``paged_*`` options."""
    rows = ["| option | default | meaning |", "| --- | --- | --- |"]
    for name, field in PagedOptions.model_fields.items():
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        rows.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(rows)


def maxtext_table() -> str:
    """MaxText's own options."""
    rows = ["| option | verdict | why |", "| --- | --- | --- |"]
    rows += [f"| `{rule.name}` | {rule.verdict.value} | {rule.why} |" for rule in OPTION_TABLE]
    return "\n".join(rows)


def block_list() -> str:
    """Decoder blocks that may be bound."""
    return ", ".join(f"`{name}`" for name in sorted(block.value for block in SUPPORTED_BLOCKS)) + "."


def fill(text: str, marker: str, table: str) -> str:
    """``text`` with what stands between a marker and its end exchanged."""
    start = text.index(f"<!-- {marker} -->\n") + len(f"<!-- {marker} -->\n")
    return text[:start] + table + "\n" + text[text.index("<!-- end -->", start) :]


def main() -> None:
    path = Path(sys.argv[1])
    text = path.read_text()
    for marker, table in (("paged", paged_table()), ("maxtext", maxtext_table()), ("blocks", block_list())):
        text = fill(text, marker, table)
    path.write_text(text)


if __name__ == "__main__":
    main()
