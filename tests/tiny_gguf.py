"""Small GGUF files for tests: random llama weights and a real byte-level vocabulary, a page of Python to vary.

For:        tests of the converter, without any published weights.
Not for:    reading them back.
May import: numpy, gguf, tokenizers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

LAYERS, EMB, MLP, HEADS, KV_HEADS = 2, 64, 128, 4, 2

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *ALPHABET, "th", "Ġth", "the", "Ġthe", "er"]
MERGES = ["t h", "Ġ th", "th e", "Ġth e", "e r"]
TOKENS += [f"<|unused_{i}|>" for i in range(-len(TOKENS) % 32)]
VOCAB = len(TOKENS)

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"

HEADER: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": EMB,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.freq_base": 10_000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": VOCAB,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [
        gguf.TokenType.CONTROL if t.startswith("<|") else gguf.TokenType.NORMAL for t in TOKENS
    ],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
}


def tensors(*, head_dim: int = EMB // HEADS, own_head: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under llama.cpp's names; norms are not all ones, so that a lost one shows."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm() -> np.ndarray:
        return rng.uniform(0.5, 1.5, EMB).astype(np.float32)

    weights = {"token_embd.weight": matrix(VOCAB, EMB), "output_norm.weight": norm()}
    if own_head:
        weights["output.weight"] = matrix(VOCAB, EMB)
    for layer in range(LAYERS):
        weights |= {
            f"blk.{layer}.attn_norm.weight": norm(),
            f"blk.{layer}.attn_q.weight": matrix(HEADS * head_dim, EMB) * 3,
            f"blk.{layer}.attn_k.weight": matrix(KV_HEADS * head_dim, EMB) * 3,
            f"blk.{layer}.attn_v.weight": matrix(KV_HEADS * head_dim, EMB),
            f"blk.{layer}.attn_output.weight": matrix(EMB, HEADS * head_dim),
            f"blk.{layer}.ffn_norm.weight": norm(),
            f"blk.{layer}.ffn_gate.weight": matrix(MLP, EMB),
            f"blk.{layer}.ffn_up.weight": matrix(MLP, EMB),
            f"blk.{layer}.ffn_down.weight": matrix(EMB, MLP),
        }
    return weights


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    header: dict[str, Any] | None = None,
    weights: dict[str, np.ndarray] | None = None,
    quantise: dict[str, gguf.GGMLQuantizationType] | None = None,
    raw: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Write one file.

    Args:
      header: keys over ``HEADER``; ``None`` leaves a key out.
      weights: all tensors; those of ``tensors()`` unless given.
      quantise: tensors stored quantised, by name.
      raw: tensors whose bytes are declared to be of a type nobody encoded them in.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**HEADER, **(header or {})}.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, array in (tensors() if weights is None else weights).items():
        if kind := (quantise or {}).get(name):
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        elif kind := (raw or {}).get(name):
            bytes_ = np.zeros(gguf.quants.quant_shape_to_byte_shape(array.shape, kind), np.uint8)
            writer.add_tensor(name, bytes_, raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
