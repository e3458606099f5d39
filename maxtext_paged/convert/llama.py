"""The ``llama`` architecture: GGUF names and layouts to MaxText's ``llama2`` decoder block.

For:        hyperparameters, and each tensor's place, axis order and scale in MaxText's parameter tree.
Not for:    reading files or writing checkpoints.
May import: numpy, kv_common.

Three things differ between the two, besides names:

- llama.cpp stores the rows of the query and key projections so that RoPE rotates neighbours
  ``(2i, 2i + 1)``; MaxText's default RoPE rotates ``(i, i + head_dim / 2)``. ``unpermute_rope`` undoes it.
- MaxText never divides attention scores by ``sqrt(head_dim)``: its query weights carry the scale.
- MaxText's kernels are ``[in, heads, head_dim]`` (out: ``[heads, head_dim, emb]``), GGUF's ``[out, in]``.
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
        "rope.freq_base",
        "rope.dimension_count",
    }
)
"""``llama.*`` keys whose meaning is carried over. Any other changes the mathematics: refused by name."""

_INERT_VALUES = {"expert_count": 0, "expert_used_count": 0, "rope.scaling.type": "none"}
"""Keys that are accepted only with the value that changes nothing."""


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a llama model. Counts are whole-model, not per shard.

    Attributes:
      context_tokens: tokens the model was trained to read.
      rope_base: base of the rotary frequencies; an integer, because MaxText's key is one.
      norm_epsilon: added to the mean square in every RMSNorm.
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
    rope_base: int
    norm_epsilon: float
    tied: bool


def read_shape(file: GgufFile) -> LlamaShape:
    """Read and check a llama file's header.

    Raises:
      UnsupportedError: a header key that this converter does not know, scaled or partial RoPE, experts, sizes that do
        not fit together, or a tensor without a place.
    """
    check_header(file, "llama", _KNOWN_KEYS, _INERT_VALUES)
    num_query_heads = whole(file, "llama.attention.head_count")
    emb_dim = whole(file, "llama.embedding_length")
    head_dim = whole(file, "llama.attention.key_length", emb_dim // num_query_heads)
    shape = LlamaShape(
        num_layers=whole(file, "llama.block_count"),
        emb_dim=emb_dim,
        mlp_dim=whole(file, "llama.feed_forward_length"),
        num_query_heads=num_query_heads,
        num_kv_heads=whole(file, "llama.attention.head_count_kv", num_query_heads),
        head_dim=head_dim,
        vocab_size=whole(file, "llama.vocab_size", len(file.metadata.get("tokenizer.ggml.tokens", ()))),
        context_tokens=whole(file, "llama.context_length"),
        rope_base=whole(file, "llama.rope.freq_base", 10_000),
        norm_epsilon=float32_number(file.require("llama.attention.layer_norm_rms_epsilon")),
        tied="output.weight" not in file.tensor_names,
    )
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if whole(file, key, head_dim) != head_dim:
            raise UnsupportedError(
                f"{file.path.name}: {key} = {file.metadata[key]} differs from the head size {head_dim}"
            )
    if head_dim % 2 or shape.num_query_heads % shape.num_kv_heads:
        raise UnsupportedError(
            f"{file.path.name}: {num_query_heads} query heads, {shape.num_kv_heads} KV heads of {head_dim}: "
            "query heads must divide by KV heads, and the head size by two"
        )
    check_names(file, _entries(shape), "llama2")
    return shape


def unpermute_rope(weights: Weights, num_heads: int) -> Weights:
    """Undo llama.cpp's row order of a query or key projection.

    Args:
      weights: float32 ``[num_heads * head_dim, in]``, rows of a head ordered ``0, d/2, 1, d/2 + 1, ...``.

    Returns:
      The same rows, each head's in the order ``0, 1, ..., d - 1``.

    >>> unpermute_rope(np.array([[0], [2], [1], [3]], np.float32), num_heads=1).ravel().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    rows, width = weights.shape
    half = rows // num_heads // 2
    return weights.reshape(num_heads, half, 2, width).swapaxes(1, 2).reshape(rows, width)


def _entries(shape: LlamaShape) -> Iterator[Entry]:
    emb, heads, kv_heads, dim = shape.emb_dim, shape.num_query_heads, shape.num_kv_heads, shape.head_dim
    scale = np.float32(1.0 / np.sqrt(dim))

    def query(w: Weights) -> Weights:
        return unpermute_rope(w, heads).reshape(heads, dim, emb).transpose(2, 0, 1) * scale

    def key(w: Weights) -> Weights:
        return unpermute_rope(w, kv_heads).reshape(kv_heads, dim, emb).transpose(2, 0, 1)

    def value(w: Weights) -> Weights:
        return w.reshape(kv_heads, dim, emb).transpose(2, 0, 1)

    def out(w: Weights) -> Weights:
        return w.T.reshape(heads, dim, emb)

    yield Entry("token_embd.weight", (shape.vocab_size, emb), ("token_embedder", "embedding"), same)
    yield Entry("output_norm.weight", (emb,), ("decoder", "decoder_norm", "scale"), same)
    if not shape.tied:
        yield Entry("output.weight", (shape.vocab_size, emb), ("decoder", "logits_dense", "kernel"), transposed)
    for layer in range(shape.num_layers):
        here, there = f"blk.{layer}.", ("decoder", f"layers_{layer}")
        attention, mlp = (*there, "self_attention"), (*there, "mlp")
        yield Entry(here + "attn_norm.weight", (emb,), (*there, "pre_self_attention_layer_norm", "scale"), same)
        yield Entry(here + "attn_q.weight", (heads * dim, emb), (*attention, "query", "kernel"), query)
        yield Entry(here + "attn_k.weight", (kv_heads * dim, emb), (*attention, "key", "kernel"), key)
        yield Entry(here + "attn_v.weight", (kv_heads * dim, emb), (*attention, "value", "kernel"), value)
        yield Entry(here + "attn_output.weight", (emb, heads * dim), (*attention, "out", "kernel"), out)
        yield Entry(here + "ffn_norm.weight", (emb,), (*there, "post_self_attention_layer_norm", "scale"), same)
        yield Entry(here + "ffn_gate.weight", (shape.mlp_dim, emb), (*mlp, "wi_0", "kernel"), transposed)
        yield Entry(here + "ffn_up.weight", (shape.mlp_dim, emb), (*mlp, "wi_1", "kernel"), transposed)
        yield Entry(here + "ffn_down.weight", (emb, shape.mlp_dim), (*mlp, "wo", "kernel"), transposed)


def maxtext_params(file: GgufFile, shape: LlamaShape, *, tie_head: bool = False) -> dict[str, Any]:
    """All weights as MaxText's unscanned ``llama2`` parameter tree.

    Args:
      tie_head: leave the output head to the embedding table (``logits_via_embedding``). MaxText rounds
        a tied table to bfloat16 at every step, so the default gives the head a float32 copy.

    Returns:
      Nested dicts of contiguous float32 arrays: ``token_embedder.embedding`` ``[vocab, emb]``;
      ``decoder.layers_N.self_attention.{query,key,value}.kernel`` ``[emb, heads, head_dim]`` and
      ``out.kernel`` ``[heads, head_dim, emb]``; ``decoder.layers_N.mlp.{wi_0,wi_1}.kernel`` ``[emb, mlp]``
      and ``wo.kernel`` ``[mlp, emb]``; norms ``[emb]``; ``decoder.logits_dense.kernel`` ``[emb, vocab]``.

    Raises:
      UnsupportedError: a tensor is missing or unusable, or ``tie_head`` is asked of an untied model.
    """
    if tie_head and not shape.tied:
        raise UnsupportedError(f"{file.path.name}: the file holds a head of its own; it cannot be tied")
    tree = parameter_tree(file, _entries(shape))
    if shape.tied and not tie_head:
        place(tree, ("decoder", "logits_dense", "kernel"), tree["token_embedder"]["embedding"].T)
    return tree


def maxtext_config(shape: LlamaShape, *, tie_head: bool = False) -> dict[str, Any]:
    """The MaxText keys that describe this model, and nothing about where or how it runs."""
    return {
        "decoder_block": "llama2",
        "base_emb_dim": shape.emb_dim,
        "base_num_decoder_layers": shape.num_layers,
        "base_num_query_heads": shape.num_query_heads,
        "base_num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "base_mlp_dim": shape.mlp_dim,
        "mlp_activations": ["silu", "linear"],
        "vocab_size": shape.vocab_size,
        "rope_type": "default",
        "rope_max_timescale": shape.rope_base,
        "normalization_layer_epsilon": shape.norm_epsilon,
        "logits_via_embedding": tie_head,
        "normalize_embedding_logits": False,
        "scan_layers": False,
    }
