"""Prompts go to where their start is cached: what that may cost the others, and that without caches nothing changes."""

from __future__ import annotations

import heapq
import itertools
import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janus_server.journal import Entry, Heading
from janus_server.orders import (
    Busy,
    Dispatch,
    Done,
    Event,
    Helper,
    Joined,
    KnownModel,
    Left,
    Order,
    Report,
    Stage,
    Ticket,
    Traffic,
)
from janus_server.sched.brain import Brain
from janus_server.sched.dispatch import dispatch_live
from janus_server.sched.dispatcher import Dispatcher
from janus_server.sched.jobs import Job, Machine, Plan
from janus_server.sched.nearer import first_done, nearer
from janus_server.sched.prefixes import Cached, PrefixKey
from janus_server.sched.rules import Rule
from janus_server.sched.state import BrainSettings

Work = dict[str, dict[str, float]]


def _took(work: Work, job: Job, machine: str) -> float:
    return work.get(job.id, {}).get(machine, job.work_s)


def _worth(plan: Plan, work: Work) -> tuple[int, float, dict[str, float]]:
    """How many are on time, the sum of all times of finishing, and when each is done, with what is cached where."""
    on_time, ends = 0, {}
    for lane in plan.lanes:
        end_s = lane.machine.start_s
        for job in lane.queue:
            end_s += _took(work, job, lane.machine.id)
            ends[job.id] = end_s
            on_time += end_s <= job.deadline_s
    return on_time, sum(ends.values()), ends


def _most(jobs: list[Job], machines: list[Machine], work: Work) -> int:
    """By trying all: the most jobs that any assignment has on time."""
    best = 0
    for where in itertools.product(range(len(machines)), repeat=len(jobs)):
        total = 0
        for at, machine in enumerate(machines):
            mine = (job for job, lane in zip(jobs, where, strict=True) if lane == at)
            # Moore-Hodgson: exact on one machine.
            end_s, heap = machine.start_s, []
            for job in sorted(mine, key=lambda job: job.deadline_s):
                took_s = _took(work, job, machine.id)
                end_s += took_s
                heapq.heappush(heap, -took_s)
                if end_s > job.deadline_s:
                    end_s += heapq.heappop(heap)
            total += len(heap)
        best = max(best, total)
    return best


@st.composite
def _worlds(draw: st.DrawFn, most_jobs: int) -> tuple[list[Job], list[Machine], Work]:
    machines = [Machine(name, draw(st.integers(0, 6))) for name in "abc"[: draw(st.integers(2, 3))]]
    jobs, work = [], {}
    for at in range(draw(st.integers(1, most_jobs))):
        job = Job(f"j{at}", draw(st.integers(1, 8)), draw(st.integers(1, 20) | st.just(math.inf)), at)
        jobs.append(job)
        nearby = draw(st.lists(st.sampled_from([one.id for one in machines]), unique=True, max_size=2))
        if nearby:
            work[job.id] = {name: job.work_s * draw(st.sampled_from([0.1, 0.5, 0.9])) for name in nearby}
    return jobs, machines, work


@given(_worlds(30))
@settings(max_examples=300, deadline=None)
def test_no_fewer_are_on_time_and_the_mean_is_no_later(world: tuple[list[Job], list[Machine], Work]) -> None:
    jobs, machines, work = world
    plan = dispatch_live(jobs, machines)
    better = nearer(plan, work)
    assert sorted(job.id for lane in better.lanes for job in lane.queue) == sorted(job.id for job in jobs)
    assert [lane.machine for lane in better.lanes] == machines
    on_time, total_s, _ = _worth(plan, work)
    new_on_time, new_total_s, _ = _worth(better, work)
    assert new_on_time > on_time or (new_on_time == on_time and new_total_s <= total_s + 1e-9)
    assert nearer(plan, {}) is plan


@given(_worlds(6))
@settings(max_examples=150, deadline=None)
def test_the_share_of_the_most_that_is_possible_without_caches_is_kept(
    world: tuple[list[Job], list[Machine], Work],
) -> None:
    """m/(2m-1), of what equal times allow; and it is never more than what the caches allow."""
    jobs, machines, work = world
    on_time, _, _ = _worth(nearer(dispatch_live(jobs, machines), work), work)
    m = len(machines)
    assert on_time * (2 * m - 1) >= _most(jobs, machines, {}) * m
    assert on_time <= _most(jobs, machines, work)


@given(_worlds(1), st.integers(0, 5))
def test_one_prompt_is_done_as_early_as_it_can_be(world: tuple[list[Job], list[Machine], Work], seed: int) -> None:
    (job,), machines, work = world
    ends = {one.id: one.start_s + _took(work, job, one.id) for one in machines}
    assert ends[first_done(job, machines, work).id] == min(ends.values())
    (lane,) = [lane for lane in nearer(dispatch_live([job], machines), work).lanes if lane.queue]
    assert ends[lane.machine.id] <= min(one.start_s for one in machines) + job.work_s


def test_the_worked_example() -> None:
    jobs = [Job("x", 4.0, 9.0), Job("y", 4.0, 9.0)]
    work = {"x": {"b": 1.0}, "y": {"b": 1.0}}
    where = [tuple(job.id for job in lane.queue)
             for lane in nearer(dispatch_live(jobs, [Machine("a", 0.0), Machine("b", 0.0)]), work).lanes]  # fmt: skip
    assert where == [(), ("x", "y")]
    plan = dispatch_live(jobs, [Machine("a", 0.0), Machine("b", 4.0)])
    assert [job.id for job in nearer(plan, work).lanes[0].queue] == ["x"]


def test_who_is_due_soon_is_not_made_late_for_a_cache() -> None:
    """k on b would be late behind j, which would be done sooner there than on a: j stays on a."""
    plan = dispatch_live([Job("j", 5.0, 8.0), Job("k", 4.0, 8.0)], [Machine("a", 0.0), Machine("b", 4.0)])
    where = [[job.id for job in lane.queue] for lane in plan.lanes]
    assert where == [["j"], ["k"]]
    assert nearer(plan, {"j": {"b": 0.5}}) == plan


# The dispatcher


def _ticket(name: str, work_s: float, arrived_s: float, prompt: int, ttft_s: float | None = None) -> Ticket:
    """A prompt of ten blocks: all but the last token of `prompt`'s are under its keys."""
    prefix = tuple(PrefixKey(64 * block, 100 * prompt + block) for block in range(1, 11))
    return Ticket(id=name, model="m", prompt_tokens=641, work_s=work_s, arrived_s=arrived_s, ttft_s=ttft_s,
                  prefix=prefix, least_s=work_s / 10)  # fmt: skip


def _holds(prompt: int, blocks: int = 10) -> tuple[int, ...]:
    return tuple(100 * prompt + block for block in range(1, blocks + 1))


def _run(
    tickets: list[Ticket], nodes: list[str], held: dict[str, tuple[int, ...]], told: bool, ahead_s: float = 0.05
) -> dict[str, tuple[str, float, float]]:
    """Devices that take what the model says, caches included: where each ran, when it began there, when it was done.

    held is what caches hold all the time; told: the dispatcher knows of it.
    """
    dispatcher = Dispatcher(ahead_s)
    caches = Dispatcher(ahead_s)
    for node, keys in held.items():
        caches.held(Cached(node, keys))
        if told:
            dispatcher.held(Cached(node, keys))
    free = dict.fromkeys(nodes, 0.0)
    done: dict[str, tuple[str, float, float]] = {}
    events: list[tuple[float, int, str, Ticket | str]] = []
    order = itertools.count()
    for ticket in tickets:
        heapq.heappush(events, (ticket.arrived_s, next(order), "arrived", ticket))
    now = 0.0
    while events or len(dispatcher):
        due_s = dispatcher.due_s(now)
        at_s = min(events[0][0] if events else math.inf, math.inf if due_s is None else due_s)
        assert at_s < math.inf, "somebody waits for ever"
        now = max(now, at_s)
        while events and events[0][0] <= now:
            _, _, _, what = heapq.heappop(events)
            if isinstance(what, Ticket):
                dispatcher.arrived(what, now)
            else:
                dispatcher.started(what, now)
        due_s = dispatcher.due_s(now)
        if due_s is not None and due_s <= now:
            for ticket, node, _ in dispatcher.begin(now, lambda model: nodes):
                begun_s = max(now, free[node])
                free[node] = begun_s + caches._shortcuts.on(ticket, node)
                done[ticket.id] = node, begun_s, free[node]
                heapq.heappush(events, (free[node], next(order), "done", ticket.id))
    return done


def _tickets(seed: int, n: int, span_s: float) -> list[Ticket]:
    rng = random.Random(seed)
    return [
        _ticket(f"t{at}", rng.uniform(0.1, 1.0), rng.uniform(0.0, span_s), rng.randrange(4),
                rng.choice([None, 1.0, 3.0]))
        for at in range(n)
    ]  # fmt: skip


@given(st.integers(0, 10_000), st.integers(1, 25), st.sampled_from([0.0, 2.0, 8.0]), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_without_known_prefixes_everything_is_as_it_was(seed: int, n: int, span_s: float, nodes: int) -> None:
    names = [f"n{at}" for at in range(nodes)]
    tickets = _tickets(seed, n, span_s)
    bare = [Ticket(id=t.id, model=t.model, prompt_tokens=t.prompt_tokens, work_s=t.work_s, arrived_s=t.arrived_s,
                   ttft_s=t.ttft_s) for t in tickets]  # fmt: skip
    others = {"n0": (7, 8, 9), "n1": _holds(77)}
    assert _run(tickets, names, {}, True) == _run(bare, names, {}, True) == _run(tickets, names, others, True)


@given(st.integers(0, 10_000), st.integers(1, 40), st.sampled_from([0.0, 2.0, 8.0]), st.data())
@settings(max_examples=100, deadline=None)
def test_all_are_begun_once_whatever_is_cached(seed: int, n: int, span_s: float, data: st.DataObject) -> None:
    names = ["n0", "n1", "n2"]
    held = {
        node: tuple(key for prompt in range(4) for key in _holds(prompt, data.draw(st.sampled_from([0, 3, 10]))))
        for node in names
    }
    tickets = _tickets(seed, n, span_s)
    done = _run(tickets, names, held, True)
    assert set(done) == {ticket.id for ticket in tickets}


def test_the_node_that_holds_the_start_of_a_prompt_gets_it() -> None:
    for node in ("n0", "n1", "n2"):
        done = _run([_ticket("t", 1.0, 0.0, 3)], ["n0", "n1", "n2"], {node: _holds(3)}, True)
        assert done["t"][0] == node and done["t"][2] == pytest.approx(0.1)
    held = {"n1": _holds(3, 4), "n2": _holds(3, 8)}
    assert _run([_ticket("t", 1.0, 0.0, 3)], ["n0", "n1", "n2"], held, True)["t"][0] == "n2", "the longest one"


def test_a_prompt_waits_for_its_node_beside_an_idle_one_only_while_that_is_sooner() -> None:
    held = {"n0": _holds(1)}
    first = _ticket("first", 0.5, 0.0, 9)
    soon = _run([first, _ticket("t", 1.0, 0.0, 1)], ["n0"], held, True)
    assert soon["t"][0] == "n0"
    dispatcher = Dispatcher(0.05)
    dispatcher.held(Cached("n0", _holds(1)))
    dispatcher.arrived(_ticket("first", 0.5, 0.0, 9), 0.0)
    assert [one.machine for one in dispatcher.begin(0.0, lambda model: ["n0"])] == ["n0"]
    dispatcher.arrived(_ticket("t", 1.0, 0.1, 1), 0.1)
    assert dispatcher.begin(0.1, lambda model: ["n0", "n1"]) == [], "by 0.6 there, by 1.1 here"
    dispatcher.started("first", 0.5)
    assert [one.machine for one in dispatcher.begin(0.5, lambda model: ["n0", "n1"])] == ["n0"]
    late = Dispatcher(0.05)
    late.held(Cached("n0", _holds(1)))
    late.arrived(_ticket("first", 1.5, 0.0, 9), 0.0)
    late.begin(0.0, lambda model: ["n0"])
    late.arrived(_ticket("t", 1.0, 0.1, 1), 0.1)
    assert [one.machine for one in late.begin(0.1, lambda model: ["n0", "n1"])] == ["n1"], "by 1.6 there, by 1.1 here"


def test_nobody_waits_for_a_cache_for_longer_than_it_saves() -> None:
    """The node that holds its start is given urgent prompts again and again, while another one stands idle."""
    dispatcher = Dispatcher(0.05)
    dispatcher.held(Cached("n0", _holds(1)))
    nodes = {"m": ["n0", "n1"], "u": ["n0"]}
    now, begun, n = 0.0, None, 0
    while begun is None and now < 5.0:
        if dispatcher.backlog_s("n0", now) < 0.2:
            urgent = Ticket(id=f"u{n}", model="u", prompt_tokens=9, work_s=0.3, arrived_s=now, priority=1)
            dispatcher.arrived(urgent, now)
            n += 1
        if now == 0.0:
            dispatcher.begin(now, nodes.__getitem__)
            dispatcher.arrived(_ticket("t", 1.0, 0.0, 1), now)
        for one in dispatcher.begin(now, nodes.__getitem__):
            begun = (one.machine, now) if one.ticket.id == "t" else begun
        for name, end_s in list(dispatcher._backlogs["n0"].expected_s(now)):
            if end_s <= now:
                dispatcher.started(name, now)
        now = round(now + 0.05, 3)
    assert begun is not None and begun[1] <= 0.9 + 0.05


def test_a_hot_prefix_does_not_pile_everything_on_one_node() -> None:
    """All prompts begin alike and one node holds that: the others take what would be done later there."""
    names = ["n0", "n1", "n2"]
    held = {"n0": _holds(1, 6)}
    tickets = [_ticket(f"t{at}", 1.0, 0.0, 1) for at in range(30)]
    knowing, blind = _run(tickets, names, held, True), _run(tickets, names, held, False)
    shares = {node: sum(where == node for where, _, _ in knowing.values()) for node in names}
    assert all(shares.values()) and shares["n0"] == max(shares.values())
    ends, blind_ends = ([end for _, _, end in found.values()] for found in (knowing, blind))
    assert max(ends) <= max(blind_ends) and sum(ends) <= sum(blind_ends)


def test_what_it_knows_of_caches_goes_on_in_another_one_and_leaves_with_the_node() -> None:
    dispatcher = Dispatcher(0.05)
    dispatcher.held(Cached("n1", _holds(1)))
    dispatcher.arrived(_ticket("t", 1.0, 0.0, 1), 0.0)
    copy, without = Dispatcher(0.05, dispatcher.memory()), Dispatcher(0.05, dispatcher.memory())
    (given_,) = copy.begin(0.0, lambda model: ["n0", "n1"])
    assert given_.machine == "n1" and given_.saved_s == pytest.approx(0.9)
    without.gone("n1")
    assert [one.machine for one in without.begin(0.0, lambda model: ["n0", "n1"])] == ["n0"]


def test_the_brain_hears_of_caches_and_says_what_they_save() -> None:
    brain = Brain(BrainSettings())
    known = KnownModel(model="m", weight_pages=1, host_bytes=1, longest_pages=1, pinned=True, preload=False)
    told: list[Event] = [Joined(node, 10, 10, (known,)) for node in ("n0", "n1")]
    told += [Report(node, {"m": Busy(0, 0, 0.0)}) for node in ("n0", "n1")]
    told += [Cached("n1", _holds(1), afresh=True), Cached("stranger", _holds(1), afresh=True)]
    for at, event in enumerate(told):
        for order in brain.on(event, at / 1000):
            if isinstance(order, Order):
                brain.on(Done(order.id, Stage.ACTIVE, False, 0.1), at / 1000)
    assert sorted(brain.serving("m")) == ["n0", "n1"]

    def sent(name: str, now: float, brain: Brain = brain) -> Dispatch:
        event = Traffic((_ticket(name, 1.0, now, 1),))
        (found,) = [action for action in brain.on(event, now) if isinstance(action, Dispatch)]
        written = msgspec.json.encode(Entry(now, event, (found,)))
        assert msgspec.json.decode(written, type=Entry) == Entry(now, event, (found,))
        brain.on(Traffic(started=(name,)), now + 0.5)
        return found

    first = sent("a", 1.0)
    assert first.node == "n1" and "0.90 s less for what it has cached" in first.why
    heading = msgspec.json.encode(Heading(term=1, settings=brain.settings, memory=brain.memory()))
    again = Brain(brain.settings, 1, msgspec.json.decode(heading, type=Heading).memory)
    assert sent("b", 2.0, again) == sent("b", 2.0) and "stranger" not in brain.memory().waiting.held
    brain.on(Cached("n1", gone=_holds(1)), 3.0)
    assert sent("c", 3.1).node == "n0" and "cached" not in sent("d", 4.0).why
    again.on(Left("n1"), 3.0)
    assert sent("c", 3.1, again).node == "n0"


def test_what_a_cache_saves_is_said_of_those_alone_that_it_saves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests begin on one node at once: one has its prompt cached there, the other has a helper."""
    brain = Brain(BrainSettings(dispatch=Rule.LEAST_LOAD))
    known = KnownModel(model="m", weight_pages=1, host_bytes=1, longest_pages=1, pinned=True, preload=False)
    told: list[Event] = [Joined("n1", 10, 10, (known,)), Report("n1", {"m": Busy(0, 0, 0.0)})]
    told.append(Cached("n1", _holds(1), afresh=True))
    for event in told:
        for order in brain.on(event, 0.0):
            if isinstance(order, Order):
                brain.on(Done(order.id, Stage.ACTIVE, False, 0.1), 0.0)
    helper = Helper("n0", 641)
    monkeypatch.setattr(brain._splits, "helper", lambda ticket, node, now: helper if ticket.id == "b" else None)
    sent = brain.on(Traffic((_ticket("a", 1.0, 1.0, 1), _ticket("b", 1.0, 1.0, 2))), 1.0)
    why = {action.requests: action.why for action in sent if isinstance(action, Dispatch)}
    assert "0.90 s less" in why["a",] and "less" not in why["b",] and "from n0" in why["b",]
