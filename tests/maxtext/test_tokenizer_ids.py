"""A prompt given as token ids is accepted in the shapes tokenizers return, and refused by type otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from kv_common.errors import RequestError
from maxtext_paged.tokenizer import as_token_ids


@pytest.mark.parametrize(
    "value",
    [
        [3, 1],
        (3, 1),
        [np.int64(3), np.int32(1)],
        np.array([3, 1], np.int32),
        np.array([[3, 1]]),
        [[3, 1]],
        {"input_ids": [3, 1], "attention_mask": [1, 1]},
        {"input_ids": np.array([[3, 1]])},
    ],
    ids=repr,
)
def test_ids_are_accepted_in_the_shapes_tokenizers_return(value):
    ids = as_token_ids(value)
    assert ids == [3, 1] and all(type(i) is int for i in ids)


@pytest.mark.parametrize("value", [[], (), np.zeros(0, np.int32), {"input_ids": []}], ids=repr)
def test_no_ids_are_no_ids(value):
    assert as_token_ids(value) == []


@pytest.mark.parametrize(
    "value",
    [
        "31",
        3,
        None,
        [3.0, 1.0],
        [True, False],
        ["3"],
        [[3], [1]],
        [[3], [1, 2]],
        np.zeros((2, 2), int),
        {"ids": [3]},
        [-1],
    ],
    ids=repr,
)
def test_anything_else_is_refused_by_what_it_is(value):
    with pytest.raises(RequestError, match=r"token ids must|must hold input_ids"):
        as_token_ids(value)
