"""``PagedMaxEngine``: prefill, generate and release over the one paged loop."""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from maxtext.inference.maxengine.maxengine import MaxEngine

from kv_common.errors import (
    ConfigError,
    PageStateError,
    RequestError,
    RequestTooLarge,
    StaleHandleError,
    UnsupportedError,
)
from kv_control.logit_options import LogitOptions
from kv_control.plan import GREEDY, RequestSlice, SamplingSpec
from kv_control.request import Request
from kv_execution.compile_events import CompileCounter
from maxtext_paged import PagedMaxEngine, Row
from tests.parity import assert_teacher_forced
from tests.tiny_models import dense_model, make_config

pytestmark = pytest.mark.maxtext

RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(3, 255, n).astype(np.int32) for n in (9, 2, 33, 17, 8, 5, 3, 12)]


@pytest.fixture
def engine(max_engine: PagedMaxEngine) -> Iterator[PagedMaxEngine]:
    """The shared engine; whatever a test does with it, no page and no row may be missing afterwards."""
    yield max_engine
    for stream in list(max_engine._streams.values()):
        max_engine.release(stream.request)
    control = max_engine.session.control
    assert (control.num_free_pages, control.num_free_rows) == (control.num_pages, 8)
    assert not max_engine.session.driver.scheduler.has_work


def finish(engine: PagedMaxEngine) -> dict[int, list[int]]:
    """Generate until nothing is left: request id to the tokens that were handed out."""
    tokens: dict[int, list[int]] = defaultdict(list)
    ended = set()
    while pieces := engine.generate_paged():
        ids = [piece.request.id for piece in pieces]
        assert len(set(ids)) == len(ids), "each request at most once"
        for piece in pieces:
            request = piece.request
            tokens[request.id].append(piece.token)
            assert request.id not in ended, "nothing comes after the last"
            if piece.finish_reason is not None:
                assert (piece.finish_reason, piece.error) == (request.finish_reason, request.error)
                ended.add(request.id)
    assert ended == set(tokens)
    return tokens


def completion(request: Request) -> list[int]:
    return request.tokens[request.num_prompt_tokens :].tolist()


def test_it_is_a_max_engine(engine: PagedMaxEngine) -> None:
    assert isinstance(engine, MaxEngine)
    assert engine.mesh is engine.session.model.mesh
    assert engine.max_concurrent_decodes == 8
    assert engine.session.runtime is engine.session.driver.runtime, "one loop"


def test_prefill_and_generate_are_the_dense_models(engine: PagedMaxEngine) -> None:
    started = []
    for prompt in PROMPTS[:4]:
        request, token, logprob = engine.prefill_paged(prompt, max_tokens=7, return_prompt_logp=True)
        assert completion(request)[0] == token and request.logprobs[0] == np.float32(logprob)
        started.append(request)
    tokens = {request.id: [completion(request)[0]] for request in started}
    steps = engine.session.driver.metrics.num_steps
    for request_id, more in finish(engine).items():
        tokens[request_id] += more
    assert [tokens[request.id] for request in started] == [completion(request) for request in started]
    assert [len(completion(request)) for request in started] == [7] * 4
    assert engine.session.driver.metrics.num_steps - steps <= 6
    assert_teacher_forced(started, dense_model(), relative=2e-5)


def test_steps_shared_with_a_prefill_lose_no_token(engine: PagedMaxEngine) -> None:
    """A prompt of 33 takes two steps of 32: the first request decodes in them, and is told so later."""
    first, token, _ = engine.prefill_paged(PROMPTS[0], max_tokens=6)
    second, *_ = engine.prefill_paged(PROMPTS[2], max_tokens=3)
    assert first.num_generated > 1, "decodes do not wait for a long prompt"
    pieces = engine.generate_paged()
    assert [piece.request for piece in pieces] == [first, second], "one that is behind holds nobody up"
    tokens = finish(engine)
    assert [token, pieces[0].token, *tokens[first.id]] == completion(first)
    assert [completion(second)[0], pieces[1].token, *tokens[second.id]] == completion(second)


def test_a_step_without_a_token_is_not_the_end(engine: PagedMaxEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the pool is full and something is sent back."""
    request, *_ = engine.prefill_paged(PROMPTS[0], max_tokens=3)
    step, calls = engine.worker.step, iter(range(100))
    monkeypatch.setattr(engine.worker, "step", lambda: None if next(calls) < 2 else step())
    [piece] = engine.generate_paged()
    assert piece.request is request and piece.token == completion(request)[1]


def test_a_request_ends_by_its_own_stop_token_or_at_once(engine: PagedMaxEngine) -> None:
    request, token, _ = engine.prefill_paged(PROMPTS[0], max_tokens=1)
    assert request.finished and request.finish_reason == "length"
    assert engine.generate_paged() == [], "its one token was handed out"
    again, *_ = engine.prefill_paged(PROMPTS[0], stop_token_ids=[token])
    assert again.finish_reason == "stop"
    engine.release(request)
    engine.release(again)


def test_a_requests_options_act_from_its_first_token_on(engine: PagedMaxEngine) -> None:
    ends, bias = [7, 9], {7: 100.0, 9: 50.0, 11: 40.0}
    options = LogitOptions(logit_bias=bias, top_logprobs=2)
    request, token, _ = engine.prefill_paged(
        PROMPTS[0], max_tokens=6, stop_token_ids=ends, min_tokens=2, options=options
    )
    assert token == 11
    finish(engine)
    assert (completion(request), request.finish_reason) == ([11, 11, 7], "stop")
    assert [len(best.ids) for best in request.alternatives] == [2, 2, 2]


def test_a_request_is_cancelled_from_another_thread_and_still_to_be_released(engine: PagedMaxEngine) -> None:
    first, *_ = engine.prefill_paged(PROMPTS[0], max_tokens=40)
    other, *_ = engine.prefill_paged(PROMPTS[1], max_tokens=6)
    engine.generate_paged()
    for _ in range(2):  # twice is once
        thread = threading.Thread(target=engine.cancel, args=(first,))
        thread.start()
        thread.join()
    pieces = finish(engine)
    assert first.finish_reason == "cancelled" and 2 <= first.num_generated < 6
    assert other.finish_reason == "length" and len(completion(other)) == 6
    assert pieces[other.id][-1] == completion(other)[-1]
    engine.cancel(first)  # ended: nothing
    engine.release(first)
    engine.release(other)


def test_default_sampling_follows_the_configuration_and_seeds_hold(engine: PagedMaxEngine) -> None:
    greedy, *_ = engine.prefill_paged(PROMPTS[0], max_tokens=5)
    assert (greedy.sampling.temperature, greedy.sampling.seed >= 2**31) == (0.0, True)
    spec = SamplingSpec(temperature=1.0, seed=5)
    same = [engine.prefill_paged(PROMPTS[0], max_tokens=8, sampling=spec)[0] for _ in range(2)]
    other, *_ = engine.prefill_paged(PROMPTS[0], max_tokens=8, sampling=SamplingSpec(temperature=1.0, seed=6))
    finish(engine)
    assert completion(same[0]) == completion(same[1]) != completion(other)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "said"),
    [
        ([], {}, RequestError, "empty"),
        ("text", {}, RequestError, "whole numbers"),
        ([5, 256], {}, RequestError, "vocabulary of 256"),
        ([5], {"max_tokens": 0}, RequestError, "at least 1"),
        (np.ones(65, np.int32), {}, RequestTooLarge, "`max_target_length`"),
        (np.ones(64, np.int32), {}, RequestError, "fills the context of 64"),
    ],
)
def test_a_prompt_that_can_never_run_is_refused_and_holds_nothing(
    engine: PagedMaxEngine, prompt: Any, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        engine.prefill_paged(prompt, **options)


# --- release ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 20])
def test_releasing_twice_is_refused_and_harms_nobody(engine: PagedMaxEngine, max_tokens: int) -> None:
    first, *_ = engine.prefill_paged(PROMPTS[0], max_tokens=max_tokens)
    row = first.handle.row if first.handle else 0
    engine.release(first)
    second, *_ = engine.prefill_paged(PROMPTS[1], max_tokens=4)
    assert second.handle.row == row, "a new owner of the same row"
    for _ in range(2):
        with pytest.raises(StaleHandleError, match="released before"):
            engine.release(first)
    assert len(finish(engine)[second.id]) == 3
    assert_teacher_forced([second], dense_model(), relative=2e-5)


def test_release_pages_ends_what_holds_the_slot(engine: PagedMaxEngine, capsys: pytest.CaptureFixture) -> None:
    first, *_ = engine.prefill_paged(PROMPTS[0], max_tokens=20)
    second, *_ = engine.prefill_paged(PROMPTS[1], max_tokens=4)
    slot, free = first.handle.row, engine.session.control.num_free_pages
    engine.release_pages(slot)
    assert engine.session.control.num_free_pages == free + 2
    assert first.finish_reason == "cancelled" and not second.finished
    assert "Warning" not in capsys.readouterr().out
    for nobody in (slot, 7, 99, -1):
        with pytest.raises(StaleHandleError, match=f"slot {nobody} holds no request"):
            engine.release_pages(nobody)
    assert set(finish(engine)) == {second.id}


def test_a_released_handle_of_a_running_request_is_stale_too(engine: PagedMaxEngine) -> None:
    request, *_ = engine.prefill_paged(PROMPTS[0], max_tokens=20)
    handle = request.handle
    engine.release(handle)
    assert request.finish_reason == "cancelled"
    with pytest.raises(StaleHandleError):
        engine.release(handle)
    with pytest.raises(StaleHandleError):
        engine.release(request)


# --- no room --------------------------------------------------------------------------------------------------


def test_no_row_is_none_and_loses_nothing(engine: PagedMaxEngine) -> None:
    started = [engine.prefill_paged(prompt, max_tokens=10)[0] for prompt in PROMPTS]
    assert engine.prefill_paged(PROMPTS[0]) is None
    assert engine.open_request() is None
    engine.release(started[3])
    again = engine.prefill_paged(PROMPTS[0], max_tokens=4)
    assert again is not None
    tokens = finish(engine)
    kept = [request for request in started if request is not started[3]]
    assert [[completion(request)[0], *tokens[request.id]] for request in kept] == [completion(r) for r in kept]
    assert_teacher_forced([*kept, again[0]], dense_model(), relative=2e-5)


def test_no_page_is_none_and_decodes_go_on(engine: PagedMaxEngine) -> None:
    """Raw handles take the pool but for three pages: two for a request, and one too few for the next."""
    holders = [engine.open_request() for _ in range(5)]
    for held, count in zip(holders, (64, 64, 64, 64, 40), strict=True):
        for start in range(0, count, 32):
            chunk = np.full(min(32, count - start), 9, np.int32)
            assert engine.paged_step([RequestSlice(held, start, chunk)]) is not None
    assert engine.session.control.num_free_pages == 3
    first, *_ = engine.prefill_paged(PROMPTS[0], max_tokens=8)
    assert engine.prefill_paged(PROMPTS[3]) is None
    assert engine.paged_step([RequestSlice(holders[4], 40, np.full(24, 9, np.int32))]) is None, "back-pressure"
    tokens = finish(engine)
    assert [completion(first)[0], *tokens[first.id]] == completion(first)
    assert_teacher_forced([first], dense_model(), relative=2e-5)
    for held in holders:
        engine.release(held)
        with pytest.raises(StaleHandleError):
            engine.release(held)


@pytest.mark.slow
def test_preempted_requests_come_back_with_every_token(engine_options: dict[str, Any]) -> None:
    """Eight pages of eight; four requests that end with five pages each."""
    config = make_config(**{**engine_options, "paged_num_pages": 8, "paged_max_num_seqs": 4})
    small = PagedMaxEngine(config, jax.devices()[:1])
    small.init_paged_runtime(dense_model().params)
    started = [small.prefill_paged(prompt, max_tokens=30)[0] for prompt in PROMPTS[4:7]]
    tokens = {request.id: [completion(request)[0]] for request in started}
    for request_id, more in finish(small).items():
        tokens[request_id] += more
    assert sum(request.num_preemptions for request in started) > 0
    assert [tokens[request.id] for request in started] == [completion(request) for request in started]
    assert [len(completion(request)) for request in started] == [30] * 3
    assert_teacher_forced(started, dense_model(), relative=2e-5)


# --- the raw step -----------------------------------------------------------------------------------------------


def test_raw_steps_give_what_the_driver_gives(engine: PagedMaxEngine) -> None:
    expected, *_ = engine.prefill_paged(PROMPTS[2], max_tokens=3)
    finish(engine)
    handle = engine.open_request()
    prompt, tokens = PROMPTS[2], []
    assert engine.paged_step([RequestSlice(handle, 0, prompt[:20])]).read()[0].token is None
    [result] = engine.paged_step([RequestSlice(handle, 20, prompt[20:], sample=GREEDY)]).read()
    tokens.append(result.token)
    for position in (33, 34):
        # The token sampled by the step before, still on the device.
        piece = RequestSlice(handle, position, np.zeros(1, np.int32), previous_sample=0, sample=GREEDY)
        [result] = engine.paged_step([piece]).read()
        tokens.append(result.token)
    assert tokens == completion(expected)
    engine.release_pages(handle.row)
    with pytest.raises(StaleHandleError):
        engine.paged_step([RequestSlice(handle, 35, prompt[:1])])


def test_a_handle_of_the_drivers_is_not_driven_by_hand(engine: PagedMaxEngine) -> None:
    request, *_ = engine.prefill_paged(PROMPTS[0], max_tokens=3)
    with pytest.raises(PageStateError, match="generate_paged runs it"):
        engine.paged_step([RequestSlice(request.handle, 9, np.ones(1, np.int32))])
    assert len(finish(engine)[request.id]) == 2


def test_whole_rows_and_single_requests_share_the_loop(engine: PagedMaxEngine) -> None:
    request, *_ = engine.prefill_paged(PROMPTS[0], max_tokens=12)
    rows = [Row(index=i, tokens=prompt, max_tokens=6 - 2 * i) for i, prompt in enumerate(PROMPTS[1:4])]
    results = engine.worker.run_inference(iter(rows))
    assert [result.row.index for result in results] == [0, 1, 2], "in order, although the last was done first"
    assert [result.usage.completion_tokens for result in results] == [6, 4, 2]
    tokens = finish(engine)
    assert [completion(request)[0], *tokens[request.id]] == completion(request)
    assert_teacher_forced([request], dense_model(), relative=2e-5)


# --- weights and start ---------------------------------------------------------------------------------------------


def test_new_weights_count_from_the_next_step_and_compile_nothing(engine: PagedMaxEngine) -> None:
    before, *_ = engine.prefill_paged(PROMPTS[0], max_tokens=5)
    finish(engine)
    flipped = jax.tree.map(lambda leaf: np.flip(leaf, axis=0).copy(), dense_model().params)
    counter = CompileCounter()
    try:
        engine.update_params(flipped)
        after, *_ = engine.prefill_paged(PROMPTS[0], max_tokens=5)
        finish(engine)
    finally:
        engine.update_params(dense_model().params)
    assert counter.total() == 0
    assert completion(after) != completion(before)


@pytest.mark.slow
def test_nothing_runs_before_it_is_started(engine_options: dict[str, Any]) -> None:
    idle = PagedMaxEngine(make_config(**engine_options, scan_layers=True), jax.devices()[:1])
    assert not idle.config.scan_layers
    for call in (idle.generate_paged, idle.open_request, lambda: idle.prefill_paged([3]), lambda: idle.release(None)):
        with pytest.raises(ConfigError, match="init_paged_runtime"):
            call()
    with pytest.raises(UnsupportedError, match="takes params and rng"):
        idle.load_params("checkpoint")
    params = idle.load_params()
    shardings = {leaf.sharding.mesh for leaf in jax.tree.leaves(params)}
    assert shardings == {idle.mesh}, "random weights, straight into their sharding"


def test_starting_again_drops_what_ran(engine_options: dict[str, Any]) -> None:
    twice = PagedMaxEngine(make_config(**engine_options), jax.devices()[:1])
    params = twice.load_params(params=dense_model().params)
    old = jax.tree.leaves(twice.init_paged_runtime(params).runtime.pools)
    handle = twice.open_request()
    new = twice.init_paged_runtime(params)
    assert all(leaf.is_deleted() for leaf in old)
    assert new.control.num_free_rows == 8
    with pytest.raises(StaleHandleError):
        twice.release(handle)


# --- MaxEngine's other methods --------------------------------------------------------------------------------

HARMLESS = {"build_tokenizer", "get_tokenizer", "load_params", "print_stats", "release_pages"}
"""Public methods of MaxEngine that build no dense cache here, or have a paged meaning."""


def test_every_dense_method_is_refused_by_name(engine: PagedMaxEngine) -> None:
    methods = {
        name
        for name, value in inspect.getmembers(MaxEngine, callable)
        if not name.startswith("_") and name not in HARMLESS
    }
    assert {"prefill", "generate", "insert", "init_decode_state"} <= methods
    for name in sorted(methods):
        with pytest.raises(UnsupportedError, match=rf"^{name} belongs to MaxText's dense cache"):
            getattr(engine, name)(params=None, decode_state=None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MaxText's load_params uses what jax and flax deprecate
def test_a_dense_configuration_keeps_maxengines_methods() -> None:
    dense = PagedMaxEngine(make_config(attention="dot_product"), jax.devices()[:1])
    params = dense.load_params()
    state = dense.init_decode_state()
    assert state["logits"].shape == (4, 1, 256)
    assert params is not None and dense.max_concurrent_decodes == 4
    for call in (lambda: dense.init_paged_runtime(params), dense.generate_paged):
        with pytest.raises(ConfigError):
            call()


def test_the_tokenizer_needs_no_jetstream(engine: PagedMaxEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    import maxtext_paged.engine as module

    monkeypatch.setattr(module, "load_tokenizer", lambda config: ("tokenizer of", config))
    assert engine.build_tokenizer(engine.get_tokenizer()) == ("tokenizer of", engine.config)
