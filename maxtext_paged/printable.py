"""Text of strangers, made fit for a message: short, on one line, and without a letter that a terminal obeys.

For:        rows, ids, templates and exceptions that messages quote.
Not for:    completions and records: those are data, and JSON writes them.
May import: the standard library.
"""

from __future__ import annotations

import unicodedata

MAX_MESSAGE_CHARACTERS = 600
"""Of one row's error message. A job may have a million of them."""

_OBEYED = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Categories of what steers a terminal or an editor instead of being shown: controls, direction marks, line ends."""


def printable(text: str, limit: int = MAX_MESSAGE_CHARACTERS) -> str:
    """The text with what cannot be shown written as JSON does, its middle left out if it is long.

    >>> printable("red \\x1b[31m, a\\nline, \\u202eleft")
    'red \\\\u001b[31m, a line, \\\\u202eleft'
    >>> printable("0123456789" * 9, limit=20)
    '0123456789 ... 56789'
    """
    text = _cut(text, limit)
    if text.isascii() and text.isprintable():
        return text
    return _cut("".join(map(_shown, text)), limit)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    tail = (limit - 5) // 3
    return f"{text[: limit - 5 - tail]} ... {text[len(text) - tail :]}"


def _shown(letter: str) -> str:
    if letter in "\n\r\t":
        return " "
    if letter.isprintable() or unicodedata.category(letter) not in _OBEYED:
        return letter
    code = ord(letter)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
