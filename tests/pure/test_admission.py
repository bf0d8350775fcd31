"""Admission: its worked example, a twin in fractions, and bounds that are never passed whatever is asked and when."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janus_server.admission import ANYBODY, Admission, Bucket, Grant, KeyLimits, QueueBounds, Ticket, queue_bounds
from janus_server.errors import Bug, Refused

WIDE = QueueBounds(10**6, 10**9)
NS = 10**9


def ticket(key: str = "a", model: str = "m", prompt: int = 10, most: int = 10, choices: int = 1) -> Ticket:
    return Ticket(key=key, model=model, param="input", prompt_tokens=prompt, most_tokens=most, choices=choices)


def door(server: QueueBounds = WIDE, model: QueueBounds = WIDE, **limits: int | frozenset[str]) -> Admission:
    return Admission(server, model, {"a": KeyLimits(**limits)})  # type: ignore[arg-type]


def granted(answer: Grant | Refused) -> Grant:
    assert isinstance(answer, Grant), answer
    return answer


def refused(answer: Grant | Refused) -> Refused:
    assert isinstance(answer, Refused)
    return answer


# The worked example of the module


def test_the_worked_example() -> None:
    one = door(tokens_per_minute=60_000)
    grant = granted(one.admit(ticket(prompt=1000, most=9000, choices=2), 100.0))
    assert isinstance(one.admit(ticket(prompt=25_000, most=25_001), 100.0), Refused)
    later = granted(one.admit(ticket(prompt=25_000, most=25_000), 100.0))
    one.finish(later, 50_000, 100.0)
    one.finish(grant, 3000, 104.0)  # 0 left + 4,000 gained + 7,000 back
    wait = refused(one.admit(ticket(prompt=11_001, most=0), 104.0))
    assert wait.code == "rate_limit_exceeded"
    assert wait.retry_after_s == pytest.approx(0.001)
    granted(one.admit(ticket(prompt=11_000, most=0), 104.0))


def test_what_comes_back_never_overfills() -> None:
    one = door(tokens_per_minute=100)
    grant = granted(one.admit(ticket(prompt=50, most=50), 0.0))
    one.finish(grant, 0, 60.0)  # refilled meanwhile, and 100 come back
    granted(one.admit(ticket(prompt=100, most=0), 60.0))
    assert isinstance(one.admit(ticket(prompt=1, most=0), 60.0), Refused)


def test_a_call_larger_than_a_minutes_allowance_waits_for_a_full_bucket_and_owes_the_rest() -> None:
    one = door(tokens_per_minute=60)
    first = granted(one.admit(ticket(prompt=1, most=0), 0.0))
    one.finish(first, 1, 0.0)
    assert refused(one.admit(ticket(prompt=300, most=0), 0.0)).retry_after_s == pytest.approx(1.0)
    grant = granted(one.admit(ticket(prompt=300, most=0), 1.0))
    one.finish(grant, 180, 1.0)  # 60 were charged: 120 are owed, two minutes' worth
    assert refused(one.admit(ticket(prompt=1, most=0), 120.0)).retry_after_s == pytest.approx(2.0)
    granted(one.admit(ticket(prompt=1, most=0), 122.0))


# Limits of a key


def test_requests_in_progress() -> None:
    one = door(requests=2)
    first = granted(one.admit(ticket(), 0.0))
    granted(one.admit(ticket(), 0.0))
    stopped = refused(one.admit(ticket(), 0.0))
    assert (stopped.status, stopped.code, stopped.retry_after_s) == (429, "rate_limit_exceeded", 1.0)
    granted(one.admit(ticket(key="another"), 0.0))
    one.finish(first, 0, 0.0)
    granted(one.admit(ticket(), 0.0))


def test_requests_a_minute() -> None:
    one = door(requests_per_minute=6)
    for _ in range(6):
        one.finish(granted(one.admit(ticket(), 5.0)), 0, 5.0)
    stopped = refused(one.admit(ticket(), 5.0))
    assert stopped.retry_after_s == pytest.approx(10.0)
    assert isinstance(one.admit(ticket(), 14.999), Refused)
    granted(one.admit(ticket(), 15.0))


def test_the_budget_of_one_call() -> None:
    one = door(tokens_per_request=100)
    granted(one.admit(ticket(prompt=40, most=60), 0.0))
    stopped = refused(one.admit(ticket(prompt=40, most=61), 0.0))
    assert (stopped.status, stopped.param, stopped.retry_after_s) == (400, "max_tokens", None)


def test_keys_that_nobody_knows_share_one_state() -> None:
    one = Admission(WIDE, WIDE, {})
    for i in range(1000):
        granted(one.admit(ticket(key=f"k{i}"), 0.0))
    assert len(one._keys) == 0


def test_nothing_is_charged_for_what_is_refused() -> None:
    one = door(QueueBounds(1, 10), QueueBounds(1, 10), requests_per_minute=2, tokens_per_minute=1000, requests=2)
    grant = granted(one.admit(ticket(), 0.0))
    for _ in range(50):
        assert refused(one.admit(ticket(), 0.0)).code == "server_overloaded"
    one.start(grant, 0.0)
    granted(one.admit(ticket(), 0.0))


# The queue


def test_a_call_waits_until_its_first_token() -> None:
    one = door(QueueBounds(2, 100))
    grant = granted(one.admit(ticket(prompt=60, choices=1), 0.0))
    assert one.queued() == one.queued("m") == (1, 60)
    full = refused(one.admit(ticket(prompt=41), 0.0))
    assert (full.status, full.code, full.retry_after_s) == (429, "server_overloaded", 1.0)
    one.start(grant, 1.0)
    one.start(grant, 2.0)
    assert one.queued() == one.queued("m") == (0, 0)
    granted(one.admit(ticket(prompt=41), 1.0))
    one.finish(grant, 0, 3.0)
    assert one.queued("m") == (1, 41)


def test_one_model_cannot_fill_the_queue_of_all() -> None:
    one = Admission(QueueBounds(4, 1000), QueueBounds(2, 1000))
    granted(one.admit(ticket(model="m", choices=2), 0.0))
    assert isinstance(one.admit(ticket(model="m"), 0.0), Refused)
    granted(one.admit(ticket(model="n", choices=2), 0.0))
    assert isinstance(one.admit(ticket(model="o"), 0.0), Refused)


def test_a_call_that_never_fits_is_told_so() -> None:
    stopped = refused(door(QueueBounds(2, 100)).admit(ticket(choices=3), 0.0))
    assert (stopped.status, stopped.code, stopped.param) == (400, "call_too_large", "input")


def test_retry_after_follows_the_drain() -> None:
    one = door(QueueBounds(10, 10**6))
    now = 0.0
    for _ in range(20):  # two calls start each second
        now += 0.5
        one.start(granted(one.admit(ticket(), now)), now)
    for _ in range(10):
        granted(one.admit(ticket(), now))
    assert refused(one.admit(ticket(choices=4), now)).retry_after_s == pytest.approx(2.0)
    assert refused(one.admit(ticket(), now + 10_000)).retry_after_s == 60.0


@pytest.mark.parametrize(("asked", "models", "server", "model"), [
    ((None, None), 1, (4096, 4096 * 512), (4096, 4096 * 512)),
    ((None, None), 3, (4096, 4096 * 512), (2048, 2048 * 512)),
    ((7, 100), 2, (7, 100), (4, 50)),
])  # fmt: skip
def test_bounds_follow_the_capacity(
    asked: tuple[int | None, int | None], models: int, server: tuple[int, int], model: tuple[int, int]
) -> None:
    got = queue_bounds(*asked, sequences=128, step_tokens=512, models=models)
    assert got == (QueueBounds(*server), QueueBounds(*model))


# Grants


def test_a_grant_is_finished_exactly_once() -> None:
    one = door()
    grant = granted(one.admit(ticket(), 0.0))
    one.finish(grant, 1, 0.0)
    for act in (lambda: one.finish(grant, 1, 0.0), lambda: one.start(grant, 0.0)):
        with pytest.raises(Bug):
            act()


def test_other_keys_while_calls_run() -> None:
    one = door(requests=1, tokens_per_minute=100)
    grant = granted(one.admit(ticket(prompt=100, most=0), 0.0))
    one.rekey({"a": KeyLimits(requests=2, tokens_per_minute=100)}, 0.0)
    assert refused(one.admit(ticket(), 0.0)).retry_after_s == pytest.approx(12.0), "a reload is no way to a full bucket"
    one.rekey({}, 0.0)
    one.finish(grant, 100, 0.0)
    granted(one.admit(ticket(), 0.0))
    assert one.open_calls == 1


# A twin in fractions: buckets that are filled at every event, and books kept as lists.


class Twin:
    def __init__(self, limits: KeyLimits, server: QueueBounds) -> None:
        self.limits, self.server = limits, server
        self.tokens = Fraction(limits.tokens_per_minute or 0)
        self.requests = Fraction(limits.requests_per_minute or 0)
        self.at = Fraction(0)
        self.open: list[tuple[Grant, Ticket, Fraction]] = []
        self.waiting: list[Ticket] = []

    def pass_to(self, now: Fraction) -> None:
        gone = now - self.at
        self.at = now
        if self.limits.tokens_per_minute is not None:
            most = Fraction(self.limits.tokens_per_minute)
            self.tokens = min(most, self.tokens + most * gone / 60)
        if self.limits.requests_per_minute is not None:
            most = Fraction(self.limits.requests_per_minute)
            self.requests = min(most, self.requests + most * gone / 60)

    def charge(self, one: Ticket) -> Fraction:
        return min(Fraction(one.total_tokens), Fraction(self.limits.tokens_per_minute or 0))

    def lets_in(self, one: Ticket) -> bool:
        return (
            (self.limits.requests is None or len(self.open) < self.limits.requests)
            and (self.limits.requests_per_minute is None or self.requests >= 1)
            and (self.limits.tokens_per_minute is None or self.tokens >= self.charge(one))
            and sum(w.choices for w in self.waiting) + one.choices <= self.server.choices
            and sum(w.prompt_tokens for w in self.waiting) + one.prompt_tokens <= self.server.tokens
        )


NATURAL = st.integers(1, 12)
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "admit", "start", "finish"]),
        st.integers(0, 40 * NS),  # nanoseconds that pass before it
        st.integers(0, 60), st.integers(0, 60), st.integers(1, 3), st.integers(0, 9),
    ),
    max_size=60,
)  # fmt: skip


@given(ACTS, st.none() | NATURAL, st.none() | NATURAL, st.none() | st.integers(1, 200), NATURAL, st.integers(1, 200))
def test_every_decision_is_the_twins(
    acts: list[tuple[str, int, int, int, int, int]],
    requests: int | None,
    per_minute: int | None,
    tokens: int | None,
    choices: int,
    queued: int,
) -> None:
    limits = KeyLimits(requests=requests, requests_per_minute=per_minute, tokens_per_minute=tokens)
    server = QueueBounds(choices, queued)
    one, twin, now_ns = Admission(server, WIDE, {"a": limits}), Twin(limits, server), 0
    for kind, wait_ns, prompt, most, n, which in acts:
        # Whole milliseconds, which survive the way through a float exactly at these sizes.
        now_ns += wait_ns // 10**6 * 10**6
        now = now_ns / NS
        twin.pass_to(Fraction(now_ns, NS))
        if kind == "admit":
            asked = ticket(prompt=prompt, most=most, choices=n)
            answer = one.admit(asked, now)
            if n > choices or prompt > queued:
                assert refused(answer).status == 400
                continue
            assert isinstance(answer, Grant) is twin.lets_in(asked)
            if isinstance(answer, Grant):
                twin.requests -= 1
                twin.tokens -= twin.charge(asked)
                twin.open.append((answer, asked, twin.charge(asked)))
                twin.waiting.append(asked)
            else:
                assert answer.retry_after_s is not None and answer.retry_after_s > 0
        elif twin.open:
            grant, asked, charged = twin.open[which % len(twin.open)]
            if asked in twin.waiting and one._open[grant.number].waiting:
                twin.waiting.remove(asked)
            if kind == "start":
                one.start(grant, now)
            else:
                twin.open.remove((grant, asked, charged))
                one.finish(grant, prompt, now)
                twin.tokens = min(Fraction(tokens or 0), twin.tokens + charged - prompt)
        counted = sum(w.choices for w in twin.waiting), sum(w.prompt_tokens for w in twin.waiting)
        assert one.queued() == one.queued("m") == counted
        assert counted[0] <= choices and counted[1] <= queued
        assert one.open_calls == len(twin.open)
    for grant, _, _ in list(twin.open):
        one.finish(grant, 0, now_ns / NS)
    assert (one.queued(), one.open_calls, one._waiting_of) == ((0, 0), 0, {})


@given(st.integers(1, 10**9), st.lists(st.tuples(st.integers(0, 90 * NS), st.integers(1, 10**9)), max_size=40))
def test_a_bucket_is_exact_and_never_gives_more_than_its_rate(per_minute: int, takes: list[tuple[int, int]]) -> None:
    bucket, level, now_ns = Bucket(per_minute, 0), Fraction(per_minute), 0
    given_out: list[tuple[int, int]] = []
    for gone_ns, amount in takes:
        now_ns += gone_ns
        level = min(Fraction(per_minute), level + Fraction(per_minute * gone_ns, 60 * NS))
        wait_ns = bucket.wait_ns(amount, now_ns)
        want = min(amount, per_minute)
        assert (wait_ns == 0) is (level >= want)
        if wait_ns == 0:
            level -= bucket.take(amount)
            given_out.append((now_ns, want))
        else:
            # To the nanosecond: there at that time, and not one earlier.
            short = Fraction(want) - level
            assert Fraction(per_minute * (wait_ns - 1), 60 * NS) < short <= Fraction(per_minute * wait_ns, 60 * NS)
    for i, (start_ns, _) in enumerate(given_out):
        total = 0
        for at_ns, amount in given_out[i:]:
            total += amount
            assert total <= per_minute * (1 + Fraction(at_ns - start_ns, 60 * NS))


def test_anybody_has_no_limits() -> None:
    one = Admission(WIDE, WIDE)
    for _ in range(100):
        granted(one.admit(ticket(key=ANYBODY, prompt=10**6, most=10**6), 0.0))
