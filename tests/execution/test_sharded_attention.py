"""The attention call under shard_map: MaxText's twelve axes, every regime of heads, arguments built once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kv_common.errors import LayoutError
from kv_common.layout import KvStorageLayoutV1
from kv_execution.attention.api import PagedAttentionBackend, paged_attention
from kv_execution.attention.native import NativeBackend
from kv_execution.attention.reference import ReferenceBackend
from kv_execution.metadata import PageMetadata
from kv_execution.native.library import native_available
from kv_execution.sharding import kv_pool_sharding
from tests.execution.paged_steps import (
    EVERYTHING,
    PLAIN,
    Step,
    assert_equals_dense,
    make_step,
    mixed_requests,
    program_of,
)
from tests.hlo import collectives_inside, collectives_touching

pytestmark = pytest.mark.multi_device

TWELVE_AXES = (
    "diloco",
    "data",
    "stage",
    "fsdp",
    "fsdp_transpose",
    "context",
    "context_usp_ulysses",
    "context_autoregressive",
    "tensor",
    "tensor_sequence",
    "expert",
    "autoregressive",
)
"""MaxText's base.yml; tests/execution/test_sharding.py reads the file itself."""

not_built = native_available()
BACKENDS = [
    pytest.param(ReferenceBackend, id="reference"),
    pytest.param(NativeBackend, id="native", marks=pytest.mark.skipif(not_built is not None, reason=str(not_built))),
]


def mesh_of(sizes: dict[str, int], names: tuple[str, ...] = TWELVE_AXES) -> Mesh:
    shape = [sizes.get(name, 1) for name in names]
    return jax.make_mesh(
        shape, names, axis_types=(AxisType.Auto,) * len(names), devices=jax.devices()[: np.prod(shape)]
    )


def sharded_pools(step: Step, mesh: Mesh, axes: tuple[str, ...], copies: int = 1) -> list[jax.Array]:
    """The step's pools as the layout lays them out: each head ``copies`` times in a row."""
    pages, tokens, heads, dim = step.k_pool.shape
    shards = int(np.prod([mesh.shape[axis] for axis in axes]))
    layout = KvStorageLayoutV1(
        1, pages, tokens, heads, dim, "float32", head_shards=shards, pool_replicas=mesh.size // shards
    )
    assert layout.replication_factor() == copies
    sharding = kv_pool_sharding(mesh, layout, axes)
    return [jax.device_put(np.repeat(pool, copies, axis=2), sharding) for pool in (step.k_pool, step.v_pool)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ({"tensor": 2, "fsdp": 2, "data": 2}, ("tensor",)),
        ({"tensor": 2, "tensor_sequence": 2, "expert": 2}, ("tensor", "tensor_sequence")),
        ({"autoregressive": 4, "fsdp_transpose": 2}, ("autoregressive",)),
    ],
    ids=["tensor", "two", "autoregressive"],
)
def test_on_maxtexts_twelve_axes_only_those_of_heads_are_manual(
    backend: type, sizes: dict[str, int], axes: tuple[str, ...]
) -> None:
    """Tokens come sharded over a data axis, as MaxText's activations do: a wrong manual set cuts them in pieces."""
    rng = np.random.default_rng(3)
    mesh, step = mesh_of(sizes), make_step(mixed_requests(rng, heads=8, kv_heads=4))
    sinks = rng.normal(size=8).astype(np.float32)
    data_axis = next(axis for axis in sizes if axis not in axes)
    tokens = NamedSharding(mesh, PartitionSpec(data_axis, axes, None))
    fed = [jax.device_put(x, tokens) for x in (step.query, step.key, step.value)]
    program = program_of(backend(), EVERYTHING, mesh, axes)
    pools, pages = sharded_pools(step, mesh, axes), PageMetadata.from_table(step.table)
    jaxpr = str(jax.make_jaxpr(program)(*fed, *pools, pages, sinks))
    [manual] = {line.split("manual_axes=")[1].split("}")[0] for line in jaxpr.splitlines() if "manual_axes=" in line}
    assert {axis for axis in TWELVE_AXES if f"'{axis}'" in manual} == set(axes)
    hlo = program.lower(*fed, *pools, pages, sinks).compile().as_text()
    assert collectives_touching(hlo, [pools[0].shape, pools[0].sharding.shard_shape(pools[0].shape)]) == []
    if backend is NativeBackend:  # XLA may share the reference's own arithmetic out over data axes, never the pools
        assert collectives_inside(hlo, "shard_map") == []
    output, *_ = program(*fed, *pools, pages, sinks)
    assert_equals_dense(np.asarray(output), step, EVERYTHING, sinks=sinks)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kv_heads", "copies"), [(8, 1), (4, 1), (2, 2), (1, 4)], ids=["split", "each", "two", "four"])
def test_heads_are_split_held_one_each_or_copied_for_the_queries_that_read_them(
    backend: type, kv_heads: int, copies: int
) -> None:
    rng = np.random.default_rng(5)
    mesh, axes = mesh_of({"tensor": 4, "fsdp": 2}), ("tensor",)
    step = make_step(mixed_requests(rng, heads=8, kv_heads=kv_heads))
    pools, pages = sharded_pools(step, mesh, axes, copies), PageMetadata.from_table(step.table)
    before = [shard.data.unsafe_buffer_pointer() for pool in pools for shard in pool.addressable_shards]
    local = max(1, kv_heads // 4)
    program = program_of(backend(local) if backend is NativeBackend else backend(), PLAIN, mesh, axes)
    assert all(shard.data.shape[2] == local for pool in pools for shard in pool.addressable_shards)
    output, *after = program(step.query, step.key, step.value, *pools, pages, None)
    assert_equals_dense(np.asarray(output), step)
    assert before == [shard.data.unsafe_buffer_pointer() for pool in after for shard in pool.addressable_shards]
    for pool in after:
        heads = np.asarray(pool).reshape(*pool.shape[:2], kv_heads, copies, -1)
        np.testing.assert_array_equal(heads, np.broadcast_to(heads[:, :, :, :1], heads.shape), err_msg="copies differ")


def test_a_pool_that_holds_no_whole_copies_of_the_heads_is_refused() -> None:
    step = make_step(mixed_requests(np.random.default_rng(0), heads=6, kv_heads=3))
    pool = jnp.zeros((*step.k_pool.shape[:2], 4, 16))
    with pytest.raises(LayoutError, match="a pool of 4 heads cannot hold 3 KV heads"):
        program_of(ReferenceBackend(), PLAIN, None, ()).lower(
            step.query, step.key, step.value, pool, pool, PageMetadata.from_table(step.table), None
        )


class Recorder:
    """A backend that does the reference's work and notes what it was handed."""

    name = "recorder"

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def append(self, *arrays: Any) -> Any:
        self.calls.append(("append", tuple(x.shape for x in arrays), {}))
        return ReferenceBackend().append(*arrays)

    def attend(self, query: Any, k_pool: Any, v_pool: Any, pages: Any, **options: Any) -> Any:
        shapes = tuple(x.shape for x in (query, k_pool, v_pool, *jax.tree.leaves(pages)))
        self.calls.append(("attend", shapes, options))
        return ReferenceBackend().attend(query, k_pool, v_pool, pages, **options)

    decode = attend


@pytest.mark.parametrize("with_sinks", [True, False])
def test_both_branches_hand_the_backend_the_same_arguments_cut_by_heads(with_sinks: bool) -> None:
    rng = np.random.default_rng(1)
    step = make_step(mixed_requests(rng, heads=8, kv_heads=4))
    sinks = rng.normal(size=8).astype(np.float32) if with_sinks else None
    pages = PageMetadata.from_table(step.table)
    calls = []
    for mesh, axes in ((None, ()), (mesh_of({"tensor": 4, "fsdp": 2}), ("tensor",))):
        recorder: PagedAttentionBackend = Recorder()
        jax.eval_shape(
            lambda *arrays, backend=recorder, mesh=mesh, axes=axes: paged_attention(
                backend,
                EVERYTHING,
                **dict(zip(("query", "key", "value", "k_pool", "v_pool", "pages", "sinks"), arrays, strict=True)),
                mesh=mesh,
                head_axes=axes,
            ),
            *(step.query, step.key, step.value, step.k_pool, step.v_pool, pages, sinks),
        )
        calls.append(recorder.calls)
    whole, sharded = calls
    assert [name for name, *_ in whole] == [name for name, *_ in sharded] == ["append", "attend"]

    def cut(shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape with its head dimension divided by 4: the last but one, of arrays that have heads."""
        return (*shape[:-2], shape[-2] // 4, shape[-1]) if len(shape) >= 3 else shape

    for (_, shapes, options), (_, local_shapes, local_options) in zip(whole, sharded, strict=True):
        assert tuple(map(cut, shapes)) == local_shapes
        assert options.keys() == local_options.keys()
        assert {k: v for k, v in options.items() if k != "sinks"} == {
            k: v for k, v in local_options.items() if k != "sinks"
        }
    for _, _, options in (whole[1], sharded[1]):
        assert (options["scale"], options["sliding_window"], options["soft_cap"]) == (0.5, 7, 2.0)
    if with_sinks:
        assert (whole[1][2]["sinks"].shape, sharded[1][2]["sinks"].shape) == ((8,), (2,))
    else:
        assert whole[1][2]["sinks"] is None and sharded[1][2]["sinks"] is None


class Gathering:
    """The control of the HLO assertions: a backend that gathers its pool, and exchanges something in between."""

    name = "gathering"

    def __init__(self, gather: bool) -> None:
        self._gather = gather

    def append(self, *arrays: Any) -> Any:
        return ReferenceBackend().append(*arrays)

    def attend(self, query: Any, k_pool: Any, v_pool: Any, pages: Any, **options: Any) -> Any:
        if self._gather:
            everything = jax.lax.all_gather(k_pool, "tensor", axis=2, tiled=True)
            k_pool = k_pool + 0 * everything[:, :, : k_pool.shape[2]]
        query = jax.lax.pmean(query, "tensor")
        return ReferenceBackend().attend(query, k_pool, v_pool, pages, **options)

    decode = attend


@pytest.mark.parametrize("gather", [True, False])
def test_the_assertions_on_hlo_can_fail(gather: bool) -> None:
    mesh, axes = mesh_of({"tensor": 4, "fsdp": 2}), ("tensor",)
    step = make_step(mixed_requests(np.random.default_rng(0), heads=8, kv_heads=4))
    pools = sharded_pools(step, mesh, axes)
    program = program_of(Gathering(gather), PLAIN, mesh, axes)
    hlo = (
        program.lower(step.query, step.key, step.value, *pools, PageMetadata.from_table(step.table), None)
        .compile()
        .as_text()
    )
    assert collectives_inside(hlo, "shard_map")
    assert bool(collectives_touching(hlo, [pools[0].shape])) == gather
