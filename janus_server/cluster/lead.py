"""The elected leader of a cluster: one Brain, told of what nodes say, whose actions go to the nodes that they concern.

`member` makes one for each term that its node is elected for and ends it with the term. At first it listens for a
moment, until all nodes have presented themselves: who decides before it knows what is there loads it twice. Lives on
the loop; it has no opinion beside the Brain's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Final, Protocol

import msgspec

from janus_server.api.cluster import Decision, LeaderView
from janus_server.cluster.decisions import Decisions
from janus_server.cluster.files import Files
from janus_server.cluster.prices import Prices
from janus_server.cluster.sight import leader_view
from janus_server.cluster.tally import Tally
from janus_server.cluster.tickets import by_front, front_of
from janus_server.cluster.windows import Windows
from janus_server.duty import Assigned, Awaited
from janus_server.fitting import Fitter
from janus_server.journal import Entry
from janus_server.orders import (
    Action,
    Answer,
    Counted,
    Decided,
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
    Tick,
    Traffic,
    Unwanted,
    Verb,
    Wanted,
    Wished,
)
from janus_server.sched.brain import Brain
from janus_server.wire.frames import Given, Outcome, Table, Told

log = logging.getLogger("janus.cluster")

BEAT_S: Final = 0.5
# Nodes that have not presented themselves by then are decided without.
LISTEN_S: Final = 1.0
# A table is repeated after so long, for whoever missed one, and as a sign of life.
_TABLE_S: Final = 0.9
# After these the table may be another one.
_MOVING: Final = (Joined, Left, Lost, Done, Failed, Order, Assigned)
_LOST_ORDER: Final = "the order did not reach the node in time"


class Giving(Protocol):
    """give(node, number, action) brings an action to a node, as order `number` of the term; False where none may be
    given any more. `Lead.outcome` is told what became of it."""

    def __call__(self, node: str, number: int, action: Given) -> bool: ...


class Lead:
    """One term. record is told of each event with all that it led to."""

    def __init__(
        self, brain: Brain, there: Callable[[], Collection[str]], give: Giving, record: Callable[[Entry], None],
        fitter: Fitter | None, decisions: Decisions | None = None,
    ) -> None:  # fmt: skip
        """there() are the nodes that are there, as the coordinator says, and those that it misses while the links to
        them live: after an outage everybody registers anew, some later than the leader is elected."""
        self._there = there
        self.term = brain.term
        self._brain = brain
        self._give_to = give
        self._record = record
        self._fitter = fitter
        self._expected = set(there())
        self._heard: list[tuple[str, Sequence[Told]]] | None = []
        self._strangers: dict[str, list[Sequence[Told]]] = {}
        self._given: dict[int, tuple[str, Given]] = {}
        self._number = 0
        self._waiting: dict[str, dict[str, None]] = {}  # tickets that nobody has begun, by model
        self._models: dict[str, str] = {}
        self._wanted: set[str] = set()
        self._tally = Tally()
        self._prices = Prices()
        self._decisions = decisions or Decisions(brain.term)
        self._files = Files()
        self._windows = Windows()
        self._window_s = time.monotonic()
        self._moved: set[str] = set()
        self._table: Table | None = None
        self._tabled_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._start(self._listen())
        self._start(self._beat())

    @property
    def brain(self) -> Brain:
        return self._brain

    @property
    def listening(self) -> bool:
        """It waits for nodes to present themselves, and decides nothing yet."""
        return self._heard is not None

    def view(self) -> LeaderView:
        """What it knows and expects, for who looks on."""
        waiting = {model: len(tickets) for model, tickets in self._waiting.items()}
        return leader_view(self._brain, self._decisions.last(), waiting)

    def decided(self) -> list[Decision]:
        """The last of it, the newest last."""
        return self._decisions.last()

    def hear(self, node: str, events: Sequence[Told]) -> None:
        """What a node tells; times in it are on this node's clock."""
        if node not in self._there():  # the coordinator is slower than it: nothing can be given to it yet
            self._strangers.setdefault(node, []).append(events)
            return
        if self._heard is not None:
            self._heard.append((node, events))
            self._expected -= {event.node for event in events if isinstance(event, Joined)}
            if not self._expected:
                self._begin()
            return
        for event in events:
            self._hear(node, event)

    def came(self, node: str) -> None:
        """The coordinator says that it is there."""
        for events in self._strangers.pop(node, []):
            self.hear(node, events)

    def left(self, node: str) -> None:
        """The coordinator says that it is gone."""
        self._expected.discard(node)
        self._strangers.pop(node, None)
        if self._heard is not None:
            self._heard = [(who, events) for who, events in self._heard if who != node]
            return
        for number in [number for number, (where, _) in self._given.items() if where == node]:
            del self._given[number]
        gone = [ticket for ticket in self._models if front_of(ticket) == node]
        self._tally.gone(node)
        self._prices.gone(node)
        self._off(node)
        if gone:
            self._traffic(Traffic(left=tuple(gone)))

    def ask(self, event: Wished) -> Answer:
        """Once it listens no more."""
        return next(action for action in self._on(event) if isinstance(action, Answer))

    def outcome(self, number: int, outcome: Outcome) -> None:
        """What became of something that was given."""
        found = self._given.pop(number, None)
        if found is None or outcome in (Outcome.APPLIED, Outcome.ALREADY) or self._heard is not None:
            return
        node, action = found
        match action:
            case Order(verb=Verb.DRAIN | Verb.SERVE) if node in self._brain.nodes() and outcome is Outcome.EXPIRED:
                self._give(node, action)
            case Order() if action.verb.ends and node in self._brain.nodes():
                stage = self._brain.stages(node)[action.model]
                self._on(Failed(action.id, stage, False, _LOST_ORDER))
            case Dispatch(requests=requests):  # their front tells of them anew where they still wait
                self._traffic(Traffic(left=requests))

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Hearing

    async def _listen(self) -> None:
        await asyncio.sleep(LISTEN_S)
        if self._heard is not None:
            self._begin()

    def _begin(self) -> None:
        """Nodes first, with what stands on each, then who waits: for what a node has that was not heard yet, another
        one would load it, or it would be refused.
        """
        heard, self._heard = self._heard or [], None
        self._decisions.begin(self._there(), time.time())
        heard.sort(key=lambda one: not any(isinstance(event, Joined) for event in one[1]))
        told = [(node, event) for node, events in heard for event in events]
        self._on(Awaited(tuple(sorted({node for node, event in told if isinstance(event, Joined) and event.models}))))
        for node, event in sorted(told, key=lambda one: isinstance(one[1], Traffic)):
            self._hear(node, event)

    def _hear(self, node: str, event: Told) -> None:
        match event:
            case Joined(models=()):
                self._off(node)
            case Joined():
                self._join(node, event)
            case Observed(subjects=subjects):
                self._windows.heard(node, event)
                if subjects:
                    self._on(Observed({}, subjects))
            case Traffic():
                self._traffic(event)
            case Counted(models=models):
                served = self._served()  # sums are kept for ever: of nothing that a node makes up
                known = Counted({model: counts for model, counts in models.items() if model in served})
                self._tally.heard(node, known)
                self._prices.heard(node, known)
            case _:
                self._on(event)

    def _join(self, node: str, joined: Joined) -> None:
        """A node whose models are others than those of the cluster gets no part in it."""
        trouble = self._files.joined(node, joined.models)
        if trouble is None:
            self._on(joined)
            return
        log.error("%s", trouble)
        self._give(node, Answer("", False, trouble))

    def _off(self, node: str) -> None:
        """It is not of the cluster any more."""
        self._files.left(node)
        self._on(Left(node))

    def _traffic(self, traffic: Traffic) -> None:
        if traffic.arrived:
            traffic = msgspec.structs.replace(traffic, arrived=tuple(map(self._prices.of, traffic.arrived)))
        for ticket in traffic.arrived:
            self._models[ticket.id] = ticket.model
            self._waiting.setdefault(ticket.model, {})[ticket.id] = None
        for request in traffic.left:
            self._forget(request)
            self._models.pop(request, None)
        self._on(traffic)

    def _forget(self, request: str) -> None:
        """It does not wait any more."""
        model = self._models.get(request)
        if model is not None:
            self._waiting.get(model, {}).pop(request, None)

    def _on(self, event: Event) -> list[Action]:
        actions = self._told(event)
        for model in list(self._waiting):
            if not self._waiting[model]:
                del self._waiting[model]
        wanted = {model for model in self._waiting if not self._brain.serving(model)}
        for model in sorted(self._wanted - wanted):
            self._wanted.discard(model)
            actions += self._told(Unwanted(model))
        for model in sorted(wanted - self._wanted):
            self._wanted.add(model)
            actions += self._told(Wanted(model))
        if isinstance(event, _MOVING) or any(isinstance(action, _MOVING) for action in actions):
            self._publish(time.monotonic())
        self._set_timer()
        return actions

    def _told(self, event: Event) -> list[Action]:
        now = time.monotonic()
        actions = self._brain.on(event, now)
        self._record(Entry(now, event, tuple(actions)))
        self._decisions.see(event, actions, time.time())
        for action in actions:
            self._act(action)
        return list(actions)

    # Acting

    def _act(self, action: Action) -> None:
        match action:
            case Order(node=node):
                if action.verb is not Verb.EVICT:
                    self._moved.add(action.model)
                self._give(node, action)
            case Dispatch(node, requests, why, helper):
                for request in requests:
                    self._forget(request)
                for front, ours in by_front(requests).items():
                    self._give(front, Dispatch(node, tuple(ours), why, helper))
            case Refuse(model):
                fronts = dict.fromkeys(front_of(request) for request in self._waiting.pop(model, {}))
                self._wanted.discard(model)  # who comes after them wants it anew
                for front in fronts:
                    self._give(front, action)
            case Refit(model, why):
                log.debug("%s", why)
                self._start(self._fit(model))
            case Decided(_, why):
                log.info("%s", why)
            case Answer():
                pass

    def _give(self, node: str, action: Given) -> None:
        self._number += 1
        number = self._number
        self._given[number] = node, action
        if not self._give_to(node, number, action):
            asyncio.get_running_loop().call_soon(self.outcome, number, Outcome.REFUSED)

    def _publish(self, now: float) -> None:
        routes = {model: self._brain.serving(model) for model in sorted(self._served())}
        number = 0 if self._table is None else self._table.number
        nodes, settled = self._brain.nodes(), self._brain.settled
        resting = tuple(
            model for model, where in routes.items() if not where and all(settled(node, model) for node in nodes)
        )
        table = Table(number, routes, nodes, self._brain.charges(), resting)
        if table == self._table and now - self._tabled_s < _TABLE_S:
            return
        self._tabled_s = now
        self._table = msgspec.structs.replace(table, number=number + 1)
        for node in self._there():  # also to those that are not known here: they present themselves then
            self._give(node, self._table)

    def _served(self) -> set[str]:
        return {model for node in self._brain.nodes() for model in self._brain.stages(node)}

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if self._heard is not None:
                continue
            counted = self._tally.take()
            if counted is not None:
                self._on(counted)
            self._observe(time.monotonic())
            self._publish(time.monotonic())

    def _observe(self, now: float) -> None:
        if now - self._window_s < self._brain.settings.oracle.window_s:
            return
        self._window_s = now
        observed = self._windows.take(now, lambda model: len(self._brain.serving(model)), self._moved)
        self._moved = set()
        if observed is not None:
            self._on(observed)

    async def _fit(self, model: str) -> None:
        request = self._brain.fit_request(model)
        if self._fitter is None or request is None:
            return
        fitted = await self._fitter.fit(request)
        if fitted is not None:
            self._on(fitted)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("something that the leader does in its own time has failed", exc_info=error)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        due_s = self._brain.next_wake(now)
        if due_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.001, due_s - now), self._on, Tick())
