"""``SamplingParams`` and prompts of Python callers: one registry of options with files, and the same words."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_common.errors import RequestError
from maxtext_paged import SamplingParams
from maxtext_paged.formats import BadRow, InputRow, parse_row
from maxtext_paged.prompts import row_of_prompt, with_params
from maxtext_paged.row_fields import OPTIONS


def from_file(row: dict[str, Any]) -> InputRow | BadRow:
    return parse_row(json.dumps(row).encode(), index=0, line=1)


def test_the_fields_are_the_options_of_a_row_no_more_and_no_fewer() -> None:
    assert list(SamplingParams.model_fields) == list(OPTIONS)


def test_every_field_says_what_it_means() -> None:
    assert SamplingParams.__doc__ is not None
    for name in SamplingParams.model_fields:
        assert f"\n      {name}" in SamplingParams.__doc__ or f", {name}" in SamplingParams.__doc__, name


_values = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 200), st.floats(), st.text(max_size=3), st.lists(st.integers(-1, 9))
)


@given(st.sampled_from(sorted(OPTIONS)), _values)
def test_a_value_is_taken_or_refused_exactly_as_in_a_row(name: str, value: Any) -> None:
    row = from_file({"prompt": "x", name: value})
    if isinstance(row, BadRow) and row.error.code == "invalid_json":  # NaN, which JSON cannot say
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})
    elif isinstance(row, BadRow):
        with pytest.raises(RequestError) as refused:
            SamplingParams(**{name: value})
        assert str(refused.value) == row.error.message
    else:
        read = row_of_prompt("x", SamplingParams(**{name: value}), 0)
        assert isinstance(read, InputRow)
        assert getattr(read, name) == getattr(row, name)


def test_options_that_disagree_are_refused_together() -> None:
    with pytest.raises(RequestError, match=r"min_tokens=5: exceeds max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"temprature": 1}, "unknown key .temprature.; did you mean temperature?"),
        ({"max_new_tokens": 1}, "did you mean max_tokens?"),
        ({"best_of": 3}, "best_of=3: is not supported"),
        ({"prompt": "x"}, "unknown option .prompt.: it belongs to a prompt"),
        ({"id": "x"}, "unknown option .id."),
    ],
)
def test_what_is_no_option_is_refused_by_name(given_: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        SamplingParams(**given_)


def test_it_does_not_change_and_equal_ones_are_equal() -> None:
    params, stops = SamplingParams(max_tokens=3, stop_token_ids=[5, 6]), [5, 6]
    with pytest.raises(ValueError, match="frozen"):
        params.max_tokens = 4  # type: ignore[misc]
    stops.append(7)
    assert params == SamplingParams(max_tokens=3, stop_token_ids=(5, 6))
    assert isinstance(params.stop_token_ids, tuple) and len({params, SamplingParams(max_tokens=3)}) == 2
    assert params.options() == {"max_tokens": 3, "stop_token_ids": [5, 6]}
    assert SamplingParams().options() == {}


def test_numpy_numbers_are_numbers() -> None:
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), stop_token_ids=np.array([1, 2]))
    assert params.options() == {"max_tokens": 3, "temperature": 0.5, "stop_token_ids": [1, 2]}


# --- prompts -----------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("prompt", "row"),
    [
        ("hi", {"prompt": "hi"}),
        ([3, 4], {"tokens": [3, 4]}),
        ((3, 4), {"tokens": [3, 4]}),
        (np.array([3, 4]), {"tokens": [3, 4]}),
        (np.array([[3, 4]]), {"tokens": [3, 4]}),
        ([np.int32(3), 4], {"tokens": [3, 4]}),
        ({"input_ids": [[3, 4]], "attention_mask": [[1, 1]]}, {"tokens": [3, 4]}),
        (CHAT, {"messages": CHAT}),
        ({"prompt": "hi", "id": 7, "max_tokens": 2}, {"prompt": "hi", "id": 7, "max_tokens": 2}),
        ({"tokens": np.array([3, 4]), "max_tokens": np.int64(2), "seed": None}, {"tokens": [3, 4], "max_tokens": 2}),
    ],
)
def test_a_prompt_is_the_row_that_it_says(prompt: Any, row: dict[str, Any]) -> None:
    assert row_of_prompt(prompt, None, 0) == from_file(row)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ""},
        {"tokens": []},
        {"tokens": [1, -2]},
        {"tokens": [True]},
        {"messages": "hi"},
        {"messages": [{"role": "user"}]},
        {"prompt": "x", "tokens": [1]},
        {},
        {"prompt": "x", "custom_id": "a"},
        {"prompt": "x", "id": "a\nb"},
        {"prompt": "half \ud800"},
        {"prompt": "x", "n": 0},
    ],
)
def test_an_object_is_refused_with_the_error_of_a_line(row: dict[str, Any]) -> None:
    bad, of_line = row_of_prompt(row, None, 0), from_file(row)
    assert isinstance(bad, BadRow)
    assert isinstance(of_line, BadRow)
    assert bad.error == of_line.error


@pytest.mark.parametrize("prompt", [None, 5, 2.5, b"hi", object(), iter([1]), {1, 2}])
def test_what_is_no_prompt_is_refused_by_its_type(prompt: Any) -> None:
    bad = row_of_prompt(prompt, None, 3)
    assert isinstance(bad, BadRow)
    assert bad.index == 3
    assert type(prompt).__name__ in bad.error.message


@pytest.mark.parametrize("prompt", [[1.5], [[1, 2], [3]], np.ones((2, 2), int), ["a", "b"], np.array("x"), [[True]]])
def test_lists_of_anything_but_one_row_of_token_ids_are_refused(prompt: Any) -> None:
    bad = row_of_prompt(prompt, None, 0)
    assert isinstance(bad, BadRow)
    assert "whole numbers" in bad.error.message


def test_a_prompt_that_raises_when_it_is_read_fails_alone() -> None:
    class Bomb(dict[str, Any]):
        def items(self) -> Any:
            raise KeyError("boom")

    bad = row_of_prompt(Bomb(prompt="x"), None, 0)
    assert isinstance(bad, BadRow)
    assert "cannot be read: KeyError" in bad.error.message


def test_a_prompts_own_options_win_and_null_is_silent() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.5, top_k=3)
    row = row_of_prompt({"prompt": "x", "max_tokens": 2, "top_k": None}, params, 0)
    assert isinstance(row, InputRow)
    assert (row.max_tokens, row.temperature, row.top_k) == (2, 0.5, 3)
    both = row_of_prompt({"prompt": "x", "min_tokens": 10}, params, 0)
    assert isinstance(both, BadRow)
    assert both.error.message == "min_tokens=10: exceeds max_tokens=9"


def test_params_are_one_or_one_for_each_prompt() -> None:
    one, other = SamplingParams(n=1), SamplingParams(n=2)
    assert list(with_params(["a", "b"], one)) == [("a", one), ("b", one)]
    assert list(with_params(["a", "b"], iter([one, None]))) == [("a", one), ("b", None)]
    pairs = with_params(iter(["a", "b"]), [other])
    assert next(pairs) == ("a", other)
    with pytest.raises(ValueError, match="params ended after 1"):
        next(pairs)
    with pytest.raises(ValueError, match="params has more than the 1 prompts"):
        list(with_params(["a"], [one, other]))
    with pytest.raises(ValueError, match="must be SamplingParams, not int"):
        list(with_params(["a"], [5]))  # type: ignore[list-item]
