"""Whole paged steps as numpy arrays: built, poisoned, run through the product's call site, and judged.

For:        any test that needs ragged requests on shuffled pages and their dense answer.
Not for:    promises about a backend (conformance) or the dense arithmetic (numpy_model).
May import: numpy, jax, kv_common, kv_execution.

Every slot that nobody owns holds ``poison`` (NaN unless said otherwise), and so does every padding row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from kv_common.page_table import KvPageTableV1, PageRow, pack_page_table
from kv_execution.attention.api import AttentionOptions, PagedAttentionBackend, paged_attention
from kv_execution.metadata import PageMetadata
from tests.execution.numpy_model import dense_attention, float32_bound

NUM_PAGES, TOKEN_RUNG, ROW_RUNG, INDEX_CAPACITY = 128, 320, 64, 160
PLAIN = AttentionOptions(scale=0.25, sliding_window=None, soft_cap=None)
EVERYTHING = AttentionOptions(scale=0.5, sliding_window=7, soft_cap=2.0)
"""All options at once; tests that use it pass sinks too."""


@dataclass(frozen=True)
class Request:
    """One request of a step: all its queries, keys and values, and how many are fed now.

    Attributes:
      query: float32 ``[length, heads, dim]``. key, value: float32 ``[length, kv_heads, dim]``.
      num_new: tokens fed this step, the last ones; earlier ones are in the pool.
      first_page_offset: position at which its listed pages begin.
    """

    query: NDArray[np.float32]
    key: NDArray[np.float32]
    value: NDArray[np.float32]
    num_new: int
    first_page_offset: int = 0

    @property
    def length(self) -> int:
        return len(self.key)

    @property
    def start(self) -> int:
        return self.length - self.num_new


@dataclass(frozen=True)
class Step:
    """A step's inputs as numpy arrays: padded, poisoned, ready to run."""

    requests: tuple[Request, ...]
    table: KvPageTableV1
    query: NDArray[np.float32]
    key: NDArray[np.float32]
    value: NDArray[np.float32]
    k_pool: NDArray[np.float32]
    v_pool: NDArray[np.float32]

    def rows(self, i: int) -> slice:
        """Flat token rows of request ``i``."""
        return slice(int(self.table.query_start_loc[i]), int(self.table.query_start_loc[i + 1]))


def make_request(
    rng: np.random.Generator,
    length: int,
    num_new: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    first_page_offset: int = 0,
) -> Request:
    query, key, value = (rng.normal(size=(length, n, dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    return Request(query, key, value, num_new, first_page_offset)


def rounded(
    requests: Sequence[Request], dtype: str, arrays: Sequence[str] = ("query", "key", "value")
) -> tuple[Request, ...]:
    """The same requests with every number of ``arrays`` rounded to ``dtype``."""

    def cast(array: NDArray) -> NDArray[np.float32]:
        return np.asarray(jnp.asarray(array, dtype), np.float32)

    return tuple(replace(r, **{name: cast(getattr(r, name)) for name in arrays}) for r in requests)


def make_step(
    requests: Sequence[Request],
    *,
    page_size: int = 4,
    poison: float = np.nan,
    pages: Sequence[int] | None = None,
    num_pages: int = NUM_PAGES,
    seed: int = 0,
) -> Step:
    """Lay requests over shuffled pages (or ``pages``, in order); poison everything nobody owns."""
    order = list(np.random.default_rng(seed).permutation(num_pages) if pages is None else pages)
    kv_heads, dim = requests[0].key.shape[1:]
    k_pool, v_pool = np.full((2, num_pages * page_size, kv_heads, dim), poison, np.float32)
    rows = []
    for request in requests:
        offset = request.first_page_offset
        own = np.array([order.pop(0) for _ in range(-(-(request.length - offset) // page_size))], np.int32)
        rows.append(PageRow(request.start, request.num_new, own, offset))
        for position in range(offset, request.start):
            page, within = own[(position - offset) // page_size], position % page_size
            k_pool[page * page_size + within] = request.key[position]
            v_pool[page * page_size + within] = request.value[position]
    table = pack_page_table(
        rows,
        num_pages=num_pages,
        tokens_per_page=page_size,
        token_rung=TOKEN_RUNG,
        row_rung=ROW_RUNG,
        index_capacity=INDEX_CAPACITY,
    )
    flat = []
    for name in ("query", "key", "value"):
        new = np.concatenate([getattr(request, name)[request.start :] for request in requests])
        padding = np.full((TOKEN_RUNG - len(new), *new.shape[1:]), poison, np.float32)
        flat.append(np.concatenate([new, padding]))
    shape = (num_pages, page_size, kv_heads, dim)
    return Step(tuple(requests), table, *flat, k_pool.reshape(shape), v_pool.reshape(shape))


@cache
def program_of(backend: PagedAttentionBackend, options: AttentionOptions, mesh: Mesh | None, axes: tuple):
    """The product's own call site, jitted once per backend, options and mesh for the whole run."""

    def call(query, key, value, k_pool, v_pool, pages, sinks):
        return paged_attention(
            backend,
            options,
            query=query,
            key=key,
            value=value,
            k_pool=k_pool,
            v_pool=v_pool,
            pages=pages,
            sinks=sinks,
            mesh=mesh,
            head_axes=axes,
        )

    return jax.jit(call, donate_argnames=("k_pool", "v_pool"))


def run(
    backend: PagedAttentionBackend,
    step: Step,
    options: AttentionOptions = PLAIN,
    *,
    sinks: NDArray[np.float32] | None = None,
    dtype: str = "float32",
    activations: str = "float32",
) -> NDArray[np.float32]:
    """Append to pools of ``dtype`` and attend, on one device; float32 ``[T, heads, dim]``."""
    pools = (jnp.asarray(pool, dtype) for pool in (step.k_pool, step.v_pool))
    pages = PageMetadata.from_table(step.table)
    program = program_of(backend, options, None, ())
    tokens = (jnp.asarray(x, activations) for x in (step.query, step.key, step.value))
    output, _, _ = program(*tokens, *pools, pages, sinks)
    assert output.dtype == activations
    return np.asarray(output, np.float32)


def expected(
    request: Request, options: AttentionOptions = PLAIN, sinks: NDArray[np.float32] | None = None
) -> NDArray[np.float64]:
    return dense_attention(
        request.query[request.start :],
        request.key,
        request.value,
        start=request.start,
        scale=options.scale,
        sliding_window=options.sliding_window,
        soft_cap=options.soft_cap,
        sinks=sinks,
    )


def assert_equals_dense(
    output: NDArray,
    step: Step,
    options: AttentionOptions = PLAIN,
    *,
    sinks: NDArray[np.float32] | None = None,
    skip: Sequence[int] = (),
) -> None:
    """Each request's rows within float32 rounding of dense attention; padding rows exactly zero."""
    for i, request in enumerate(step.requests):
        if i in skip:
            continue
        bound = float32_bound(request.query, request.key, request.value, options.scale)
        np.testing.assert_allclose(
            output[step.rows(i)],
            expected(request, options, sinks),
            rtol=0,
            atol=bound,
            err_msg=f"request {i}: length {request.length}, {request.num_new} new",
        )
    assert not output[step.table.num_tokens :].any(), "padding rows must be zeros"


def boundary_lengths(page_size: int) -> list[int]:
    """Lengths one below, at and one above each of the first three page boundaries, and 1."""
    near = {n * page_size + d for n in (1, 2, 3) for d in (-1, 0, 1)}
    return sorted({1, *near} - {0})


def mixed_requests(rng: np.random.Generator, **shape: int) -> list[Request]:
    """Decodes, a whole prompt, a chunk in the middle of a prompt, and a one-token chunk behind them."""
    sizes = [(9, 1), (1, 1), (30, 1), (17, 17), (41, 22), (13, 1), (20, 3)]
    return [make_request(rng, length, num_new, **shape) for length, num_new in sizes]


def run_decode(
    backend: PagedAttentionBackend,
    step: Step,
    options: AttentionOptions,
    sinks: NDArray[np.float32] | None,
) -> NDArray[np.float32]:
    """Append, then ``backend.decode``."""

    @jax.jit
    def call(query, key, value, k_pool, v_pool, pages):
        k_pool, v_pool = backend.append(k_pool, v_pool, key, value, pages.slot_mapping)
        return backend.decode(
            query,
            k_pool,
            v_pool,
            pages,
            scale=options.scale,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
            sinks=None if sinks is None else jnp.asarray(sinks),
        )

    pages = PageMetadata.from_table(step.table)
    return np.asarray(call(step.query, step.key, step.value, step.k_pool, step.v_pool, pages))
