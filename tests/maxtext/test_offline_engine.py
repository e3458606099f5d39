"""``OfflineEngine.batch_inference``: one output per row, in order, and the dense model's own tokens and logprobs."""

from __future__ import annotations

import logging
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kv_control.plan import SamplingSpec
from maxtext_paged import CompletionOutput, InputData, OfflineEngine
from maxtext_paged.imports import import_dense_engine
from tests.completions import PROMPTS, as_request, assert_whole, token_lists
from tests.parity import assert_teacher_forced
from tests.tiny_models import dense_model

pytestmark = pytest.mark.maxtext

SAMPLED = SamplingSpec(temperature=1.0, top_k=60, top_p=0.95)


def dense_greedy(prompt: np.ndarray, count: int, *, banned: int | None = None, banned_for: int = 0) -> list[int]:
    """The dense model's own greedy continuation, whose first ``banned_for`` tokens are not ``banned``."""
    ids = prompt.tolist()
    for i in range(count):
        logits = np.array(dense_model().logits(ids, pad_to=64)[-1])
        if banned is not None and i < banned_for:
            logits[banned] = -np.inf
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def test_it_is_a_drop_in(offline_engine: OfflineEngine) -> None:
    maxtext = import_dense_engine()
    assert isinstance(offline_engine, maxtext.OfflineEngine)
    [output] = offline_engine.batch_inference([PROMPTS[0]], max_tokens=1)
    assert isinstance(output, maxtext.CompletionOutput) and isinstance(output, CompletionOutput)
    assert output.index == "0" and output.prompt_length == len(PROMPTS[0])
    assert output.token_ids[: output.prompt_length].tolist() == PROMPTS[0].tolist()
    assert len(output.token_ids) == len(output.logprobs) == output.prompt_length + 1
    assert offline_engine.worker.session is offline_engine.session
    assert offline_engine.mesh.size == 1


def test_nothing_in_gives_nothing_out(offline_engine: OfflineEngine) -> None:
    assert offline_engine.batch_inference([]) == []


def test_greedy_rows_are_the_dense_models_and_come_in_order(offline_engine: OfflineEngine) -> None:
    outputs = offline_engine.batch_inference(PROMPTS, max_tokens=[12, 20, 5, 25, 7, 1], ignore_eos=True)
    assert [output.index for output in outputs] == ["0", "1", "2", "3", "4", "5"]
    assert [output.prompt_length for output in outputs] == [9, 2, 33, 1, 17, 8]
    assert [output.usage.completion_tokens for output in outputs] == [12, 20, 5, 25, 7, 1]
    assert all(
        output.token_ids[: output.prompt_length].tolist() == prompt.tolist()
        for output, prompt in zip(outputs, PROMPTS, strict=True)
    )
    assert_whole(outputs)
    worst = assert_teacher_forced([as_request(output) for output in outputs], dense_model(), relative=2e-5)
    assert worst <= 2e-5


def test_each_call_returns_its_own_rows(offline_engine: OfflineEngine) -> None:
    first = offline_engine.batch_inference(PROMPTS[:2], max_tokens=4, ignore_eos=True)
    second = offline_engine.batch_inference(PROMPTS[2:5], max_tokens=4, ignore_eos=True)
    again = offline_engine.batch_inference(PROMPTS[:2], max_tokens=4, ignore_eos=True)
    assert (len(first), len(second)) == (2, 3)
    assert token_lists(first) == token_lists(again)
    assert [output.prompt_length for output in second] == [33, 1, 17]


def test_a_row_that_cannot_run_does_not_touch_the_others(offline_engine: OfflineEngine) -> None:
    too_long = np.ones(65, np.int32)
    outputs = offline_engine.batch_inference([PROMPTS[0], too_long, PROMPTS[1]], max_tokens=3, ignore_eos=True)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert "65 tokens" in outputs[1].error and "`max_target_length`" in outputs[1].error
    assert outputs[1].token_ids.tolist() == too_long.tolist(), "never cut silently"
    assert len(outputs[1].logprobs) == 65
    assert token_lists(outputs)[::2] == token_lists(
        offline_engine.batch_inference(PROMPTS[:2], max_tokens=3, ignore_eos=True)
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([], "empty"),
        (np.zeros(0, np.int32), "empty"),
        ("text", "whole numbers"),
        (3, "whole numbers"),
        (None, "whole numbers"),
        ([1.5, 2.0], "whole numbers"),
        (np.ones((2, 3), np.int32), "whole numbers"),
        ([[1, 2], [3]], "whole numbers"),
        ([5, -1], "negative"),
        ([5, 256], "vocabulary of 256"),
        ([5, 2**31], "2\\*\\*31"),
        (InputData("x", np.arange(3, 6), 4), "true_length=4"),
        (InputData("x", np.arange(3, 6), -1), "true_length=-1"),
        (InputData("x", np.arange(3, 6), None), "cannot be read"),
        (type("Bomb", (), {"__array__": lambda self, *_: {}["boom"]})(), "cannot be read: KeyError"),
    ],
)
def test_a_row_of_no_use_carries_its_own_error(offline_engine: OfflineEngine, row: Any, said: str) -> None:
    good = np.arange(3, 8)
    outputs = offline_engine.batch_inference([good, row, good], max_tokens=2, ignore_eos=True)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert re.search(said, outputs[1].error), outputs[1].error
    assert (outputs[1].token_ids >= 0).all(), "what does not fit int32 is left out, never wrapped"
    assert len(outputs[1].logprobs) == len(outputs[1].token_ids) == outputs[1].prompt_length
    assert token_lists(outputs)[0] == token_lists(outputs)[2]


def test_only_bad_rows_give_only_errors(offline_engine: OfflineEngine) -> None:
    outputs = offline_engine.batch_inference([[], "no", []])
    assert [output.finish_reason for output in outputs] == ["error"] * 3
    assert [output.index for output in outputs] == ["0", "1", "2"]


def test_inputs_of_every_kind_mix(offline_engine: OfflineEngine) -> None:
    prompt = PROMPTS[0]
    padded = np.concatenate([prompt, np.full(5, -1, np.int32)])
    rows = [
        prompt,
        jnp.asarray(prompt),
        prompt[None],
        jnp.asarray(prompt)[None],
        prompt.tolist(),
        tuple(prompt.tolist()),
        {"input_ids": prompt[None]},
        InputData("padded", padded, len(prompt)),
        InputData("jax", jnp.asarray(padded)[None], np.int32(len(prompt))),
        prompt.astype(np.uint8),
    ]
    outputs = offline_engine.batch_inference(rows, max_tokens=4, ignore_eos=True)
    assert_whole(outputs)
    assert [output.index for output in outputs] == ["0", "1", "2", "3", "4", "5", "6", "padded", "jax", "9"]
    assert len({tuple(ids) for ids in token_lists(outputs)}) == 1


@pytest.mark.parametrize("ids", [("a", "a"), (1, 1), (1, "1")])
def test_ids_that_read_alike_are_refused(offline_engine: OfflineEngine, ids: tuple[Any, Any]) -> None:
    rows = [InputData(row_id, np.arange(3, 6), 3) for row_id in ids]
    with pytest.raises(ValueError, match="All data ids must be unique"):
        offline_engine.batch_inference(rows)


@pytest.mark.parametrize("length", [62, 63, 64])
def test_a_row_may_fill_the_context_and_no_more(offline_engine: OfflineEngine, length: int) -> None:
    """MaxText's dense budget is 32 tokens for every row here; ours is what the context of 64 leaves."""
    outputs = offline_engine.batch_inference([np.arange(length) + 3, [5]], ignore_eos=True)
    assert_whole(outputs)
    assert [output.usage.completion_tokens for output in outputs] == [64 - length, 63]
    assert [output.finish_reason for output in outputs] == ["length", "length"]


def test_prompt_logprobs_of_a_row_without_completion(offline_engine: OfflineEngine) -> None:
    outputs = offline_engine.batch_inference([PROMPTS[2], PROMPTS[3]], max_tokens=0)
    assert_whole(outputs)
    assert [len(output.logprobs) for output in outputs] == [33, 1]
    assert_teacher_forced([as_request(outputs[0])], dense_model(), relative=2e-5)


def test_more_rows_than_the_pool_holds_are_all_completed(offline_engine: OfflineEngine) -> None:
    rows = [np.random.default_rng(i).integers(3, 255, 1 + i % 13) for i in range(60)]
    outputs = offline_engine.batch_inference(rows, max_tokens=[1 + i % 5 for i in range(60)], ignore_eos=True)
    assert [output.usage.completion_tokens for output in outputs] == [1 + i % 5 for i in range(60)]
    assert_teacher_forced([as_request(output) for output in outputs], dense_model(), relative=2e-5)
    control = offline_engine.session.control
    assert control.num_free_pages == control.num_pages


# --- stopping ------------------------------------------------------------------------------------------


def test_end_tokens_are_the_union_of_the_tokenizers_and_the_callers(offline_engine: OfflineEngine) -> None:
    assert offline_engine.eos_ids == [1, 2]
    assert offline_engine.worker.stop_token_ids == {1, 2}
    assert type(offline_engine.tokenizer).__name__ == "Tokenizer", "the caller's own object comes back"


@pytest.mark.parametrize("min_tokens", [0, 2, 4])
def test_an_end_token_ends_a_row_once_it_may(offline_engine: OfflineEngine, min_tokens: int) -> None:
    """Any token can be the end: take one the dense model is about to say."""
    prompt = PROMPTS[4]
    end = dense_greedy(prompt, 9)[2]
    said = dense_greedy(prompt, 9, banned=end, banned_for=min_tokens)  # it may not even be chosen before
    expected = next((i + 1 for i, token in enumerate(said) if token == end and i + 1 > min_tokens), 9)
    worker = offline_engine.worker
    stops, worker.stop_token_ids = worker.stop_token_ids, frozenset({end})
    try:
        [output] = offline_engine.batch_inference([prompt], max_tokens=9, min_tokens=min_tokens)
        [ignored] = offline_engine.batch_inference([prompt], max_tokens=9, ignore_eos=True)
    finally:
        worker.stop_token_ids = stops
    assert output.token_ids[len(prompt) :].tolist() == said[:expected]
    assert output.finish_reason == ("stop" if said[expected - 1] == end else "length")
    assert_whole([output, ignored])
    assert ignored.token_ids[len(prompt) :].tolist() == dense_greedy(prompt, 9)


# --- sampling ------------------------------------------------------------------------------------------


def test_sampled_rows_do_not_depend_on_their_company(offline_engine: OfflineEngine) -> None:
    seeds = [11, None, 5, 11, None, 5]
    options = {"max_tokens": 8, "ignore_eos": True, "sampling": SAMPLED}
    together = offline_engine.batch_inference(PROMPTS, seed=seeds, **options)
    for place in (0, 2, 3, 5):
        [alone] = offline_engine.batch_inference([PROMPTS[place]], seed=seeds[place], **options)
        assert alone.token_ids.tolist() == together[place].token_ids.tolist()
    fewer = offline_engine.batch_inference(PROMPTS[:2], seed=seeds[:2], **options)
    assert token_lists(fewer) == token_lists(together)[:2], "a row without a seed has one by its place"


def test_equal_prompts_get_different_samples_in_different_rows(offline_engine: OfflineEngine) -> None:
    outputs = offline_engine.batch_inference([PROMPTS[0]] * 4, max_tokens=8, ignore_eos=True, sampling=SAMPLED)
    assert len({tuple(ids) for ids in token_lists(outputs)}) == 4


def test_rng_is_the_run_key_and_stays(offline_engine: OfflineEngine) -> None:
    import jax

    options = {"max_tokens": 6, "ignore_eos": True, "sampling": SAMPLED}
    run = lambda rng: token_lists(offline_engine.batch_inference(PROMPTS[:3], rng=rng, **options))  # noqa: E731
    run(jax.random.key(0))
    compiled = offline_engine.session.runtime.metrics().compiled["paged_step"]
    one, other = run(jax.random.PRNGKey(1)), run(jax.random.key(2))
    assert all(a != b for a, b in zip(one, other, strict=True))
    assert run(None) == other, "as with MaxText, a key stays until the next one"
    assert run(jax.random.key(1)) == one, "typed and untyped keys are the same key"
    assert offline_engine.session.runtime.metrics().compiled["paged_step"] == compiled, "and the same program"
    run(jax.random.PRNGKey(0))


def test_greedy_and_sampled_rows_mix(offline_engine: OfflineEngine) -> None:
    """top_k beyond the vocabulary is clamped, and "off" values of all kinds mean off."""
    specs = [None, SAMPLED, SamplingSpec(temperature=1.0, top_k=10**9), SamplingSpec(temperature=1.0, top_k=0)]
    outputs = offline_engine.batch_inference(
        [PROMPTS[0]] * 4, max_tokens=6, ignore_eos=True, sampling=specs, seed=[None, None, 3, 3]
    )
    assert_whole(outputs)
    assert_teacher_forced([as_request(outputs[0])], dense_model(), relative=2e-5)
    assert_teacher_forced([as_request(output) for output in outputs], dense_model(), relative=2e-5, greedy=False)
    assert token_lists(outputs)[2] == token_lists(outputs)[3]
    assert token_lists(outputs)[0] != token_lists(outputs)[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": [1]}, "max_tokens has 1 values for 2 rows"),
        ({"seed": [1, 2, 3]}, "seed has 3 values"),
        ({"sampling": SamplingSpec(temperature=1.0, seed=4)}, "give `seed=`"),
    ],
)
def test_arguments_that_do_not_fit_the_call_are_refused(
    offline_engine: OfflineEngine, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        offline_engine.batch_inference(PROMPTS[:2], **options)


def test_a_negative_count_is_its_rows_error(offline_engine: OfflineEngine) -> None:
    outputs = offline_engine.batch_inference(PROMPTS[:2], max_tokens=[-1, 2], ignore_eos=True)
    assert [output.finish_reason for output in outputs] == ["error", "length"]
    assert "max_tokens=-1" in outputs[0].error


def test_a_step_that_fails_ends_the_call_and_not_the_engine(
    offline_engine: OfflineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = offline_engine.batch_inference(PROMPTS, max_tokens=5, ignore_eos=True)
    runtime, steps = offline_engine.session.runtime, iter(range(100))
    run_step = type(runtime).run_step

    def failing(self: Any, prepared: Any, **options: Any) -> Any:
        if next(steps) == 3:
            raise RuntimeError("the device is gone")
        return run_step(self, prepared, **options)

    monkeypatch.setattr(type(runtime), "run_step", failing)
    with pytest.raises(RuntimeError, match="the device is gone"):
        offline_engine.batch_inference(PROMPTS, max_tokens=5, ignore_eos=True)
    control = offline_engine.session.control
    assert (control.num_free_pages, control.num_free_rows) == (control.num_pages, 8)
    again = offline_engine.batch_inference(PROMPTS, max_tokens=5, ignore_eos=True)
    assert token_lists(again) == token_lists(before)


def test_the_call_says_what_it_did(offline_engine: OfflineEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="maxtext_paged"):
        offline_engine.batch_inference([PROMPTS[0], []], desc="evaluation", max_tokens=2, ignore_eos=True)
    assert "batch_inference evaluation: 2 rows (1 failed), 2 tokens generated" in caplog.text


# --- several samples, and what the engine counts -----------------------------------------------------------


def test_n_samples_a_row_come_as_samples_of_one_output_each_from_its_own_stream(offline_engine: OfflineEngine) -> None:
    spec = SamplingSpec(temperature=1.0)
    prompts = [np.array([5, 6, 7]), np.array([9, 8, 7, 6])]
    outputs = offline_engine.batch_inference(prompts, n=3, sampling=spec, seed=7, max_tokens=6, ignore_eos=True)
    assert [len(output.samples) for output in outputs] == [3, 3]
    for output in outputs:
        assert output.token_ids.tolist() == output.samples[0].token_ids.tolist()
        assert output.usage.completion_tokens == 18
        assert len({tuple(sample.token_ids.tolist()) for sample in output.samples}) == 3
        for sample in output.samples:
            assert len(sample.logprobs) == len(sample.token_ids) == len(output.samples[0].token_ids)
            assert np.isfinite(sample.logprobs[1:]).all()
    alone = offline_engine.batch_inference(prompts[1:], sampling=spec, seed=7, max_tokens=6, ignore_eos=True)
    assert alone[0].token_ids.tolist() == outputs[1].token_ids.tolist()
    assert alone[0].samples == ()


@pytest.mark.parametrize("n", [0, -1, 1.0, True, 129])
def test_a_number_of_samples_that_is_none_is_refused_before_anything_runs(
    offline_engine: OfflineEngine, n: Any
) -> None:
    with pytest.raises(ValueError, match="n="):
        offline_engine.batch_inference([np.array([5])], n=n)


def test_the_engine_says_what_it_did_and_that_its_cache_is_off(offline_engine: OfflineEngine) -> None:
    before = offline_engine.metrics()
    offline_engine.batch_inference([np.array([5, 6, 7])], max_tokens=3, ignore_eos=True)
    after = offline_engine.metrics()
    assert after.control.num_prefill_tokens - before.control.num_prefill_tokens == 3
    assert after.num_steps - before.num_steps == 3
    assert after.control.num_leaked_pages == after.control.num_retained_pages == 0
    assert offline_engine.reset_prefix_cache() == 0
