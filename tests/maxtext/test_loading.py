"""Weights arrive whole, in place and unscanned, whatever form they were kept in; or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.utils import model_creation_utils

from kv_common.errors import ConfigError
from kv_control.plan import RequestId
from kv_control.request import Request
from kv_execution.attention.reference import ReferenceBackend
from maxtext_paged.geometry import model_geometry
from maxtext_paged.loading import init_params, params_from_tree, restore_params
from maxtext_paged.model import MaxTextPagedModel
from maxtext_paged.session import PagedSession, open_session
from maxtext_paged.unscan import StackedSource, is_scanned, locate
from tests.parity import assert_teacher_forced
from tests.tiny_models import DenseModel, dense_model, make_config, make_mesh

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]


def save(directory: Path, tree: Any) -> str:
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(str(directory), tree)
    return str(directory)


def linen(params: Any) -> Any:
    return {"params": {"params": params}}


def nnx_layout(params: Any) -> Any:
    return {key: nnx_layout(leaf) if isinstance(leaf, dict) else {"value": leaf} for key, leaf in params.items()}


def paged_model(block: str = "llama2", devices: int = 1, **overrides: Any) -> MaxTextPagedModel:
    config = make_config(block, **overrides)
    mesh = make_mesh(config, jax.devices()[:devices])
    geometry = model_geometry(config, mesh)
    layout = geometry.layout(mesh, num_pages=16, tokens_per_page=8, dtype="float32")
    return MaxTextPagedModel(config, mesh, layout=layout, head_axes=geometry.head_axes, backend=ReferenceBackend())


def assert_equal_params(state: nnx.State, params: Any) -> None:
    flat = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}

    def walk(tree: Any, prefix: str) -> int:
        count = 0
        for key, leaf in tree.items():
            if isinstance(leaf, dict):
                count += walk(leaf, f"{prefix}{key}.")
            else:
                np.testing.assert_array_equal(np.asarray(flat[prefix + key]), leaf)
                count += 1
        return count

    assert walk(params, "") == len(flat)


def complete(engine: PagedSession) -> list[Request]:
    rng = np.random.default_rng(0)
    requests = [
        Request(RequestId(i), rng.integers(1, 255, n), max_tokens=12, want_prompt_logprobs=True)
        for i, n in enumerate((19, 5))
    ]
    for request in requests:
        engine.driver.submit(request)
    list(engine.driver.run())
    return requests


@pytest.mark.parametrize("layout", [linen, nnx_layout], ids=["linen", "nnx"])
def test_a_plain_checkpoint_is_restored_exactly(layout: Any, tmp_path: Path) -> None:
    params = dense_model().params
    assert_equal_params(restore_params(paged_model(), save(tmp_path / "items", layout(params))), params)


@pytest.mark.parametrize(
    ("block", "options"),
    [
        ("llama2", {"base_num_decoder_layers": 3}),
        pytest.param("gpt_oss", {"base_num_decoder_layers": 4}, marks=pytest.mark.long),
        # one cycle of six and a remainder of two
        pytest.param("gemma3", {"base_num_decoder_layers": 8}, marks=pytest.mark.long),
    ],
)
def test_a_scanned_model_runs_as_its_own_dense_forward(block: str, options: dict[str, Any], tmp_path: Path) -> None:
    dense = DenseModel(block, scan_layers=True, **options)
    assert "layers_0" not in dense.params["decoder"]
    config = make_config(
        block,
        scan_layers=True,
        load_parameters_path=save(tmp_path / "items", linen(dense.params)),
        paged_num_pages=16,
        paged_tokens_per_page=8,
        **options,
    )
    engine = open_session(config, mesh=make_mesh(config))
    assert_teacher_forced(complete(engine), dense, relative=2e-5)
    compiled = engine.runtime.metrics().compiled
    # The trainer's own scanned tree, exchanged in place: twice the weights give other tokens, the first ones the first.
    first = [request.tokens.tolist() for request in complete(engine)]
    engine.update_params(jax.tree.map(lambda leaf: 2 * leaf, dense.params))
    assert [request.tokens.tolist() for request in complete(engine)] != first
    engine.update_params(linen(dense.params))
    assert [request.tokens.tolist() for request in complete(engine)] == first
    assert engine.runtime.metrics().compiled["paged_step"] == compiled["paged_step"]


CYCLES = {
    "mixtral": (4, 1),
    "gemma2": (4, 1),
    "gemma3": (8, 6),  # and a remainder of two
    "gpt_oss": (4, 2),
    "olmo3": (8, 4),
    "llama4": (8, 4),
    "envy": (4, 2),
}
"""Layers, and how many different ones a scanned block of the family holds."""


def parameter_shapes(block: str, num_layers: int, *, scan_layers: bool) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Paths and shapes of MaxText's own parameters; nothing is allocated."""
    config = make_config(block, attention="dot_product", base_num_decoder_layers=num_layers, scan_layers=scan_layers)
    create = model_creation_utils.get_nnx_create_model_fn(config, mesh=make_mesh(config), model_mode="train")
    with logical_axis_rules(config.logical_axis_rules):
        state = nnx.state(nnx.eval_shape(create), nnx.Param)
    return {tuple(map(str, path)): leaf.get_value().shape for path, leaf in nnx.to_flat_state(state)}


@pytest.mark.parametrize("block", CYCLES)
def test_every_familys_scanned_parameters_are_found_layer_by_layer(block: str) -> None:
    """Each of MaxText's unscanned parameters is somewhere in its scanned tree, of the layer's own kind and shape."""
    num_layers, length = CYCLES[block]
    scanned = parameter_shapes(block, num_layers, scan_layers=True)
    assert is_scanned(scanned)
    found = locate(scanned, num_layers)
    unscanned = parameter_shapes(block, num_layers, scan_layers=False)
    assert set(found) == set(unscanned)
    for path, source in found.items():
        stacked = scanned[source.path]
        assert unscanned[path] == (stacked if source.index is None else (stacked[0], *stacked[2:])), path
        if path[1].startswith("layers_"):
            layer = int(path[1].removeprefix("layers_"))
            whole = layer < num_layers // length * length
            member = [f"layers_{layer % length}"] if length > 1 else []
            assert source.index == (layer // length if whole else None)
            assert source.path == ("decoder", "layers" if whole else "layers_remainder", *member, *path[2:])
    stacks = {(source.path, source.index) for source in found.values()}
    assert len(stacks) == len(found), "no two layers share a place"


def test_layers_that_maxtexts_scan_leaves_out_are_missed() -> None:
    """Five layers in cycles of four are four to MaxText's scan; running those as the model would be another model."""
    scanned = parameter_shapes("olmo3", 5, scan_layers=True)
    missing = set(parameter_shapes("olmo3", 5, scan_layers=False)) - set(locate(scanned, 5))
    assert missing and {path[1] for path in missing} == {"layers_4"}


def test_missing_and_misshapen_parameters_are_named(tmp_path: Path) -> None:
    params = jax.tree.map(np.asarray, dense_model().params)
    del params["decoder"]["layers_1"]["mlp"]["wo"]
    params["token_embedder"]["embedding"] = params["token_embedder"]["embedding"][:100]
    with pytest.raises(ConfigError, match=r"layers_1\.mlp\.wo\.kernel is missing") as error:
        params_from_tree(paged_model(), params)
    assert "token_embedder.embedding has shape (100, 64), the model needs (256, 64)" in str(error.value)


def test_quantised_weights_are_refused_by_name_and_never_read_as_numbers(tmp_path: Path) -> None:
    """In place of a kernel, where int8 would be cast without its scale, and as qwix keeps them."""
    params = jax.tree.map(np.asarray, dense_model().params)
    query = params["decoder"]["layers_0"]["self_attention"]["query"]
    kernel = query["kernel"]
    scale = np.abs(kernel).max() / 127
    query["kernel"], query["scale"] = np.round(kernel / scale).astype(np.int8), scale
    wo = params["decoder"]["layers_1"]["mlp"]["wo"]
    wo["kernel"] = wo["kernel"].astype(jnp.float8_e4m3fn)
    words = (r"layers_0\.self_attention\.query\.kernel holds int8: quantised", r"wo\.kernel holds float8_e4m3fn")
    model = paged_model()
    for words_of_one in words:
        with pytest.raises(ConfigError, match=words_of_one):
            params_from_tree(model, params)
    with pytest.raises(ConfigError, match=words[0]):
        restore_params(model, save(tmp_path / "items", linen(params)))
    query["kernel"] = {"array": {"qvalue": query["kernel"], "scale": query.pop("scale")}}
    with pytest.raises(ConfigError, match=r"layers_0\.self_attention\.query\.kernel is missing"):
        params_from_tree(model, params)


def test_too_few_scanned_layers_are_refused(tmp_path: Path) -> None:
    params = DenseModel(scan_layers=True).params
    with pytest.raises(ConfigError, match="of only 2 stacked layers"):
        params_from_tree(paged_model(base_num_decoder_layers=3), params)


def test_a_folder_without_a_checkpoint_is_refused_naming_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="load_parameters_path"):
        restore_params(paged_model(), str(tmp_path))
    with pytest.raises(ConfigError, match="load_parameters_path"):
        restore_params(paged_model(), str(tmp_path / "nowhere"))


def test_a_session_refuses_a_checkpoint_before_any_pool_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights load beside the pools; whether they can is known before."""

    def allocated(*_: Any, **__: Any) -> None:
        raise AssertionError("a pool was made for weights that cannot be loaded")

    monkeypatch.setattr(MaxTextPagedModel, "create_pools", allocated)
    with pytest.raises(ConfigError, match="load_parameters_path"):
        open_session(make_config(load_parameters_path=str(tmp_path / "nowhere")))


def test_random_weights_are_maxtexts_own(tmp_path: Path) -> None:
    params = nnx.to_pure_dict(init_params(paged_model(), seed=3))
    config = make_config()
    create = model_creation_utils.get_nnx_create_model_fn(
        config, mesh=make_mesh(config), model_mode="prefill", rng_key=jax.random.PRNGKey(3)
    )
    expected = nnx.to_pure_dict(nnx.state(create(), nnx.Param))
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-8), params, expected)


def test_weights_are_held_in_compute_dtype_but_norms_are_not() -> None:
    model = paged_model(dtype="bfloat16")
    dtypes = {".".join(map(str, path)): str(leaf.get_value().dtype) for path, leaf in _flat(model.abstract_params)}
    assert dtypes["decoder.layers_0.mlp.wo.kernel"] == "bfloat16"
    assert dtypes["token_embedder.embedding"] == "bfloat16"
    assert dtypes["decoder.decoder_norm.scale"] == "float32"
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(paged_model().abstract_params)} == {"float32"}


def _flat(state: nnx.State) -> Any:
    return nnx.to_flat_state(state)


def test_cycles_and_remainders_are_located() -> None:
    paths = [
        ("decoder", "layers", "layers_0", "w"),
        ("decoder", "layers", "layers_1", "w"),
        ("decoder", "layers_remainder", "layers_0", "w"),
        ("decoder", "decoder_norm", "scale"),
    ]
    assert is_scanned(paths)
    assert not is_scanned([("decoder", "layers_0", "w")])
    found = locate(paths, num_layers=5)
    assert found[("decoder", "layers_3", "w")] == StackedSource(("decoder", "layers", "layers_1", "w"), 1)
    assert found[("decoder", "layers_4", "w")] == StackedSource(("decoder", "layers_remainder", "layers_0", "w"), None)
    assert found[("decoder", "decoder_norm", "scale")].index is None
    with pytest.raises(ConfigError, match=r"expected 0\.\.1"):
        locate([("decoder", "layers", "layers_1", "w"), ("decoder", "layers", "layers_2", "w")], 4)


@pytest.mark.multi_device
@pytest.mark.parametrize("scanned", [False, True])
def test_a_checkpoint_is_restored_straight_into_its_sharding(scanned: bool, tmp_path: Path) -> None:
    dense = DenseModel(scan_layers=scanned)
    model = paged_model(devices=4, ici_tensor_parallelism=2, ici_fsdp_parallelism=2)
    directory = save(tmp_path / "items", linen(dense.params))
    restored = restore_params(model, directory)
    for leaf, held in zip(jax.tree.leaves(restored), jax.tree.leaves(model.abstract_params), strict=True):
        assert leaf.sharding == held.sharding
    embedding = restored["token_embedder"]["embedding"].get_value()
    assert max(shard.data.size for shard in embedding.addressable_shards) <= embedding.size // 2
    if not scanned:
        assert_equal_params(restored, dense.params)
