"""Imaginary nodes that obey a Brain: orders take their time and fail, nodes and instances are lost, requests come.

It checks at each step what must hold whatever happens: pages and host memory are never promised twice, no model has two
orders on one node, nothing that runs is put to sleep, a copy is read of one that is Active, and each ticket is begun
once, by a replica that is whole and takes requests.
"""

from __future__ import annotations

import heapq
import random

import msgspec

from janus_server import orders
from janus_server.orders import (
    Busy,
    Counted,
    Counts,
    Decided,
    Dispatch,
    Done,
    Event,
    Failed,
    Joined,
    KnownModel,
    Left,
    Lost,
    Order,
    Refit,
    Refuse,
    Report,
    Stage,
    Tick,
    Ticket,
    Traffic,
    Verb,
    Wanted,
)
from janus_server.sched.brain import Brain
from janus_server.sched.state import BrainSettings, Memory

_ENDS = {Verb.LOAD: Stage.ACTIVE, Verb.WAKE: Stage.ACTIVE, Verb.FORK: Stage.ACTIVE, Verb.SLEEP: Stage.WARM,
         Verb.UNLOAD: Stage.COLD}  # fmt: skip


class Node:
    """One device. `order` are open orders by model, `begun` ids of tickets in their order, `ready` who serves again."""

    def __init__(self, name: str, pool: int, host: int, models: list[str], place: tuple[str, str]) -> None:
        self.name, self.pool, self.host, self.place = name, pool, host, place
        self.stage = dict.fromkeys(models, Stage.COLD)
        self.copy = dict.fromkeys(models, False)
        self.held = dict.fromkeys(models, False)
        self.order: dict[str, Order] = {}
        self.running: dict[str, set[str]] = {model: set() for model in models}
        self.ended_s = dict.fromkeys(models, 0.0)


class FleetWorld:
    """Nodes, models and a Brain of them. trouble: how likely an order fails, and whether nodes and models are lost."""

    def __init__(self, seed: int, models: list[KnownModel], nodes: int, pool: int, trouble: float = 0.0,
                 host: int = 1000, settings: BrainSettings | None = None) -> None:  # fmt: skip
        self.rng = random.Random(seed)
        self.models = {known.model: known for known in models}
        self.settings = settings or BrainSettings()
        self.brain = Brain(self.settings)
        self.trouble = trouble
        self.now = 0.0
        self.heap: list[tuple[float, int, str, object]] = []
        self.numbers = self.tickets = 0
        self.nodes: dict[str, Node] = {}
        self.replicas: dict[tuple[str, str], tuple[str, ...]] = {}
        self.tokens = {name: [0, 0, 0, 0, 0] for name in self.models}
        self.waiting: dict[str, Ticket] = {}
        self.begun: dict[str, str] = {}
        self.ended: list[str] = []
        self.refused: list[str] = []
        self.said: list[tuple[float, str]] = []
        self.told: list[tuple[Event, float, list[orders.Action]]] = []
        self.wanted: set[str] = set()
        self.calm_s = 0.0
        self.ahead_s = 0.0  # of the clock that the Brain is told
        self.back_s: float | None = 5.0  # how long a lost node is gone
        self.snapshot: tuple[int, bytes] | None = None
        for i in range(nodes):
            self.join(Node(f"n{i}", pool, host, list(self.models), (f"h{i // 2}", "d0")))
        self.later(0.5, "count")

    # Time

    def later(self, delay_s: float, what: str, data: object = None) -> None:
        self.numbers += 1
        heapq.heappush(self.heap, (self.now + delay_s, self.numbers, what, data))

    def run(self, until_s: float) -> None:
        steps = 0
        while self.heap and self.heap[0][0] <= until_s:
            steps += 1
            assert steps < 200_000, "the world does not come to rest"
            self.now, _, what, data = heapq.heappop(self.heap)
            getattr(self, f"_{what}")(data)
        self.now = until_s

    def tell(self, event: Event) -> None:
        now = self.clock
        actions = self.brain.on(event, now)
        self.told.append((event, now, actions))
        for action in actions:
            self.obey(action)
        due_s = self.brain.next_wake(now)
        if due_s is not None:
            self.later(max(0.0, due_s - now), "tick")

    @property
    def clock(self) -> float:
        return self.now + self.ahead_s

    def report(self, name: str) -> None:
        node = self.nodes[name]
        up = {m: Busy(len(node.running[m]), 0, self.now - node.ended_s[m]) for m in self.models
              if node.stage[m] is Stage.ACTIVE}  # fmt: skip
        self.tell(Report(name, up))

    def remember(self) -> None:
        """Keep what the Brain believes now, as it would stand in a journal."""
        self.snapshot = (len(self.told), msgspec.json.encode(self.brain.memory()))

    def replay(self) -> None:
        """A Brain made of the snapshot does the same since."""
        assert self.snapshot is not None
        since, memory = self.snapshot
        again = Brain(self.settings, memory=msgspec.json.decode(memory, type=Memory))
        for event, now, actions in self.told[since:]:
            assert again.on(event, now) == actions, f"a replay differs at {now}"

    # Nodes

    def join(self, node: Node) -> None:
        self.nodes[node.name] = node
        self.tell(Joined(node.name, node.pool, node.host, tuple(self.models.values()), {}, *node.place))

    def lose(self, name: str) -> None:
        """A node dies with what it has; requests that it had begun come again."""
        node = self.nodes[name]
        again = self.cut([(m, on) for (m, _), on in self.replicas.items() if name in on])
        del self.nodes[name]
        self.replicas = {key: on for key, on in self.replicas.items() if name not in on}
        self.tell(Left(name))
        if self.back_s is not None:
            self.later(self.back_s, "rejoin", Node(name, node.pool, node.host, list(self.models), node.place))
        for id in again:
            self.arrive(msgspec.structs.replace(self.waiting[id], id=f"{id}'", arrived_s=self.clock))
            self.waiting.pop(id)

    def cut(self, replicas: list[tuple[str, tuple[str, ...]]]) -> list[str]:
        """What these had begun is begun no more."""
        gone = []
        for model, on in replicas:  # also some that are no more: their nodes may be of others by now
            theirs = sorted(id for id in self.nodes[on[0]].running[model] if self.begun[id] == on[0])
            gone += theirs
            for shard in on:
                self.nodes[shard].running[model].difference_update(theirs)
        for id in gone:
            self.begun.pop(id)
        return gone

    def _rejoin(self, node: object) -> None:
        assert isinstance(node, Node)
        self.join(node)

    def _lose(self, _: object) -> None:
        if len(self.nodes) > 2:
            self.lose(self.rng.choice(sorted(self.nodes)))

    def _tick(self, _: object) -> None:
        due_s = self.brain.next_wake(self.clock)
        # As whoever sleeps until then: a hair early is not too early.
        if due_s is not None and due_s <= self.clock + 1e-6:
            self.now += max(0.0, due_s - self.clock)
            self.tell(Tick())

    def _count(self, _: object) -> None:
        for name in list(self.nodes):
            self.report(name)
        self.tell(Counted({m: Counts(*self.tokens[m]) for m in self.models if any(self.tokens[m])}))
        self.want()
        self.later(0.5, "count")

    # Requests

    def ask(self, model: str, tokens: int = 100, work_s: float = 0.02) -> None:
        self.tickets += 1
        self.arrive(Ticket(id=f"t{self.tickets}", model=model, prompt_tokens=tokens, work_s=work_s,
                           arrived_s=self.clock, ttft_s=1.0))  # fmt: skip

    def _ask(self, model: object) -> None:
        assert isinstance(model, str)
        self.ask(model, self.rng.randint(1, 2000), self.rng.uniform(0.001, 0.3))

    def arrive(self, ticket: Ticket) -> None:
        self.tokens[ticket.model][0] += ticket.prompt_tokens
        self.tokens[ticket.model][4] += 1
        self.waiting[ticket.id] = ticket
        self.tell(Traffic(arrived=(ticket,)))
        self.want()

    def want(self) -> None:
        """As a front does: a model that requests wait for and that nobody serves is asked for, once."""
        open_models = {t.model for id, t in self.waiting.items() if id not in self.begun}
        lacking = {m for m in open_models if not self.serving(m)}
        fresh, self.wanted = lacking - self.wanted, lacking
        for model in sorted(fresh):
            self.tell(Wanted(model))

    def serving(self, model: str) -> list[str]:
        return [name for name in self.nodes if self.whole(model, name)]

    def whole(self, model: str, head: str) -> bool:
        """The node is the head of a replica that takes requests."""
        on = self.replicas.get((model, head), ())
        return bool(on) and on[0] == head and all(
            n in self.nodes and self.nodes[n].stage[model] is Stage.ACTIVE and not self.nodes[n].held[model] for n in on
        )  # fmt: skip

    def _first(self, id: object) -> None:
        """A prompt is computed."""
        if id in self.begun:
            assert isinstance(id, str)
            self.tell(Traffic(started=(id,)))
            self.later(self.last_s(), "last", id)

    def _last(self, id: object) -> None:
        name = self.begun.pop(str(id), None)
        if name is None:
            return
        ticket = self.waiting.pop(str(id))
        for shard in self.replicas.get((ticket.model, name), ()):
            self.nodes[shard].running[ticket.model].discard(ticket.id)
            self.nodes[shard].ended_s[ticket.model] = self.now
        self.ended.append(ticket.id)
        self.tokens[ticket.model][1] += 10
        self.tokens[ticket.model][2] += 1
        self.report(name)

    # How long things take

    def first_s(self, ticket: Ticket) -> float:
        """A prompt, until its first token."""
        return ticket.work_s * self.rng.uniform(0.8, 1.5)

    def last_s(self) -> float:
        """The tokens after the first."""
        return self.rng.uniform(0.05, 2.0)

    def order_s(self, order: Order) -> float:
        return self.rng.uniform(0.05, 1.5)

    # Orders

    def obey(self, action: orders.Action) -> None:
        match action:
            case Decided(_, why):
                self.said.append((self.now, why))
            case Refuse(model):
                gone = [t.id for t in self.waiting.values() if t.model == model and t.id not in self.begun]
                self.refused += gone
                for id in gone:
                    self.waiting.pop(id)
                self.wanted.discard(model)
                if gone:
                    self.later(0.0, "left", tuple(gone))
            case Dispatch(node, requests):
                for id in requests:
                    self.begin(id, node)
            case Order():
                self.calm_s = self.now
                self.said.append((self.now, f"{action.verb.value} {action.why}"))
                self.order(action)
            case Refit():
                pass
            case _:
                raise AssertionError(f"nobody asked for {action}")

    def _left(self, gone: object) -> None:
        assert isinstance(gone, tuple)
        self.tell(Traffic(left=gone))

    def begin(self, id: str, node: str) -> None:
        ticket = self.waiting[id]
        assert id not in self.begun, f"{id} is begun twice"
        assert self.whole(ticket.model, node), f"{id} is handed to {node}, which does not take {ticket.model}"
        self.begun[id] = node
        for name in self.replicas[ticket.model, node]:
            self.nodes[name].running[ticket.model].add(id)
        self.later(self.first_s(ticket), "first", id)

    def order(self, order: Order) -> None:
        node, model, verb = self.nodes[order.node], order.model, order.verb
        assert model not in node.order, f"two orders for {model} on {node.name}: {order}"
        stage = node.stage[model]
        if verb in (Verb.DRAIN, Verb.SERVE):
            assert stage is Stage.ACTIVE
            node.held[model] = verb is Verb.DRAIN
            return
        may = {
            Verb.LOAD: (Stage.COLD,),
            Verb.WAKE: (Stage.WARM,),
            Verb.FORK: (Stage.COLD, Stage.WARM),
            Verb.SLEEP: (Stage.ACTIVE,),
            Verb.UNLOAD: (Stage.ACTIVE,),
            Verb.EVICT: (Stage.WARM, Stage.ACTIVE),
        }
        assert stage in may[verb], f"{verb} of a model that is {stage}"
        if verb.lowers:
            assert not node.running[model], "a model with running requests was put to sleep"
            node.held[model] = True
        if verb.raises:
            self.replicas[model, (order.replica or (node.name,))[0]] = order.replica or (node.name,)
            node.held[model] = False
        node.order[model] = order
        self.check(node)
        self.later(self.order_s(order), "end", order)

    def check(self, node: Node) -> None:
        up = [self.models[m] for m in self.models if node.stage[m] is Stage.ACTIVE
              or (m in node.order and node.order[m].verb.raises)]  # fmt: skip
        beyond = max([0, *(k.longest_pages - k.floor_pages for k in up)])
        taken = sum(k.weight_pages + k.floor_pages for k in up) + beyond
        assert taken <= node.pool, f"{node.name} has not enough pages"
        copies = sum(self.models[m].host_bytes for m in self.models
                     if (node.copy[m] and (m not in node.order or node.order[m].verb is not Verb.EVICT))
                     or (m in node.order and node.order[m].verb is Verb.SLEEP))  # fmt: skip
        assert copies <= node.host

    def _end(self, order: object) -> None:
        assert isinstance(order, Order)
        node = self.nodes.get(order.node)
        if node is None or node.order.get(order.model) is not order:
            return
        model, verb = order.model, order.verb
        del node.order[model]
        missing = verb is Verb.FORK and (
            order.source not in self.nodes or self.nodes[order.source].stage[model] is not Stage.ACTIVE
        )
        if missing or (verb is not Verb.EVICT and self.rng.random() < self.trouble):
            node.held[model] = False
            why = f"{order.source} does not have it" if missing else "no luck"
            self.report(node.name)
            self.tell(Failed(order.id, node.stage[model], node.copy[model], why))
        else:
            if verb is Verb.EVICT:
                node.copy[model] = False
                node.stage[model] = Stage.COLD if node.stage[model] is Stage.WARM else node.stage[model]
            else:
                node.stage[model] = _ENDS[verb]
                node.copy[model] = node.copy[model] or verb is Verb.SLEEP
                node.copy[model] = node.copy[model] and verb is not Verb.UNLOAD
            node.ended_s[model] = self.now
            self.report(node.name)
            self.tell(Done(order.id, node.stage[model], node.copy[model], 0.2))
        self.want()

    def _crash(self, _: object) -> None:
        """An instance is lost; its requests end with it."""
        up = [(n, m) for n, node in sorted(self.nodes.items()) for m in self.models
              if node.stage[m] is Stage.ACTIVE and m not in node.order]  # fmt: skip
        if not up:
            return
        name, model = self.rng.choice(up)
        node = self.nodes[name]
        node.stage[model] = Stage.WARM if node.copy[model] else Stage.COLD
        node.held[model] = False
        gone = self.cut([(m, on) for (m, _), on in self.replicas.items() if m == model and name in on])
        for id in gone:
            self.waiting.pop(id)
        self.refused += gone
        self.tell(Lost(name, model, node.stage[model], node.copy[model]))
        if gone:
            self.tell(Traffic(left=tuple(gone)))
        self.want()
