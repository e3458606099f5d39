"""Numbers and texts as the report shows them.

For:        durations with their unit, amounts of any size, texts that came from an input.
Not for:    HTML: whoever puts them there escapes them.
May import: the standard library.
"""

from __future__ import annotations

import math
import re
import unicodedata

_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_SPELLED = ("Cc", "Cs", "Zl", "Zp")
_SECRET = re.compile(r"(^|_)(token|secret|password|passwd|api_key|access_key|credentials?)$", re.IGNORECASE)


def duration(seconds: float | None, *, short: bool = False) -> str:
    """Seconds in the unit that fits, to three figures.

    Args:
      short: no trailing zeros, for axes.

    >>> duration(0.0000123), duration(0.0456), duration(7.891), duration(75), duration(7322), duration(200_000)
    ('12.3 µs', '45.6 ms', '7.89 s', '1 min 15 s', '2 h 2 min', '55 h 33 min')
    >>> duration(None), duration(0.5, short=True), duration(300, short=True), duration(0, short=True)
    ('', '500 ms', '5 min', '0')
    """
    if seconds is None or math.isnan(seconds):
        return ""
    if not seconds:
        return "0" if short else "0 s"
    for unit, size, limit in (("µs", 1e-6, 999.5), ("ms", 1e-3, 999.5), ("s", 1.0, 59.95)):
        if (value := seconds / size) < limit:
            return f"{value:.3g} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min")] if hours else [(minutes, "min"), (rest, "s")]
    return " ".join(
        f"{value} {unit}" for place, (value, unit) in enumerate(parts) if value or (not place and not short)
    )


def amount(value: float | None) -> str:
    """A count or a rate, thousands apart, with decimals only where it is small.

    >>> amount(1234567), amount(12.345), amount(0.5), amount(0), amount(1e9), amount(float("nan"))
    ('1,234,567', '12.3', '0.5', '0', '1,000,000,000', '')
    """
    if value is None or math.isnan(value):
        return ""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def visible(text: object) -> str:
    """A text from an input with its control and direction characters spelled out, and halves of surrogate pairs.

    >>> visible("a\\x00b\\u202ec"), visible(7), visible(None)
    ('a\\\\u0000b\\\\u202ec', '7', '')
    """
    if text is None:
        return ""
    return "".join(
        f"\\u{ord(letter):04x}" if letter in _DIRECTIONS or unicodedata.category(letter) in _SPELLED else letter
        for letter in str(text)
    )


def without_secrets(word: str) -> str:
    """``key=value`` with the value left out where the key says that it is a secret.

    >>> without_secrets("hf_access_token=abc"), without_secrets("paged_max_num_batched_tokens=8")
    ('hf_access_token=...', 'paged_max_num_batched_tokens=8')
    """
    key, equals, value = word.partition("=")
    return f"{key}=..." if equals and value and is_secret(key) else word


def is_secret(key: str) -> bool:
    """Whether an option of this name holds something that nobody else may see."""
    return _SECRET.search(key) is not None
