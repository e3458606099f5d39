"""MaxText's own dense forward over the weights of a paged session: the yardstick that results are replayed against.

For:        scoring whole sequences, teacher-forced: which token is the likeliest at each place, and by how much.
Not for:    judging what was found (replay.py), or generating anything.
May import: kv_common, jax, flax, maxtext, maxtext_paged.model.

The model is MaxText's own and unbound: ``attention=dot_product``, training mode, no pages, no cache, none of our
kernels. Weights are handed over as the engine holds them, so nothing is loaded twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import Mesh
from maxtext.common.common_types import MODEL_MODE_TRAIN
from maxtext.configs import pyconfig
from numpy.typing import ArrayLike, NDArray

from kv_common.errors import ConfigError
from maxtext_paged.geometry import abstract_model
from maxtext_paged.model import materialize_rng_state

SHORTEST = 64
"""Tokens of the shortest program: sequences are padded at their end, to this or to twice, four times, ... as many."""


@dataclass(frozen=True, slots=True)
class DenseScores:
    """What the dense forward says of a sequence's tokens but the first; entry ``i`` is about token ``i + 1``.

    Attributes:
      best: int32 ``[n - 1]``, the likeliest token at each place.
      margins: float32 ``[n - 1]``, by how much its logit exceeds that of the token that stands there; 0 for the best.
      logprobs: float32 ``[n - 1]``, of the token that stands there.
      scale: the largest magnitude of any logit, against which rounding is measured.
    """

    best: NDArray[np.int32]
    margins: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    scale: float


class DenseForward:
    """Scores sequences; one program for each length of the ladder.

    Args:
      config: MaxText's configuration, a paged one.
      mesh: the devices of the weights.
    """

    def __init__(self, config: Any, mesh: Mesh) -> None:
        dense = {"attention": "dot_product", "scan_layers": False}
        self._config = pyconfig.HyperParameters(config._pydantic_config.model_copy(update=dense))
        self._longest = int(config.max_target_length)
        with logical_axis_rules(self._config.logical_axis_rules):
            model = abstract_model(self._config, mesh, MODEL_MODE_TRAIN)
            self._graph, params, rest = nnx.split(model, nnx.Param, ...)
        self._params = nnx.to_flat_state(params)
        self._rest = materialize_rng_state(rest)
        self._forward = jax.jit(self._call)

    def scores(self, params: nnx.State, tokens: ArrayLike) -> DenseScores:
        """Score one sequence.

        Args:
          params: of a paged session (``session.runtime.params``). tokens: integers ``[n]``.

        Raises:
          ConfigError: it is longer than the context, or the weights are another model's.
        """
        tokens = np.asarray(tokens, np.int32)
        if len(tokens) > self._longest:
            raise ConfigError(f"{len(tokens)} tokens: the context holds {self._longest}: raise `max_target_length`")
        given = {tuple(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(params)}
        paths = [tuple(map(str, path)) for path, _ in self._params]
        if missing := [path for path in paths if path not in given]:
            raise ConfigError(f"these weights are another model's: {'.'.join(missing[0])} is missing")
        padded = np.zeros(_rung(len(tokens), self._longest), np.int32)
        padded[: len(tokens)] = tokens
        found = jax.device_get(self._forward([given[path] for path in paths], padded, np.int32(len(tokens))))
        best, margins, logprobs, scale = found
        last = max(len(tokens) - 1, 0)
        return DenseScores(best[:last], margins[:last], logprobs[:last], float(scale))

    def _call(self, params: list[jax.Array], tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, ...]:
        pairs = zip(self._params, params, strict=True)
        state = nnx.from_flat_state([(path, variable.replace(value)) for (path, variable), value in pairs])
        model = nnx.merge(self._graph, state, self._rest, copy=True)
        with logical_axis_rules(self._config.logical_axis_rules):
            logits = model(
                tokens[None],
                jnp.arange(len(tokens), dtype=jnp.int32)[None],
                decoder_segment_ids=jnp.ones((1, len(tokens)), jnp.int32),
                enable_dropout=False,
                model_mode=MODEL_MODE_TRAIN,
            )[0].astype(jnp.float32)
        targets = jnp.roll(tokens, -1)
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        real = jnp.arange(len(tokens)) < length
        scale = jnp.max(jnp.where(real, jnp.max(jnp.abs(logits), axis=-1), 0))
        return best, jnp.max(logits, axis=-1) - chosen, chosen - jax.nn.logsumexp(logits, axis=-1), scale


def _rung(num_tokens: int, longest: int) -> int:
    rung = min(SHORTEST, longest)
    while rung < num_tokens:
        rung = min(2 * rung, longest)
    return rung
