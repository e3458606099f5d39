"""Triton's interpreter as a launcher: our kernels on numpy, without a GPU and without torch.

For:        holding the Triton kernels to the conformance suite on a CPU (``tests/execution/triton_conformance.py``).
Not for:    what only a device or a lowered program shows: aliases, addresses, registers, speed.
May import: numpy, jax, ml_dtypes, triton. The process must have been started with ``TRITON_INTERPRET=1``.

A launch becomes a callback. Arrays written in place are copies, and fresh outputs begin as NaN, so that a read of what
no program wrote shows.
"""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any

import jax
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kv_execution.attention.triton_bridge import GpuTarget, KernelLaunch

assert os.environ.get("TRITON_INTERPRET") == "1", "start the process with TRITON_INTERPRET=1"

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402


class _Storage:
    """What the interpreter wants of a torch storage: to be copied to the CPU, where it is."""

    def __init__(self, array: NDArray) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def cpu(self) -> _Storage:
        return self

    def copy_(self, other: _Storage) -> None:
        assert other.array is self.array


class _Tensor:
    """What the interpreter wants of a torch tensor."""

    def __init__(self, array: NDArray) -> None:
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _Storage:
        return _Storage(self.array)

    def new_empty(self, *size: int, device: str) -> _Tensor:
        return self

    def set_(self, storage: _Storage, *geometry: Any) -> None:
        assert storage.array is self.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)


def _as_float32(handle: Any) -> NDArray:
    """A block's numbers; the interpreter keeps bfloat16 as the bits of integers, and would multiply those."""
    if handle.dtype.scalar == tl.bfloat16:
        return handle.data.view(ml_dtypes.bfloat16).astype(np.float32)
    return handle.data.astype(np.float32)


def _dot(builder: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    product = np.matmul(_as_float32(a), _as_float32(b), dtype=np.float32)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _cast(builder: Any, source: Any, kind: Any) -> Any:
    """To the nearest, as devices round; the interpreter would cut bfloat16 off."""
    if (source.dtype.scalar, kind.scalar) == (tl.float32, tl.bfloat16):
        data = source.data.astype(ml_dtypes.bfloat16).view(np.uint16)
        return interpreter.TensorHandle(data, kind.scalar)
    return _cast_impl(builder, source, kind)


_cast_impl = interpreter.InterpreterBuilder.cast_impl
interpreter.InterpreterBuilder.create_dot = _dot
interpreter.InterpreterBuilder.cast_impl = _cast


_ONE_LAUNCH = threading.Lock()
"""The interpreter puts itself in place of triton.language for a launch; XLA runs launches that are independent, such as
the appends of values and of scales, side by side."""


def launch_interpreted(call: KernelLaunch, target: GpuTarget) -> tuple[jax.Array, ...]:
    """A ``Launcher`` for tests."""
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (*call.in_place, *call.outputs)]
    num_inputs = len(call.inputs)
    kernel, grid, constants, num_outputs = call.kernel, call.grid, dict(call.constants), len(call.outputs)

    def run(*arrays: Any) -> tuple[NDArray, ...]:
        inputs = [np.ascontiguousarray(array) for array in arrays[:num_inputs]]
        written = [np.array(array, copy=True, order="C") for array in arrays[num_inputs:]]
        written += [np.full(one.shape, np.nan, one.dtype) for one in results[len(results) - num_outputs :]]
        with _ONE_LAUNCH, warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            kernel[grid](*map(_Tensor, (*inputs, *written)), **constants)
        return tuple(written)

    return tuple(jax.pure_callback(run, results, *call.inputs, *call.in_place))
