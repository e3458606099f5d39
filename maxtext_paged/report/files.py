"""Files that show how a job stands: replaced whole, now and then and at the end.

For:        writing them so that a reader never finds half of one, and a job never fails because of one.
Not for:    what stands in them.
May import: the standard library.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress


class ShownFile:
    """One file.

    Args:
      path: where. kind: what it is, for messages.
      render: its content as it is now.
      interval: seconds between two writings.
      say: takes one line for the user.
    """

    def __init__(
        self,
        path: str,
        kind: str,
        render: Callable[[], bytes],
        *,
        interval: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.kind = path, kind
        self._render, self._interval, self._say, self._clock = render, interval, say, clock
        self._written_at = clock()
        self._failed = False

    @property
    def due(self) -> bool:
        """Whether it is time to write it again."""
        return self._clock() - self._written_at >= self._interval

    def write(self, *, last: bool = False) -> bool:
        """Replace the file; whether that was possible. What is wrong is said, the first time and at the end.

        Args:
          last: the job is over: the content is kept through a crash of the machine too.
        """
        self._written_at = self._clock()
        try:
            replace_whole(self.path, self._render(), sync=last)
        except Exception as error:  # whatever it is, the job's results must not suffer from it
            if last or not self._failed:
                why = getattr(error, "strerror", None) or f"{type(error).__name__}: {' '.join(str(error).split())}"
                after = "records and exit code are not affected" if last else "the job goes on, and it is tried again"
                self._say(f"the {self.kind} {self.path} could not be written: {why}; {after}")
            self._failed = True
            return False
        self._failed = False
        return True


def replace_whole(path: str, content: bytes, *, sync: bool = False) -> None:
    """Put ``content`` in place of a file at once; on failure the file is as it was.

    Raises:
      OSError: it could not be written.
    """
    target = os.path.realpath(path)
    staged = f"{target}.new"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(staged, flags, 0o666), "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(staged, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(staged)
        raise
