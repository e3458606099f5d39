"""The checksum model of fakes.py with a second layer that sees a window only, in pools of its own.

Its next token adds up two checksums: of the whole context, read through the page table, and of the last ``window``
tokens, read through the window group's. A page that left too early, or one that should have left and was read, shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kv_common.layout import KvStorageLayoutV1
from kv_common.window_group import WindowGroup
from kv_control.bucketing import token_ladder
from kv_control.control_plane import ControlPlane
from kv_control.scheduler import Scheduler
from kv_execution.driver import PagedDriver
from kv_execution.metadata import PageMetadata, StepInputs
from kv_execution.runtime import PagedRuntime
from tests.fakes import VOCAB, ChecksumModel, checksum


def next_token(tokens: Sequence[int] | np.ndarray, window: int) -> int:
    """The greedy next token after ``tokens``."""
    tokens = np.asarray(tokens, np.int64)
    seen = (tokens + 1) * (np.arange(len(tokens)) + 1)
    return int(checksum(tokens) + seen[-window:].sum()) % VOCAB


def completion(prompt: Sequence[int] | np.ndarray, num_tokens: int, window: int) -> list[int]:
    """What a request alone generates."""
    tokens = [int(token) for token in prompt]
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, window))
    return tokens[len(prompt) :]


class WindowChecksumModel(ChecksumModel):
    """A ``PagedModel`` of two layers, the second with a window."""

    leaf_groups = (0, 0, 1, 1)

    def __init__(self, num_pages: int, tokens_per_page: int, window: int, window_pages: int) -> None:
        super().__init__(num_pages, tokens_per_page)
        layout = KvStorageLayoutV1(1, window_pages, tokens_per_page, num_kv_heads=1, head_dim=1, dtype="float32")
        self.group = WindowGroup(window, layout)

    def create_pools(self) -> dict[str, jax.Array]:
        shapes = {"k": self.layout, "v": self.layout, "window_k": self.group.layout, "window_v": self.group.layout}
        return {name: jnp.zeros(layout.pool_shape, jnp.float32) for name, layout in shapes.items()}

    def forward(
        self, params: jax.Array, pools: dict[str, jax.Array], token_ids: jax.Array, inputs: StepInputs
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        pages = jax.tree.map(jnp.asarray, inputs.pages)
        k, v, whole = self._layer(pools["k"], pools["v"], token_ids, pages.of_group(0), None)
        window_k, window_v, seen = self._layer(
            pools["window_k"], pools["window_v"], token_ids, pages.of_group(1), self.group.window
        )
        hidden = (whole + seen)[:, None]
        pools = {"k": k, "v": v, "window_k": window_k, "window_v": window_v}
        return self.head(params, hidden, inputs.sample_rows), hidden, pools

    def _layer(
        self, k: jax.Array, v: jax.Array, token_ids: jax.Array, pages: PageMetadata, window: int | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        size, num_slots = self.layout.tokens_per_page, self.layout.num_slots
        shape = k.shape
        k = k.reshape(-1).at[pages.slot_mapping].set((token_ids + 1).astype(jnp.float32), mode="drop")
        v = v.reshape(-1).at[pages.slot_mapping].set((pages.positions + 1).astype(jnp.float32), mode="drop")
        row = jnp.minimum(pages.row_of_token, pages.seq_lens.shape[0] - 1)
        key = jnp.arange(num_slots)[None] + pages.kv_first_page_offset[row][:, None]  # from the first listed page
        index = pages.kv_indptr[row][:, None] + jnp.arange(num_slots)[None] // size
        listed = index < pages.kv_indptr[row + 1][:, None]
        page = jnp.where(listed, pages.kv_indices[jnp.minimum(index, pages.kv_indices.shape[0] - 1)], 0)
        seen = listed & (key <= pages.positions[:, None])
        if window is not None:
            seen &= key > pages.positions[:, None] - window
        slot = page * size + key % size
        hidden = jnp.where(seen, k[slot] * v[slot], 0.0).sum(axis=1)
        return k.reshape(shape), v.reshape(shape), hidden


def make_driver(
    num_pages: int,
    tokens_per_page: int = 4,
    *,
    window: int = 6,
    window_pages: int = 12,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 64,
    prefill_chunk_tokens: int | None = None,
    prefix_cache: bool = False,
    poison_on_free: bool = True,
    ahead: bool = True,
) -> PagedDriver:
    """A driver over a ``WindowChecksumModel``, with every safety check on."""
    model = WindowChecksumModel(num_pages, tokens_per_page, window, window_pages)
    control = ControlPlane(
        model.layout,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        token_ladder=token_ladder(max_num_batched_tokens, smallest=max_num_batched_tokens),
        prefix_namespace=b"a namespace's digest" if prefix_cache else None,
        window_groups=[model.group],
    )
    runtime = PagedRuntime(
        model,
        jnp.float32(0.0),
        control,
        run_key=jax.random.key(0),
        backend="checksum",
        poison_on_free=poison_on_free,
    )
    scheduler = Scheduler(
        control,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        prefill_chunk_tokens=prefill_chunk_tokens,
        release=runtime.release,
    )
    return PagedDriver(runtime, scheduler, check=True, ahead=ahead)
