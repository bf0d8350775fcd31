"""What the Brain over many nodes decides: transcripts, what holds in any world, and input that makes no sense."""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec
import pytest
from fleet_nonsense import Nonsense
from fleet_reader import read
from fleet_world import FleetWorld
from test_fleet import known, some_world

from janus_server.orders import (
    Action,
    Answer,
    Asked,
    Busy,
    Counted,
    Counts,
    Decided,
    Done,
    Event,
    Failed,
    Joined,
    KnownModel,
    Left,
    Lost,
    Order,
    Refuse,
    Report,
    Stage,
    Tick,
    Ticket,
    Traffic,
    Verb,
    Wanted,
    Wish,
)
from janus_server.sched.brain import Brain
from janus_server.sched.state import BrainSettings, Memory

HERE = Path(__file__).parent / "transcripts"


@pytest.mark.parametrize("path", sorted(HERE.glob("fleet*.txt")), ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    written, played = read(path)
    assert played == written


def test_there_are_transcripts() -> None:
    stories = {"burst", "oracle", "loss", "idle", "shards", "nowhere", "turns"}
    assert {f"fleet_{story}" for story in stories} <= {path.stem for path in HERE.glob("fleet*.txt")}


# What holds in any world


class Watched(FleetWorld):
    """Notes when a model that served has no replica left that takes requests."""

    def watch(self) -> None:
        self.served: set[str] = set()
        self.gaps: list[tuple[float, str]] = []

    def _small(self, model: object) -> None:
        self.ask(str(model), 240, 0.005)

    def tell(self, event: Event) -> None:
        super().tell(event)
        if hasattr(self, "served"):
            up = {model for model in self.models if self.serving(model)}
            self.gaps += [(self.now, model) for model in sorted(self.served - up)]
            self.served |= up


def roomy(seed: int, nodes: int, models: int) -> Watched:
    """More room than the models need: there is always a node to move to."""
    rng = random.Random(seed)
    catalogue = [known(name, rng.randint(10, 25), rng.randint(1, 10), floor_pages=rng.choice((0, 3)),
                       shards=rng.choice((1, 1, 1, 2))) for name in "abcdefgh"[:models]]  # fmt: skip
    world = Watched(seed, catalogue, nodes, 150, settings=BrainSettings(refit_every_s=None))
    world.watch()
    return world


@pytest.mark.parametrize("seed", range(8))
def test_what_moves_is_served_all_the_while(seed: int) -> None:
    """Make before break: models burst and calm down, share nodes, get nodes of their own and come back."""
    rng = random.Random(seed)
    world = roomy(seed, 7, rng.randint(2, 5))
    at_s = 0.0
    while at_s < 200.0:
        hot = rng.choice(list(world.models))
        calm_s = at_s + rng.uniform(5.0, 40.0)
        while at_s < calm_s:
            at_s += rng.expovariate(12.0)
            world.later(at_s, "ask", hot if rng.random() < 0.8 else rng.choice(list(world.models)))
    world.run(at_s + 120.0)
    assert world.gaps == []
    assert any("to elastic" in why for _, why in world.said), "nothing burst"
    assert len(world.ended) == world.tickets


@pytest.mark.parametrize("seed", range(3))
def test_constant_traffic_comes_to_rest(seed: int) -> None:
    """Poisson arrivals: what the table says is the same within four standard deviations of what 3 s are a mean of."""
    rng = random.Random(seed)
    world = roomy(seed, 8, 4)
    rates = [25.0, *(rng.uniform(1.0, 6.0) for _ in range(3))]
    at_s = 0.0
    while at_s < 150.0:
        at_s += rng.expovariate(sum(rates))
        world.later(at_s, "small", rng.choices(list(world.models), rates)[0])
    world.run(62.0)
    told = len(world.said)
    world.run(150.0)
    assert world.calm_s <= 62.0, world.said[told:]
    assert len(world.serving("a")) == 2


@pytest.mark.parametrize("seed", range(6))
def test_another_brain_goes_on_from_any_moment(seed: int) -> None:
    """The memory, written to JSON and read back, leads to the same actions, whatever was under way."""
    world = some_world(seed)
    rng = random.Random(seed)
    at_s = 0.0
    for _ in range(50):
        at_s += rng.expovariate(3.0)
        world.later(at_s, "ask", rng.choice(list(world.models)))
    world.later(at_s / 2, "lose")
    snapshots = []
    for moment in range(10):
        world.run(at_s * moment / 6)
        world.remember()
        snapshots.append(world.snapshot)
    world.run(at_s * 2)
    for world.snapshot in snapshots:
        world.replay()


@pytest.mark.parametrize("seed", range(8))
def test_what_a_lost_node_had_is_up_elsewhere_within_seconds(seed: int) -> None:
    rng = random.Random(seed)
    world = roomy(seed, 6, 5)
    world.back_s = None
    for n in range(600):
        world.later(n / 10, "small", rng.choice(list(world.models)))
    world.run(30.0)
    up = {model for model in world.models if world.serving(model)}
    assert up == set(world.models)
    world.lose(rng.choice(sorted({node for model in up for node in world.serving(model)})))
    world.run(36.0)
    assert {model for model in world.models if world.serving(model)} == up
    world.run(70.0)
    assert {id.rstrip("'") for id in world.ended} == {f"t{n}" for n in range(1, world.tickets + 1)}


# Input that makes no sense


def play(brain: Brain, *events: Event, now: float = 0.0, done: bool = True) -> list[Action]:
    """Tell it, and do at once what it orders, unless done is False."""
    out: list[Action] = []
    todo = list(events)
    while todo:
        actions = brain.on(todo.pop(0), now)
        out += actions
        for action in actions if done else ():
            if isinstance(action, Order) and action.verb.ends:
                todo.append(Done(action.id, Stage.ACTIVE if action.verb.raises else Stage.COLD, False, 0.1))
    return out


def join(brain: Brain, *models: KnownModel, nodes: int = 3, pool: int = 100, now: float = 0.0, done: bool = True
         ) -> list[Action]:  # fmt: skip
    events = [Joined(f"n{i}", pool, 10**6, models, {}, "h", "d") for i in range(nodes)]
    return play(brain, *events, now=now, done=done)


def rest(brain: Brain, now: float, until_s: float, done: bool = True) -> list[Action]:
    """Let time pass until then."""
    out: list[Action] = []
    for _ in range(2000):
        due_s = brain.next_wake(now)
        if due_s is None or due_s > until_s:
            return out
        now = max(now, due_s)
        out += play(brain, Tick(), now=now, done=done)
    raise AssertionError(f"it never rests: {out[-3:]}")


def orders(actions: list[Action]) -> list[Order]:
    return [action for action in actions if isinstance(action, Order)]


def ask(model: str, id: str = "t", now: float = 0.0) -> Traffic:
    return Traffic((Ticket(id=id, model=model, prompt_tokens=10, work_s=0.01, arrived_s=now, ttft_s=1e-3),))


def sentences(actions: list[Action]) -> str:
    return "\n".join(action.why for action in actions if not isinstance(action, Answer))


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_model_larger_than_any_node_is_refused_with_the_reason(nodes: int) -> None:
    brain = Brain(BrainSettings())
    join(brain, known("huge", 200), nodes=nodes)
    got = play(brain, ask("huge"), Wanted("huge")) + rest(brain, 0.0, 5.0)
    refusals = [action for action in got if isinstance(action, Refuse)]
    assert refusals and refusals[0].retry_after_s is None
    assert "needs 210 pages" in refusals[0].why and "100 in all" in refusals[0].why
    assert not any(isinstance(action, Order) for action in got)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_model_of_more_shards_than_nodes_is_refused_for_now(nodes: int) -> None:
    brain = Brain(BrainSettings())
    join(brain, known("wide", 10, shards=3), nodes=nodes)
    got = play(brain, ask("wide"), Wanted("wide")) + rest(brain, 0.0, 5.0)
    refusal = next(action for action in got if isinstance(action, Refuse))
    assert refusal.why == f"it takes 3 nodes that have it, and there are {nodes}" and refusal.retry_after_s == 30.0
    answer = brain.on(Asked("wide", Wish.LOAD), 6.0)[0]
    assert isinstance(answer, Answer) and not answer.accepted and "takes 3 nodes" in answer.why


def test_an_operator_loads_all_shards() -> None:
    brain = Brain(BrainSettings())
    join(brain, known("wide", 10, shards=2, idle_s=1.0), nodes=3)
    rest(brain, 0.0, 10.0)
    calm = {"wide": Busy(0, 0, 5.0)}
    play(brain, Report("n0", calm), Report("n1", calm), Asked("wide", Wish.EVICT), now=10.0)
    rest(brain, 10.0, 29.0)
    assert set(brain.stages("n0").values()) == {Stage.COLD}
    got = orders(brain.on(Asked("wide", Wish.LOAD), 29.0))
    assert [order.verb for order in got] == [Verb.LOAD, Verb.LOAD]
    assert {order.replica for order in got} == {tuple(order.node for order in got)}


def _up(brain: Brain, model: str) -> list[str]:
    return [f"n{i}" for i in range(3) if brain.stages(f"n{i}")[model] is Stage.ACTIVE]


def _nothing_runs(brain: Brain, model: str, now: float) -> None:
    for node in _up(brain, model):
        play(brain, Report(node, {model: Busy(0, 0, 1.0)}), now=now)


def test_an_operators_load_takes_back_the_sleep_before_it() -> None:
    brain = Brain(BrainSettings())
    join(brain, known("a"))
    rest(brain, 0.0, 40.0)
    _nothing_runs(brain, "a", 40.0)
    play(brain, Asked("a", Wish.SLEEP), now=41.0)
    rest(brain, 41.0, 100.0)
    assert _up(brain, "a") == []
    play(brain, Asked("a", Wish.LOAD), now=101.0)
    rest(brain, 101.0, 200.0)
    assert len(_up(brain, "a")) == 1


def test_what_sleeps_on_the_node_that_was_named_stays_asleep_there() -> None:
    brain = Brain(BrainSettings())
    join(brain, known("a"))
    rest(brain, 0.0, 40.0)
    _nothing_runs(brain, "a", 40.0)
    [node] = _up(brain, "a")
    play(brain, Asked("a", Wish.SLEEP, node=node), now=41.0)
    rest(brain, 41.0, 100.0)
    assert _up(brain, "a") == []


def test_a_load_of_an_idle_model_begins_its_time_anew_and_it_sleeps_when_that_is_over() -> None:
    brain = Brain(BrainSettings())
    join(brain, known("a", idle_s=20.0))
    rest(brain, 0.0, 15.0)
    _nothing_runs(brain, "a", 15.0)
    play(brain, Asked("a", Wish.LOAD), now=15.0)
    rest(brain, 15.0, 30.0)
    assert len(_up(brain, "a")) == 1
    rest(brain, 30.0, 36.5)
    assert _up(brain, "a") == []


def test_who_still_writes_a_long_answer_is_not_idle() -> None:
    brain = Brain(BrainSettings())
    join(brain, known("a", idle_s=5.0))
    rest(brain, 0.0, 1.0)
    [node] = _up(brain, "a")
    said: list[Action] = []
    for at_s in range(2, 40):
        said += play(brain, Report(node, {"a": Busy(1, 0, float(at_s))}), now=float(at_s))
        said += rest(brain, float(at_s), at_s + 0.9)
    assert orders(said) == [] and _up(brain, "a") == [node]


def test_requests_for_what_no_node_has_are_refused_and_wait_where_there_is_no_node() -> None:
    brain = Brain(BrainSettings())
    assert play(brain, ask("a"), Wanted("a")) == []
    got = join(brain, known("a"), nodes=1)
    assert [action.verb for action in got if isinstance(action, Order)] == [Verb.LOAD]
    got = play(brain, ask("ghost", "t2"))
    assert [action for action in got if isinstance(action, Refuse)] == [Refuse("ghost", "no node has it", None)]


def test_all_nodes_leave_and_come_back() -> None:
    brain = Brain(BrainSettings())
    join(brain, known("a"))
    rest(brain, 0.0, 5.0)
    play(brain, Left("n0"), Left("n1"), Left("n2"), ask("a", now=6.0), Wanted("a"), now=6.0)
    assert rest(brain, 6.0, 3600.0) == []
    got = join(brain, known("a"), now=4000.0)
    loads = [action for action in got if isinstance(action, Order) and action.verb is Verb.LOAD]
    assert len(loads) == 1


def test_a_node_that_joins_again_has_nothing_of_what_it_had() -> None:
    brain = Brain(BrainSettings())
    load = orders(join(brain, known("a"), nodes=2, done=False))[0]
    again = brain.on(Joined(load.node, 55, 10**6, (known("a"),), {}, "h", "d"), 1.0)
    assert play(brain, Done(load.id, Stage.ACTIVE, False, 1.0), now=1.0) == []
    assert brain.stages(load.node) == {"a": Stage.COLD}
    assert any(isinstance(action, Order) and action.verb is Verb.LOAD for action in again + rest(brain, 1.0, 3.0))


def test_a_model_that_only_some_nodes_have_is_brought_up_there() -> None:
    brain = Brain(BrainSettings())
    play(brain, Joined("n0", 100, 10**6, (known("a"),)), Joined("n1", 100, 10**6, (known("a"), known("b"))),
         Joined("n2", 100, 10**6, (known("b"), known("a", 50))))  # fmt: skip
    said = sentences(rest(brain, 0.0, 5.0))
    assert "b: 2 of 3 nodes have it: it is brought up there on demand alone" in said
    (order,) = orders(play(brain, ask("b"), Wanted("b"), now=5.0))
    assert (order.model, order.verb) == ("b", Verb.LOAD) and order.node in ("n1", "n2")
    got = rest(brain, 5.0, 200.0)
    assert not any(order.model == "b" for order in orders(got)), "it was moved"


def test_a_small_node_beside_large_ones_does_not_stop_models_from_sharing_those() -> None:
    brain = Brain(BrainSettings())
    play(brain, *(Joined(f"n{i}", 0 if i == 1 else 100, 10**6, (known("a", 30), known("b", 30))) for i in range(3)))
    rest(brain, 0.0, 2.0)
    up = [(node, model) for node in ("n0", "n1", "n2") for model, stage in brain.stages(node).items()
          if stage is Stage.ACTIVE]  # fmt: skip
    assert [model for _, model in up] == ["a", "b"] and len({node for node, _ in up}) == 1


def test_a_model_that_fits_alone_and_not_beside_the_longest_of_another_is_not_shoved_about() -> None:
    """The other's longest sequence is as long as 60 pages: what is kept for that must not drive the first one out."""
    brain = Brain(BrainSettings())
    got = join(brain, known("a", 50, 10), known("long", 10, 70, idle_s=1.0), nodes=3)
    got += rest(brain, 0.0, 1.0)
    got += play(brain, ask("a", now=1.0), now=1.0) + rest(brain, 1.0, 300.0)
    assert sum(order.model == "a" for order in orders(got)) == 1, sentences(got)


def test_a_broken_node_is_left_for_another() -> None:
    """Its checkpoint cannot be read on one node: another one takes it, well before that is tried anew."""
    brain = Brain(BrainSettings())
    load = orders(join(brain, known("a"), nodes=2, done=False))[0]
    failed = Failed(load.id, Stage.COLD, False, "no such file", lasting=True)
    got = play(brain, ask("a", now=1.0), Wanted("a"), failed, now=1.0, done=False)
    assert not any(isinstance(action, Refuse) for action in got)
    other = orders(rest(brain, 1.0, 8.0, done=False))[0]
    assert other.verb is Verb.LOAD and other.node != load.node
    got = play(brain, Failed(other.id, Stage.COLD, False, "no such file", lasting=True), now=8.0, done=False)
    assert Refuse("a", "no such file", 30.0) in got or Refuse("a", "no such file", None) in got, "both are broken"


def test_a_clock_that_jumps_stops_nothing() -> None:
    brain = Brain(BrainSettings())
    join(brain, known("a"), known("b", idle_s=5.0), now=7200.0)
    rest(brain, 7200.0, 7205.0)
    said = play(brain, Tick(), now=100.0)
    assert next(action for action in said if isinstance(action, Decided)).why.startswith("clock: it went back by 7")
    for back_s in (100.0, 3.0, 9000.0, 50.0, -1e6, 1e7):
        play(brain, Tick(), now=back_s)
        due_s = brain.next_wake(back_s)
        assert due_s is not None and due_s - back_s < 31.0
        rest(brain, back_s, back_s + 35.0)
        got = play(brain, ask("b", f"t{back_s}", back_s), Wanted("b"), now=back_s + 36.0)
        got += rest(brain, back_s + 36.0, back_s + 40.0)
        assert any(action.requests == (f"t{back_s}",) for action in got if hasattr(action, "requests")), back_s


def test_numbers_that_are_none_are_left_out_and_said_once() -> None:
    brain = Brain(BrainSettings())
    join(brain, known("a"))
    bad = Counted({"a": Counts(math.nan, -1)})  # type: ignore[arg-type]
    first = [action for _ in range(5) for action in brain.on(bad, 1.0)]
    assert [action.why for action in first] == ["a: its counts are left out: they are no numbers"]
    busy = Report("n0", {"a": Busy(-3, 0, math.nan)})
    assert "no number" in sentences(play(brain, busy, busy, now=1.5))
    assert msgspec.json.decode(msgspec.json.encode(brain.memory()), type=Memory) is not None


def test_counts_that_fall_are_a_count_begun_anew() -> None:
    brain = Brain(BrainSettings(refit_every_s=None))
    join(brain, known("a"))
    rest(brain, 0.0, 5.0)
    for n in range(40):
        play(brain, Counted({"a": Counts(10**6 if n % 2 else 0, 0)}), now=5.0 + n)
    assert not any(isinstance(action, Order) for action in rest(brain, 45.0, 100.0))


def test_what_is_noted_is_forgotten_when_it_is_over() -> None:
    brain = Brain(BrainSettings())
    join(brain, *(known(f"m{i}", 200) for i in range(30)))
    rest(brain, 0.0, 1.0)
    assert len(brain.memory().fleet.noted) == 30
    for i in range(3):
        play(brain, Left(f"n{i}"), now=2.0)
    join(brain, known("a"), now=3.0)
    rest(brain, 3.0, 400.0)
    assert not any(said.startswith("m") for said in brain.memory().fleet.noted)


def test_a_hundred_models_on_two_nodes_rest() -> None:
    brain = Brain(BrainSettings())
    got = join(brain, *(known(f"m{i:02}", 12, 3) for i in range(100)), nodes=2)
    got += rest(brain, 0.0, 300.0)
    assert 8 <= len(orders(got)) <= 40


@pytest.mark.parametrize("seed", range(24))
def test_no_sequence_of_events_stops_it(seed: int) -> None:
    """Half of the worlds have a clock that jumps by hours. What is remembered stays small, and another one goes on."""
    nonsense, rng = Nonsense(seed), random.Random(seed)
    settings = BrainSettings()
    brain, other, now = Brain(settings), None, 0.0
    for n in range(200):
        now += rng.expovariate(1.0) * rng.choice((0.01, 0.5, 5.0))
        if seed % 2 and rng.random() < 0.03:
            now += rng.choice((-7200.0, -3600.0, 3600.0, 7200.0, -1.0, 1e7))
        event = nonsense.event(now)
        actions = brain.on(event, now)
        if other is not None:
            assert other.on(event, now) == actions
        nonsense.orders += [action.id for action in actions if isinstance(action, Order)]
        due_s = brain.next_wake(now)
        assert due_s is None or math.isfinite(due_s)
        if n % 50 == 25:
            other = Brain(settings, memory=msgspec.json.decode(msgspec.json.encode(brain.memory()), type=Memory))
    for _ in range(3000):
        due_s = brain.next_wake(now)
        if due_s is None or due_s > now + 60.0:
            break
        now = max(now, due_s)
        brain.on(Tick(), now)
        later_s = brain.next_wake(now)
        assert later_s is None or later_s > now, "the same moment is due again"
    fleet = brain.memory().fleet
    assert len(fleet.noted) < 400 and len(fleet.gauges) <= 6 and set(fleet.called) <= set("abcdef")


@pytest.mark.parametrize(("late_every", "moves"), [(20, False), (2, True)])
def test_a_shared_model_of_which_many_are_late_gets_more_though_none_waits(late_every: int, moves: bool) -> None:
    brain = Brain(BrainSettings())
    join(brain, known("a", attain=0.9), known("b", attain=0.9))
    got, now = rest(brain, 0.0, 40.0), 40.0
    for ended in range(1, 24):
        now += 0.5
        counts = Counts(20 * ended, 20 * ended, ended, ended // late_every, requests=ended)
        got += play(brain, Counted({"a": counts}), now=now) + rest(brain, now, now + 0.4)
    assert ("a to elastic: it needs 2 replicas" in sentences(got)) is moves


def test_lost_instances_of_unknown_nodes_and_models_do_nothing() -> None:
    brain = Brain(BrainSettings())
    join(brain, known("a"))
    assert play(brain, Lost("nobody", "a", Stage.COLD, False), Lost("n0", "ghost", Stage.COLD, False),
                Report("nobody", {"a": Busy(1, 0, 0.0)}), Failed(99, Stage.COLD, False, "x")) == []  # fmt: skip
    assert play(brain, Wanted("ghost")) == [Refuse("ghost", "no node has it", None)]
    answer = brain.on(Asked("ghost", Wish.LOAD), 0.0)[0]
    assert isinstance(answer, Answer) and answer.why == "there is no node that has ghost"
