"""Nodes that an operator has emptied so that they can be stopped: what only they serve goes elsewhere first. Pure.

The Brain owns one. `Fleet` plans as if such a node were not there, and brings up elsewhere what it wants to be up; here
that is waited for, and what it has no place for finds one. Each step follows from what is believed at that moment, so
that whatever fails in between is done again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from janus_server.duty import Absent, Assigned, Charge, Duty, EmptyingMemory
from janus_server.orders import Action, Answer, Stage
from janus_server.sched.fleet import Fleet
from janus_server.sched.placement import Note
from janus_server.sched.refuge import Home, Refuge, refuge
from janus_server.sched.room import Room

# Nodes come many at once, above all to a new leader: for so long after the last one nothing is said to have no place.
_CALM_S: Final = 1.0
_MOST_ABSENT: Final = 100


class Emptying:
    """Rooms know their duty themselves; `nodes` are those that are not to serve."""

    def __init__(self, rooms: Mapping[str, Room], fleet: Fleet, term: int, memory: EmptyingMemory) -> None:
        self._rooms, self._fleet, self._term = rooms, fleet, term
        self._refuge = Refuge()
        self._silent = set(memory.silent)
        self._absent = {one.node: one for one in memory.absent}
        self._awaited = set(memory.awaited)
        self.calm_s = memory.calm_s
        self.nodes = {name for name, room in rooms.items() if room.duty is not Duty.SERVE}

    def memory(self) -> EmptyingMemory:
        """What it knows now, as a copy."""
        return EmptyingMemory(
            silent=tuple(sorted(self._silent)), absent=tuple(self._absent.values()), calm_s=self.calm_s,
            awaited=tuple(sorted(self._awaited)),
        )  # fmt: skip

    def charges(self) -> dict[str, Charge]:
        """Of all nodes that were ever told something."""
        return {name: Charge(room.duty, room.since) for name, room in self._rooms.items() if room.since > (0, 0)}

    def joined(self, room: Room, now: float) -> None:
        """It may have been told its duty by an earlier leader, or by this one while it heard nothing."""
        absent = self._absent.pop(room.node, None)
        if absent is not None and absent.process == room.process and absent.charge.since > room.since:
            room.duty, room.since = absent.charge.duty, absent.charge.since
        self._silent.add(room.node)
        self.calm_s = now + _CALM_S
        self._know(room)

    def awaited(self, nodes: Sequence[str], now: float) -> None:
        """They are about to say what is up on them."""
        self._awaited, self.calm_s = set(nodes), now + _CALM_S

    def heard(self, node: str) -> None:
        """It said what is up there."""
        self._silent.discard(node)
        self._awaited.discard(node)

    def left(self, room: Room) -> None:
        self.nodes.discard(room.node)
        self._silent.discard(room.node)
        self._awaited.discard(room.node)
        if room.since > (0, 0):
            self._absent[room.node] = Absent(room.node, room.process, Charge(room.duty, room.since))
            if len(self._absent) > _MOST_ABSENT:
                del self._absent[next(iter(self._absent))]

    def empty(self, node: str) -> bool:
        """Nothing is up there, and nothing on its way, as it said itself."""
        beliefs = self._rooms[node].models.values()
        return node not in self._silent and not any(one.holds_pages or one.order is not None for one in beliefs)

    def nobody(self, now: float) -> bool:
        """There are nodes, and all of them are to be empty."""
        calm = self.calm_s is None or now >= self.calm_s
        return calm and bool(self._rooms) and len(self.nodes) == len(self._rooms)

    def unsure(self, now: float) -> bool:
        """Some node has just come, and not yet said what is up on it: it looks like the place for what is to go, and as
        if what it serves were nowhere.
        """
        lacking = self._awaited or (self.nodes and self._silent)
        return bool(lacking) and self.calm_s is not None and now < self.calm_s

    def next_wake(self) -> float | None:
        """When `step` is due whatever happens."""
        return self.calm_s if self.nodes else None

    def assign(self, event: Assigned, now: float) -> Answer:
        """An operator's wish for a node. To be emptied is refused where what only it serves has no other place."""
        node, duty = event.node, event.duty
        room = self._rooms.get(node)
        if room is None and node in self._absent:
            return self._later(self._absent[node], duty)
        if room is None:
            there = ", ".join(sorted(self._rooms)) or "none"
            return Answer(node, False, f"there is no node {node}; there are: {there}")
        before = room.duty
        if len(self._rooms) == 1 and duty is not Duty.SERVE:
            why = "it is the only node: nothing can go elsewhere; to end it, stop it: its requests finish first"
            return Answer(node, False, f"{node} cannot be emptied, {why}")
        if duty is Duty.SERVE:
            self._set(room, duty, now)
            for name in room.models:
                room.keep(name)
            again = "serves" if before is Duty.SERVE else "serves again"
            return Answer(node, True, f"{node} {again}: it takes models and requests")
        if before is not Duty.SERVE:
            self._set(room, Duty.FORCE if Duty.FORCE in (before, duty) else Duty.DRAIN, now)
            return Answer(node, True, self._how_far(room))
        lacking = self._lacking(room, now)
        if lacking and duty is Duty.DRAIN:
            return Answer(node, False, _refused(node, lacking, bool(self._staying(but=node))))
        self._set(room, duty, now)
        return Answer(node, True, self._how_far(room))

    def step(self, now: float, actions: list[Action]) -> list[str]:
        """What can be done now for each node that is to be empty. The names of rooms that were told something."""
        if self.calm_s is not None and now < self.calm_s:
            return []
        self.calm_s = None
        touched: dict[str, None] = {}
        notes: list[Note] = []
        for node in sorted(self.nodes):
            self._empty(self._rooms[node], now, notes, touched)
        self._fleet.note(notes, now, actions)
        return list(touched)

    # Answering

    def _set(self, room: Room, duty: Duty, now: float) -> None:
        if room.duty is duty:
            return
        room.duty, room.since = duty, self._next(room.since)
        self._know(room)
        self._fleet.assigned(room, now)

    def _next(self, since: tuple[int, int]) -> tuple[int, int]:
        return max((self._term, 1), (since[0], since[1] + 1))

    def _later(self, absent: Absent, duty: Duty) -> Answer:
        """For a node that an operator told something, and that is gone just now."""
        node, charge = absent.node, Charge(duty, self._next(absent.charge.since))
        self._absent[node] = Absent(node, absent.process, charge)
        what = "serves again" if duty is Duty.SERVE else "is emptied"
        return Answer(node, True, f"{node} is gone just now: it {what} when it is back, unless it was started anew")

    def _know(self, room: Room) -> None:
        self.nodes.discard(room.node)
        if room.duty is not Duty.SERVE:
            self.nodes.add(room.node)

    def _how_far(self, room: Room) -> str:
        up = sorted(name for name, belief in room.models.items() if belief.holds_pages)
        if self.empty(room.node):
            return f"{room.node} is empty: it can be stopped"
        return f"{room.node} is being emptied: {', '.join(up) or 'nothing'} still there"

    def _lacking(self, room: Room, now: float) -> list[str]:
        """What only this node serves and no other one has room for."""
        rooms = self._staying(but=room.node)
        alone = [name for name, belief in room.models.items()
                 if belief.holds_pages and not belief.sinking and not belief.falling
                 and not self._elsewhere(name, but=room.node) and not _on_its_way(name, rooms)]  # fmt: skip
        return sorted(set(alone) - refuge(alone, rooms, now).keys())

    # Emptying

    def _empty(self, room: Room, now: float, notes: list[Note], touched: dict[str, None]) -> None:
        alone: list[str] = []
        rooms = self._staying()
        for name, belief in room.models.items():
            if belief.stage is not Stage.ACTIVE:  # what fails on its way is not tried again
                belief.wanted_s = None
                belief.goal = None if belief.goal is Stage.ACTIVE else belief.goal
            if belief.order is not None or not belief.holds_pages:
                continue
            elsewhere = self._elsewhere(name)
            if belief.falling:
                if not elsewhere and room.duty is Duty.DRAIN:  # what took its place is gone
                    room.keep(name)
                    touched[room.node] = None
            elif elsewhere:
                if not self._copied(name, rooms):
                    self._lower(name, room, f"{', '.join(elsewhere)} has it", touched)
            elif not _on_its_way(name, rooms):
                alone.append(name)
        homes = self._refuge.of(alone, rooms, now) if alone else {}
        for name in alone:
            if name in homes:
                self._bring(name, room, homes[name], now, touched)
            elif room.duty is Duty.FORCE:
                self._lower(name, room, "no other node has room for it", touched)
            else:
                why = f"it is to be emptied, and still serves {name}, which no other node has room for"
                notes.append(Note(room.node, why))
        if self.empty(room.node):
            notes.append(Note(room.node, "it is empty: it can be stopped"))

    def _elsewhere(self, model: str, but: str = "") -> list[str]:
        """The nodes of other replicas that take its requests and stay."""
        leaving = self.nodes | {but}
        homes = [self._fleet.footing.of(model, head) for head in self._fleet.footing.serving(model)]
        return ["+".join(home) for home in homes if leaving.isdisjoint(home)]

    def _copied(self, model: str, rooms: Sequence[Room]) -> bool:
        """One more is on its way to another node, which may be read from here."""
        return any(room.models[model].rising for room in rooms if model in room.models)

    def _staying(self, but: str = "") -> list[Room]:
        return [room for name, room in self._rooms.items() if name not in self.nodes and name != but]

    def _lower(self, model: str, room: Room, why: str, touched: dict[str, None]) -> None:
        """Of several shards the head first: what it runs takes all of them."""
        nodes = self._fleet.footing.of(model, room.node) or (room.node,)
        others = [self._rooms[n].models[model] for n in self._fleet.footing.serving(model) if n not in self.nodes]
        if room.models[model].pinned and not any(belief.pinned for belief in others):
            for belief in others[:1]:  # the pin goes with it
                belief.pinned = True
        there = nodes[:1] if self._rooms[nodes[0]].models[model].busy else nodes
        for node in there:
            if self._rooms[node].lower(model, f"{model}@{'+'.join(nodes)}: {room.node} is emptied, and {why}"):
                touched[node] = None

    def _bring(self, model: str, room: Room, home: Home, now: float, touched: dict[str, None]) -> None:
        """Up there, once who gives way to it is gone or going."""
        for other, node in home.instead_of:
            if self._rooms[node].lower(other, f"{other}@{node}: it gives way to {model}, as {room.node} is emptied"):
                touched[node] = None
        rooms = [self._rooms[node] for node in home.nodes]
        if home.instead_of or not all(_has_room(one, model) for one in rooms):
            self._fleet.promised(model, home.nodes)
            return
        whole = self._fleet.footing.of(model, room.node)
        sources = whole if len(whole) == len(rooms) else (None,) * len(rooms)
        self._fleet.adopt(model, home.nodes)
        for one, source in zip(rooms, sources, strict=True):
            belief = one.models[model]
            copied = source if room.models[model].stage is Stage.ACTIVE and not belief.copy else None
            one.bring(model, copied, f"{model}: {room.node}, which serves it, is emptied", now)
            touched[one.node] = None


def _on_its_way(model: str, rooms: Sequence[Room]) -> bool:
    """Some node brings it up, or is to."""
    beliefs = [room.models[model] for room in rooms if model in room.models]
    return any(belief.rising or (belief.wanted_s is not None and not belief.holds_pages) for belief in beliefs)


def _has_room(room: Room, model: str) -> bool:
    """Without anybody's being sent away for it: what is being freed counts as free."""
    going = [belief for belief in room.models.values() if belief.sinking]
    return room.missing_pages(model, going) <= 0


def _refused(node: str, models: Sequence[str], others: bool) -> str:
    only = f"{node} serves {', '.join(models)}"
    if not others:
        return f"{only}, and every other node is being emptied: undo one of them, or force it"
    return (
        f"{only}, which no other node has room for beside what it serves: put a model to sleep there, add a node, or "
        "force it (what has no room is cold until somebody wants it)"
    )
