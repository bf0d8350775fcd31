"""Rates of a model's traffic: many requests over three seconds, few over longer, lengths over hundreds."""

from __future__ import annotations

import pytest

from janus_server.orders import Counts
from janus_server.sched.foresight import Lengths
from janus_server.sched.meter import Meter
from janus_server.sched.oracle_records import Features, Observation


def told(rates: list[tuple[float, int, int]]) -> list[float]:
    """Tokens a second after each of: seconds, requests and tokens that came since the last."""
    meter, now, requests, tokens, out = Meter(), 0.0, 0, 0, []
    meter.counted({"m": Counts(0, 0)}, now)
    for seconds, came, more in rates:
        now, requests, tokens = now + seconds, requests + came, tokens + more
        meter.counted({"m": Counts(tokens, 0, requests=requests)}, now)
        out.append(meter.load("m", 0.0, now).tokens_s)
    return out


def test_many_requests_are_a_rate_of_three_seconds() -> None:
    steady = told([(0.5, 10, 1000)] * 40)
    assert steady[-1] == pytest.approx(2000.0)
    burst = told([(0.5, 10, 1000)] * 40 + [(0.5, 80, 8000)] * 6)
    assert burst[-1] == pytest.approx(16_000.0)


def test_one_long_prompt_among_few_is_no_burst() -> None:
    """A request of 100 tokens every 2 s, and then one of 20,000: it counts as one request, a little longer than all."""
    usual = [(2.0, 1, 100)] * 100
    assert told(usual)[-1] == pytest.approx(50.0)
    assert told([*usual, (2.0, 1, 20_000)])[-1] < 200.0


def test_tokens_of_requests_that_came_before_still_count() -> None:
    assert told([(1.0, 1, 100), (40.0, 0, 0), (1.0, 0, 600)])[-1] == pytest.approx(600 / 30.0)


def seen(requests: int, tokens_in: float, tokens_out: float) -> Lengths:
    features = Features(1.0, 1.0, tokens_in, 0.0, tokens_out, 0.0)
    return Lengths.of(Observation(at_s=0.0, features=features, replicas=1, requests=requests, on_time=requests))


def test_lengths_are_those_of_the_last_requests() -> None:
    known = seen(100, 10.0, 1.0).after(seen(100, 30.0, 3.0))
    assert known.at(2.0) == Features(2.0 * 22.0, 2.0, 20.0, pytest.approx(100.0), 2.0, pytest.approx(1.0))
    # Of all before, 200 count: 1,000 others weigh five times as much.
    assert known.after(seen(1000, 80.0, 2.0)).input == pytest.approx((200 * 20.0 + 1000 * 80.0) / 1200)


def test_a_few_requests_change_little() -> None:
    assert seen(200, 100.0, 10.0).after(seen(2, 20_000.0, 10.0)).input == pytest.approx((200 * 100 + 40_000) / 202)
