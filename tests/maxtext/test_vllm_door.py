"""A tiny MaxText model through vLLM's door, step by step, against MaxText's dense forward and our own session."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from kv_common.errors import ConfigError, UnsupportedError
from kv_control.plan import RequestId, SamplingSpec
from kv_control.request import Request
from kv_execution.compile_events import CompileCounter
from kv_execution.metadata import SamplingInputs
from kv_execution.sampling import sample
from maxtext_paged.model import running_order
from maxtext_paged.session import run_key
from maxtext_paged.vllm import ARCHITECTURE, MaxTextPagedForCausalLM, register
from tests.tiny_models import dense_model
from tests.vllm_shapes import BLOCK_SIZE, NUM_TOKENS, Registry, Runner, load, vllm_config

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
RELATIVE = 2e-5
KINDS = ("global", "local")
PROMPTS = {0: 11, 1: 23, 2: 9}
STEPS = (((0, 11), (1, 5)), ((0, 1), (1, 14)), ((0, 1), (1, 4), (2, 9)), ((0, 1), (1, 1), (2, 1)), ((2, 1), (0, 1)))
"""``(request, new tokens)``: a whole prompt beside a chunk, decodes beside chunks and a new prompt, decodes alone."""


def registered() -> Any:
    registry = Registry()
    register(registry)
    return registry.models[ARCHITECTURE]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Path of a MaxText checkpoint of each block's shared weights."""
    saved: dict[str, str] = {}

    def path(block: str = "llama2") -> str:
        if block not in saved:
            saved[block] = str(tmp_path_factory.mktemp("weights") / block)
            tree = {"params": {"params": dense_model(block).params}}
            ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(saved[block], tree)
        return saved[block]

    return path


@pytest.fixture(scope="module")
def model(checkpoint: Any) -> Any:
    return load(registered(), vllm_config(load_parameters_path=checkpoint()))


def sequences() -> dict[int, np.ndarray]:
    rng = np.random.default_rng(0)
    return {request: rng.integers(1, 255, 40) for request in PROMPTS}


def assert_dense(runner: Runner, block: str = "llama2") -> None:
    """Run ``STEPS`` over fixed tokens: every position's logits are dense's."""
    tokens, done = sequences(), dict.fromkeys(PROMPTS, 0)
    dense = {request: dense_model(block).logits(ids, pad_to=64) for request, ids in tokens.items()}
    for rows in STEPS:
        got = runner.step([(request, tokens[request][done[request] : done[request] + new]) for request, new in rows])
        for (request, new), logits in zip(rows, got, strict=True):
            expected = dense[request][done[request] : done[request] + new]
            bound = RELATIVE * np.abs(dense[request]).max()
            np.testing.assert_allclose(logits, expected, rtol=0, atol=bound, err_msg=f"request {request}")
            done[request] += new


@pytest.mark.parametrize("block", ["llama2", "gemma2"])
def test_every_position_s_logits_are_the_dense_models(block: str, checkpoint: Any, model: Any) -> None:
    if block != "llama2":
        model = load(registered(), vllm_config(block, load_parameters_path=checkpoint(block)))
    if block == "gemma2":
        assert [name.rpartition("_")[2] for name in model.layer_names] == ["local", "global"] * 2
    runner, counter = Runner(model), CompileCounter()
    assert_dense(runner, block)
    assert {name: counter.by_function().get(name) for name in ("run_model", "compute_logits")} == {
        "run_model": 1,
        "compute_logits": 1,
    }
    assert all(step == runner.addresses[0] for step in runner.addresses), "donated caches stay where they are"


def test_without_donation_the_caches_move(model: Any) -> None:
    """The control of the address test: it must be able to fail."""
    runner = Runner(model, donate=False)
    runner.step([(0, [5, 6, 7])])
    assert runner.addresses[1] != runner.addresses[0]


def test_the_compiled_step_copies_no_cache(model: Any) -> None:
    runner = Runner(model)
    hlo = runner.run_model.lower(*runner.arguments([(0, [5, 6, 7])])).compile().as_text()
    cache = "24,8,2,16"
    assert f"f32[{cache}]" in hlo
    assert not re.findall(rf"= f32\[{cache}\]\S* (?:copy|dynamic-update-slice|concatenate|transpose)\(", hlo)
    assert hlo.count("may-alias") + hlo.count("must-alias") >= 2 * len(model.layer_names)


def free_run(runner: Runner, prompts: list[np.ndarray], num_new: int, choose: Any) -> list[list[int]]:
    """Prompts in one step, then decodes together; ``choose(row, logits, position)`` gives each next token."""
    rows: list[Any] = [(i, prompt) for i, prompt in enumerate(prompts)]
    found: list[list[int]] = [[] for _ in prompts]
    for _ in range(num_new):
        for i, logits in enumerate(runner.step(rows)):
            found[i].append(choose(i, logits[-1], len(prompts[i]) + len(found[i])))
        rows = [(i, tokens[-1:]) for i, tokens in enumerate(found)]
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_our_own_session(temperature: float, model: Any, max_engine: Any) -> None:
    prompts = [sequences()[request][:length] for request, length in ((0, 11), (1, 14))]
    session = max_engine.session
    spec = SamplingSpec(temperature=temperature, top_k=50, top_p=0.95, seed=11)
    requests = [Request(RequestId(i), prompt, max_tokens=6, sampling=spec) for i, prompt in enumerate(prompts)]
    for request in requests:
        session.driver.submit(request)
    list(session.driver.run())
    key, draw = run_key(None, session.model.mesh), jax.jit(sample)

    def choose(_: int, logits: np.ndarray, position: int) -> int:
        inputs = SamplingInputs(
            temperature=np.array([spec.temperature], np.float32),
            top_k=np.array([spec.top_k], np.int32),
            top_p=np.array([spec.top_p], np.float32),
            min_p=np.array([spec.min_p], np.float32),
            seed=np.array([spec.seed], np.uint32),
            sample_index=np.zeros(1, np.int32),
            position=np.array([position], np.int32),
        )
        return int(draw(logits[None], inputs, key)[0][0])

    got = free_run(Runner(model), prompts, 6, choose)
    assert got == [request.tokens[len(request.prompt) :].tolist() for request in requests]


def test_caches_in_another_order_find_their_layers_and_go_back_in_it(model: Any) -> None:
    runner = Runner(model, names=(("layer.0", 1), ("layer.1", 0)))
    plain = Runner(model)
    rows = [(0, sequences()[0][:9])]
    np.testing.assert_array_equal(runner.step(rows)[0], plain.step(rows)[0])
    np.testing.assert_array_equal(runner.kv_caches[1][0], plain.kv_caches[0][0])
    assert runner.addresses[1] == runner.addresses[0]


def test_a_caller_s_own_caches_serve_steps_of_several_lengths(model: Any) -> None:
    """The model is bound while the first is traced: nothing of that trace may be met in the second."""
    own = [tuple(jnp.zeros((13, BLOCK_SIZE, 2, 16)) for _ in "kv") for _ in model.layer_names]
    runner = Runner(model, 13, kv_caches=own)
    arguments = runner.arguments([(0, [5, 6, 7])])
    for length in (NUM_TOKENS, 16):
        lowered = runner.run_model.lower(*arguments[:2], arguments[2][:length], *arguments[3:])
        assert lowered.out_info[1].shape == (length, 64)
    kept = jax.tree.leaves(model.paged.model(model.paged.layout(13))._rest)
    assert kept and not any(isinstance(leaf, jax.core.Tracer) for leaf in kept)


def test_a_row_that_makes_no_sense_is_seen_and_its_neighbours_are_served(model: Any) -> None:
    runner = Runner(model)
    arguments = list(runner.arguments([(0, [5, 6, 7]), (1, [8, 9])]))
    arguments[3].block_tables = arguments[3].block_tables.at[8].set(24)  # row 1's first block: one past the pool
    _, hidden, *_ = runner.run_model(*arguments)
    assert np.isfinite(hidden[:3]).all() and np.isnan(hidden[3:]).all()


def test_layers_are_in_the_order_in_which_they_run() -> None:
    names = [(f"decoder.layers_{i}.self_attention_{kind}", kind == "local") for i in range(12) for kind in KINDS]
    expected = sorted(names, key=lambda item: (int(item[0].split(".")[1].removeprefix("layers_")), not item[1]))
    assert sorted(sorted(names), key=lambda item: running_order(*item)) == expected


def test_dummy_weights_are_random_by_the_engine_s_key_and_no_device_is_asked_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from jax.experimental.pallas import tpu

    def asked() -> Any:
        raise AssertionError("a TPU was asked for")

    monkeypatch.setattr(tpu, "get_tpu_info", asked)
    config = vllm_config(load_format="dummy", base_num_decoder_layers=1)
    model = MaxTextPagedForCausalLM(config, jax.random.key(0))
    first = jax.tree.leaves(model.weights)
    model.load_weights(jax.random.key(1))
    assert any((a != b).any() for a, b in zip(first, jax.tree.leaves(model.weights), strict=True))
    assert model.maxtext_config.hardware == "cpu"


def test_weights_never_come_from_nowhere() -> None:
    model = MaxTextPagedForCausalLM(vllm_config(base_num_decoder_layers=1))
    with pytest.raises(ConfigError, match="load_parameters_path"):
        model.load_weights()
    with pytest.raises(ConfigError, match="call load_weights first"):
        model(model.create_kv_caches(2), jnp.zeros(4, jnp.int32), {})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"inputs_embeds": np.zeros((4, 64))}, "does not serve inputs_embeds"),
        ({"lora_metadata": {}}, "does not serve lora_metadata"),
        ({"is_first_rank": False}, "does not serve is_first_rank=False"),
        ({"spec_step_idx": 1}, "does not serve spec_step_idx"),
        ({"kv_caches": [np.zeros((24, 8, 4, 1, 16))] * 2}, "KV cache 0 is one array"),
        ({"input_ids": np.zeros((1, 4), np.int32)}, r"input_ids \(1, 4\): one flat row"),
    ],
)
def test_what_is_not_served_is_refused_by_name(model: Any, extra: dict[str, Any], message: str) -> None:
    runner = Runner(model, num_blocks=4)
    _, kv_caches, input_ids, metadata, *_ = runner.arguments([(0, [5])])
    call = {"kv_caches": kv_caches, "input_ids": input_ids, "attention_metadata": metadata, **extra}
    with pytest.raises(UnsupportedError, match=message):
        model(**call)


def changed(config: Any, where: str, **fields: Any) -> Any:
    holder = getattr(config, where, None)
    if holder is None:
        from types import SimpleNamespace

        holder = SimpleNamespace()
        setattr(config, where, holder)
    for name, value in fields.items():
        setattr(holder, name, value)
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: changed(vllm_config(), "parallel_config", data_parallel_size=2), "data_parallel_size=2: .* replicas"),
        (lambda: changed(vllm_config(), "parallel_config", enable_expert_parallel=True), "enable_expert_parallel=True"),
        (
            lambda: changed(vllm_config(), "sharding_config", tp_size=1, attn_dp_size=2),
            "sharding_config.attn_dp_size=2",
        ),
        (lambda: changed(vllm_config(), "sharding_config", tp_size=64), "tensor parallelism 64: jax sees"),
        (lambda: vllm_config(attention="vllm_rpa"), "maxtext_config.attention=vllm_rpa"),
        (lambda: vllm_config(paged_tokens_per_page=4), "paged_tokens_per_page=4: the caller's cache_config says 8"),
        (lambda: vllm_config(cache_dtype="fp8"), "paged_kv_dtype='fp8'"),
        (lambda: vllm_config(no_such_option=1), "no_such_option"),
        (lambda: vllm_config(quantize_kvcache=True), "gpu_paged refuses: quantize_kvcache"),
    ],
)
def test_a_configuration_that_is_not_served_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MaxTextPagedForCausalLM(config())


def test_a_mesh_that_is_not_the_asked_parallelism_is_refused() -> None:
    config = changed(vllm_config(), "parallel_config", tensor_parallel_size=2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    with pytest.raises(ConfigError, match=r"tensor parallelism 2 .* the mesh has 1 devices .* axis 'model'"):
        MaxTextPagedForCausalLM(config, None, mesh)


def test_a_registry_must_have_register_model() -> None:
    with pytest.raises(ConfigError, match="object has no register_model"):
        register(object())


@pytest.mark.multi_device
@pytest.mark.parametrize("block", ["llama2", "gpt_oss"])
def test_tensor_parallelism_of_parallel_config_spreads_heads_and_gives_dense_logits(
    block: str, checkpoint: Any
) -> None:
    config = changed(
        vllm_config(block, load_parameters_path=checkpoint(block)), "parallel_config", tensor_parallel_size=2
    )
    model = load(registered(), config)
    runner = Runner(model)
    for leaf in jax.tree.leaves(runner.kv_caches):
        assert [shard.data.shape for shard in leaf.addressable_shards] == [(24, BLOCK_SIZE, 1, 16)] * 2
    assert_dense(runner, block)
    assert all(step == runner.addresses[0] for step in runner.addresses), "every shard stays where it is"
    hlo = runner.run_model.lower(*runner.arguments([(0, [1])])).compile().as_text()
    pool = r"24,8,[12],16"
    assert re.search(rf"f32\[{pool}\]", hlo)
    assert not re.search(rf"f32\[{pool}\]\S* (all-gather|all-reduce|all-to-all|collective-permute|copy)\(", hlo)


@pytest.mark.multi_device
@pytest.mark.parametrize("axes", [("data", "model"), ("data", "attn_dp", "attn_dp_expert", "expert", "model", "dcp")])
def test_the_engine_s_own_mesh_is_used(axes: tuple[str, ...], checkpoint: Any) -> None:
    config = changed(vllm_config(load_parameters_path=checkpoint()), "parallel_config", tensor_parallel_size=2)
    shape = [2 if axis == "model" else 1 for axis in axes]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[4:6]).reshape(shape), axes)
    model = load(registered(), config, mesh)
    assert {d for leaf in jax.tree.leaves(model.weights) for d in leaf.sharding.device_set} == set(jax.devices()[4:6])
    assert_dense(Runner(model))


@pytest.mark.multi_device
def test_more_shards_than_kv_heads_are_refused_with_the_way_out() -> None:
    config = changed(vllm_config(), "parallel_config", tensor_parallel_size=4)
    with pytest.raises(
        ValueError, match=r"num_kv_heads \(2\) .* divisible by 4, .*\['model'\].* reduce the parallelism"
    ):
        MaxTextPagedForCausalLM(config)


SEEN = """
import importlib.util, sys
for name in ("vllm", "tpu_inference"):
    assert importlib.util.find_spec(name)
    print(name, name in sys.modules)
"""


def test_the_documented_example_runs_and_imports_neither_vllm_nor_tpu_inference(tmp_path: Path) -> None:
    """Both can be imported where it runs, so that whoever tried would be seen."""
    for name in ("vllm", "tpu_inference"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "vllm.md").read_text(), re.DOTALL)
    finished = subprocess.run(
        [sys.executable, "-c", example + SEEN],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert f"registered {ARCHITECTURE}" in lines
    assert lines[-2:] == ["vllm False", "tpu_inference False"]
    [tokens] = [json.loads(line.removeprefix("tokens ")) for line in lines if line.startswith("tokens ")]
    assert tokens[:9] == list(range(5, 14)) and len(tokens) == 15


def test_a_step_is_as_long_as_its_padding() -> None:
    assert max(sum(new for _, new in rows) for rows in STEPS) <= NUM_TOKENS
