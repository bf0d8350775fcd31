"""Nodes that an operator has emptied: what is served stays served where there is room, and nothing is up there then."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from fleet_world import FleetWorld
from test_fleet import known

from janus_server import orders
from janus_server.cluster.member import Member
from janus_server.duty import NOBODY, Assigned, Charge, Duty
from janus_server.orders import Answer, Asked, KnownModel, Stage, Verb, Wish
from janus_server.sched.brain import Brain
from janus_server.sched.refuge import Home, _Search, refuge
from janus_server.sched.room import Room
from janus_server.sched.state import Belief, BrainSettings, RoomMemory, pages_needed
from janus_server.wire.frames import Table


class EmptyingWorld(FleetWorld):
    """Checks with every step that no model is lost that was served when an operator had a node emptied."""

    def __init__(self, seed: int, models: list[KnownModel], nodes: int, pool: int, trouble: float = 0.0) -> None:
        self.answers: list[Answer] = []
        self.kept: set[str] = set()  # models that are to be served at every moment
        self.leaving: set[str] = set()
        super().__init__(seed, models, nodes, pool, trouble)

    def obey(self, action: orders.Action) -> None:
        if isinstance(action, Answer):
            self.answers.append(action)
        else:
            super().obey(action)

    def assign(self, node: str, duty: Duty) -> Answer:
        self.tell(Assigned(node, duty))
        if self.answers[-1].accepted:
            (self.leaving.discard if duty is Duty.SERVE else self.leaving.add)(node)
        return self.answers[-1]

    def _assign(self, data: object) -> None:
        assert isinstance(data, tuple)
        self.assign(*data)

    def up(self, node: str) -> list[str]:
        return [
            m for m, stage in self.nodes[node].stage.items() if stage is Stage.ACTIVE or m in self.nodes[node].order
        ]

    def served(self) -> set[str]:
        return {model for model in self.models if self.serving(model)}

    def begin(self, id: str, node: str) -> None:
        """A request is begun on a node that is to be empty only for want of another one, or after a failed order."""
        if node in self.leaving and not self.trouble:
            model = self.waiting[id].model
            others = [n for n in self.serving(model) if self.leaving.isdisjoint(self.replicas[model, n])]
            coming = [n for n in self.nodes if n not in self.leaving and model in self.nodes[n].order]
            assert not others or coming, f"{id} ({model}) to {node}, though {others} has it"
        super().begin(id, node)

    def order(self, order: orders.Order) -> None:
        assert not (order.verb.raises and order.node in self.leaving), f"{order} onto a node that is to be empty"
        super().order(order)
        missing = self.kept - self.served()
        assert not missing, f"{self.now}: {order.why}: nobody serves {missing}"


def settled(seed: int, models: list[KnownModel], nodes: int, pool: int, trouble: float = 0.0) -> EmptyingWorld:
    """All models were asked for, and stand where they are to."""
    world = EmptyingWorld(seed, models, nodes, pool, trouble)
    for name in world.models:
        world.later(0.1, "ask", name)
    world.run(45.0)
    return world


def drawn(seed: int) -> tuple[list[KnownModel], int, int]:
    rng = random.Random(seed)
    models = [known(name, rng.randint(5, 40), rng.randint(1, 15), shards=rng.choice((1, 1, 1, 1, 2)))
              for name in "abcdefgh"[: rng.randint(1, 6)]]  # fmt: skip
    return models, rng.randint(2, 5), rng.choice((60, 100, 150))


@pytest.mark.parametrize("seed", range(25))
def test_an_emptied_node_holds_nothing_and_what_was_served_is_served_all_the_time(seed: int) -> None:
    """Requests come all the while; undone, the node is of use again."""
    world = settled(seed, *drawn(seed))
    rng = random.Random(seed + 500)
    world.kept = world.served()
    at_s = world.now
    for _ in range(120):
        at_s += rng.expovariate(4.0)
        world.later(at_s - world.now, "ask", rng.choice(sorted(world.kept)))
    node = rng.choice(sorted(world.nodes))
    if not world.assign(node, Duty.DRAIN).accepted:
        assert "no other node" in world.answers[-1].why or "other nodes" in world.answers[-1].why
        return
    world.run(at_s + 60.0)
    assert world.up(node) == [], world.said[-5:]
    assert any(f"{node}: it is empty" in why for _, why in world.said)
    assert world.assign(node, Duty.DRAIN).why == f"{node} is empty: it can be stopped"
    assert world.kept <= world.served() and not world.waiting and not world.refused
    world.lose(node)
    assert world.kept <= world.served()


@pytest.mark.parametrize("seed", range(25))
def test_orders_that_fail_and_nodes_that_die_meanwhile_are_made_up_for(seed: int) -> None:
    """In the end the node is empty, or still serves what nobody else has room for; every request has ended."""
    world = settled(seed, *drawn(seed), trouble=0.2)
    rng = random.Random(seed + 900)
    at_s = 0.0
    for _ in range(60):
        at_s += rng.expovariate(3.0)
        world.later(at_s, "ask", rng.choice(list(world.models)))
    node = rng.choice(sorted(world.nodes))
    world.back_s = None
    world.later(rng.uniform(0.0, 3.0), "lose")
    world.later(rng.uniform(0.0, 3.0), "crash")
    world.later(rng.uniform(0.0, 1.0), "assign", (node, rng.choice((Duty.DRAIN, Duty.FORCE))))
    world.run(world.now + at_s + 30.0)
    world.remember()
    world.trouble = 0.0
    world.run(world.now + 120.0)
    asked = {id.rstrip("'") for id in (*world.ended, *world.refused)}
    assert asked == {f"t{n}" for n in range(1, world.tickets + 1)}, f"left: {world.waiting}"
    assert world.now - world.calm_s > 40.0, f"still ordering: {world.said[-5:]}"
    if node in world.nodes and node in world.leaving:
        alone = [m for m in world.up(node) if not set(world.serving(m)) - {node}]
        assert world.up(node) == alone
        if alone:
            assert any(f"{node}: it is to be emptied, and still serves" in why for _, why in world.said)
    world.replay()


@pytest.mark.parametrize("seed", range(10))
def test_half_of_the_nodes_are_emptied_at_once_and_serve_again(seed: int) -> None:
    """Those that cannot all be are refused one by one, the others are; then all is as it was."""
    world = settled(seed, *drawn(seed))
    world.kept = world.served()
    half = sorted(world.nodes)[: len(world.nodes) // 2]
    accepted = [node for node in half if world.assign(node, Duty.DRAIN).accepted]
    world.run(world.now + 60.0)
    for node in accepted:
        assert world.up(node) == [], (node, world.said[-5:])
    for node in half:
        assert world.assign(node, Duty.SERVE).accepted
    assert world.brain.leaving() == ()
    for name in world.models:
        world.later(0.1, "ask", name)
    world.kept = set()  # models that had no room take turns again
    world.run(world.now + 120.0)
    assert not world.waiting


def test_what_has_no_other_place_is_named_and_goes_by_force_alone() -> None:
    world = settled(0, [known("a", 40), known("b", 40)], 2, 60)
    node = world.serving("a")[0]
    other = world.serving("b")[0]
    assert node != other
    answer = world.assign(node, Duty.DRAIN)
    assert not answer.accepted and answer.why.startswith(f"{node} serves a, which no other node has room for")
    world.run(world.now + 5.0)
    assert world.serving("a") == [node] and world.brain.leaving() == ()
    assert world.assign(node, Duty.FORCE).accepted
    world.run(world.now + 5.0)
    assert world.up(node) == [] and world.serving("b") == [other]
    world.ask("a")  # now they take turns on the other
    world.run(world.now + 20.0)
    assert not world.waiting and world.serving("a") == [other]


def test_a_node_that_is_emptied_is_told_no_more_and_says_so_once_it_is_undone() -> None:
    world = settled(0, [known("a", 20), known("b", 20)], 2, 100)
    node = world.serving("a")[0]
    assert world.assign("ghost", Duty.DRAIN).why == "there is no node ghost; there are: n0, n1"
    assert world.assign(node, Duty.DRAIN).accepted
    world.tell(Asked("b", Wish.LOAD, None, node))
    assert not world.answers[-1].accepted and "is being emptied" in world.answers[-1].why
    world.run(world.now + 10.0)
    assert world.up(node) == []
    assert world.assign(node, Duty.SERVE).why == f"{node} serves again: it takes models and requests"
    assert world.assign(node, Duty.SERVE).why == f"{node} serves: it takes models and requests"
    world.tell(Asked("b", Wish.LOAD, None, node))
    assert world.answers[-1].accepted
    world.run(world.now + 5.0)
    assert node in world.serving("b")


@pytest.mark.parametrize("after_s", [0.01, 0.3, 1.0, 2.0])
def test_undone_halfway_every_model_is_served_all_the_time(after_s: float) -> None:
    world = settled(0, [known("a", 20), known("b", 20)], 2, 100)
    node = world.serving("a")[0]
    world.kept = {"a", "b"}
    assert world.assign(node, Duty.DRAIN).accepted
    until_s = world.now + after_s
    while world.now < until_s:
        world.ask("a")
        world.run(world.now + 0.05)
    assert world.assign(node, Duty.SERVE).accepted and world.brain.leaving() == ()
    world.run(world.now + 30.0)
    assert not world.waiting and not world.refused


def test_a_pin_goes_with_its_model() -> None:
    world = settled(0, [known("a", 20), known("b", 20)], 2, 100)
    node = world.serving("a")[0]
    world.tell(Asked("a", Wish.PIN, None, node))
    world.assign(node, Duty.DRAIN)
    world.run(world.now + 10.0)
    (other,) = world.serving("a")
    assert other != node and world.brain.standing(other, "a").pinned


def test_the_only_node_is_not_emptied() -> None:
    world = settled(0, [known("a", 20)], 1, 100)
    for duty in (Duty.DRAIN, Duty.FORCE):
        assert "it is the only node" in world.assign("n0", duty).why and not world.answers[-1].accepted
    assert world.serving("a") == ["n0"]


def test_the_next_leader_empties_a_node_further_that_says_it_is_being_emptied() -> None:
    """It begins with what nodes say: where models are, and their duty."""
    world = settled(0, [known("a", 20), known("b", 20)], 3, 100)
    node = world.serving("a")[0]
    world.brain = Brain(world.settings, term=2)
    for one in world.nodes.values():
        duty = Duty.DRAIN if one.name == node else Duty.SERVE
        world.tell(orders.Joined(one.name, one.pool, one.host, tuple(world.models.values()), {}, *one.place, duty))
        world.report(one.name)
    assert world.brain.leaving() == (node,)
    world.leaving, world.kept = {node}, {"a", "b"}
    world.run(world.now + 10.0)
    assert world.up(node) == [] and world.kept <= world.served()


def rooms_of(pools: list[int], models: list[KnownModel], up: list[list[str]]) -> list[Room]:
    rooms = []
    for i, (pool, there) in enumerate(zip(pools, up, strict=True)):
        beliefs = tuple(Belief.of(one, 0.0) for one in models)
        for belief in beliefs:
            belief.stage = Stage.ACTIVE if belief.known.model in there else Stage.COLD
        memory = RoomMemory(node=f"n{i}", pool_pages=pool, host_bytes=0, models=beliefs)
        rooms.append(Room(BrainSettings(), memory, lambda *_: pytest.fail("nothing is ordered here")))
    return rooms


def fits(room: Room, names: set[str]) -> bool:
    return pages_needed([room.models[name] for name in names]) <= room.pool_pages


def most_places(models: list[str], rooms: list[Room], up: list[list[str]]) -> int:
    """By trying everything: how many models can be brought up, each on a node that lacks it, with all that is up there
    still up somewhere."""
    best = 0
    held = {name for there in up for name in there}
    for homes in itertools.product([None, *range(len(rooms))], repeat=len(models)):
        placed = sum(home is not None for home in homes)
        if placed <= best or any(h is not None and name in up[h] for name, h in zip(models, homes, strict=True)):
            continue
        come = [{name for name, h in zip(models, homes, strict=True) if h == i} for i in range(len(rooms))]
        kept = [[set(c) for n in range(len(there) + 1) for c in itertools.combinations(there, n)] for there in up]
        for stay in itertools.product(*kept):
            if set().union(*stay) == held and all(map(fits, rooms, [a | b for a, b in zip(stay, come, strict=True)])):
                best = placed
                break
    return best


@pytest.mark.parametrize("seed", range(100))
def test_a_place_is_found_wherever_there_is_one(seed: int) -> None:
    """Against all possibilities, in small worlds; what gives way is up elsewhere, and all fits together."""
    rng = random.Random(seed)
    names = list("abcdef")[: rng.randint(2, 6)]
    models = [known(n, rng.randint(5, 30), rng.randint(1, 10), floor_pages=rng.choice((0, 2))) for n in names]
    leaving = [n for n in names if rng.random() < 0.6][:3] or ["a"]
    others = [n for n in names if n not in leaving]
    rooms: list[Room] = []
    while not rooms:
        pools = [rng.choice((25, 40, 60, 90)) for _ in range(rng.randint(1, 3))]
        up = [[n for n in others if rng.random() < 0.6] for _ in pools]
        drawn_rooms = rooms_of(pools, models, up)
        rooms = drawn_rooms if all(map(fits, drawn_rooms, map(set, up))) else []
    found = refuge(leaving, rooms, 0.0)
    assert len(found) == most_places(leaving, rooms, up), (pools, up, found)
    stay = [set(there) for there in up]
    for name, home in found.items():
        for other, at in home.instead_of:
            stay[int(at[1:])].remove(other)
        for node in home.nodes:
            stay[int(node[1:])].add(name)
    assert all(map(fits, rooms, stay))
    assert {n for there in up for n in there} | set(found) == set().union(*stay)


def test_who_could_give_way_is_not_tried_in_all_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty models that are on both nodes: of what could give way there are a million choices on each."""
    tried, fits_in = list[str](), _Search._fits
    monkeypatch.setattr(_Search, "_fits", lambda self, *what: tried.append(what[0]) or fits_in(self, *what))

    def homes(pages: int, *longest: int) -> dict[str, Home]:
        tried.clear()
        spare = [known(f"s{i:02}", 5, tokens) for i, tokens in enumerate(longest or [10] * 20)]
        there = [[one.model for one in spare]] * 2
        return refuge(["big"], rooms_of([120, 120], [*spare, known("big", pages)], there), 0.0)

    assert homes(500) == {} and len(tried) < 20  # not even all of them make room
    for pages, gone in ((25, 3), (60, 10), (110, 20)):
        assert len(homes(pages)["big"].instead_of) == gone and len(tried) < 100
    # Which of them can stay depends on how long their sequences are, and those that can are tried last.
    homes(60, *[10] * 10, *[60] * 10)
    assert len(tried) < 5000


def test_a_replica_that_has_another_gives_way() -> None:
    """a is on both other nodes: one of them is enough, where b has no other place."""
    world = settled(0, [known("a", 40), known("b", 40)], 3, 60)
    node = world.serving("b")[0]
    for other in set(world.nodes) - {node}:
        world.tell(Asked("a", Wish.LOAD, None, other))
    while len(world.serving("a")) < 2:
        world.run(world.now + 0.01)
    world.kept = {"a", "b"}
    assert world.assign(node, Duty.DRAIN).accepted
    world.run(world.now + 20.0)
    assert world.up(node) == [] and len(world.serving("b")) == 1 and len(world.serving("a")) == 1
    assert any(order.startswith(Verb.SLEEP.value) and "a@" in order for _, order in world.said)


def test_while_no_other_node_is_known_nobody_is_refused() -> None:
    """The first that a new leader hears of may be the one that is to be empty."""
    world = settled(0, [known("a", 20)], 1, 100)
    world.brain = Brain(world.settings, term=2)
    node = world.nodes.pop("n0")
    world.tell(orders.Joined("n0", 100, 0, tuple(world.models.values()), {}, "h0", "d0", Duty.DRAIN))
    world.ask("a")
    world.run(world.now + 0.9)
    assert not world.refused
    world.leaving = {"n0"}
    world.nodes["n0"] = type(node)("n0", 100, 0, ["a"], ("h0", "d0"))
    world.join(type(node)("n1", 100, 0, ["a"], ("h1", "d0")))
    world.run(world.now + 10.0)
    assert not world.waiting and not world.refused and world.serving("a") == ["n1"]


def test_what_took_its_place_is_gone_before_it_went_and_it_serves_again() -> None:
    """Its weights are still there: nobody waits for a copy."""
    world = settled(0, [known("a", 20)], 2, 100)
    world.back_s = None
    node = world.serving("a")[0]
    assert world.assign(node, Duty.DRAIN).accepted
    while not world.nodes[node].held["a"]:
        world.ask("a")
        world.run(world.now + 0.02)
    assert world.nodes[node].running["a"] and "a" not in world.nodes[node].order
    world.lose(next(other for other in world.nodes if other != node))
    assert world.serving("a") == [node] and not world.nodes[node].held["a"]


def test_a_model_that_not_every_node_has_goes_to_one_that_does() -> None:
    """The fleet leaves such models alone; the weights are copied from the node that is emptied."""
    a, b = known("a", 20), known("b", 20)
    brain, now = Brain(BrainSettings()), 0.0
    for node, models in (("n0", (a, b)), ("n1", (b,)), ("n2", (a, b))):
        brain.on(orders.Joined(node, 100, 0, models), now)
        brain.on(orders.Report(node, {"a": orders.Busy(0, 0, 1.0)} if node == "n0" else {}), now)
    assert brain.serving("a") == ("n0",)
    actions = brain.on(Assigned("n0", Duty.DRAIN), now + 2.0)
    (fork,) = [action for action in actions if isinstance(action, orders.Order) and action.model == "a"]
    assert (fork.verb, fork.node, fork.source) == (Verb.FORK, "n2", "n0") and brain.serving("a") == ("n0",)
    actions = brain.on(orders.Done(fork.id, Stage.ACTIVE, False, 0.1), 2.2)
    (sleep,) = [action for action in actions if isinstance(action, orders.Order) and action.model == "a"]
    assert (sleep.verb.lowers, sleep.node) == (True, "n0") and brain.serving("a") == ("n2",)


def of(world: EmptyingWorld, node: str, **more: Any) -> orders.Joined:
    """What a node says of itself."""
    one = world.nodes[node]
    return orders.Joined(one.name, one.pool, one.host, tuple(world.models.values()), {}, *one.place, **more)


def test_what_a_node_was_told_while_it_heard_nothing_holds_when_it_is_back() -> None:
    """The later wish, whoever remembers it; a process that was started anew serves."""
    world = settled(0, [known("a", 20), known("b", 20)], 3, 100)
    world.tell(of(world, "n0", process="p"))
    assert world.assign("n0", Duty.DRAIN).accepted
    drained = world.brain.charges()["n0"]
    world.tell(orders.Left("n0"))
    assert world.brain.leaving() == () == tuple(world.brain.charges())
    again = Brain(world.settings, memory=world.brain.memory())
    world.tell(of(world, "n0", process="p"))
    again.on(of(world, "n0", process="p"), world.now)
    assert world.brain.leaving() == ("n0",) == again.leaving() and world.brain.charges() == {"n0": drained}
    assert world.assign("n0", Duty.SERVE).accepted and world.brain.charges()["n0"].since > drained.since
    world.tell(orders.Left("n0"))
    world.tell(of(world, "n0", process="p", duty=drained.duty, since=drained.since))
    assert world.brain.leaving() == ()
    world.tell(of(world, "n0", process="p", duty=Duty.FORCE, since=(9, 1)))  # by a leader since
    assert world.brain.leaving() == ("n0",)
    assert world.assign("n0", Duty.SERVE).accepted and world.brain.charges()["n0"].since == (9, 2)
    world.tell(orders.Left("n0"))
    for duty, leaving in ((Duty.DRAIN, ("n0",)), (Duty.SERVE, ())):  # wished while it is gone
        assert world.assign("n0", duty).why.startswith("n0 is gone just now: it ")
        world.tell(of(world, "n0", process="p", duty=Duty.FORCE, since=(9, 1)))
        assert world.brain.leaving() == leaving
        world.tell(orders.Left("n0"))
    world.tell(of(world, "n0", process="p"))
    assert world.assign("n0", Duty.DRAIN).accepted
    world.tell(orders.Left("n0"))
    world.tell(of(world, "n0", process="q"))
    assert world.brain.leaving() == ()


def test_the_next_leader_knows_of_force_and_waits_for_those_who_may_have_room() -> None:
    world = settled(0, [known("a", 40), known("b", 40)], 2, 60)
    node, other = world.serving("a")[0], world.serving("b")[0]
    assert world.assign(node, Duty.FORCE).accepted
    charge = world.brain.charges()[node]
    assert (charge.duty, charge.since) == (Duty.FORCE, (1, 1))
    brain = Brain(world.settings, term=2)
    idle = orders.Busy(0, 0, 1.0)
    told = [(of(world, node, duty=charge.duty, since=charge.since), 0.0), (orders.Report(node, {"a": idle}), 0.0),
            (orders.Tick(), 0.5), (of(world, other), 0.5), (orders.Report(other, {"b": idle}), 0.5)]  # fmt: skip
    heard = [brain.on(event, now) for event, now in told]
    assert [action for actions in heard for action in actions if isinstance(action, orders.Order)] == []
    due_s = brain.next_wake(1.0)
    assert due_s is not None and due_s <= 1.5
    (sleep,) = [action for action in brain.on(orders.Tick(), 1.5) if isinstance(action, orders.Order)]
    assert (sleep.node, sleep.model, sleep.verb.lowers) == (node, "a", True)


def test_nobody_says_that_a_node_is_empty_before_it_has_said_what_is_there() -> None:
    world = settled(0, [known("a", 20)], 2, 100)
    brain = Brain(world.settings, term=2)
    brain.on(of(world, "n0", duty=Duty.DRAIN, since=(1, 1)), 0.0)
    brain.on(of(world, "n1"), 0.0)
    brain.on(orders.Report("n1", {}), 0.0)
    said = brain.on(orders.Tick(), 5.0)
    assert not [action for action in said if isinstance(action, orders.Decided) and "is empty" in action.why]
    (answer,) = [one for one in brain.on(Assigned("n0", Duty.DRAIN), 5.0) if isinstance(one, Answer)]
    assert answer.why.startswith("n0 is being emptied")
    said = brain.on(orders.Report("n0", {}), 5.0)
    assert [action.why for action in said if isinstance(action, orders.Decided)] == [
        "n0: it is empty: it can be stopped"
    ]


def test_where_all_nodes_are_emptied_who_comes_is_sent_away_at_once() -> None:
    world = settled(0, [known("a", 20)], 2, 100)
    for node in ("n0", "n1"):
        assert world.assign(node, Duty.FORCE).accepted
    world.run(world.now + 5.0)
    assert world.up("n0") == world.up("n1") == []
    refused = [action for action in world.brain.on(orders.Wanted("a"), world.now) if isinstance(action, orders.Refuse)]
    assert [(one.model, one.why) for one in refused] == [("a", NOBODY)] and refused[0].retry_after_s
    world.ask("a")
    world.run(world.now + 1.0)
    assert world.refused and not world.waiting
    world.leaving.discard("n1")
    assert world.assign("n1", Duty.SERVE).accepted
    world.ask("a")
    world.run(world.now + 10.0)
    assert world.serving("a") == ["n1"] and not world.waiting


def test_a_node_is_not_ready_where_all_are_emptied_and_nothing_is_served() -> None:
    drained, here = Charge(Duty.FORCE, (1, 1)), SimpleNamespace(_table=None)
    both = {"n0": drained, "n1": drained}
    cases: list[tuple[dict[str, Charge], dict[str, tuple[str, ...]], str | None]] = [
        (both, {"a": ()}, NOBODY), ({"n0": drained}, {"a": ()}, None), (both, {"a": ("n1",)}, None),
    ]  # fmt: skip
    for charges, routes, why in cases:
        assert Member.emptied(here) is None  # type: ignore[arg-type]
        here._table = Table(1, routes, ("n0", "n1"), charges)
        assert Member.emptied(here) == why  # type: ignore[arg-type]
        here._table = None
