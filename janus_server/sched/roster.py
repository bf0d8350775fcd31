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
        self._known: dict[str, KnownModel] = {}
        self._having: Counter[str] = Counter()
        self._pools: Counter[int] = Counter()
        self._uneven: set[str] = set()

    def joined(self, room: Room) -> None:
        """Where nodes differ in what a model takes, the most counts."""
        changed = room.pool_pages > max(self._pools, default=-1)
        self._pools[room.pool_pages] += 1
        for name, belief in room.models.items():
            self._having[name] += 1
            known = self._known.get(name)
            if known == belief.known:
                continue
            changed = True
            if known is not None and known.shards != belief.known.shards:
                self._uneven.add(name)
            self._known[name] = belief.known if known is None else _larger(known, belief.known)
        self._settle(changed)

    def left(self, room: Room) -> None:
        self._pools[room.pool_pages] -= 1
        self._pools += Counter()  # without those of which there are none
        for name in room.models:
            self._having[name] -= 1
            if not self._having[name]:
                del self._having[name], self._known[name]
                self._uneven.discard(name)
        self._settle(True)

    def notes(self) -> list[Note]:
        """About models that are nobody's business."""
        nodes = self._pools.total()
        return [
            Note(name, "nodes cut it differently: it is brought up on demand alone" if name in self._uneven else
                 f"{self._having[name]} of {nodes} nodes have it: it is brought up there on demand alone")
            for name in sorted(self.models) if name not in self.led
        ]  # fmt: skip

    def _settle(self, changed: bool) -> None:
        nodes = self._pools.total()
        self.led.clear()
        if nodes > 1:
            self.led.update(name for name, n in self._having.items() if n == nodes and name not in self._uneven)
        if changed:
            self.reserve_pages = max((k.longest_pages - k.floor_pages for k in self._known.values()), default=0)
            self.reserve_pages = max(0, self.reserve_pages)
            largest = max(self._pools, default=0)
            self.models = {name: self._model(known, largest) for name, known in self._known.items()}

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


def _larger(one: KnownModel, other: KnownModel) -> KnownModel:
    return msgspec.structs.replace(
        other, weight_pages=max(one.weight_pages, other.weight_pages),
        floor_pages=max(one.floor_pages, other.floor_pages), longest_pages=max(one.longest_pages, other.longest_pages),
    )  # fmt: skip
