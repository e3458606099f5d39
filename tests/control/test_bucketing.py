"""Ladders: short, covering, with the cap on top."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kv_common.errors import ConfigError
from kv_control.bucketing import Ladder, row_rung, token_ladder

CAPS = [*range(1, 130), 255, 256, 257, 511, 512, 513, 1000, 2047, 2048, 4096, 8191, 8192]


@pytest.mark.parametrize("smallest", [1, 8])
def test_a_token_ladder_is_short_and_its_top_is_the_cap(smallest):
    for cap in CAPS:
        rungs = token_ladder(cap, smallest).rungs
        assert len(rungs) <= 9
        assert (rungs[0], rungs[-1]) == (1, cap)
        assert len([rung for rung in rungs if rung >= smallest]) <= 7


def test_rungs_lie_within_half_a_smallest_rung_of_growing_by_one_factor():
    for cap in CAPS:
        rungs = [rung for rung in token_ladder(cap, 8).rungs if rung >= 8]
        widest = max(2.0, (cap / 8) ** (1 / 6))
        for below, above in pairwise(rungs):
            assert above - 4 <= widest * (below + 4), (cap, rungs)


@pytest.mark.parametrize("cap", [1, 5, 8, 9, 24, 100, 512, 2048])
def test_every_size_gets_the_smallest_rung_that_holds_it(cap):
    ladder = token_ladder(cap)
    for n in range(1, cap + 1):
        assert ladder.rung(n) == min(rung for rung in ladder.rungs if rung >= n)


def test_a_step_above_the_cap_is_refused_with_both_numbers():
    ladder = token_ladder(100)
    with pytest.raises(ConfigError, match=r"101 tokens .* cap of 100"):
        ladder.rung(101)
    assert ladder.observed_shapes == frozenset()


def test_the_observed_shapes_are_the_rungs_that_were_used():
    ladder = token_ladder(64)
    assert ladder.observed_shapes == frozenset()
    for n in (1, 8, 9, 10, 64):
        ladder.rung(n)
    assert ladder.observed_shapes == {1, 8, 16, 64}


@pytest.mark.parametrize("rungs", [[], [0, 1], [4, 4], [8, 4], [-1]])
def test_rungs_that_do_not_increase_from_one_are_refused(rungs):
    with pytest.raises(ConfigError, match="increasing rungs"):
        Ladder(rungs)


@pytest.mark.parametrize(("cap", "smallest"), [(0, 8), (8, 0), (-5, 8)])
def test_a_ladder_without_tokens_is_refused_with_the_option(cap, smallest):
    with pytest.raises(ConfigError, match="paged_max_num_batched_tokens"):
        token_ladder(cap, smallest)


def test_the_row_rung_is_a_function_of_the_token_rung_and_holds_every_step_of_it():
    for max_num_seqs in (1, 3, 8, 100):
        for tokens in token_ladder(256).rungs:
            assert row_rung(tokens, max_num_seqs) == min(tokens, max_num_seqs)
