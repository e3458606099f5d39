"""The file beside an output that says which run its records came from.

For:        a run's fingerprint, and what differs between two of them.
Not for:    the records (earlier.py) or where the values come from (model.py, generate.py).
May import: the standard library, maxtext_paged.cli.

It is a file of its own, not a first line: an output has one line for each input row and nothing else, so every tool
that reads such files reads it. It stays when the job is complete: then ``--resume`` of a finished job says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from maxtext_paged.cli import CommandError
from maxtext_paged.cli.files import STANDARD
from maxtext_paged.report.words import is_secret

SUFFIX = ".run.json"
_MARK = "maxtext-paged run"
_SHOWN_DIFFERENCES = 6
_SHOWN_CHARACTERS = 60

Fingerprint = Mapping[str, Mapping[str, Any]]
"""What a run's results depend on: part (input, configuration, sampling, tokenizer, model) to name to a JSON value."""


def differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    """What is not as it was, in the parts that ``now`` has.

    >>> differences({"sampling": {"top_k": 5}, "model": {"weights": "a"}}, {"sampling": {"top_k": 6}})
    ['sampling top_k was 5, is 6']
    """
    found = []
    for part, values in now.items():
        old = before.get(part, {})
        for name in sorted({*values, *old}):
            if (was := old.get(name)) != (value := values.get(name)):
                found.append(f"{part} {name} was {_shown(was)}, is {_shown(value)}")
    return found


def check_same_run(output: str, before: Fingerprint | None, now: Fingerprint) -> None:
    """Refuse to add records of one run to those of another.

    Raises:
      CommandError: what differs, or that nothing is known of the earlier run.
    """
    anyway = "finish it as it began, choose another output, or --resume-anyway"
    if before is None:
        raise CommandError(f"{output}: no {output}{SUFFIX} says which run its records came from: {anyway}")
    if found := differences(before, now):
        more = f" (and {len(found) - _SHOWN_DIFFERENCES} more)" if len(found) > _SHOWN_DIFFERENCES else ""
        listed = "; ".join(found[:_SHOWN_DIFFERENCES])
        raise CommandError(f"{output} is another run's: {listed}{more}: {anyway}")


def run_id(run: Fingerprint) -> str:
    """A short name of a run, the same whenever it is resumed."""
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:12]


def made_with(arguments: argparse.Namespace) -> dict[str, Any]:
    """Where a run found what it was made with: paths, and the overrides that are no secrets."""
    given = [word for word in arguments.overrides if not is_secret(word.partition("=")[0])]
    paths = {name: getattr(arguments, name) for name in ("config", "input")}
    paths = {name: path if path == STANDARD else os.path.abspath(path) for name, path in paths.items()}
    return {**paths, "overrides": given, "directory": os.getcwd()}


class RunFile:
    """The one beside ``output``.

    Attributes:
      runs: fingerprints of the runs that wrote records, the newest last; several where one was forced.
      finished: ``{"ok": ..., "failed": ...}`` once every row has its record.
      made_with: where the newest run found its configuration and input, for ``verify``; no part of its identity.
    """

    def __init__(self, output: str) -> None:
        self.path = Path(output + SUFFIX)
        self.runs: list[Fingerprint] = []
        self.finished: dict[str, int] | None = None
        self.made_with: Mapping[str, Any] | None = None
        self._staged = Path(f"{self.path}.new")

    def read(self) -> None:
        """Take what the file says, if there is one.

        Raises:
          CommandError: it is not one of ours.
        """
        try:
            content = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise CommandError(f"{self.path}: cannot be read: {error}") from error
        if not isinstance(content, dict) or content.get("what") != _MARK:
            raise CommandError(f"{self.path} is not a file of this command: move it or choose another output")
        self.runs, self.finished = content["runs"], content["finished"]
        self.made_with = content.get("made_with")

    @property
    def last(self) -> Fingerprint | None:
        """The newest run."""
        return self.runs[-1] if self.runs else None

    def stage(self, runs: list[Fingerprint], finished: dict[str, int] | None = None) -> None:
        """Write new content beside the old, whole and on disk; ``commit`` puts it in place."""
        content = {"what": _MARK, "runs": runs, "finished": finished, "made_with": self.made_with}
        try:
            with open(self._staged, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1, sort_keys=True)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self.unstage()
            raise
        self.runs, self.finished = runs, finished

    def commit(self) -> None:
        """Replace the file by what was staged, at once."""
        os.replace(self._staged, self.path)

    def unstage(self) -> None:
        """Leave nothing of what was staged and not committed."""
        with suppress(OSError):
            self._staged.unlink(missing_ok=True)


def _shown(value: Any) -> str:
    text = "unset" if value is None else json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
