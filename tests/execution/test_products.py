"""Native matrix products equal numpy's within float32, whatever stands beside a row, in every instruction-set build."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kv_common.errors import ConfigError, UnsupportedError
from kv_execution import products
from kv_execution.native.library import PRODUCT_TARGET, native_available, native_library
from kv_execution.products import (
    MEASURED_MAX_FEW_ROWS,
    MEASURED_MAX_ROWS,
    ProductChoice,
    choose_products,
    dense_product,
    native_product,
    num_native_products,
    served,
)

needs_native = pytest.mark.skipif(native_available() is not None, reason=str(native_available()))
BUILDS = getattr(products.native_library(), "builds", {}) if native_available() is None else {}
every_build = pytest.mark.parametrize("build", list(BUILDS))

DEPTHS, COLUMNS = (1, 31, 32, 33, 97, 577), (1, 15, 16, 17, 64, 130, 401)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def bound(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The most that a float32 sum in any order is off, each product and each addition rounded once."""
    depth = x.shape[1]
    unit = 2.0**-24
    gamma = (depth + 1) * unit / (1 - (depth + 1) * unit)
    return gamma * (np.abs(x.astype(np.float64)) @ np.abs(weights.astype(np.float64)))


def assert_equals_numpy(x: np.ndarray, weights: np.ndarray, got: jax.Array) -> None:
    exact = x.astype(np.float64) @ weights.astype(np.float64)
    excess = np.abs(np.asarray(got) - exact) - bound(x, weights)
    assert (excess <= 0).all(), f"{x.shape} x {weights.shape}: {excess.max()} beyond the bound"


@needs_native
@every_build
def test_every_shape_equals_numpy_within_the_bound_of_float32(rng, build):
    for depth in DEPTHS:
        for columns in COLUMNS:
            rows = int(rng.integers(1, 40))
            x = rng.standard_normal((rows, depth)).astype(np.float32)
            weights = rng.standard_normal((depth, columns)).astype(np.float32)
            assert_equals_numpy(x, weights, native_product(x, weights, instruction_set=build))


@needs_native
@every_build
def test_every_number_of_rows_equals_numpy_and_each_row_alone_bit_for_bit(rng, build):
    weights = jnp.asarray(rng.standard_normal((70, 213)), jnp.float32)
    x = rng.standard_normal((40, 70)).astype(np.float32)
    alone = np.concatenate([native_product(x[i : i + 1], weights, instruction_set=build) for i in range(40)])
    assert_equals_numpy(x, np.asarray(weights), alone)
    for rows in range(1, 41):
        together = np.asarray(native_product(x[:rows], weights, instruction_set=build))
        np.testing.assert_array_equal(together, alone[:rows], err_msg=f"{rows} rows")


@needs_native
@every_build
def test_many_rows_equal_numpy_and_each_row_alone_bit_for_bit(rng, build):
    """Panels of packed weights: depths beside a block's end, columns beside a vector's and a panel's, rows past 512."""
    for rows, depth, columns in (
        (33, 191, 47),
        (34, 192, 48),
        (65, 193, 49),
        (100, 400, 213),
        (530, 70, 130),
        (1030, 5, 17),
    ):
        x = rng.standard_normal((rows, depth)).astype(np.float32)
        weights = jnp.asarray(rng.standard_normal((depth, columns)), jnp.float32)
        together = np.asarray(native_product(x, weights, instruction_set=build))
        assert_equals_numpy(x, np.asarray(weights), together)
        for first in {0, 1, 31, 32, rows // 2, rows - 1}:
            alone = native_product(x[first : first + 1], weights, instruction_set=build)
            np.testing.assert_array_equal(together[first], np.asarray(alone)[0], err_msg=f"row {first} of {rows}")
        half = weights.astype(jnp.bfloat16)
        widened = native_product(x, half.astype(jnp.float32), instruction_set=build)
        np.testing.assert_array_equal(native_product(x, half, instruction_set=build), widened)


@needs_native
def test_live_rows_of_many_are_those_of_a_product_without_the_padding(rng):
    """The way is chosen by live rows, not by the rung: few of many too."""
    x, weights = rng.standard_normal((128, 70)).astype(np.float32), rng.standard_normal((70, 130)).astype(np.float32)
    for live in (0, 1, 32, 33, 97, 128):
        got = np.asarray(native_product(x, weights, num_live=live))
        np.testing.assert_array_equal(got[:live], np.asarray(native_product(x, weights))[:live])
        assert not got[live:].any()


@needs_native
def test_a_product_cut_over_threads_is_bit_for_bit_one_of_narrow_pieces(rng):
    """The wide one is cut into pieces; each slice of it is small enough for one thread and starts tiles elsewhere."""
    weights = rng.standard_normal((600, 3000)).astype(np.float32)
    for rows in (1, 3, 16, 21, 50):
        x = rng.standard_normal((rows, 600)).astype(np.float32)
        whole = np.asarray(native_product(x, weights))
        for first, end in ((0, 50), (37, 101), (1490, 1555), (2950, 3000)):
            np.testing.assert_array_equal(whole[:, first:end], native_product(x, weights[:, first:end].copy()))


@needs_native
@every_build
def test_bfloat16_weights_are_widened_exactly(rng, build):
    weights = jnp.asarray(rng.standard_normal((65, 91)), jnp.bfloat16)
    for rows in (1, 5, 19):
        x = rng.standard_normal((rows, 65)).astype(np.float32)
        got = native_product(x, weights, instruction_set=build)
        np.testing.assert_array_equal(got, native_product(x, weights.astype(jnp.float32), instruction_set=build))


@needs_native
@every_build
@pytest.mark.parametrize("rows", [1, 9])
def test_nan_and_infinity_go_where_a_plain_product_takes_them(rng, build, rows):
    x = rng.standard_normal((rows, 50)).astype(np.float32)
    weights = rng.standard_normal((50, 37)).astype(np.float32)
    x[0, 3], weights[40, 36], weights[7, 5], weights[8, 6] = np.inf, np.nan, -np.inf, np.inf
    x[-1, 8] = 0.0  # times infinity: not a number
    weights[9], x[0, 9] = 0.0, np.nan
    with np.errstate(invalid="ignore"):
        exact = (x.astype(np.float64)[:, :, None] * weights.astype(np.float64)).sum(1)
    got = np.asarray(native_product(x, weights, instruction_set=build))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
    np.testing.assert_array_equal(got[np.isinf(exact)], exact[np.isinf(exact)])
    assert np.isfinite(got[np.isfinite(exact)]).all()
    assert np.isnan(exact).any() and np.isfinite(exact).any() == (rows > 1), "the control: the case is a case"


@needs_native
def test_rows_of_zeros_give_zeros_and_touch_no_other_row(rng):
    weights = rng.standard_normal((48, 80)).astype(np.float32)
    x = rng.standard_normal((12, 48)).astype(np.float32)
    padded = np.concatenate([x, np.zeros((4, 48), np.float32)])
    got = np.asarray(native_product(padded, weights))
    np.testing.assert_array_equal(got[12:], np.zeros((4, 80)))
    np.testing.assert_array_equal(got[:12], native_product(x, weights))


@needs_native
def test_only_live_rows_are_computed_and_the_others_are_zeros_whatever_they_hold(rng):
    weights = rng.standard_normal((48, 530)).astype(np.float32)
    x = rng.standard_normal((21, 48)).astype(np.float32)
    x[13:] = np.nan
    program = jax.jit(lambda x, live: native_product(x, weights, num_live=live))
    for live in (13, 8, 1, 0):
        got = np.asarray(program(x, live))
        np.testing.assert_array_equal(got[:live], np.asarray(native_product(x[:13], weights))[:live])
        np.testing.assert_array_equal(got[live:], np.zeros((21 - live, 530)))
    assert np.isnan(np.asarray(program(x, 99))[13:]).all(), "more than there are is all of them"
    np.testing.assert_array_equal(program(x, -1), np.zeros((21, 530)))
    assert program._cache_size() == 1, "the number is no part of the program"


@needs_native
def test_arrays_of_no_rows_columns_or_depth_have_their_shapes_and_no_values():
    for rows, depth, columns in ((0, 3, 4), (2, 3, 0), (2, 0, 4)):
        got = native_product(jnp.ones((rows, depth)), jnp.ones((depth, columns)))
        np.testing.assert_array_equal(got, np.zeros((rows, columns)))


@needs_native
def test_operands_that_start_anywhere_in_a_larger_array_are_read_where_they_are(rng):
    """numpy views of odd offsets reach the kernel through a program that slices them."""
    pool = rng.standard_normal(5000).astype(np.float32)

    @jax.jit
    def sliced(pool: jax.Array) -> jax.Array:
        return native_product(pool[3 : 3 + 2 * 41].reshape(2, 41), pool[101 : 101 + 41 * 29].reshape(41, 29))

    x, weights = pool[3 : 3 + 82].reshape(2, 41), pool[101 : 101 + 41 * 29].reshape(41, 29)
    assert_equals_numpy(x, weights, sliced(pool))


@needs_native
def test_a_product_over_several_axes_is_numpys_tensordot(rng):
    x = rng.standard_normal((1, 5, 3, 8)).astype(np.float32)
    kernel = rng.standard_normal((3, 8, 20)).astype(np.float32)
    got = dense_product(jnp.asarray(x), jnp.asarray(kernel), 2)
    assert got.shape == (1, 5, 20)
    assert_equals_numpy(x.reshape(5, 24), kernel.reshape(24, 20), got[0])
    kernel = rng.standard_normal((8, 4, 5)).astype(np.float32)
    got = dense_product(jnp.asarray(x), jnp.asarray(kernel), 1)
    assert got.shape == (1, 5, 3, 4, 5)
    assert_equals_numpy(x.reshape(15, 8), kernel.reshape(8, 20), got.reshape(15, 20))
    with pytest.raises(ValueError, match="are not the first of"):
        dense_product(jnp.asarray(x), jnp.asarray(kernel), 2)


@needs_native
def test_the_library_counts_the_products_it_computed(rng):
    x, weights = jnp.ones((2, 8)), jnp.ones((8, 8))
    before = num_native_products()
    for _ in range(3):
        jax.block_until_ready(native_product(x, weights))
    assert num_native_products() == before + 3


def test_only_few_float32_rows_are_the_kernel_s():
    def of(rows, x=jnp.float32, kernel=jnp.float32):
        abstract = jax.ShapeDtypeStruct((1, rows, 8), x), jax.ShapeDtypeStruct((8, 4), kernel)
        return served(*abstract, 1, 32)  # type: ignore[arg-type]

    assert of(1) and of(32)
    assert not of(33) and not of(0)
    assert not of(4, x=jnp.bfloat16) and not of(4, kernel=jnp.bfloat16)


@needs_native
def test_operands_that_the_kernel_cannot_read_are_refused():
    with pytest.raises(UnsupportedError, match="not bfloat16 x float32"):
        native_product(jnp.ones((1, 4), jnp.bfloat16), jnp.ones((4, 4)))
    with pytest.raises(UnsupportedError, match="not float32 x float16"):
        native_product(jnp.ones((1, 4)), jnp.ones((4, 4), jnp.float16))
    with pytest.raises(ConfigError, match="instruction_set='sve': this machine runs baseline"):
        native_product(jnp.ones((1, 4)), jnp.ones((4, 4)), instruction_set="sve")
    wrong = jax.ffi.ffi_call(PRODUCT_TARGET, jax.ShapeDtypeStruct((1, 5), jnp.float32))
    for x, weights in ((jnp.ones((1, 4)), jnp.ones((3, 5))), (jnp.ones((2, 4)), jnp.ones((4, 5)))):
        with pytest.raises(Exception, match="x, weights and y must be"):
            jax.block_until_ready(wrong(x, weights, jnp.int32(1), build=np.int64(-1)))
    with pytest.raises(Exception, match="num_live must be one number"):
        jax.block_until_ready(wrong(jnp.ones((1, 4)), jnp.ones((4, 5)), jnp.ones(2, jnp.int32), build=np.int64(-1)))
    for build in (99, max(native_library().builds.values()) + 1):
        with pytest.raises(Exception, match="no such instruction set"):
            jax.block_until_ready(wrong(jnp.ones((1, 4)), jnp.ones((4, 5)), jnp.int32(1), build=np.int64(build)))


def choice(setting: str = "auto", **given: object) -> ProductChoice:
    return choose_products(setting, **{"platform": "cpu", "num_devices": 1, "dtype": "float32", **given})  # type: ignore[arg-type]


@needs_native
def test_one_float32_cpu_device_gets_native_products_and_whoever_wants_none_gets_none():
    measured = MEASURED_MAX_ROWS.get(native_library().best, MEASURED_MAX_FEW_ROWS)
    assert choice().max_rows == choice("on").max_rows == measured
    assert choice("on").required and not choice().required
    assert choice("off").describe() == "XLA's (asked for by paged_native_products=off)"
    for setting in ("auto", "on"):
        assert choice(setting, native_switch=0).reason == "paged_attention_native=0 forbids native kernels"
        assert not choice(setting, native_switch=0).max_rows


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"platform": "cuda"}, "run on CPUs, not on cuda"),
        ({"num_devices": 4}, "weights on 4 devices would be gathered"),
        ({"dtype": "bfloat16"}, "native products are float32, dtype=bfloat16"),
    ],
)
def test_where_native_products_cannot_run_auto_says_why_and_on_is_refused(given, why):
    assert not choice(**given).max_rows
    assert why in choice(**given).describe()
    with pytest.raises(UnsupportedError, match=f"paged_native_products=on: .*{why}"):
        choice("on", **given)


def test_without_the_library_products_are_xlas_and_say_so(monkeypatch):
    monkeypatch.setattr(products, "native_available", lambda: "the C++ kernels are not built")
    assert choice().describe() == "XLA's (the C++ kernels are not built)"
    assert num_native_products() == 0
    with pytest.raises(UnsupportedError, match="are not built"):
        choice("on")


def test_an_unknown_setting_is_refused():
    with pytest.raises(ConfigError, match="choose auto, on or off"):
        choice("maybe")
