"""Native matrix products inside MaxText's dense layers, bound per instance.

MaxText's ``DenseGeneral`` looks its dot-general up on the instance (``quant_dot_general``: the seam through which
quantised products come in). A bound layer finds ``RowsProduct`` there: a few rows go to the C++ kernel, everything else
to ``lax.dot_general`` exactly as MaxText would call it. Casts, biases, shapes and parameter paths stay MaxText's.

For:        deciding which layers may be bound, and binding them.
Not for:    the kernel or when it wins (kv_execution/products.py); experts and tied heads, whose products are others.
May import: kv_common, kv_execution, jax, flax, maxtext.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from maxtext.common.common_types import ShardMode
from maxtext.layers.linears import DenseGeneral

from kv_common.errors import UnsupportedError
from kv_execution.products import ProductChoice, dense_product, served, trailing_axes
from maxtext_paged.binding import StepBinding

_ATTRIBUTE = "paged_product"


class RowsProduct(nnx.Module):
    """A dot-general with the call signature MaxText gives a quantised one.

    Attributes:
      step: the running step: rows that only fill up a rung cost nothing.
      kernel: the layer's own parameter: MaxText hands over its values cast to the compute dtype, and a kernel that is
        held in bfloat16 is better read as it is.
    """

    def __init__(self, max_rows: int, layer: DenseGeneral, step: StepBinding) -> None:
        self.max_rows = max_rows
        self.step = step
        self.matmul_precision = layer.matmul_precision
        self.kernel = layer.kernel

    def __call__(self, inputs: jax.Array, kernel: jax.Array, dimensions: Any, **_: Any) -> jax.Array:
        """``lax.dot_general(inputs, kernel, dimensions)``; ``precision`` and ``mutable`` are for quantised ones."""
        (axes, kernel_axes), batch = dimensions
        plain = trailing_axes(axes, inputs.ndim) and tuple(kernel_axes) == tuple(range(len(axes))) and not any(batch)
        if plain and served(inputs, kernel, len(axes), self.max_rows):
            held = self.kernel.get_value()
            live = self.step.num_live.get_value()
            return dense_product(inputs, held if held.dtype == jnp.bfloat16 else kernel, len(axes), num_live=live)
        return lax.dot_general(inputs, kernel, dimensions, precision=lax.Precision(self.matmul_precision))


def refusal(layer: DenseGeneral) -> str | None:
    """Why a dense layer keeps XLA's product; None when it may be bound."""
    if type(layer) is not DenseGeneral:  # LoRA and other providers make classes of their own
        return f"it is a {type(layer).__name__}"
    if layer.quant is not None or layer.quant_dot_general is not None:
        return "it is quantised"
    if layer.kernel_scale is not None or layer.weight_quant is not None:
        return "its weights are scaled"
    if layer.matmul_precision != "default":
        return f"matmul_precision={getattr(layer.matmul_precision, 'value', layer.matmul_precision)}"
    if layer.shard_mode != ShardMode.AUTO:
        return "its sharding is explicit"
    if layer.parameter_memory_host_offload:
        return "its weights are on the host"
    return None


@dataclass(frozen=True, slots=True)
class BoundProducts:
    """What became of a model's dense layers.

    Attributes:
      choice: which products were wanted natively, and why.
      native: paths of the layers whose products of few rows are the kernel's.
      others: path of every other dense layer to why it keeps XLA's; empty where nothing was wanted.
    """

    choice: ProductChoice
    native: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()

    def describe(self) -> str:
        """For a report: one line."""
        if not self.choice.max_rows:
            return self.choice.describe()
        reasons = ", ".join(dict.fromkeys(reason for _, reason in self.others))
        if not self.native:
            return f"XLA's (no dense layer can be bound{': ' if reasons else ''}{reasons})"
        line = f"{self.choice.describe()}; {len(self.native)} of {len(self.native) + len(self.others)} dense layers"
        return f"{line}, not {self.others[0][0]} and the like: {reasons}" if self.others else line


def bind_products(model: nnx.Module, choice: ProductChoice, step: StepBinding) -> BoundProducts:
    """Exchange the product of every layer that may be bound, in place.

    Args:
      step: the one that the model's attentions share. Every dense layer has the step's tokens as rows, packed first,
        and the head the sampled ones.

    Raises:
      UnsupportedError: native products are required, and a dense layer cannot have them.
    """
    if not choice.max_rows:
        return BoundProducts(choice)
    layers = [
        (".".join(map(str, path)), layer) for path, layer in nnx.iter_modules(model) if isinstance(layer, DenseGeneral)
    ]
    reasons = [(path, refusal(layer)) for path, layer in layers]
    others = tuple((path, reason) for path, reason in reasons if reason is not None)
    if choice.required and others:
        path, why = others[0]
        option = "paged_weight_dtype=bfloat16" if choice.half_weights else "paged_native_products=on"
        raise UnsupportedError(f"{option}: {path} keeps XLA's product, {why}; auto binds the others")
    for (_, layer), (_, reason) in zip(layers, reasons, strict=True):
        if reason is None:
            setattr(layer, _ATTRIBUTE, RowsProduct(choice.max_rows, layer, step))
            layer._quant_dot_general_name = _ATTRIBUTE
    return BoundProducts(choice, tuple(path for path, reason in reasons if reason is None), others)
