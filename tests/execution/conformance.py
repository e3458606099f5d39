"""One conformance class that the tests of every attention backend inherit.

For:        holding each backend to the same promises, against float64 numpy (``numpy_model``).
Not for:    a backend's own speed, memory or dispatch.
May import: numpy, jax, pytest, kv_common, kv_execution.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from kv_common.page_table import pack_page_table
from kv_execution.attention.api import PagedAttentionBackend
from kv_execution.metadata import PageMetadata
from tests.execution.numpy_model import UNIT_ROUNDOFF, float32_bound, storage_bound
from tests.execution.paged_steps import (
    EVERYTHING,
    INDEX_CAPACITY,
    NUM_PAGES,
    PLAIN,
    ROW_RUNG,
    TOKEN_RUNG,
    Request,
    assert_equals_dense,
    boundary_lengths,
    expected,
    make_request,
    make_step,
    mixed_requests,
    program_of,
    rounded,
    run,
    run_decode,
)


class BackendConformance:
    """Promises of ``PagedAttentionBackend``. A subclass names the backend and what shapes it serves."""

    backend: ClassVar[PagedAttentionBackend]
    head_dim: ClassVar[int] = 16
    head_dims: ClassVar[tuple[int, ...]] = (16, 48, 64, 80, 128, 256)

    @pytest.fixture
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(7)

    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_a_decode_at_every_length_equals_dense_attention(self, rng, page_size):
        lengths = range(1, 3 * page_size + 2)
        requests = [make_request(rng, n, 1, dim=self.head_dim) for n in lengths]
        step = make_step(requests, page_size=page_size)
        assert_equals_dense(run(self.backend, step), step)

    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_a_prompt_ending_at_a_page_boundary_equals_dense_attention(self, rng, page_size):
        requests = [make_request(rng, n, n, dim=self.head_dim) for n in boundary_lengths(page_size)]
        step = make_step(requests, page_size=page_size)
        assert_equals_dense(run(self.backend, step), step)

    @pytest.mark.parametrize("page_size", [2, 3, 7, 32, 64, 128, 256])
    def test_any_page_size_gives_the_same_attention(self, rng, page_size):
        lengths = boundary_lengths(page_size)[-4:]
        sizes = [(length, 1) for length in lengths] + [(lengths[-1], min(lengths[-1], 40)), (lengths[0], 2)]
        requests = [make_request(rng, length, num_new, dim=self.head_dim) for length, num_new in sizes]
        step = make_step(requests, page_size=page_size)
        assert_equals_dense(run(self.backend, step), step)

    def test_each_head_size_equals_dense_attention(self, rng):
        for dim in self.head_dims:
            requests = mixed_requests(rng, dim=dim, heads=6, kv_heads=2)
            step = make_step(requests)
            assert_equals_dense(
                run(self.backend, step, replace(PLAIN, scale=dim**-0.5)), step, replace(PLAIN, scale=dim**-0.5)
            )

    def test_a_pool_of_more_than_65536_pages_is_addressed_to_its_end(self, rng):
        num_pages = 70_001
        pages = [num_pages - 1, 0, 65_535, 65_536, 65_537, 69_999, 32_768, 3]
        requests = [make_request(rng, 3, num_new, kv_heads=1, dim=self.head_dim) for num_new in (1, 3)]
        step = make_step(requests, page_size=1, pages=pages, num_pages=num_pages)
        assert_equals_dense(run(self.backend, step), step)

    @pytest.mark.parametrize("call", [run, run_decode], ids=["attend", "decode"])
    def test_a_scale_of_one_means_that_queries_arrive_scaled(self, rng, call):
        """Against dense numpy: two paged paths that both divide by sqrt(head_dim) would agree with each other."""
        requests = [make_request(rng, n, 1, dim=self.head_dim) for n in (1, 9, 30)]
        step, options = make_step(requests), replace(PLAIN, scale=1.0)
        assert_equals_dense(call(self.backend, step, options, sinks=None), step, options)

    @pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 1), (3, 3), (7, 1), (16, 2)])
    def test_each_query_head_reads_its_own_kv_head(self, rng, heads, kv_heads):
        step = make_step(mixed_requests(rng, heads=heads, kv_heads=kv_heads, dim=self.head_dim))
        assert_equals_dense(run(self.backend, step), step)

    def test_decodes_prompts_and_chunks_share_a_step(self, rng):
        step = make_step(mixed_requests(rng, dim=self.head_dim), page_size=16)
        assert_equals_dense(run(self.backend, step), step)

    def test_a_long_context_equals_dense_attention(self, rng):
        sizes = [(700, 1), (3, 1), (431, 1), (640, 90)]
        requests = [make_request(rng, length, num_new, dim=self.head_dim) for length, num_new in sizes]
        step = make_step(requests, page_size=16)
        assert_equals_dense(run(self.backend, step), step)

    @pytest.mark.parametrize(
        "values",
        [{"sliding_window": (None, 5, 6)}, {"soft_cap": (None, 1.5, 2.0)}, {"scale": (0.25, 1.0)}],
        ids=lambda values: next(iter(values)),
    )
    def test_an_option_acts_and_its_value_matters(self, rng, values):
        step = make_step(mixed_requests(rng, dim=self.head_dim))
        [(name, settings)] = values.items()
        outputs = []
        for value in settings:
            options = replace(PLAIN, **{name: value})
            outputs.append(run(self.backend, step, options))
            assert_equals_dense(outputs[-1], step, options)
        for one, other in combinations(outputs, 2):
            for i in range(2, len(step.requests)):  # request 1 sees one key: nothing can change
                assert np.abs(one[step.rows(i)] - other[step.rows(i)]).max() > 1e-3

    @pytest.mark.parametrize("num_new", [1, 30])
    def test_a_cap_still_tells_scores_apart_that_lie_far_beyond_it(self, rng, num_new):
        """Five to eight times the cap: what is left of their difference counts, and larger ones all equal the cap."""
        request = make_request(rng, 60, num_new, dim=self.head_dim)
        request.query[:], request.key[:], request.value[:] = 0.0, 0.0, 1.0
        request.query[..., 0] = 1.0
        request.key[..., 0] = np.append(np.linspace(250, 400, 50), np.geomspace(500, 1e4, 10))[:, None]
        request.value[:25] = -1.0
        step, options = make_step([request]), replace(PLAIN, scale=1.0, soft_cap=50.0)
        wanted, bound = expected(request, options), 2e-5  # of a tanh good to a few units in the last place, times 50
        np.testing.assert_allclose(run(self.backend, step, options)[:num_new], wanted, rtol=0, atol=bound)

    def test_sinks_act_and_their_value_matters(self, rng):
        step = make_step(mixed_requests(rng, dim=self.head_dim))
        without = run(self.backend, step)
        low, high = rng.normal(size=(2, 4)).astype(np.float32) + np.array([[-1], [3]], np.float32)
        for sinks in (low, high):
            output = run(self.backend, step, sinks=sinks)
            assert_equals_dense(output, step, sinks=sinks)
            assert np.abs(output - without)[: step.table.num_tokens].max(axis=(1, 2)).min() > 1e-3

    def test_a_window_a_cap_and_sinks_act_together(self, rng):
        sinks = rng.normal(size=4).astype(np.float32)
        step = make_step(mixed_requests(rng, dim=self.head_dim))
        assert_equals_dense(run(self.backend, step, EVERYTHING, sinks=sinks), step, EVERYTHING, sinks=sinks)

    def test_pages_that_left_the_window_are_not_needed(self, rng):
        options = replace(PLAIN, sliding_window=6)
        sizes = [(23, 1, 16), (30, 9, 16), (12, 12, 0), (41, 1, 32)]
        requests = [
            make_request(rng, length, num_new, dim=self.head_dim, first_page_offset=offset)
            for length, num_new, offset in sizes
        ]
        step = make_step(requests)
        assert_equals_dense(run(self.backend, step, options), step, options)

    def test_what_nobody_owns_does_not_matter(self, rng):
        requests = mixed_requests(rng, dim=self.head_dim)
        sinks = rng.normal(size=4).astype(np.float32)
        for poison in (np.nan, np.inf, 1e30, -1e30):
            step = make_step(requests, poison=poison)
            assert_equals_dense(run(self.backend, step), step)
            assert_equals_dense(run(self.backend, step, EVERYTHING, sinks=sinks), step, EVERYTHING, sinks=sinks)

    @pytest.mark.parametrize("num_new", [1, 6])
    def test_page_0_and_the_last_page_are_pages_like_any_other(self, rng, num_new):
        requests = [make_request(rng, 6, num_new, dim=self.head_dim) for _ in range(2)]
        step = make_step(requests, pages=[0, NUM_PAGES - 1, NUM_PAGES - 2, 1])
        assert_equals_dense(run(self.backend, step), step)

    def test_chunks_give_what_the_whole_prompt_gives(self, rng):
        whole = make_request(rng, 33, 33, dim=self.head_dim)
        dense = expected(whole)
        bound = float32_bound(whole.query, whole.key, whole.value, PLAIN.scale)
        for chunk in (1, 7, 16, 33):
            for end in sorted({*range(chunk, 34, chunk), 33}):
                start = (end - 1) // chunk * chunk
                part = Request(*(x[:end] for x in (whole.query, whole.key, whole.value)), end - start)
                step = make_step([part, make_request(rng, 5, 2, dim=self.head_dim)])
                output = run(self.backend, step)[: end - start]
                np.testing.assert_allclose(output, dense[start:end], rtol=0, atol=bound)

    def test_a_sick_request_shows_and_its_neighbours_do_not_notice(self, rng):
        requests = mixed_requests(rng, dim=self.head_dim)
        sick = [2, 4]
        for i in sick:
            requests[i].value[3] = np.nan
            requests[i].key[5] = np.nan
        step = make_step(requests)
        output = run(self.backend, step)
        assert_equals_dense(output, step, skip=sick)
        for i in sick:
            assert np.isnan(output[step.rows(i)]).any()

    def test_a_step_of_padding_alone_gives_zeros_and_writes_nothing(self, rng):
        table = pack_page_table(
            [],
            num_pages=NUM_PAGES,
            tokens_per_page=4,
            token_rung=TOKEN_RUNG,
            row_rung=ROW_RUNG,
            index_capacity=INDEX_CAPACITY,
        )
        real = make_step([make_request(rng, 3, 3, dim=self.head_dim)])
        step = replace(real, table=table, k_pool=np.ones_like(real.k_pool), v_pool=np.ones_like(real.v_pool))
        pools = jnp.asarray(step.k_pool), jnp.asarray(step.v_pool)
        program = program_of(self.backend, PLAIN, None, ())
        pages = PageMetadata.from_table(table)
        output, *pools = program(step.query, step.key, step.value, *pools, pages, None)
        assert not np.asarray(output).any()
        assert all((np.asarray(pool) == 1).all() for pool in pools)

    def test_a_bfloat16_pool_loses_only_what_storage_rounds(self, rng):
        step = make_step(mixed_requests(rng, dim=self.head_dim))
        output = run(self.backend, step, dtype="bfloat16")
        stored = rounded(step.requests, "bfloat16", ("key", "value"))
        assert_equals_dense(output, replace(step, requests=stored))
        for i, request in enumerate(step.requests):
            lost = np.abs(output[step.rows(i)] - expected(request)).max()
            assert lost <= storage_bound(request.query, request.key, request.value, PLAIN.scale, "bfloat16")
            assert lost > 1e-4, "the pool was not bfloat16"

    def test_bfloat16_activations_are_computed_in_float32_and_rounded_once(self, rng):
        step = make_step(rounded(mixed_requests(rng, dim=self.head_dim), "bfloat16"))
        output = run(self.backend, step, dtype="bfloat16", activations="bfloat16")
        for i, request in enumerate(step.requests):
            wanted = expected(request)
            bound = float32_bound(request.query, request.key, request.value, PLAIN.scale)
            error = np.abs(output[step.rows(i)] - wanted) - UNIT_ROUNDOFF["bfloat16"] * np.abs(wanted)
            assert error.max() <= bound

    def test_decode_of_one_token_per_request_equals_dense_attention(self, rng):
        requests = [make_request(rng, n, 1, dim=self.head_dim) for n in (1, 4, 5, 33, 2, 16, 17)]
        some_sinks = rng.normal(size=4).astype(np.float32)
        for page_size, options, sinks in ((4, PLAIN, None), (16, EVERYTHING, some_sinks)):
            step = make_step(requests, page_size=page_size)
            assert_equals_dense(run_decode(self.backend, step, options, sinks), step, options, sinks=sinks)

    def test_append_writes_the_given_slots_and_no_other(self, rng):
        num_slots, shape = NUM_PAGES * 4, (2, self.head_dim)
        k_pool, v_pool = rng.normal(size=(2, num_slots, *shape)).astype(np.float32)
        key, value = rng.normal(size=(2, 8, *shape)).astype(np.float32)
        slots = np.array([5, 0, num_slots - 1, 77, num_slots, num_slots, -1, 2**31 - 1], np.int32)
        pools = (jnp.asarray(p).reshape(NUM_PAGES, 4, *shape) for p in (k_pool, v_pool))
        written = jax.jit(self.backend.append, donate_argnums=(0, 1))(*pools, key, value, slots)
        for pool, new, got in zip((k_pool, v_pool), (key, value), written, strict=True):
            for i, slot in enumerate(slots[:4]):
                pool[slot] = new[i]
            np.testing.assert_array_equal(np.asarray(got).reshape(num_slots, *shape), pool)

    def test_appending_keeps_the_pools_where_they_are(self, rng):
        step = make_step(mixed_requests(rng, dim=self.head_dim))
        pages = PageMetadata.from_table(step.table)
        pools = [jnp.asarray(pool) + 0 for pool in (step.k_pool, step.v_pool)]
        before = [pool.unsafe_buffer_pointer() for pool in pools]
        program = program_of(self.backend, PLAIN, None, ())
        compiled = program.lower(step.query, step.key, step.value, *pools, pages, None).compile()
        assert compiled.memory_analysis().alias_size_in_bytes == step.k_pool.nbytes + step.v_pool.nbytes
        for shape in (step.k_pool.shape, (NUM_PAGES * 4, *step.k_pool.shape[2:])):
            pool_copy = rf"= f32\[{','.join(map(str, shape))}\]\S* copy\("
            assert not re.search(pool_copy, compiled.as_text()), "a pool is copied"
        _, *after = program(step.query, step.key, step.value, *pools, pages, None)
        assert [pool.unsafe_buffer_pointer() for pool in after] == before
        undonated = jax.jit(self.backend.append)
        moved = undonated(*after, step.key, step.value, step.table.slot_mapping)
        assert not {pool.unsafe_buffer_pointer() for pool in moved} & set(before)

    def test_fifty_donated_steps_leave_the_pools_where_they_are(self, rng):
        step = make_step(mixed_requests(rng, dim=self.head_dim))
        pages, program = PageMetadata.from_table(step.table), program_of(self.backend, PLAIN, None, ())
        pools = [jnp.asarray(pool) + 0 for pool in (step.k_pool, step.v_pool)]
        before = _addresses(pools)
        for _ in range(50):
            _, *pools = program(step.query, step.key, step.value, *pools, pages, None)
            assert _addresses(pools) == before

    @pytest.mark.multi_device
    @pytest.mark.parametrize(
        ("shape", "names", "axes"),
        [
            ((2, 4), ("tensor", "fsdp"), ("tensor",)),
            ((2, 2, 2), ("tensor", "data", "tensor_sequence"), ("tensor", "tensor_sequence")),
        ],
        ids=["tensor", "two_axes"],
    )
    @pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "options"])
    def test_sharded_heads_equal_dense_attention(self, rng, shape, names, axes, with_sinks):
        mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
        step = make_step(mixed_requests(rng, heads=8, kv_heads=4, dim=self.head_dim))
        options = EVERYTHING if with_sinks else PLAIN
        sinks = rng.normal(size=8).astype(np.float32) if with_sinks else None
        heads = NamedSharding(mesh, PartitionSpec(None, axes, None))
        pool_sharding = NamedSharding(mesh, PartitionSpec(None, None, axes, None))
        pools = [jax.device_put(pool, pool_sharding) for pool in (step.k_pool, step.v_pool)]
        tokens = [jax.device_put(x, heads) for x in (step.query, step.key, step.value)]
        before = _addresses(pools)
        program = program_of(self.backend, options, mesh, axes)
        compiled = program.lower(*tokens, *pools, PageMetadata.from_table(step.table), sinks).compile()
        for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
            assert collective not in compiled.as_text()
        output, *pools = program(*tokens, *pools, PageMetadata.from_table(step.table), sinks)
        assert_equals_dense(np.asarray(output), step, options, sinks=sinks)
        assert _addresses(pools) == before


def _addresses(arrays: Sequence[jax.Array]) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for x in arrays for shard in x.addressable_shards]
