"""Which idle model goes first: worked examples, the Brain's sentence, and a recorded day against plain idle time."""

from __future__ import annotations

import csv
import gzip
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from janus_server.orders import Busy, Done, Joined, KnownModel, Observed, Order, Report, Stage, Wanted
from janus_server.sched.brain import Brain
from janus_server.sched.keep import Keep
from janus_server.sched.oracle_records import Features, Observation
from janus_server.sched.state import Belief, BrainSettings

TRACE = Path(__file__).resolve().parents[3] / "shared" / "traces" / "workload62"


def belief(name: str = "a", idle_since_s: float = 0.0, wake_s: float = 0.1, load_s: float = 1.0) -> Belief:
    known = KnownModel(model=name, weight_pages=1, host_bytes=1, longest_pages=1, load_s=load_s, wake_s=wake_s)
    made = Belief.of(known, 0.0)
    made.copy, made.idle_since_s = True, idle_since_s
    return made


def test_what_is_asked_for_often_is_worth_more_than_what_was_used_a_moment_ago() -> None:
    keep = Keep(1200.0)
    often, lately = belief(idle_since_s=40.0), belief(idle_since_s=99.0)
    assert keep.value(lately, 100.0) > keep.value(often, 100.0)
    keep.seen(often, 30.0, 60.0)
    assert keep.value(lately, 100.0) < keep.value(often, 100.0)


def test_what_costs_more_to_bring_back_is_worth_more() -> None:
    keep = Keep(1200.0)
    quick, slow, cold = belief(wake_s=0.1), belief(wake_s=1.0), belief(wake_s=0.1, load_s=5.0)
    cold.copy = False
    for one in (quick, slow, cold):
        keep.seen(one, 10.0, 50.0)
    assert keep.value(quick, 90.0) < keep.value(slow, 90.0) < keep.value(cold, 90.0)


def test_requests_count_half_after_a_half_life_and_a_steady_rate_is_found() -> None:
    keep = Keep(600.0)
    one = belief()
    keep.seen(one, 60.0, 0.0)
    rate = keep.rate(one, 0.0)
    assert keep.rate(one, 600.0) == pytest.approx(rate / 2)
    for now in range(0, 12_000, 30):
        keep.seen(one, 6.0, float(now))
    assert keep.rate(one, 12_000.0) == pytest.approx(0.2, rel=0.03)
    assert keep.why(one, 12_000.0) == "idle for 12000.0 s, 12 requests a minute expected"
    assert keep.why(belief(idle_since_s=7.0), 9.0) == "idle for 2.0 s"


def test_the_brain_keeps_the_model_that_is_expected_back_and_says_so() -> None:
    models = tuple(
        KnownModel(model=name, weight_pages=40, host_bytes=1, longest_pages=10, preload=False) for name in "abc"
    )
    brain = Brain(BrainSettings())
    brain.on(Joined("n0", 100, 1000, models), 0.0)
    for name in "ab":
        order = brain.on(Wanted(name), 1.0)[0]
        assert isinstance(order, Order)
        brain.on(Done(order.id, Stage.ACTIVE, copy=True, took_s=1.0), 1.0)
    seen = Observation(at_s=30.0, features=Features(0.0, 2.0, 1.0, 0.0, 1.0, 0.0), replicas=1, requests=0, on_time=0)
    brain.on(Observed({"a": seen}), 30.0)
    brain.on(Report("n0", {"a": Busy(0, 0, 8.0), "b": Busy(0, 0, 3.0)}), 40.0)
    sleep = brain.on(Wanted("c"), 40.0)[0]
    assert isinstance(sleep, Order)
    assert (sleep.model, sleep.why) == ("b", "b: idle for 3.0 s, makes room for c")


def by_idle_time(one: Belief, now: float) -> float:
    return one.reload_s / max(now - one.idle_since_s, 1e-3)


def brought_back(
    sizes: list[float], requests: list[tuple[float, int]], share: float, value: Callable[[Belief, float], float],
    keep: Keep,
) -> float:  # fmt: skip
    """What is brought back on a day with room for that share of all models, in the units of `sizes`."""
    models = [belief(str(i), wake_s=size) for i, size in enumerate(sizes)]
    room = share * sum(sizes)
    there: dict[int, None] = {}
    total = 0.0
    for _, period in itertools.groupby(requests, key=lambda one: one[0] // 30.0):
        counts: dict[int, int] = {}
        now = 0.0
        for now, app in period:
            if app not in there:
                total += sizes[app]
                for victim in sorted(there, key=lambda i: (value(models[i], now), i)):
                    if sum(sizes[i] for i in there) + sizes[app] <= room:
                        break
                    del there[victim]
                there[app] = None
            models[app].idle_since_s = now
            counts[app] = counts.get(app, 0) + 1
        for app, count in counts.items():
            keep.seen(models[app], count, (now // 30.0 + 1.0) * 30.0)
    return total


@pytest.mark.skipif(not TRACE.is_dir(), reason="the trace workload62 is not beside the repository")
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_on_a_recorded_day_less_is_brought_back_than_by_idle_time(share: float) -> None:
    """Every 60th request of 62 applications as 62 models: the day of a small node."""
    with (TRACE / "apps.csv").open() as file:
        sizes = [float(row["params_b"]) for row in csv.DictReader(file)]
    with gzip.open(TRACE / "requests.csv.gz", "rt") as file:
        rows = (line.split(",") for line in itertools.islice(file, 1, None, 60))
        requests = [(int(row[0]) / 1e3, int(row[1])) for row in rows]
    keep = Keep(BrainSettings().rate_half_life_s)
    ours = brought_back(sizes, requests, share, keep.value, keep)
    theirs = brought_back(sizes, requests, share, by_idle_time, Keep(1200.0))
    print(f"\nroom for {share:.0%}: {ours:,.0f} brought back, by idle time {theirs:,.0f} ({ours / theirs - 1:+.1%})")
    assert ours < theirs
