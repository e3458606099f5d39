"""The command run in processes of its own, over a tiny model that the command itself converted.

For:        tests of ``maxtext-paged``; what they share is made once per process.
Not for:    what they expect.
May import: the standard library, tokenizers, tests' own helpers.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from tests.llama_numpy import LlamaNumpy
from tests.tiny_gguf import write_gguf

ROOT = Path(__file__).parents[1]
CONTEXT = 128
CHECKS = ["paged_poison_on_free=true", "paged_check_invariants=true"]
POOL = ["paged_tokens_per_page=4", "paged_num_pages=64", "paged_max_num_seqs=3", "paged_max_num_batched_tokens=32"]


@dataclass(frozen=True)
class Finished:
    """A process that ended: its exit code, what it printed, and the driver's report if it ran under it."""

    code: int
    out: str
    err: str
    report: dict[str, Any]

    @property
    def messages(self) -> list[str]:
        return self.err.splitlines()


def driver(directory: Path, commands: list[list[str]], **plan: Any) -> list[str]:
    """A command line that runs ``commands`` under tests/cli_driver.py, reporting to ``directory``."""
    plan |= {"commands": commands, "report": str(directory / "report.json")}
    return [sys.executable, str(ROOT / "tests" / "cli_driver.py"), json.dumps(plan)]


def command(*words: str) -> list[str]:
    """A command line that runs one command as users do."""
    return [sys.executable, "-m", "maxtext_paged", *words]


def environment(**more: str) -> dict[str, str]:
    """This process's, with our packages importable from wherever the command runs."""
    path = os.pathsep.join(filter(None, [more.pop("PYTHONPATH", ""), str(ROOT)]))
    return {**os.environ, "PYTHONPATH": path, **more}


def finished(process: subprocess.CompletedProcess[bytes], directory: Path | None = None) -> Finished:
    """What a process left behind; ``directory`` is the driver's."""
    report = directory / "report.json" if directory is not None else None
    return Finished(
        process.returncode,
        process.stdout.decode(),
        process.stderr.decode(),
        json.loads(report.read_text()) if report is not None and report.exists() else {},
    )


def records(text: str | bytes) -> list[dict[str, Any]]:
    """The lines of an output."""
    return [json.loads(line) for line in text.splitlines()]


class TinyModel:
    """A llama of two layers and the command's conversion of it.

    Attributes:
      gguf: the file. converted: how ``maxtext-paged convert`` ended.
    """

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="maxtext-paged-test-", ignore_cleanup_errors=True)
        self.directory = Path(self._directory.name)
        self.gguf = write_gguf(self.directory / "tiny.gguf")
        words = command("convert", str(self.gguf), str(self.directory / "model"))
        self.converted = finished(subprocess.run(words, capture_output=True, env=environment(), check=False))
        self._numpy = LlamaNumpy(self.gguf)

    @property
    def config(self) -> str:
        """Path of its configuration, as the command printed it."""
        assert self.converted.code == 0, self.converted.err
        return self.converted.out.strip()

    @functools.cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_file(str(Path(self.config).parent / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def greedy(self, prompt: list[int] | str, num_tokens: int) -> list[int]:
        """What an implementation that shares no code with ours continues a prompt with."""
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        tokens, margins = self._numpy.greedy(ids, num_tokens)
        assert min(margins) > 1e-3, "a near tie: choose another prompt"
        return tokens


@functools.cache
def tiny_model() -> TinyModel:
    """The one of this process."""
    return TinyModel()
