"""Dealing rows to replicas: prefix groups stay together, nobody starves, no row is lost or doubled."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kv_control.logit_options import Alternatives, LogitOptions
from kv_control.plan import SamplingSpec
from maxtext_paged.replicas.deal import Deal
from maxtext_paged.replicas.wire import packed_result, packed_row, result_of, row_of
from maxtext_paged.rows import Row, RowResult, Usage


def row(index: int, *tokens: int) -> Row:
    return Row(index=index, tokens=np.array(tokens or (index,), np.int32))


def test_rows_of_one_prefix_go_to_one_replica() -> None:
    deal = Deal(2, page=2)
    for index in range(12):
        deal.add(row(index, *(index // 3, 9, index)))  # four groups of three
    taken = [[one.index for one in deal.take(replica, 6)] for replica in (0, 1)]
    assert taken == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    assert deal.num_stolen == 0


def test_a_replica_without_rows_takes_whole_groups_from_the_end_of_the_longest_queue() -> None:
    deal = Deal(2, page=1)
    for index in range(8):
        deal.add(row(index, index // 3, index), loads=[0, 100])  # all to the first; half of them would cut a group
    assert [one.index for one in deal.take(1, 8)] == [6, 7]
    assert [one.index for one in deal.take(0, 8)] == [0, 1, 2, 3, 4, 5]


def test_rows_that_come_back_are_the_next_to_go() -> None:
    deal = Deal(2)
    for index in range(4):
        deal.add(row(index))
    sent = deal.take(0, 1)
    deal.put_back(0, sent)
    assert [one.index for one in deal.take(0, 2)] == [0, 2]


@given(st.data())
def test_every_row_is_handed_out_exactly_once_whoever_asks_and_whoever_dies(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 4))
    deal, handed, held, added = Deal(num, page=1), [], {i: [] for i in range(num)}, 0
    for _ in range(data.draw(st.integers(0, 60))):
        replica = data.draw(st.integers(0, num - 1))
        match data.draw(st.sampled_from(["add", "take", "finish", "die"])):
            case "add":
                deal.add(row(added, data.draw(st.integers(0, 2)), added), [len(held[i]) for i in range(num)])
                added += 1
            case "take":
                held[replica] += deal.take(replica, data.draw(st.integers(0, 5)))
            case "finish" if held[replica]:
                handed.append(held[replica].pop().index)
            case "die":
                deal.put_back(replica, held[replica])
                held[replica] = []
    asks = data.draw(st.integers(0, num - 1))
    while deal:
        rest = deal.take(asks, 3)
        assert rest, "who asks gets something while there is anything"
        handed += [one.index for one in rest]
    handed += [one.index for rows in held.values() for one in rows]
    assert sorted(handed) == list(range(added))


def test_rows_and_results_are_the_same_on_the_other_side() -> None:
    options = LogitOptions(1.5, 0.5, -0.5, {7: -3.0, 1: 100.0}, 2)
    sampling = SamplingSpec(0.7, 5, 0.9, 0.1, 2**32 - 1)
    there = Row(
        3, np.array([5, 6], np.int32), 3, 9, sampling, frozenset({4, 2}), True, 1, True, 2, options, ("a",), True
    )
    back = row_of(packed_row(there))
    assert back.tokens.tolist() == [5, 6]
    for name in Row.__slots__:
        if name != "tokens":
            assert getattr(back, name) == getattr(there, name), name
    best = Alternatives(np.array([1, 2], np.int32), np.array([-0.1, -2.0], np.float32))
    ids, logprobs = np.array([5, 6, 7], np.int32), np.array([np.nan, -1, -2], np.float32)
    sample = RowResult(there, ids, logprobs, "stop", Usage(2, 1, 1, 1), None, (), "text", (best,))
    result = RowResult(there, ids, logprobs, "error", Usage(2, 2), "why", (sample, sample), None, ())
    found = result_of(packed_result(result), there)
    assert (found.finish_reason, found.error, found.usage) == ("error", "why", Usage(2, 2))
    for one, other in ((found, result), (found.samples[1], sample)):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert found.samples[0].text == "text"
    np.testing.assert_array_equal(found.samples[0].alternatives[0].logprobs, best.logprobs)
