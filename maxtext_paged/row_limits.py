"""How much one row may be: the bounds that need no model.

For:        refusing by name what would take memory or time out of all proportion to one answer.
Not for:    limits of a model (intake.py) or of single options (row_fields.py).
May import: the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_DEPTH = 64
"""Of lists and objects within each other. A chat needs four."""
MAX_MESSAGES = 4096
"""Of one chat."""
MAX_STOP_TOKEN_IDS = 1024
CHARACTERS_PER_TOKEN = 1024
"""No tokenizer puts more into a token; a longer text need not be encoded to know that it does not fit."""


def depth_beyond(value: Any, limit: int = MAX_DEPTH) -> bool:
    """Whether lists and objects stand within each other more than ``limit`` deep. Never recurses further than that.

    >>> depth_beyond([[1], {"a": [2]}], 2), depth_beyond([[1], {"a": [2]}], 3)
    (True, False)
    """
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return limit == 0 or any(depth_beyond(part, limit - 1) for part in value if isinstance(part, dict | list))


def too_many(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """The key of a row that holds too much, and the bound."""
    for key, limit, what in (
        ("messages", MAX_MESSAGES, "messages"),
        ("stop_token_ids", MAX_STOP_TOKEN_IDS, "token ids"),
    ):
        value = row.get(key)
        if isinstance(value, list) and len(value) > limit:
            return key, f"has {len(value)} {what}: at most {limit} are read"
    return None


def cannot_fit(prompt: str | None, messages: Sequence[Mapping[str, Any]] | None, max_tokens: int) -> int | None:
    """The characters of a prompt, if they are too many for ``max_tokens`` tokens of any tokenizer."""
    if prompt is not None:
        count = len(prompt)
    else:
        count = sum(len(str(message.get("content") or "")) for message in messages or ())
    return count if count > CHARACTERS_PER_TOKEN * max_tokens else None
