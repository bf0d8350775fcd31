"""Pools and shares on examples worked by hand, and that no traffic makes a model change its pool often."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janus_server.sched.budget import Claim, settled, share_out
from janus_server.sched.demand import Placement
from janus_server.sched.packing import pack
from janus_server.sched.pools import Assignment, Overlap, Pool, PoolRules, Pools, Signal, assign, steady_demands


def signal(model: str, replicas: int = 1, load: float = 0.2, heat: float = 1.0, shards: int = 1) -> Signal:
    return Signal(model=model, replicas=replicas, hbm=0.2, compute=load, bandwidth=0.0, heat=heat, shards=shards)


def elastic(assignment: Assignment) -> tuple[str, ...]:
    return assignment.pools.of(Pool.ELASTIC)


def test_a_model_of_more_than_one_replica_is_elastic_at_once() -> None:
    done = assign(Pools(), [signal("a"), signal("b", 3)], 10, 0.0)
    assert elastic(done) == ("b",)
    assert [c.why for c in done.changes] == ["b to elastic: it needs 3 replicas; once calm it stays for 30 s"]


def test_it_comes_back_after_calm_and_stays_longer_each_time() -> None:
    pools, stays = Pools(), []
    now = since_s = 0.0
    for _ in range(4):
        pools = assign(pools, [signal("a", 2)], 10, now).pools
        since_s = now = now + 1.0
        while pools.of(Pool.ELASTIC):
            pools = assign(pools, [signal("a")], 10, now).pools
            now += 1.0
        stays.append(round(now - since_s) - 1)
    assert stays == [30, 60, 120, 240]


def test_between_the_two_loads_everything_stays() -> None:
    pools = assign(Pools(), [signal("a", load=0.6), signal("b", 2)], 10, 0.0).pools
    for now in range(1, 500):
        pools = assign(pools, [signal("a", load=0.6), signal("b", load=0.6)], 10, float(now)).pools
    assert pools.of(Pool.ELASTIC) == ("b",)


def test_the_hottest_get_the_devices_and_the_others_are_told() -> None:
    done = assign(Pools(), [signal("a", 2, heat=1.0), signal("b", 2, heat=9.0)], 3, 0.0)
    assert elastic(done) == ("b",)
    assert [note.why for note in done.notes] == [
        "it stays steady though it needs 2 replicas: no devices are left for it alone"
    ]


def test_when_devices_are_lost_the_coldest_goes_back() -> None:
    both = [signal("a", 2, heat=1.0), signal("b", 2, heat=9.0)]
    pools = assign(Pools(), both, 10, 0.0).pools
    done = assign(pools, both, 1, 1.0)
    assert elastic(done) == ("b",)
    assert "it is the coldest" in done.changes[0].why


def test_nonsense_is_a_note_and_changes_nothing() -> None:
    pools = assign(Pools(), [signal("a", 2)], 10, 100.0).pools
    done = assign(pools, [signal("a", load=math.nan)], 10, 101.0)
    assert elastic(done) == ("a",) and done.notes[0].subject == "a"
    assert assign(Pools(), [], 0, 0.0) == Assignment(Pools((), 0.0))
    done = assign(Pools(), [signal("a", 5)], 0, 0.0)
    assert elastic(done) == () and done.notes


def test_a_clock_that_goes_back_starts_the_waiting_anew() -> None:
    pools = assign(Pools(), [signal("a", 2)], 10, 1000.0).pools
    pools = assign(pools, [signal("a")], 10, 1001.0).pools
    done = assign(pools, [signal("a")], 10, 5.0)
    assert done.notes[0].subject == "clock" and elastic(done) == ("a",)
    assert elastic(assign(done.pools, [signal("a")], 10, 34.0)) == ("a",)
    assert elastic(assign(done.pools, [signal("a")], 10, 36.0)) == ()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.floats(0.0, 1.2)), min_size=50, max_size=400), st.integers(1, 30))
def test_no_traffic_makes_a_model_change_its_pool_often(swings: list[tuple[int, float]], every_s: int) -> None:
    """Each stay is twice the last one: within an hour there are few, whatever the traffic does."""
    pools, changes = Pools(), 0
    for i, (replicas, load) in enumerate(swings):
        done = assign(pools, [signal("a", replicas, load)], 10, float(i * every_s))
        pools = done.pools
        changes += len(done.changes)
    hours = len(swings) * every_s / 3600.0
    assert changes <= 14 * math.ceil(hours)


@pytest.mark.parametrize(("overlap", "devices"), [(Overlap.STREAMS, 1), (Overlap.TURNS, 2)])
def test_a_complementary_pair_shares_a_device_only_where_steps_overlap(overlap: Overlap, devices: int) -> None:
    """One computes for 0.6 of the time, the other reads for 0.6: beside each other that fits, in turns it does not."""
    pair = [
        Signal(model="computes", replicas=1, hbm=0.3, compute=0.6, bandwidth=0.2),
        Signal(model="reads", replicas=1, hbm=0.3, compute=0.2, bandwidth=0.6),
    ]
    pools = assign(Pools(), pair, 4, 0.0).pools
    decision = pack(steady_demands(pools, pair, overlap), ["x", "y", "z"], Placement())
    assert decision.devices_used == devices and not decision.refusals


def test_measured_busy_time_is_used_as_it_is() -> None:
    pair = [Signal(model=name, replicas=1, hbm=0.3, compute=0.6, bandwidth=0.2, busy=0.45) for name in ("a", "b")]
    demands = steady_demands(assign(Pools(), pair, 4, 0.0).pools, pair, Overlap.TURNS)
    assert [demand.busy for demand in demands] == [0.45, 0.45]


# Shares


def test_shares_by_largest_remainders() -> None:
    assert share_out([Claim("a", 8), Claim("b", 3), Claim("c", 1)], 8) == {"a": 5, "b": 2, "c": 1}


def test_the_important_get_theirs_beyond_one_for_everybody() -> None:
    assert share_out([Claim("a", 8), Claim("b", 3, priority=1)], 5) == {"a": 2, "b": 3}


def test_the_coldest_get_none_where_there_is_not_one_for_everybody() -> None:
    claims = [Claim("a", 2, heat=1.0), Claim("b", 2, heat=3.0), Claim("c", 1, heat=2.0)]
    assert share_out(claims, 2) == {"a": 0, "b": 1, "c": 1}
    assert share_out(claims, 0) == {"a": 0, "b": 0, "c": 0}


def test_single_replicas_are_not_moved_to_and_fro() -> None:
    claims = [Claim("a", 7), Claim("b", 6)]
    assert share_out(claims, 8) == {"a": 4, "b": 4}
    assert settled(claims, {"a": 4, "b": 4}, {"a": 5, "b": 3}, 8) == {"a": 5, "b": 3}
    assert settled(claims, {"a": 4, "b": 4}, {"a": 6, "b": 2}, 8) == {"a": 4, "b": 4}
    important = [Claim("a", 7), Claim("b", 6, priority=1)]
    assert settled(important, {"a": 4, "b": 4}, {"a": 5, "b": 3}, 8) == {"a": 4, "b": 4}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4), st.integers(0, 2), st.integers(0, 12)), max_size=8),
    st.integers(0, 40),
)
def test_settled_shares_fit_too(claims: list[tuple[int, int, int, int]], devices: int) -> None:
    asked = [Claim(f"m{i}", replicas, each, priority) for i, (replicas, each, priority, _) in enumerate(claims)]
    before = {f"m{i}": had for i, (*_, had) in enumerate(claims)}
    shares = share_out(asked, devices)
    out = settled(asked, shares, before, devices)
    assert sum(out[c.model] * c.devices for c in asked) <= devices
    assert all(0 <= out[c.model] <= c.replicas for c in asked)
    assert all(out[c.model] >= 1 for c in asked if shares[c.model])
    assert settled(asked, shares, out, devices) == settled(asked, shares, out, devices)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4), st.integers(0, 2), st.floats(0, 9)), max_size=8),
    st.integers(0, 40),
)
def test_shares_fit_and_leave_nothing_unused_that_somebody_wants(
    claims: list[tuple[int, int, int, float]], devices: int
) -> None:
    asked = [Claim(f"m{i}", *claim) for i, claim in enumerate(claims)]
    given_ = share_out(asked, devices)
    assert sum(given_[c.model] * c.devices for c in asked) <= max(devices, 0)
    assert all(0 <= given_[c.model] <= c.replicas for c in asked)
    left = devices - sum(given_[c.model] * c.devices for c in asked)
    for c in asked:
        if 0 < given_[c.model] < c.replicas:
            assert c.devices > left, f"{c.model} could have one more"


def test_rules_are_used() -> None:
    rules = PoolRules(enter_load=0.1)
    assert elastic(assign(Pools(), [signal("a", load=0.2)], 10, 0.0, rules)) == ("a",)
