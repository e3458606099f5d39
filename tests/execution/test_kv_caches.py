"""A caller's KV caches are pools of ours, or are refused by the axis that differs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from kv_common.errors import UnsupportedError
from kv_common.layout import KvStorageLayoutV1
from kv_execution.kv_caches import in_layer_order, layout_of_kv_caches

LAYOUT = KvStorageLayoutV1(2, 1, 8, num_kv_heads=4, head_dim=16, dtype="float32")
NHD = (30, 8, 4, 16)


def pair(k: tuple[int, ...] = NHD, v: tuple[int, ...] | None = None, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    return jnp.zeros(k, dtype), jnp.zeros(k if v is None else v, dtype)


def test_nhd_pairs_are_the_pool_with_their_own_page_count():
    assert layout_of_kv_caches([pair(), list(pair())], LAYOUT) == KvStorageLayoutV1(
        2, 30, 8, num_kv_heads=4, head_dim=16, dtype="float32"
    )


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (jnp.zeros((2, *NHD)), r"KV cache 1 is one array \(2, 30, 8, 4, 16\): its axis 0 stacks K and V"),
        (jnp.zeros((30, 2, *NHD[1:])), "axis 1 stacks K and V"),
        (jnp.zeros((30, 8, 8, 1, 16)), "head axis .axis 2. interleaves K and V"),
        (jnp.zeros((30, 8, 8, 16)), "head axis .axis 2. interleaves K and V"),
        (pair((30, 4, 8, 16)), r"KV cache 1, k: .* heads before tokens \(HND\): exchange axes 1 and 2"),
        (pair((30, 16, 4, 16)), r"axis 1 \(block_size\) of \(30, 16, 4, 16\) is 16, the model's is 8"),
        (pair((30, 8, 2, 16)), r"axis 2 \(kv_heads\)"),
        (pair((30, 8, 4, 128)), r"axis 3 \(head_dim\)"),
        (pair((29, 8, 4, 16)), r"axis 0 \(num_blocks\) of .* is 29, the caches before it have 30"),
        (pair(NHD, (31, 8, 4, 16)), r"KV cache 1, v: axis 0 \(num_blocks\)"),
        (pair(NHD[1:]), "has 3 axes"),
        (pair(dtype=jnp.bfloat16), "dtype bfloat16, the model's pools are float32"),
        ((*pair(), jnp.zeros(1)), r"KV cache 1 is a tuple: .*\(k_cache, v_cache\)"),
        (None, "KV cache 1 is a NoneType"),
    ],
)
def test_another_layout_is_refused_by_its_axis(second: Any, message: str):
    with pytest.raises(UnsupportedError, match=message):
        layout_of_kv_caches([pair(), second], LAYOUT)


def test_another_number_of_layers_is_refused():
    with pytest.raises(UnsupportedError, match="1 KV caches for 2 attention layers"):
        layout_of_kv_caches([pair()], LAYOUT)


@pytest.mark.parametrize("form", [dict, lambda pairs: tuple(pairs.items())])
def test_caches_in_the_caller_s_order_find_their_layers(form: Any):
    assert in_layer_order(form({"layer.1": 0, "layer.2": 1, "layer.0": 2}), 3) == (2, 0, 1)
    assert in_layer_order(form({f"model.layers.{i}.self_attn": i for i in range(12)}), 12) == tuple(range(12))
    assert in_layer_order(None, 3) == (0, 1, 2)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"layer.0": 0}, r"each of layers 0\.\.1 needs a cache of its own"),
        ({"layer.0": 0, "layer.1": 0}, "cache of its own"),
        ({"layer.0": 0, "layer.2": 1}, "cache of its own"),
        ({"layer.0": 0, "layer.1": 2}, "cache of its own"),
        ({"layer": 0, "layer.1": 1}, "'layer': one number is needed"),
        ({"a.0.b.1": 0, "layer.1": 1}, "one number is needed"),
    ],
)
def test_shared_or_missing_caches_are_refused(names: dict[str, int], message: str):
    with pytest.raises(UnsupportedError, match=message):
        in_layer_order(names, 2)
