"""The imaginary cluster in which a policy is tried: it supplies time and physics, tells events and carries out actions.

`run` makes one for each run. The policy hears what the leader of a live cluster hears, when it would hear it, and its
actions are obeyed to the letter. The world has no opinion, and nothing in it is random: the same scenario gives the
same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import msgspec

from janus_server.errors import BadConfig, require
from janus_server.orders import (
    Action,
    Dispatch,
    Done,
    Event,
    Failed,
    Joined,
    Left,
    Lost,
    Observed,
    Order,
    Refit,
    Refuse,
    Stage,
    Tick,
    Verb,
)
from janus_server.sched.oracle_records import Fitted

from .agenda import Agenda, Pulse
from .carrying import Carrier
from .cluster import Cluster, Node
from .records import Call, Device, Fault, FaultKind, NodeSpec, Policy, Recorder, Scenario
from .serving import Desk
from .telling import Shares, Teller
from .ways import Ways

BEAT_S: Final = 0.5
WINDOW_BEATS: Final = 60
# Who has not ended so long after the last request came is given up.
GRACE_S: Final = 600.0
# So long without anything happening at all, with nobody left to come, is the end.
STILL_S: Final = 150.0
# That prompts were computed and requests ended is told together with whatever comes within so short a time.
_GATHER_S: Final = 0.01
# Between two ticks, whatever a policy asks for: one that asks for the same moment again would stop the clock.
_TICK_S: Final = 0.001
_FIT_S: Final = 1.0


class Physics(NamedTuple):
    """work_s(model, tokens) is what a prompt is predicted to take; see `Ways` and `Shares`. longest_tokens(model) are
    those of the longest prompt and answer together that a device can hold; longer requests are refused."""

    ways: Ways
    work_s: Callable[[str, int], float]
    shares: Shares
    longest_tokens: Callable[[str], int]


class Seen(NamedTuple):
    """How far a run is."""

    now_s: float
    came: int
    waiting: int


class World:
    """policy() makes one that knows nothing yet: at the start, and where a leader's failure is among the faults."""

    def __init__(
        self,
        scenario: Scenario,
        policy: Callable[[], Policy],
        device: Callable[[NodeSpec], Device],
        physics: Physics,
        recorder: Recorder,
        fit: Callable[[Policy, str], Fitted | None] | None = None,
        watch: Callable[[Seen], None] | None = None,
    ) -> None:
        """fit does what a `Refit` asks for; without it the oracle stays as it is. watch is called at every beat."""
        self._scenario, self._make, self._recorder, self._fit, self._watch = scenario, policy, recorder, fit, watch
        self.policy = policy()
        self._agenda = Agenda()
        self._desk = Desk(scenario, self._agenda, physics.work_s, physics.longest_tokens, recorder.outcome)
        self._pulse = Pulse(self._agenda, self._desk.emitted)
        self._cluster = Cluster(
            scenario.nodes, scenario.models, device, self._pulse, self._opened, self._desk.lost, self._stage
        )
        self._carrier = Carrier(self._agenda, self._cluster, self._pulse, physics.ways, self._ended, self._began)
        self._teller = Teller(self._cluster, self._pulse, self._desk.models, physics.shares)
        self._known = tuple(spec.known for spec in scenario.models)
        self._tick_s: float | None = None
        self._ticked_s = -1.0
        self._told = self._flushing = False
        self._beats = 0
        self._happened_s = 0.0
        self._faults = len(scenario.faults)
        self._over = False
        self._coming = True
        self.lines: list[str] = []

    @property
    def now_s(self) -> float:
        return self._agenda.now

    @property
    def came(self) -> int:
        return self._desk.came

    def device(self, node: str) -> Device:
        """The imaginary device of a node, as it is now."""
        return self._cluster.nodes[node].device

    def used_s(self) -> dict[str, float]:
        """Seconds that devices spent on each model's steps, those of nodes that died left out."""
        total: dict[str, float] = {}
        for node in self._cluster.nodes.values():
            for name, seconds in node.device.used().items():
                total[name] = total.get(name, 0.0) + seconds * self._cluster.models[name].known.shards
        return total

    def check_ledger(self) -> None:
        """A `Bug` where pages or host memory are not what stages and orders say."""
        self._cluster.check_ledger()

    def run(self) -> None:
        """From the first moment to the last."""
        for name, node in self._cluster.nodes.items():
            for model in self._scenario.copies.get(name, ()):
                self._cluster.keep_copy(node, model)
            self._join(node)
        self._tell(Observed({}, dict(self._scenario.subjects)))
        for fault in self._scenario.faults:
            self._agenda.at(fault.at_s, self._fault, fault)
        self._agenda.at(BEAT_S, self._beat, None)
        self._settle()
        calls = iter(self._scenario.calls)
        call = self._next(calls, 0.0)
        while not self._over:
            due_s = self._agenda.next_s()
            if call is not None and (due_s is None or call.at_s < due_s):
                at_s = self._agenda.now = call.at_s
                while call is not None and call.at_s == at_s:
                    self._desk.arrive(call)
                    call = self._next(calls, at_s)
                self._coming = call is not None
                self._happened_s = at_s
            else:
                self._coming = call is not None
                self._agenda.step()
            self._settle()
        self._close()

    def _next(self, calls: Iterator[Call], after_s: float) -> Call | None:
        call = next(calls, None)
        if call is None:
            return None
        if not after_s <= call.at_s < float("inf"):
            raise BadConfig(f"request {call.id} of the trace comes at {call.at_s:g} s, after one at {after_s:g} s")
        if not 0 <= call.app < len(self._scenario.apps) or call.input_tokens < 1 or call.output_tokens < 1:
            raise BadConfig(f"request {call.id} of the trace is of application {call.app} with {call.input_tokens} "
                            f"tokens in and {call.output_tokens} out")  # fmt: skip
        return call

    def _close(self) -> None:
        waiting = len(self._desk)
        never = self._desk.close()
        if never:
            self.lines.append(f"never served: {', '.join(never)}")
        if waiting:
            self.lines.append(f"{waiting} requests had not ended {self._agenda.now:.1f} s after the start")
        self._recorder.closed(self._agenda.now)

    # Telling

    def _tell(self, event: Event) -> None:
        self._told = True
        for action in self.policy.on(event, self._agenda.now):
            self._act(action)

    def _settle(self) -> None:
        """Tell what came of the last step, and see to it that the policy is woken when it wants to be."""
        while self._desk.urgent:
            self._tell_news()
        if self._desk.news and not self._flushing:
            self._flushing = True
            self._agenda.at(self._agenda.now + _GATHER_S, self._flush, None)
        if self._told:
            self._told = False
            wake_s = self.policy.next_wake(self._agenda.now)
            if wake_s is not None:
                wake_s = max(wake_s, self._agenda.now, self._ticked_s + _TICK_S)
            if wake_s != self._tick_s:
                self._tick_s = wake_s
                if wake_s is not None:
                    self._agenda.at(wake_s, self._tick, wake_s)

    def _tell_news(self) -> None:
        for traffic in self._desk.take():
            self._tell(traffic)
        for wish in self._desk.wishes():
            self._tell(wish)

    def _flush(self, _: object) -> None:
        self._flushing = False
        if self._desk.news:
            self._tell_news()

    def _tick(self, wake_s: float) -> None:
        if self._tick_s == wake_s:
            self._tick_s, self._ticked_s = None, wake_s
            self._tell(Tick())

    def _beat(self, _: object) -> None:
        now = self._agenda.now
        self._beats += 1
        self._desk.tire()
        for report in self._teller.reports(now):
            self._happened_s = now
            self._tell(report)
        if (counted := self._teller.counted(now)) is not None:
            self._tell(counted)
        if self._beats % WINDOW_BEATS == 0:
            observed = self._teller.observed(now, self._carrier.moving())
            if observed is not None:
                self._tell(observed)
        self._recorder.moment(now, self._cluster.holding())
        if self._watch is not None:
            self._watch(Seen(now, self._desk.came, len(self._desk)))
        self._over = self._is_over(now)
        self._agenda.at((self._beats + 1) * BEAT_S, self._beat, None)

    def _is_over(self, now: float) -> bool:
        if self._coming or now < self._scenario.duration_s or self._faults:
            return False
        idle = not len(self._carrier) and now - self._happened_s > STILL_S
        return not len(self._desk) or idle or now > self._scenario.duration_s + GRACE_S

    # Acting

    def _act(self, action: Action) -> None:
        now = self._agenda.now
        self._recorder.decision(action, now)
        match action:
            case Dispatch():
                node = self._cluster.nodes.get(action.node)
                require(node is not None and node.alive, f"requests are begun on {action.node}, which is not there")
                if node is not None:
                    self._desk.begin(action, node, self._pulse)
            case Order():
                self._happened_s = now
                if action.verb is not Verb.EVICT:
                    self._teller.moved(action.model)
                self._carrier.obey(action)
            case Refuse():
                self._desk.refuse(action)
            case Refit(model):
                if self._fit is not None:
                    self._agenda.at(now + _FIT_S, self._fitted, (self.policy, model))
            case _:
                pass

    def _fitted(self, thing: tuple[Policy, str]) -> None:
        """What came of a fit that was asked for a moment ago; how long it took here is nobody's business."""
        policy, model = thing
        if policy is self.policy and self._fit is not None:
            fitted = self._fit(policy, model)
            if fitted is not None:
                self._tell(msgspec.structs.replace(fitted, took_s=_FIT_S))

    def _ended(self, node: Node, event: Done | Failed) -> None:
        """An order came to its end; what the node is busy with is told before."""
        self._happened_s = self._agenda.now
        self._tell(self._teller.report(node, self._agenda.now))
        self._tell(event)

    def _began(self, order: Order, takes_s: float) -> None:
        self._recorder.began(order, self._agenda.now, takes_s)

    def _opened(self, model: str, by: int) -> None:
        self._teller.moved(model)
        self._desk.opened(model, by)

    def _stage(self, node: Node, model: str, stage: Stage) -> None:
        self._recorder.stage(node.spec.name, model, stage, self._agenda.now)

    # Nodes and faults

    def _join(self, node: Node) -> None:
        spec = node.spec
        pool, host = spec.pool_pages, spec.host_bytes
        self._tell(Joined(spec.name, pool, host, self._known, host=spec.host, domain=spec.domain))
        for name, held in node.held.items():
            if held.copy:  # no other event says that a host holds a copy
                self._tell(Lost(spec.name, name, held.stage, True))

    def _fault(self, fault: Fault) -> None:
        self._faults -= 1
        self._happened_s = self._agenda.now
        if fault.kind is FaultKind.LEADER:
            self._change_leader()
            return
        node = self._cluster.nodes[fault.node]
        if not node.alive:
            return
        if fault.kind is FaultKind.COPY:
            node.failing_until_s = self._agenda.now + fault.lasts_s
            self._carrier.break_copies(node)
            return
        self._cluster.die(node)
        self._tell(Left(fault.node))
        self._carrier.node_died(node)
        back_s = self._agenda.now + fault.lasts_s
        waited = back_s <= self._scenario.duration_s + GRACE_S  # who stays away longer does not hold the end up
        self._faults += waited
        self._agenda.at(back_s, self._rejoin, (node.spec, waited))

    def _rejoin(self, thing: tuple[NodeSpec, bool]) -> None:
        spec, waited = thing
        self._faults -= waited
        self._join(self._cluster.join(spec))

    def _change_leader(self) -> None:
        """The new one hears of nodes and of what is Active there, of host copies, and of everybody who waits.

        What an older one had begun is undone. Which nodes make up a replica of several shards no event says.
        """
        self._carrier.abandon()
        self.policy, self._tick_s = self._make(), None
        for node in self._cluster.nodes.values():
            if node.alive:
                self._join(node)
                self._tell(self._teller.report(node, self._agenda.now))
        self._tell(Observed({}, dict(self._scenario.subjects)))
        self._desk.forget()


def check(scenario: Scenario) -> None:
    """BadConfig where a scenario makes no sense as a whole, whoever made it."""
    models = {spec.known.model for spec in scenario.models}
    nodes = {node.name for node in scenario.nodes}
    if not nodes or not models:
        raise BadConfig(f"{scenario.name}: there are no {'nodes' if not nodes else 'models'}")
    for app in scenario.apps:
        if app.model not in models:
            raise BadConfig(f"{scenario.name}: {app.name} is an application of {app.model}, which is no model of it")
    for fault in scenario.faults:
        if fault.kind is not FaultKind.LEADER and fault.node not in nodes:
            raise BadConfig(f"{scenario.name}: a fault strikes {fault.node or 'no node'}, which is not there")
        if not (0.0 <= fault.at_s and 0.0 <= fault.lasts_s < float("inf")):
            raise BadConfig(f"{scenario.name}: a fault at {fault.at_s:g} s lasts for {fault.lasts_s:g} s")
    by_name = {node.name: node for node in scenario.nodes}
    for name, copies in scenario.copies.items():
        node = by_name.get(name)
        if node is None or not models.issuperset(copies):
            raise BadConfig(
                f"{scenario.name}: {name} is to hold copies of {', '.join(copies)}: one of these is not there"
            )
        sizes = [spec.known.host_bytes for spec in scenario.models if spec.known.model in copies]
        if len(set(copies)) < len(copies) or sum(sizes) > node.host_bytes:
            raise BadConfig(f"{scenario.name}: {name} has no host memory for copies of {', '.join(copies)}")
    _check_room(scenario)


def _check_room(scenario: Scenario) -> None:
    largest = max(node.pool_pages for node in scenario.nodes)
    used = {app.model for app in scenario.apps}
    for known in (spec.known for spec in scenario.models if spec.known.model in used):
        if known.weight_pages + max(known.floor_pages, known.longest_pages) > largest:
            raise BadConfig(
                f"{scenario.name}: {known.model} needs {known.weight_pages} pages for its weights and "
                f"{known.longest_pages} for its longest request; the largest device has {largest}"
            )
        if known.shards > len(scenario.nodes):
            there = len(scenario.nodes)
            raise BadConfig(f"{scenario.name}: {known.model} takes {known.shards} devices, and there are {there}")
