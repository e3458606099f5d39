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
