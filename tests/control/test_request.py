"""A request's tokens, counts and prompt logprobs."""

from __future__ import annotations

import numpy as np
import pytest

from kv_common.errors import InvariantError, RequestError
from kv_control.plan import RequestHandle, RequestId
from kv_control.request import Request
from kv_control.request_table import RequestTable
from tests.strategies import request_of

EOS = 9


def running(request: Request, *, num_computed: int = 0) -> RequestTable:
    """The request, running in row 1 of a table of its own."""
    table = RequestTable(3, 128)
    request.enter(table, RequestHandle(1, 5), num_computed)
    return table


def feed(request: Request, *tokens: int) -> list[str | None]:
    """Append tokens one by one; what the request says after each."""
    table, row, said = running(request), np.array([1]), []
    for token in tokens:
        table.num_computed[row] = table.num_tokens[row]
        table.append(row, np.array([token], np.int32), np.array([-0.5], np.float32))
        said.append(request.ended())
    return said


def test_tokens_that_were_handed_out_stay_as_they_are_while_it_runs_and_when_its_row_is_anothers():
    request = request_of(1, [5, 6], max_tokens=100)
    table, row = running(request), np.array([1])
    views = [request.tokens]
    for i in range(70):
        table.append(row, np.array([i], np.int32), np.array([-float(i)], np.float32))
        views.append(request.tokens)
    request.leave()
    request_of(2, [9] * 80).enter(table, RequestHandle(1, 7), 0)
    for i, view in enumerate([*views, request.tokens]):
        assert view.tolist() == [5, 6, *range(min(i, 70))]
    assert request.tokens.dtype == np.int32
    assert request.logprobs.tolist() == [-float(i) for i in range(70)]
    assert request.logprobs.dtype == np.float32
    assert request.prompt.tolist() == [5, 6]


def test_leaving_and_entering_again_keeps_tokens_and_logprobs_and_gives_up_what_was_computed():
    request = request_of(1, [5, 6, 7], max_tokens=9)
    table = running(request, num_computed=3)
    table.append(np.array([1]), np.array([8], np.int32), np.array([-0.25], np.float32))
    assert (request.num_tokens, request.num_generated, request.num_uncomputed) == (4, 1, 1)
    assert (request.token_at(3), request.logprob_at(3)) == (8, -0.25)
    assert request.leave() == RequestHandle(1, 5)
    assert (request.num_computed, request.token_at(3), request.logprob_at(3)) == (0, 8, -0.25)
    running(request, num_computed=2)
    assert (request.tokens.tolist(), request.logprobs.tolist(), request.num_computed) == ([5, 6, 7, 8], [-0.25], 2)


def test_the_callers_prompt_array_may_change_afterwards():
    prompt = np.array([1, 2, 3], np.int32)
    request = Request(RequestId(0), prompt)
    prompt[:] = 7
    assert (request.prompt.tolist(), request.tokens.tolist()) == ([1, 2, 3], [1, 2, 3])


@pytest.mark.parametrize("max_tokens", [1, 4, 5, 8])
def test_a_request_ends_with_length_at_exactly_max_tokens(max_tokens):  # CASES 29
    request = request_of(1, 3, max_tokens=max_tokens)
    assert feed(request, *range(max_tokens)) == [None] * (max_tokens - 1) + ["length"]


@pytest.mark.parametrize("min_tokens", range(6))
@pytest.mark.parametrize("stop", [EOS, 10, 11])
def test_a_stop_token_ends_it_at_min_tokens_plus_one_at_the_earliest(min_tokens, stop):  # CASES 100, 101
    request = request_of(1, 6, max_tokens=20, min_tokens=min_tokens, stop_token_ids=frozenset({EOS, 10, 11}))
    said = feed(request, *[stop] * (min_tokens + 1))
    assert said == [None] * min_tokens + ["stop"]


def test_only_the_last_token_can_stop_it_and_a_stop_in_the_prompt_does_not():
    request = request_of(1, [EOS, EOS], max_tokens=20, stop_token_ids=frozenset({EOS}))
    assert feed(request, 1, 2, EOS) == [None, None, "stop"]


def test_ignore_eos_runs_to_the_limit():
    request = request_of(1, 2, max_tokens=3, ignore_eos=True, stop_token_ids=frozenset({EOS}))
    assert feed(request, EOS, EOS, EOS) == [None, None, "length"]


def test_a_stop_token_as_the_last_allowed_token_is_a_stop():
    request = request_of(1, 2, max_tokens=2, stop_token_ids=frozenset({EOS}))
    assert feed(request, 1, EOS) == [None, "stop"]


def test_a_request_that_only_scores_ends_when_its_prompt_is_through():
    request = request_of(1, 3, max_tokens=0)
    table = running(request, num_computed=2)
    assert request.ended() is None
    table.num_computed[1] = 3
    assert request.ended() == "length"


@pytest.mark.parametrize(("prompt", "max_tokens", "expected"), [(5, 0, 5), (5, 1, 5), (5, 2, 6), (5, 8, 12)])
def test_the_last_generated_token_never_needs_a_slot(prompt, max_tokens, expected):
    assert request_of(1, prompt, max_tokens=max_tokens).max_kv_tokens == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[1, 2]], "one-dimensional"),
        ([1.5], "one-dimensional array of token ids, not float64"),
        ([-1], r"-1\.\.-1"),
        ([2**31], "2147483648"),
    ],
)
def test_a_prompt_that_is_no_list_of_token_ids_is_refused(prompt, message):
    with pytest.raises(RequestError, match=message):
        Request(RequestId(0), np.array(prompt))


@pytest.mark.parametrize("count", ["max_tokens", "min_tokens"])
def test_a_negative_count_is_refused_by_name(count):
    with pytest.raises(RequestError, match=f"{count}=-1"):
        request_of(0, 1, **{count: -1})


# --- prompt logprobs -----------------------------------------------------------------------------------


def test_targets_are_the_next_prompt_tokens_and_none_behind_the_prompt():
    request = request_of(1, [10, 11, 12, 13], want_prompt_logprobs=True)
    assert request.prompt_targets(0, 2).tolist() == [11, 12]
    assert request.prompt_targets(0, 4).tolist() == [11, 12, 13, -1]
    assert request.prompt_targets(2, 2).tolist() == [13, -1]
    assert request.prompt_targets(3, 1) is None


def test_no_targets_without_the_wish_and_for_a_prompt_of_one_token():
    assert request_of(1, 4).prompt_targets(0, 4) is None
    assert request_of(1, 1, want_prompt_logprobs=True).prompt_targets(0, 1) is None


def test_a_position_known_before_a_preemption_is_not_asked_for_again():  # CASES 89
    request = request_of(1, [10, 11, 12, 13], want_prompt_logprobs=True)
    request.record_prompt_logprobs(0, request.prompt_targets(0, 2), np.array([-1.0, -2.0], np.float32))
    assert request.prompt_targets(0, 2) is None
    assert request.prompt_targets(0, 4).tolist() == [-1, -1, 13, -1]
    request.record_prompt_logprobs(0, request.prompt_targets(0, 4), np.array([-8.0, -9.0, -3.0, -9.0], np.float32))
    assert request.prompt_targets(0, 4) is None
    assert np.isnan(request.prompt_logprobs[0])  # CASES 88
    assert request.prompt_logprobs[1:].tolist() == [-1.0, -2.0, -3.0]


def test_a_logprob_that_is_not_a_number_counts_as_known():
    request = request_of(1, [10, 11, 12], want_prompt_logprobs=True)
    request.record_prompt_logprobs(0, request.prompt_targets(0, 1), np.array([np.nan], np.float32))
    assert request.prompt_targets(0, 3).tolist() == [-1, 12, -1]


@pytest.mark.parametrize("start", [1, 2, 3])
def test_results_of_other_positions_are_refused(start):  # CASES 79
    request = request_of(1, [10, 11, 12, 13], want_prompt_logprobs=True)
    with pytest.raises(InvariantError, match=f"positions {start + 1}.. arrived|position 1 of 4 is next"):
        request.record_prompt_logprobs(start, np.array([13], np.int32), np.zeros(1, np.float32))
    assert np.isnan(request.prompt_logprobs).all()
