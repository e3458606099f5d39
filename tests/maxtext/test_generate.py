"""``OfflineEngine.generate``, ``stream`` and ``astream``: one result per prompt, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_common.errors import ConfigError, KvCacheError, UnsupportedError
from maxtext_paged import Generation, OfflineEngine, RowError, SamplingParams
from tests.completions import PROMPTS
from tests.tiny_models import dense_model, make_config, make_mesh

pytestmark = pytest.mark.maxtext

ROOT = Path(__file__).parents[2]
WHOLE = SamplingParams(max_tokens=6, ignore_eos=True)
SEQS = 8
"""``paged_max_num_seqs`` of the shared engine."""


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids.tolist() for generation in generations]


def idle(engine: OfflineEngine) -> bool:
    """Whether nothing is under way and every page is free."""
    session = engine.session
    assert session is not None
    return not session.driver.scheduler.has_work and session.control.num_free_pages == session.control.num_pages


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def endless() -> Iterator[np.ndarray]:
    while True:
        yield from PROMPTS


# --- generate ----------------------------------------------------------------------------------------------


def test_results_are_typed_in_order_and_those_of_batch_inference(offline_engine: OfflineEngine) -> None:
    found = offline_engine.generate(PROMPTS, WHOLE)
    outputs = offline_engine.batch_inference(PROMPTS, max_tokens=6, ignore_eos=True)
    assert [one.index for one in found] == list(range(len(PROMPTS)))
    for one, prompt, output in zip(found, PROMPTS, outputs, strict=True):
        assert one.ok and one.error is None and one.id is None
        assert one.prompt_token_ids.tolist() == prompt.tolist()
        assert one.token_ids.dtype == np.int32 and one.logprobs.dtype == np.float32
        assert [*prompt.tolist(), *one.token_ids.tolist()] == output.token_ids.tolist()
        np.testing.assert_array_equal(one.logprobs, output.logprobs[len(prompt) :])
        assert one.text == "".join(map(chr, one.token_ids.tolist()))
        assert one.finish_reason == "length" and one.usage == output.usage and one.samples == ()


def test_text_ids_chats_and_rows_may_be_mixed_and_each_may_have_its_own_options(offline_engine: OfflineEngine) -> None:
    prompts = [
        "ab",
        [97, 98],
        np.array([97, 98]),
        {"prompt": "ab", "id": "named", "max_tokens": 2},
        {"input_ids": [97]},
    ]
    params = [WHOLE, None, SamplingParams(max_tokens=3, ignore_eos=True), WHOLE, SamplingParams(max_tokens=0)]
    found = offline_engine.generate(prompts, params)
    assert [one.ok for one in found] == [True] * 5
    assert [len(one.token_ids) for one in found][2:] == [3, 2, 0]
    assert [one.id for one in found] == [None, None, None, "named", None]
    assert tokens(found)[2] == tokens(found)[0][:3], "text is what its ids are"


@pytest.mark.parametrize(
    ("prompt", "code", "said"),
    [
        ("", "empty_prompt", "empty"),
        ([], "empty_prompt", "empty"),
        (5, "bad_value", "not int"),
        ([3, 999], "bad_value", "vocabulary of 256"),
        (np.ones(65, np.int32), "context_length_exceeded", "65 tokens"),
        ({"prompt": "x", "temperature": -1}, "bad_value", "temperature=-1: must be"),
        ({"prompt": "x", "lora": "y"}, "unsupported_field", "lora"),
        ([{"role": "user", "content": "x"}], "cannot_encode", ""),
    ],
)
def test_a_bad_prompt_fails_alone_with_the_error_of_a_file(
    offline_engine: OfflineEngine, prompt: Any, code: str, said: str
) -> None:
    good, bad, other = offline_engine.generate([PROMPTS[0], prompt, PROMPTS[1]], WHOLE)
    assert isinstance(bad.error, RowError)
    assert bad.error.code == code and said in bad.error.message and bad.error.status_code == 400
    assert (bad.index, bad.text, bad.finish_reason, len(bad.token_ids), bad.ok) == (1, None, "error", 0, False)
    assert tokens([good, other]) == tokens(offline_engine.generate(PROMPTS[:2], WHOLE))
    assert idle(offline_engine)


def test_every_prompt_may_be_bad_and_there_may_be_none(offline_engine: OfflineEngine) -> None:
    assert [one.finish_reason for one in offline_engine.generate(["", "", ""])] == ["error"] * 3
    assert offline_engine.generate([]) == []
    assert list(offline_engine.stream([])) == []
    assert [one.index for one in offline_engine.stream(["", ""])] == [0, 1]


def test_prompts_that_share_an_id_all_fail(offline_engine: OfflineEngine) -> None:
    rows = [{"tokens": [5], "id": name, "max_tokens": 1} for name in ("a", 1, "1", "a")]
    found = offline_engine.generate(rows)
    assert [one.error.code if one.error else None for one in found] == ["duplicate_id", None, None, "duplicate_id"]
    assert [one.id for one in found] == ["a", 1, "1", "a"]


@pytest.mark.parametrize("prompts", ["text", b"x", {"prompt": "x"}, 5, None])
def test_one_prompt_where_many_belong_is_refused(offline_engine: OfflineEngine, prompts: Any) -> None:
    with pytest.raises(ValueError, match="must be an iterable of prompts, not one"):
        offline_engine.generate(prompts)
    with pytest.raises(ValueError, match="must be an iterable of prompts, not one"):
        offline_engine.stream(prompts)


def test_params_of_another_kind_or_length_are_refused_before_anything_runs(offline_engine: OfflineEngine) -> None:
    for params in ([WHOLE], [WHOLE] * 3):
        with pytest.raises(ValueError, match="params"):
            offline_engine.generate(PROMPTS[:2], params)
    for params in (5, {"max_tokens": 3}, "greedy"):
        for ask in (offline_engine.generate, offline_engine.stream):
            with pytest.raises(ValueError, match=f"must be SamplingParams, .*not {type(params).__name__}"):
                ask(PROMPTS[:2], params)  # type: ignore[arg-type]
    assert idle(offline_engine)


def test_samples_are_each_a_result(offline_engine: OfflineEngine) -> None:
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=3, n=3, ignore_eos=True)
    [one] = offline_engine.generate([PROMPTS[0]], params)
    assert len(one.samples) == 3 and len({tuple(sample.token_ids) for sample in one.samples}) == 3
    assert one.token_ids.tolist() == one.samples[0].token_ids.tolist()
    assert one.usage.completion_tokens == 12
    [again] = offline_engine.generate([PROMPTS[0]], params)
    assert tokens(list(again.samples)) == tokens(list(one.samples))


def test_an_end_token_is_in_the_ids_and_not_in_the_text(offline_engine: OfflineEngine) -> None:
    [whole] = offline_engine.generate([PROMPTS[1]], WHOLE)
    stop = whole.token_ids.tolist()[3]
    first = whole.token_ids.tolist().index(stop)
    [one] = offline_engine.generate([PROMPTS[1]], SamplingParams(stop_token_ids=[stop], max_tokens=6))
    assert one.finish_reason == "stop" and one.token_ids.tolist() == whole.token_ids.tolist()[: first + 1]
    assert one.text == "".join(map(chr, whole.token_ids.tolist()[:first]))


def test_a_completion_that_cannot_be_decoded_fails_alone_and_keeps_its_ids(
    offline_engine: OfflineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = type(offline_engine._runner._tokenizer).decode

    def broken(self: Any, ids: Any, **more: Any) -> str:
        if len(list(ids)) == 3:
            raise RuntimeError("a fault in the tokenizer")
        return decode(self, ids, **more)

    monkeypatch.setattr(type(offline_engine._runner._tokenizer), "decode", broken)
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (2, 3, 4)]
    found = offline_engine.generate(PROMPTS[:3], params)
    assert [one.error.code if one.error else None for one in found] == [None, "cannot_decode", None]
    assert found[1].error is not None and found[1].error.status_code == 500
    assert "RuntimeError: a fault in the tokenizer" in found[1].error.message
    assert found[1].text is None and len(found[1].token_ids) == len(found[1].logprobs) == 3


@pytest.mark.parametrize("streamed", [False, True])
def test_an_engine_that_fails_says_so_at_once_and_can_be_used_again(
    offline_engine: OfflineEngine, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    steps, step = 0, offline_engine.worker.step

    def failing() -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise RuntimeError("the device is gone")
        step()

    monkeypatch.setattr(offline_engine.worker, "step", failing)
    with pytest.raises(RuntimeError, match="the device is gone"):
        list(offline_engine.stream(PROMPTS * 3, WHOLE)) if streamed else offline_engine.generate(PROMPTS * 3, WHOLE)
    monkeypatch.undo()
    assert idle(offline_engine)
    assert all(one.ok for one in offline_engine.generate(PROMPTS, WHOLE))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_ten_thousand_rows_with_common_beginnings_are_scored_in_order_at_flat_memory(  # CASES 180
    offline_engine: OfflineEngine, max_tokens: int
) -> None:
    rng = np.random.default_rng(5)
    begin = rng.integers(3, 255, 8)
    rows = [np.concatenate([begin, rng.integers(3, 255, 1 + i % 6)]) for i in range(10_000)]
    offline_engine.batch_inference(rows[:500], max_tokens=max_tokens)
    before = resident_bytes()
    outputs = offline_engine.batch_inference(rows, max_tokens=max_tokens)
    kept = (resident_bytes() - before) / len(rows)
    print(f"{kept:.0f} bytes a row")
    assert kept < 8192, "an output is some arrays; nothing of the loop stays"
    for row, output in zip(rows, outputs, strict=True):
        assert output.prompt_length == len(row) and len(output.token_ids) == len(row) + max_tokens
        assert np.array_equal(output.token_ids[: len(row)], row)
        assert np.isfinite(output.logprobs[1:]).all() and np.isnan(output.logprobs[0])
    assert idle(offline_engine)


# --- stream ------------------------------------------------------------------------------------------------


def test_a_stream_hands_out_every_prompt_once_as_it_finishes(offline_engine: OfflineEngine) -> None:
    lengths = [12, 1, 7, 3, 2, 5]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    found = list(offline_engine.stream(iter(PROMPTS), iter(params)))
    assert sorted(one.index for one in found) == list(range(6))
    assert found[0].index != 0, "the longest was first in the input and is not in the output"
    assert tokens(sorted(found, key=lambda one: one.index)) == tokens(offline_engine.generate(PROMPTS, params))


def test_a_stream_draws_prompts_as_there_is_room_and_gives_everything_back(offline_engine: OfflineEngine) -> None:
    drawn = 0

    def prompts() -> Iterator[Any]:
        nonlocal drawn
        for prompt in endless():
            drawn += 1
            yield prompt if drawn % 5 else ""  # every fifth cannot run

    with offline_engine.stream(prompts(), WHOLE) as stream:
        for count, _ in zip(range(1, 60), stream, strict=False):
            assert drawn <= count + 3 * SEQS + 1, "prompts are not hoarded"
        assert not idle(offline_engine)
    assert idle(offline_engine)
    assert list(stream) == []


def test_a_bad_prompt_of_a_stream_comes_out_before_the_next_is_drawn(offline_engine: OfflineEngine) -> None:
    drawn: list[int] = []

    def prompts() -> Iterator[str]:
        for i in range(1000):
            drawn.append(i)
            yield ""

    with offline_engine.stream(prompts()) as stream:
        assert next(stream).index == 0 and drawn == [0]


def test_a_stream_that_is_dropped_gives_everything_back(offline_engine: OfflineEngine) -> None:
    for _ in offline_engine.stream(endless(), WHOLE):
        break
    assert idle(offline_engine)


def test_a_stream_lost_in_a_cycle_is_ended_by_the_collector_at_a_safe_point(offline_engine: OfflineEngine) -> None:
    class Knot:
        pass

    knot: Any = Knot()
    knot.self, knot.stream = knot, offline_engine.stream(endless(), WHOLE)
    next(knot.stream)
    del knot
    with offline_engine._turns:  # as in the middle of another call's step
        gc.collect()
        assert not idle(offline_engine), "not in the middle of anything"
    assert idle(offline_engine)


def test_prompts_that_raise_end_their_stream_with_that_error_and_give_everything_back(
    offline_engine: OfflineEngine,
) -> None:
    def prompts() -> Iterator[Any]:
        yield from PROMPTS * 5
        raise OSError("the source went away")

    stream = offline_engine.stream(prompts(), WHOLE)
    with pytest.raises(OSError, match="the source went away"):
        list(stream)
    assert idle(offline_engine)
    assert list(stream) == []


def test_an_id_may_come_again_once_its_prompt_is_done_but_not_before(offline_engine: OfflineEngine) -> None:
    rows = [{"tokens": [5, 6], "id": "a", "max_tokens": 2}, {"tokens": [5], "id": "a", "max_tokens": 2}]
    found = list(offline_engine.stream(rows))
    assert sorted((one.index, one.error.code if one.error else None) for one in found) == [
        (0, None),
        (1, "duplicate_id"),
    ]

    def again_when_done() -> Iterator[Any]:
        yield rows[0]
        while not any(one.id == "a" for one in done):
            yield [5]
        yield rows[0]

    done: list[Generation] = []
    for one in offline_engine.stream(again_when_done(), SamplingParams(max_tokens=2)):
        done.append(one)
    assert [one.ok for one in done if one.id == "a"] == [True, True]


def test_an_id_may_be_used_again_right_after_it_was_cancelled(offline_engine: OfflineEngine) -> None:  # CASES 175
    rows = [{"tokens": prompt.tolist(), "id": f"r{i}"} for i, prompt in enumerate(PROMPTS)]
    alone = tokens(offline_engine.generate(rows, WHOLE))
    for _ in range(3):
        stream = offline_engine.stream(rows, WHOLE)
        next(stream)
        stream.close()
        assert tokens(offline_engine.generate(rows, WHOLE)) == alone


# --- calls within calls, and threads -------------------------------------------------------------------------


def test_calls_between_the_results_of_a_stream_get_their_own(offline_engine: OfflineEngine) -> None:
    alone = tokens(offline_engine.generate(PROMPTS, WHOLE))
    inner: list[list[list[int]]] = []
    outer = []
    for one in offline_engine.stream(PROMPTS * 3, WHOLE):
        outer.append(one)
        if len(outer) in (1, 9):
            inner.append(tokens(offline_engine.generate(PROMPTS[:2], WHOLE)))
            inner.append([next(offline_engine.stream([PROMPTS[4]], WHOLE)).token_ids.tolist()])
    assert inner == [alone[:2], [alone[4]]] * 2
    assert tokens(sorted(outer, key=lambda one: one.index)) == alone * 3
    assert idle(offline_engine)


def test_the_prompts_of_a_stream_may_be_made_by_the_same_engine(offline_engine: OfflineEngine) -> None:
    def second_stage() -> Iterator[list[int]]:
        for first in offline_engine.stream(PROMPTS, WHOLE):
            yield first.token_ids.tolist()

    found = sorted(offline_engine.stream(second_stage(), WHOLE), key=lambda one: one.prompt_token_ids.tolist())
    staged = offline_engine.generate(tokens(offline_engine.generate(PROMPTS, WHOLE)), WHOLE)
    assert tokens(found) == tokens(sorted(staged, key=lambda one: one.prompt_token_ids.tolist()))


def test_threads_take_turns_and_each_gets_its_own(offline_engine: OfflineEngine) -> None:
    alone = tokens(offline_engine.generate(PROMPTS, WHOLE))
    found: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        if number % 2:
            found[number] = tokens(offline_engine.generate(PROMPTS, WHOLE))
        else:
            streamed = sorted(offline_engine.stream(PROMPTS, WHOLE), key=lambda one: one.index)
            found[number] = tokens(streamed)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), alone)
    assert idle(offline_engine)


def test_another_thread_can_close_a_stream_that_is_running(offline_engine: OfflineEngine) -> None:
    started = threading.Event()

    def prompts() -> Iterator[Any]:
        yield [5]
        started.set()
        while True:
            yield from PROMPTS

    stream = offline_engine.stream(prompts(), SamplingParams(max_tokens=40, ignore_eos=True))
    found: list[Generation] = []
    thread = threading.Thread(target=lambda: found.extend(stream))
    thread.start()
    assert started.wait(60)
    stream.close()
    thread.join(60)
    assert not thread.is_alive()
    assert idle(offline_engine)


def test_weights_cannot_change_under_a_stream(offline_engine: OfflineEngine) -> None:
    with offline_engine.stream(endless(), WHOLE) as stream:
        next(stream)
        with pytest.raises(KvCacheError, match="finish or cancel them"):
            offline_engine.update_params(dense_model().params)
    offline_engine.update_params(dense_model().params)


# --- async -------------------------------------------------------------------------------------------------


def test_an_async_stream_leaves_the_event_loop_free(offline_engine: OfflineEngine) -> None:
    async def run() -> tuple[list[Generation], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        found = [one async for one in offline_engine.astream(PROMPTS, WHOLE)]
        ticking.cancel()
        return found, ticks

    found, ticks = asyncio.run(run())
    assert tokens(sorted(found, key=lambda one: one.index)) == tokens(offline_engine.generate(PROMPTS, WHOLE))
    assert ticks > len(found)


def test_a_cancelled_task_gives_everything_back(offline_engine: OfflineEngine) -> None:
    async def forever(started: asyncio.Event) -> None:
        async for _ in offline_engine.astream(endless(), WHOLE):
            started.set()

    async def run() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(forever(started))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert idle(offline_engine)

    asyncio.run(run())


# --- opening and closing -------------------------------------------------------------------------------------


@pytest.fixture
def small_engine() -> OfflineEngine:
    options = {"paged_num_pages": 40, "paged_tokens_per_page": 8, "paged_max_num_seqs": 8}
    config = make_config(**options, paged_max_num_batched_tokens=32)
    return OfflineEngine(config, params=dense_model().params, eos_ids=[2], mesh=make_mesh(config))


def test_a_closed_engine_says_so_by_name_whatever_is_asked(small_engine: OfflineEngine) -> None:
    with small_engine as engine:
        stream = engine.stream(endless(), WHOLE)
        next(stream)
        done = engine.stream([[5]], WHOLE)
        assert len(list(done)) == 1
    asked = [
        lambda: engine.generate([[5]]),
        lambda: engine.stream([[5]]),
        lambda: engine.astream([[5]]),
        lambda: engine.batch_inference([[5]]),
        lambda: engine.update_params(dense_model().params),
        engine.reset_prefix_cache,
        engine.metrics,
        lambda: next(stream),
    ]
    for ask in asked:
        with pytest.raises(KvCacheError, match="this OfflineEngine was closed"):
            ask()
    assert list(done) == [], "one that had ended has ended"
    engine.close()


def test_close_from_within_a_call_is_refused_and_harms_nothing(small_engine: OfflineEngine) -> None:
    def prompts() -> Iterator[Any]:
        yield [5, 6]
        with pytest.raises(KvCacheError, match="close: a call of this OfflineEngine is under way"):
            small_engine.close()
        yield [7, 8]

    assert len(list(small_engine.stream(prompts(), WHOLE))) == 2
    small_engine.close()


def test_an_engine_without_a_tokenizer_runs_ids_and_says_what_text_needs(small_engine: OfflineEngine) -> None:
    with small_engine as engine:
        ids, text = engine.generate([[5, 6], "hello"], WHOLE)
    assert ids.ok and ids.text is None and len(ids.token_ids) == 6
    assert text.error is not None and text.error.code == "cannot_encode" and "tokenizer=" in text.error.message


def test_overrides_belong_to_a_path() -> None:
    with pytest.raises(ConfigError, match="overrides go with the path"):
        OfflineEngine(make_config(), overrides={"max_target_length": 32})


@pytest.mark.parametrize(
    ("path", "said"),
    [("nowhere.yml", "no such configuration file"), (".", "is a directory"), (Path("no.yml"), "no such")],
)
def test_a_path_that_is_no_configuration_is_refused_by_name(path: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OfflineEngine(path)


def test_the_dense_engine_has_no_streams_and_says_so() -> None:
    engine = OfflineEngine.__new__(OfflineEngine)
    engine._paged = False
    for ask in (engine.generate, engine.stream):
        with pytest.raises(UnsupportedError, match="only with attention=gpu_paged"):
            ask([[5]])


# --- types ---------------------------------------------------------------------------------------------------

CONFIG = """
[mypy]
python_version = 3.12
[mypy-jax.*,flax.*,maxtext.*,kv_execution.*,maxtext_paged.session,maxtext_paged.engine,tokenizers.*]
follow_imports = skip
ignore_missing_imports = True
"""
"""Our own packages' errors are `make types`'s; reading jax would take most of the time."""

USER = """
from maxtext_paged import Generation, OfflineEngine, SamplingParams

engine = OfflineEngine("config.yml", overrides={"paged_num_pages": 8})
params = SamplingParams(max_tokens=4, temperature=0.5, stop_token_ids=[1])
for result in engine.stream(iter(["a", "b"]), params):
    reveal_type(result)
    text: str | None = result.text
found: list[Generation] = engine.generate([[1, 2], "c"], [params, params])
if found[0].error is not None:
    print(found[0].error.code)
"""
WRONG = 'SamplingParams(max_tokens="4")\nSamplingParams(temprature=1)\nengine.generate(["a"], 5)\nparams.seed = 3\n'


@pytest.mark.slow
def test_a_callers_program_is_checked_against_our_types(tmp_path: Path) -> None:
    config = tmp_path / "mypy.ini"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--config-file", str(config)]
    command += ["--cache-dir", str(ROOT / ".cache" / "mypy"), "-c", USER + WRONG]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("<string>:")]
    assert lines, done.stdout + done.stderr
    assert 'Revealed type is "maxtext_paged.generation.Generation"' in lines[0]
    first_wrong = USER.count("\n") + 1
    wrong = [int(line.split(":")[1]) for line in lines[1:] if " error: " in line]
    assert wrong == [first_wrong + i for i in range(WRONG.count("\n"))]


def test_a_prompt_without_an_id_is_cancelled_by_its_place(offline_engine: OfflineEngine) -> None:
    """And no other: its id stays None in what comes back."""
    worker, step = offline_engine.worker, offline_engine.worker.step

    def stepping() -> None:
        offline_engine.cancel(1)
        step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "step", stepping)
        found = offline_engine.generate([[5, 6], [7, 8], [9, 10]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert [one.finish_reason for one in found] == ["length", "cancelled", "length"]
    assert [one.id for one in found] == [None] * 3
