"""Tiny MaxText models for tests: configurations per decoder block, meshes, and MaxText's dense forward.

The dense forward (attention=dot_product, training mode, one device) is the yardstick of everything paged.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
import yaml
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import Mesh
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils, model_creation_utils

from maxtext_paged.config import PagedMaxTextConfig

CONFIGS = os.path.join(os.path.dirname(maxtext.__file__), "configs")
BASE = os.path.join(CONFIGS, "base.yml")

_COMMON = {
    "run_name": "t",
    "base_emb_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 128,
    "base_num_decoder_layers": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_prefill_predict_length": 32,
    "max_target_length": 64,
    "per_device_batch_size": 4,
    "scan_layers": False,
    "weight_dtype": "float32",
    "dtype": "float32",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "enable_checkpointing": False,
    "log_config": False,
    "base_output_directory": "unused",
}

CONFIGS_OF_FAMILIES = Path(__file__).parents[1] / "configs" / "test"


def _family_options() -> dict[str, dict[str, Any]]:
    """What each configuration in configs/test says over tiny.yml."""
    found = {}
    for path in sorted(CONFIGS_OF_FAMILIES.glob("*.yml")):
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
        if options.pop("base_config") == "tiny.yml":
            options.pop("run_name")
            found[path.stem] = options
    return found


BLOCKS: dict[str, dict[str, Any]] = _family_options()
"""Options per model family, over ``_COMMON``."""


def make_config(block: str = "llama2", *, rules: str = "base.yml", **overrides: Any) -> Any:
    """A tiny MaxText configuration with ``attention=gpu_paged`` unless overridden.

    Args:
      rules: which of MaxText's own configurations gives mesh axes and logical axis rules.
    """
    options = {**_COMMON, "attention": "gpu_paged", **BLOCKS[block], **overrides}
    return pyconfig.initialize(
        ["test", os.path.join(CONFIGS, rules)] + [f"{key}={value}" for key, value in options.items()],
        config_class=PagedMaxTextConfig,
    )


def mesh_of(config: Any, sizes: Mapping[str, int]) -> Mesh:
    """A mesh with all of the configuration's axes, those of ``sizes`` with several devices, then axes it lacks."""
    names = (*config.mesh_axes, *(axis for axis in sizes if axis not in config.mesh_axes))
    shape = [sizes.get(axis, 1) for axis in names]
    return Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), names)


def make_mesh(config: Any, devices: Sequence[Any] | None = None) -> Mesh:
    """The configuration's own twelve-axis mesh, over one device unless told otherwise."""
    devices = list(devices) if devices is not None else jax.devices()[:1]
    return Mesh(maxtext_utils.create_device_mesh(config=config, devices=devices), config.mesh_axes)


class DenseModel:
    """MaxText's own dense forward on one device, and its random weights."""

    def __init__(self, block: str = "llama2", seed: int = 0, config: Any = None, **overrides: Any) -> None:
        self.config = make_config(block, attention="dot_product", **overrides) if config is None else config
        self._mesh = make_mesh(self.config)
        create = model_creation_utils.get_nnx_create_model_fn(
            self.config,
            mesh=self._mesh,
            model_mode="train",
            rng_key=jax.random.PRNGKey(seed),
            quant_mode_str="train",
        )
        with logical_axis_rules(self.config.logical_axis_rules):
            self._graph, self._params, self._rest = nnx.split(create(), nnx.Param, ...)
        self.set_params(nnx.to_pure_dict(self._params))
        self._forward = jax.jit(self._call)

    def set_params(self, params: Any) -> None:
        """Use other weights: a pure dict of arrays by parameter path."""
        self.params = jax.tree.map(np.asarray, params)
        nnx.replace_by_pure_dict(self._params, jax.tree.map(jnp.asarray, self.params))

    def _call(self, params: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(self._graph, params, self._rest, copy=True)
        positions = jnp.arange(tokens.shape[1])[None]
        with logical_axis_rules(self.config.logical_axis_rules):
            return model(
                tokens,
                positions,
                decoder_segment_ids=jnp.ones_like(tokens),
                enable_dropout=False,
                model_mode="train",
            )

    def logits(self, tokens: Sequence[int] | np.ndarray, pad_to: int | None = None) -> np.ndarray:
        """float32 ``[len(tokens), vocab]``; padded at the end to ``pad_to`` so that one program serves many lengths."""
        tokens = np.asarray(tokens, np.int32)
        padded = np.zeros(max(pad_to or 0, len(tokens)), np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(self._forward(self._params, jnp.asarray(padded[None])))[0, : len(tokens)].astype(np.float32)


@functools.cache
def dense_model(block: str = "llama2") -> DenseModel:
    """One shared dense model per block and process."""
    return DenseModel(block)
