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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import UnsupportedError
from maxtext_paged.convert.gguf import GgufFile

Weights = NDArray[np.float32]

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
      UnsupportedError: another architecture, a header key that this converter does not know, scaled
        or partial RoPE, experts, sizes that do not fit together, or a tensor without a place.
    """
    architecture = file.require("general.architecture")
    if architecture != "llama":
        raise UnsupportedError(
            f"{file.path.name}: architecture {architecture!r} is not supported; this converter knows 'llama'"
        )
    for key, value in file.metadata.items():
        name = key.removeprefix("llama.")
        if name == key or name in _KNOWN_KEYS or (name in _INERT_VALUES and value == _INERT_VALUES[name]):
            continue
        raise UnsupportedError(
            f"{file.path.name}: header key {key!r} = {value!r} is not supported for architecture 'llama'"
        )

    num_query_heads = _whole(file, "llama.attention.head_count")
    emb_dim = _whole(file, "llama.embedding_length")
    head_dim = _whole(file, "llama.attention.key_length", emb_dim // num_query_heads)
    shape = LlamaShape(
        num_layers=_whole(file, "llama.block_count"),
        emb_dim=emb_dim,
        mlp_dim=_whole(file, "llama.feed_forward_length"),
        num_query_heads=num_query_heads,
        num_kv_heads=_whole(file, "llama.attention.head_count_kv", num_query_heads),
        head_dim=head_dim,
        vocab_size=_whole(file, "llama.vocab_size", len(file.metadata.get("tokenizer.ggml.tokens", ()))),
        context_tokens=_whole(file, "llama.context_length"),
        rope_base=_whole(file, "llama.rope.freq_base", 10_000),
        # Stored as float32: 1e-05 reads back as 9.999999747378752e-06, which is the same number there.
        norm_epsilon=float(str(np.float32(file.require("llama.attention.layer_norm_rms_epsilon")))),
        tied="output.weight" not in file.tensor_names,
    )
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if _whole(file, key, head_dim) != head_dim:
            raise UnsupportedError(
                f"{file.path.name}: {key} = {file.metadata[key]} differs from the head size {head_dim}"
            )
    if head_dim % 2 or shape.num_query_heads % shape.num_kv_heads:
        raise UnsupportedError(
            f"{file.path.name}: {num_query_heads} query heads, {shape.num_kv_heads} KV heads of {head_dim}: "
            "query heads must divide by KV heads, and the head size by two"
        )
    _check_names(file, shape)
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


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where one GGUF tensor goes: its stored shape, its path in MaxText's tree, and the way there."""

    source: str
    source_shape: tuple[int, ...]
    target: tuple[str, ...]
    convert: Callable[[Weights], Weights]


def _entries(shape: LlamaShape) -> Iterator[_Entry]:
    emb, heads, kv_heads, dim = shape.emb_dim, shape.num_query_heads, shape.num_kv_heads, shape.head_dim
    scale = np.float32(1.0 / np.sqrt(dim))

    def same(w: Weights) -> Weights:
        return w

    def transposed(w: Weights) -> Weights:
        return w.T

    def query(w: Weights) -> Weights:
        return unpermute_rope(w, heads).reshape(heads, dim, emb).transpose(2, 0, 1) * scale

    def key(w: Weights) -> Weights:
        return unpermute_rope(w, kv_heads).reshape(kv_heads, dim, emb).transpose(2, 0, 1)

    def value(w: Weights) -> Weights:
        return w.reshape(kv_heads, dim, emb).transpose(2, 0, 1)

    def out(w: Weights) -> Weights:
        return w.T.reshape(heads, dim, emb)

    yield _Entry("token_embd.weight", (shape.vocab_size, emb), ("token_embedder", "embedding"), same)
    yield _Entry("output_norm.weight", (emb,), ("decoder", "decoder_norm", "scale"), same)
    if not shape.tied:
        yield _Entry("output.weight", (shape.vocab_size, emb), ("decoder", "logits_dense", "kernel"), transposed)
    for layer in range(shape.num_layers):
        here, there = f"blk.{layer}.", ("decoder", f"layers_{layer}")
        attention, mlp = (*there, "self_attention"), (*there, "mlp")
        yield _Entry(here + "attn_norm.weight", (emb,), (*there, "pre_self_attention_layer_norm", "scale"), same)
        yield _Entry(here + "attn_q.weight", (heads * dim, emb), (*attention, "query", "kernel"), query)
        yield _Entry(here + "attn_k.weight", (kv_heads * dim, emb), (*attention, "key", "kernel"), key)
        yield _Entry(here + "attn_v.weight", (kv_heads * dim, emb), (*attention, "value", "kernel"), value)
        yield _Entry(here + "attn_output.weight", (emb, heads * dim), (*attention, "out", "kernel"), out)
        yield _Entry(here + "ffn_norm.weight", (emb,), (*there, "post_self_attention_layer_norm", "scale"), same)
        yield _Entry(here + "ffn_gate.weight", (shape.mlp_dim, emb), (*mlp, "wi_0", "kernel"), transposed)
        yield _Entry(here + "ffn_up.weight", (shape.mlp_dim, emb), (*mlp, "wi_1", "kernel"), transposed)
        yield _Entry(here + "ffn_down.weight", (emb, shape.mlp_dim), (*mlp, "wo", "kernel"), transposed)


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
    tree: dict[str, Any] = {}
    for entry in _entries(shape):
        weights = entry.convert(file.tensor(entry.source, entry.source_shape))
        _place(tree, entry.target, np.ascontiguousarray(weights))
    if shape.tied and not tie_head:
        embedding = tree["token_embedder"]["embedding"]
        _place(tree, ("decoder", "logits_dense", "kernel"), np.ascontiguousarray(embedding.T))
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


def _place(tree: dict[str, Any], path: tuple[str, ...], leaf: Weights) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = leaf


def _whole(file: GgufFile, key: str, default: int | None = None) -> int:
    """A positive whole number from the header; an absent key gives ``default``, if there is one."""
    value = file.metadata.get(key, default) if default else file.require(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
        raise UnsupportedError(f"{file.path.name}: {key} = {value!r} must be one positive whole number")
    return int(value)


def _check_names(file: GgufFile, shape: LlamaShape) -> None:
    """Refuse tensors without a place: ignoring one (a bias, RoPE factors) would change the model silently."""
    unknown = sorted(file.tensor_names - {entry.source for entry in _entries(shape)})
    if unknown:
        raise UnsupportedError(
            f"{file.path.name}: {len(unknown)} tensors have no place in MaxText's llama2 block, first "
            f"{', '.join(map(repr, unknown[:3]))}"
        )
