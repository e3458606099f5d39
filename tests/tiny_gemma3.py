"""Small gemma3 GGUF files for tests: random weights, one cycle of layers and one more, a SentencePiece vocabulary.

For:        tests of the converter, without any published weights.
Not for:    reading them back; writing files (tiny_gguf.write_gguf does).
May import: numpy, gguf, tests.tiny_gguf.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.tiny_gguf import HEADER as LLAMA_HEADER
from tests.tiny_gguf import write_gguf

LAYERS, EMB, MLP, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 7, 64, 96, 4, 1, 32, 16
_KINDS = gguf.TokenType
_SPACE = "\u2581"

# In order of merging: a piece scores better the earlier it is joined. "bcd" competes with "ab" for the b's of "abcd".
_PIECES = [
    *(
        "th",
        "he",
        "the",
        _SPACE + "t",
        _SPACE + "th",
        _SPACE + "the",
        "bcd",
        "ab",
        "cd",
        "bc",
        "abcd",
        "er",
        "é",
        "ing",
    ),
    *("in", "ng", _SPACE + "a", "an", "and", _SPACE + "and", "\n"),
]
_LETTERS = [*map(chr, range(ord("a"), ord("z") + 1)), *"ABT.,!?0123456789-<>_/", _SPACE]
VOCABULARY: list[tuple[str, float, int]] = [
    ("<pad>", -1000.0, _KINDS.CONTROL),
    ("<eos>", -1000.0, _KINDS.CONTROL),
    ("<bos>", -1000.0, _KINDS.CONTROL),
    ("<unk>", -1000.0, _KINDS.UNKNOWN),
    ("<end_of_turn>", -1000.0, _KINDS.CONTROL),
    *((text, -1000.0, _KINDS.USER_DEFINED) for text in ("  ", "   ", "\n\n", "<b>")),  # spaces as llama.cpp keeps them
    *((f"<0x{byte:02X}>", -1000.0, _KINDS.BYTE) for byte in range(256)),
    *((piece, -float(i), _KINDS.NORMAL) for i, piece in enumerate(_PIECES)),
    *((letter, -float(100 + i), _KINDS.NORMAL) for i, letter in enumerate(_LETTERS)),
]
VOCABULARY += [(f"<unused{i}>", -1000.0, _KINDS.CONTROL) for i in range(-len(VOCABULARY) % 32)]
VOCAB = len(VOCABULARY)

HEADER: dict[str, Any] = {
    **{key: None for key in LLAMA_HEADER},
    "gemma3.block_count": LAYERS,
    "gemma3.context_length": 128,
    "gemma3.embedding_length": EMB,
    "gemma3.feed_forward_length": MLP,
    "gemma3.attention.head_count": HEADS,
    "gemma3.attention.head_count_kv": KV_HEADS,
    "gemma3.attention.key_length": HEAD_DIM,
    "gemma3.attention.value_length": HEAD_DIM,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.sliding_window": WINDOW,
    "gemma3.rope.freq_base": 1_000_000.0,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": [text for text, _, _ in VOCABULARY],
    "tokenizer.ggml.scores": [score for _, score, _ in VOCABULARY],
    "tokenizer.ggml.token_type": [int(kind) for _, _, kind in VOCABULARY],
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.eot_token_id": 4,
    "tokenizer.ggml.unknown_token_id": 3,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_space_prefix": False,
}


def tensors(*, own_head: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under llama.cpp's names; norms are not all ones, so that a lost one shows."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm(size: int, low: float = 0.5, high: float = 1.5) -> np.ndarray:
        return rng.uniform(low, high, size).astype(np.float32)

    weights = {"token_embd.weight": matrix(VOCAB, EMB), "output_norm.weight": norm(EMB)}
    if own_head:
        weights["output.weight"] = matrix(VOCAB, EMB)
    for layer in range(LAYERS):
        weights |= {
            f"blk.{layer}.attn_norm.weight": norm(EMB),
            f"blk.{layer}.attn_q.weight": matrix(HEADS * HEAD_DIM, EMB),
            f"blk.{layer}.attn_k.weight": matrix(KV_HEADS * HEAD_DIM, EMB),
            f"blk.{layer}.attn_v.weight": matrix(KV_HEADS * HEAD_DIM, EMB),
            # Scores of normed queries and keys lie within +-sqrt(head_dim) times these: wide enough to matter.
            f"blk.{layer}.attn_q_norm.weight": norm(HEAD_DIM, 1.0, 2.0),
            f"blk.{layer}.attn_k_norm.weight": norm(HEAD_DIM, 1.0, 2.0),
            f"blk.{layer}.attn_output.weight": matrix(EMB, HEADS * HEAD_DIM),
            f"blk.{layer}.post_attention_norm.weight": norm(EMB),
            f"blk.{layer}.ffn_norm.weight": norm(EMB),
            f"blk.{layer}.ffn_gate.weight": matrix(MLP, EMB),
            f"blk.{layer}.ffn_up.weight": matrix(MLP, EMB),
            f"blk.{layer}.ffn_down.weight": matrix(EMB, MLP),
            f"blk.{layer}.post_ffw_norm.weight": norm(EMB),
        }
    return weights


def write_gemma3(path: Path, *, header: dict[str, Any] | None = None, **options: Any) -> Path:
    """Write one file; ``header`` and the other options as in ``tiny_gguf.write_gguf``."""
    options.setdefault("weights", tensors())
    return write_gguf(path, architecture="gemma3", header={**HEADER, **(header or {})}, **options)
