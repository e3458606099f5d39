"""What converting any architecture has in common: header numbers, and a table of where each tensor goes.

For:        one architecture's file (llama.py, gemma3.py) to say only what is its own.
Not for:    reading files (gguf.py), or any architecture's names.
May import: numpy, kv_common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import UnsupportedError
from maxtext_paged.convert.gguf import GgufFile

Weights = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one GGUF tensor goes: its stored shape, its path in MaxText's tree, and the way there."""

    source: str
    source_shape: tuple[int, ...]
    target: tuple[str, ...]
    convert: Callable[[Weights], Weights]


def same(weights: Weights) -> Weights:
    """As it is stored."""
    return weights


def transposed(weights: Weights) -> Weights:
    """GGUF's ``[out, in]`` as MaxText's ``[in, out]``."""
    return weights.T


def check_header(file: GgufFile, architecture: str, known: frozenset[str], inert: dict[str, Any]) -> None:
    """Refuse header keys of ``architecture`` that are neither known nor hold the one value that changes nothing.

    Raises:
      UnsupportedError: names the key and its value.
    """
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{architecture}.")
        if name == key or name in known or (name in inert and value == inert[name]):
            continue
        raise UnsupportedError(
            f"{file.path.name}: header key {key!r} = {value!r} is not supported for architecture {architecture!r}"
        )


def whole(file: GgufFile, key: str, default: int | None = None) -> int:
    """A positive whole number from the header; an absent key gives ``default``, if there is one."""
    value = file.metadata.get(key, default) if default else file.require(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
        raise UnsupportedError(f"{file.path.name}: {key} = {value!r} must be one positive whole number")
    return int(value)


def float32_number(value: float) -> float:
    """A number that is stored as float32: 1e-05 reads back as 9.999999747378752e-06, which is the same number there."""
    return float(str(np.float32(value)))


def check_names(file: GgufFile, entries: Iterable[Entry], block: str) -> None:
    """Refuse tensors without a place: ignoring one (a bias, RoPE factors) would change the model silently."""
    unknown = sorted(file.tensor_names - {entry.source for entry in entries})
    if unknown:
        raise UnsupportedError(
            f"{file.path.name}: {len(unknown)} tensors have no place in MaxText's {block} block, first "
            f"{', '.join(map(repr, unknown[:3]))}"
        )


def parameter_tree(file: GgufFile, entries: Iterable[Entry]) -> dict[str, Any]:
    """All tensors in their places: nested dicts of contiguous float32 arrays.

    Raises:
      UnsupportedError: a tensor is missing or unusable.
    """
    tree: dict[str, Any] = {}
    for entry in entries:
        place(tree, entry.target, entry.convert(file.tensor(entry.source, entry.source_shape)))
    return tree


def place(tree: dict[str, Any], path: tuple[str, ...], leaf: Weights) -> None:
    """Put ``leaf`` at ``path``, contiguous."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = np.ascontiguousarray(leaf)
