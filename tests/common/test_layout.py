"""Pool geometry: bytes counted in two ways, and the three sharding regimes."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
from hypothesis import given

from kv_common.dtypes import ELEMENT_BITS
from kv_common.errors import ConfigError, LayoutError
from kv_common.layout import KvStorageLayoutV1
from tests.strategies import layouts

SMALL = KvStorageLayoutV1(2, 3, 4, num_kv_heads=2, head_dim=8, dtype="bfloat16")


def heads_of_each_shard(layout: KvStorageLayoutV1) -> list[set[int]]:
    """KV heads each shard must hold, head by head: shard `s` of `n` owns its n-th of the (repeated) heads."""
    copies = max(layout.head_shards // layout.num_kv_heads, 1)
    ranks = [head for head in range(layout.num_kv_heads) for _ in range(copies)]
    each = len(ranks) // layout.head_shards
    return [set(ranks[s * each : (s + 1) * each]) for s in range(layout.head_shards)]


@pytest.mark.parametrize("dtype", sorted(ELEMENT_BITS))
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8])
def test_the_two_ways_of_counting_bytes_agree_for_every_dtype_regime_and_head_count(dtype, heads):
    regimes = [n for n in range(1, 4 * heads + 1) if heads % n == 0 or n % heads == 0]
    for shards, (tokens, dim) in product(regimes, [(16, 64), (3, 64), (1, 7), (5, 3)]):
        layout = KvStorageLayoutV1(3, 5, tokens, heads, dim, dtype, head_shards=shards, pool_replicas=2)
        assert layout.total_pool_bytes() == layout.device_pool_bytes() * layout.num_devices, layout


@given(layouts())
def test_every_shard_holds_the_heads_its_queries_map_to_and_no_others(layout):
    shards = heads_of_each_shard(layout)
    assert {len(heads) for heads in shards} == {layout.heads_per_shard()}
    for head in range(layout.num_kv_heads):
        holders = [s for s, heads in enumerate(shards) if head in heads]
        assert len(holders) == layout.replication_factor()
        assert holders == list(range(holders[0], holders[0] + len(holders)))  # consecutive ranks share


@given(layouts())
def test_whole_byte_dtypes_cost_elements_times_size_and_their_scales(layout):
    bits = ELEMENT_BITS[layout.dtype]
    if bits % 8 == 0:
        pages, tokens, heads, dim = layout.pool_shape
        scale = 4 if bits <= 8 else 0  # one float32 for each token and head
        one_replica = 2 * layout.num_layers * pages * tokens * heads * (dim * bits // 8 + scale)
        assert layout.total_pool_bytes() == one_replica * layout.pool_replicas


@pytest.mark.parametrize(("shards", "per_shard", "copies"), [(1, 4, 1), (2, 2, 1), (4, 1, 1), (8, 1, 2), (16, 1, 4)])
def test_four_heads_partition_then_stand_alone_then_replicate(shards, per_shard, copies):  # CASES 130, 132
    layout = dataclasses.replace(SMALL, num_kv_heads=4, head_shards=shards)
    assert (layout.heads_per_shard(), layout.replication_factor()) == (per_shard, copies)


@pytest.mark.parametrize(("heads", "shards"), [(6, 4), (2, 3), (3, 2), (8, 12)])
def test_heads_that_do_not_divide_are_refused_with_both_numbers(heads, shards):
    with pytest.raises(LayoutError, match=f"{heads} KV heads cannot be spread over {shards} shards"):
        dataclasses.replace(SMALL, num_kv_heads=heads, head_shards=shards)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(SMALL) if f.name != "dtype"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0])
def test_a_size_that_is_no_whole_number_of_at_least_one_is_refused_by_name(field, value):
    with pytest.raises(LayoutError, match=f"{field}={value}"):
        dataclasses.replace(SMALL, **{field: value})


def test_an_unknown_dtype_is_refused_at_construction():
    with pytest.raises(ConfigError, match="paged_kv_dtype"):
        dataclasses.replace(SMALL, dtype="float64")


def test_a_pool_whose_slots_outgrow_int32_is_refused_with_the_option_to_turn():
    with pytest.raises(LayoutError, match=r"2147483648 slots.*lower `paged_num_pages`"):
        dataclasses.replace(SMALL, num_pages=2**27, tokens_per_page=16)
    assert dataclasses.replace(SMALL, num_pages=2**31 - 1, tokens_per_page=1).num_slots == 2**31 - 1


def test_the_two_replications_multiply():
    replicated = dataclasses.replace(SMALL, head_shards=4, pool_replicas=3)
    assert replicated.total_pool_bytes() == SMALL.total_pool_bytes() * 2 * 3
    assert replicated.num_devices == 12
