"""The ``gemma3`` architecture (text only): GGUF names and layouts to MaxText's ``gemma3`` decoder block.

For:        hyperparameters, and each tensor's place, axis order and scale in MaxText's parameter tree.
Not for:    reading files or writing checkpoints; vision towers.
May import: numpy, kv_common.

What differs from ``llama``, besides names:

- Query and key rows are stored as RoPE pairs ``(i, i + head_dim / 2)``, as MaxText rotates them: nothing to undo.
- The query scale is not in the weights: MaxText's block multiplies by it, and takes it from a model's name.
- llama.cpp stores norm weights with their offset of 1 added, as MaxText's checkpoints do.
- The embedding is multiplied by ``sqrt(emb)``; MaxText keeps the product in the table, so a head of its own is the
  table without it, and a tied head divides its logits by it again (``normalize_embedding_logits``).
- Every sixth layer attends to all tokens, the others to a window and with another RoPE base.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kv_common.errors import UnsupportedError
from maxtext_paged.convert.entries import (
    Entry,
    Weights,
    check_header,
    check_names,
    float32_number,
    parameter_tree,
    place,
    same,
    transposed,
    whole,
)
from maxtext_paged.convert.gguf import GgufFile

_KNOWN_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scaling.type",
        "rope.scaling.factor",
    }
)
"""``gemma3.*`` keys whose meaning is carried over. Any other changes the mathematics: refused by name."""

_INERT_VALUES = {"attention.sliding_window_pattern": 6}
"""Keys that are accepted only with the value that MaxText's block has built in."""

_BLOCK_EPSILON = 1e-6
"""Built into the norms of MaxText's gemma3 layers; the option reaches the final norm and the QK norms only."""

_OTHER_QUERY_SCALE = 62
"""Layers of Gemma 3 27B, by which llama.cpp knows that queries are scaled by the embedding's share of a head."""

MODEL_NAME = "gemma3-4b"
"""A name under which MaxText's block scales queries by ``head_dim ** -0.5``; it knows no others than 4b, 12b and 27b.

MaxText lays the published sizes of that model over a configuration file's, unless it finds a file of that name in
``models/`` beside the configuration: ``convert_gguf`` puts one there that says nothing.
"""


@dataclass(frozen=True, slots=True)
class Gemma3Shape:
    """Sizes of a gemma3 model. Counts are whole-model, not per shard.

    Attributes:
      window_tokens: what a local layer sees, itself included. context_tokens: what the model was trained to read.
      rope_base, local_rope_base: of global and of local layers. rope_factor: divides positions in global layers.
      tied: the output head is the embedding table.
    """

    num_layers: int
    emb_dim: int
    mlp_dim: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    window_tokens: int
    rope_base: int
    local_rope_base: int
    rope_factor: float
    tied: bool


def read_shape(file: GgufFile) -> Gemma3Shape:
    """Read and check a gemma3 file's header.

    Raises:
      UnsupportedError: a header key that this converter does not know, another epsilon or query scale than MaxText's
        block has built in, sizes that do not fit together, or a tensor without a place.
    """
    check_header(file, "gemma3", _KNOWN_KEYS, _INERT_VALUES)
    name = file.path.name
    epsilon = float32_number(file.require("gemma3.attention.layer_norm_rms_epsilon"))
    if epsilon != _BLOCK_EPSILON:
        raise UnsupportedError(
            f"{name}: gemma3.attention.layer_norm_rms_epsilon = {epsilon}: MaxText's block knows {_BLOCK_EPSILON}"
        )
    num_layers = whole(file, "gemma3.block_count")
    if num_layers == _OTHER_QUERY_SCALE:
        raise UnsupportedError(
            f"{name}: {num_layers} layers are Gemma 3 27B, whose query scale is not carried over here"
        )
    head_dim = whole(file, "gemma3.attention.key_length")
    if (value_length := whole(file, "gemma3.attention.value_length", head_dim)) != head_dim:
        raise UnsupportedError(f"{name}: gemma3.attention.value_length = {value_length} differs from {head_dim}")
    shape = Gemma3Shape(
        num_layers=num_layers,
        emb_dim=whole(file, "gemma3.embedding_length"),
        mlp_dim=whole(file, "gemma3.feed_forward_length"),
        num_query_heads=whole(file, "gemma3.attention.head_count"),
        num_kv_heads=whole(file, "gemma3.attention.head_count_kv"),
        head_dim=head_dim,
        vocab_size=whole(file, "gemma3.vocab_size", len(file.metadata.get("tokenizer.ggml.tokens", ()))),
        context_tokens=whole(file, "gemma3.context_length"),
        window_tokens=whole(file, "gemma3.attention.sliding_window"),
        rope_base=whole(file, "gemma3.rope.freq_base"),
        local_rope_base=whole(file, "gemma3.rope.freq_base_swa", 10_000),
        rope_factor=_rope_factor(file),
        tied="output.weight" not in file.tensor_names,
    )
    if head_dim % 2 or shape.num_query_heads % shape.num_kv_heads:
        raise UnsupportedError(
            f"{name}: {shape.num_query_heads} query heads, {shape.num_kv_heads} KV heads of {head_dim}: "
            "query heads must divide by KV heads, and the head size by two"
        )
    check_names(file, _entries(shape), "gemma3")
    return shape


def _rope_factor(file: GgufFile) -> float:
    kind = file.metadata.get("gemma3.rope.scaling.type", "none")
    factor = float(file.metadata.get("gemma3.rope.scaling.factor", 1.0))
    if kind not in ("none", "linear") or (kind == "none" and factor != 1.0) or factor < 1.0:
        raise UnsupportedError(f"{file.path.name}: gemma3.rope.scaling.type = {kind!r} by {factor} is not supported")
    return factor


def _entries(shape: Gemma3Shape) -> Iterator[Entry]:
    emb, heads, kv_heads, dim = shape.emb_dim, shape.num_query_heads, shape.num_kv_heads, shape.head_dim
    embedding_scale = np.float32(np.sqrt(emb))

    def scaled(w: Weights) -> Weights:
        return w * embedding_scale

    def query(w: Weights) -> Weights:
        return w.reshape(heads, dim, emb).transpose(2, 0, 1)

    def key_value(w: Weights) -> Weights:
        return w.reshape(kv_heads, dim, emb).transpose(2, 0, 1)

    def out(w: Weights) -> Weights:
        return w.T.reshape(heads, dim, emb)

    yield Entry("token_embd.weight", (shape.vocab_size, emb), ("token_embedder", "embedding"), scaled)
    yield Entry("output_norm.weight", (emb,), ("decoder", "decoder_norm", "scale"), same)
    if not shape.tied:
        yield Entry("output.weight", (shape.vocab_size, emb), ("decoder", "logits_dense", "kernel"), transposed)
    for layer in range(shape.num_layers):
        here, there = f"blk.{layer}.", ("decoder", f"layers_{layer}")
        attention, mlp = (*there, "self_attention"), (*there, "mlp")
        yield Entry(here + "attn_norm.weight", (emb,), (*there, "pre_self_attention_norm", "scale"), same)
        yield Entry(here + "attn_q.weight", (heads * dim, emb), (*attention, "query", "kernel"), query)
        yield Entry(here + "attn_k.weight", (kv_heads * dim, emb), (*attention, "key", "kernel"), key_value)
        yield Entry(here + "attn_v.weight", (kv_heads * dim, emb), (*attention, "value", "kernel"), key_value)
        yield Entry(here + "attn_q_norm.weight", (dim,), (*attention, "query_norm", "scale"), same)
        yield Entry(here + "attn_k_norm.weight", (dim,), (*attention, "key_norm", "scale"), same)
        yield Entry(here + "attn_output.weight", (emb, heads * dim), (*attention, "out", "kernel"), out)
        yield Entry(here + "post_attention_norm.weight", (emb,), (*there, "post_self_attention_norm", "scale"), same)
        yield Entry(here + "ffn_norm.weight", (emb,), (*there, "pre_ffw_norm", "scale"), same)
        yield Entry(here + "ffn_gate.weight", (shape.mlp_dim, emb), (*mlp, "wi_0", "kernel"), transposed)
        yield Entry(here + "ffn_up.weight", (shape.mlp_dim, emb), (*mlp, "wi_1", "kernel"), transposed)
        yield Entry(here + "ffn_down.weight", (emb, shape.mlp_dim), (*mlp, "wo", "kernel"), transposed)
        yield Entry(here + "post_ffw_norm.weight", (emb,), (*there, "post_ffw_norm", "scale"), same)


def maxtext_params(file: GgufFile, shape: Gemma3Shape, *, tie_head: bool = False) -> dict[str, Any]:
    """All weights as MaxText's unscanned ``gemma3`` parameter tree.

    Args:
      tie_head: leave the output head to the embedding table, which MaxText rounds to bfloat16 at every step.

    Raises:
      UnsupportedError: a tensor is missing or unusable, or ``tie_head`` is asked of an untied model.
    """
    if tie_head and not shape.tied:
        raise UnsupportedError(f"{file.path.name}: the file holds a head of its own; it cannot be tied")
    tree = parameter_tree(file, _entries(shape))
    if shape.tied and not tie_head:
        table = file.tensor("token_embd.weight", (shape.vocab_size, shape.emb_dim))
        place(tree, ("decoder", "logits_dense", "kernel"), table.T)
    return tree


def maxtext_config(shape: Gemma3Shape, *, tie_head: bool = False) -> dict[str, Any]:
    """The MaxText keys that describe this model, and nothing about where or how it runs."""
    return {
        "model_name": MODEL_NAME,
        "use_multimodal": False,
        "decoder_block": "gemma3",
        "base_emb_dim": shape.emb_dim,
        "base_num_decoder_layers": shape.num_layers,
        "base_num_query_heads": shape.num_query_heads,
        "base_num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "base_mlp_dim": shape.mlp_dim,
        "mlp_activations": ["gelu", "linear"],
        "vocab_size": shape.vocab_size,
        "sliding_window_size": shape.window_tokens,
        "rope_type": "default",
        "rope_max_timescale": shape.rope_base,
        "local_rope_max_timescale": shape.local_rope_base,
        "rope_linear_scaling_factor": shape.rope_factor,
        "normalization_layer_epsilon": _BLOCK_EPSILON,
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "logits_via_embedding": tie_head,
        "normalize_embedding_logits": tie_head,
        "scan_layers": False,
    }
