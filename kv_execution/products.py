"""Matrix products of a step's rows with a weight matrix: our C++ kernel where it wins, XLA's elsewhere.

A decode step on a CPU is bound by reading weights. XLA:CPU's own products read them at a fraction of the bandwidth
once there is more than one row; the native kernel reads each weight once, whatever the rows. A prefill step is bound
by arithmetic, where both reach what the cores give; the native kernel computes a rung's real rows only, and gives a
row the same bits there as in a decode step. The choice is static: by the rung's rows, the element types and the
devices, all known when a step is traced.

For:        deciding which products run natively, saying why, and calling one.
Not for:    the kernel (native/csrc/products.cc), or where a model's products are (maxtext_paged/products.py).
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from kv_common.errors import ConfigError, UnsupportedError
from kv_execution.native.library import PRODUCT_TARGET, native_available, native_library

_log = logging.getLogger(__name__)
_announced: set[str] = set()

MEASURED_MAX_ROWS = {"x86_64_v4": 1024}
"""By instruction set: rows up to which the native kernel was no slower than XLA:CPU's product (docs/adr/0005)."""
MEASURED_MAX_FEW_ROWS = 32
"""The same for the others, where products of many rows were not measured."""

_BEST = -1
_WEIGHTS = (jnp.float32, jnp.bfloat16)


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """Which of a model's matrix products run natively, and why.

    Attributes:
      max_rows: the most rows of a native product; 0: every product is XLA's.
      reason: one line. required: a layer without native products is an error.
      half_weights: hold the weights of layers with native products in bfloat16; arithmetic stays float32.
    """

    max_rows: int
    reason: str
    required: bool = False
    half_weights: bool = False

    def describe(self) -> str:
        """For a report: which products run, and why."""
        if not self.max_rows:
            return f"XLA's ({self.reason})"
        held = ", weights held in bfloat16" if self.half_weights else ""
        return f"native up to {self.max_rows} rows, XLA's above{held} ({self.reason})"


XLA_PRODUCTS = ProductChoice(0, "nobody asked for native products")


def choose_products(
    setting: str,
    *,
    platform: str,
    num_devices: int,
    dtype: str,
    native_switch: int | None = None,
    weight_dtype: str = "auto",
) -> ProductChoice:
    """Choose for a whole model, announcing each distinct choice once at INFO.

    Args:
      setting: ``paged_native_products``: ``"auto"``, ``"on"`` (native or an error) or ``"off"``.
      platform: jax's platform name. num_devices: of the mesh: XLA would gather a custom call's operands.
      dtype: in which the model computes. native_switch: ``paged_attention_native``; 0 wins over everything.
      weight_dtype: ``paged_weight_dtype``: ``"auto"`` or ``"bfloat16"``, which native products alone can read as it is.

    Raises:
      UnsupportedError: ``"on"`` or ``"bfloat16"``, and native products cannot run here.

    >>> choose_products("auto", platform="cuda", num_devices=1, dtype="float32").describe()
    "XLA's (native products run on CPUs, not on cuda)"
    """
    if setting not in ("auto", "on", "off"):
        raise ConfigError(f"paged_native_products={setting!r}: choose auto, on or off")
    declined = _declined(platform, num_devices, dtype)
    if native_switch == 0:
        choice = ProductChoice(0, "paged_attention_native=0 forbids native kernels")
    elif setting == "off":
        choice = ProductChoice(0, "asked for by paged_native_products=off")
    elif declined is None:
        asked = "the default on CPUs" if setting == "auto" else "asked for by paged_native_products=on"
        best = native_library().best
        max_rows = MEASURED_MAX_ROWS.get(best, MEASURED_MAX_FEW_ROWS)
        reason = f"{asked}; C++ kernels for {best}"
        half = weight_dtype == "bfloat16"
        choice = ProductChoice(max_rows, reason, required=setting == "on" or half, half_weights=half)
    elif setting == "on":
        raise UnsupportedError(f"paged_native_products=on: {declined}; paged_native_products=auto takes XLA's then")
    else:
        choice = ProductChoice(0, declined)
    if weight_dtype != "auto" and not choice.max_rows:
        raise UnsupportedError(
            f"paged_weight_dtype={weight_dtype}: only native products read such weights, and here {choice.reason}; "
            "set paged_weight_dtype=auto"
        )
    if choice.describe() not in _announced:
        _announced.add(choice.describe())
        _log.info("matrix products: %s", choice.describe())
    return choice


def _declined(platform: str, num_devices: int, dtype: str) -> str | None:
    """Why no product of a model can be native; None when they can."""
    if platform != "cpu":
        return f"native products run on CPUs, not on {platform}"
    if num_devices > 1:
        return f"weights on {num_devices} devices would be gathered for a custom call"
    if dtype != "float32":
        return f"native products are float32, dtype={dtype}"
    return native_available()


def served(x: jax.Array, kernel: jax.Array, contracted: int, max_rows: int) -> bool:
    """Whether a product of these operands is native: float32, and no more rows. See ``dense_product``."""
    num_rows = math.prod(x.shape[: x.ndim - contracted])
    return x.dtype == jnp.float32 and kernel.dtype == jnp.float32 and 1 <= num_rows <= max_rows


def dense_product(
    x: jax.Array, kernel: jax.Array, contracted: int, *, num_live: jax.Array | int | None = None
) -> jax.Array:
    """``x [..., *k]`` times ``kernel [*k, *n]`` over the ``contracted`` axes ``*k``, natively: ``[..., *n]``.

    Args:
      num_live: see ``native_product``.
    """
    batch, depth = x.shape[: x.ndim - contracted], kernel.shape[:contracted]
    columns = kernel.shape[contracted:]
    if x.shape[x.ndim - contracted :] != depth:
        raise ValueError(f"the last {contracted} axes of {x.shape} are not the first of {kernel.shape}")
    flat = native_product(x.reshape(math.prod(batch), -1), kernel.reshape(math.prod(depth), -1), num_live=num_live)
    return flat.reshape(*batch, *columns)


def native_product(
    x: jax.Array,
    weights: jax.Array,
    *,
    num_live: jax.Array | int | None = None,
    instruction_set: str | None = None,
) -> jax.Array:
    """``x [rows, depth]`` times ``weights [depth, columns]``: float32, summed in float32 in the order of the depth.

    A row alone gives bit for bit what it gives beside others, on any number of threads. bfloat16 weights are widened as
    they are read.

    Args:
      num_live: int32 ``[]``, rows that are computed; those behind them are padding and become zeros. None: all.
      instruction_set: one of ``native_library().builds``; None takes the best this machine runs.

    Raises:
      UnsupportedError: the library does not run here, or the operands are of other types.
    """
    if x.dtype != jnp.float32 or weights.dtype not in _WEIGHTS:
        raise UnsupportedError(
            f"native products are float32 times float32 or bfloat16, not {x.dtype} x {weights.dtype}"
        )
    builds = native_library().builds
    if instruction_set is not None and instruction_set not in builds:
        raise ConfigError(f"instruction_set={instruction_set!r}: this machine runs {', '.join(builds)}")
    build = _BEST if instruction_set is None else builds[instruction_set]
    result = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1]), jnp.float32)
    live = jnp.asarray(x.shape[0] if num_live is None else num_live, jnp.int32)
    return jax.ffi.ffi_call(PRODUCT_TARGET, result)(x, weights, live, build=np.int64(build))


def num_native_products() -> int:
    """Products that the kernel has computed in this process so far."""
    return 0 if native_available() is not None else native_library().counts().products


def trailing_axes(axes: Sequence[int], ndim: int) -> bool:
    """Whether ``axes`` are an array's last ones, in order: what ``dense_product`` contracts.

    >>> trailing_axes((1, 2), 3), trailing_axes((0,), 2)
    (True, False)
    """
    return tuple(axes) == tuple(range(ndim - len(axes), ndim))
