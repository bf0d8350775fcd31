"""Packing on examples worked by hand, against brute force, and on whatever demand hypothesis makes up."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janus_server.errors import Bug
from janus_server.sched import packing_bound
from janus_server.sched.bins import Bins, items, potential
from janus_server.sched.consolidate import Search
from janus_server.sched.demand import WHOLE, Decision, Demand, Kind, Placement, Reason, Rules, Seat, millionths
from janus_server.sched.packing import pack

LAZIEST = Rules(steps=0, damage_most=9.0)
"""Neither search nor repair: insertion alone."""


def need(model: str, *shares: float, shards: int = 1, move_s: float = 1.0) -> Demand:
    return Demand(
        model=model, hbm=shares[0], compute=shares[1], bandwidth=shares[2], busy=shares[3] if len(shares) > 3 else 0.0,
        shards=shards, move_s=move_s,
    )  # fmt: skip


def standing(**homes: str) -> Placement:
    """standing(a="xy", b="x"): model a on devices x and y, b on x."""
    return Placement(tuple(sorted(Seat(model, device) for model, on in homes.items() for device in on)))


def homes(decision: Decision) -> dict[str, str]:
    return {model: "".join(on) for model, on in decision.placement.homes.items()}


def kinds(decision: Decision) -> list[tuple[Kind, str]]:
    return [(move.kind, move.model) for move in decision.moves]


# Examples


def test_the_worked_example() -> None:
    read, write, more = need("read", 0.3, 0.6, 0.1), need("write", 0.3, 0.1, 0.6), need("more", 0.3, 0.6, 0.1)
    one = pack([read, write], "xyz")
    assert homes(one) == {"read": "x", "write": "x"}
    two = pack([read, write, more], "xyz", one.placement)
    assert homes(two) == {"more": "y", "read": "x", "write": "x"}
    three = pack([read, more], "xyz", two.placement)
    assert homes(three) == {"more": "y", "read": "x"}
    small = need("more", 0.3, 0.2, 0.1)
    four = pack([read, write, small], "xyz", two.placement)
    assert four.devices_used == 1
    assert four.moves[0].why == "more moves from y to x: the models fit on 1 device instead of 2"
    dear = need("more", 0.3, 0.2, 0.1, move_s=301.0)
    dear_read = need("read", 0.3, 0.6, 0.1, move_s=301.0)
    dear_write = need("write", 0.3, 0.1, 0.6, move_s=301.0)
    assert pack([dear_read, dear_write, dear], "xyz", two.placement).devices_used == 2


def test_a_compute_heavy_and_a_bandwidth_heavy_model_share_a_device() -> None:
    """Two of each: of the pairings that fit by volume only the mixed ones fit at all."""
    demands = [need(f"c{i}", 0.4, 0.7, 0.2) for i in range(2)] + [need(f"b{i}", 0.4, 0.2, 0.7) for i in range(2)]
    on = homes(pack(demands, "wxyz"))
    assert sorted(on.values()) == ["w", "w", "x", "x"]
    assert on["c0"] != on["c1"]
    # And of two devices with room the complementary one is chosen.
    before = standing(c="x", b="y")
    chosen = pack([need("c", 0.2, 0.6, 0.1), need("b", 0.2, 0.1, 0.6), need("n", 0.2, 0.3, 0.1)], "xy", before, LAZIEST)
    assert homes(chosen)["n"] == "y"


def test_busy_time_is_a_fourth_dimension_only_where_it_is_given() -> None:
    assert pack([need(m, 0.2, 0.2, 0.2) for m in "abc"], "xyz").devices_used == 1
    assert pack([need(m, 0.2, 0.2, 0.2, 0.5) for m in "abc"], "xyz").devices_used == 2


def test_a_model_that_outgrows_its_device_moves_whoever_is_cheapest() -> None:
    before = standing(a="x", b="x", c="x")
    demands = [need("a", 0.6, 0, 0), need("b", 0.3, 0, 0, move_s=0.5), need("c", 0.3, 0, 0, move_s=2.0)]
    decision = pack(demands, "xy", before)
    assert kinds(decision) == [(Kind.MOVE, "b")]
    assert decision.moves[0].why.startswith("b moves from x to y: x would have needed 1.2 of its HBM")


def test_what_stands_and_fits_stays() -> None:
    before = standing(a="y", b="yz")
    decision = pack([need("a", 0.5, 0.1, 0.1), need("b", 0.5, 0.1, 0.1, shards=2)], "xyz", before)
    assert decision.placement.seats == before.seats and not decision.moves


def test_models_that_left_shards_that_went_and_devices_that_are_gone() -> None:
    before = standing(a="xy", b="x", c="z", d="w")
    decision = pack([need("a", 0.6, 0, 0), need("c", 0.6, 0, 0), need("d", 0.6, 0, 0)], "xyz", before)
    assert {move.why for move in decision.moves} == {
        "a leaves y: it has fewer shards",
        "b leaves x: nothing is asked of it",
        "d moves from w to y: no device in use had room",
    }
    assert homes(decision) == {"a": "x", "c": "z", "d": "y"}


def test_shards_of_one_model_lie_on_different_devices() -> None:
    decision = pack([need("a", 0.1, 0.1, 0.1, shards=3), need("b", 0.1, 0.1, 0.1)], "wxyz")
    assert sorted(homes(decision)["a"]) == ["w", "x", "y"] and decision.devices_used == 3


def test_a_model_that_gets_a_shard_puts_it_on_another_device() -> None:
    demands = [need("a", 0.1, 0.3, 0.1, shards=2), need("b", 0.1, 0.3, 0.1)]
    decision = pack(demands, "xyz", standing(a="x", b="y"), LAZIEST)
    assert homes(decision) == {"a": "xy", "b": "y"} and kinds(decision) == [(Kind.PLACE, "a")]


def test_no_device_holds_more_models_than_the_rules_allow() -> None:
    demands = [need(m, 0.1, 0.1, 0.1) for m in "abcde"]
    assert pack(demands, "wxyz", rules=Rules(models_most=2)).devices_used == 3
    crowded = pack(demands, "wxyz", standing(a="w", b="w", c="w", d="w", e="w"), Rules(models_most=3))
    assert len([on for on in homes(crowded).values() if on == "w"]) == 3
    assert "w would have needed" in crowded.moves[0].why and "models on it" in crowded.moves[0].why


@pytest.mark.parametrize(
    ("demand", "reason", "words"),
    [
        (need("m", 0.5, 1.3, 0.2), Reason.TOO_LARGE, "1.3 of a device's compute; it takes 2 times as many shards"),
        (need("m", 0.5, 0.2, 0.2, shards=3), Reason.TOO_MANY_SHARDS, "its 3 shards need a device each and there are 2"),
        (need("m", float("nan"), 0.2, 0.2), Reason.NOT_A_DEMAND, "must be numbers"),
        (need("m", float("inf"), 0.2, 0.2), Reason.NOT_A_DEMAND, "must be numbers"),
        (need("m", -0.1, 0.2, 0.2), Reason.NOT_A_DEMAND, "must be numbers"),
        (need("m", 0.1, 0.2, 0.2, shards=0), Reason.NOT_A_DEMAND, "must have a shard"),
        (need("m", 1e300, 0.2, 0.2), Reason.TOO_LARGE, "of a device's HBM"),
        (need("m", 0.9, 0.9, 0.9, shards=2), Reason.NO_ROOM, "no 2 devices have 0.9 HBM, 0.9 compute, 0.9 bandwidth"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_a_reason(demand: Demand, reason: Reason, words: str) -> None:
    decision = pack([need("a", 0.2, 0.2, 0.2), demand], "xy", standing(a="x", m="y"))
    (refusal,) = decision.refusals
    assert (refusal.model, refusal.reason) == ("m", reason) and words in refusal.why
    assert homes(decision) == {"a": "x"}
    assert [(m.kind, m.model) for m in decision.moves] == [(Kind.DROP, "m")] and refusal.why in decision.moves[0].why


def test_others_are_rearranged_for_a_model_without_room() -> None:
    """By volume there is room for c, but not on one device until a and b lie together."""
    before = standing(a="x", b="y")
    decision = pack([need("a", 0.4, 0, 0), need("b", 0.4, 0, 0), need("c", 0.9, 0, 0)], "xy", before)
    assert not decision.refusals and homes(decision)["a"] == homes(decision)["b"]
    assert any("to make room for c" in move.why for move in decision.moves)


def test_a_rescue_uses_free_devices_too() -> None:
    """c's two shards fit on the free z and, once a and b lie together, on one of theirs."""
    before = standing(a="x", b="y")
    demands = [need("a", 0.4, 0, 0), need("b", 0.4, 0, 0), need("c", 0.9, 0, 0, shards=2)]
    decision = pack(demands, "xyz", before)
    assert not decision.refusals and "z" in homes(decision)["c"] and len(homes(decision)["c"]) == 2


def test_nothing_asked_and_no_devices() -> None:
    assert pack([], [], standing(a="x")).placement.seats == ()
    (refusal,) = pack([need("a", 0.1, 0.1, 0.1)], []).refusals
    assert refusal.reason is Reason.TOO_MANY_SHARDS
    with pytest.raises(Bug):
        pack([need("a", 0.1, 0, 0), need("a", 0.2, 0, 0)], "xy")
    with pytest.raises(Bug):
        pack([], "xx")


def test_a_departure_leaves_a_lopsided_device_that_is_repaired() -> None:
    """x keeps two compute-heavy models, y a bandwidth-heavy pair with room: one of x's goes over."""
    compute, bandwidth = (0.1, 0.4, 0.1), (0.1, 0.1, 0.3)
    before = standing(gone="x", c1="x", c2="x", b1="y", b2="y")
    demands = [need("c1", *compute), need("c2", *compute), need("b1", *bandwidth), need("b2", *bandwidth)]
    demands += [need(f"f{i}", 0.75, 0.75, 0.75) for i in range(2)]
    before = Placement(tuple(sorted((*before.seats, Seat("f0", "u"), Seat("f1", "v")))))
    repaired = pack(demands, "uvxy", before, Rules(steps=0, damage_most=0.5, hold_s=0.0))
    assert kinds(repaired) == [(Kind.MOVE, "c1"), (Kind.DROP, "gone")]
    assert repaired.moves[0].why == "c1 moves from x to y: x was left lopsided: damage 2.00 over 0.5"
    left = pack(demands, "uvxy", before, Rules(steps=0, damage_most=2.0, hold_s=0.0))
    assert kinds(left) == [(Kind.DROP, "gone")]


# The arithmetic


@given(st.lists(st.tuples(*[st.integers(0, 1000)] * 3), min_size=2, max_size=2))
def test_the_score_is_what_the_potential_says(pair: list[tuple[int, int, int]]) -> None:
    """Φ(load + v) = Φ(load) + Φ(v) - 2⟨r', v'⟩, with r' = -load'."""
    load, v = (np.array(x, dtype=np.int64)[:, None] for x in pair)
    models = items(np.concatenate((load, v), axis=1).T, [1, 1], [1.0, 1.0], 9)
    bins = Bins(models, 1, [[0], []])
    together = int(potential(load + v)[0])
    assert together == int(potential(load)[0]) + int(potential(v)[0]) - 2 * int(bins.scores(1)[0])


def test_damage_is_one_for_a_kind_alone_and_less_for_complements() -> None:
    models = items(np.array([[4, 1, 1], [8, 2, 2], [1, 4, 4]], dtype=np.int64), [1] * 3, [1.0] * 3, 9)
    # Φ is 6, 24 and 6; (12, 3, 3) has 54, (5, 5, 5) has 0.
    bins = Bins(models, 2, [[0], [], [0]])
    assert bins.damage([0]) == [(0, 0.0)]
    bins = Bins(models, 2, [[0], [0], []])
    assert bins.damage([0]) == [(0, pytest.approx(54 / 30))]
    assert Bins(models, 2, [[0], [], []]).damage([0]) == [(0, 1.0)]


# Properties

SHARE = st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.25, 0.3, 1 / 3, 0.4, 0.5, 0.6, 0.7, 0.9, 1.0])


@st.composite
def demand_lists(draw: st.DrawFn, most: int = 12) -> list[Demand]:
    odd = st.sampled_from([1.2, float("nan"), -1.0])
    names = draw(st.lists(st.integers(0, 19), max_size=most, unique=True))
    out = []
    for name in names:
        shares = [draw(SHARE) if draw(st.integers(0, 30)) else draw(odd) for _ in range(3)]
        busy = draw(st.sampled_from([0.0, 0.0, 0.0, 0.3]))
        move_s = draw(st.sampled_from([0.1, 1.0, 40.0]))
        out.append(need(f"m{name:02d}", *shares, busy, shards=draw(st.sampled_from([1, 1, 1, 2, 3])), move_s=move_s))
    return out


RULES = st.builds(
    Rules,
    models_most=st.sampled_from([0, 0, 1, 2, 3]),
    damage_most=st.sampled_from([0.0, 0.3, 0.5, 0.9, 9.0]),
    hold_s=st.sampled_from([0.0, 1.0, 300.0]),
    steps=st.sampled_from([0, 1, 30]),
)
NAMES = st.lists(st.sampled_from([f"d{i}" for i in range(9)]), unique=True, max_size=9)


def verify(demands: Sequence[Demand], devices: Sequence[str], before: Placement, rules: Rules, got: Decision) -> None:
    asked = {demand.model: demand for demand in demands}
    seats = got.placement.seats
    assert list(seats) == sorted(set(seats)), "in order, and a shard of a model once on a device"
    load: dict[str, list[int]] = defaultdict(lambda: [0] * 4)
    on: dict[str, int] = defaultdict(int)
    for seat in seats:
        on[seat.device] += 1
        for k, share in enumerate(asked[seat.model].shares):
            load[seat.device][k] += millionths(share)
    assert all(value <= WHOLE for loads in load.values() for value in loads)
    assert set(on) <= set(devices)
    assert not rules.models_most or max(on.values(), default=0) <= rules.models_most
    refused = {refusal.model for refusal in got.refusals}
    count = {model: len(home) for model, home in got.placement.homes.items()}
    for model, demand in asked.items():
        assert (model in refused) != (count.get(model, 0) == demand.shards and demand.shards > 0)
        assert model not in refused or model not in count
    assert got.devices_bound <= got.devices_used == len(on)
    # The moves lead from what stood to what stands, and each says what and where.
    after = set(before.seats)
    for move in got.moves:
        assert move.model in move.why and (move.source or "") in move.why and (move.target or "") in move.why
        if move.source is not None:
            after.remove(Seat(move.model, move.source))
        if move.target is not None:
            after.add(Seat(move.model, move.target))
    assert after == set(seats)
    assert all(refusal.model in refusal.why for refusal in got.refusals)


@settings(max_examples=100, deadline=None)
@given(st.lists(demand_lists(), min_size=1, max_size=4), NAMES, NAMES, RULES, st.randoms(use_true_random=False))
def test_every_decision_of_a_series_holds_the_rules(
    series: list[list[Demand]], devices: list[str], others: list[str], rules: Rules, shuffle: object
) -> None:
    """Demand and devices change at will between decisions; the order in which demands are given changes nothing."""
    placement = Placement()
    for n, demands in enumerate(series):
        names = devices if n % 2 == 0 else others
        got = pack(demands, names, placement, rules)
        verify(demands, names, placement, rules, got)
        assert pack(demands[::-1], names, placement, rules) == got
        placement = got.placement


@settings(max_examples=60, deadline=None)
@given(demand_lists(), RULES)
def test_with_unchanged_demand_moves_pay_and_come_to_an_end(demands: list[Demand], rules: Rules) -> None:
    devices = [f"d{i}" for i in range(20)]
    cost = {demand.model: demand.move_s for demand in demands}
    was = pack(demands, devices, Placement(), rules)
    for _ in range(8):
        now = pack(demands, devices, was.placement, rules)
        moved_s = sum(cost[move.model] for move in now.moves)
        assert all(move.kind is Kind.MOVE for move in now.moves)
        assert moved_s <= (was.devices_used - now.devices_used) * rules.hold_s
        was = now
    assert not now.moves


# Against brute force


def brute(demands: Sequence[Demand], most: int) -> int:
    """The fewest devices for single shards, by trying every partition (each joins a group or opens the next)."""
    sizes = [[Fraction(millionths(share), WHOLE) for share in demand.shares] for demand in demands]
    best = len(sizes)

    def go(i: int, groups: list[list[Fraction]], counts: list[int]) -> None:
        nonlocal best
        if len(groups) >= best:
            return
        if i == len(sizes):
            best = len(groups)
            return
        for g, group in enumerate(groups):
            joined = [a + b for a, b in zip(group, sizes[i], strict=True)]
            if max(joined) <= 1 and counts[g] < most:
                go(i + 1, [*groups[:g], joined, *groups[g + 1 :]], [*counts[:g], counts[g] + 1, *counts[g + 1 :]])
        go(i + 1, [*groups, sizes[i]], [*counts, 1])

    go(0, [], [])
    return best


def some(seed: int, count: int) -> list[Demand]:
    draws = np.random.default_rng(seed)
    shares = draws.uniform(0.05, 0.45, (count, 3))
    shares[np.arange(count), draws.integers(0, 3, count)] += draws.uniform(0.0, 0.4, count)
    return [need(f"m{i}", *row) for i, row in enumerate(shares.round(2).tolist())]


def test_small_cases_are_packed_as_well_as_brute_force_does() -> None:
    """From nothing, and after each of three changes; with a limit on models in every third case."""
    missed, over = 0, 0
    for seed in range(60):
        rules = Rules(models_most=2 if seed % 3 == 0 else 0)
        placement = Placement()
        for change in range(3):
            demands = some(1000 * change + seed, 7)
            got = pack(demands, "abcdefgh", placement, rules)
            placement = got.placement
            fewest = brute(demands, rules.models_most or 99)
            assert got.devices_bound <= fewest <= got.devices_used
            missed += got.devices_used > fewest
            over = max(over, got.devices_used - fewest)
    assert missed <= 1 and over <= 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SHARE, SHARE, SHARE), min_size=1, max_size=7), st.sampled_from([1, 2, 99]))
def test_no_packing_uses_fewer_devices_than_the_bounds(rows: list[tuple[float, ...]], most: int) -> None:
    demands = [need(f"m{i}", *row) for i, row in enumerate(rows)]
    table = np.array([[millionths(share) for share in row] for row in rows], dtype=np.int64)
    models = items(table, [1] * len(rows), [1.0] * len(rows), most)
    fewest = brute(demands, most)
    assert packing_bound.volume(models) <= packing_bound.bound(models) <= fewest
    assert packing_bound.clique(models) <= fewest


def test_the_bounds_see_what_volume_does_not() -> None:
    table = np.array([[600_000, 0, 0], [600_000, 0, 0], [500_000, 0, 0]], dtype=np.int64)
    models = items(table, [1] * 3, [1.0] * 3, 9)
    assert (packing_bound.volume(models), packing_bound.bound(models)) == (2, 3)
    apart = np.array([[600_000, 600_000, 0], [600_000, 0, 600_000], [0, 600_000, 600_000]], dtype=np.int64)
    models = items(apart, [2, 1, 1], [1.0] * 3, 9)
    assert (packing_bound.volume(models), packing_bound.clique(models)) == (2, 4)


def test_the_search_finds_a_swap_that_no_single_move_replaces() -> None:
    """6+2 and 3+4 with 5 to come, on two devices of 10: only 6+4 and 3+2+5 will do."""
    sizes = np.array([6, 2, 3, 4, 5], dtype=np.float64) * WHOLE / 10
    where = np.array([0, 0, 1, 1, -1], dtype=np.int64)
    search = Search(sizes[None, :], np.arange(5), where, 2)
    assert search.run(20)
    sides = [sorted(int(10 * s / WHOLE) for s in sizes[search.where[:5] == row]) for row in (0, 1)]
    assert sorted(sides) == [[2, 3, 5], [4, 6]]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1000), st.booleans())
def test_the_search_keeps_shards_of_a_model_apart(seed: int, from_nothing: bool) -> None:
    """Three models of three shards, three of two and some of one on four rows, from nothing and from a crowd."""
    draws = np.random.default_rng(seed)
    who = np.repeat(np.arange(10), [3, 3, 3, 2, 2, 2, 1, 1, 1, 1])
    sizes = draws.integers(1, 4, (3, 10))[:, who].astype(np.float64) * WHOLE / 10
    where = np.full(len(who), -1)
    if not from_nothing:
        where = np.concatenate([draws.permutation(4)[:n] for n in np.bincount(who)])
    search = Search(sizes, who, where.astype(np.int64), 4)
    fits = search.run(60)
    seats = list(zip(who.tolist(), search.where[: len(who)].tolist(), strict=True))
    assert len(set(seats)) == len(seats)
    load = np.zeros((3, 4))
    for n, (_, row) in enumerate(seats):
        load[:, row] += sizes[:, n]
    assert np.array_equal(load, search.load) and fits == bool((load <= WHOLE).all())


def test_every_way_of_listing_devices_gives_the_same_numbers() -> None:
    demands = some(5, 6)
    used = {pack(demands, names).devices_used for names in itertools.permutations("abcd")}
    assert len(used) == 1
