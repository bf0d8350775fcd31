"""Where the models of a node that is to be emptied can go: a place for each beside what the other nodes serve. Pure.

`emptying` asks before it says yes to an operator, and again for each step. What other nodes serve stays served: of them
only such replicas give way as their model has others of. It searches until all have a place or it has tried for long.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from janus_server.orders import Stage
from janus_server.sched.room import Room
from janus_server.sched.state import Belief, pages_needed

# Choices that are looked at for one number of models without a place.
_STATES: Final = 1000


class Home(NamedTuple):
    """The nodes of a replica, its head first, and who gives way to it: models and their nodes."""

    nodes: tuple[str, ...]
    instead_of: tuple[tuple[str, str], ...] = ()


class Refuge:
    """`refuge`, which is not asked twice about the same: somebody who is stuck asks at every event."""

    def __init__(self) -> None:
        self._key: object = None
        self._found: dict[str, Home] = {}

    def of(self, models: Sequence[str], rooms: Sequence[Room], now: float) -> dict[str, Home]:
        key = tuple(models), [(room.node, room.pool_pages, _looked_at(room, now)) for room in rooms]
        if key != self._key:
            self._key, self._found = key, refuge(models, rooms, now)
        return self._found


def refuge(models: Sequence[str], rooms: Sequence[Room], now: float) -> dict[str, Home]:
    """A home for as many of the models as possible on `rooms`, which are not to be emptied. Larger ones come first.

    Example: a (40 pages) and b (30) are to go, x has 50 pages free and y 35: a to x, b to y. Where y has 20 and c (20)
    on it, which x serves too: b to y instead of c.
    """
    known = {name: room.models[name] for room in rooms for name in models if name in room.models}
    ranked = sorted(known, key=lambda name: (-pages_needed([known[name]]) * known[name].known.shards, name))
    for skips in range(len(ranked) + 1):
        found = _Search(rooms, now).place(ranked, skips)
        if found is not None:
            return found
    return {}


class _Search:
    """One number of models that may go without."""

    def __init__(self, rooms: Sequence[Room], now: float) -> None:
        self._rooms, self._now = {room.node: room for room in rooms}, now
        self._held = {room.node: {b.known.model: b for b in room.models.values() if _stays(b)} for room in rooms}
        self._up = Counter(
            name for held in self._held.values() for name, belief in held.items() if belief.serving
        )  # fmt: skip
        self._left = _STATES

    def place(self, models: Sequence[str], skips: int) -> dict[str, Home] | None:
        if not models:
            return {}
        model, rest = models[0], models[1:]
        for home in self._homes(model):
            self._left -= 1
            if self._left < 0:
                return None
            undo = self._take(model, home)
            found = self.place(rest, skips)
            if found is not None:
                return {model: home, **found}
            for node, held in undo:
                self._held[node] = held
            self._up.update(name for name, _ in home.instead_of)
        return self.place(rest, skips - 1) if skips else None

    def _take(self, model: str, home: Home) -> list[tuple[str, dict[str, Belief]]]:
        """Live there from now on; what those nodes held before comes back."""
        undo = [(node, self._held[node]) for node in home.nodes]
        for node, held in undo:
            gone = {name for name, at in home.instead_of if at == node}
            stay = {name: belief for name, belief in held.items() if name not in gone}
            self._held[node] = {**stay, model: self._rooms[node].models[model]}
        self._up.subtract(name for name, _ in home.instead_of)
        return undo

    def _homes(self, model: str) -> Iterator[Home]:
        """The least ado first: nobody gives way, a copy lies there, there is much room."""
        able = [room for room in self._rooms.values() if self._may(model, room)]
        shards = max((room.models[model].known.shards for room in able), default=1)
        free = [room for room in able if self._fits(model, room.node, ())]
        free.sort(key=lambda room: (not room.models[model].copy, -self._free(room), room.node))
        for chosen in itertools.combinations(free, shards):
            yield Home(tuple(sorted(room.node for room in chosen)))
        if shards == 1:
            for room in sorted(able, key=lambda room: (-self._free(room), room.node)):
                if room not in free:
                    for names in self._enough(model, room.node):
                        yield Home((room.node,), tuple((name, room.node) for name in names))

    def _may(self, model: str, room: Room) -> bool:
        belief = room.models.get(model)
        return belief is not None and model not in self._held[room.node] and not belief.barred(self._now)

    def _free(self, room: Room) -> int:
        return room.pool_pages - pages_needed(self._held[room.node].values())

    def _fits(self, model: str, node: str, without: Sequence[str]) -> bool:
        stay = [belief for name, belief in self._held[node].items() if name not in without]
        return pages_needed([*stay, self._rooms[node].models[model]]) <= self._rooms[node].pool_pages

    def _enough(self, model: str, node: str) -> Iterator[tuple[str, ...]]:
        """Models that others serve too and that make room together, none of them for nothing: as few as can, large ones
        first. What is tried in vain counts too: of twenty there are a million choices."""
        room, held = self._rooms[node], self._held[node]
        own = {name: belief.known.weight_pages + belief.known.floor_pages for name, belief in held.items()}
        spare = sorted((name for name in held if self._spare(held[name])), key=lambda name: (-own[name], name))
        if not self._fits(model, node, spare):
            return
        missing = sum(own.values()) + pages_needed([room.models[model]]) - room.pool_pages
        found: list[set[str]] = []
        for count in range(1, len(spare) + 1):
            if sum(own[name] for name in spare[:count]) < missing:
                continue  # not even the largest so many are enough
            for names in itertools.combinations(spare, count):
                self._left -= 1
                if self._left < 0:
                    return
                if not any(one <= set(names) for one in found) and self._fits(model, node, names):
                    found.append(set(names))
                    yield names

    def _spare(self, belief: Belief) -> bool:
        name = belief.known.model
        alone = belief.known.shards == 1 and belief.order is None and not belief.pinned
        return alone and belief.stage is Stage.ACTIVE and self._up[name] > belief.serving


def _looked_at(room: Room, now: float) -> list[tuple[object, ...]]:
    """All that a search sees of a node."""
    return [
        (b.known, _stays(b), b.holds_pages, b.serving, b.pinned, b.order is None, b.copy, b.barred(now))
        for b in room.models.values()
    ]


def _stays(belief: Belief) -> bool:
    """It takes pages, and will: or it is to be brought up."""
    if belief.holds_pages:
        return not belief.sinking and not belief.falling
    return belief.wanted_s is not None
