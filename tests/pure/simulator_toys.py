"""A device, a policy and a recorder so simple that every number of a simulated run can be worked out by hand."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from bench.simulator.constants import LINKS
from bench.simulator.records import AppSpec, Call, Emit, Fault, ModelSpec, NodeSpec, Outcome, Policy, Scenario
from bench.simulator.ways import Ways
from bench.simulator.world import Physics, World, check
from janus_server.orders import (
    Action,
    Busy,
    Dispatch,
    Done,
    Event,
    Failed,
    Joined,
    KnownModel,
    Left,
    Lost,
    Order,
    Report,
    Stage,
    Traffic,
    Verb,
)
from janus_server.sched.oracle_records import Features
from janus_server.sched.roofline import ASCEND_910C
from janus_server.sched.shapes import ModelShape

PROMPT_TOKEN_S = 1e-4
TOKEN_S = 0.01
LONGEST = 200_000


class ToyDevice:
    """Prompts one after the other, 0.1 ms a token; then a token every 10 ms, whoever else draws any."""

    def __init__(self, _: NodeSpec) -> None:
        self.free_s, self.factor = 0.0, 1.0
        self.calls: dict[int, str] = {}
        self.models: set[str] = set()
        self.queue: list[tuple[float, int, bool]] = []
        self.spent: dict[str, float] = {}
        self.factors: list[float] = []

    def up(self, model: str, now: float) -> None:
        assert model not in self.models
        self.models.add(model)

    def down(self, model: str, now: float) -> list[int]:
        self.models.remove(model)
        lost = [call for call, name in self.calls.items() if name == model]
        for call in lost:
            del self.calls[call]
        return lost

    def begin(self, call: Call, model: str, now: float) -> None:
        assert model in self.models
        took_s = call.input_tokens * PROMPT_TOKEN_S * self.factor
        self.free_s = max(self.free_s, now) + took_s
        self.spent[model] = self.spent.get(model, 0.0) + took_s
        self.calls[call.id] = model
        if call.output_tokens > 1:
            heapq.heappush(self.queue, (self.free_s, call.id, False))
        heapq.heappush(self.queue, (self.free_s + (call.output_tokens - 1) * TOKEN_S, call.id, True))

    def advance(self, now: float) -> list[Emit]:
        emits = []
        while self.queue and self.queue[0][0] <= now:
            at_s, call, ended = heapq.heappop(self.queue)
            if call in self.calls:
                emits.append(Emit(call, at_s, ended))
                if ended:
                    del self.calls[call]
        return emits

    def next_s(self, now: float) -> float | None:
        return self.queue[0][0] if self.queue else None

    def slow(self, factor: float, now: float) -> None:
        self.factor = factor
        self.factors.append(factor)

    def busy(self, now: float) -> dict[str, Busy]:
        return {name: Busy(sum(one == name for one in self.calls.values()), 0, 0.0) for name in self.models}

    def used(self) -> Mapping[str, float]:
        return self.spent


class Diary:
    """A recorder that keeps everything."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.actions: list[tuple[float, Action]] = []
        self.orders: dict[int, tuple[float, float]] = {}
        self.stages: list[tuple[float, str, str, Stage]] = []
        self.moments: list[tuple[float, tuple[str, ...]]] = []
        self.closed_s: float | None = None

    def outcome(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def decision(self, action: Action, now: float) -> None:
        self.actions.append((now, action))

    def began(self, order: Order, now: float, takes_s: float) -> None:
        self.orders[order.id] = now, takes_s

    def stage(self, node: str, model: str, stage: Stage, now: float) -> None:
        self.stages.append((now, node, model, stage))

    def moment(self, now: float, active: Sequence[str]) -> None:
        self.moments.append((now, tuple(active)))

    def closed(self, now: float) -> None:
        self.closed_s = now

    def at(self, node: str, model: str, stage: Stage) -> float:
        """When it stood there first."""
        return next(when for when, *what in self.stages if what == [node, model, stage])


class Script:
    """A policy that gives the orders of a list at their times, and hands each request to the node that its model was
    last brought up on, as soon as it is there."""

    def __init__(self, *steps: tuple[float, str, str, Verb, str | None]) -> None:
        self.steps = sorted(steps, key=lambda step: step[0])
        self.heard: list[tuple[float, Event]] = []
        self.waiting: dict[str, list[str]] = {}
        self.where: dict[str, str] = {}
        self.orders: dict[int, Order] = {}
        self.replicas: dict[str, tuple[str, ...]] = {}
        self.number = 0

    def on(self, event: Event, now: float) -> list[Action]:
        self.heard.append((now, event))
        actions: list[Action] = []
        match event:
            case Traffic(arrived):
                for ticket in arrived:
                    self.waiting.setdefault(ticket.model, []).append(ticket.id)
            case Done(order, Stage.ACTIVE):
                name = self.replicas.get(self.orders[order].model, (self.orders[order].node,))
                self.where[self.orders[order].model] = name[0]
            case Left(node):
                self.where = {model: name for model, name in self.where.items() if name != node}
            case _:
                pass
        while self.steps and self.steps[0][0] <= now:
            _, node, model, verb, source = self.steps.pop(0)
            self.number += 1
            order = Order(1, self.number, node, model, verb, "as written", source, self.replicas.get(model, ()))
            self.orders[order.id] = order
            if verb in (Verb.DRAIN, Verb.SLEEP, Verb.UNLOAD):
                self.where.pop(model, None)
            elif verb is Verb.SERVE:
                self.where[model] = node
            actions.append(order)
        for model, node in self.where.items():
            if self.waiting.get(model) and self.ready(model):
                actions.append(Dispatch(node, tuple(self.waiting.pop(model)), "as written"))
        return actions

    def ready(self, model: str) -> bool:
        """All shards are up."""
        nodes = set(self.replicas.get(model, ()))
        done = {self.orders[e.order].node for _, e in self.heard if isinstance(e, Done) and e.stage is Stage.ACTIVE}
        return nodes <= done

    def next_wake(self, now: float) -> float | None:
        return self.steps[0][0] if self.steps else None

    def told(self, kind: type) -> list[tuple[float, Event]]:
        return [(now, event) for now, event in self.heard if isinstance(event, kind)]


class Rover:
    """A policy that does what it may, at random: for every decision it draws from `choose(n)` a number below n."""

    def __init__(self, choose: Callable[[int], int], scenario: Scenario) -> None:
        self.choose = choose
        self.models = {spec.known.model: spec.known for spec in scenario.models}
        self.hosts = {node.name: node.host_bytes for node in scenario.nodes}
        self.pools: dict[str, int] = {}
        self.stages: dict[tuple[str, str], Stage] = {}
        self.copies: set[tuple[str, str]] = set()
        self.draining: set[tuple[str, str]] = set()
        self.open: dict[int, Order] = {}
        self.waiting: dict[str, list[str]] = {}
        self.number, self.wake_s = 0, -1.0

    def on(self, event: Event, now: float) -> list[Action]:
        self._hear(event)
        actions: list[Action] = []
        if self.wake_s < 0.0:  # who takes over hears first what stands
            self.wake_s = now + 0.25
        if now >= self.wake_s:
            self.wake_s = now + 0.25 + 0.25 * self.choose(8)
            for _ in range(self.choose(4)):
                actions += self._order()
        for model, requests in self.waiting.items():
            nodes = [node for node in self.pools if self._serves(node, model)]
            if requests and nodes and self.choose(4):
                node = nodes[self.choose(len(nodes))]
                actions.append(Dispatch(node, tuple(requests[:2]), "at random"))
                del requests[:2]
        return actions

    def next_wake(self, now: float) -> float | None:
        return max(self.wake_s, 0.0)

    def _hear(self, event: Event) -> None:
        match event:
            case Joined(node, pool_pages):
                self.pools[node] = pool_pages
            case Left(node):
                del self.pools[node]
                self.stages = {key: stage for key, stage in self.stages.items() if key[0] != node}
                self.copies = {key for key in self.copies if key[0] != node}
                self.draining = {key for key in self.draining if key[0] != node}
                self.open = {number: order for number, order in self.open.items() if order.node != node}
            case Traffic(arrived, _, left):
                for ticket in arrived:
                    self.waiting.setdefault(ticket.model, []).append(ticket.id)
                for requests in self.waiting.values():
                    requests[:] = [request for request in requests if request not in left]
            case Done(number, stage, copy) | Failed(number, stage, copy):
                order = self.open.pop(number)
                key = order.node, order.model
                self.stages[key] = stage
                (self.copies.add if copy else self.copies.discard)(key)
                if stage is not Stage.ACTIVE:
                    self.draining.discard(key)
            case Report(node, models):
                busy = {order.model for order in self.open.values() if order.node == node}
                self.stages.update({(node, name): Stage.ACTIVE for name in models if name not in busy})
            case Lost(node, model, stage, copy):
                self.stages[node, model] = stage
                (self.copies.add if copy else self.copies.discard)((node, model))
            case _:
                pass

    def _serves(self, node: str, model: str) -> bool:
        key = node, model
        lowers = any((order.node, order.model) == key and order.verb.lowers for order in self.open.values())
        return self.stages.get(key) is Stage.ACTIVE and key not in self.draining and not lowers

    def _order(self) -> list[Action]:
        node, model = list(self.pools)[self.choose(len(self.pools))], list(self.models)[self.choose(len(self.models))]
        key, verb = (node, model), list(Verb)[self.choose(len(Verb))]
        stage = self.stages.get(key, Stage.COLD)
        if any((order.node, order.model) == key for order in self.open.values()):
            return []
        if verb.raises and (stage is Stage.ACTIVE or not self._fits(node, model)):
            return []
        if verb is Verb.SLEEP and key not in self.copies and not self._holds(node, model):
            return []
        if verb is Verb.DRAIN and stage is Stage.ACTIVE:
            self.draining.add(key)
        elif verb is Verb.SERVE:
            self.draining.discard(key)
        self.number += 1
        source = list(self.pools)[self.choose(len(self.pools))] if verb is Verb.FORK else None
        order = Order(1, self.number, node, model, verb, "at random", source)
        if verb.ends:
            self.open[self.number] = order
        return [order]

    def _fits(self, node: str, model: str) -> bool:
        there = {name for (where, name), stage in self.stages.items() if where == node and stage is Stage.ACTIVE}
        there |= {order.model for order in self.open.values() if order.node == node and order.verb is not Verb.EVICT}
        pages = [self.models[name].weight_pages + self.models[name].floor_pages for name in {*there, model}]
        return sum(pages) <= self.pools[node]

    def _holds(self, node: str, model: str) -> bool:
        there = {name for where, name in self.copies if where == node}
        there |= {order.model for order in self.open.values() if order.node == node}
        return sum(self.models[name].host_bytes for name in {*there, model}) <= self.hosts[node]


def node_spec(name: str, host: str = "h", domain: str = "d", pool_pages: int = 100, host_bytes: int = 100) -> NodeSpec:
    return NodeSpec(name=name, host=host, domain=domain, shape=ASCEND_910C, pool_pages=pool_pages, page_bytes=2 << 20,
                    host_bytes=host_bytes)  # fmt: skip


def model_spec(name: str, weight_bytes: float = 6.5e9, pages: int = 40, shards: int = 1, floor: int = 2) -> ModelSpec:
    known = KnownModel(model=name, weight_pages=pages, host_bytes=40, longest_pages=5, floor_pages=floor, shards=shards)
    shape = ModelShape(name=name, parameters=weight_bytes / 2.0, layers=1, hidden=1, kv_bytes=1.0, pair_flops=1.0)
    return ModelSpec(known=known, shape=shape)


def scenario_of(
    calls: Sequence[Call], nodes: Sequence[NodeSpec], models: Sequence[ModelSpec], duration_s: float,
    faults: Sequence[Fault] = (),
) -> Scenario:  # fmt: skip
    """One application for each model."""
    apps = tuple(AppSpec(name=f"app {m.known.model}", model=m.known.model, ttft_s=1.0, tpot_s=0.05) for m in models)
    return Scenario(name="toy", nodes=tuple(nodes), models=tuple(models), apps=apps, calls=tuple(calls),
                    duration_s=duration_s, subjects={}, faults=tuple(faults))  # fmt: skip


def shares(model: str, features: Features, busy_share: float) -> tuple[float, float, float]:
    return 0.5, busy_share, busy_share / 2.0


def live_through(scenario: Scenario, policy: Callable[[], Policy]) -> tuple[World, Diary]:
    check(scenario)
    diary = Diary()
    ways = Ways({spec.known.model: spec for spec in scenario.models}, LINKS)
    physics = Physics(ways, lambda model, tokens: tokens * PROMPT_TOKEN_S, shares, lambda model: LONGEST)
    world = World(scenario, policy, ToyDevice, physics, diary)
    world.run()
    return world, diary
