"""A bound MaxText model behind vLLM's door: the class that a vLLM-shaped engine constructs, loads and calls.

Neither vllm nor tpu_inference is imported: the engine hands over objects, which are read by their fields, and its
registry. docs/vllm.md says what is accepted and what is refused.

For:        engines that bring their own scheduler, block tables and KV caches.
Not for:    our own loop (session.py), which needs none of this.
May import: kv_common, kv_control, kv_execution, jax, flax, maxtext, maxtext_paged.
"""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from kv_common.errors import ConfigError, UnsupportedError
from kv_execution.block_tables import pack_block_tables
from kv_execution.kv_caches import in_layer_order, layout_of_kv_caches
from kv_execution.pool import create_pools
from maxtext_paged.loading import init_params, restore_params
from maxtext_paged.vllm_config import PagedModels, loads_random_weights

logger = logging.getLogger(__name__)

ARCHITECTURE = "MaxTextPagedForCausalLM"


class MaxTextPagedForCausalLM(nnx.Module):
    """MaxText over KV caches that the engine owns.

    A graph node whose only state is the weights, so that ``nnx.split``, ``nnx.merge`` and ``nnx.eval_shape`` treat it
    as any other model. Nothing is allocated before ``load_weights``.

    Args:
      vllm_config: an object with ``cache_config`` (``block_size``, ``cache_dtype``), ``parallel_config`` or
        ``sharding_config``, ``load_config`` (``load_format``), ``model_config`` (``max_model_len``) and
        ``additional_config`` (``{"maxtext_config": {...}}``: MaxText's options and the ``paged_*`` ones).
      rng_key: of random weights, where ``load_format`` is "dummy".
      mesh: the engine's; None makes one of as many devices as the configuration's tensor parallelism.
    """

    _self_manages_sharding = True
    """To tpu-inference's loader: weights are created under their sharding here, no outer jit is needed."""
    supports_multimodal = False

    def __init__(self, vllm_config: Any, rng_key: jax.Array | None = None, mesh: Mesh | None = None) -> None:
        self.paged = PagedModels(vllm_config, mesh)
        self.random_weights = loads_random_weights(vllm_config)
        self.weights = nnx.data(None)
        if self.random_weights:
            self.load_weights(rng_key)

    @property
    def maxtext_config(self) -> Any:
        """MaxText's configuration, as the model was built from it."""
        return self.paged.config

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The attention modules in the order of ``kv_caches``."""
        return self.paged.model().layer_names

    def load_weights(self, rng_key: jax.Array | None = None) -> None:
        """Restore ``load_parameters_path``, a MaxText checkpoint, straight into its sharding; or random weights where
        ``load_format`` is "dummy".

        Raises:
          ConfigError: no checkpoint is named, or it does not fit.
        """
        model, path = self.paged.model(), self.paged.config.load_parameters_path
        if self.random_weights:
            if path:
                logger.warning("load_format=dummy: weights are random, load_parameters_path=%s is not read", path)
            self.weights = nnx.data(init_params(model, rng_key))
        elif path:
            self.weights = nnx.data(restore_params(model, path))
        else:
            raise ConfigError(
                "no weights: name a MaxText checkpoint in additional_config['maxtext_config']['load_parameters_path'], "
                "or ask for random ones with load_format=dummy"
            )

    def create_kv_caches(self, num_blocks: int) -> list[tuple[jax.Array, jax.Array]]:
        """Zeroed caches of ``num_blocks`` blocks for every layer, in the one layout that is accepted, each under its
        sharding: for engines that leave this to the model."""
        model = self.paged.model(self.paged.layout(num_blocks))
        return list(create_pools(model.layout, model.pool_sharding))

    def __call__(
        self,
        kv_caches: list[tuple[jax.Array, jax.Array]],
        input_ids: jax.Array,
        attention_metadata: Any,
        inputs_embeds: Any = None,
        input_positions: Any = None,
        layer_name_to_kvcache_index: Any = None,
        lora_metadata: Any = None,
        intermediate_tensors: Any = None,
        is_first_rank: bool = True,
        is_last_rank: bool = True,
        **others: Any,
    ) -> tuple[list[tuple[jax.Array, jax.Array]], jax.Array, list[Any], None]:
        """One step, in whatever mix of prompts, chunks and decodes. Pure: jit it, with ``kv_caches`` donated.

        Args:
          kv_caches: per layer ``(k_cache, v_cache)``, see ``kv_execution.kv_caches``.
          input_ids: int ``[T]``, rows end to end, padded.
          attention_metadata: see ``kv_execution.block_tables.pack_block_tables``.
          input_positions: accepted and not read: positions follow from the lengths.
          layer_name_to_kvcache_index: static; which cache is which layer's, where that is not their order.

        Returns:
          ``(kv_caches, hidden_states [T, emb], [], None)``: the caches in the caller's order; hidden states for
          ``compute_logits``, NaN where a row of the metadata made no sense.

        Raises:
          UnsupportedError: while tracing, naming what is not served.
        """
        unserved = {
            "inputs_embeds": inputs_embeds,
            "lora_metadata": lora_metadata,
            "intermediate_tensors": intermediate_tensors,
            "is_first_rank=False": is_first_rank is False or None,
            "is_last_rank=False": is_last_rank is False or None,
            **others,
        }
        asked = [name for name, value in unserved.items() if value is not None]
        if asked:
            raise UnsupportedError(f"{ARCHITECTURE} does not serve {', '.join(asked)}")
        if self.weights is None:
            raise ConfigError("no weights: call load_weights first")
        if input_ids.ndim != 1:
            raise UnsupportedError(f"input_ids {input_ids.shape}: one flat row of tokens is needed")
        order = in_layer_order(layer_name_to_kvcache_index, self.paged.one_page.num_layers)
        layout = layout_of_kv_caches(_reordered(kv_caches, order), self.paged.one_page)
        model = self.paged.model(layout)
        step = pack_block_tables(
            attention_metadata,
            num_tokens=input_ids.shape[0],
            num_pages=layout.num_pages,
            tokens_per_page=layout.tokens_per_page,
        )
        pools = model.pools_of_layers(_reordered(kv_caches, order))
        hidden, pools = model.hidden_states(self.weights, pools, input_ids.astype(jnp.int32), step.pages)
        hidden = jnp.where(step.refused[:, None], jnp.nan, hidden)
        layers = dict(zip(order, model.layers_of_pools(pools), strict=True))
        return [layers[i] for i in range(len(order))], hidden, [], None

    def compute_logits(self, hidden_states: jax.Array) -> jax.Array:
        """Logits, float32 ``[N, vocab]``, of rows of hidden states ``[N, emb]``."""
        rows = jnp.arange(hidden_states.shape[0], dtype=jnp.int32)
        return self.paged.model().head(self.weights, hidden_states, rows)


def _reordered(kv_caches: Any, order: tuple[int, ...]) -> list[Any]:
    """The caller's caches in layer order; as they are where their number is wrong, which is refused next."""
    return [kv_caches[i] for i in order] if len(kv_caches) == len(order) else list(kv_caches)


def register(registry: Any, architecture: str = ARCHITECTURE) -> None:
    """Make the model known to an engine.

    Args:
      registry: whatever has ``register_model(architecture, model_class)``: vLLM's ``ModelRegistry``, or
        tpu-inference's module ``models.common.model_loader``.
      architecture: the name under which a Hugging Face configuration's ``architectures`` asks for it.
    """
    add = getattr(registry, "register_model", None)
    if not callable(add):
        raise ConfigError(f"{type(registry).__name__} has no register_model(architecture, model_class)")
    add(architecture, MaxTextPagedForCausalLM)
    logger.info("registered %s as %s", MaxTextPagedForCausalLM.__name__, architecture)
