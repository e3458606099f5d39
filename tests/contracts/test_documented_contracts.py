"""docs/contracts.md names tests that exist, docs/operating.md quotes what the code prints, and ADRs are listed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGES = ("kv_common", "kv_control", "kv_execution", "maxtext_paged")
NAMED = re.compile(r"`((?:\w+/)?\w+\.py)::(\w+)`")
SHORTEST_PIECE = 6
"""Characters below which a piece of a quoted line says nothing."""


def names_in(path: Path) -> set[str]:
    """Tests of a file, and names of classes of tests: what pytest would collect by them."""
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in found if name.startswith(("test_", "Test"))}


def missing(text: str) -> list[str]:
    """What a document names and no test file has."""
    return [f"{file}::{name}" for file, name in NAMED.findall(text) if name not in names_in(ROOT / "tests" / file)]


def table_rows(text: str) -> list[list[str]]:
    """Cells of every table row that is neither a heading nor the line below one."""
    lines = text.splitlines()
    rows = []
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("| ") and not line.startswith("| ---") and not below.startswith("| ---"):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def test_every_named_test_exists() -> None:
    text = (DOCS / "contracts.md").read_text(encoding="utf-8")
    assert len(NAMED.findall(text)) > 100
    assert missing(text) == []


def test_every_promise_has_a_test() -> None:
    text = (DOCS / "contracts.md").read_text(encoding="utf-8")
    rows = table_rows(text)
    assert len(rows) > 40
    assert [promise for promise, held_by in rows if not NAMED.search(held_by)] == []


def test_a_test_that_was_renamed_would_be_seen() -> None:
    assert missing("`common/test_pages.py::test_never_written`, `common/test_gone.py::test_x`") == [
        "common/test_pages.py::test_never_written",
        "common/test_gone.py::test_x",
    ]


def docstrings(tree: ast.AST) -> set[int]:
    """Nodes that describe and are not printed."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def printed_texts() -> str:
    """Every text in the packages' code but docstrings, pieces of formatted ones end to end, gaps as a mark."""
    found = []
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        described = docstrings(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
                found.append(re.sub(r"%(?:\.\d+)?[a-z]", "\0", node.value))
    return "\n".join(found)


def unprinted(lines: list[str], texts: str) -> list[str]:
    """Quoted lines with a piece that no text of the code has.

    A piece ends at dots; where it is not found as a whole, since the code has a gap of its own in it, also behind
    colons, semicolons and commas.
    """
    found = []
    for line in lines:
        for whole in (piece.strip() for piece in line.split("...")):
            pieces = [whole] if whole in texts else re.split(r"(?<=[:;,]) |(?=\()", whole)
            found += [f"{line}: {piece!r}" for piece in pieces if len(piece) >= SHORTEST_PIECE and piece not in texts]
    return found


def quoted_lines() -> list[str]:
    text = (DOCS / "operating.md").read_text(encoding="utf-8")
    part = text.split("## What a run prints\n")[1].split("\n## ")[0]
    return [row[0].strip("`") for row in table_rows(part)]


def test_every_quoted_log_line_is_one_that_the_code_prints() -> None:
    lines = quoted_lines()
    assert len(lines) > 20
    assert unprinted(lines, printed_texts()) == []


def test_a_line_that_nothing_prints_would_be_seen() -> None:
    line = "KV pools: ... pages of ... elephants"
    assert unprinted([line], printed_texts()) == [f"{line}: 'KV pools:'", f"{line}: 'elephants'"]


@pytest.mark.parametrize("path", sorted((DOCS / "adr").glob("0*.md")), ids=lambda path: path.stem)
def test_every_decision_is_listed_with_the_status_it_states(path: Path) -> None:
    [row] = [row for row in table_rows((DOCS / "adr" / "index.md").read_text(encoding="utf-8")) if path.name in row[0]]
    stated = re.search(r"^Status: (\w+)", path.read_text(encoding="utf-8"), re.M)
    assert stated and row[1].startswith(stated[1])
    assert path.name in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
