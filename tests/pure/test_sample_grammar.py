"""Drawing under a grammar: what it allows, what it says when it ends or goes wrong, and what it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from twin_sample import history_of
from word_matcher import Words

from janus_server.model.sample import logprob_of, sample
from janus_server.types import Fault, Sampled, SampleSpec, Sampling

VOCAB = 50
GREEDY = Sampling(temperature=0.0)


def row(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)


def speak(matcher: Words, seed: int = 0, sampling: Sampling = GREEDY, banned: tuple[int, ...] = ()) -> list[Sampled]:
    """Draw until the grammar is done or faulty."""
    said: list[Sampled] = []
    while not said or not (said[-1].done or said[-1].fault):
        spec = SampleSpec(sampling, len(said), banned=banned, matcher=matcher)
        said += sample(row(seed + len(said))[None], [spec])
    return said


@given(st.integers(0, 500), st.sampled_from([0.0, 1.0, 2.0]), st.sampled_from([1.0, 0.5]), st.sampled_from([0, 2]))
def test_only_what_it_allows_is_drawn_until_it_is_done(seed: int, temperature: float, top_p: float, top_k: int) -> None:
    words = ((3, 4, 5), (3, 7), (9, 9, 9, 9))
    said = speak(Words(words), seed, Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed))
    assert tuple(one.token for one in said) in words
    assert [one.done for one in said] == [False] * (len(said) - 1) + [True]


def test_greedy_takes_the_highest_that_is_allowed() -> None:
    logits = row(1)
    order = np.argsort(-logits)
    allowed = tuple((int(token),) for token in order[10:20])
    assert sample(logits[None], [SampleSpec(GREEDY, 0, matcher=Words(allowed))])[0].token == order[10]


@given(st.integers(0, 300), st.integers(2, 12))
def test_draws_are_those_of_a_row_where_the_rest_is_impossible(seed: int, count: int) -> None:
    logits, rng = row(seed), np.random.default_rng(seed)
    allowed = sorted(int(token) for token in rng.choice(VOCAB, count, replace=False))
    hidden = logits.copy()
    hidden[[token for token in range(VOCAB) if token not in allowed]] = -np.inf
    for knobs in ({}, {"top_p": 0.7}, {"top_k": 2}, {"min_p": 0.2}, {"temperature": 0.6}):
        sampling = Sampling(seed=seed, **knobs)
        mine = sample(logits[None], [SampleSpec(sampling, 3, matcher=Words(tuple((t,) for t in allowed)))])[0]
        assert mine.token == sample(hidden[None], [SampleSpec(sampling, 3)])[0].token


def test_log_probabilities_stay_the_models_own() -> None:
    logits = row(4)
    worst = int(logits.argmin())
    spec = SampleSpec(Sampling(temperature=0.0, logprobs=2), 0, matcher=Words(((worst,),)))
    assert sample(logits[None], [spec])[0].logprob == logprob_of(logits, worst, 2)


def test_bias_and_penalties_choose_among_what_it_allows() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 3], logits[0, 4] = 2.0, 1.0
    words = Words(((3,), (4,)))
    biased = SampleSpec(Sampling(temperature=0.0, logit_bias=((4, 5.0), (8, 90.0))), 0, matcher=words.copy())
    punished = SampleSpec(
        Sampling(temperature=0.0, presence_penalty=1.5), 0, history=history_of((), (3,)), matcher=words.copy()
    )
    assert [sample(logits, [spec])[0].token for spec in (biased, punished)] == [4, 4]


def test_before_min_tokens_the_end_is_drawn_only_where_nothing_else_may_be() -> None:
    end = 49
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, end] = 50.0
    either = Words(((3,), (3, 4)), ends=(end,), said=(3,))
    assert sample(logits, [SampleSpec(GREEDY, 1, matcher=either.copy())])[0].token == end
    assert sample(logits, [SampleSpec(GREEDY, 1, banned=(end,), matcher=either.copy())])[0].token == 4
    only = Words(((3,),), ends=(end,), said=(3,))
    assert sample(logits, [SampleSpec(GREEDY, 1, banned=(end,), matcher=only)])[0] == Sampled(end, done=True)


def test_where_the_model_finds_everything_allowed_impossible_one_of_it_is_drawn() -> None:
    logits = row(2)
    logits[[3, 4]] = -np.inf
    for temperature in (0.0, 1.0):
        spec = SampleSpec(Sampling(temperature=temperature), 0, matcher=Words(((3,), (4,))))
        with np.errstate(invalid="raise"):
            assert sample(logits[None], [spec])[0].token in (3, 4)


@pytest.mark.parametrize("words", [((5, 6),), ((5, VOCAB + 3),)])
def test_where_nothing_can_be_drawn_there_is_a_fault_and_the_others_go_on(words: tuple[tuple[int, ...], ...]) -> None:
    stuck = Words(words, said=(5,) if words[0][1] >= VOCAB else (6,))
    specs = [SampleSpec(GREEDY, 1, matcher=stuck), SampleSpec(GREEDY, 1)]
    logits = np.stack([row(1), row(2)])
    assert sample(logits, specs) == [Sampled(None, fault=Fault.GRAMMAR), Sampled(int(logits[1].argmax()))]


def test_a_matcher_that_gave_up_is_a_fault() -> None:
    failed = Words(((5,), (6,)))
    failed.failed = True
    assert sample(row(1)[None], [SampleSpec(GREEDY, 1, matcher=failed)])[0].fault is Fault.GRAMMAR

    class Liar(Words):
        def accept(self, token: int) -> bool:
            return False

    assert sample(row(1)[None], [SampleSpec(GREEDY, 0, matcher=Liar(((5,),)))])[0] == Sampled(None, fault=Fault.GRAMMAR)


def test_a_grammar_of_the_empty_text_draws_nothing() -> None:
    assert sample(row(1)[None], [SampleSpec(GREEDY, 0, matcher=Words(((),)))]) == [Sampled(None, done=True)]
