"""The Brain: events in, actions out; the one place that decides where models are and what runs when. Pure.

`leader` feeds it and carries its actions out. It keeps a `Room` for each node (which models are up there), a `Fleet`
over all of them (which models are up on which), the requests that wait to be begun (`Dispatcher`), and what is expected
of models (`Foresight`). Every order has a sentence that says why. The same events at the same times give the same
actions, so that a journal of them replays.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from janus_server.orders import (
    Action,
    Answer,
    Asked,
    Counted,
    Dispatch,
    Done,
    Event,
    Failed,
    Joined,
    Left,
    Lost,
    Observed,
    Offered,
    Order,
    Refuse,
    Report,
    Stage,
    Traffic,
    Unwanted,
    Verb,
    Wanted,
)
from janus_server.sched.dispatcher import Dispatcher
from janus_server.sched.fleet import Fleet
from janus_server.sched.foresight import Forecast, Foresight
from janus_server.sched.oracle_records import FitRequest, Fitted
from janus_server.sched.room import Room
from janus_server.sched.state import Belief, BrainSettings, Memory, RoomMemory, Standing, pages_needed


class Brain:
    """The leader's mind."""

    def __init__(self, settings: BrainSettings, term: int = 1, memory: Memory | None = None) -> None:
        """With what another Brain believed (`memory`), this one goes on where that one was."""
        memory = memory or Memory()
        self.settings = settings
        self.term = term
        self._orders = memory.orders
        self._rooms = {room.node: Room(settings, room, self._number) for room in memory.rooms}
        self._open = {
            belief.order.id: room.node for room in memory.rooms for belief in room.models if belief.order is not None
        }
        self._due: list[tuple[float, str]] = []
        for room in self._rooms.values():
            self._remind(room)
        self._dispatcher = Dispatcher(settings.ahead_s, memory.waiting)
        self._foresight = Foresight(settings.oracle, settings.refit_every_s, memory.foreseen)
        self._fleet = Fleet(settings.fleet, self._rooms, self._foresight, self._dispatcher.backlog_s,
                            self._dispatcher.waiting_s, memory.fleet)  # fmt: skip

    def on(self, event: Event, now: float) -> list[Action]:
        """What to do about `event`, which happened at `now`.

        Events about nodes, models or orders nobody knows do nothing.
        """
        actions: list[Action] = []
        touched = dict.fromkeys(self._hear(event, now, actions))
        while self._due and self._due[0][0] <= now:
            due_s, node = heapq.heappop(self._due)
            if self._still_due(due_s, node):
                touched.setdefault(node)
        self._plan(touched, event, now, actions)
        if self._fleet.due(now):
            led = dict.fromkeys(self._fleet.decide(now, actions))
            for model in self._fleet.homeless(now):
                led.update(dict.fromkeys(self._make_room(model, now)))
            self._plan(led, event, now, actions)
        # Who is served elsewhere does not care that it cannot be had here.
        actions = [a for a in actions if not (isinstance(a, Refuse) and self._fleet.footing.held(a.model))]
        self._dispatch(event, now, actions)
        return actions

    def next_wake(self, now: float) -> float | None:
        """When a `Tick` is due at the latest, or None when only events can change anything."""
        while self._due and not self._still_due(*self._due[0]):
            heapq.heappop(self._due)
        times = [self._due[0][0] if self._due else None, self._dispatcher.due_s(now), self._fleet.next_wake()]
        return min((time for time in times if time is not None), default=None)

    def memory(self) -> Memory:
        """What it believes now, as a copy."""
        rooms = tuple(room.memory() for room in self._rooms.values())
        return Memory(
            orders=self._orders, rooms=rooms, waiting=self._dispatcher.memory(), foreseen=self._foresight.memory(),
            fleet=self._fleet.memory(),
        )  # fmt: skip

    def forecast(self, model: str, now: float) -> Forecast | None:
        """What is expected of a model at the traffic that was seen last; None where nothing is known."""
        return self._foresight.forecast(model, now)

    def fit_request(self, model: str) -> FitRequest | None:
        """What a `Refit` wants fitted; None once it is answered or given up."""
        return self._foresight.fit_request(model)

    def settled(self, node: str, model: str) -> bool:
        """True when the model is where it should be on the node: no order open, no wish, nobody waiting."""
        return self._rooms[node].settled(model)

    def stages(self, node: str) -> dict[str, Stage]:
        """Where every model stands on a node, as far as is known."""
        return self._rooms[node].stages()

    def standing(self, node: str, model: str) -> Standing:
        """How a model of the catalogue is treated on a node just now."""
        return self._rooms[node].standing(model)

    def _with(self, model: str) -> list[Room]:
        """The nodes whose catalogue has the model."""
        return [room for room in self._rooms.values() if model in room.models]

    # Hearing

    def _hear(self, event: Event, now: float, actions: list[Action]) -> Collection[str]:
        """Take an event in; returns the nodes whose rooms are to be looked at because of it."""
        match event:
            case Joined(node):
                self._join(event, now)
                return (node,)
            case Left(node):
                self._rooms.pop(node, None)
                self._fleet.look(node)
                self._fleet.joined()
                self._open = {order: where for order, where in self._open.items() if where != node}
                self._dispatcher.gone(node)
            case Traffic():
                self._hear_traffic(event, now)
            case Wanted(model):
                return self._want(model, now)
            case Unwanted(model):
                for room in self._with(model):
                    room.unwant(model)
                return self._rooms
            case Offered(offers):
                for room in self._rooms.values():
                    room.offered(offers)
                return self._rooms
            case Report(node) if node in self._rooms:
                if self._rooms[node].hear(event, now):
                    self._fleet.look(node)
                return (node,)
            case Counted():
                self._fleet.counted(event, now)
            case Done(order) | Failed(order) if order in self._open:
                node = self._open.pop(order)
                self._rooms[node].close(event, now, actions)
                return (node,)
            case Lost(node, model, stage, copy) if node in self._rooms and model in self._rooms[node].models:
                self._rooms[node].lost(model, stage, copy)
                return (node,)
            case Asked(model) if self._with(model):
                actions.append(self._ask(event, now))
                return self._rooms
            case Observed():
                for room in self._rooms.values():
                    room.observed(event.models, now)
                self._foresight.observed(event, now, actions)
            case Fitted():
                self._foresight.learn(event)
            case _:  # Tick: what is due is looked at anyway
                pass
        return ()

    def _join(self, event: Joined, now: float) -> None:
        """A node is there. What it is to load at start is wanted from now on, as far as it fits beside what is before
        it in the catalogue, and no other node has it.
        """
        beliefs = tuple(Belief.of(known, now) for known in event.models)
        chosen: list[Belief] = []
        for belief in beliefs:
            name, known = belief.known.model, belief.known
            belief.offers = event.offers.get(name, ())
            lacking = known.preload and known.shards == 1 and not self._fleet.footing.held(name)
            if lacking and pages_needed([*chosen, belief]) <= event.pool_pages:
                belief.wanted_s = now
                chosen.append(belief)
        room = RoomMemory(node=event.node, pool_pages=event.pool_pages, host_bytes=event.host_bytes, models=beliefs,
                          host=event.host, domain=event.domain)  # fmt: skip
        self._rooms[event.node] = Room(self.settings, room, self._number)
        self._fleet.joined()

    def _hear_traffic(self, event: Traffic, now: float) -> None:
        for ticket in event.arrived:
            self._dispatcher.arrived(ticket, now)
        for request in event.started:
            self._dispatcher.started(request, now)
        for request in event.left:
            self._dispatcher.left(request, now)

    def _want(self, model: str, now: float) -> Collection[str]:
        """Have the model on one node: nothing is asked of any while one takes its requests, or was asked already.

        Of many nodes the fleet chooses; where it finds no room, one makes room.
        """
        rooms = self._with(model)
        beliefs = [room.models[model] for room in rooms]
        if not rooms or any(one.serving or one.wanted_s is not None for one in beliefs):
            return ()
        if self._fleet.leads:
            self._fleet.call(model, now)
            return ()
        return self._make_room(model, now)

    def _make_room(self, model: str, now: float) -> tuple[str, ...]:
        """Have the model where that takes the least ado; the nodes make room for it as soon as they may."""
        best = sorted(self._with(model), key=lambda room: _ado(room, model))
        shards = best[0].models[model].known.shards
        if len(best) < shards:
            return ()
        nodes = tuple(sorted(room.node for room in best[:shards]))
        self._fleet.adopt(model, nodes)
        for room in best[:shards]:
            room.want(model, now)
        return nodes

    def _ask(self, event: Asked, now: float) -> Answer:
        """An operator's wish, put to the nodes that it concerns; refused where one of them refuses it."""
        model, wish = event.model, event.wish
        rooms = [room for room in self._with(model) if event.node in (None, room.node)]
        if not rooms:
            return Answer(model, False, f"there is no node {event.node} that has {model}")
        if wish.goal is Stage.ACTIVE:
            rooms = [min(rooms, key=lambda room: _ado(room, model))]
        elif wish.goal is not None:
            rooms = [room for room in rooms if room.models[model].heading is not Stage.COLD] or rooms[:1]
        answers = [room.ask(model, wish, event.source, now) for room in rooms]
        if self._fleet.leads and answers[0].accepted and wish.goal is not None:
            if wish.goal is Stage.ACTIVE:
                self._fleet.adopt(model, (rooms[0].node,))
            elif event.node is None:
                self._fleet.sleep(model)
        return next((answer for answer in answers if not answer.accepted), answers[0])

    # Deciding

    def _plan(self, nodes: Iterable[str], event: Event, now: float, actions: list[Action]) -> None:
        for node in nodes:
            room, before = self._rooms.get(node), len(actions)
            if room is None:
                continue
            room.plan(now, actions)
            self._remind(room)
            if len(actions) > before or not isinstance(event, Report):
                self._fleet.look(node)

    def _remind(self, room: Room) -> None:
        if room.next_wake_s is not None:
            heapq.heappush(self._due, (room.next_wake_s, room.node))

    def _still_due(self, due_s: float, node: str) -> bool:
        """What was noted for a room that has since been looked at, or is gone, is of no interest."""
        return node in self._rooms and self._rooms[node].next_wake_s == due_s

    def _dispatch(self, event: Event, now: float, actions: list[Action]) -> None:
        """Hand over what devices that are nearly free shall begin, unless that was looked at a moment ago."""
        if actions or not isinstance(event, Traffic | Report):
            self._dispatcher.changed(now)
        due_s = self._dispatcher.due_s(now)
        if due_s is None or due_s > now:
            return
        nodes: dict[str, list[str]] = {}
        for ticket, node in self._dispatcher.begin(now, self._fleet.footing.serving):
            nodes.setdefault(node, []).append(ticket.id)
            for shard in self._fleet.footing.of(ticket.model, node):
                self._rooms[shard].begun(ticket.model)
        for node, requests in nodes.items():
            left, ahead_s = len(self._dispatcher), self._dispatcher.backlog_s(node, now)
            why = f"{node}: {len(requests)} begin, {left} wait; {ahead_s:.2f} s of prompts lie before it"
            actions.append(Dispatch(node, tuple(requests), why))

    def _number(self, node: str, model: str, verb: Verb, why: str, source: str | None) -> Order:
        self._orders += 1
        nodes = self._fleet.footing.of(model, node)
        if verb.ends:
            self._open[self._orders] = node
        return Order(self.term, self._orders, node, model, verb, why, source, nodes if len(nodes) > 1 else ())


def _ado(room: Room, model: str) -> tuple[bool, bool, float, int, str]:
    """What it takes to have a model on a node: it is there or on its way, there is room, it is quick."""
    belief, missing = room.models[model], room.missing_pages(model)
    return (not belief.holds_pages, missing > 0, belief.reload_s, missing, room.node)
