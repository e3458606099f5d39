"""Whole paged steps over quantised pools: built by the numpy model, run through the product's call site.

For:        tests that need a quantised pool with known contents and the dense answer to what it holds.
Not for:    the rule (test_quantised_rule) or promises about a backend (test_quantised_pools).
May import: numpy, jax, kv_execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from kv_execution.attention.api import AttentionOptions, PagedAttentionBackend
from kv_execution.metadata import PageMetadata
from kv_execution.quantised import QuantisedPool
from tests.execution.numpy_quantised import read_back, stored
from tests.execution.paged_steps import PLAIN, Request, Step, program_of


def pool_of(numbers: NDArray[np.float32], dtype: str) -> QuantisedPool:
    """A quantised pool of the numbers of a float32 one; what nobody owns (NaN) has NaN for a scale."""
    values, scales = stored(numbers, dtype)
    return QuantisedPool(jnp.asarray(values), jnp.asarray(scales))


def as_read(step: Step, dtype: str) -> Step:
    """The step with each request's K and V as they read once stored: what dense attention has to be given."""
    requests = [
        replace(r, key=read_back(r.key, dtype), value=read_back(r.value, dtype))  # type: ignore[arg-type]
        for r in step.requests
    ]
    return replace(step, requests=tuple(requests))


def run_quantised(
    backend: PagedAttentionBackend,
    step: Step,
    dtype: str,
    options: AttentionOptions = PLAIN,
    *,
    sinks: Any = None,
    mesh: Mesh | None = None,
    axes: tuple[str, ...] = (),
    activations: str = "float32",
) -> tuple[NDArray[np.float32], QuantisedPool, QuantisedPool]:
    """Append to pools of ``dtype`` and attend: output, float32 ``[T, heads, dim]``, and the pools."""
    program = program_of(backend, options, mesh, axes)
    pools = pool_of(step.k_pool, dtype), pool_of(step.v_pool, dtype)
    tokens = (jnp.asarray(x, activations) for x in (step.query, step.key, step.value))
    output, k_pool, v_pool = program(*tokens, *pools, PageMetadata.from_table(step.table), sinks)
    assert output.dtype == activations
    return np.asarray(output, np.float32), k_pool, v_pool


def written(backend: PagedAttentionBackend, request: Request, chunks: Sequence[int], dtype: str) -> QuantisedPool:
    """The K pool, two pages of 16 tokens, after a request's tokens were appended in these chunks."""
    shape = (2, 16, *request.key.shape[1:])
    pools = pool_of(np.zeros(shape, np.float32), dtype), pool_of(np.zeros(shape, np.float32), dtype)
    append, start = jax.jit(backend.append), 0
    for chunk in chunks:
        rung = 1 if chunk == 1 else 32  # chunks are padded, as steps are, with rows whose slot is past the end
        slots = np.append(np.arange(start, start + chunk), np.full(rung - chunk, 32)).astype(np.int32)
        key, value = (np.resize(x[start : start + chunk], (rung, *x.shape[1:])) for x in (request.key, request.value))
        pools = append(*pools, key, value, slots)
        start += chunk
    return pools[0]
