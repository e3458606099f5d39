"""MaxText's own dense forward over a converted directory, its weights read by MaxText's own loader.

For:        comparing converted weights with an independent forward.
Not for:    the paged path.
May import: jax, flax, maxtext.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.common import checkpointing
from maxtext.configs import pyconfig
from maxtext.utils import model_creation_utils


class ConvertedDense:
    """The model that ``DIRECTORY/config.yml`` describes, with ``attention=dot_product`` on one device."""

    def __init__(self, directory: Path, *overrides: str) -> None:
        """Load it.

        Raises:
          ValueError: MaxText's loader misses a parameter, or finds one of another shape.
        """
        argv = ["test", str(directory / "config.yml"), "attention=dot_product", "base_output_directory=unused"]
        self.config = pyconfig.initialize([*argv, "log_config=false", *overrides])
        axes = self.config.mesh_axes
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape([1] * len(axes)), axes)
        create = model_creation_utils.get_nnx_create_model_fn(
            self.config, mesh=mesh, model_mode="train", quant_mode_str="train"
        )
        with jax.set_mesh(mesh), logical_axis_rules(self.config.logical_axis_rules):
            graph, params, rest = nnx.split(nnx.eval_shape(create), nnx.Param, ...)
        rest = jax.tree.map(_zeros, rest)
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), params)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # MaxText's loader still uses nnx.State's old methods
            self.params = checkpointing.load_params_from_path(self.config.load_parameters_path, params, 8)

        @jax.jit
        def forward(params: Any, tokens: jax.Array) -> jax.Array:
            model = nnx.merge(graph, params, rest, copy=True)
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            segments = jnp.ones_like(tokens)
            with logical_axis_rules(self.config.logical_axis_rules):
                return model(tokens, positions, decoder_segment_ids=segments, enable_dropout=False, model_mode="train")

        self._forward = forward

    def logits(self, rows: list[list[int]]) -> np.ndarray:
        """float32 ``[len(rows), tokens, vocab]`` of rows of equal length."""
        return np.asarray(self._forward(self.params, jnp.asarray(rows, jnp.int32)))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter, by dotted path."""
        return {".".join(map(str, path)): leaf.get_value().shape for path, leaf in nnx.to_flat_state(self.params)}


def _zeros(leaf: Any) -> jax.Array:
    """Concrete stand-ins for random keys and counters, which a forward without dropout never reads."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    return jnp.zeros(leaf.shape, leaf.dtype)


def error_of(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest magnitude of ``expected``."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())
