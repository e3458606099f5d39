"""Native products inside MaxText's dense layers: the same values and parameters, and only where they may be.

Whole models with native products are compared with MaxText's dense forward in test_binding.py.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxtext.common.common_types import ShardMode
from maxtext.layers.linears import DenseGeneral

from kv_common.errors import UnsupportedError
from kv_execution.native.library import PRODUCT_TARGET, native_available
from kv_execution.products import ProductChoice
from maxtext_paged.assembly import assemble
from maxtext_paged.binding import StepBinding
from maxtext_paged.loading import params_from_tree
from maxtext_paged.products import BoundProducts, bind_products
from tests.hlo import custom_calls
from tests.maxtext.test_binding import RUNG, paged_model, run_plan
from tests.tiny_models import dense_model, make_config, mesh_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.maxtext,
    pytest.mark.skipif(native_available() is not None, reason=str(native_available())),
]

ROWS = 5
NATIVE = ProductChoice(ROWS, "a test")


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 255, (2, 30)).astype(np.int32)


def step_of(num_live: int) -> StepBinding:
    """A step with so many real rows."""
    step = StepBinding()
    step.num_live.set_value(jnp.int32(num_live))
    return step


class Holder(nnx.Module):
    """A model of one layer."""

    def __init__(self, layer: DenseGeneral) -> None:
        self.layer = layer


def layer(**options: Any) -> DenseGeneral:
    """A layer of three heads of 8 to two axes, with random weights and a random bias."""
    given = {"in_features_shape": (3, 8), "out_features_shape": (2, 7), "axis": (-2, -1), "use_bias": True}
    made = DenseGeneral(**{**given, "kernel_axes": (None,) * 4, **options}, rngs=nnx.Rngs(3))
    if made.bias is not None:
        made.bias.set_value(jax.random.normal(jax.random.key(7), made.bias.shape, made.bias.dtype))
    return made


def bound(choice: ProductChoice = NATIVE, num_live: int = 99, **options: Any) -> tuple[DenseGeneral, BoundProducts]:
    holder = Holder(layer(**options))
    products = bind_products(holder, choice, step_of(num_live))
    return holder.layer, products


def num_native(one: DenseGeneral, x: jax.Array, **call: Any) -> int:
    text = jax.jit(lambda x: one(x, **call)).lower(x).compile().as_text()
    return len(custom_calls(text, PRODUCT_TARGET))


def rows_of(count: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(count), (1, count, 3, 8), dtype)


def test_a_bound_layer_computes_what_it_did_casts_and_bias_included() -> None:
    plain, (native, products) = layer(), bound()
    assert products.native == ("layer",) and products.others == ()
    for count in (1, ROWS):
        x = rows_of(count)
        assert num_native(native, x) == 1 and num_native(plain, x) == 0
        # 24 products of values below 5: a float32 sum in any order.
        np.testing.assert_allclose(native(x), plain(x), rtol=0, atol=24 * 25 * 2.0**-23)
    whole = rows_of(ROWS).astype(jnp.int32)
    np.testing.assert_allclose(native(whole), plain(whole), rtol=0, atol=24 * 25 * 2.0**-23)


def test_rows_that_fill_up_a_rung_become_the_bias_and_real_ones_do_not_change() -> None:
    x = rows_of(ROWS)
    (whole, _), (native, _) = bound(), bound(num_live=2)
    np.testing.assert_array_equal(native(x)[:, :2], whole(x)[:, :2])
    np.testing.assert_array_equal(native(x)[:, 2:], np.broadcast_to(native.bias[...], (1, ROWS - 2, 2, 7)))


def test_more_rows_than_the_limit_are_xlas_bit_for_bit() -> None:
    plain, (native, _) = layer(), bound()
    x = rows_of(ROWS + 1)
    assert num_native(native, x) == 0
    np.testing.assert_array_equal(jax.jit(native.__call__)(x), jax.jit(plain.__call__)(x))


def test_rows_of_another_type_or_contracted_elsewhere_are_xlas_bit_for_bit() -> None:
    for options, x in (
        ({"dtype": jnp.bfloat16}, rows_of(2, jnp.bfloat16)),
        ({"weight_dtype": jnp.bfloat16, "dtype": jnp.bfloat16}, rows_of(2, jnp.bfloat16)),
        ({"axis": (1, 3)}, jax.random.normal(jax.random.key(1), (1, 3, 2, 8))),
    ):
        plain, (native, _) = layer(**options), bound(**options)
        assert num_native(native, x) == 0
        np.testing.assert_array_equal(jax.jit(native.__call__)(x), jax.jit(plain.__call__)(x))


def test_a_slice_of_the_kernel_is_xlas() -> None:
    """MaxText asks no exchanged dot-general for it."""
    plain, (native, _) = layer(), bound()
    x = rows_of(2)
    assert num_native(native, x, slice_bounds=(2, 5)) == 0
    np.testing.assert_array_equal(native(x, slice_bounds=(2, 5)), plain(x, slice_bounds=(2, 5)))


def test_a_layer_that_a_provider_has_made_its_own_keeps_its_product() -> None:
    class Adapted(DenseGeneral):
        pass

    held = Holder(layer())
    held.other = layer()
    held.other.__class__ = Adapted
    products = bind_products(held, NATIVE, step_of(99))
    assert products.others == (("other", "it is a Adapted"),)
    assert products.describe().endswith("1 of 2 dense layers, not other and the like: it is a Adapted")
    assert held.other.quant_dot_general is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"matmul_precision": "highest"}, "matmul_precision=highest"),
        ({"shard_mode": ShardMode.EXPLICIT}, "its sharding is explicit"),
        ({"weight_dtype": jnp.float8_e4m3fn}, "its weights are scaled"),
        ({"has_scale": True}, "its weights are scaled"),
        ({"parameter_memory_host_offload": True}, "its weights are on the host"),
    ],
)
def test_a_layer_that_means_more_than_a_plain_product_keeps_its_own_and_is_named(options: Any, why: str) -> None:
    native, products = bound(**options)
    assert products.native == () and products.others == (("layer", why),)
    assert products.describe() == f"XLA's (no dense layer can be bound: {why})"
    assert native.quant_dot_general is None
    with pytest.raises(UnsupportedError, match=f"paged_native_products=on: layer keeps XLA's product, {why}"):
        bound(ProductChoice(ROWS, "a test", required=True), **options)


def test_nothing_is_bound_where_nothing_was_chosen() -> None:
    native, products = bound(ProductChoice(0, "a reason"))
    assert products.describe() == "XLA's (a reason)"
    assert native.quant_dot_general is None


def paths(state: nnx.State) -> dict[str, Any]:
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def test_every_dense_layer_of_a_model_is_bound_and_its_parameters_stay_where_they_were() -> None:
    native, plain = (assemble(make_config(paged_native_products=setting)).model for setting in ("on", "off"))
    assert paths(native.abstract_params) == paths(plain.abstract_params)
    kernels = {path.removesuffix(".kernel") for path in paths(plain.abstract_params) if path.endswith(".kernel")}
    assert set(native.products.native) == kernels and native.products.others == ()
    assert len(kernels) == 2 * 7 + 1, "q, k, v, out, two in, one out for each layer, and the head"
    assert plain.products == BoundProducts(plain.products.choice)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, r"native up to \d+ rows, XLA's above \(the default on CPUs; .*\); 15 of 15 dense layers"),
        ({"paged_attention_native": 0}, r"XLA's \(paged_attention_native=0 forbids native kernels\)"),
        ({"dtype": "bfloat16"}, r"XLA's \(native products are float32, dtype=bfloat16\)"),
        ({"matmul_precision": "high"}, r"XLA's \(no dense layer can be bound: matmul_precision=high\)"),
    ],
    ids=str,
)
def test_a_model_says_which_products_run_and_why(options: dict[str, Any], line: str) -> None:

    assert re.fullmatch(line, assemble(make_config(**options)).model.products.describe())


@pytest.mark.multi_device
def test_a_sharded_model_keeps_xlas_products_and_says_why() -> None:
    config = make_config()
    mesh = mesh_of(config, {"tensor": 2})
    products = assemble(config, mesh=mesh).model.products
    assert products.describe() == "XLA's (weights on 2 devices would be gathered for a custom call)"
    with pytest.raises(UnsupportedError, match="paged_native_products=on: weights on 2 devices"):
        assemble(make_config(paged_native_products="on"), mesh=mesh)


def test_kernels_held_in_bfloat16_are_half_as_large_and_the_rest_stays_as_it_was() -> None:
    half, full = (assemble(make_config(paged_weight_dtype=dtype)) for dtype in ("bfloat16", "auto"))
    held, before = paths(half.model.abstract_params), paths(full.model.abstract_params)
    assert held.keys() == before.keys()
    narrowed = {path.removesuffix(".kernel") for path in held if held[path].dtype == jnp.bfloat16}
    assert narrowed == set(half.model.products.native)
    saved = sum(2 * leaf.size for path, leaf in held.items() if path.removesuffix(".kernel") in narrowed)
    assert half.pool.weight_bytes == full.pool.weight_bytes - saved
    assert "weights held in bfloat16" in half.model.products.describe()


def test_weights_that_are_bfloat16_numbers_give_the_same_logits_bit_for_bit_held_in_either(tokens: np.ndarray) -> None:
    """Few rows are the kernel's; and XLA's widen the whole array first: also above the limit of rows."""
    params = jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf, jnp.bfloat16), np.float32), dense_model().params)
    for max_rows in (RUNG, 1):
        got = []
        for half in (False, True):
            choice = ProductChoice(max_rows, "a test", required=True, half_weights=half)
            model = paged_model("llama2", backend="native", products=choice)
            logits, _, hlo = run_plan(model, params_from_tree(model, params), tokens)
            assert len(custom_calls(hlo, PRODUCT_TARGET)) == (15 if max_rows == RUNG else 0)
            got.append(np.concatenate(logits))
        np.testing.assert_array_equal(got[0], got[1])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"paged_native_products": "off"}, "asked for by paged_native_products=off"),
        ({"paged_attention_native": 0}, "paged_attention_native=0 forbids native kernels"),
        ({"dtype": "bfloat16"}, "native products are float32"),
        ({"matmul_precision": "high"}, "decoder.layers_0.* keeps XLA's product, matmul_precision=high"),
    ],
    ids=str,
)
def test_half_weights_without_native_products_are_refused_and_never_widened_at_every_step(options, why) -> None:
    with pytest.raises(UnsupportedError, match=f"paged_weight_dtype=bfloat16: .*{why}"):
        assemble(make_config(paged_weight_dtype="bfloat16", **options))
