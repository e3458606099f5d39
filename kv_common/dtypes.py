"""Element sizes of KV pools, tabulated, because NumPy knows neither bfloat16 nor fp8 nor int4.

For:        bytes of a pool, before any array exists.
Not for:    creating arrays or converting values.
May import: the standard library, numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kv_common.errors import ConfigError

ELEMENT_BITS: Mapping[str, int] = MappingProxyType(
    {
        "float32": 32,
        "float16": 16,
        "bfloat16": 16,
        "float8_e4m3fn": 8,
        "float8_e5m2": 8,
        "int8": 8,
        "int4": 4,
    }
)

SCALE_BITS = 32
"""Bits of a scale (float32), of which a dtype of 8 bits or fewer needs one for each token and head, in K and in V."""


def element_bits(dtype: str) -> int:
    """Bits of one element of ``dtype``.

    >>> element_bits("bfloat16"), element_bits("int4")
    (16, 4)

    Raises:
      ConfigError: the dtype is not one a KV pool may have.
    """
    try:
        return ELEMENT_BITS[dtype]
    except KeyError:
        raise ConfigError(
            f"paged_kv_dtype={dtype!r} is not a KV dtype: choose one of {', '.join(ELEMENT_BITS)}"
        ) from None


def bytes_of(num_elements: int, dtype: str) -> int:
    """Bytes of ``num_elements`` packed elements, rounded up to whole bytes.

    >>> bytes_of(3, "int4"), bytes_of(3, "float32")
    (2, 12)
    """
    return -(-num_elements * element_bits(dtype) // 8)


def scale_bits(dtype: str) -> int:
    """Bits of the scale that one head of one token needs beside its elements; 0 where it needs none.

    >>> scale_bits("bfloat16"), scale_bits("int8")
    (0, 32)
    """
    return SCALE_BITS if element_bits(dtype) <= 8 else 0


def described(dtype: str) -> str:
    """A dtype as it is stored, in words.

    >>> described("int8")
    'int8 with a float32 scale per token and head'
    """
    return f"{dtype} with a float32 scale per token and head" if scale_bits(dtype) else dtype
