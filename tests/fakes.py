"""A model small enough to compute by hand, which reads its whole context back through the page table.

Its next token is a checksum of every (token, position) it finds in the pages of its request. A wrong page,
slot, position, leftover or neighbour changes the checksum, and ``next_token`` says in numpy what is right.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kv_common.layout import KvStorageLayoutV1
from kv_control.bucketing import token_ladder
from kv_control.control_plane import ControlPlane
from kv_control.plan import RequestId
from kv_control.request import Request
from kv_control.scheduler import Scheduler
from kv_execution.dispatch import DecodeDispatch
from kv_execution.driver import PagedDriver
from kv_execution.metadata import StepInputs
from kv_execution.runtime import PagedRuntime

VOCAB = 97


def checksum(tokens: Sequence[int] | np.ndarray) -> int:
    """Sum over positions of ``(token + 1) * (position + 1)``; exact in float32 for contexts below 400."""
    tokens = np.asarray(tokens, np.int64)
    return int(((tokens + 1) * (np.arange(len(tokens)) + 1)).sum())


def next_token(tokens: Sequence[int] | np.ndarray) -> int:
    """The greedy next token after ``tokens``."""
    return checksum(tokens) % VOCAB


def completion(prompt: Sequence[int] | np.ndarray, num_tokens: int) -> list[int]:
    """What a request alone generates."""
    tokens = [int(token) for token in prompt]
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class ChecksumModel:
    """A ``PagedModel`` of one layer, one head and two numbers per slot: the token and its position.

    Attributes:
      nan_token: a row whose context ends with this token gets NaN logits; None for none.
    """

    mesh = None
    pool_sharding = None
    vocab_size = VOCAB

    def __init__(self, num_pages: int, tokens_per_page: int, nan_token: int | None = None) -> None:
        self.layout = KvStorageLayoutV1(1, num_pages, tokens_per_page, num_kv_heads=1, head_dim=1, dtype="float32")
        self.nan_token = nan_token

    def create_pools(self) -> dict[str, jax.Array]:
        return {name: jnp.zeros(self.layout.pool_shape, jnp.float32) for name in "kv"}

    def forward(
        self, params: jax.Array, pools: dict[str, jax.Array], token_ids: jax.Array, inputs: StepInputs
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        pages = jax.tree.map(jnp.asarray, inputs.pages)

        def write(pool: jax.Array, values: jax.Array) -> jax.Array:
            flat = pool.reshape(-1).at[pages.slot_mapping].set(values.astype(jnp.float32), mode="drop")
            return flat.reshape(pool.shape)

        pools = {"k": write(pools["k"], token_ids + 1), "v": write(pools["v"], pages.positions + 1)}
        num_rows, num_slots = pages.seq_lens.shape[0], self.layout.num_slots
        row = jnp.minimum(pages.row_of_token, num_rows - 1)
        key = jnp.arange(num_slots)
        index = pages.kv_indptr[row][:, None] + key[None] // self.layout.tokens_per_page
        listed = index < pages.kv_indptr[row + 1][:, None]
        page = jnp.where(listed, pages.kv_indices[jnp.minimum(index, pages.kv_indices.shape[0] - 1)], 0)
        slot = page * self.layout.tokens_per_page + key[None] % self.layout.tokens_per_page
        seen = listed & (key[None] <= pages.positions[:, None])
        products = pools["k"].reshape(-1)[slot] * pools["v"].reshape(-1)[slot]
        hidden = jnp.where(seen, products, 0.0).sum(axis=1)
        if self.nan_token is not None:
            hidden = jnp.where(token_ids == self.nan_token, jnp.nan, hidden)
        return self.head(params, hidden[:, None], inputs.sample_rows), hidden[:, None], pools

    def head(self, params: jax.Array, hidden: jax.Array, rows: jax.Array) -> jax.Array:
        chosen = jnp.mod(hidden[rows, 0], VOCAB)
        return params - jnp.abs(jnp.arange(VOCAB)[None] - chosen[:, None])


def make_driver(
    num_pages: int,
    tokens_per_page: int = 4,
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 64,
    prefill_chunk_tokens: int | None = None,
    nan_token: int | None = None,
    poison_on_free: bool = True,
    prefix_cache: bool = False,
    decode: DecodeDispatch | None = None,
    ahead: bool = True,
) -> PagedDriver:
    """A driver over a ``ChecksumModel``, with every safety check on."""
    model = ChecksumModel(num_pages, tokens_per_page, nan_token)
    control = ControlPlane(
        model.layout,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        token_ladder=token_ladder(max_num_batched_tokens),
        prefix_namespace=b"a namespace's digest" if prefix_cache else None,
    )
    runtime = PagedRuntime(
        model,
        jnp.float32(0.0),
        control,
        run_key=jax.random.key(0),
        backend="checksum",
        decode=decode,
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


def run_all(driver: PagedDriver, requests: Sequence[Request]) -> dict[RequestId, Request]:
    """Submit and run requests to their end."""
    for request in requests:
        driver.submit(request)
    return {request.id: request for request in driver.run()}
