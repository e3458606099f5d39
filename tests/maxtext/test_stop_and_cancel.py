"""Rows that end by their text or by their caller: found at any split, safe in every state, and alone in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kv_common.errors import RequestError
from kv_control.plan import SamplingSpec
from kv_control.request import RequestStatus
from maxtext_paged.rows import Row, RowResult
from maxtext_paged.stop_strings import StopWatch
from tests.fakes import completion, make_driver

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]  # the worker's module imports MaxText

PIECES = {token: f"{chr(97 + token % 7)}{chr(97 + token % 5)} " for token in range(97)}
HALVES = {0: b"\xe6\x97", 1: b"\xa5", 2: b"a", 3: b"\xc3", 4: b"\xa9b", 5: b"", 6: b"xa", 7: b"by"}


PROMPT = [5, 6, 7]
ALONE = completion(PROMPT, 12)
SPECIAL = min(set(range(97)) - set(ALONE))


class PieceTokenizer:
    """Every token is two letters and a space, but for one that is special and never shown."""

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(PIECES[token] for token in ids if token != SPECIAL)

    def special_id(self, text: str) -> int | None:
        return SPECIAL if text == "<end>" else None


class Growing:
    """A request that gets one token at a time."""

    def __init__(self, tokens: list[int], min_tokens: int = 0) -> None:
        self.tokens, self.min_tokens, self.num_prompt_tokens = tokens, min_tokens, 0
        self.num_tokens, self.finish_reason = 0, None

    def token_at(self, position: int) -> int:
        assert position < self.num_tokens
        return self.tokens[position]


def stopped_at(tokens: list[int], stops: list[str], decode: Any, **options: Any) -> tuple[int, str] | None:
    request = Growing(tokens, options.pop("min_tokens", 0))
    watch = StopWatch(request, stops, decode, **options)  # type: ignore[arg-type]
    for request.num_tokens in range(1, len(tokens) + 1):
        if watch.look():
            assert watch.text is not None
            return request.num_tokens, watch.text
    return None


def decode_halves(ids: Iterable[int]) -> str:
    return b"".join(HALVES[token] for token in ids).decode("utf-8", "replace")


def test_a_stop_string_is_found_at_the_token_that_completes_it_wherever_its_tokens_begin() -> None:
    tokens = np.random.default_rng(2).integers(0, 8, 90).tolist()
    tokens = [token for token in tokens if token not in (1, 4)]
    tokens = [part for token in tokens for part in {0: [0, 1], 3: [3, 4]}.get(token, [token])]
    text = decode_halves(tokens)
    assert "�" not in text
    rng, found = np.random.default_rng(3), set()
    for _ in range(400):
        start, length = int(rng.integers(0, len(text))), int(rng.integers(1, 40))
        stop = text[start : start + length]
        first = next(k for k in range(1, len(tokens) + 1) if stop in decode_halves(tokens[:k]))
        assert stopped_at(tokens, [stop], decode_halves) == (first, text[: text.index(stop)])
        assert stopped_at(tokens, ["never", stop], decode_halves, include=True) == (
            first,
            text[: text.index(stop) + len(stop)],
        )
        found.add(first)
    assert len(found) > 20


def test_the_issues_own_example_is_found() -> None:
    assert stopped_at([2, 6, 7, 2], ["ab"], decode_halves) == (3, "ax")


def test_of_several_stop_strings_the_first_in_the_text_cuts_it() -> None:
    assert stopped_at([6, 7], ["by", "ab"], decode_halves) == (2, "x")
    assert stopped_at([6, 7], ["y", "b"], decode_halves) == (2, "xa")


def test_a_stop_string_counts_from_behind_min_tokens() -> None:
    tokens = [2, 2, 6, 2, 2]  # a a xa a a
    assert stopped_at(tokens, ["a"], decode_halves, min_tokens=0) == (1, "")
    assert stopped_at(tokens, ["a"], decode_halves, min_tokens=2) == (3, "aax")
    assert stopped_at(tokens, ["aa"], decode_halves, min_tokens=2) == (4, "aax")
    assert stopped_at(tokens, ["aax"], decode_halves, min_tokens=2) == (3, "")  # completed by the third
    assert stopped_at(tokens, ["aaxa"], decode_halves, min_tokens=4) is None


def test_a_long_text_is_not_decoded_again_and_again() -> None:
    num_decoded = 0

    def counting(ids: Any) -> str:
        nonlocal num_decoded
        ids = list(ids)
        num_decoded += len(ids)
        return decode_halves(ids)

    assert stopped_at([2, 6] * 1000, ["never"], counting) is None
    assert num_decoded < 2000 * 120


# --- through the worker --------------------------------------------------------------------------------------


def worker(num_pages: int = 64, *, tokenizer: Any = None, max_num_seqs: int = 2, **options: Any) -> Any:
    from maxtext_paged.worker import PagedInferenceWorker

    driver = make_driver(num_pages, max_num_seqs=max_num_seqs, max_num_batched_tokens=8, **options)
    session: Any = SimpleNamespace(
        driver=driver,
        control=driver.runtime.control,
        runtime=driver.runtime,
        max_num_seqs=max_num_seqs,
        options=SimpleNamespace(paged_file_order="input"),
    )
    return PagedInferenceWorker(session, tokenizer=tokenizer)


def row(i: int, tokens: list[int], **options: Any) -> Row:
    return Row(index=i, id=f"row {i}", tokens=np.array(tokens), **{"max_tokens": 12, **options})


@pytest.fixture(scope="module")
def crew() -> Any:
    return worker(tokenizer=PieceTokenizer())


def text_of(ids: list[int]) -> str:
    return PieceTokenizer().decode(ids)


def test_a_stop_string_ends_its_row_alone_and_keeps_the_tokens_that_completed_it(crew: Any) -> None:
    stop = text_of(ALONE)[7:10]  # of the third and the fourth token
    first = next(k for k in range(1, 13) if stop in text_of(ALONE[:k]))
    rows = [row(0, PROMPT, stop=(stop,), want_prompt_logprobs=True), row(1, PROMPT), row(2, [8, 9], stop=("zz",))]
    cut, whole, other = crew.run_inference(rows)
    assert (cut.finish_reason, cut.completion_ids.tolist()) == ("stop", ALONE[:first])
    assert cut.text == text_of(ALONE)[: text_of(ALONE).index(stop)]
    assert len(cut.logprobs) == len(cut.token_ids) and np.isnan(cut.logprobs).sum() == 1
    assert (whole.finish_reason, whole.completion_ids.tolist(), whole.text) == ("length", ALONE, None)
    assert (other.finish_reason, other.completion_ids.tolist()) == ("length", completion([8, 9], 12))


def test_its_pages_are_back_before_the_next_step_is_scheduled(crew: Any) -> None:
    control, driver, stop = crew.session.control, crew.session.driver, text_of(ALONE)[7:10]
    late = []

    def look(_: Any) -> None:
        for request in driver.scheduler.running:
            late.append(stop in text_of(request.tokens[3:].tolist()))

    crew.run_inference([row(0, PROMPT, stop=(stop,))], on_step=look)
    assert late and not any(late)
    assert control.num_free_pages == control.num_pages


def test_a_stop_string_in_the_very_last_token_is_a_stop(crew: Any) -> None:
    text = text_of(ALONE[:4])
    stop = text[-4:]
    assert text.index(stop) == len(text) - 4
    [result] = crew.run_inference([row(0, PROMPT, stop=(stop,), max_tokens=4)])
    assert (result.finish_reason, result.text, len(result.completion_ids)) == ("stop", text[:-4], 4)


def test_a_stop_string_that_is_a_special_tokens_text_ends_the_row_at_that_token(crew: Any) -> None:
    from kv_control.logit_options import LogitOptions

    for include, text in ((False, None), (True, "<end>")):
        bias = LogitOptions(logit_bias={SPECIAL: 100.0})
        rows = [row(0, PROMPT, stop=("<end>",), include_stop=include, options=bias, min_tokens=2, ignore_eos=True)]
        [result] = crew.run_inference(rows)
        assert (result.finish_reason, result.completion_ids.tolist()[-1], len(result.completion_ids)) == (
            "stop",
            SPECIAL,
            3,
        )
        assert result.text == (None if text is None else text_of(result.completion_ids[:2].tolist()) + text)


def test_samples_of_a_row_stop_each_by_its_own_text(crew: Any) -> None:
    spec = SamplingSpec(temperature=5.0, seed=4)
    [free] = crew.run_inference([row(0, PROMPT, sampling=spec, n=3)])
    texts = [text_of(sample.completion_ids.tolist()) for sample in free.samples]
    stop = texts[1][10:14]
    [result] = crew.run_inference([row(0, PROMPT, sampling=spec, n=3, stop=(stop,))])
    for text, sample in zip(texts, result.samples, strict=True):
        assert sample.finish_reason == ("stop" if stop in text else "length")
        assert sample.text == (text[: text.index(stop)] if stop in text else None)


def test_without_a_tokenizer_stop_strings_are_refused_by_name() -> None:
    from maxtext_paged.worker import PagedInferenceWorker

    blind = worker()
    [result, _] = blind.run_inference([row(0, PROMPT, stop=("a",)), row(1, PROMPT)])
    assert result.error is not None and "stop=['a']: this engine has no tokenizer" in result.error
    with pytest.raises(RequestError, match="stop="):
        PagedInferenceWorker(blind.session).new_request(row(0, PROMPT, stop=("a",)))


def test_a_tokenizer_that_trips_fails_its_row_alone(crew: Any) -> None:
    class Tripping(PieceTokenizer):
        def decode(self, ids: Iterable[int]) -> str:
            if len(listed := list(ids)) == 3:
                raise KeyError("vocabulary")
            return super().decode(listed)

    crew._tokenizer = Tripping()
    try:
        bad, good = crew.run_inference([row(0, PROMPT, stop=("zz",)), row(1, PROMPT)])
    finally:
        crew._tokenizer = PieceTokenizer()
    assert bad.finish_reason == "error" and "KeyError" in bad.error
    assert good.completion_ids.tolist() == ALONE
    assert not crew._watches and not crew.session.driver.scheduler.has_work


# --- cancel --------------------------------------------------------------------------------------------------


def from_another_thread(action: Callable[[], None]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def cancelling(crew: Any, row_id: str, when: Callable[[], bool]) -> Callable[[Any], None]:
    done = []

    def on_step(_: Any) -> None:
        if not done and when():
            done.append(True)
            from_another_thread(lambda: crew.cancel(row_id))

    return on_step


def assert_others_are_whole(crew: Any, results: list[RowResult], cancelled: set[int]) -> None:
    for result in results:
        i = result.row.index
        assert (result.finish_reason == "cancelled") == (i in cancelled), i
        alone = completion(result.row.tokens.tolist(), 12)
        got = result.completion_ids.tolist()
        assert got == (alone[: len(got)] if i in cancelled else alone)
        assert result.error is None
    control = crew.session.control
    assert control.num_free_pages == control.num_pages and not crew.session.driver.scheduler.has_work


ROWS = [row(i, [3 + i, 20, 9 + i]) for i in range(10)]


def test_a_running_row_a_waiting_one_and_one_not_drawn_yet_are_cancelled(crew: Any) -> None:
    scheduler = crew.session.driver.scheduler

    def on_step(_: Any) -> None:
        if scheduler.running and scheduler.running[0].num_generated == 3 and scheduler.num_waiting:
            for i in (0, 3, 9):  # two run, four wait, the others are not drawn
                from_another_thread(lambda i=i: crew.cancel(f"row {i}"))  # type: ignore[misc]

    results = crew.run_inference(ROWS, on_step=on_step)
    assert_others_are_whole(crew, results, {0, 3, 9})
    assert len(results[0].completion_ids) >= 3 and not len(results[9].completion_ids)


def test_a_row_is_cancelled_in_the_middle_of_a_step(crew: Any) -> None:
    runtime = crew.session.runtime
    run_step, count = runtime.run_step, [0]

    def running(prepared: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] == 5:
            from_another_thread(lambda: crew.cancel("row 1"))
        return run_step(prepared, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "run_step", running)
        assert_others_are_whole(crew, crew.run_inference(ROWS[:4]), {1})


def test_a_preempted_row_is_cancelled() -> None:
    tight = worker(5, tokenizer=PieceTokenizer())
    scheduler = tight.session.driver.scheduler
    preempted: list[int] = []

    def on_step(_: Any) -> None:
        for request in scheduler.waiting:
            if request.num_preemptions and request.status is RequestStatus.WAITING and not preempted:
                i = int(request.prompt[0]) - 3
                preempted.append(i)
                from_another_thread(lambda i=i: tight.cancel(f"row {i}"))  # type: ignore[misc]

    results = tight.run_inference(ROWS[:4], on_step=on_step)
    assert preempted
    assert_others_are_whole(tight, results, set(preempted))
    assert len(results[preempted[0]].completion_ids)  # it keeps what it had


def test_a_row_that_has_ended_and_one_that_nobody_knows_are_left_alone(crew: Any) -> None:
    crew.cancel("row 2")  # before the call: another call's
    short = [row(0, PROMPT, max_tokens=1), *ROWS[1:4]]
    ended = []

    def on_step(_: Any) -> None:
        if not ended and not any(request.max_tokens == 1 for request in crew.session.driver.scheduler.running):
            ended.append(True)
            for row_id in ("row 0", "nobody", 1):
                from_another_thread(lambda row_id=row_id: crew.cancel(row_id))  # type: ignore[misc]

    results = crew.run_inference(short, on_step=on_step)
    assert ended
    assert [result.finish_reason for result in results] == ["length"] * 4
    assert_others_are_whole(crew, results[1:], set())
    assert_others_are_whole(crew, crew.run_inference(ROWS[:3]), set())  # ids of a call that is over mean nothing now


def test_every_sample_of_a_cancelled_row_ends(crew: Any) -> None:
    scheduler = crew.session.driver.scheduler
    rows = [row(0, PROMPT, n=5), ROWS[1]]
    on_step = cancelling(crew, "row 0", lambda: any(one.num_generated > 2 for one in scheduler.running))
    result, other = crew.run_inference(rows, on_step=on_step)
    assert result.finish_reason == "cancelled" and len(result.samples) == 5
    assert other.completion_ids.tolist() == completion(ROWS[1].tokens.tolist(), 12)


def test_cancels_that_come_at_any_moment_lose_no_row(crew: Any) -> None:
    rows = [row(i, [1 + i % 90, 7]) for i in range(60)]
    over = threading.Event()

    def hammer() -> None:
        rng = np.random.default_rng(0)
        while not over.is_set():
            crew.cancel(f"row {rng.integers(0, 120)}")
            over.wait(0.004)

    thread = threading.Thread(target=hammer)
    thread.start()
    try:
        results = crew.run_inference(rows)
    finally:
        over.set()
        thread.join()
    assert [result.row.index for result in results] == list(range(60))
    assert_others_are_whole(crew, results, {r.row.index for r in results if r.finish_reason == "cancelled"})


def test_a_request_of_the_driver_is_cancelled_when_the_next_step_begins(crew: Any) -> None:
    driver = crew.session.driver
    request = crew.new_request(row(0, PROMPT))
    driver.submit(request)
    for _ in range(3):
        driver.step()
    from_another_thread(lambda: driver.cancel_soon(request.id))
    from_another_thread(lambda: driver.cancel_soon(10**9))
    assert request.status is RequestStatus.RUNNING
    assert driver.step() == [request] and request.finish_reason == "cancelled"
    assert crew.session.control.num_free_pages == crew.session.control.num_pages
