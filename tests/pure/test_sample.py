"""The sampler against plain definitions: what each knob keeps, its statistics, and that rows do not mix."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from twin_sample import history_of, penalised

from janus_server.model.sample import _adjust, logprob_of, sample, uniform
from janus_server.sched.seen import Seen, distinct
from janus_server.types import Fault, Sampled, SampleSpec, Sampling

VOCAB = 50


def row(seed: int, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, vocab).astype(np.float32)


def draw(logits: np.ndarray, position: int = 0, **fields: object) -> int:
    return sample(logits[None], [SampleSpec(Sampling(**fields), position)])[0].token


def distribution(logits: np.ndarray, s: Sampling) -> np.ndarray:
    """Probabilities by definition, in float64, one knob after the other: min-p, top-k, then top-p of what is left."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / s.temperature)
    p /= p.sum()
    p[p < s.min_p * p.max() * (1 - 1e-6)] = 0
    order = np.lexsort((np.arange(len(p)), -p))
    if s.top_k:
        p[order[s.top_k :]] = 0
    p /= p.sum()
    if s.top_p < 1:
        before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
        p[order[before >= s.top_p]] = 0
    return p / p.sum()


def test_uniform_is_in_range_and_depends_on_all_three() -> None:
    grid = range(14)
    values = {uniform(seed, choice, position) for seed in grid for choice in grid for position in grid}
    assert len(values) == 14**3
    assert all(0 <= u < 1 for u in values)
    assert abs(np.mean(list(values)) - 0.5) < 0.03
    assert len({uniform(seed, 0, 0) for seed in (-(2**63), -1, 0, 2**63 - 1)}) == 4


def test_no_choice_repeats_a_choice_of_the_next_seed() -> None:
    """Choice 1 of a seed and choice 0 of the one after it once drew the same tokens."""
    flat = np.zeros((1, VOCAB), np.float32)
    said = {
        (seed, choice): tuple(sample(flat, [SampleSpec(Sampling(seed=seed), at, choice)])[0].token for at in range(8))
        for seed in range(6)
        for choice in range(6)
    }
    assert len(set(said.values())) == len(said)


def test_greedy_takes_the_highest_and_ignores_the_seed() -> None:
    logits = row(1)
    assert {draw(logits, temperature=0.0, seed=s) for s in range(20)} == {int(logits.argmax())}


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.6},
        {"top_k": 10, "top_p": 0.7},
        {"min_p": 0.1},
        {"min_p": 0.05, "top_p": 0.8, "top_k": 8, "temperature": 1.5},
    ],
)
def test_draws_follow_the_distribution(knobs: dict[str, float]) -> None:
    logits = row(3)
    expected = distribution(logits, Sampling(**knobs))
    n = 6000
    counts = np.zeros(VOCAB)
    for position in range(n):
        counts[draw(logits, position, seed=9, **knobs)] += 1
    assert counts[expected == 0].sum() == 0
    # Total variation of n draws from k outcomes is about sqrt(k/n)/2; three times that is a wrong distribution.
    assert np.abs(counts / n - expected).sum() / 2 < 1.5 * math.sqrt((expected > 0).sum() / n)


def test_a_wide_nucleus_beyond_the_first_guess() -> None:
    logits = np.zeros(5000, np.float32)
    tokens = {draw(logits, position, seed=4, top_p=0.9) for position in range(3000)}
    assert max(tokens) < 4500
    assert max(tokens) > 2000


@given(st.integers(0, 1000), st.integers(1, 6), st.data())
def test_a_row_draws_the_same_alone_and_in_any_batch(seed: int, others: int, data: st.DataObject) -> None:
    logits = np.stack([row(seed + i) for i in range(others + 1)])
    specs = [
        SampleSpec(
            Sampling(
                temperature=data.draw(st.sampled_from([0.0, 0.7, 1.0, 2.0])),
                top_p=data.draw(st.sampled_from([1.0, 0.9, 0.3])),
                top_k=data.draw(st.sampled_from([0, 1, 7])),
                min_p=data.draw(st.sampled_from([0.0, 0.1])),
                frequency_penalty=data.draw(st.sampled_from([0.0, 0.5])),
                repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
                logprobs=data.draw(st.sampled_from([None, 0, 3])),
                seed=seed,
            ),
            i,
            history=history_of((1, 2, 3), (4, 4)),
        )
        for i in range(others + 1)
    ]
    before = logits.copy()
    together = sample(logits, specs)
    assert np.array_equal(before, logits)
    for i, spec in enumerate(specs):
        assert sample(logits[i : i + 1].copy(), [spec])[0] == together[i]


def test_penalties_bias_and_bans_by_their_definitions() -> None:
    logits = np.zeros(10, np.float32)
    logits[3], logits[4], logits[5] = 5.0, 4.9, -1.0

    def pick(spec: SampleSpec) -> int:
        return sample(logits[None], [spec])[0].token

    greedy = Sampling(temperature=0.0)
    change = msgspec.structs.replace
    assert pick(SampleSpec(greedy, 0)) == 3
    assert pick(SampleSpec(greedy, 0, banned=(3,))) == 4
    assert pick(SampleSpec(change(greedy, logit_bias=((7, 100.0),)), 0)) == 7
    assert pick(SampleSpec(change(greedy, logit_bias=((3, -100.0),)), 0)) == 4
    assert pick(SampleSpec(change(greedy, presence_penalty=0.2), 0, history=history_of((4,), (3,)))) == 4
    assert pick(SampleSpec(change(greedy, presence_penalty=0.2), 0, history=history_of((3,), (9,)))) == 3
    assert pick(SampleSpec(change(greedy, frequency_penalty=0.06), 0, history=history_of((), (3, 3)))) == 4
    assert pick(SampleSpec(change(greedy, repetition_penalty=1.1), 0, history=history_of((3,)))) == 4
    # A negative logit of a seen token is pushed further down, not up.
    only = np.full((1, 10), -2.0, np.float32)
    only[0, 5] = -1.9
    assert sample(only, [SampleSpec(change(greedy, repetition_penalty=2.0), 0, history=history_of((5,)))])[0].token != 5


@given(st.integers(0, 1000), st.integers(1, VOCAB), st.data())
def test_penalties_are_bit_for_bit_those_of_the_whole_text(seed: int, kinds: int, data: st.DataObject) -> None:
    """Over a history that grew token by token, past the room it started with, looked at after every token."""
    texts = st.lists(st.integers(0, kinds - 1), max_size=80).map(tuple)
    prompt, output = data.draw(texts), data.draw(texts)
    knobs = Sampling(
        repetition_penalty=data.draw(st.sampled_from([1.0, 0.01, 0.7, 1.3, 100.0])),
        frequency_penalty=data.draw(st.sampled_from([0.0, -1.7, 0.3])),
        presence_penalty=data.draw(st.sampled_from([0.0, -0.4, 1.1])),
        logit_bias=((0, 3.3), (VOCAB - 1, -7.0)),
    )
    logits = row(seed) * np.float32(data.draw(st.sampled_from([1.0, 1e-30, 1e37])))
    logits[data.draw(st.integers(0, VOCAB - 1))] = -np.inf
    seen = Seen(distinct(prompt))
    for n in range(len(output) + 1):
        found = _adjust(logits, SampleSpec(knobs, n, history=seen.history()))
        assert found.tobytes() == penalised(logits, knobs, prompt, output[:n]).tobytes()
        if n < len(output):
            seen.add(output[n])


@given(st.integers(0, 10_000), st.integers(0, VOCAB), st.integers(0, VOCAB - 1))
def test_logprobs_are_the_models_own_of_exactly_the_likeliest(seed: int, top: int, token: int) -> None:
    logits = row(seed)
    exact = logits.astype(np.float64) - logits.max()
    exact -= np.log(np.exp(exact).sum())
    found = logprob_of(logits, token, top)
    assert found.logprob == pytest.approx(exact[token], abs=1e-5)
    assert [i for i, _ in found.top] == list(np.lexsort((np.arange(VOCAB), -logits))[:top])
    assert [value for _, value in found.top] == pytest.approx([exact[i] for i, _ in found.top], abs=1e-5)
    assert dict(found.top).get(token, found.logprob) == found.logprob


@given(
    st.integers(0, 100),
    st.sampled_from([1e-5, 1e-4, 1.0, 100.0, 1e30, 1e300]),
    st.sampled_from([0.0, 1e-310, 1e-30, 0.5, 1.0]),
    st.sampled_from([1e-310, 0.5, 1.0]),
    st.integers(0, 2),
    st.sampled_from([1.0, 1e10, 1e38, 3.4e38]),
    st.sampled_from([0.01, 1.0, 100.0]),
    st.data(),
)
def test_no_setting_divides_by_zero_or_draws_from_nothing(
    seed: int, temperature: float, min_p: float, top_p: float, top_k: int, size: float, repetition: float,
    data: st.DataObject,
) -> None:  # fmt: skip
    logits = np.clip(row(seed).astype(np.float64) * size, -3.4e38, 3.4e38).astype(np.float32)
    hidden = data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB - 1))
    logits[list(hidden)] = -np.inf
    banned = tuple(sorted(data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB - 1))))
    knobs = Sampling(
        temperature=temperature, min_p=min_p, top_p=top_p, top_k=top_k, repetition_penalty=repetition, seed=seed,
        frequency_penalty=2.0,
    )  # fmt: skip
    with np.errstate(divide="raise", invalid="raise"):
        for position in range(3):
            spec = SampleSpec(knobs, position, banned=banned, history=history_of(range(20), (1, 1, 2)))
            token = sample(logits[None], [spec])[0].token
            assert token not in banned
    if temperature == 1e-5 and size == 1e10 and repetition == 1.0 and not hidden and not banned:
        assert token == int(logits.argmax())


def test_the_bias_comes_before_the_penalties() -> None:
    """A repetition penalty scales the biased logit: 2 + 4 is halved to 3, below the other's 4."""
    logits = np.zeros((1, 10), np.float32)
    logits[0, 3], logits[0, 4] = 2.0, 4.0
    knobs = Sampling(temperature=0.0, repetition_penalty=2.0, logit_bias=((3, 4.0),))
    assert sample(logits, [SampleSpec(knobs, 0, history=history_of((3,)))])[0].token == 4
    assert sample(logits, [SampleSpec(knobs, 0, history=history_of((5,)))])[0].token == 3


@pytest.mark.parametrize("spoilt", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_has_a_fault_and_the_others_their_tokens(spoilt: float, temperature: float) -> None:
    logits = np.stack([row(1), row(2), row(3)])
    logits[1, :: 1 if spoilt < 0 else 7] = spoilt
    specs = [SampleSpec(Sampling(temperature=temperature, logprobs=2, seed=i), 0) for i in range(3)]
    first, second, third = sample(logits, specs)
    assert second == Sampled(None, fault=Fault.NOT_FINITE)
    assert [first, third] == [sample(logits[i : i + 1], [specs[i]])[0] for i in (0, 2)]
