"""Prints the prompts of a JSONL file beside the completions `maxtext-paged generate` wrote for them.

Usage: show-completions.py PROMPTS.jsonl COMPLETIONS.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from textwrap import indent


def rows(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def prompt_text(row: dict) -> str:
    return row["prompt"] if "prompt" in row else row["messages"][-1]["content"]


def main(prompts_path: str, completions_path: str) -> int:
    """Print each prompt and its completion in input order; 1 when a row is missing, failed or is empty."""
    completions = {row["index"]: row for row in rows(completions_path)}
    failed = 0
    for index, row in enumerate(rows(prompts_path)):
        done = completions.get(index, {"error": "no output row"})
        text = done.get("error") or done.get("text", "").strip()
        failed += bool(done.get("error")) or not text
        print(f"\n[{index}] {prompt_text(row).strip()}")
        print(indent(text or "(nothing)", "    "))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
