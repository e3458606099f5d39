"""Prints the prompts of a JSONL file beside the completions `maxtext-paged generate` wrote for them.

Usage: show-completions.py PROMPTS.jsonl COMPLETIONS.jsonl
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from textwrap import indent


def rows(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def shown(text: str) -> str:
    """What a terminal would obey, written out; line breaks stay."""
    return re.sub(
        r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]", lambda found: repr(found[0])[1:-1], text
    )


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
        print(f"\n[{index}] {shown(prompt_text(row).strip())}")
        print(indent(shown(str(text or "(nothing)")), "    "))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
