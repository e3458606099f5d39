"""A parameter tree on disk, as MaxText's ``load_parameters_path`` reads it.

For:        writing one Orbax checkpoint of weights.
Not for:    knowing what the weights are.
May import: numpy, orbax.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

ITEM = "items"
"""Name of the one item in a MaxText checkpoint; ``load_parameters_path`` ends with it."""


def write_checkpoint(directory: Path, params: dict[str, Any], *, scan_layers: bool) -> Path:
    """Write ``params`` in MaxText's on-disk layout, ``{"params": {"params": ...}}``.

    Args:
      directory: absolute; must not exist yet.
      params: nested dicts of numpy arrays, ``decoder`` and ``token_embedder`` at the top.
      scan_layers: recorded beside the weights, where MaxText looks for it: a run configured
        otherwise is put right or refused instead of failing on shapes.

    Returns:
      The path for ``load_parameters_path``.
    """
    ocp.save(
        directory,
        {"params": {"params": params}},
        checkpointable_name=ITEM,
        custom_metadata={"scan_layers": scan_layers},
    )
    return directory / ITEM
