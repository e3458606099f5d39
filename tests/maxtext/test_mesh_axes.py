"""A mesh is judged before anything is built: unknown axes, unserved ones, heads and weights that do not divide."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import AbstractMesh

from kv_common.errors import ConfigError, LayoutError, UnsupportedError
from maxtext_paged import geometry
from maxtext_paged.assembly import assemble
from maxtext_paged.geometry import model_geometry
from maxtext_paged.mesh_axes import REFUSED_AXES, check_mesh
from tests.tiny_models import make_config, mesh_of

pytestmark = pytest.mark.maxtext

VLLM = "inference/vllm.yml"
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 128, "megablox": False}


def abstract(sizes: dict[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def config_like(rules: Any, **options: Any) -> Any:
    return SimpleNamespace(
        **{"logical_axis_rules": rules, "fused_qkv": False, "num_experts": 1, "sparse_matmul": False, **options}
    )


@pytest.mark.parametrize(("rules", "known"), [("base.yml", "tensor"), (VLLM, "model")])
def test_an_axis_that_no_rule_names_is_refused_by_its_name_and_not_silently_copied(rules: str, known: str) -> None:
    config = make_config(rules=rules)
    with pytest.raises(ConfigError, match="mesh axis 'heads' of size 2: no rule of logical_axis_rules names it"):
        check_mesh(config, abstract({known: 2, "heads": 2}))
    check_mesh(config, abstract({known: 2, "heads": 1}))


def test_the_axes_of_one_naming_scheme_are_refused_under_the_other() -> None:
    """Where a serving mesh meets training rules the pool would be whole on every device, and nobody told."""
    with pytest.raises(ConfigError, match="mesh axis 'model' of size 4"):
        check_mesh(make_config(), abstract({"model": 4}))
    with pytest.raises(ConfigError, match="mesh axis 'tensor' of size 4"):
        check_mesh(make_config(rules=VLLM), abstract({"tensor": 4}))
    with pytest.raises(ConfigError, match="mesh axis 'dcp' of size 2"):
        check_mesh(make_config(rules=VLLM), abstract({"model": 2, "dcp": 2}))


@pytest.mark.parametrize("axis", sorted(REFUSED_AXES))
def test_a_callers_mesh_cannot_smuggle_in_an_axis_that_the_options_refuse(axis: str) -> None:
    rules = [("activation_length", tuple(REFUSED_AXES))]
    with pytest.raises(ConfigError, match=f"mesh axis '{axis}' of size 2 is not served: .*set it to 1"):
        check_mesh(config_like(rules), abstract({axis: 2}))
    check_mesh(config_like(rules), abstract({axis: 1}))


def test_fused_qkv_is_refused_on_more_than_one_device() -> None:
    rules = [("heads", "tensor")]
    with pytest.raises(ConfigError, match=r"fused_qkv=true on 2 devices.*set fused_qkv=false"):
        check_mesh(config_like(rules, fused_qkv=True), abstract({"tensor": 2}))
    check_mesh(config_like(rules, fused_qkv=True), abstract({"tensor": 1}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "sizes"), [("base.yml", {"expert": 2}), (VLLM, {"expert": 2}), (VLLM, {"attn_dp_expert": 2})]
)
def test_ragged_expert_parallelism_is_refused_by_name_and_not_in_a_step(rules: str, sizes: dict[str, int]) -> None:
    ragged = make_config(rules=rules, sparse_matmul=True, **MOE)
    with pytest.raises(ConfigError, match=rf"sparse_matmul=true with mesh axis '{next(iter(sizes))}' of size 2"):
        check_mesh(ragged, abstract(sizes))
    check_mesh(make_config(rules=rules, sparse_matmul=False, **MOE), abstract(sizes))
    check_mesh(make_config(rules=rules, sparse_matmul=True), abstract(sizes))  # no experts: an axis like any other
    check_mesh(ragged, abstract({"tensor": 2} if rules == "base.yml" else {"model": 2}))


@pytest.mark.multi_device
@pytest.mark.parametrize(("rules", "sizes"), [("base.yml", {"tensor": 8}), (VLLM, {"model": 4, "expert": 2})])
def test_more_shards_than_heads_are_refused_with_maxtexts_own_advice(rules: str, sizes: dict[str, int]) -> None:
    config = make_config(rules=rules, base_num_query_heads=8, base_num_kv_heads=4, paged_num_pages=4)
    with pytest.raises(LayoutError) as refusal:
        assemble(config, mesh=mesh_of(config, sizes))
    for words in (
        "num_kv_heads (4)",
        "divisible by 8",
        f"{list(sizes)}",
        "reduce the parallelism on those axes",
        "does not shard KV heads (e.g. fsdp)",
    ):
        assert words in str(refusal.value)


@pytest.mark.multi_device
def test_weights_that_their_axes_do_not_cut_evenly_are_named_before_any_is_loaded() -> None:
    config = make_config(base_num_query_heads=3, base_num_kv_heads=3, vocab_size=255, base_mlp_dim=128)
    with pytest.raises(ConfigError, match=r"does not cut all weights evenly.*mlp\.wo\.kernel \(128, 64\) by"):
        model_geometry(config, mesh_of(config, {"tensor": 3}))


CASES = [
    ("base.yml", {"tensor": 2, "fsdp": 2}, ("tensor",)),
    (
        "base.yml",
        {"tensor": 2, "tensor_sequence": 2, "autoregressive": 2},
        ("tensor", "tensor_sequence", "autoregressive"),
    ),
    ("base.yml", {"data": 2, "expert": 4}, ()),
    ("inference/inference.yml", {"tensor": 2, "tensor_transpose": 2}, ("tensor", "tensor_transpose")),
    (VLLM, {"model": 2, "expert": 2}, ("model", "expert")),
    (VLLM, {"model": 2, "attn_dp": 2, "data": 2}, ("model",)),
    (VLLM, {"attn_dp_expert": 4}, ()),
]


@pytest.mark.multi_device
@pytest.mark.parametrize(("rules", "sizes", "axes"), CASES, ids=str)
def test_the_pools_heads_lie_as_the_bound_k_projections_really_do(
    rules: str, sizes: dict[str, int], axes: tuple[str, ...]
) -> None:
    """Device by device: whoever holds a range of heads of the K kernel holds the same range of the pool."""
    config = make_config("gemma2", rules=rules, base_num_query_heads=16, base_num_kv_heads=8, paged_num_pages=2)
    model = assemble(config, mesh=mesh_of(config, sizes)).model
    assert model.head_axes == axes
    pool_heads = {
        device: index[2].indices(8)
        for device, index in model.pool_sharding.devices_indices_map(model.layout.pool_shape).items()
    }
    kernels = [
        leaf.get_value() for path, leaf in nnx.to_flat_state(model.abstract_params) if path[-2:] == ("key", "kernel")
    ]
    assert len(kernels) == model.num_layers == 4
    for kernel in kernels:
        held = {
            device: index[1].indices(8) for device, index in kernel.sharding.devices_indices_map(kernel.shape).items()
        }
        assert held == pool_heads


@pytest.mark.multi_device
def test_a_pool_that_would_be_sharded_otherwise_than_the_k_projection_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(base_num_query_heads=8, base_num_kv_heads=4)
    monkeypatch.setattr(geometry, "kv_head_axes", lambda *_: ("fsdp",))
    with pytest.raises(
        UnsupportedError, match=r"self_attention.*over \('tensor',\).*would be sharded over \('fsdp',\)"
    ):
        model_geometry(config, mesh_of(config, {"tensor": 2, "fsdp": 2}))


@pytest.mark.multi_device
def test_the_reason_for_refusing_fused_qkv_holds() -> None:
    """The control: on two shards MaxText's own fused projection gives other queries than on one."""
    from maxtext.utils import model_creation_utils

    outputs = []
    for sizes in ({"tensor": 1}, {"tensor": 2}):
        config = make_config(fused_qkv=True)
        mesh = mesh_of(config, sizes)
        with logical_axis_rules(config.logical_axis_rules):
            create = model_creation_utils.get_nnx_create_model_fn(
                config, mesh=mesh, model_mode="train", rng_key=jax.random.PRNGKey(0), quant_mode_str="train"
            )
            attention = create().decoder.layers_0.self_attention
            hidden = np.random.default_rng(0).normal(size=(1, 4, 64)).astype(np.float32)
            outputs.append([np.asarray(x) for x in attention.qkv_projection(hidden, "qkv_proj")])
    alone, sharded = outputs
    assert [x.shape for x in alone] == [x.shape for x in sharded]
    assert not all(np.allclose(one, other, atol=1e-4) for one, other in zip(alone, sharded, strict=True))
