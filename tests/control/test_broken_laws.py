"""Deliberate breaks of the laws of sharing: each must be caught by the laws or by a request's own tokens.

The same traffic runs unbroken first. A break that passed would mean that the tests of this directory hold less than
they say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kv_common.errors import KvCacheError
from kv_control import admission
from kv_control.allocator import PageAllocator
from kv_control.control_plane import ControlPlane
from kv_control.dirty_pages import DirtyPages
from kv_control.plan import RequestId, SamplingSpec
from kv_control.prefix_index import PrefixIndex
from kv_control.request import Request
from kv_control.scheduler import Scheduler
from kv_control.sharing import PageSharing
from tests.strategies import VOCAB_SIZE, completion_alone, control_of, loop_of, prompt_logprobs_alone

Patch = Callable[[pytest.MonkeyPatch], None]


def traffic() -> None:
    """Shared prefixes, groups, scoring, chunks, preemptions, evictions and an exchange of weights on nine pages."""
    control = control_of(9, 4, max_num_seqs=4, max_model_len=24, max_tokens=12, prefix_cache=True)
    loop = loop_of(control, prefill_chunk_tokens=7)
    requests = []
    for weights in range(2):
        for i in range(18):
            beginning = [(17 * (i % 3) + 5 * j) % VOCAB_SIZE for j in range(12 - i % 2 * 4)]
            group = 100 * weights + i // 3 if i % 6 < 3 else None
            own = [] if group is not None else [(i + j) % VOCAB_SIZE for j in range(i % 4)]
            if group is not None:
                beginning = [(23 * (i // 3) + 5 * j + 1) % VOCAB_SIZE for j in range(10)]
            request = Request(
                RequestId(100 * weights + i),
                np.array(beginning + own),
                sampling=SamplingSpec(sample_index=i % 3),
                max_tokens=5 + i % 7,
                want_prompt_logprobs=i % 9 in (3, 4, 6, 7),
                group=group,
            )
            loop.scheduler.submit(request)
            requests.append(request)
        for turn in range(2000):
            if not loop.scheduler.has_work:
                break
            loop.step()
            if turn % 9 == 5:
                loop.scheduler.preempt_newest()
        if weights == 0:
            old = {id(node) for node in control.prefix_index.nodes()}
            _, freed = control.reset_prefix_cache(b"new weights")
            loop.engine.slots[freed] = -5  # another model's K/V would stand there
            assert old and not list(control.prefix_index.nodes()), "pages of the old weights are still found"
    assert not loop.scheduler.has_work, "no end"
    for request in requests:
        prompt = request.prompt.tolist()
        assert request.finish_reason == "length", request.error
        assert request.tokens[len(prompt) :].tolist() == completion_alone(prompt, request.max_tokens)
        if request.want_prompt_logprobs:
            assert request.prompt_logprobs[1:].tolist() == prompt_logprobs_alone(prompt)
    metrics = control.metrics()
    assert metrics.num_held_pages == 0 and metrics.num_leaked_pages == 0
    for event in ("num_preemptions", "num_evictions", "num_cached_tokens", "num_shared_tokens", "num_recovered_tokens"):
        assert getattr(metrics, event), f"the traffic never reached {event}"


def test_the_traffic_passes_unbroken() -> None:
    traffic()


def adopted_pages_are_not_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageAllocator, "retain", lambda self, pages: None)


def published_pages_are_not_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageAllocator, "retain_one", lambda self, page: None)


def pages_that_are_read_are_evicted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixIndex, "_is_leaf", lambda self, node: node.live and not node.num_children)
    patch.setattr(PrefixIndex, "lock", lambda self, nodes: None)
    patch.setattr(PrefixIndex, "unlock", lambda self, nodes: np.zeros(0, np.int32))


def a_partial_page_is_shared_instead_of_copied(patch: pytest.MonkeyPatch) -> None:
    copy = PageSharing.fork

    def fork(self: Any, source: Any, target: Any, num_tokens: int) -> bool:
        done = copy(self, source, target, num_tokens)
        self.copies.drop(target.row)  # the page is never copied
        return done

    patch.setattr(PageSharing, "fork", fork)


def pages_are_published_before_their_last_slot_is_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "full_pages", lambda num_tokens, page: -(-num_tokens // page))
    patch.setattr(ControlPlane, "publish", lambda self, handle, *page: self.sharing.publish(handle, *page))


def tokens_are_not_compared_and_every_page_has_one_key(patch: pytest.MonkeyPatch) -> None:
    made = PrefixIndex.__init__

    def constant(self: Any, tokens_per_page: int) -> None:
        made(self, tokens_per_page, hash_page=lambda parent, tokens: parent[:1] + bytes([len(parent) % 250]) * 3)

    def match(self: Any, keys: Any, tokens: Any) -> Any:
        found = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            found.append(node)
        return found

    patch.setattr(PrefixIndex, "__init__", constant)
    patch.setattr(PrefixIndex, "match", match)


def recycled_pages_are_taken_for_clean(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DirtyPages, "note", lambda self, pages: None)


def an_exchange_of_weights_keeps_the_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixIndex, "clear", lambda self: np.zeros(0, np.int32))


def a_preempted_request_keeps_its_locks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageSharing, "leave", lambda self, row: np.zeros(0, np.int32))


def logprobs_of_a_hit_start_one_token_late(patch: pytest.MonkeyPatch) -> None:
    take = Request.take_prompt_logprobs
    patch.setattr(Request, "take_prompt_logprobs", lambda self, values: take(self, np.roll(values, 1)))


def positions_start_at_zero_behind_a_hit(patch: pytest.MonkeyPatch) -> None:
    enter = Request.enter
    patch.setattr(Request, "enter", lambda self, table, handle, num_computed: enter(self, table, handle, 0))


def results_of_one_row_go_to_the_next(patch: pytest.MonkeyPatch) -> None:
    record = Scheduler.record

    def shifted(self: Any, piece: Any, *, token: int | None = None, **rest: Any) -> Any:
        return record(self, piece, token=None if token is None else (token + 1) % VOCAB_SIZE, **rest)

    patch.setattr(Scheduler, "record", shifted)


@pytest.mark.parametrize(
    "break_it",
    [
        adopted_pages_are_not_held,
        published_pages_are_not_held,
        pages_that_are_read_are_evicted,
        a_partial_page_is_shared_instead_of_copied,
        pages_are_published_before_their_last_slot_is_written,
        tokens_are_not_compared_and_every_page_has_one_key,
        recycled_pages_are_taken_for_clean,
        an_exchange_of_weights_keeps_the_cache,
        a_preempted_request_keeps_its_locks,
        logprobs_of_a_hit_start_one_token_late,
        positions_start_at_zero_behind_a_hit,
        results_of_one_row_go_to_the_next,
    ],
    ids=lambda f: f.__name__,
)
def test_a_broken_law_is_caught(break_it: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    with pytest.raises((KvCacheError, AssertionError)):
        traffic()
