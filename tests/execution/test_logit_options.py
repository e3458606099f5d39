"""Penalties, bias, min_tokens and top logprobs through the paged loop: exact, and a row's own affair."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kv_common.errors import RequestError
from kv_control.logit_options import MAX_BANNED, MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS, LogitOptions
from kv_control.plan import GREEDY, RequestId, SamplingSpec, StepBatch
from kv_control.request import Request
from kv_execution.driver import PagedDriver
from kv_execution.logit_adjust import ENTRIES, OptionRows, adjust_logits, history_size, load_option_row, table_bytes
from kv_execution.metadata import SamplingInputs
from kv_execution.sampling import sample
from kv_execution.top_logprobs import top_logprobs
from tests.fakes import VOCAB, checksum, make_driver, run_all
from tests.logit_oracle import changed_logits, greedy_completion

TOP = np.float32(3.5)
"""The best logit: its neighbours are at most one apart, so a penalty moves the choice to one of them."""
MOST = 20
SHAPES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64}


def model(tokens: Any) -> Any:
    """The logits of ``ChecksumModel``, in numpy."""
    return TOP - np.abs(np.arange(VOCAB) - checksum(tokens) % VOCAB).astype(np.float32)


def driver_of(num_pages: int = 64, **options: Any) -> PagedDriver:
    driver = make_driver(num_pages, **{**SHAPES, **options})
    driver.runtime.update_params(jnp.float32(TOP))
    return driver


def request(i: int, prompt: Any, *, sampling: SamplingSpec = GREEDY, max_tokens: int = MOST, **given: Any) -> Request:
    names = ("stop_token_ids", "min_tokens", "ignore_eos", "want_prompt_logprobs", "group")
    rest = {name: given.pop(name) for name in names if name in given}
    return Request(RequestId(i), np.asarray(prompt), sampling, max_tokens, options=LogitOptions(**given), **rest)


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.9},
    {"repetition_penalty": 0.7, "frequency_penalty": 2.0},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.75, "presence_penalty": 2.0},
    {"logit_bias": {3: 40.5, 96: -100.0, 50: 7.25}},
    {"logit_bias": {3: 40.5, 4: 40.25}, "repetition_penalty": 1.9, "presence_penalty": 1.5, "frequency_penalty": 0.25},
    {},
    {"min_tokens": 7, "stop_token_ids": frozenset(range(30, 70))},
]
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, VOCAB, n) for n in (3, 9, 6, 2, 12, 5, 7, 4)]


def requests(num: int = len(PENALTIES), **given: Any) -> list[Request]:
    return [request(i, PROMPTS[i], **{**PENALTIES[i], **given}) for i in range(num)]


@cache
def wanted(i: int) -> tuple[int, ...]:
    return tuple(greedy_completion(model, PROMPTS[i].tolist(), MOST, **PENALTIES[i]))


def generated(one: Request) -> tuple[int, ...]:
    return tuple(one.tokens[one.num_prompt_tokens :].tolist())


def test_options_change_what_is_chosen() -> None:
    """The control of the tests below, where equality would be empty if the options did nothing."""
    for i, options in enumerate(PENALTIES):
        plain = greedy_completion(model, PROMPTS[i].tolist(), MOST)
        assert (list(wanted(i)) != plain) == bool(options), options


@pytest.fixture(scope="module")
def roomy() -> PagedDriver:
    return driver_of(prefix_cache=True)


def test_rows_with_and_without_options_get_in_one_batch_what_the_formulas_say(roomy: PagedDriver) -> None:
    done = run_all(roomy, requests())
    assert [generated(done[RequestId(i)]) for i in range(len(PENALTIES))] == [wanted(i) for i in range(len(PENALTIES))]
    assert roomy.metrics.num_preemptions == 0


def test_a_prefix_hit_changes_nothing(roomy: PagedDriver) -> None:
    done = run_all(roomy, requests())
    assert sum(one.num_cached_tokens for one in done.values()) > 0
    assert [generated(done[RequestId(i)]) for i in range(len(PENALTIES))] == [wanted(i) for i in range(len(PENALTIES))]


def test_chunks_and_preemption_change_nothing() -> None:
    """Few pages, and chunks of three tokens: a victim's own completion returns as part of what it is fed."""
    tight = driver_of(num_pages=9, prefill_chunk_tokens=3)
    done = run_all(tight, requests())
    assert tight.metrics.num_preemptions > 3
    assert sum(done[RequestId(i)].num_preemptions for i in (0, 1, 2, 3, 5)) > 0
    assert [generated(done[RequestId(i)]) for i in range(len(PENALTIES))] == [wanted(i) for i in range(len(PENALTIES))]


def test_a_step_that_runs_ahead_of_its_rows_last_tokens_counts_them(roomy: PagedDriver) -> None:
    """The host does not know such a token when the step is built: its place in the last step's results names it."""
    table, ahead = roomy.runtime._options, 0
    follow = table.follow

    def counting(batch: StepBatch, previous_tokens: Any) -> None:
        nonlocal ahead
        if batch.options is not None:
            unknown = batch.options.notes & (batch.previous_sample >= 0)
            assert not batch.tokens[batch.ends[unknown] - 1].any()
            ahead += int(unknown.sum())
        follow(batch, previous_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "follow", counting)
        done = run_all(roomy, requests())
    assert ahead > 60
    assert [generated(done[RequestId(i)]) for i in range(len(PENALTIES))] == [wanted(i) for i in range(len(PENALTIES))]
    step_by_step = driver_of(ahead=False)
    done = run_all(step_by_step, requests())
    assert [generated(done[RequestId(i)]) for i in range(len(PENALTIES))] == [wanted(i) for i in range(len(PENALTIES))]


def sampled_requests(only: int | None = None) -> list[Request]:
    spec = SamplingSpec(temperature=3.0, top_p=0.95, seed=5)
    made = [
        request(i, PROMPTS[i], sampling=replace(spec, sample_index=i % 2), top_logprobs=3 * (i % 3), **PENALTIES[i])
        for i in range(len(PENALTIES))
    ]
    return made if only is None else [made[only]]


@pytest.mark.slow
def test_seeded_rows_with_options_are_the_same_alone_and_in_any_batch(roomy: PagedDriver) -> None:
    tight = driver_of(num_pages=9, prefill_chunk_tokens=3)
    runs = [run_all(driver, sampled_requests()) for driver in (roomy, tight)]
    assert tight.metrics.num_preemptions > 3
    fresh = driver_of()
    for i in range(len(PENALTIES)):
        [alone] = run_all(fresh, sampled_requests(only=i)).values()
        for done in runs:
            one = done[RequestId(i)]
            assert generated(one) == generated(alone)
            np.testing.assert_array_equal(one.logprobs, alone.logprobs)
            assert len(one.alternatives) == (one.num_generated if one.options.top_logprobs else 0)


def test_the_samples_of_a_group_count_their_own_tokens(roomy: PagedDriver) -> None:
    spec, options = SamplingSpec(temperature=3.0, seed=9), {"repetition_penalty": 1.5, "frequency_penalty": 1.0}
    group = [
        request(i, PROMPTS[4], sampling=replace(spec, sample_index=i), group=0, **options, max_tokens=10)
        for i in range(3)
    ]
    done = run_all(roomy, group)
    assert len({generated(one) for one in done.values()}) == 3
    for i in range(3):
        [alone] = run_all(
            roomy, [request(7, PROMPTS[4], sampling=group[i].sampling, **options, max_tokens=10)]
        ).values()
        assert generated(alone) == generated(done[RequestId(i)])


def test_logprobs_are_of_the_models_distribution_whatever_the_options(roomy: PagedDriver) -> None:
    done = run_all(roomy, requests(6, top_logprobs=4))
    for one in done.values():
        tokens, start = one.tokens, one.num_prompt_tokens
        assert len(one.alternatives) == one.num_generated == len(one.logprobs)
        for place, found in enumerate(one.alternatives):
            logits = model(tokens[: start + place]).astype(np.float64)
            logprobs = logits - np.log(np.exp(logits).sum())
            best = np.lexsort((np.arange(VOCAB), -logprobs))[:4]
            assert found.ids.tolist() == best.tolist()
            np.testing.assert_allclose(found.logprobs, logprobs[best], atol=1e-5)
            np.testing.assert_allclose(one.logprobs[place], logprobs[tokens[start + place]], atol=1e-5)


@pytest.mark.parametrize("least", [0, 1, 5])
def test_an_end_that_is_forced_comes_right_behind_min_tokens(roomy: PagedDriver, least: int) -> None:
    """Three end tokens, each far more likely than anything else, after a prompt that is longer than ``min_tokens``."""
    ends = frozenset({7, 8, 96})
    bias = dict.fromkeys(ends, 100.0)
    [one] = run_all(
        roomy, [request(0, PROMPTS[2], logit_bias=bias, stop_token_ids=ends, min_tokens=least, max_tokens=9)]
    ).values()
    assert (one.num_generated, one.finish_reason) == (least + 1, "stop")
    assert not ends & set(generated(one)[:-1])


def test_ignore_eos_with_min_tokens_holds_no_token_back(roomy: PagedDriver) -> None:
    options: dict[str, Any] = {"logit_bias": {96: 100.0}, "stop_token_ids": frozenset({96}), "ignore_eos": True}
    [one] = run_all(roomy, [request(0, PROMPTS[2], min_tokens=4, max_tokens=6, **options)]).values()
    assert (generated(one), one.finish_reason) == ((96,) * 6, "length")


def test_counts_go_on_after_a_preemption() -> None:
    tight = driver_of(num_pages=7, prefill_chunk_tokens=3)
    ends = frozenset({96})
    bias: dict[str, Any] = {"logit_bias": {96: 100.0}, "stop_token_ids": ends}
    made = [request(i, PROMPTS[2], min_tokens=9, max_tokens=11, **bias) for i in range(4)]
    done = run_all(tight, made)
    assert tight.metrics.num_preemptions > 0
    assert [one.num_generated for one in done.values()] == [10] * 4


def test_options_never_compile_a_second_program_and_a_batch_without_them_sends_none(roomy: PagedDriver) -> None:
    roomy.runtime.warm_up()
    before = roomy.runtime.metrics().compiled
    run_all(roomy, [*requests(8, top_logprobs=2)])
    assert roomy.runtime.metrics().compiled == before
    rows = roomy.runtime._options.rows
    run_all(roomy, [request(i, PROMPTS[i]) for i in range(8)])
    assert roomy.runtime._options.rows is rows
    assert roomy.scheduler.table.num_with_options == 0


@pytest.mark.slow
def test_one_bad_row_fails_alone_among_rows_with_options() -> None:
    driver = driver_of(nan_token=11)
    made = [request(0, PROMPTS[0], **PENALTIES[0]), request(1, [5, 11], repetition_penalty=1.2, top_logprobs=2)]
    made += [request(5, PROMPTS[5], **PENALTIES[5])]
    for one in made:
        driver.submit(one)
    done = {one.id: one for one in driver.run()}
    assert done[RequestId(1)].finish_reason == "error" and "not finite" in str(done[RequestId(1)].error)
    for i in (0, 5):
        expected = wanted(i)
        if 11 not in expected:
            assert generated(done[RequestId(i)]) == expected


# --- the arithmetic on its own -----------------------------------------------------------------------------


def test_every_mix_of_options_is_the_numpy_formula() -> None:
    rng, vocab, length, num = np.random.default_rng(0), 50, 700, 8
    logits = (rng.normal(size=(num, vocab)) * 4).astype(np.float32)
    size = history_size(length)
    table = OptionRows(
        ids=jnp.full((10, ENTRIES), 3),
        values=jnp.full((10, ENTRIES), 9.0),
        until=jnp.full((10, ENTRIES), 10**6),
        penalties=jnp.full((10, 3), 2.0),
        num_prompt=jnp.ones(10, jnp.int32),
        tokens=jnp.full((10, size), 7),
    )  # a former tenant everywhere
    load = jax.jit(load_option_row)
    rows, positions, expected = [], [], []
    for i in range(num):
        prompt = rng.integers(0, vocab, [1, 3, 40, 513, 2, 600, 5, 6][i]).tolist()
        output = rng.integers(0, vocab, [0, 6, 20, 100, 520, 0, 5, 6][i]).tolist()
        options: dict[str, Any] = {
            "repetition_penalty": [1.3, 0.5, 1.0, 2.0, 1.1, 1.9, 1.0, 1.4][i],
            "presence_penalty": [0.0, 1.5, -2.0, 0.0, 0.5, 0.0, 0.0, 1.0][i],
            "frequency_penalty": [0.0, -0.5, 2.0, 0.25, 0.0, 0.0, 0.0, 1.0][i],
            "logit_bias": {
                int(t): float(v) for t, v in zip(rng.permutation(vocab)[:9], rng.normal(size=9), strict=True)
            },
        }
        banned, least = [4, 5], [0, 9, 20, 101, 3, 0, 6, 6][i]
        acting = banned if len(output) < least else []
        entries = [*options["logit_bias"].items(), *((token, -np.inf) for token in banned), (vocab, 5.0), (-1, 5.0)]
        ids, values = (np.zeros(ENTRIES, dtype) for dtype in (np.int32, np.float32))
        until = np.zeros(ENTRIES, np.int32)
        ids[: len(entries)], values[: len(entries)] = zip(*entries, strict=True)
        until[: len(entries)] = 10**6
        until[9:11] = len(prompt) + least
        tokens = np.full(size, 49, np.int32)  # what lies behind the history is nobody's
        tokens[: len(prompt) + len(output)] = prompt + output
        penalties = np.array(
            [options[f"{name}_penalty"] for name in ("repetition", "presence", "frequency")], np.float32
        )
        table = load(table, np.int32(i + 1), OptionRows(ids, values, until, penalties, np.int32(len(prompt)), tokens))
        plain = i == 6
        rows.append(-1 if plain else i + 1)
        positions.append(len(prompt) + len(output))
        expected.append(logits[i] if plain else changed_logits(logits[i], prompt, output, banned=acting, **options))
    found = jax.jit(adjust_logits)(jnp.asarray(logits), table, jnp.asarray(rows), jnp.asarray(positions))
    np.testing.assert_allclose(np.asarray(found), np.array(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.multi_device
def test_logits_that_are_sharded_over_the_vocabulary_give_the_same_choices() -> None:
    """As MaxText's head leaves them on a tensor axis; the table of options is whole on every device."""
    rng, num, vocab = np.random.default_rng(4), 16, 64
    logits = (rng.normal(size=(num, vocab)) * 3).astype(np.float32)
    size = history_size(40)
    options = OptionRows(
        ids=rng.integers(0, vocab, (num, ENTRIES)).astype(np.int32),
        values=np.where(np.arange(ENTRIES) < 6, rng.normal(size=(num, ENTRIES)), 0).astype(np.float32),
        until=np.where(np.arange(ENTRIES) < 9, 10**6, 0).astype(np.int32).repeat(num).reshape(ENTRIES, num).T,
        penalties=np.array([[1.5, 0.5, 0.25]] * num, np.float32),
        num_prompt=np.full(num, 9, np.int32),
        tokens=rng.integers(0, vocab, (num, size)).astype(np.int32),
    )
    sampling = SamplingInputs(
        temperature=np.where(np.arange(num) % 2, 1.0, 0.0).astype(np.float32),
        top_k=np.where(np.arange(num) % 4 == 1, 5, 0).astype(np.int32),
        top_p=np.full(num, 0.9, np.float32),
        min_p=np.zeros(num, np.float32),
        seed=np.arange(num, dtype=np.uint32),
        sample_index=np.zeros(num, np.int32),
        position=np.full(num, 30, np.int32),
        options_row=np.where(np.arange(num) % 3, np.arange(num), -1).astype(np.int32),
        num_top=np.arange(num, dtype=np.int32) % 4,
    )

    def choose(logits: Any, options: Any) -> Any:
        key = jax.random.key(0)
        return *sample(logits, sampling, key, options), *top_logprobs(logits, jnp.asarray(sampling.num_top))

    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("tensor", "data"))
    over_vocab, everywhere = (NamedSharding(mesh, spec) for spec in (PartitionSpec(None, "tensor"), PartitionSpec()))
    spread = jax.jit(choose)(jax.device_put(logits, over_vocab), jax.device_put(options, everywhere))
    whole = jax.jit(choose)(jnp.asarray(logits), jax.tree.map(jnp.asarray, options))
    changed = np.asarray(whole[0]) != logits.argmax(axis=-1)
    assert changed[sampling.temperature == 0].any()  # options act on greedy rows too
    for found, wanted in zip(spread, whole, strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-5, atol=1e-5)


def test_top_logprobs_are_the_best_of_rows_that_ask_and_ties_go_to_the_smaller_id() -> None:
    rng = np.random.default_rng(1)
    logits = np.round(rng.normal(size=(21, 30)), 1).astype(np.float32)
    num_top = np.where(np.arange(21) % 2, 5, 0).astype(np.int32)
    ids, values = map(np.asarray, jax.jit(top_logprobs)(jnp.asarray(logits), jnp.asarray(num_top)))
    assert ids.shape == values.shape == (21, MAX_TOP_LOGPROBS)
    for i in range(21):
        if not num_top[i]:
            assert np.isnan(values[i]).all()
            continue
        logprobs = logits[i].astype(np.float64)
        logprobs -= np.log(np.exp(logprobs).sum())
        best = np.lexsort((np.arange(30), -logprobs))[:MAX_TOP_LOGPROBS]
        assert ids[i].tolist() == best.tolist()
        np.testing.assert_allclose(values[i], logprobs[best], atol=1e-5)


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty=nan"),
        ({"presence_penalty": float("inf")}, "presence_penalty=inf"),
        ({"top_logprobs": MAX_TOP_LOGPROBS + 1}, f"top_logprobs={MAX_TOP_LOGPROBS + 1}: must be a whole number in 0"),
        ({"top_logprobs": -1}, "top_logprobs=-1"),
        ({"top_logprobs": True}, "top_logprobs=True"),
        ({"logit_bias": {5: 100.5}}, "logit_bias={5: 100.5}"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias={-1: 1.0}"),
        ({"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)}, f"at most {MAX_LOGIT_BIAS}"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words.replace("{", r"\{")):
        LogitOptions(**options)


def test_what_the_model_or_a_row_cannot_hold_is_refused_at_submit(roomy: PagedDriver) -> None:
    beyond = request(0, [5], logit_bias={VOCAB: 1.0})
    many = request(0, [5], stop_token_ids=frozenset(range(MAX_BANNED + 1)), min_tokens=1)
    for one, words in ((beyond, f"id {VOCAB} is outside the vocabulary"), (many, "min_tokens=1: 65 stop tokens")):
        with pytest.raises(RequestError, match=words):
            roomy.submit(one)
    assert not roomy.scheduler.has_work
    run_all(roomy, [request(0, [5], stop_token_ids=frozenset(range(VOCAB)), max_tokens=2)])  # without min_tokens: any


def test_the_table_is_as_large_as_is_said() -> None:
    runtime = driver_of().runtime
    leaves = jax.tree.leaves(runtime._options.rows)
    assert sum(leaf.nbytes for leaf in leaves) == table_bytes(4, 64)
