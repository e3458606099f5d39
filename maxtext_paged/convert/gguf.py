"""A GGUF file as metadata and named float32 tensors.

For:        reading any GGUF file, quantised or not, and naming what in it cannot be read.
Not for:    knowing what an architecture's tensors mean (llama.py) or where they go (orbax.py).
May import: numpy, gguf, kv_common.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from kv_common.errors import ConfigError, UnsupportedError


class GgufFile:
    """One open GGUF file; the data stays on disk (memory-mapped) until a tensor is asked for.

    Attributes:
      path: the file.
      metadata: every key of the header, as Python values (str, int, float, bool, list).
    """

    path: Path
    metadata: dict[str, Any]

    def __init__(self, path: Path | str) -> None:
        """Open ``path``.

        Raises:
          ConfigError: it does not exist, or is not a whole, readable GGUF file.
        """
        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigError(f"{self.path}: no such file; give the path of a .gguf file")
        try:
            reader = GGUFReader(self.path)
            self.metadata = {field.name: field.contents() for field in reader.fields.values()}
        except (ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError) as error:
            raise ConfigError(f"{self.path}: not a whole, readable GGUF file ({error})") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    @property
    def tensor_names(self) -> frozenset[str]:
        """Names of all tensors in the file."""
        return frozenset(self._tensors)

    def require(self, key: str) -> Any:
        """Metadata value of ``key``.

        Raises:
          UnsupportedError: the file does not state it.
        """
        if key not in self.metadata:
            raise UnsupportedError(f"{self.path.name}: the header does not state {key!r}")
        return self.metadata[key]

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """One tensor, dequantised.

        Args:
          shape: the shape it must have, in numpy order (``[out, in]`` for a projection), which is
            the reverse of the order GGUF states.

        Returns:
          float32 ``shape``.

        Raises:
          UnsupportedError: the tensor is missing, has another shape, is stored in a type that the
            ``gguf`` package cannot dequantise, or holds a value that is not finite.
        """
        if name not in self._tensors:
            raise UnsupportedError(f"{self.path.name}: tensor {name!r} is missing")
        tensor = self._tensors[name]
        stored = tuple(int(size) for size in reversed(tensor.shape))
        if stored != shape:
            raise UnsupportedError(
                f"{self.path.name}: tensor {name!r} has shape {list(stored)}, the header implies {list(shape)}"
            )
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedError(
                f"{self.path.name}: tensor {name!r} is stored as {tensor.tensor_type.name}, "
                "which cannot be dequantised here; convert an F32, F16, BF16, Q8_0 or Q4/Q5/Q6 file instead"
            ) from error
        if values.dtype != np.float32:
            raise UnsupportedError(
                f"{self.path.name}: tensor {name!r} is stored as {tensor.tensor_type.name}, not as weights"
            )
        values = values.reshape(shape)
        if not np.isfinite(values).all():
            raise UnsupportedError(f"{self.path.name}: tensor {name!r} holds NaN or infinity; the file is damaged")
        return values
