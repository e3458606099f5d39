"""From MaxText's scanned parameter tree to the unscanned one that paging runs.

MaxText's default stacks the layers of a decoder along one axis (``param_scan_axis``), so most checkpoints and
trainer parameters look like that. A scanned block may also hold a cycle of layers (gemma3, gpt_oss), with the
layers that do not fill a cycle in ``layers_remainder``.

For:        renaming paths and saying which index of which stacked array each layer is. Pure: paths in, paths out.
Not for:    reading checkpoints or placing arrays (loading.py).
May import: the standard library, kv_common.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kv_common.errors import ConfigError

Path = tuple[str, ...]

_CYCLE_MEMBER = re.compile(r"layers_(\d+)")


@dataclass(frozen=True, slots=True)
class StackedSource:
    """Where an unscanned parameter is found in a scanned tree.

    Attributes:
      path: path of the stacked (or remainder) array.
      index: its index along the scan axis; None for an array that is not stacked.
    """

    path: Path
    index: int | None


def is_scanned(paths: Iterable[Path]) -> bool:
    """Whether a parameter tree stacks its layers."""
    return any(
        len(path) > 1 and path[:1] == ("decoder",) and path[1] in ("layers", "layers_remainder") for path in paths
    )


def locate(paths: Iterable[Path], num_layers: int) -> dict[Path, StackedSource]:
    """Unscanned path to its place in a scanned tree with ``paths``, for a decoder of ``num_layers`` layers.

    >>> found = locate([("decoder", "layers", "mlp", "wo"), ("token_embedder", "embedding")], num_layers=2)
    >>> found[("decoder", "layers_1", "mlp", "wo")]
    StackedSource(path=('decoder', 'layers', 'mlp', 'wo'), index=1)
    """
    paths = list(paths)
    cycle = {
        int(match[1])
        for path in paths
        if path[:2] == ("decoder", "layers") and (match := _CYCLE_MEMBER.fullmatch(path[2])) is not None
    }
    length = max(1, len(cycle))
    if cycle and cycle != set(range(length)):
        raise ConfigError(f"the scanned block holds layers {sorted(cycle)}: expected 0..{length - 1}")
    scans, remainder = divmod(num_layers, length)
    found: dict[Path, StackedSource] = {}
    for path in paths:
        if path[:2] == ("decoder", "layers"):
            member = _CYCLE_MEMBER.fullmatch(path[2])
            offset, rest = (int(member[1]), path[3:]) if member else (0, path[2:])
            for scan in range(scans):
                layer = scan * length + offset
                found[("decoder", f"layers_{layer}", *rest)] = StackedSource(path, scan)
        elif path[:2] == ("decoder", "layers_remainder"):
            member = _CYCLE_MEMBER.fullmatch(path[2])
            if member is None or int(member[1]) >= remainder:
                raise ConfigError(f"{'.'.join(path)} does not fit {num_layers} layers in cycles of {length}")
            found[("decoder", f"layers_{scans * length + int(member[1])}", *path[3:])] = StackedSource(path, None)
        else:
            found[path] = StackedSource(path, None)
    return found
