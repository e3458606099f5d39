"""The rule by which numbers enter and leave a quantised pool: bit for bit that of a numpy model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kv_common.errors import ConfigError
from kv_execution.quantised import dequantise, quantise, storage_dtype
from tests.execution.numpy_quantised import DTYPES, LARGEST, UNIT_ROUNDOFF, numbers, read_back, stored

program = jax.jit(quantise, static_argnums=1)


def assert_stored(rows: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    values, scales = (np.asarray(x) for x in program(rows, dtype))
    wanted, wanted_scales = stored(rows, dtype)
    assert (values.dtype, scales.dtype) == (storage_dtype(dtype), np.float32)
    np.testing.assert_array_equal(values, wanted)
    np.testing.assert_array_equal(scales.view(np.uint32) & 0x7FC00000, wanted_scales.view(np.uint32) & 0x7FC00000)
    np.testing.assert_array_equal(scales, wanted_scales)
    return values, scales


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(17)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_every_magnitude_are_stored_as_the_model_says(rng, dtype):
    rows = rng.normal(size=(400, 3, 16)) * np.exp2(rng.uniform(-95, 120, size=(400, 3, 1)))
    rows *= np.exp2(rng.uniform(-14, 0, size=rows.shape))  # far below a row's largest, too: fp8's subnormals
    assert_stored(rows.astype(np.float32), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_stored_reads_back_within_the_dtypes_own_rounding(rng, dtype):
    rows = rng.normal(size=(64, 2, 32)).astype(np.float32)
    back = np.asarray(dequantise(*program(rows, dtype)))
    np.testing.assert_allclose(back, read_back(rows, dtype), rtol=2e-7)
    largest = np.abs(rows).max(-1, keepdims=True)
    error = np.abs(back - rows) / largest
    assert error.max() <= UNIT_ROUNDOFF[dtype] * (1 + 1e-6)
    assert error.max() > UNIT_ROUNDOFF[dtype] / 4, "nothing was rounded"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_ends_at_plus_and_minus_the_largest_value_and_never_past_it(rng, dtype):
    """The scale is rounded, so that the largest number over it may come out just past the largest value."""
    rows = np.zeros((5000, 16), np.float32)
    rows[:, 3] = rng.uniform(0.5, 2, 5000)
    rows[:, 4] = -rows[:, 3]
    over = rows[:, 3] * (np.float32(1) / (rows[:, 3] * np.float32(1 / LARGEST[dtype]))) > LARGEST[dtype]
    assert over.any() or dtype != "int8", "no row puts the end to the test"
    values, scales = assert_stored(rows, dtype)
    ends = numbers(values, np.ones_like(scales))[:, 3:5]
    np.testing.assert_array_equal(ends, np.broadcast_to([LARGEST[dtype], -LARGEST[dtype]], ends.shape))


def test_int8_rounds_ties_to_even_and_fp8_too():
    row = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -125.5]], np.float32)
    scale = np.float32(127 * np.float32(1 / 127))
    assert scale == 1.0
    assert assert_stored(row, "int8")[0].tolist() == [[127, 0, 2, 2, 0, -2, 126, -126]]
    codes = np.arange(126, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    between = np.append((codes[1:] + codes[:-1]) / 2, np.float32(448)).astype(np.float32)[None]
    assert np.float32(448 * np.float32(1 / 448)) == 1.0
    got = assert_stored(between, "float8_e4m3fn")[0][0]
    assert (got[:-1] % 2 == 0).all(), "halfway between two codes is the even one, subnormals included"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_zeros_and_one_too_small_to_scale_are_zeros_with_scale_0(dtype):
    rows = np.zeros((5, 16), np.float32)
    rows[1, 2] = -0.0
    rows[2, 5] = np.float32(1e-42)  # subnormal: some threads read it as 0
    rows[3, :] = np.nextafter(np.float32(2.0**-100), np.float32(0))
    rows[4, :] = 2.0**-100
    values, scales = assert_stored(rows, dtype)
    assert not values[:4].any()
    assert scales[:4].tolist() == [[0]] * 4
    assert scales[4] > 0
    assert np.asarray(dequantise(values, scales))[4].tolist() == [2.0**-100] * 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sick", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_number_that_is_not_finite_reads_as_nan_throughout_and_its_neighbours_do_not(rng, dtype, sick):
    rows = rng.normal(size=(6, 2, 16)).astype(np.float32)
    healthy = rows.copy()
    rows[2, 1, 7] = sick
    values, scales = assert_stored(rows, dtype)
    back = np.asarray(dequantise(values, scales))
    assert np.isnan(back[2, 1]).all()
    others = np.ones((6, 2), bool)
    others[2, 1] = False
    np.testing.assert_array_equal(back[others], np.asarray(dequantise(*program(healthy, dtype)))[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_float_saturates_nothing(dtype):
    rows = np.full((1, 16), np.finfo(np.float32).max, np.float32)
    rows[0, 1:] = -1.0
    values, scales = assert_stored(rows, dtype)
    assert np.isfinite(np.asarray(dequantise(values, scales))).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_depend_on_no_other_row_and_on_no_program(rng, dtype):
    rows = rng.normal(size=(37, 3, 48)).astype(np.float32)
    values, scales = (np.asarray(x) for x in program(rows, dtype))
    for size in (1, 5, 36):
        for start in range(0, 37, size):
            part = slice(start, min(start + size, 37))
            some, some_scales = program(rows[part], dtype)
            np.testing.assert_array_equal(np.asarray(some), values[part])
            np.testing.assert_array_equal(np.asarray(some_scales), scales[part])
    eager, eager_scales = quantise(jnp.asarray(rows), dtype)
    np.testing.assert_array_equal(np.asarray(eager), values)
    np.testing.assert_array_equal(np.asarray(eager_scales), scales)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_few_bits_which_often_fall_on_ties_are_stored_as_the_model_says(rng, dtype, half):
    """The other rounding of a division, which XLA would simplify, shows here in some hundred numbers."""
    assert_stored(np.asarray(jnp.asarray(rng.normal(size=(500, 4, 256)), half), np.float32), dtype)


def test_bfloat16_rows_are_stored_as_the_float32_numbers_they_are(rng):
    rows = jnp.asarray(rng.normal(size=(9, 2, 16)), jnp.bfloat16)
    for dtype in DTYPES:
        values, scales = program(rows, dtype)
        wanted, wanted_scales = stored(np.asarray(rows, np.float32), dtype)
        np.testing.assert_array_equal(np.asarray(values), wanted)
        np.testing.assert_array_equal(np.asarray(scales), wanted_scales)


def test_another_dtype_is_refused_by_name():
    with pytest.raises(ConfigError, match="paged_kv_dtype='int4': quantised pools are int8 or float8_e4m3fn"):
        quantise(jnp.zeros((1, 16)), "int4")
