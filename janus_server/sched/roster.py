"""Which models the leader of many nodes decides about, and what each takes, from what nodes that join say. Pure.

`fleet` keeps one. A model that only some of the nodes have, or that they cut differently, is not its business: that one
is brought up on demand, by the node that has it with the least ado.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from janus_server.orders import KnownModel
from janus_server.sched.placement import Model, Note
from janus_server.sched.room import Room

# Of attainment, for a model that promises nothing.
_ATTAIN = 0.95


class Roster:
    """models are all that a node has, led those that every node has; that set stays the same object. reserve_pages of
    each node are kept for the longest sequence of any model: who shares a node may always finish one.
    """

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.led: set[str] = set()
        self.reserve_pages = 0
        self._kinds: dict[str, Counter[KnownModel]] = {}
        self._pools: Counter[int] = Counter()

    def joined(self, room: Room) -> None:
        """Where nodes differ in what a model takes, the most counts."""
        changed = room.pool_pages > max(self._pools, default=-1)
        self._pools[room.pool_pages] += 1
        for name, belief in room.models.items():
            kinds = self._kinds.setdefault(name, Counter())
            changed = changed or belief.known not in kinds
            kinds[belief.known] += 1
        self._settle(changed)

    def left(self, room: Room) -> None:
        self._pools -= Counter((room.pool_pages,))
        for name, belief in room.models.items():
            self._kinds[name] -= Counter((belief.known,))
            if not self._kinds[name]:
                del self._kinds[name]
        self._settle(True)

    def notes(self) -> list[Note]:
        """About models that are nobody's business."""
        nodes = self._pools.total()
        return [
            Note(name, f"{kinds.total()} of {nodes} nodes have it: it is brought up there on demand alone"
                 if kinds.total() < nodes else "nodes cut it differently: it is brought up on demand alone")
            for name, kinds in sorted(self._kinds.items()) if name not in self.led
        ]  # fmt: skip

    def _settle(self, changed: bool) -> None:
        nodes = self._pools.total()
        self.led.clear()
        if nodes > 1:
            self.led.update(name for name, kinds in self._kinds.items() if kinds.total() == nodes and _alike(kinds))
        if changed:
            known = {name: _largest(kinds) for name, kinds in sorted(self._kinds.items())}
            self.reserve_pages = max([0, *(k.longest_pages - k.floor_pages for k in known.values())])
            largest = max(self._pools, default=0)
            self.models = {name: self._model(one, largest) for name, one in known.items()}

    def _model(self, known: KnownModel, largest: int) -> Model:
        """What does not fit beside the reserve, but alone on a node of the largest kind, is said to fill that."""
        pages, shared = known.weight_pages + known.floor_pages, max(0, largest - self.reserve_pages)
        if pages > shared and pages + max(0, known.longest_pages - known.floor_pages) <= largest:
            pages = shared
        return Model(
            model=known.model, pages=pages, weight_bytes=known.host_bytes, shards=known.shards,
            priority=known.priority, target=_ATTAIN if known.attain is None else known.attain, idle_s=known.idle_s,
            outage_s=known.load_s,
        )  # fmt: skip


def _alike(kinds: Counter[KnownModel]) -> bool:
    """Nodes cut it into as many shards."""
    return len(kinds) == 1 or len({known.shards for known in kinds}) == 1


def _largest(kinds: Counter[KnownModel]) -> KnownModel:
    """Of one kind that; of several one that takes as much as any of them."""
    if len(kinds) == 1:
        return next(iter(kinds))
    return msgspec.structs.replace(
        min(kinds, key=repr), weight_pages=max(known.weight_pages for known in kinds),
        floor_pages=max(known.floor_pages for known in kinds),
        longest_pages=max(known.longest_pages for known in kinds),
    )  # fmt: skip
