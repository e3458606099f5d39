"""Kernels compiled for a longest context: warm-up walks those rungs too, and growing past one compiles nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kv_common.layout import KvStorageLayoutV1
from kv_control.bucketing import Ladder
from kv_control.control_plane import ControlPlane
from kv_control.plan import RequestId
from kv_control.request import Request
from kv_control.scheduler import Scheduler
from kv_execution.attention.aiter_backend import AiterBackend
from kv_execution.attention.api import AttentionOptions, PagedAttentionBackend, paged_attention
from kv_execution.attention.decode_plans import context_ladder
from kv_execution.attention.reference import ReferenceBackend
from kv_execution.driver import PagedDriver
from kv_execution.metadata import StepInputs
from kv_execution.runtime import PagedRuntime
from tests.execution.aiter_stub import HOST, built_stub, not_here, stub

__all__ = ["built_stub", "stub"]
pytestmark = [pytest.mark.skipif(not_here() is not None, reason=str(not_here())), pytest.mark.slow]

VOCAB, HEADS, KV_HEADS, DIM = 61, 4, 2, 64
LONGEST = 512


class OneLayer:
    """A ``PagedModel`` of one attention layer over random embeddings of tokens and positions."""

    mesh = None
    pool_sharding = None
    vocab_size = VOCAB

    def __init__(self, backend: PagedAttentionBackend) -> None:
        self.layout = KvStorageLayoutV1(1, 64, 16, num_kv_heads=KV_HEADS, head_dim=DIM, dtype="bfloat16")
        self.backend = backend

    def create_pools(self) -> list[jax.Array]:
        return [jnp.zeros(self.layout.pool_shape, jnp.bfloat16) for _ in range(2)]

    def forward(self, params: dict, pools: list, token_ids: jax.Array, inputs: StepInputs) -> tuple:
        pages = jax.tree.map(jnp.asarray, inputs.pages)
        new = params["tokens"][token_ids] + params["positions"][jnp.minimum(pages.positions, LONGEST - 1)]
        query, key, value = (jnp.einsum("te,ehd->thd", new, params[name]).astype(jnp.bfloat16) for name in "qkv")
        output, *pools = paged_attention(
            self.backend,
            AttentionOptions(scale=0.125, sliding_window=None, soft_cap=None),
            query=query,
            key=key,
            value=value,
            k_pool=pools[0],
            v_pool=pools[1],
            pages=pages,
            sinks=None,
            mesh=None,
            head_axes=(),
        )
        hidden = output.reshape(output.shape[0], -1).astype(jnp.float32)
        return self.head(params, hidden, inputs.sample_rows), hidden, pools

    def head(self, params: dict, hidden: jax.Array, rows: jax.Array) -> jax.Array:
        return hidden[rows] @ params["head"]


def driver_of(backend: PagedAttentionBackend, *rungs: int) -> PagedDriver:
    rng = np.random.default_rng(0)
    shapes = {"tokens": (VOCAB, 8), "positions": (LONGEST, 8), "head": (HEADS * DIM, VOCAB)}
    shapes |= {"q": (8, HEADS, DIM), "k": (8, KV_HEADS, DIM), "v": (8, KV_HEADS, DIM)}
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    model = OneLayer(backend)
    control = ControlPlane(model.layout, max_num_seqs=2, max_model_len=LONGEST, token_ladder=Ladder(rungs))
    runtime = PagedRuntime(
        model,
        params,
        control,
        run_key=jax.random.key(0),
        backend=backend.name,
        context_ladder=context_ladder(backend, LONGEST),
    )
    scheduler = Scheduler(
        control, max_num_batched_tokens=64, max_num_seqs=2, max_model_len=LONGEST, release=runtime.release
    )
    return PagedDriver(runtime, scheduler, check=True)


def completions(driver: PagedDriver) -> dict[int, list[int]]:
    """A row that grows from 254 keys to 260 while it decodes, and one whose prompt is chunked beside it."""
    rng = np.random.default_rng(1)
    for number, (length, new) in enumerate([(254, 6), (300, 3)]):
        driver.submit(Request(RequestId(number), rng.integers(0, VOCAB, length), max_tokens=new))
    return {int(request.id): request.tokens[request.num_prompt_tokens :].tolist() for request in driver.run()}


def test_a_context_that_grows_past_a_rung_compiles_nothing_and_reads_all_of_its_keys(stub) -> None:
    driver = driver_of(AiterBackend(door=HOST), 2, 64)
    seen: list[tuple[int, int]] = []
    driver.runtime.warm_up(lambda *progress: seen.append(progress))
    warm = driver.runtime.metrics()
    contexts, tokens = (256, LONGEST), driver.runtime.control.token_ladder.rungs
    assert seen[-1] == (len(contexts) * len(tokens),) * 2 and warm.compiled["paged_step"] == seen[-1][1]
    stub.take_log()
    found = completions(driver)
    partitions = {line.split("partitions=")[1].split()[0] for line in stub.take_log() if line.startswith("decode")}
    assert partitions == {"1", "2"}, "the run went from one rung to the next"
    assert driver.runtime.metrics().num_compile_events == warm.num_compile_events
    assert found == completions(driver_of(ReferenceBackend(), 64))


def test_a_rung_that_warm_up_left_out_would_be_seen(stub) -> None:
    """The control: with the first rung alone warmed, growing past it obtains another program."""
    driver = driver_of(AiterBackend(door=HOST), 2, 64)
    ladder = driver.runtime._context_ladder
    driver.runtime._context_ladder = Ladder([256])
    driver.runtime.warm_up()
    driver.runtime._context_ladder = ladder
    warm = driver.runtime.metrics().compiled["paged_step"]
    completions(driver)
    assert driver.runtime.metrics().compiled["paged_step"] > warm


def test_kernels_that_are_compiled_for_no_context_add_no_programs() -> None:
    assert context_ladder(ReferenceBackend(), LONGEST) is None
