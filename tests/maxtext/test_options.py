"""No option is ignored silently: each is honoured, refused or irrelevant, and the table says which."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx
from maxtext.common.common_types import AttentionType
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.attentions import Attention
from maxtext.utils import model_creation_utils

from kv_common.errors import ConfigError, LayoutError, UnsupportedError
from kv_execution.attention.reference import ReferenceBackend
from maxtext_paged.assembly import assemble
from maxtext_paged.binding import PagePool, attention_geometry, bind_paged_attention
from maxtext_paged.config import PagedOptions
from maxtext_paged.families import SUPPORTED_BLOCKS
from maxtext_paged.geometry import model_geometry
from maxtext_paged.model import MaxTextPagedModel
from maxtext_paged.options import OPTION_TABLE, Verdict, check_options
from maxtext_paged.session import open_session
from maxtext_paged.sizing import pool_size
from tests.tiny_models import dense_model, make_config, make_mesh

pytestmark = pytest.mark.maxtext

DOCS = Path(__file__).parents[2] / "docs" / "options.md"

REFUSED_VALUES: dict[str, Any] = {
    "quantization": "int8",
    "mtp_num_layers": 1,
    "engram_layers": [1],
    "mhc_expansion_rate": 4,
    "capacity_factor": 1.25,
    "shard_mode": "explicit",
}
"""A value that must be refused, where it is not simply True or 2."""

REFUSED = [rule for rule in OPTION_TABLE if rule.verdict is Verdict.REFUSED]


def test_the_table_names_options_that_maxtext_has_once_each() -> None:
    names = [rule.name for rule in OPTION_TABLE]
    assert len(names) == len(set(names))
    assert set(names) <= set(MaxTextConfig.model_fields)


def test_maxtexts_defaults_are_accepted() -> None:
    check_options(make_config())


@pytest.mark.parametrize("rule", REFUSED, ids=lambda rule: rule.name)
def test_a_setting_that_paging_would_not_follow_is_refused_by_name(rule: Any) -> None:
    value = REFUSED_VALUES.get(rule.name, 2 if rule.name.endswith("_parallelism") else True)
    with pytest.raises(ConfigError, match=f"{rule.name}={re.escape(str(value))}: .*(set|leave|only|not served)"):
        check_options(SimpleNamespace(**{rule.name: value}))


def test_all_refusals_are_listed_at_once() -> None:
    with pytest.raises(ConfigError, match=r"quantize_kvcache=True.*reshape_q=True"):
        check_options(SimpleNamespace(quantize_kvcache=True, reshape_q=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fused_qkv": True, "ici_fsdp_parallelism": 2}, "fused_qkv=true with data or fsdp"),
        ({"num_experts": 4, "sparse_matmul": True, "megablox": True}, "megablox=false"),
        ({"rope_type": "yarn", "max_position_embeddings": 64, "max_target_length": 65}, "YaRN"),
    ],
)
def test_settings_that_are_wrong_only_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_options(SimpleNamespace(**settings))


def test_maxtexts_own_enums_are_read_as_what_they_mean() -> None:
    """``rope_type`` and ``shard_mode`` are enums in a real configuration: a string compare never matches them."""
    config = make_config(rope_type="yarn", max_position_embeddings=32)
    with pytest.raises(ConfigError, match="YaRN"):
        check_options(config)
    with pytest.raises(ConfigError, match="shard_mode=explicit"):
        check_options(make_config(shard_mode="explicit"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"paged_tokens_per_page": 0}, "paged_tokens_per_page=0"),
        ({"paged_num_pages": -1}, "paged_num_pages=-1"),
        ({"paged_backend": "cuda"}, "paged_backend='cuda'"),
        ({"paged_kv_dtype": "int3"}, "paged_kv_dtype='int3'"),
        ({"paged_attention_native": 7}, "paged_attention_native='7'|paged_attention_native=7"),
    ],
)
def test_a_paged_option_out_of_range_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PagedOptions.checked(values)


def test_a_configuration_without_paged_keys_gets_the_defaults() -> None:
    assert PagedOptions.from_config(SimpleNamespace(attention="gpu_paged")) == PagedOptions()


def test_the_kill_switch_of_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_ATTENTION_NATIVE", "0")
    assert PagedOptions.from_config(make_config(paged_attention_native=1)).paged_attention_native == "0"
    monkeypatch.setenv("PAGED_ATTENTION_NATIVE", "1")
    assert PagedOptions.from_config(make_config(paged_attention_native=0)).paged_attention_native == "0"


def test_the_documented_table_is_the_one_in_the_code() -> None:
    text = DOCS.read_text()
    for rule in OPTION_TABLE:
        assert f"| `{rule.name}` | {rule.verdict.value} | {rule.why} |" in text
    for name, field in PagedOptions.model_fields.items():
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        assert f"| `{name}` | {default} | {field.description} |" in text


# --- what may be bound -----------------------------------------------------------------------------------


MOE = {"num_experts": 4, "base_moe_mlp_dim": 128, "sparse_matmul": False}


@pytest.mark.parametrize(
    "settings",
    [
        {"decoder_block": "gpt3"},
        {"decoder_block": "deepseek", "attention_type": "mla", "base_num_kv_heads": 4, **MOE},
    ],
    ids=lambda settings: settings["decoder_block"],
)
def test_decoder_blocks_off_the_allow_list_are_refused_by_name(settings: dict[str, Any]) -> None:
    config = make_config(**settings)
    with pytest.raises(UnsupportedError, match=f"decoder_block={settings['decoder_block']} .*supported: .*llama2"):
        model_geometry(config, make_mesh(config))


class DerivedAttention(Attention):
    """As MLA and compressed attention are: a subclass with another call."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda attention: setattr(attention, "__class__", DerivedAttention), "is a DerivedAttention"),
        (lambda attention: setattr(attention, "attention_type", AttentionType.CHUNK), "attention_type=chunk"),
        (lambda attention: setattr(attention, "share_kv_layer", True), "KV-sharing"),
        (lambda attention: setattr(attention, "is_vision", True), "vision"),
        (lambda attention: setattr(attention, "head_dim", 8), "differ in"),
    ],
)
def test_one_layer_off_the_allow_list_refuses_the_model_naming_the_layer(change: Any, message: str) -> None:
    config = make_config()
    create = model_creation_utils.get_nnx_create_model_fn(config, mesh=make_mesh(config), model_mode="prefill")
    model = nnx.eval_shape(create)
    change(model.decoder.layers_1.self_attention)
    with pytest.raises(UnsupportedError, match=message):
        attention_geometry(model)


@pytest.mark.slow
def test_another_cache_in_the_tree_refuses_the_model() -> None:
    config = make_config()
    mesh = make_mesh(config)
    geometry = model_geometry(config, mesh)
    create = model_creation_utils.get_nnx_create_model_fn(config, mesh=mesh, model_mode="prefill")
    model = create()
    model.decoder.layers_0.conv_state = nnx.Cache(jnp.zeros(3))
    layout = geometry.layout(mesh, num_pages=2, tokens_per_page=4, dtype="float32")
    with pytest.raises(UnsupportedError, match=r"decoder\.layers_0\.conv_state"):
        bind_paged_attention(model, layout, backend=ReferenceBackend(), mesh=mesh, head_axes=())


def test_binding_leaves_no_dense_cache_and_only_the_pools_bytes() -> None:
    config = make_config()
    mesh = make_mesh(config)
    geometry = model_geometry(config, mesh)
    layout = geometry.layout(mesh, num_pages=6, tokens_per_page=4, dtype="bfloat16")
    model = MaxTextPagedModel(config, mesh, layout=layout, head_axes=(), backend=ReferenceBackend())
    caches = [leaf for _, leaf in nnx.to_flat_state(model.create_pools())]
    assert sum(leaf.get_value().nbytes for leaf in caches) == layout.total_pool_bytes()
    assert {type(leaf) for leaf in caches} == {PagePool}


def test_the_allow_list_names_only_what_the_table_of_blocks_documents() -> None:
    text = DOCS.read_text()
    for block in SUPPORTED_BLOCKS:
        assert f"`{block.value}`" in text


# --- sizes -----------------------------------------------------------------------------------------------


def test_a_pool_is_sized_by_pages_by_budget_or_by_a_stated_default() -> None:
    config = make_config()
    mesh = make_mesh(config)
    layout = model_geometry(config, mesh).layout(mesh, num_pages=1, tokens_per_page=16, dtype="float32")
    page = 2 * 2 * 16 * 2 * 16 * 4  # K and V, layers, tokens, heads, head size, float32
    assert layout.page_bytes() == page
    common = {"max_num_seqs": 4, "max_model_len": 64}
    assert pool_size(layout, num_pages=5, budget_bytes=10**9, **common).num_pages == 5
    exact = pool_size(layout, num_pages=0, budget_bytes=3 * page, **common)
    assert (exact.num_pages, exact.reason) == (3, f"paged_kv_budget_bytes={3 * page}")
    assert pool_size(layout, num_pages=0, budget_bytes=3 * page + page - 1, **common).num_pages == 3
    default = pool_size(layout, num_pages=0, budget_bytes=0, **common)
    assert default.num_pages == 4 * 4
    with pytest.raises(ConfigError, match=f"holds no page.*smallest budget that works is {page}"):
        pool_size(layout, num_pages=0, budget_bytes=page - 1, **common)
    capped = pool_size(layout, num_pages=0, budget_bytes=0, max_num_seqs=4096, max_model_len=1 << 20)
    assert capped.num_pages == max((1 << 30) // page, (1 << 20) // 16)


@pytest.mark.multi_device
def test_more_tensor_shards_than_kv_heads_are_refused_with_a_way_out() -> None:
    import jax

    config = make_config(ici_tensor_parallelism=4, ici_fsdp_parallelism=1)
    with pytest.raises((LayoutError, ValueError), match=r"fsdp"):
        mesh = make_mesh(config, jax.devices()[:4])
        model_geometry(config, mesh).layout(mesh, num_pages=1, tokens_per_page=16, dtype="float32")


def test_a_session_without_gpu_paged_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention=dot_product"):
        assemble(make_config(attention="dot_product"))


@pytest.mark.slow
def test_more_requests_than_tokens_in_a_step_are_refused_when_asked_for_and_avoided_when_not() -> None:
    config = make_config(paged_max_num_seqs=33, paged_max_num_batched_tokens=32, paged_num_pages=4)
    with pytest.raises(ConfigError, match="paged_max_num_batched_tokens=32 is below paged_max_num_seqs=33"):
        open_session(config, mesh=make_mesh(config), params=dense_model().params)
    config = make_config(paged_max_num_batched_tokens=16)
    assert assemble(config, mesh=make_mesh(config)).max_num_seqs == 16
    config = make_config(per_device_batch_size=48)
    assert assemble(config, mesh=make_mesh(config)).max_num_seqs == 48
