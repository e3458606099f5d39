"""Dense attention in float64 numpy, from each request's contiguous K and V: what every backend must equal.

For:        the expected output of any paged step, and how far float32 arithmetic may be from it.
Not for:    pages, slots or jax: it shares no code and no data structure with what it judges.
May import: numpy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def dense_attention(
    query: NDArray,
    key: NDArray,
    value: NDArray,
    *,
    start: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: NDArray | None,
) -> NDArray[np.float64]:
    """Causal attention of one request's queries.

    Args:
      query: ``[n, heads, dim]``, the tokens at positions ``start .. start + n - 1``.
      key, value: ``[length, kv_heads, dim]``, positions ``0 .. length - 1``.
      sinks: ``[heads]`` or None.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    group = query.shape[1] // key.shape[1]
    output = np.zeros(query.shape)
    for i in range(query.shape[0]):
        position = start + i
        oldest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        for head in range(query.shape[1]):
            keys = key[oldest : position + 1, head // group]
            logits = scale * (keys @ query[i, head])
            if soft_cap is not None:
                logits = soft_cap * np.tanh(logits / soft_cap)
            if sinks is not None:
                logits = np.append(logits, float(sinks[head]))
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            output[i, head] = weights[: len(keys)] @ value[oldest : position + 1, head // group]
    return output


def float32_bound(query: NDArray, key: NDArray, value: NDArray, scale: float) -> float:
    """How far a float32 backend may be from ``dense_attention``, absolute.

    A score is a sum of products; computed in a few partial sums its error is about
    ``4 u * scale * sum |q k|`` with ``u = 2**-24``. An error ``d`` in each score changes the weights
    by at most ``2 d`` in total, hence the output by ``2 d max|v|``. Exponentials, the two sums over keys
    and the division add about ``8 u max|v|``. A cap only shrinks score errors; a sink only adds weight.
    """
    magnitude = scale * float(np.einsum("qhd,kld->qhkl", np.abs(query), np.abs(key)).max())
    return UNIT_ROUNDOFF["float32"] * float(np.abs(value).max()) * (2 * 4 * magnitude + 8)


def storage_bound(query: NDArray, key: NDArray, value: NDArray, scale: float, dtype: str) -> float:
    """How much rounding K and V to ``dtype`` in the pool may change the output, absolute.

    Each key's rounding moves its score by at most ``u * scale * sum |q k|`` with ``dtype``'s ``u``;
    each value's moves the output by at most ``u max|v|``.
    """
    magnitude = scale * float(np.einsum("qhd,kld->qhkl", np.abs(query), np.abs(key)).max())
    unit = UNIT_ROUNDOFF[dtype]
    return float(np.abs(value).max()) * (np.expm1(2 * unit * magnitude) + unit)
