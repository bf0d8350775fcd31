"""When requests leave and what they ask: arrival processes, the shapes of data, applications and their shares."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.arrivals import Ramp, gamma_times, ramp_times, replay_times
from bench.datasets import (
    Caps,
    Pace,
    Sizes,
    apps_of_trace,
    cut_counts,
    random_plans,
    trace_plans,
    warmup_plans,
    written_plans,
)
from bench.prompts import read_jsonl, read_sharegpt
from bench.records import Application, Drawn, Endpoint, Written
from bench.traces import TraceRow
from janus_server.errors import BadConfig

APP = Application("a", "m")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_the_variation_that_were_asked_for(burstiness: float) -> None:
    times = gamma_times(40_000, 5.0, burstiness, rng(1))
    gaps = np.diff(times, prepend=0.0)
    assert times[-1] == pytest.approx(40_000 / 5.0)
    assert (gaps >= 0).all()
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_the_gaps_of_a_poisson_process_are_exponential() -> None:
    gaps = np.sort(np.diff(gamma_times(20_000, 2.0, 1.0, rng(2)), prepend=0.0))
    empirical = np.arange(1, len(gaps) + 1) / len(gaps)
    # Kolmogorov's distance at 0.1 % significance is 1.95/√n.
    assert np.abs(empirical - (1 - np.exp(-2.0 * gaps))).max() < 1.95 / math.sqrt(len(gaps))


def test_the_edges_of_the_rate() -> None:
    assert not gamma_times(5, math.inf, 1.0, rng()).any()
    assert np.allclose(gamma_times(4, 2.0, math.inf, rng()), [0.5, 1.0, 1.5, 2.0])
    assert len(gamma_times(0, 2.0, 1.0, rng())) == 0
    for rate, burstiness in [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.nan)]:
        with pytest.raises(BadConfig):
            gamma_times(3, rate, burstiness, rng())


@pytest.mark.parametrize("exponential", [False, True])
def test_a_ramp_goes_from_its_first_rate_to_its_last(exponential: bool) -> None:
    ramp = Ramp(1.0, 16.0, exponential)
    times = ramp_times(10_001, ramp, math.inf, rng())
    rates = 1 / np.diff(times)
    assert rates[0] == pytest.approx(1.0, rel=0.01)
    assert rates[-1] == pytest.approx(16.0, rel=0.01)
    assert rates[5000] == pytest.approx(4.0 if exponential else 8.5, rel=0.01)
    noisy = ramp_times(20_000, ramp, 1.0, rng(3))
    assert noisy[-1] == pytest.approx(ramp_times(20_000, ramp, math.inf, rng())[-1], rel=0.05)
    with pytest.raises(BadConfig, match="ramp-up-start"):
        ramp_times(3, Ramp(0.0, 5.0), 1.0, rng())


def test_a_replay_starts_at_once_and_runs_at_its_speed() -> None:
    assert replay_times(np.array([10.0, 12.0, 16.0]), 2.0).tolist() == [0.0, 1.0, 3.0]
    for speed in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(BadConfig, match="--speed"):
            replay_times(np.array([1.0]), speed)


def test_random_plans_have_exact_sizes_and_the_same_seed_gives_the_same_plans() -> None:
    pace = Pace(10.0)
    plans = random_plans([APP], 50, Sizes(100, 20), pace, rng(4))
    assert {(p.prompt.tokens, p.output_tokens) for p in plans if isinstance(p.prompt, Drawn)} == {(100, 20)}
    assert plans == random_plans([APP], 50, Sizes(100, 20), pace, rng(4))
    assert plans != random_plans([APP], 50, Sizes(100, 20), pace, rng(5))
    assert [p.due_s for p in plans] == sorted(p.due_s for p in plans)


@given(st.integers(1, 2000), st.floats(0, 0.99))
def test_lengths_stay_within_their_range(tokens: int, ratio: float) -> None:
    plans = random_plans([APP], 20, Sizes(tokens, tokens, ratio), Pace(), rng(6))
    for plan in plans:
        assert isinstance(plan.prompt, Drawn)
        for size in (plan.prompt.tokens, plan.output_tokens):
            assert max(1, math.floor(tokens * (1 - ratio))) <= size <= math.ceil(tokens * (1 + ratio))


def test_a_prefix_is_shared_within_an_application_and_not_between() -> None:
    apps = [APP, Application("b", "m")]
    plans = random_plans(apps, 60, Sizes(50, 5, prefix_tokens=30), Pace(), rng(7))
    prefixes = {p.app.name: {q.prompt.segments[0] for q in plans if q.app is p.app} for p in plans}  # type: ignore[union-attr]
    assert {name: len(found) for name, found in prefixes.items()} == {"a": 1, "b": 1}
    assert prefixes["a"] != prefixes["b"]
    assert all(p.prompt.tokens == 80 for p in plans if isinstance(p.prompt, Drawn))
    keys = [p.prompt.segments[1].key for p in plans if isinstance(p.prompt, Drawn)]
    assert len(set(keys)) == 60


def test_shares_and_rates_of_applications() -> None:
    apps = [Application("a", "m", share=3), Application("b", "m"), Application("c", "m", request_rate=4.0)]
    plans = random_plans(apps, 4000, Sizes(4, 4), Pace(12.0), rng(8))
    counts = {name: sum(p.app.name == name for p in plans) for name in "abc"}
    assert len(plans) == 4000
    assert counts["c"] == 1000
    assert counts["a"] == pytest.approx(2250, abs=120)
    assert max(p.due_s for p in plans if p.app.name == "c") == pytest.approx(250.0)
    with pytest.raises(BadConfig, match="--request-rate"):
        random_plans(apps, 10, Sizes(4, 4), Pace(), rng())


def test_an_application_may_have_lengths_of_its_own() -> None:
    apps = [Application("long", "m", input_tokens=900, output_tokens=3), Application("b", "m")]
    plans = random_plans(apps, 40, Sizes(10, 20), Pace(), rng(9))
    found = {(p.app.name, p.prompt.tokens, p.output_tokens) for p in plans if isinstance(p.prompt, Drawn)}
    assert found == {("long", 900, 3), ("b", 10, 20)}


def test_trace_plans_keep_times_lengths_and_prefixes() -> None:
    rows = [TraceRow(5.0, "", 1200, 7, (3, 4, 9)), TraceRow(6.0, "", 700, 5, (3, 8)), TraceRow(9.0, "", 40, 1)]
    plans = trace_plans([APP], rows, 2.0, Caps(), rng())
    assert [p.due_s for p in plans] == [0.0, 0.5, 2.0]
    assert [p.prompt.tokens for p in plans if isinstance(p.prompt, Drawn)] == [1200, 700, 40]
    first, second = plans[0].prompt, plans[1].prompt
    assert isinstance(first, Drawn)
    assert isinstance(second, Drawn)
    assert [s.tokens for s in first.segments] == [512, 512, 176]
    assert first.segments[0] == second.segments[0]
    assert first.segments[1].key != second.segments[1].key


def test_a_trace_may_give_its_lengths_to_another_pace() -> None:
    rows = [TraceRow(float(i), "", 10 + i, 1) for i in range(20)]
    plans = trace_plans([APP], rows, Pace(4.0), Caps(), rng())
    assert plans[-1].due_s == pytest.approx(5.0)
    assert [p.prompt.tokens for p in plans if isinstance(p.prompt, Drawn)] == [10 + i for i in range(20)]


def test_caps_cut_a_trace_and_say_so() -> None:
    rows = [TraceRow(0.0, "", 1200, 70, (3, 4, 9)), TraceRow(1.0, "", 300, 5)]
    plans = trace_plans([APP], rows, 1.0, Caps(600, 64), rng())
    assert [(p.prompt.tokens, p.output_tokens) for p in plans if isinstance(p.prompt, Drawn)] == [(600, 64), (300, 5)]
    assert cut_counts(rows, Caps(600, 64)) == (1, 1)
    assert cut_counts(rows, Caps()) == (0, 0)


def test_a_trace_with_applications_needs_them_named() -> None:
    rows = [TraceRow(0.0, "10", 5, 5), TraceRow(1.0, "2", 5, 5)]
    apps = apps_of_trace(rows, [Application("m1", "m1"), Application("m2", "m2")])
    assert [(a.name, a.model) for a in apps] == [("2", "m1"), ("10", "m2")]
    assert [p.app.name for p in trace_plans(apps, rows, 1.0, Caps(), rng())] == ["10", "2"]
    with pytest.raises(BadConfig, match="'10'"):
        trace_plans([APP], rows, 1.0, Caps(), rng())


def test_warmups_go_to_each_model_and_share_nothing_with_the_run() -> None:
    apps = [Application("a", "m1"), Application("b", "m2"), Application("c", "m1")]
    plans = random_plans(apps, 30, Sizes(64, 8), Pace(), rng(3))
    warm = warmup_plans(apps, 2, plans)
    assert sorted(p.app.model for p in warm) == ["m1", "m1", "m2", "m2"]
    assert all(p.warmup for p in warm)
    keys = {s.key for p in plans if isinstance(p.prompt, Drawn) for s in p.prompt.segments}
    assert not keys & {s.key for p in warm if isinstance(p.prompt, Drawn) for s in p.prompt.segments}


def test_written_prompts_are_repeated_when_more_are_wanted(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    lines = [{"prompt": "one", "output_tokens": 3}, {"prompt": [1, 2, 3], "app": "b"}, {"question": "why?"}]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    samples = read_jsonl(file, Endpoint.COMPLETIONS, 64)
    assert [s.prompt for s in samples] == [Written("one"), Written((1, 2, 3)), Written("why?")]
    apps = [APP, Application("b", "m")]
    plans = written_plans([APP], samples, 7, Pace(), rng(), shuffle=False)
    assert [p.prompt.content for p in plans] == ["one", (1, 2, 3), "why?"] * 2 + ["one"]  # type: ignore[union-attr]
    assert [p.output_tokens for p in plans[:3]] == [3, 64, 64]
    plans = written_plans(apps, samples, 60, Pace(), rng(), shuffle=True)
    assert {p.app.name for p in plans if p.prompt == Written((1, 2, 3))} == {"b"}
    assert len(written_plans([APP], samples, None, Pace(), rng(), shuffle=True)) == 3


def test_prompts_for_chat_are_messages(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"turns": ["first", "second"]}))
    samples = read_jsonl(file, Endpoint.CHAT, 8)
    assert samples[0].prompt == Written(tuple(messages))
    assert samples[1].prompt == Written(({"role": "user", "content": "first"},))
    with pytest.raises(BadConfig, match="line 1: messages need --endpoint chat"):
        read_jsonl(file, Endpoint.COMPLETIONS, 8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{", "line 1: it is no JSON"), ("[1]", "not an object"), ('{"x": 1}', "there is none of prompt"),
     ('{"prompt": "a", "max_tokens": 0}', "0 is not a number of tokens"), ('{"prompt": 5}', "neither a text"),
     ("", "no prompts")],
)  # fmt: skip
def test_bad_lines_are_named(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(BadConfig, match=expected):
        read_jsonl(file, Endpoint.COMPLETIONS, 8)


def test_sharegpt_takes_the_first_turn_and_prunes(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    long, answer = "word " * 5000, "a fine long answer " * 4
    talks = [
        [{"from": "human", "value": "tell me about the sea"}, {"from": "gpt", "value": answer}, {"from": "human"}],
        [{"from": "human", "value": "alone, without any answer"}],
        [{"from": "human", "value": long}, {"from": "gpt", "value": answer}],
        [{"from": "human", "value": "hi"}, {"from": "gpt", "value": answer}],
        [{"from": "human", "value": "what is it that you want"}, {"from": "gpt", "value": "no"}],
    ]
    file.write_text(json.dumps([{"conversations": t} for t in talks]))
    samples = read_sharegpt(file, Endpoint.CHAT, None, None)
    assert [s.prompt for s in samples] == [Written(({"role": "user", "content": "tell me about the sea"},))]
    assert samples[0].output_tokens == -(-len(answer) // 4)
    assert [s.output_tokens for s in read_sharegpt(file, Endpoint.COMPLETIONS, None, 9)] == [9, 9]
