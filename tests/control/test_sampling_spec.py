"""A sampling parameter outside its range is refused when it is made, not read as something else."""

from __future__ import annotations

import math

import pytest

from kv_common.errors import RequestError
from kv_control.plan import GREEDY, SamplingSpec


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 1 << 32),
        ("sample_index", -1),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"{name}={value}"):
        SamplingSpec(**{name: value})  # type: ignore[arg-type]


def test_the_bounds_themselves_are_good() -> None:
    assert SamplingSpec() == GREEDY
    SamplingSpec(temperature=100.0, top_k=10**9, top_p=1.0, min_p=1.0, seed=(1 << 32) - 1, sample_index=3)
