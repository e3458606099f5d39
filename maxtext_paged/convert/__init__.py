"""Published weights into a directory that MaxText and ``maxtext-paged generate`` can use as it is.

For:        ``convert_gguf`` (any known GGUF file), ``converted_smollm2`` (the model of ``make demo``) and
            ``converted_gemma3`` (a model with windowed layers).
Not for:    running the model.
May import: this package, kv_common; orbax only once weights are written.

A converted directory holds ``config.yml``, ``checkpoint/``, ``tokenizer.json``, ``tokenizer_config.json``,
``generation_config.json``, for some architectures ``models/``, and ``conversion.json``, which says that the others are
complete.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from kv_common.errors import ConfigError, UnsupportedError
from maxtext_paged.convert import gemma3, llama
from maxtext_paged.convert.gguf import GgufFile
from maxtext_paged.convert.packages import (
    GEMMA3_FILE,
    GEMMA3_SHA256,
    assemble,
    find_packaged_gguf,
    find_packaged_parts,
)
from maxtext_paged.convert.vocabulary import write_json, write_tokenizer_files

__all__ = [
    "CONVERTER_VERSION",
    "convert_gguf",
    "converted_gemma3",
    "converted_smollm2",
    "find_packaged_gguf",
    "find_packaged_parts",
]

CONVERTER_VERSION = 1
"""Raise it whenever a conversion's content changes: older directories are then converted again."""

DEFAULT_MAX_TARGET_TOKENS = 2048
"""``max_target_length`` of a converted config, unless the model reads less or the caller says otherwise."""

_STAMP = "conversion.json"

_ARCHITECTURES: dict[str, Any] = {"llama": llama, "gemma3": gemma3}
"""``general.architecture`` to the module that knows it: ``read_shape``, ``maxtext_params``, ``maxtext_config``."""


def convert_gguf(
    gguf_path: Path | str,
    out_dir: Path | str,
    *,
    overwrite: bool = False,
    tie_head: bool = False,
    max_target_length: int | None = None,
) -> Path:
    """Convert a GGUF file to a MaxText directory, float32 throughout.

    The directory appears whole or not at all: it is written beside its place and renamed.
    Its ``config.yml`` names its own absolute place, so convert again instead of moving it.

    Args:
      out_dir: must not exist or be empty, unless ``overwrite`` and an earlier conversion.
      tie_head: use the embedding table as output head where the file does. MaxText rounds a tied
        table to bfloat16 at every step; the default writes a float32 head of its own.
      max_target_length: tokens a request may reach, prompt included; at most what the model was trained to read.

    Returns:
      The absolute directory.

    Raises:
      ConfigError: a path or an argument is unusable.
      UnsupportedError: the file's architecture, a header key, a tensor or the vocabulary is not known.
    """
    target = Path(out_dir).resolve()
    _check_target(target, overwrite=overwrite)
    file = GgufFile(gguf_path)
    architecture = _architecture(file)
    shape = architecture.read_shape(file)
    limit = _max_target_length(max_target_length, shape.context_tokens)

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        partial.chmod(0o755)  # mkdtemp's 0700 would survive the rename.
        write_tokenizer_files(file, partial)
        from maxtext_paged.convert.orbax import ITEM, write_checkpoint  # seconds of imports

        params = architecture.maxtext_params(file, shape, tie_head=tie_head)
        write_checkpoint(partial / "checkpoint", params, scan_layers=False)
        config = _run_config(file, target, ITEM, limit) | architecture.maxtext_config(shape, tie_head=tie_head)
        _shadow_published_sizes(partial, config["model_name"])
        _write_config(partial / "config.yml", file, config, shape.context_tokens)
        write_json(partial / _STAMP, _stamp(file.path.name, file.path.stat().st_size, target))
        _move_into_place(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def converted_smollm2(cache_dir: Path | str) -> Path:
    """SmolLM2-135M-Instruct, converted into ``cache_dir`` once and reused while it is up to date.

    Safe to call from several processes at once.

    Returns:
      The absolute converted directory.

    Raises:
      ConfigError: the weights package is not installed (the message says how to get it).
    """
    source = find_packaged_gguf()
    target = Path(cache_dir).resolve() / "smollm2-135m"
    with _converting(target) as is_stale:
        if is_stale(source.name, source.stat().st_size):
            convert_gguf(source, target, overwrite=True)
    return target


def converted_gemma3(cache_dir: Path | str) -> Path:
    """Gemma 3 270M, put together from its packages and converted into ``cache_dir`` once, as ``converted_smollm2``.

    Returns:
      The absolute converted directory.

    Raises:
      ConfigError: a weights package is not installed (the message says how to get them), or is damaged.
    """
    parts = find_packaged_parts()
    target = Path(cache_dir).resolve() / "gemma3-270m"
    with _converting(target) as is_stale:
        if is_stale(GEMMA3_FILE, sum(part.stat().st_size for part in parts)):
            with tempfile.TemporaryDirectory(prefix=".gemma3-270m.", dir=target.parent) as beside:
                whole = assemble(parts, Path(beside) / GEMMA3_FILE, GEMMA3_SHA256)
                convert_gguf(whole, target, overwrite=True)
    return target


@contextmanager
def _converting(target: Path) -> Iterator[Callable[[str, int], bool]]:
    """Hold the lock of a cached conversion; gives whether ``target`` is of another file or another version's."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{target.name}.lock"):
        yield lambda name, size: _read_stamp(target) != _stamp(name, size, target)


def _architecture(file: GgufFile) -> Any:
    name = file.require("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{file.path.name}: architecture {name!r} is not supported; this converter knows "
            f"{', '.join(map(repr, sorted(_ARCHITECTURES)))}"
        )
    return _ARCHITECTURES[name]


def _shadow_published_sizes(directory: Path, model_name: str) -> None:
    """Let config.yml's sizes stand where a block needs a published model's name (see gemma3.MODEL_NAME)."""
    if model_name == "default":
        return
    (directory / "models").mkdir()
    (directory / "models" / f"{model_name}.yml").write_text(
        f"# MaxText reads this instead of its own {model_name}.yml, whose sizes would win over config.yml's.\n{{}}\n",
        encoding="utf-8",
    )


def _check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse to write over anything but nothing, an empty directory or, if asked, an earlier conversion."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"{target}: exists and is not a directory")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"{target}: not empty; choose another directory, or pass overwrite")
    if _read_stamp(target) is None:
        raise ConfigError(f"{target}: not empty and not an earlier conversion; it is not overwritten")


def _max_target_length(asked: int | None, context_tokens: int) -> int:
    if asked is None:
        return min(DEFAULT_MAX_TARGET_TOKENS, context_tokens)
    if not 2 <= asked <= context_tokens:
        raise ConfigError(f"max_target_length={asked} must lie in 2..{context_tokens}, the model's trained context")
    return asked


def _run_config(file: GgufFile, target: Path, item: str, max_target_length: int) -> dict[str, Any]:
    """The keys that say where the files are and how they run, as far as the model decides it."""
    return {
        "base_config": "base.yml",
        "run_name": target.name,
        "model_name": "default",
        "attention": "gpu_paged",
        "dtype": "float32",
        "weight_dtype": "float32",
        "max_target_length": max_target_length,
        "max_prefill_predict_length": max_target_length // 2,
        "per_device_batch_size": 4,
        "load_parameters_path": str(target / "checkpoint" / item),
        "enable_checkpointing": False,
        "skip_jax_distributed_system": True,
        "tokenizer_type": "huggingface",
        "tokenizer_path": str(target),
        "add_bos": bool(file.metadata.get("tokenizer.ggml.add_bos_token", False)),
        "add_eos": False,
    }


def _write_config(path: Path, file: GgufFile, config: dict[str, Any], context_tokens: int) -> None:
    head = (
        f"# Written by maxtext-paged convert from {file.path.name}. Every key is MaxText's own.\n"
        f"# The model was trained to read {context_tokens} tokens: max_target_length may be raised up to that.\n"
    )
    path.write_text(head + yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def _stamp(source: str, source_bytes: int, target: Path) -> dict[str, Any]:
    return {
        "converter_version": CONVERTER_VERSION,
        "source": source,
        "source_bytes": source_bytes,
        "directory": str(target),
    }


def _read_stamp(directory: Path) -> dict[str, Any] | None:
    try:
        stamp = json.loads((directory / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) and "converter_version" in stamp else None


def _move_into_place(partial: Path, target: Path) -> None:
    """Rename ``partial`` to ``target``; an earlier conversion there is set aside first, then deleted."""
    aside = None
    if target.exists():
        aside = partial.with_name(partial.name + ".old")
        os.rename(target, aside)
    try:
        os.rename(partial, target)
    except BaseException:
        if aside is not None:
            os.rename(aside, target)
        raise
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the lock file stays behind."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
