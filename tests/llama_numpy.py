"""A llama forward in plain numpy, straight from a GGUF file: the yardstick for converted weights.

For:        tests that need logits or greedy tokens from something that shares no code with MaxText, JAX
            or this project's converter.
Not for:    speed.
May import: numpy, gguf.

It follows llama.cpp's own conventions: query and key rows as stored, RoPE on neighbouring pairs
``(2i, 2i + 1)``, scores divided by ``sqrt(head_dim)``. The converter's row order and scale are thus tested.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

Array = NDArray[np.floating]


@dataclass
class KvCache:
    """Keys and values of one sequence, per layer ``[tokens, kv_heads, head_dim]``."""

    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.keys[0]) if self.keys else 0


class LlamaNumpy:
    """A llama model in ``dtype`` arithmetic (float64 unless said otherwise)."""

    def __init__(self, path: Path | str, dtype: type[np.floating] = np.float64) -> None:
        reader = GGUFReader(path)
        meta = {name: f.contents() for name, f in reader.fields.items() if name.startswith("llama.")}
        self.weights = {t.name: dequantize(t.data, t.tensor_type).astype(dtype) for t in reader.tensors}
        self.dtype = dtype
        self.layers = meta["llama.block_count"]
        self.heads = meta["llama.attention.head_count"]
        self.kv_heads = meta["llama.attention.head_count_kv"]
        self.epsilon = meta["llama.attention.layer_norm_rms_epsilon"]
        self.rope_base = meta["llama.rope.freq_base"]
        self.dim = meta.get("llama.attention.key_length", meta["llama.embedding_length"] // self.heads)

    def forward(self, ids: list[int], cache: KvCache | None = None) -> Array:
        """Logits ``[len(ids), vocab]`` of ``ids``, which follow what ``cache`` holds; the cache grows."""
        cache = KvCache() if cache is None else cache
        start = cache.num_tokens
        positions = np.arange(start, start + len(ids))
        x = self.weights["token_embd.weight"][ids]
        for layer in range(self.layers):
            x = x + self._attention(layer, self._norm(x, f"blk.{layer}.attn_norm"), positions, cache)
            x = x + self._mlp(layer, self._norm(x, f"blk.{layer}.ffn_norm"))
        head = self.weights.get("output.weight", self.weights["token_embd.weight"])
        return self._norm(x, "output_norm") @ head.T

    def greedy(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """The greedy continuation, and at each step the margin of its logit over the runner-up's."""
        cache, new, margins = KvCache(), [], []
        logits = self.forward(prompt, cache)[-1]
        for _ in range(num_tokens):
            second, first = np.partition(logits, -2)[-2:]
            new.append(int(np.argmax(logits)))
            margins.append(float(first - second))
            logits = self.forward(new[-1:], cache)[-1]
        return new, margins

    def _norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.dtype(self.epsilon)) * self.weights[f"{name}.weight"]

    def _rope(self, x: Array, positions: Array) -> Array:
        frequencies = self.rope_base ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        angles = positions[:, None, None] * frequencies
        cos, sin = np.cos(angles).astype(self.dtype), np.sin(angles).astype(self.dtype)
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)

    def _attention(self, layer: int, x: Array, positions: Array, cache: KvCache) -> Array:
        project = {n: x @ self.weights[f"blk.{layer}.attn_{n}.weight"].T for n in "qkv"}
        q = self._rope(project["q"].reshape(len(x), self.heads, self.dim), positions)
        k = self._rope(project["k"].reshape(len(x), self.kv_heads, self.dim), positions)
        v = project["v"].reshape(len(x), self.kv_heads, self.dim)
        if layer == len(cache.keys):
            cache.keys.append(k)
            cache.values.append(v)
        else:
            cache.keys[layer] = np.concatenate([cache.keys[layer], k])
            cache.values[layer] = np.concatenate([cache.values[layer], v])
        group = self.heads // self.kv_heads
        keys, values = (np.repeat(a, group, axis=1) for a in (cache.keys[layer], cache.values[layer]))
        scores = np.einsum("qhd,khd->hqk", q, keys) / np.sqrt(self.dtype(self.dim))
        scores[:, np.arange(keys.shape[0])[None, :] > positions[:, None]] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        probabilities = scores / scores.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", probabilities, values).reshape(len(x), -1)
        return out @ self.weights[f"blk.{layer}.attn_output.weight"].T

    def _mlp(self, layer: int, x: Array) -> Array:
        gate, up, down = (self.weights[f"blk.{layer}.ffn_{n}.weight"].T for n in ("gate", "up", "down"))
        gated = x @ gate
        return (gated / (1 + np.exp(-gated)) * (x @ up)) @ down
