"""Everything that makes equal tokens mean different K/V, as one digest.

For:        starting the prefix cache's hash chain, so that pages are found only where they mean the same.
Not for:    finding any of it out (maxtext_paged), or hashing pages (kv_control).
May import: the standard library, numpy.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, fields

type Identity = bool | int | float | str | bytes | tuple[Identity, ...] | None
"""What a field may hold: values whose encoding is unambiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNamespace:
    """What K/V depends on besides the tokens. Two namespaces that differ in any field share no page.

    Attributes:
      weights: a fingerprint of the weights' content, never only their name.
      weights_revision: counts exchanges of the weights within an engine.
      tokenizer: which tokenizer made the tokens.
      adapter, adapter_scale: an adapter over the weights; None without one.
      tenant: who may share with whom; the engine's owner sets it, never a row.
      rope: everything that positions are rotated by, the regime of a length-dependent scaling included.
      kv_dtype: element type of the pools. quantization: of weights and pools, and the dtype of arithmetic.
      layout: geometry of the pools. sharding: mesh axes and sizes that heads are spread over.
      prompt_embeddings: digest of embeddings that stand for tokens. multimodal_inputs: digests of what
        placeholder tokens stand for, in order.

    >>> base = CacheNamespace(weights="w", tokenizer="t", kv_dtype="float32")
    >>> base.digest() == CacheNamespace(weights="w", tokenizer="t", kv_dtype="float32").digest()
    True
    >>> base.digest() == CacheNamespace(weights="w", tokenizer="t", kv_dtype="float32", tenant="a").digest()
    False
    """

    weights: Identity = None
    weights_revision: int = 0
    tokenizer: Identity = None
    adapter: Identity = None
    adapter_scale: float | None = None
    tenant: str | None = None
    rope: Identity = None
    kv_dtype: str | None = None
    quantization: Identity = None
    layout: Identity = None
    sharding: Identity = None
    prompt_embeddings: Identity = None
    multimodal_inputs: tuple[Identity, ...] = ()

    def digest(self) -> bytes:
        """32 bytes over every field of this class, each tagged with its name and type and prefixed with its length.

        Raises:
          TypeError: a field holds something whose encoding would be ambiguous; it is named.
        """
        whole = hashlib.sha256(b"CacheNamespace/1")
        for field in fields(self):
            try:
                value = encode(getattr(self, field.name))
            except TypeError as error:
                raise TypeError(f"{field.name}: {error}") from None
            whole.update(_framed(b"field", field.name.encode()) + _framed(b"value", value))
        return whole.digest()


def encode(value: Identity) -> bytes:
    """Bytes that no other value has: a type tag, a length, the content; tuples hold the encodings of their items.

    Raises:
      TypeError: the value is of another type.

    >>> encode(None) == encode(""), encode(0) == encode(False), encode(("ab", "c")) == encode(("a", "bc"))
    (False, False, False)
    """
    if value is None:
        return _framed(b"none", b"")
    if isinstance(value, bool):
        return _framed(b"bool", b"1" if value else b"0")
    if isinstance(value, int):
        return _framed(b"int", str(value).encode())
    if isinstance(value, float):
        return _framed(b"float", struct.pack("<d", value))
    if isinstance(value, str):
        return _framed(b"str", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _framed(b"bytes", value)
    if isinstance(value, tuple):
        return _framed(b"tuple", b"".join(map(encode, value)))
    raise TypeError(f"a {type(value).__name__} cannot be part of a namespace")


def _framed(tag: bytes, content: bytes) -> bytes:
    return struct.pack("<I", len(tag)) + tag + struct.pack("<Q", len(content)) + content
