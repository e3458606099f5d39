"""Renders chat templates in a process of its own: the child's side. Run as a script, never imported by the package.

For:        a stranger's program, with nothing in reach: no files, no modules, little memory, little time.
Not for:    starting this process or deciding limits (template_process.py).
May import: the standard library, jinja2.

One JSON object a line comes in on stdin, and one goes out on stdout for each. A template that takes too much kills the
process (a signal of the system's, so C code is ended too); whoever started it reads that as the answer.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.debug
import jinja2.runtime
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML; models were trained on the plain characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """The dialect that models publish templates in."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.globals.pop("lipsum")
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


class _Renderer:
    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._now = datetime.now()
        self._environment = make_environment(lambda: self._now)
        self._templates: dict[str, jinja2.Template] = {}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What became of one request."""
        self._now = datetime.fromisoformat(asked["now"])
        try:
            template = self._templates.get(asked["name"])
            if template is None:
                try:
                    template = self._environment.from_string(asked["source"])
                except jinja2.TemplateError as error:
                    return {"invalid": str(error)}
                self._templates[asked["name"]] = template
            if asked["variables"] is None:
                return {"text": ""}
            text = template.render(**asked["variables"])
        except MemoryError:
            return {"failed": "", "kind": "memory"}
        except RecursionError:
            return {"failed": "", "kind": "recursion"}
        except Exception as error:  # whatever a stranger's program raises
            return {"failed": str(error) or type(error).__name__, "kind": "raised"}
        return {"text": text} if len(text) <= self._max_characters else {"failed": "", "kind": "length"}


def main(cpu_seconds: float, memory_bytes: int, max_characters: int) -> None:
    """Answer until stdin ends."""
    renderer = _Renderer(max_characters)
    renderer.answer({"now": "2000-01-01", "name": "", "source": "{{ 1 / 0 }}{{ strftime_now('%b') }}", "variables": {}})
    for name, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 3),  # the three that are open: no other can be opened
    ):
        resource.setrlimit(name, (limit, limit))
    answers, requests = sys.stdout, sys.stdin
    answers.write('"ready"\n')
    answers.flush()
    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF ends the process: nothing catches it
        try:
            answer = json.dumps(renderer.answer(json.loads(line)))
        except MemoryError:
            answer = json.dumps({"failed": "", "kind": "memory"})
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(answer + "\n")
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent: its last rows are still rendered
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
