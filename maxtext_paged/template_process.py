"""Renders chat templates in a process of its own: the parent's side.

A chat template is a program that comes with a model, run on what comes with a row. Jinja's sandbox keeps it from
objects it should not see, but not from looping for hours or asking for gigabytes, and nothing in one process can stop
that in time; so it runs in another, which the system limits and ends.

For:        one renderer per process, started when it is first needed and again after a template ended it.
Not for:    rendering (template_worker.py), finding templates or checking messages (chat_template.py).
May import: the standard library, kv_common.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kv_common.errors import ConfigError, RequestError

_SCRIPT = Path(__file__).with_name("template_worker.py")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rendering may take.

    Attributes:
      cpu_seconds: of processor time.
      wall_seconds: until it is given up, however busy the machine is. Also for starting.
      memory_bytes: of address space, Python's own 50 MiB or so among them.
      max_characters: of the rendered text.
    """

    cpu_seconds: float = 2.0
    wall_seconds: float = 60.0
    memory_bytes: int = 768 * 2**20
    max_characters: int = 32 * 2**20


class TemplateRenderer:
    """Renders templates elsewhere, one at a time. Threads take turns; a fork of this process gets one of its own.

    >>> TemplateRenderer().render("Hi {{ name }}", {"name": "you"})
    'Hi you'
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = -1
        self._known: set[str] = set()
        self._unread = b""

    def __del__(self) -> None:
        with suppress(Exception):  # half made, or late in the interpreter's life
            self._end()

    def check(self, source: str) -> None:
        """Compile it only.

        Raises:
          ConfigError: it is not valid, or too large to compile.
        """
        self._ask(source, None, datetime.now())

    def render(self, source: str, variables: dict[str, Any], now: datetime | None = None) -> str:
        """The text that a template makes of its variables.

        Args:
          variables: of types that JSON has.
          now: what ``strftime_now`` says.

        Raises:
          ConfigError: it is not valid. RequestError: it refused, failed or took too much; the message says which.
        """
        return self._ask(source, variables, now or datetime.now())

    def close(self) -> None:
        """End the process; the next rendering starts another."""
        with self._lock:
            self._end()

    def _ask(self, source: str, variables: dict[str, Any] | None, now: datetime) -> str:
        with self._lock:
            if self._child is None or self._owner != os.getpid() or self._child.poll() is not None:
                self._end()
                self._start()
            known = source in self._known
            asked = {
                "name": source,
                "source": None if known else source,
                "variables": variables,
                "now": now.isoformat(),
            }
            try:
                line = json.dumps(asked).encode() + b"\n"
            except (TypeError, ValueError, RecursionError) as error:
                raise RequestError(f"what the chat template is given is not plain data: {error}") from None
            try:
                answer = self._exchange(line)
            except BaseException:  # an interruption too: what comes back now would be taken for the next answer
                self._end()
                raise
            if "invalid" in answer:
                raise ConfigError(f"the chat template is not valid Jinja: {answer['invalid']}")
            if "text" in answer:
                self._known.add(source)
                return str(answer["text"])
            took = {
                "memory": f"it needs more than {self.limits.memory_bytes // 2**20} MiB of memory",
                "recursion": "it nests or recurses too deeply",
                "length": f"its text is longer than {self.limits.max_characters} characters",
            }
            raise RequestError(took.get(answer["kind"], str(answer["failed"])))

    def _start(self) -> None:
        if not sys.executable:
            raise ConfigError("chat templates run in a Python process of their own, and sys.executable names none")
        self._known.clear()
        self._unread = b""
        limits = [str(self.limits.cpu_seconds), str(self.limits.memory_bytes), str(self.limits.max_characters)]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        # -P: this file's folder has modules of ours with common names. Of our environment it needs nothing else.
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-X", "utf8", str(_SCRIPT), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": path, "TZ": os.environ.get("TZ", ""), "PATH": os.defpath},
            bufsize=0,
        )
        self._owner = os.getpid()
        assert self._child.stdin is not None and self._child.stdout is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        try:
            ready = self._line(_Patience(self.limits.wall_seconds))
        except BaseException:
            self._end()
            raise
        if ready != b'"ready"':
            self._end()
            raise ConfigError("the process that renders chat templates did not start: is jinja2 installed?")

    def _exchange(self, line: bytes) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        child = self._child
        assert child is not None and child.stdin is not None
        requests = child.stdin.fileno()
        patience, left = _Patience(self.limits.wall_seconds), memoryview(line)
        with suppress(BrokenPipeError):
            while left and patience.until(lambda wait: select.select([], [requests], [], wait)[1]):
                left = left[os.write(requests, left) :]
        answer = self._line(patience)
        if answer is not None:
            found: dict[str, Any] = json.loads(answer)
            return found
        ended = child.wait() if patience.left else child.poll()
        self._end()
        if ended is None:
            raise RequestError(f"it took more than {self.limits.wall_seconds:g} s")
        if ended == -signal.SIGPROF:
            raise RequestError(f"it took more than {self.limits.cpu_seconds:g} s of processor time")
        raise RequestError(
            f"it ended the process that renders templates (exit code {ended}): too much memory, or nesting"
        )

    def _line(self, patience: _Patience) -> bytes | None:
        """The next line of the child; None where there is none before it ends, or before patience does."""
        child = self._child
        assert child is not None and child.stdout is not None
        answers = child.stdout.fileno()
        pieces = [self._unread]
        while b"\n" not in pieces[-1]:
            if not patience.until(lambda wait: select.select([answers], [], [], wait)[0]):
                return None
            piece = os.read(answers, 2**20)
            if not piece:
                return None
            pieces.append(piece)
        line, _, self._unread = b"".join(pieces).partition(b"\n")
        return line

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if self._owner == os.getpid():  # a fork's parent goes on with its own
            child.kill()
            child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


class _Patience:
    """Time to wait, counted in short waits: a process that is stopped, or a machine that sleeps, does not lose it."""

    def __init__(self, seconds: float) -> None:
        self.left = max(1, round(seconds / _WAIT_SECONDS))

    def until(self, ready: Callable[[float], object]) -> bool:
        """Wait until it is ready; False when there is no patience left."""
        while self.left:
            if ready(_WAIT_SECONDS):
                return True
            self.left -= 1
        return False


_WAIT_SECONDS = 0.1

_SHARED = TemplateRenderer()
atexit.register(_SHARED.close)


def shared_renderer() -> TemplateRenderer:
    """The one of this process."""
    return _SHARED
