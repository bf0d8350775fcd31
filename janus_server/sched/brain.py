"""The Brain: events in, actions out; the one place that decides where models are and what runs when. Pure.

`leader` feeds it and carries its actions out. It keeps a `Room` for each node (which models are up there), a `Fleet`
over all of them (which models are up on which), the requests that wait to be begun (`Dispatcher`), and what is expected
of models (`Foresight`). Every order has a sentence that says why. The same events at the same times give the same
actions, so that a journal of them replays.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from janus_server.duty import NOBODY, Assigned, Awaited, Charge, Duty
from janus_server.orders import (
    Action,
    Answer,
    Asked,
    Counted,
    Dispatch,
    Done,
    Event,
    Failed,
    Helper,
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
from janus_server.sched.ado import ado, few
from janus_server.sched.dispatcher import Dispatcher
from janus_server.sched.emptying import Emptying
from janus_server.sched.fleet import Fleet
from janus_server.sched.foresight import Forecast, Foresight
from janus_server.sched.newcomer import newcomer
from janus_server.sched.oracle_records import FitRequest, Fitted
from janus_server.sched.placement import Note
from janus_server.sched.pools import Pool
from janus_server.sched.prefixes import Cached
from janus_server.sched.room import Room
from janus_server.sched.sound import Clock, sound
from janus_server.sched.split import Splits
from janus_server.sched.state import BrainSettings, Memory, Standing
from janus_server.units import format_seconds

# A clock that goes back by less is only said to tremble.
_JUMP_S = 1.0


class Brain:
    """The leader's mind."""

    def __init__(self, settings: BrainSettings, term: int = 1, memory: Memory | None = None) -> None:
        """With what another Brain believed (`memory`), this one goes on where that one was."""
        memory = memory or Memory()
        self.settings = settings
        self.term = term
        self._orders = memory.orders
        self._clock = Clock(memory.clock.at_s, memory.clock.lag_s)
        self._rooms = {room.node: Room(settings, room, self._number) for room in memory.rooms}
        self._open = {
            belief.order.id: room.node for room in memory.rooms for belief in room.models if belief.order is not None
        }
        self._due: list[tuple[float, str]] = []
        for room in self._rooms.values():
            self._remind(room)
        self._dispatcher = Dispatcher(settings.ahead_s, memory.waiting, settings.dispatch)
        self._foresight = Foresight(settings.oracle, settings.refit_every_s, memory.foreseen)
        self._fleet = Fleet(settings.fleet, self._rooms, self._foresight, self._dispatcher.backlog_s,
                            self._dispatcher.waiting_s, memory.fleet)  # fmt: skip
        self._emptying = Emptying(self._rooms, self._fleet, term, memory.emptying)
        self._splits = Splits(settings.split, self._rooms, self._fleet.footing.serving, self._dispatcher)

    def on(self, event: Event, now: float) -> list[Action]:
        """What to do about `event`, which happened at `now`.

        Events about nodes, models or orders nobody knows do nothing, nor does what is no number in others. Where `now`
        goes back, time goes on here all the same.
        """
        actions: list[Action] = []
        notes: list[Note] = []
        now = self._read(now, notes)
        event = sound(event, self._clock.lag_s, notes)
        if notes:
            self._fleet.note(notes, now, actions)
        touched = dict.fromkeys(self._hear(event, now, actions))
        while self._due and self._due[0][0] <= now:
            due_s, node = heapq.heappop(self._due)
            if self._still_due(due_s, node):
                touched.setdefault(node)
        if touched:
            self._plan(touched, event, now, actions)
        if self._fleet.due(now) and not self._emptying.unsure(now):
            led = dict.fromkeys(self._fleet.decide(now, actions))
            for model in self._fleet.homeless(now):
                led.update(dict.fromkeys(self._make_room(model, now, actions)))
            self._plan(led, None, now, actions)
        if self._emptying.nodes:
            self._plan(self._emptying.step(now, actions), None, now, actions)
        if actions:
            actions = [a for a in actions if not (isinstance(a, Refuse) and self._elsewhere(a, now))]
        self._dispatch(event, now, actions)
        return actions

    def next_wake(self, now: float) -> float | None:
        """When a `Tick` is due at the latest, or None when only events can change anything."""
        while self._due and not self._still_due(*self._due[0]):
            heapq.heappop(self._due)
        now += self._clock.lag_s
        fleet_s = self._emptying.calm_s if self._emptying.unsure(now) else self._fleet.next_wake()
        rooms_s = self._due[0][0] if self._due else None
        times = [rooms_s, self._dispatcher.due_s(now), fleet_s, self._emptying.next_wake()]
        due_s = min((time for time in times if time is not None), default=None)
        return None if due_s is None else self._clock.told(due_s)

    def memory(self) -> Memory:
        """What it believes now, as a copy."""
        rooms = tuple(room.memory() for room in self._rooms.values())
        return Memory(
            orders=self._orders, rooms=rooms, waiting=self._dispatcher.memory(), foreseen=self._foresight.memory(),
            fleet=self._fleet.memory(), clock=Clock(self._clock.at_s, self._clock.lag_s),
            emptying=self._emptying.memory(),
        )  # fmt: skip

    def pools(self) -> dict[str, Pool]:
        """The pool of each model that the fleet decides about."""
        return {member.model: member.pool for member in self._fleet.pools.members}

    def serving(self, model: str) -> tuple[str, ...]:
        """The nodes that take its requests, as far as is known."""
        return self._fleet.footing.serving(model) if self._fleet.knows(model) else ()

    def nodes(self) -> tuple[str, ...]:
        """Those that it leads."""
        return tuple(self._rooms)

    def leaving(self) -> tuple[str, ...]:
        """Those that an operator has it empty."""
        return tuple(sorted(self._emptying.nodes))

    def charges(self) -> dict[str, Charge]:
        """What operators have nodes do, for all that were ever told something."""
        return self._emptying.charges()

    def forecast(self, model: str, now: float) -> Forecast | None:
        """What is expected of a model at the traffic that was seen last; None where nothing is known."""
        return self._foresight.forecast(model, now + self._clock.lag_s)

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
        """The nodes whose catalogue has the model and that take any."""
        return [room for room in self._rooms.values() if model in room.models and room.duty is Duty.SERVE]

    # Hearing

    def _read(self, now: float, notes: list[Note]) -> float:
        lag_s = self._clock.lag_s
        read_s = self._clock.read(now)
        back_s = self._clock.lag_s - lag_s
        if back_s >= _JUMP_S:
            notes.append(Note("clock", f"it went back by {format_seconds(back_s)}: time goes on from where it was"))
        return read_s

    def _hear(self, event: Event, now: float, actions: list[Action]) -> Collection[str]:
        """Take an event in; returns the nodes whose rooms are to be looked at because of it."""
        match event:
            case Joined(node):
                self._join(event, now)
                return dict.fromkeys((node, *self._seek(now, actions)))
            case Awaited(nodes):
                self._emptying.awaited(nodes, now)
            case Left(node) if node in self._rooms:
                self._leave(node)
                return self._seek(now, actions)
            case Traffic():
                self._hear_traffic(event, now, actions)
            case Wanted(model):
                return self._want(model, now, actions)
            case Unwanted(model):
                for room in self._with(model):
                    room.unwant(model)
                return self._rooms
            case Offered(offers):
                for room in self._rooms.values():
                    room.offered(offers)
                return self._rooms
            case Report(node) if node in self._rooms:
                self._emptying.heard(node)
                if self._rooms[node].hear(event, now):
                    self._fleet.look(node)
                return (node,)
            case Counted():
                self._fleet.counted(event, now)
            case Cached(node) if node in self._rooms:
                self._dispatcher.held(event)
            case Done(order) | Failed(order) if order in self._open:
                node = self._open.pop(order)
                self._rooms[node].close(event, now, actions)
                return (node,)
            case Lost(node, model, stage, copy) if node in self._rooms and model in self._rooms[node].models:
                self._rooms[node].lost(model, stage, copy)
                return (node,)
            case Asked():
                actions.append(self._ask(event, now))
                return self._rooms
            case Assigned():
                actions.append(self._emptying.assign(event, now))
                return self._rooms
            case Observed():
                for room in self._rooms.values():
                    room.observed(event.models, now)
                known = {name: subject for name, subject in event.subjects.items() if self._fleet.knows(name)}
                self._foresight.observed(Observed(event.models, known), now, actions)
            case Fitted():
                self._foresight.learn(event)
        return ()  # of a Tick too: what is due is looked at anyway

    def _elsewhere(self, refusal: Refuse, now: float) -> bool:
        """Who is served elsewhere does not care that it cannot be had here, nor who may be where it is not broken."""
        if self._fleet.footing.held(refusal.model):
            return True
        beliefs = [(room, room.models[refusal.model]) for room in self._with(refusal.model)]
        broken = any(one.barred(now) and one.broken == refusal.why for _, one in beliefs)
        able = [room for room, one in beliefs if not one.barred(now) and room.able(refusal.model)]
        return broken and self._fleet.leads and len(able) >= max(one.known.shards for _, one in beliefs)

    def _join(self, event: Joined, now: float) -> None:
        """A node is there; nothing is left of one that had its name before, but for what it is to do."""
        if event.node in self._rooms:
            self._leave(event.node)
        memory = newcomer(event, now, lambda model: bool(self._fleet.footing.held(model)))
        room = self._rooms[event.node] = Room(self.settings, memory, self._number)
        self._emptying.joined(room, now)
        self._fleet.joined(room)

    def _leave(self, node: str) -> None:
        self._emptying.left(self._rooms[node])
        self._fleet.left(self._rooms.pop(node))
        self._open = {order: where for order, where in self._open.items() if where != node}
        self._dispatcher.gone(node)

    def _seek(self, now: float, actions: list[Action]) -> Collection[str]:
        """Where nobody else looks after them: models that requests wait for, after nodes came or went."""
        if self._fleet.leads:
            return ()
        waited = sorted(self._dispatcher.waiting_s())
        return dict.fromkeys(node for model in waited for node in self._want(model, now, actions))

    def _hear_traffic(self, event: Traffic, now: float, actions: list[Action]) -> None:
        for ticket in event.arrived:
            self._dispatcher.arrived(ticket, now)
            if self._rooms and not self._fleet.knows(ticket.model):
                actions.append(Refuse(ticket.model, "no node has it", None))
        for request in event.started:
            self._dispatcher.started(request, now)
        for request in event.left:
            self._dispatcher.left(request, now)

    def _want(self, model: str, now: float, actions: list[Action]) -> Collection[str]:
        """Have the model on one node: nothing is asked of any while one takes its requests, or was asked already.

        Of many nodes the fleet chooses; where it finds no room, one makes room.
        """
        asked = any(room.models[model].wanted_s is not None for room in self._with(model))
        if asked or self._fleet.footing.serving(model):
            return ()
        if self._emptying.nobody(now):
            return self._make_room(model, now, actions)
        if self._fleet.decides(model):
            self._fleet.call(model, now)
            return ()
        return self._make_room(model, now, actions)

    def _make_room(self, model: str, now: float, actions: list[Action]) -> tuple[str, ...]:
        """Have the model where that takes the least ado; the nodes make room for it as soon as they may."""
        best = self._best(model, now)
        shards = best[0].models[model].known.shards if best else 1
        if len(best) < shards:
            if any(room.duty is Duty.SERVE for room in self._rooms.values()):  # else nodes may come
                actions.append(Refuse(model, few(shards, len(best)), self.settings.broken_s if best else None))
            elif self._emptying.nobody(now):
                actions.append(Refuse(model, NOBODY, self.settings.broken_s))
            return ()
        nodes = tuple(sorted(room.node for room in best[:shards]))
        if all(room.able(model) for room in best[:shards]):  # else it is refused
            self._fleet.adopt(model, nodes)
        for room in best[:shards]:
            room.want(model, now)
        return nodes

    def _best(self, model: str, now: float) -> list[Room]:
        """The nodes that may have the model, that with the least ado first."""
        return sorted(self._with(model), key=lambda room: ado(room, model, now))

    def _ask(self, event: Asked, now: float) -> Answer:
        """An operator's wish, put to the nodes that it concerns; refused where one of them refuses it."""
        model, wish = event.model, event.wish
        rooms = [room for room in self._best(model, now) if event.node in (None, room.node)]
        if wish.goal is not Stage.ACTIVE:
            rooms += [self._rooms[node] for node in self.leaving()
                      if event.node in (None, node) and model in self._rooms[node].models]  # fmt: skip
        elif event.node in self._emptying.nodes:
            return Answer(model, False, f"{event.node} is being emptied and takes no model until it serves again")
        if not rooms:
            which = "no node" if event.node is None else f"no node {event.node}"
            return Answer(model, False, f"there is {which} that has {model}")
        shards = rooms[0].models[model].known.shards
        if wish.goal is Stage.ACTIVE and len(rooms) < shards:
            return Answer(model, False, f"{model}: {few(shards, len(rooms))}")
        if wish.goal is Stage.ACTIVE:
            rooms = sorted(rooms[:shards], key=lambda room: room.node)
        elif wish.goal is not None:
            rooms = [room for room in rooms if room.models[model].heading is not Stage.COLD] or rooms[:1]
        answers = [room.ask(model, wish, event.source, now) for room in rooms]
        refused = next((answer for answer in answers if not answer.accepted), None)
        if refused is not None:
            for room, answer in zip(rooms, answers, strict=True):
                if answer.accepted and len(rooms) > 1 and wish.goal is Stage.ACTIVE:
                    room.lower(model, f"{model}: another shard's node refused")  # nothing was ordered yet
            return refused
        if self._fleet.leads and wish.goal is Stage.ACTIVE:
            self._fleet.wish(model, tuple(room.node for room in rooms), now)
        elif self._fleet.leads and wish.goal is not None:
            self._fleet.sleep(model, event.node)
        return answers[0]

    # Deciding

    def _plan(self, nodes: Iterable[str], event: Event | None, now: float, actions: list[Action]) -> None:
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
        nodes: dict[tuple[str, Helper | None], list[str]] = {}
        saved: dict[tuple[str, Helper | None], float] = {}
        for ticket, node, saved_s in self._dispatcher.begin(now, self._fleet.footing.serving):
            group = node, self._splits.helper(ticket, node, now)
            nodes.setdefault(group, []).append(ticket.id)
            saved[group] = saved.get(group, 0.0) + saved_s
            for shard in self._fleet.footing.of(ticket.model, node):
                self._rooms[shard].begun(ticket.model)
        for (node, helper), requests in nodes.items():
            left, ahead_s = len(self._dispatcher), self._dispatcher.backlog_s(node, now)
            why = f"{node}: {len(requests)} begin, {left} wait; {ahead_s:.2f} s of prompts lie before it"
            saved_s = saved[node, helper]
            why += f", {saved_s:.2f} s less for what it has cached" if saved_s else ""
            why += f", with prompts from {helper.node}" if helper is not None else ""
            actions.append(Dispatch(node, tuple(requests), why, helper))

    def _number(self, node: str, model: str, verb: Verb, why: str, source: str | None) -> Order:
        self._orders += 1
        nodes = self._fleet.footing.of(model, node)
        if verb.ends:
            self._open[self._orders] = node
        return Order(self.term, self._orders, node, model, verb, why, source, nodes if len(nodes) > 1 else ())
