"""A step's small arrays as one buffer: one transfer to the device instead of one for each.

For:        laying a pytree of 4-byte arrays end to end on the host, and taking it apart inside the step's jit.
Not for:    what the arrays mean (metadata.py) or building them (step_inputs.py).
May import: jax.

On a mesh every argument is copied to every device on its own, so twenty small arrays on eight devices are 160
transfers a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

WORD = np.dtype(np.int32)
"""What a buffer is made of; every packed array has elements of this size."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a pytree lies in its buffer. Hashable, so it can be a static argument: one program for each.

    Attributes:
      structure: of the pytree. shapes, dtypes: of its leaves, in order.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def num_words(self) -> int:
        """Length of the buffer."""
        return sum(map(math.prod, self.shapes))

    def unpack(self, buffer: jax.Array) -> Any:
        """The pytree, from its buffer (int32 ``[num_words]``); traced."""
        leaves, start = [], 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            size = math.prod(shape)
            words = lax.slice(buffer, (start,), (start + size,)).reshape(shape)
            leaves.append(words if dtype == WORD.name else lax.bitcast_convert_type(words, jnp.dtype(dtype)))
            start += size
        return jax.tree.unflatten(self.structure, leaves)


def pack(tree: Any) -> tuple[NDArray[np.int32], Packing]:
    """A pytree of numpy arrays as one new buffer, and how it lies there.

    Raises:
      TypeError: a leaf's elements are not 4 bytes wide.

    >>> buffer, packing = pack({"a": np.array([1, 2], np.int32), "b": np.float32(1.0)})
    >>> buffer.tolist(), packing.num_words
    ([1, 2, 1065353216], 3)
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = [np.asarray(leaf) for leaf in leaves]
    for array in arrays:
        if array.dtype.itemsize != WORD.itemsize:
            raise TypeError(f"a packed array has elements of {WORD.itemsize} bytes, not {array.dtype}")
    shapes = tuple(array.shape for array in arrays)
    packing = Packing(structure, shapes, tuple(array.dtype.name for array in arrays))
    buffer = np.empty(packing.num_words, WORD)
    start = 0
    for array in arrays:
        buffer[start : start + array.size] = array.reshape(-1).view(WORD)
        start += array.size
    return buffer, packing
