"""What XLA makes of the whole paged step on a mesh: no pool is gathered, nothing stands between append and attend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.sharding import MESHES, addresses, open_case
from kv_control.plan import RequestSlice, SamplingSpec
from kv_execution.attention import api
from kv_execution.native.library import APPEND_TARGET, ATTEND_TARGET, native_available
from kv_execution.runtime import PreparedStep
from kv_execution.step import make_step_program
from maxtext_paged.session import PagedSession, run_key
from tests.hlo import collectives_inside, collectives_touching, custom_calls, instructions, made_by

pytestmark = [
    pytest.mark.maxtext,
    pytest.mark.multi_device,
    pytest.mark.skipif(native_available() is not None, reason=str(native_available())),
]

CASE = next(case for case in MESHES if case.name == "tensor=4 x fsdp=2")
LAYERS = 2


@dataclass
class Built:
    """A session, one prepared step of two sampled rows, and its program compiled."""

    session: PagedSession
    prepared: PreparedStep
    program: Any
    arguments: tuple[Any, ...]
    compiled: Any

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """A pool's of each kind of layers, whole and on one device."""
        model = self.session.model
        whole = [layout.pool_shape for layout in (model.layout, *(group.layout for group in model.window_groups))]
        return [*whole, *map(model.pool_sharding.shard_shape, whole)]


def build(backend: str, model: str = "gpt_oss") -> Built:
    session = open_case(model, CASE, backend)
    slices = []
    for seed, num_tokens in enumerate((5, 3)):
        handle = session.runtime.open()
        assert handle is not None
        tokens = np.arange(1, 1 + num_tokens, dtype=np.int32)
        slices.append(RequestSlice(handle, 0, tokens, sample=SamplingSpec(temperature=0.9, top_k=9, seed=seed)))
    prepared = session.runtime.prepare_step(slices)
    assert prepared is not None
    params, pools = session.runtime.params, session.runtime.pools
    program: Any = make_step_program(session.model, params=params, pools=pools, max_num_seqs=session.max_num_seqs)
    replicated = NamedSharding(session.model.mesh, PartitionSpec())
    previous = jax.device_put(np.zeros(session.max_num_seqs, np.int32), replicated)
    options = session.runtime._options.rows
    arguments = (prepared.buffer, previous, options, run_key(None, session.model.mesh), prepared.packing)
    compiled = program.lower(jax.tree.leaves(params), jax.tree.leaves(pools), *arguments).compile()
    return Built(session, prepared, program, arguments, compiled)


@pytest.fixture(scope="module")
def native() -> Iterator[Built]:
    built = build("native")
    yield built
    built.session.close()


def test_no_pool_meets_a_collective_and_none_stands_between_append_and_attend(native: Built) -> None:
    hlo = native.compiled.as_text()
    assert any(one.is_collective for one in instructions(hlo)), "a step on a mesh does talk elsewhere"
    assert collectives_touching(hlo, native.shapes) == []
    assert collectives_inside(hlo, "shard_map") == []
    attends = custom_calls(hlo, ATTEND_TARGET)
    assert len(attends) == len(custom_calls(hlo, APPEND_TARGET)) == LAYERS
    for attend in attends:
        for pool in (1, 2):
            maker = made_by(hlo, attend, pool)
            assert maker.opcode == "custom-call" and APPEND_TARGET in maker.text, "append hands over to attend directly"


def test_every_pool_is_an_alias_of_itself_on_every_device(native: Built) -> None:
    device_bytes = native.session.model.device_pool_bytes()
    assert native.compiled.memory_analysis().alias_size_in_bytes == device_bytes


def test_an_exchange_between_append_and_attend_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control, in the whole step: queries averaged over the shards, and a pool gathered, inside shard_map."""
    inner = api.jax.shard_map

    def meddling(function: Any, **options: Any) -> Any:
        def exchanged(query: Any, key: Any, value: Any, k_pool: Any, *rest: Any) -> Any:
            gathered = jax.lax.all_gather(k_pool, "tensor", axis=2, tiled=True)[:, :, :1]
            return function(jax.lax.pmean(query, "tensor"), key, value, k_pool + 0 * gathered, *rest)

        return inner(exchanged, **options)

    monkeypatch.setattr(api.jax, "shard_map", meddling)
    built = build("reference", "llama2")
    hlo = built.compiled.as_text()
    assert len(collectives_inside(hlo, "shard_map")) >= 2
    assert collectives_touching(hlo, built.shapes)
    built.session.close()


def test_sampled_tokens_are_the_same_on_every_device_and_pools_stay_where_they_are(native: Built) -> None:
    """With the control: the same program without donation moves them."""
    session, model = native.session, native.session.model
    before = addresses(session.runtime.pools)
    undonated = jax.jit(
        native.program.__wrapped__,
        static_argnums=6,
        out_shardings=(model.pool_sharding, NamedSharding(model.mesh, PartitionSpec())),
    )
    leaves = jax.tree.leaves(session.runtime.params), jax.tree.leaves(session.runtime.pools)
    moved, _ = undonated(*leaves, *native.arguments)
    assert not set(addresses(moved)) & set(before)
    outcome = session.runtime.run_step(native.prepared)
    assert addresses(session.runtime.pools) == before
    for array in jax.tree.leaves(outcome.outputs):
        assert array.is_fully_replicated
        copies = [np.asarray(shard.data) for shard in array.addressable_shards]
        assert len(copies) == 8
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])
