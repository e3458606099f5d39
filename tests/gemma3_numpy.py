"""A gemma3 forward in plain numpy, straight from a GGUF file: the yardstick for converted weights and paged runs.

For:        tests that need logits or greedy tokens from something that shares no code with MaxText, JAX or this
            project's converter.
Not for:    speed.
May import: numpy, gguf.

It follows llama.cpp's conventions: rows and norms as stored (the offset of 1 is in them), the embedding times
``sqrt(emb)``, queries and keys normed over each head, RoPE on pairs ``(i, i + head_dim / 2)``, scores divided by
``sqrt(head_dim)``. Layers 5, 11, 17, ... see everything, the others a window and through another RoPE base.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

Array = NDArray[np.floating]
CYCLE = 6


@dataclass
class KvCache:
    """Keys and values of one sequence, per layer ``[tokens, kv_heads, head_dim]``."""

    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.keys[0]) if self.keys else 0


class Gemma3Numpy:
    """A gemma3 model in ``dtype`` arithmetic."""

    def __init__(self, source: Path | str | GGUFReader, dtype: type[np.floating] = np.float32) -> None:
        reader = source if isinstance(source, GGUFReader) else GGUFReader(source)
        meta = {name: f.contents() for name, f in reader.fields.items() if name.startswith("gemma3.")}
        self.weights = {t.name: dequantize(t.data, t.tensor_type).astype(dtype) for t in reader.tensors}
        self.dtype = dtype
        self.layers = meta["gemma3.block_count"]
        self.heads = meta["gemma3.attention.head_count"]
        self.kv_heads = meta["gemma3.attention.head_count_kv"]
        self.dim = meta["gemma3.attention.key_length"]
        self.epsilon = meta["gemma3.attention.layer_norm_rms_epsilon"]
        self.window = meta["gemma3.attention.sliding_window"]
        self.rope_base = meta["gemma3.rope.freq_base"]
        self.local_rope_base = meta.get("gemma3.rope.freq_base_swa", 10_000.0)
        self.rope_factor = meta.get("gemma3.rope.scaling.factor", 1.0)

    def forward(self, ids: list[int], cache: KvCache | None = None, *, last: int | None = None) -> Array:
        """Logits ``[len(ids) or last, vocab]`` of ``ids``, which follow what ``cache`` holds; the cache grows."""
        cache = KvCache() if cache is None else cache
        start = cache.num_tokens
        positions = np.arange(start, start + len(ids))
        table = self.weights["token_embd.weight"]
        x = table[ids] * self.dtype(np.sqrt(table.shape[1]))
        for layer in range(self.layers):
            block = f"blk.{layer}."
            attended = self._attention(layer, self._norm(x, block + "attn_norm"), positions, cache)
            x = x + self._norm(attended, block + "post_attention_norm")
            x = x + self._norm(self._mlp(layer, self._norm(x, block + "ffn_norm")), block + "post_ffw_norm")
        x = x if last is None else x[-last:]
        return self._norm(x, "output_norm") @ self.weights.get("output.weight", table).T

    def greedy(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """The greedy continuation, and at each step the margin of its logit over the runner-up's."""
        cache, new, margins = KvCache(), [], []
        logits = self.forward(prompt, cache, last=1)[-1]
        for _ in range(num_tokens):
            second, first = np.partition(logits, -2)[-2:]
            new.append(int(np.argmax(logits)))
            margins.append(float(first - second))
            logits = self.forward(new[-1:], cache, last=1)[-1]
        return new, margins

    def _norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.dtype(self.epsilon)) * self.weights[f"{name}.weight"]

    def _rope(self, x: Array, positions: Array, *, local: bool) -> Array:
        base, factor = (self.local_rope_base, 1.0) if local else (self.rope_base, self.rope_factor)
        frequencies = base ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim) / factor
        angles = positions[:, None, None] * frequencies
        cos, sin = np.cos(angles).astype(self.dtype), np.sin(angles).astype(self.dtype)
        low, high = np.split(x, 2, axis=-1)
        return np.concatenate([low * cos - high * sin, low * sin + high * cos], axis=-1)

    def _attention(self, layer: int, x: Array, positions: Array, cache: KvCache) -> Array:
        block, local = f"blk.{layer}.", layer % CYCLE != CYCLE - 1
        q, k, v = (x @ self.weights[f"{block}attn_{name}.weight"].T for name in "qkv")
        q = self._norm(q.reshape(len(x), self.heads, self.dim), block + "attn_q_norm")
        k = self._norm(k.reshape(len(x), self.kv_heads, self.dim), block + "attn_k_norm")
        q, k = self._rope(q, positions, local=local), self._rope(k, positions, local=local)
        v = v.reshape(len(x), self.kv_heads, self.dim)
        if layer == len(cache.keys):
            cache.keys.append(k)
            cache.values.append(v)
        else:
            cache.keys[layer] = np.concatenate([cache.keys[layer], k])
            cache.values[layer] = np.concatenate([cache.values[layer], v])
        group = self.heads // self.kv_heads
        keys, values = (np.repeat(a, group, axis=1) for a in (cache.keys[layer], cache.values[layer]))
        scores = np.einsum("qhd,khd->hqk", q, keys) / np.sqrt(self.dtype(self.dim))
        distance = positions[:, None] - np.arange(keys.shape[0])[None, :]
        scores[:, (distance < 0) | ((distance >= self.window) if local else False)] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        probabilities = scores / scores.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", probabilities, values).reshape(len(x), -1)
        return out @ self.weights[f"{block}attn_output.weight"].T

    def _mlp(self, layer: int, x: Array) -> Array:
        gate, up, down = (self.weights[f"blk.{layer}.ffn_{n}.weight"].T for n in ("gate", "up", "down"))
        gated = x @ gate
        cubic = self.dtype(np.sqrt(2 / np.pi)) * (gated + self.dtype(0.044715) * gated**3)
        return (gated * (1 + np.tanh(cubic)) / 2 * (x @ up)) @ down
