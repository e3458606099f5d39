"""Sampling: the right distribution, exact filters, and a token that depends on nothing but its own row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chi2

from kv_execution import sampling as sampling_module
from kv_execution.metadata import SamplingInputs
from kv_execution.sampling import _filter, _gumbel, sample

KEY = jax.random.key(11)
DTYPES = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.uint32,
    "sample_index": np.int32,
    "position": np.int32,
}
OFF = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
    "sample_index": 0,
    "position": 0,
}


def inputs(num_rows: int, **given: object) -> SamplingInputs:
    """Rows of temperature 1 without filters, except for what is given (a number, or one per row)."""
    values = {**OFF, **given}
    return SamplingInputs(
        **{name: np.broadcast_to(np.asarray(values[name], dtype), num_rows) for name, dtype in DTYPES.items()}
    )


VOCAB = 40
"""Of most tests, in few batch sizes (1, 16, 512): each new shape is a program to compile."""

_sample = jax.jit(sample)


def draw(logits, sampling: SamplingInputs, key=KEY) -> tuple[NDArray, NDArray, NDArray]:
    return tuple(np.asarray(x) for x in _sample(jnp.asarray(logits, jnp.float32), sampling, key))


def numpy_filter(logits: NDArray, temperature: float, top_k: int, top_p: float, min_p: float) -> NDArray:
    """Probabilities left by the filters, float64, by sorting: ``temperature, top_k, top_p, min_p``."""
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    if 0 < top_k < len(order):
        order = order[:top_k]
    probs = np.exp(scaled[order])
    probs /= probs.sum()
    if top_p < 1:
        before = np.cumsum(probs) - probs
        num_kept = max(1, int((before < top_p - 1e-9).sum()))
        order, probs = order[:num_kept], probs[:num_kept]
    kept = order[(probs >= min_p * probs[0]) | (np.arange(len(order)) == 0)]
    result = np.zeros(len(scaled))
    result[kept] = np.exp(scaled[kept])
    return result / result.sum()


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("varied", ["seed", "sample_index", "position"])
def test_tokens_follow_the_filtered_distribution(options, varied):
    rounds, num_rows, num_likely = 16, 512, 11
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[:num_likely] = np.random.default_rng(5).normal(size=num_likely) * 1.5
    counts = np.zeros(VOCAB)
    for i in range(rounds):
        sampling = inputs(num_rows, **options, **{varied: np.arange(num_rows) + i * num_rows})
        tokens, _, ok = draw(np.tile(logits, (num_rows, 1)), sampling)
        assert ok.all()
        counts += np.bincount(tokens, minlength=VOCAB)
    probs = numpy_filter(logits, **{name: {**OFF, **options}[name] for name in list(OFF)[:4]})
    assert counts[probs == 0].sum() == 0
    wanted = probs[probs > 0] * rounds * num_rows
    statistic = ((counts[probs > 0] - wanted) ** 2 / wanted).sum()
    # Fixed keys: this either always passes or never does. One in a million good samplers would fail.
    assert statistic < chi2.isf(1e-6, df=max(1, (probs > 0).sum() - 1))


def test_draws_of_one_row_at_neighbouring_positions_are_independent():
    count, num_likely = 512, 4
    logits = np.where(np.arange(VOCAB) < num_likely, np.float32(0), -np.inf)
    sampling = [inputs(count, position=np.arange(count) + i * count, seed=9) for i in range(8)]
    tokens = np.concatenate([draw(np.tile(logits, (count, 1)), rows)[0] for rows in sampling])
    pairs = np.bincount(tokens[:-1] * num_likely + tokens[1:], minlength=num_likely**2)
    wanted = (len(tokens) - 1) / num_likely**2
    assert ((pairs - wanted) ** 2 / wanted).sum() < chi2.isf(1e-6, df=num_likely**2 - 1)


@cache
def _kept():
    def kept(logits, sampling):
        distance = (jnp.max(logits, -1, keepdims=True) - logits) / sampling.temperature[:, None]
        return jnp.isfinite(_filter(distance, sampling, sampling.temperature > 0))

    return jax.jit(kept)


# Logits and limits of few distinct values, so that ties and exact boundaries are common.
rows = st.lists(st.integers(-6, 6), min_size=9, max_size=9).map(lambda x: np.array(x, np.float32) / 2)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            rows,
            st.sampled_from([0.5, 1.0, 2.0]),
            st.sampled_from([-1, 0, 1, 2, 5, 8, 9, 10**9]),
            st.sampled_from([-1.0, 0.0, 0.1, 0.5, 0.75, 0.9, 0.999, 1.0, 2.0]),
            st.sampled_from([0.0, 0.01, 0.2, 0.9, 1.0]),
        ),
        min_size=8,
        max_size=8,
    )
)
def test_filters_keep_exactly_the_tokens_a_sort_would(cases):
    logits, temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*cases, strict=True))
    sampling = inputs(8, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = np.asarray(_kept()(logits, sampling))
    for row, case in zip(kept, cases, strict=True):
        wanted = numpy_filter(*case) > 0
        if not np.array_equal(row, wanted):
            # Rounding may decide the last token only where the mass meets top_p to float32 precision.
            boundary = numpy_filter(case[0], case[1], case[2], 1.0, 0.0)
            mass = np.cumsum(-np.sort(-boundary))
            assert np.abs(mass - case[3]).min() < 1e-6, (case, row, wanted)
            assert (row != wanted).sum() == 1


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_a_nucleus_that_is_met_exactly_takes_no_further_token(top_p, num_kept):
    logits = np.full((8, 9), -np.inf, np.float32)
    logits[:, [1, 3, 4, 8]] = 2.5  # four equal weights: their sums are exact in float32
    kept = np.asarray(_kept()(logits, inputs(8, top_p=top_p)))
    assert [np.flatnonzero(row).tolist() for row in kept] == [[1, 3, 4, 8][:num_kept]] * 8


def test_top_k_above_the_vocabulary_and_every_spelling_of_off_change_nothing():
    logits = np.random.default_rng(0).normal(size=(16, VOCAB)) * 2
    plain = draw(logits, inputs(16, seed=np.arange(16)))
    for off in ({"top_k": VOCAB}, {"top_k": 10**9}, {"top_k": -1}, {"top_p": 1.5}, {"min_p": -1.0}):
        for one, other in zip(plain, draw(logits, inputs(16, seed=np.arange(16), **off)), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": -1.0}, {"min_p": 2.0}], ids=str)
def test_the_narrowest_filter_keeps_the_best_token(narrow):
    logits = np.random.default_rng(1).normal(size=(16, VOCAB))
    tokens, _, _ = draw(logits, inputs(16, seed=np.arange(16), temperature=5.0, **narrow))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy_not_an_overflow(temperature):
    logits = np.random.default_rng(1).normal(size=(16, VOCAB)) * 1e4
    tokens, _, ok = draw(logits, inputs(16, temperature=temperature))
    assert ok.all()
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_greedy_takes_the_first_of_the_best_whatever_its_filters_say():
    logits = np.zeros((16, VOCAB), np.float32)
    logits[1, [4, 6]] = 2
    logits[2, VOCAB - 1] = 1
    sampling = inputs(16, temperature=0, top_k=2, top_p=0.5, seed=np.arange(16))
    assert draw(logits, sampling)[0].tolist() == [0, 4, VOCAB - 1] + [0] * 13


def test_greedy_and_sampled_rows_with_and_without_filters_share_a_batch():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(16, VOCAB)) * 2
    options = {
        "temperature": np.array([0.8, 0.0, 1.3, 2.0] * 4),
        "top_k": np.array([0, 0, 5, 5, 0, 7, 7, 0] * 2),
        "top_p": np.array([1.0, 1.0, 1.0, 0.9] * 4),
        "min_p": np.array([0.0] * 11 + [0.1] * 5),
        "seed": np.arange(16),
    }
    tokens, logprobs, _ = draw(logits, inputs(16, **options))
    for i in range(16):
        alone = inputs(1, **{name: values[i] for name, values in options.items()})
        token, logprob, _ = draw(logits[i : i + 1], alone)
        assert token[0] == tokens[i]
        np.testing.assert_allclose(logprob[0], logprobs[i], rtol=1e-6)
    greedy = options["temperature"] == 0
    np.testing.assert_array_equal(tokens[greedy], logits[greedy].argmax(-1))


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(0, 3), st.integers(0, 10**6), st.integers(0, 15), st.data())
def test_a_row_s_token_is_free_of_its_index_its_mates_and_the_batch_size(seed, sample_index, position, row, data):
    mine = {"seed": seed, "sample_index": sample_index, "position": position}
    mine |= data.draw(st.sampled_from([{}, {"top_p": 0.9}, {"top_k": 12, "temperature": 2.0}]))
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=VOCAB)
    alone = draw(logits[None], inputs(1, **mine))[0][0]
    mates = {name: rng.integers(0, 100, 16) for name in ("seed", "sample_index", "position")}
    mates["temperature"] = rng.integers(0, 3, 16) / 2
    mates["top_k"] = rng.integers(0, 5, 16)
    mates["top_p"] = rng.choice([1.0, 0.5], 16)
    for name, value in {**OFF, **mine}.items():
        if name in mates:
            mates[name] = np.array(mates[name])
            mates[name][row] = value
    mates["min_p"] = 0.0
    batch = rng.normal(size=(16, VOCAB))
    batch[row] = logits
    assert draw(batch, inputs(16, **mates))[0][row] == alone


def test_seed_sample_index_position_and_run_key_each_change_the_draw():
    logits, plain = np.zeros((512, VOCAB)), {"position": np.arange(512)}
    base = draw(logits, inputs(512, **plain))[0]
    others = [draw(logits, inputs(512, **plain), jax.random.key(12))[0]]
    for changed in ({"seed": 1}, {"sample_index": 1}, {"position": np.arange(512) + 512}):
        others.append(draw(logits, inputs(512, **{**plain, **changed}))[0])
    # Independent draws agree in 1 of VOCAB places: 13 of 512, give or take 4.
    assert all((other == base).sum() < 40 for other in others)
    assert np.bincount(base, minlength=VOCAB).max() < 40, "positions of one request draw independently"


def test_the_top_of_the_noise_is_fine_grained_enough_for_a_large_vocabulary():
    noise = np.concatenate([np.asarray(_gumbel(jax.random.key(i), 2**18)) for i in range(4)])
    assert np.isfinite(noise).all()
    top = np.sort(noise)[-4096:]
    # The top 4096 of 2**20 draws: on jax's own 2**-23 grid about 240 of them would be duplicates.
    assert len(np.unique(top)) > 4080
    assert abs(noise.mean() - np.euler_gamma) < 5 * np.pi / np.sqrt(6 * len(noise))


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 4}, {"temperature": 2.0, "top_p": 0.9}]
)
def test_the_logprob_is_of_the_raw_distribution(options):
    logits = (np.random.default_rng(4).normal(size=(16, VOCAB)) * 3).astype(np.float32)
    tokens, logprobs, _ = draw(logits, inputs(16, seed=np.arange(16), **options))
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs, exact[np.arange(16), tokens], rtol=0, atol=4e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "sickness",
    [{3: np.nan}, {3: np.inf}, {3: np.nan, 4: np.inf}, {0: np.nan}, dict.fromkeys(range(VOCAB), -np.inf)],
)
def test_a_sick_row_says_so_and_the_others_finish(sickness, temperature):
    logits = np.random.default_rng(6).normal(size=(16, VOCAB)).astype(np.float32)
    sampling = inputs(16, seed=np.arange(16), temperature=temperature, top_p=0.9)
    healthy = draw(logits, sampling)
    for token, value in sickness.items():
        logits[2, token] = value
    tokens, logprobs, ok = draw(logits, sampling)
    assert ok.tolist() == [i != 2 for i in range(16)]
    assert tokens[2] == 0
    assert np.isnan(logprobs[2])
    others = np.arange(16) != 2
    np.testing.assert_array_equal(tokens[others], healthy[0][others])
    np.testing.assert_array_equal(logprobs[others], healthy[1][others])


def test_minus_infinity_masks_a_token_without_making_the_row_sick():
    logits = np.zeros((16, VOCAB), np.float32)
    logits[:, 2:] = -np.inf
    for options in ({}, {"top_k": 3}, {"top_p": 0.99}):
        tokens, logprobs, ok = draw(logits, inputs(16, seed=np.arange(16), **options))
        assert ok.all()
        assert set(tokens) <= {0, 1}
        np.testing.assert_allclose(logprobs, np.log(0.5), rtol=1e-6)


def _primitives(jaxpr, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every primitive of a jaxpr with the primitives around it."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, inside
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _primitives(inner, (*inside, equation.primitive.name))


def test_random_numbers_and_filters_stand_in_a_branch_that_greedy_batches_do_not_take():
    program = jax.make_jaxpr(sample)(jnp.zeros((8, VOCAB)), inputs(8), KEY)
    around = [inside for name, inside in _primitives(program.jaxpr) if name in ("random_bits", "while", "cumsum")]
    assert len(around) >= 4
    assert all(inside[0] == "cond" for inside in around)


@pytest.mark.parametrize(
    ("num_sampled", "num_filtered", "sampling_blocks", "filtering_blocks"),
    [(0, 0, 0, 0), (1, 0, 1, 0), (8, 0, 1, 0), (9, 3, 2, 1), (16, 16, 2, 2)],
)
def test_only_rows_that_ask_for_it_pay(monkeypatch, num_sampled, num_filtered, sampling_blocks, filtering_blocks):
    calls = {"_filter": 0, "_keep_top_p": 0}

    def counting(name):
        function = getattr(sampling_module, name)

        def count(*_):
            calls[name] += 1

        def counted(values, *rest):
            jax.debug.callback(count, values[0, 0])
            return function(values, *rest)

        return counted

    for name in calls:
        monkeypatch.setattr(sampling_module, name, counting(name))
    temperature, top_p = np.zeros(16), np.full(16, 0.5)  # greedy rows may name filters for nothing
    temperature[:num_sampled] = 1.0
    top_p[: num_sampled - num_filtered] = 1.0  # the rows that filter lie last: they must be gathered
    program = jax.jit(lambda *args: sample(*args))  # not the cached program: it has no counters
    jax.block_until_ready(program(jnp.zeros((16, 3)), inputs(16, temperature=temperature, top_p=top_p), KEY))
    jax.effects_barrier()
    assert calls == {"_filter": sampling_blocks, "_keep_top_p": filtering_blocks}


def test_every_sampling_parameter_is_covered_here():
    elsewhere = {"options_row", "num_top"}  # test_logit_options.py
    assert {field.name for field in fields(SamplingInputs)} - elsewhere == set(DTYPES)
