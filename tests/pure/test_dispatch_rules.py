"""Requests that are not planned: round robin spreads evenly, least load picks the least, the Brain keeps to both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from bench.simulator import policies, scenario
from bench.simulator.attempts import device_of
from bench.simulator.batching import Rules
from bench.simulator.records import Outcome
from bench.simulator.run import run
from janus_server.orders import Action, Dispatch, Done, Event, Joined, KnownModel, Order, Stage, Ticket, Traffic
from janus_server.sched.brain import Brain
from janus_server.sched.dispatcher import Dispatcher
from janus_server.sched.rules import Rule, Turns
from janus_server.sched.state import BrainSettings, Memory

NODES = ("n0", "n1", "n2")


def ticket(number: int, model: str = "m", work_s: float = 1.0, at_s: float = 0.0) -> Ticket:
    return Ticket(id=f"r{number}", model=model, prompt_tokens=100, work_s=work_s, arrived_s=at_s + number * 1e-6)


@given(st.lists(st.sampled_from("ab"), max_size=60), st.integers(1, 4))
def test_round_robin_gives_every_machine_as_many_of_each_model_and_one_more_at_most(models: str, machines: int) -> None:
    turns, names = Turns(Rule.ROUND_ROBIN), [f"n{i}" for i in range(machines)]
    got = Counter((model, turns.pick(model, names, lambda _: 0.0)) for model in models)
    for model in set(models):
        counts = [got[model, name] for name in names]
        assert max(counts) - min(counts) <= 1
    # In a row of as many as there are machines, each has its turn.
    order = [turns.pick("c", names, lambda _: 0.0) for _ in range(3 * machines)]
    assert all(sorted(order[i : i + machines]) == names for i in range(2 * machines))


def test_round_robin_takes_up_who_came_and_forgets_who_left() -> None:
    turns = Turns(Rule.ROUND_ROBIN)
    assert [turns.pick("m", ["a", "b"], lambda _: 0.0) for _ in range(3)] == ["a", "b", "a"]
    assert turns.pick("m", ["a", "b", "c"], lambda _: 0.0) == "c"
    turns.gone("b")
    assert turns.pick("m", ["a", "c"], lambda _: 0.0) == "a"
    # It goes on from what is remembered.
    again = Turns(Rule.ROUND_ROBIN, {model: dict(at) for model, at in turns.chosen.items()})
    picks = [[one.pick("m", ["a", "b", "c"], lambda _: 0.0) for _ in range(6)] for one in (turns, again)]
    assert picks[0] == picks[1]


@given(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=5), st.lists(st.floats(0.01, 5.0), max_size=40))
def test_least_load_always_goes_where_the_least_lies(before: list[float], works: list[float]) -> None:
    turns, load = Turns(Rule.LEAST_LOAD), {f"n{i}": work for i, work in enumerate(before)}
    for work_s in works:
        picked = turns.pick("m", list(load), load.__getitem__)
        assert load[picked] == min(load.values())
        load[picked] += work_s


@given(
    st.sampled_from([Rule.ROUND_ROBIN, Rule.LEAST_LOAD]),
    st.lists(st.tuples(st.sampled_from("xy"), st.floats(0.01, 3.0)), min_size=1, max_size=30),
    st.dictionaries(st.sampled_from("xy"), st.sets(st.sampled_from(NODES)), max_size=2),
)
def test_everybody_begins_at_once_where_anybody_has_the_model_and_in_order(
    rule: Rule, asked: list[tuple[str, float]], holders: dict[str, set[str]]
) -> None:
    dispatcher = Dispatcher(ahead_s=0.05, rule=rule)
    for number, (model, work_s) in enumerate(asked):
        dispatcher.arrived(ticket(number, model, work_s), 1.0)
    given_ = dispatcher.begin(1.0, lambda model: sorted(holders.get(model, ())))
    expected = [f"r{i}" for i, (model, _) in enumerate(asked) if holders.get(model)]
    assert [one.ticket.id for one in given_] == expected
    assert all(one.machine in holders[one.ticket.model] for one in given_)
    assert len(dispatcher) == len(asked) - len(expected)
    # Who waits for a model that nobody has is begun when somebody has it.
    dispatcher.changed(2.0)
    rest = dispatcher.begin(2.0, lambda model: ["n9"])
    assert len(rest) == len(asked) - len(expected)
    assert len(dispatcher) == 0


def test_least_load_counts_what_was_begun_and_not_yet_computed() -> None:
    dispatcher = Dispatcher(ahead_s=0.05, rule=Rule.LEAST_LOAD)
    for number, work_s in enumerate((3.0, 1.0, 1.0, 0.5)):
        dispatcher.arrived(ticket(number, work_s=work_s), 0.0)
    where = {one.ticket.id: one.machine for one in dispatcher.begin(0.0, lambda _: ["n0", "n1"])}
    assert where == {"r0": "n0", "r1": "n1", "r2": "n1", "r3": "n1"}
    dispatcher.started("r0", 3.0)  # n0 has nothing before it now
    dispatcher.arrived(ticket(4), 3.0)
    assert [one.machine for one in dispatcher.begin(3.0, lambda _: ["n0", "n1"])] == ["n0"]


BUSY = """
[cluster]
kind = "A100 SXM"
hosts = 1
devices = 1

[workload]
source = "apps"
quiet_s = 15
since_s = 5
duration_s = 30

[[apps]]
name = "chat"
model = "chat-13b"
ttft_s = 1.0
tpot_s = 0.06
per_second = 13
lengths = "300/50"

[[models]]
name = "chat-13b"
params_b = 13.0
layers = 40
hidden = 5120
heads = 40
kv_heads = 40
head_dim = 128
"""


class Waited:
    """A Recorder of how long first tokens took."""

    def __init__(self) -> None:
        self.ttft_s: list[float] = []

    def outcome(self, outcome: Outcome) -> None:
        if outcome.ttft_s is not None and outcome.call.at_s >= 20.0:
            self.ttft_s.append(outcome.ttft_s)

    def decision(self, action: Action, now: float) -> None: ...

    def began(self, order: Order, now: float, takes_s: float) -> None: ...

    def stage(self, node: str, model: str, stage: Stage, now: float) -> None: ...

    def moment(self, now: float, active: Sequence[str]) -> None: ...

    def closed(self, now: float) -> None: ...


def test_a_busy_device_is_kept_as_busy_by_planned_requests_as_by_those_that_come_at_once(tmp_path: Path) -> None:
    """Its steps take 50 to 85 ms: who plans hands over what the next one has room for before the last one is over."""
    file = tmp_path / "busy.toml"
    file.write_text(BUSY)
    waited = {}
    for rule in (Rule.LST_IMH, Rule.ROUND_ROBIN):
        asked, recorder, rules = scenario.read(str(file), 0, {}), Waited(), Rules(step_tokens=512)
        settings = msgspec.structs.replace(BrainSettings(), dispatch=rule)
        make = partial(policies.make, "janus", asked, settings)
        run(asked, make, device_of(asked, "step", rules), recorder, rules)
        assert len(recorder.ttft_s) > 100
        waited[rule] = median(recorder.ttft_s)
    assert waited[Rule.LST_IMH] < 1.3 * waited[Rule.ROUND_ROBIN]


def test_the_brain_keeps_to_its_rule_and_another_goes_on_from_what_it_remembers() -> None:
    settings = msgspec.structs.replace(BrainSettings(), dispatch=Rule.ROUND_ROBIN)
    brain = Brain(settings)
    known = KnownModel(model="m", weight_pages=2, host_bytes=10, longest_pages=2)
    events: list[Event] = [Joined(node, 100, 1000, (known,)) for node in NODES[:2]]
    orders = [one for event in events for one in brain.on(event, 0.0) if isinstance(one, Order)]
    for order in orders:
        brain.on(Done(order.id, Stage.ACTIVE, False, 1.0), 1.0)
    served = brain.serving("m")
    data = msgspec.json.encode(brain.memory())
    other = Brain(settings, memory=msgspec.json.decode(data, type=Memory))
    for one in (brain, other):
        began = [a for n in range(4) for a in one.on(Traffic(arrived=(ticket(n, at_s=2.0 + n),)), 2.0 + n)]
        nodes = [action.node for action in began if isinstance(action, Dispatch)]
        assert set(nodes) == set(served)
        assert len(nodes) == 4
