"""Element sizes against what the arrays of the machine-learning dtypes really take."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kv_common.dtypes import ELEMENT_BITS, bytes_of, element_bits
from kv_common.errors import ConfigError


@pytest.mark.parametrize("name", sorted(set(ELEMENT_BITS) - {"int4"}))
def test_an_element_takes_the_bytes_its_array_takes(name):  # CASES 150
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    assert bytes_of(7, name) == np.zeros(7, dtype).nbytes


def test_two_int4_elements_share_a_byte():
    assert element_bits("int4") == ml_dtypes.iinfo(ml_dtypes.int4).bits
    assert [bytes_of(n, "int4") for n in range(5)] == [0, 1, 1, 2, 2]


def test_an_unknown_dtype_is_refused_with_the_option_and_the_choices():
    with pytest.raises(ConfigError, match=r"paged_kv_dtype='float64'.*bfloat16"):
        element_bits("float64")
