"""Small stand-ins for a vLLM-shaped engine: its configuration, its attention metadata, its loader and its runner.

For:        driving ``maxtext_paged.vllm`` as tpu-inference drives a model, without either package.
Not for:    scheduling: tests say what runs in each step.
May import: numpy, jax, flax, kv_execution, maxtext_paged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.tiny_models import _COMMON, BLOCKS

BLOCK_SIZE = 8
MAX_NUM_SEQS, MAX_BLOCKS, NUM_TOKENS = 4, 8, 32
GARBAGE = 2**31 - 1
"""What stands in every part of the metadata that nobody may look at."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class AttentionMetadata:
    """Field for field what tpu-inference passes: ``block_tables`` is flat."""

    input_positions: Any
    block_tables: Any
    seq_lens: Any
    query_start_loc: Any
    request_distribution: Any
    mamba_state_indices: Any = None
    pcp: Any = None


def vllm_config(
    block: str = "llama2", *, load_format: str = "auto", cache_dtype: str = "auto", **maxtext_config: Any
) -> SimpleNamespace:
    """A configuration as an engine that knows no ``sharding_config`` holds it."""
    options = {**_COMMON, **BLOCKS[block], "attention": "gpu_paged", "sparse_matmul": False, **maxtext_config}
    del options["max_target_length"], options["hardware"]
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=BLOCK_SIZE * MAX_BLOCKS),
        cache_config=SimpleNamespace(block_size=BLOCK_SIZE, cache_dtype=cache_dtype),
        load_config=SimpleNamespace(load_format=load_format),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, data_parallel_size=1, pipeline_parallel_size=1, enable_expert_parallel=False
        ),
        additional_config={"maxtext_config": options},
    )


class Registry:
    """Takes a class and looks at its signatures, as tpu-inference does."""

    def __init__(self) -> None:
        self.models: dict[str, Any] = {}

    def register_model(self, architecture: str, model: Any) -> None:
        import inspect

        assert "vllm_config" in inspect.signature(model.__init__).parameters
        assert {"kv_caches", "input_ids", "attention_metadata"} <= set(inspect.signature(model.__call__).parameters)
        self.models[architecture] = model


def load(model_class: Any, config: Any, mesh: Any = None) -> Any:
    """An abstract construction, weights, a jit that returns the model; a dummy is constructed as it is."""
    rng = jax.random.key(0)
    if config.load_config.load_format == "dummy":
        return model_class(config, rng, mesh)
    model = nnx.eval_shape(lambda: model_class(config, rng, mesh))
    model.load_weights(rng)
    return nnx.jit(lambda model: model, donate_argnums=0)(model)


class Runner:
    """Keeps requests' tokens and blocks, and runs the steps it is told to.

    Attributes:
      kv_caches: donated to each step and taken back. addresses: where they lay after each step.
      names: static map of layer names to caches; None is layer order.
    """

    def __init__(
        self, model: Any, num_blocks: int = 24, *, donate: bool = True, names: Any = None, kv_caches: Any = None
    ) -> None:
        graph, state = nnx.split(model)
        self.state_leaves, structure = jax.tree.flatten(state)

        def run_model(state_leaves: Any, *args: Any) -> Any:
            return nnx.merge(graph, jax.tree.unflatten(structure, state_leaves))(*args)

        def compute_logits(state_leaves: Any, hidden_states: jax.Array) -> jax.Array:
            return nnx.merge(graph, jax.tree.unflatten(structure, state_leaves)).compute_logits(hidden_states)

        self.run_model = jax.jit(run_model, donate_argnums=1 if donate else (), static_argnums=6)
        self.compute_logits = jax.jit(compute_logits)
        self.kv_caches = model.create_kv_caches(num_blocks) if kv_caches is None else kv_caches
        self.names = names
        self._free = list(np.random.default_rng(3).permutation(num_blocks))
        self._blocks: dict[int, list[int]] = {}
        self._written: dict[int, int] = {}
        self.addresses = [self._addresses()]

    def _addresses(self) -> list[int]:
        shards = [shard for leaf in jax.tree.leaves(self.kv_caches) for shard in leaf.addressable_shards]
        return [shard.data.unsafe_buffer_pointer() for shard in shards]

    def inputs(self, rows: Sequence[tuple[int, Sequence[int]]]) -> tuple[jax.Array, AttentionMetadata]:
        """``(request, its new tokens)`` as padded arrays; blocks are taken as they are needed."""
        tables = np.full((MAX_NUM_SEQS, MAX_BLOCKS), GARBAGE, np.int32)
        seq_lens, starts = np.full(MAX_NUM_SEQS, GARBAGE, np.int32), np.full(MAX_NUM_SEQS + 1, GARBAGE, np.int32)
        token_ids = np.zeros(NUM_TOKENS, np.int32)
        starts[0] = 0
        for i, (request, tokens) in enumerate(rows):
            length = self._written.get(request, 0) + len(tokens)
            blocks = self._blocks.setdefault(request, [])
            while len(blocks) * BLOCK_SIZE < length:
                blocks.append(self._free.pop())
            tables[i, : len(blocks)] = blocks
            seq_lens[i], starts[i + 1] = length, starts[i] + len(tokens)
            token_ids[starts[i] : starts[i + 1]] = tokens
            self._written[request] = length
        decodes = sum(len(tokens) == 1 for _, tokens in rows)
        metadata = AttentionMetadata(
            input_positions=np.full(NUM_TOKENS, GARBAGE, np.int32),
            block_tables=tables.reshape(-1),
            seq_lens=seq_lens,
            query_start_loc=starts,
            request_distribution=np.array([decodes, decodes, len(rows)], np.int32),
        )
        return jnp.asarray(token_ids), jax.tree.map(jnp.asarray, metadata)

    def arguments(self, rows: Sequence[tuple[int, Sequence[int]]]) -> tuple[Any, ...]:
        """The positional arguments of the runner's model call."""
        token_ids, metadata = self.inputs(rows)
        return self.state_leaves, self.kv_caches, token_ids, metadata, None, metadata.input_positions, self.names

    def step(self, rows: Sequence[tuple[int, Sequence[int]]]) -> list[np.ndarray]:
        """Run the rows; float32 logits ``[n, vocab]`` of each row's new tokens."""
        arguments = self.arguments(rows)
        self.kv_caches, hidden, auxiliary, experts = self.run_model(*arguments)
        assert (auxiliary, experts) == ([], None)
        self.addresses.append(self._addresses())
        logits = np.asarray(self.compute_logits(self.state_leaves, hidden))
        starts = np.asarray(arguments[3].query_start_loc)
        return [logits[starts[i] : starts[i + 1]] for i in range(len(rows))]
