"""For the documentation's site: examples in docstrings are code there, not quotations of quotations.

mkdocs.yml names it as an extension of griffe, which reads the sources.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """A docstring with a fence around each run of examples, their output included.

    >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2\\n\\nOnly.")
    'Adds.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```\\n\\nOnly.'
    """
    return _EXAMPLE.sub(lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```", text)


class DoctestFences(griffe.Extension):
    """Fences the examples of every object that is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """An object was read whole."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
