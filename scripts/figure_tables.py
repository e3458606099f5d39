"""Writes the tables of docs/watching.md from the code, between their markers.

.venv/bin/python scripts/figure_tables.py docs/watching.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from maxtext_paged.report.figures import DISTRIBUTIONS, FIGURES
from maxtext_paged.report.prometheus import PREFIX


def figure_table() -> str:
    """Every count and rate."""
    rows = ["| JSON | Prometheus | kind | unit | meaning |", "| --- | --- | --- | --- | --- |"]
    for figure in FIGURES:
        labels = "".join(f" `{label}`" for label in figure.labels)
        rows.append(
            f"| `{figure.part}.{figure.name}` | `{PREFIX}{figure.metric}`{labels} | {figure.kind} | {figure.unit} | "
            f"{figure.meaning} |"
        )
    return "\n".join(rows)


def distribution_table() -> str:
    """Every distribution."""
    rows = ["| JSON, in `distributions` | Prometheus histogram | meaning |", "| --- | --- | --- |"]
    rows += [f"| `{each.name}` | `{PREFIX}{each.metric}` | {each.meaning} |" for each in DISTRIBUTIONS]
    return "\n".join(rows)


def filled(text: str) -> str:
    """The document with its tables as the code has them."""
    for marker, table in (("figures", figure_table()), ("distributions", distribution_table())):
        start = text.index(f"<!-- {marker} -->\n") + len(f"<!-- {marker} -->\n")
        text = text[:start] + table + "\n" + text[text.index("<!-- end -->", start) :]
    return text


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(filled(path.read_text()))
