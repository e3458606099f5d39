"""No two namespaces that differ share a digest, whatever the difference is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_common.namespace import CacheNamespace, encode

OTHERS: dict[str, list[Any]] = {
    "weights": ["v", b"w", None],
    "weights_revision": [1, 2],
    "tokenizer": ["u", None],
    "adapter": ["S", ""],
    "adapter_scale": [0.5, 1.0],
    "tenant": ["S", ""],
    "rope": [("default", 10_000.0), ("yarn", 10_000.0)],
    "kv_dtype": ["bfloat16", None],
    "quantization": ["int8"],
    "layout": [(16, 2, 64), (32, 2, 64)],
    "sharding": [("tensor", 2), ("tensor", 4)],
    "prompt_embeddings": [b"soft prompt"],
    "multimodal_inputs": [(b"image 1",), (b"image 2",), (b"image 1", b"image 2")],
}
"""Values per field that differ from the default: a new field must be given some."""

BASE = CacheNamespace(weights="w", tokenizer="t", kv_dtype="float32")


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CacheNamespace)])
def test_every_field_separates(name):  # generated: a field that the digest leaves out fails here
    assert OTHERS[name], f"{name}: say which values differ"
    digests = {dataclasses.replace(BASE, **{name: value}).digest() for value in OTHERS[name]}
    assert len(digests) == len(OTHERS[name])
    assert BASE.digest() not in digests


def test_equal_namespaces_have_equal_digests():
    assert BASE.digest() == CacheNamespace(weights="w", tokenizer="t", kv_dtype="float32").digest()
    assert len(BASE.digest()) == 32


def test_an_adapter_and_a_tenant_of_one_name_do_not_meet():  # CASES 34
    assert CacheNamespace(adapter="S").digest() != CacheNamespace(tenant="S").digest()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab", "c"), ("a", "bc")),
        (None, ""),
        (0, False),
        (1, 1.0),
        ("1", 1),
        ((), None),
        ((("a",), "b"), ("a", ("b",))),
    ],
)
def test_values_that_look_alike_are_told_apart(one, other):  # CASES 35
    assert encode(one) != encode(other)
    assert CacheNamespace(layout=one).digest() != CacheNamespace(layout=other).digest()


def test_a_scaled_adapter_is_another_than_the_whole_one():  # CASES 32
    variants = [{}, {"adapter": "A"}, {"adapter": "B"}, {"adapter": "A", "adapter_scale": 0.5}]
    assert len({CacheNamespace(**variant).digest() for variant in variants}) == 4


def test_a_value_that_cannot_be_encoded_is_refused_by_its_field():
    with pytest.raises(TypeError, match="layout: a list cannot be part of a namespace"):
        CacheNamespace(layout=[1]).digest()  # type: ignore[arg-type]


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.binary(max_size=4)
)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=8)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


@given(values, values)
def test_encodings_are_equal_exactly_where_the_values_are(one, other):
    assert (encode(one) == encode(other)) == same(one, other)
