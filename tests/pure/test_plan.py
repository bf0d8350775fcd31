"""Plans on examples worked by hand, against brute force over all orders, and carried out step by step in any order."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janus_server.orders import Verb
from janus_server.sched.placement import Cluster, Device, Model, Replica, Role, Standing
from janus_server.sched.plan import Plan, Step, plan

RAISING = (Verb.LOAD, Verb.WAKE, Verb.FORK)


def device(name: str, pages: int = 10, host: str = "h0", copies: tuple[str, ...] = ()) -> Device:
    return Device(id=name, host=host, domain="d0", pages=pages, copies=copies)


def replica(model: str, devices: str, standing: Standing = Standing.ACTIVE, running: int = 0) -> Replica:
    return Replica(model=model, devices=tuple(devices), standing=standing, running=running)


def said(made: Plan) -> list[str]:
    return [f"{s.change.verb.value if s.change.verb else 'role'} {s.change.model} {''.join(s.change.devices)}"
            for s in made.steps]  # fmt: skip


class World:
    """Replicas that do what they are told, and complain when it would not have worked."""

    def __init__(self, cluster: Cluster, models: list[Model], wanted: list[Replica]) -> None:
        self.devices = cluster.devices
        self.models = {m.model: m for m in models}
        self.at = {r.key: r for r in cluster.replicas}
        has = Counter(r.model for r in cluster.replicas if r.standing is Standing.ACTIVE)
        fit = Counter(key[0] for key in {r.key for r in wanted})
        self.floor = {name: min(has[name], fit[name]) for name in self.models}
        self.check(Counter())

    def cluster(self) -> Cluster:
        return Cluster(self.devices, tuple(self.at.values()))

    def begin(self, step: Step) -> None:
        change, key = step.change, (step.change.model, step.change.devices)
        now = self.at.get(key)
        if change.verb in RAISING:
            assert now is None, f"{key} is there already"
            taken = [r for r in self.at.values() if r.model == change.model and set(r.devices) & set(change.devices)]
            assert not taken, "a model is on a device once at most"
            self.at[key] = Replica(model=change.model, devices=change.devices, standing=Standing.RISING)
        elif change.verb is Verb.DRAIN:
            assert now is not None and now.standing is Standing.ACTIVE
            self.set(key, Standing.DRAINING)
        elif change.verb is Verb.SERVE:
            assert now is not None and now.standing is Standing.DRAINING
            self.set(key, Standing.ACTIVE)
        else:
            assert now is not None and now.standing is Standing.DRAINING, "it sinks only when drained"
            self.set(key, Standing.SINKING)

    def end(self, step: Step) -> None:
        key = (step.change.model, step.change.devices)
        if step.change.verb in RAISING:
            self.set(key, Standing.ACTIVE)
        elif step.change.verb in (Verb.SLEEP, Verb.UNLOAD):
            del self.at[key]

    def set(self, key: tuple[str, tuple[str, ...]], standing: Standing) -> None:
        r = self.at[key]
        self.at[key] = Replica(model=r.model, devices=r.devices, standing=standing)

    def check(self, stopped: Counter[str]) -> None:
        """No device holds more than it has, and no model serves with less than it had and will have."""
        used: Counter[str] = Counter()
        for r in self.at.values():
            for d in r.devices:
                used[d] += self.models[r.model].pages
        for d in self.devices:
            assert used[d.id] <= d.pages, f"{d.id} would hold {used[d.id]} pages"
        serving = Counter(r.model for r in self.at.values() if r.standing is Standing.ACTIVE)
        for name, floor in self.floor.items():
            assert serving[name] >= floor - stopped[name], f"{name} serves with {serving[name]} of {floor}"


def run(world: World, made: Plan, draws: random.Random, most: int = 10**9) -> None:
    """Begin steps whenever what they are after has ended, end them at any time; all of it, or the first `most`."""
    ended: set[int] = set()
    stopped = Counter(s.change.model for s in made.steps if "is stopped before" in s.change.why)
    under_way = [i for i, s in enumerate(made.steps) if s.begun]
    begun = set(under_way)
    for _ in range(most):
        able = [i for i, s in enumerate(made.steps) if i not in begun and set(s.after) <= ended]
        if not able and not under_way:
            break
        pick = draws.randrange(len(able) + len(under_way))
        if pick < len(able):
            world.begin(made.steps[able[pick]])
            begun.add(able[pick])
            under_way.append(able[pick])
        else:
            i = under_way.pop(pick - len(able))
            world.end(made.steps[i])
            ended.add(i)
        world.check(stopped)
    else:
        return
    assert len(ended) == len(made.steps), "a step waits for ever"


# Worked by hand


def test_a_move_raises_before_it_drains() -> None:
    made = plan(
        Cluster((device("x"), device("y")), (replica("a", "x"),)), [Model(model="a", pages=6)], [replica("a", "y")]
    )
    assert said(made) == ["fork a y", "drain a x", "sleep a x"]
    assert [s.after for s in made.steps] == [(), (0,), (1,)]
    assert [c.why for c in made.ready] == ["a is wanted on y"]
    assert made.stopped == () and made.notes == ()


def test_a_swap_takes_the_spare_device() -> None:
    cluster = Cluster((device("x"), device("y"), device("z")), (replica("a", "x"), replica("b", "y")))
    models = [Model(model="a", pages=6), Model(model="b", pages=6)]
    made = plan(cluster, models, [replica("a", "y"), replica("b", "x")])
    assert said(made)[:4] == ["fork a z", "drain a x", "sleep a x", "fork b x"]
    assert said(made)[-2:] == ["drain a z", "unload a z"] and made.stopped == ()


def test_a_swap_without_a_spare_stops_the_least_important_and_says_so() -> None:
    cluster = Cluster((device("x"), device("y")), (replica("a", "x"), replica("b", "y")))
    models = [Model(model="a", pages=6, priority=1), Model(model="b", pages=6, outage_s=0.4)]
    made = plan(cluster, models, [replica("a", "y"), replica("b", "x")])
    assert said(made) == ["drain b y", "sleep b y", "fork a y", "drain a x", "sleep a x", "wake b x"]
    assert made.stopped == ("b",)
    assert "b@y is stopped before it is up elsewhere" in made.steps[0].change.why
    assert "0.4 s" in made.steps[0].change.why


def test_of_equals_the_one_that_is_back_sooner_is_stopped() -> None:
    cluster = Cluster((device("x"), device("y")), (replica("a", "x"), replica("b", "y")))
    models = [Model(model="a", pages=6, outage_s=9.0), Model(model="b", pages=6, outage_s=0.4)]
    assert plan(cluster, models, [replica("a", "y"), replica("b", "x")]).stopped == ("b",)


def test_the_first_that_fits_can_be_the_wrong_one() -> None:
    """b fits on x at once, but then c cannot leave y, nor a leave x. The search finds the order that works."""
    cluster = Cluster((device("x"), device("y")), (replica("a", "x"), replica("c", "y")))
    models = [Model(model="a", pages=5), Model(model="b", pages=5, priority=1), Model(model="c", pages=5)]
    cluster = Cluster((device("x"), device("y", 5)), cluster.replicas)
    made = plan(cluster, models, [replica("a", "y"), replica("b", "x"), replica("c", "x")])
    assert said(made)[0] == "fork c x" and said(made)[-1] == "load b x" and made.stopped == ()


def test_shards_on_overlapping_devices_go_over_others() -> None:
    cluster = Cluster(tuple(map(device, "wxyz")), (replica("a", "wx"),))
    models = [Model(model="a", pages=6, shards=2)]
    made = plan(cluster, models, [replica("a", "xy")])
    assert said(made) == ["fork a yz", "drain a wx", "sleep a wx"] or made.stopped == ("a",)
    run(World(cluster, models, [replica("a", "xy")]), made, random.Random(0))


def test_what_is_drained_and_wanted_serves_again() -> None:
    cluster = Cluster((device("x"),), (replica("a", "x", Standing.DRAINING),))
    assert said(plan(cluster, [Model(model="a", pages=6)], [replica("a", "x")])) == ["serve a x"]


def test_only_the_role_changes() -> None:
    wanted = Replica(model="a", devices=("x",), role=Role.PREFILL)
    made = plan(Cluster((device("x"),), (replica("a", "x"),)), [Model(model="a", pages=6)], [wanted])
    assert [(s.change.verb, s.change.role) for s in made.steps] == [(None, Role.PREFILL)]


def test_nothing_to_do_is_nothing() -> None:
    cluster = Cluster((device("x"),), (replica("a", "x"),))
    assert plan(cluster, [Model(model="a", pages=6)], [replica("a", "x")]) == Plan()
    assert plan(Cluster(), [], []) == Plan()


# Bad input


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (replica("a", "x"), "it needs 60 pages and x has 10 in all"),
        (replica("b", "q"), "there is no device q"),
        (replica("nobody", "x"), "the model is unknown"),
        (replica("b", "xy"), "it takes 1 different devices"),
        (replica("c", "xx"), "it takes 2 different devices"),
    ],
)
def test_what_cannot_be_is_a_note(wanted: Replica, why: str) -> None:
    models = [Model(model="a", pages=60), Model(model="b", pages=6), Model(model="c", pages=6, shards=2)]
    made = plan(Cluster((device("x"), device("y"))), models, [wanted])
    assert made.steps == ()
    assert [note.why for note in made.notes] == [f"it is not raised: {why}"]


def test_too_much_on_one_device_leaves_the_least_important_where_it_is() -> None:
    cluster = Cluster((device("x"), device("y")), (replica("b", "y"),))
    models = [Model(model="a", pages=6, priority=1), Model(model="b", pages=6)]
    made = plan(cluster, models, [replica("a", "x"), replica("b", "x")])
    assert said(made) == ["load a x"]
    assert [n.why for n in made.notes] == ["it is not raised: its devices have no room for all that is wanted on them"]


def test_replicas_of_unknown_nodes_are_left_alone() -> None:
    made = plan(Cluster((device("x"),), (replica("a", "q"),)), [Model(model="a", pages=6)], [])
    assert made.steps == () and [n.why for n in made.notes] == ["it is left alone: the device is unknown"]


# Properties


NAMES = "abcd"


@st.composite
def moves(draw: st.DrawFn) -> tuple[Cluster, list[Model], list[Replica]]:
    devices = tuple(device(n, draw(st.integers(6, 12))) for n in "uvwxyz"[: draw(st.integers(1, 5))])
    count = draw(st.integers(1, 4))
    models = [
        Model(model=n, pages=draw(st.integers(2, 6)), shards=draw(st.sampled_from((1, 1, 1, 2))),
              priority=draw(st.integers(0, 2)), outage_s=draw(st.sampled_from((0.5, 2.0))))
        for n in NAMES[:count]
    ]  # fmt: skip

    def placed(standings: tuple[Standing, ...]) -> list[Replica]:
        room = {d.id: d.pages for d in devices}
        on: set[tuple[str, str]] = set()
        out = []
        for m in models:
            for _ in range(draw(st.integers(0, 2))):
                names = [d for d in room if room[d] >= m.pages and (m.model, d) not in on]
                if len(names) >= m.shards:
                    homes = tuple(draw(st.permutations(names))[: m.shards])
                    for d in homes:
                        room[d] -= m.pages
                        on.add((m.model, d))
                    out.append(replica(m.model, "".join(homes), draw(st.sampled_from(standings))))
        return out

    return Cluster(devices, tuple(placed(tuple(Standing)))), models, placed((Standing.ACTIVE,))


@settings(max_examples=400, deadline=None)
@given(moves(), st.randoms(use_true_random=False))
def test_any_plan_can_be_carried_out_in_any_order_it_allows(
    case: tuple[Cluster, list[Model], list[Replica]], draws: random.Random
) -> None:
    cluster, models, wanted = case
    made = plan(cluster, models, wanted)
    assert made == plan(cluster, models, wanted)
    assert made.notes == (), "all that is wanted here fits"
    world = World(cluster, models, wanted)
    run(world, made, draws)
    assert set(world.at) == {r.key for r in wanted}
    assert plan(world.cluster(), models, wanted) == Plan()


@settings(max_examples=300, deadline=None)
@given(moves(), st.randoms(use_true_random=False))
def test_a_plan_made_anew_at_every_event_still_ends(
    case: tuple[Cluster, list[Model], list[Replica]], draws: random.Random
) -> None:
    cluster, models, wanted = case
    world = World(cluster, models, wanted)
    for _ in range(200):
        made = plan(world.cluster(), models, wanted)
        if not made.steps:
            break
        # What is under way ends some time; what can begin begins, one or two things at a time.
        fresh = World(world.cluster(), models, wanted)
        run(fresh, made, draws, most=draws.randint(1, 3))
        world = fresh
    assert set(world.at) == {r.key for r in wanted}


def feasible(cluster: Cluster, models: list[Model], wanted: list[Replica], detours: int) -> bool:
    """Whether any order at all, with so many detours of single devices, never stops a model. Brute force."""
    pages = {m.model: m.pages for m in models}
    room = {d.id: d.pages for d in cluster.devices}
    start = frozenset(r.key for r in cluster.replicas)
    goal = frozenset(r.key for r in wanted)
    has, will = Counter(m for m, _ in start), Counter(m for m, _ in goal)
    seen = {(start, 0)}
    queue = [(start, 0)]
    while queue:
        state, used = queue.pop()
        if goal <= state:
            return True
        held: Counter[str] = Counter()
        for m, on in state:
            for d in on:
                held[d] += pages[m]
        serving = Counter(m for m, _ in state)
        nexts = []
        for m, d in itertools.product(pages, room):
            key = (m, (d,))
            free = held[d] + pages[m] <= room[d] and key not in state
            if free and key in goal:
                nexts.append((state | {key}, used))
            elif free and used < detours and serving[m]:
                nexts.append((state | {key}, used + 1))
        for key in state - goal:
            if serving[key[0]] > min(has[key[0]], will[key[0]]):
                nexts.append((state - {key}, used))
        fresh = [n for n in nexts if n not in seen]
        seen.update(fresh)
        queue.extend(fresh)
    return False


@st.composite
def small(draw: st.DrawFn) -> tuple[Cluster, list[Model], list[Replica]]:
    devices = tuple(device(n, draw(st.integers(4, 8))) for n in "xyz"[: draw(st.integers(2, 3))])
    models = [Model(model=n, pages=draw(st.integers(2, 5))) for n in NAMES[: draw(st.integers(2, 4))]]

    def placed() -> list[Replica]:
        room, out = {d.id: d.pages for d in devices}, []
        for m in models:
            names = [d for d in room if room[d] >= m.pages]
            if names:
                home = draw(st.sampled_from(names))
                room[home] -= m.pages
                out.append(replica(m.model, home))
        return out

    return Cluster(devices, tuple(placed())), models, placed()


@settings(max_examples=400, deadline=None)
@given(small())
def test_a_model_is_stopped_only_where_no_order_with_two_detours_avoids_it(
    case: tuple[Cluster, list[Model], list[Replica]],
) -> None:
    cluster, models, wanted = case
    made = plan(cluster, models, wanted)
    assert bool(made.stopped) is not feasible(cluster, models, wanted, detours=2)


@pytest.mark.parametrize("seed", range(4))
def test_a_large_reshuffle_ends_and_stays_within_bounds(seed: int) -> None:
    draws = random.Random(seed)
    devices = tuple(device(f"d{i:03d}", 20, host=f"h{i // 8}") for i in range(120))
    models = [Model(model=f"m{i:03d}", pages=draws.randint(3, 9), priority=i % 3) for i in range(150)]

    def placed() -> tuple[Replica, ...]:
        room, out = {d.id: d.pages for d in devices}, []
        for m in models:
            home = draws.choice([d for d in room if room[d] >= m.pages])
            room[home] -= m.pages
            out.append(Replica(model=m.model, devices=(home,)))
        return tuple(out)

    cluster, wanted = Cluster(devices, placed()), list(placed())
    made = plan(cluster, models, wanted)
    assert made.stopped == () and made.notes == ()
    world = World(cluster, models, wanted)
    run(world, made, draws)
    assert set(world.at) == {r.key for r in wanted}
