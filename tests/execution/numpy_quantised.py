"""Quantised K and V in numpy: what a quantised pool must hold, and what it must read as.

For:        judging values and scales bit for bit.
Not for:    attention (numpy_model) or pages; it shares no code with ``kv_execution.quantised``.
May import: numpy, ml_dtypes.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
DTYPES = tuple(LARGEST)
UNIT_ROUNDOFF = {"int8": 0.5 / 127, "float8_e4m3fn": 16 / 448}
"""Most that a row's number moves when it is stored, as a share of the row's largest magnitude."""


def stored(rows: NDArray[np.float32], dtype: str) -> tuple[NDArray, NDArray[np.float32]]:
    """Values ``[..., head_dim]`` (int8, or uint8 bits of fp8) and scales ``[..., 1]`` of rows ``[..., head_dim]``."""
    finite = np.isfinite(rows).all(-1, keepdims=True)
    rows = np.where(finite, rows, 0)
    amax = np.abs(rows).max(-1, keepdims=True)
    live = amax >= 2.0**-100
    scales = np.where(live, amax * np.float32(1 / LARGEST[dtype]), np.float32(0))
    scaled = np.zeros_like(rows)
    np.multiply(rows, np.float32(1) / np.where(live, scales, 1), out=scaled, where=np.broadcast_to(live, rows.shape))
    scaled = np.clip(scaled, -LARGEST[dtype], LARGEST[dtype])
    values = np.rint(scaled).astype(np.int8) if dtype == "int8" else scaled.astype(ml_dtypes.float8_e4m3fn)
    return values.view(np.int8 if dtype == "int8" else np.uint8), np.where(finite, scales, np.float32(np.nan))


def numbers(values: NDArray, scales: NDArray[np.float32]) -> NDArray[np.float64]:
    """What stored rows stand for."""
    if values.dtype == np.uint8:
        values = values.view(ml_dtypes.float8_e4m3fn)
    return values.astype(np.float64) * scales


def read_back(rows: NDArray[np.float32], dtype: str) -> NDArray[np.float64]:
    """Rows as they read once they were stored."""
    return numbers(*stored(rows, dtype))
