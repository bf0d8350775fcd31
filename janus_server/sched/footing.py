"""Which replicas there are: the nodes of each, how it stands, and which take requests. Pure; the Brain keeps one.

Rooms know models on nodes, one by one; here those nodes are one replica that hold its shards. Who decides about the
whole cluster looks at it as a `Cluster`, and whoever hands requests over asks who serves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

from janus_server.duty import Duty
from janus_server.orders import Stage
from janus_server.sched.placement import Cluster, Device, Replica, Standing
from janus_server.sched.room import Room
from janus_server.sched.state import Belief

Homes = dict[str, list[tuple[str, ...]]]
"""The nodes of each replica of each model, by name; the first is its head."""


class Footing:
    """Replicas on rooms. Whoever changes what a room believes says so (`look`)."""

    def __init__(self, rooms: Mapping[str, Room], homes: Mapping[str, Iterable[tuple[str, ...]]]) -> None:
        self._rooms = rooms
        self._homes: Homes = {model: list(held) for model, held in homes.items()}
        self._serving: dict[str, tuple[str, ...]] = {}
        self._devices: dict[str, Device] = {}
        self._reserve_pages = 0

    def homes(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """As a copy, for the memory of whoever asks."""
        return {model: tuple(held) for model, held in self._homes.items() if held}

    def add(self, model: str, nodes: tuple[str, ...]) -> bool:
        """A replica is to be brought up there; False where one of the nodes is a part of another one of the model."""
        held = self._homes.setdefault(model, [])
        if nodes not in held and any(node in other for other in held for node in nodes):
            return False
        if nodes not in held:
            held.append(nodes)
        return True

    def of(self, model: str, node: str) -> tuple[str, ...]:
        """The replica that the node is a part of; () where it is of none."""
        for nodes in self._homes.get(model, ()):
            if node in nodes:
                return nodes
        return ()

    def look(self, node: str) -> None:
        """What a room believes may have changed, or it is gone: replicas appear, and those without a trace go."""
        self._devices.pop(node, None)
        room = self._rooms.get(node)
        for model in list(self._homes) if room is None else room.models:
            nodes = self.of(model, node)
            if nodes:
                self._serving.pop(model, None)
                if room is None or not _trace(room.models[model]):
                    self._split(model, nodes, node)
            elif room is not None and _trace(room.models[model]):
                self._serving.pop(model, None)
                self.add(model, (node,))

    def _split(self, model: str, nodes: tuple[str, ...], gone: str) -> None:
        """A shard is gone: what is left of its replica is of no use, and each on its own."""
        self._homes[model].remove(nodes)
        for node in nodes:
            room = self._rooms.get(node)
            if node != gone and room is not None and _trace(room.models[model]):
                self.add(model, (node,))

    def serving(self, model: str) -> tuple[str, ...]:
        """The heads of the replicas that take the model's requests."""
        if model not in self._serving:
            held = self._homes.get(model, ())
            self._serving[model] = tuple(nodes[0] for nodes in held if self._serves(model, nodes))
        return self._serving[model]

    def busy(self, model: str) -> bool:
        """Whether a replica has something to do."""
        return any(self._rooms[nodes[0]].models[model].busy for nodes in self._homes.get(model, ()))

    def held(self, model: str) -> bool:
        """Whether a replica is up or on its way; of several shards, whether there is anything left of one."""
        live = (Standing.ACTIVE, Standing.RISING)
        held = self._homes.get(model, ())
        return any(len(nodes) > 1 or self._torn(model, nodes) or self._standing(model, nodes) in live for nodes in held)

    def waits(self, replica: Replica) -> bool:
        """It is to be brought up, and a node of it has given no order yet."""
        beliefs = self._beliefs(replica.model, replica.devices)
        return not all(belief.holds_pages or belief.sinking for belief in beliefs)

    def rests(self) -> list[tuple[str, str]]:
        """Shards, by model and node, whose replica lost another one."""
        return [(model, nodes[0]) for model, held in sorted(self._homes.items()) for nodes in held
                if self._torn(model, nodes)]  # fmt: skip

    def cluster(self, backlog_s: Callable[[str], float], reserve_pages: int) -> Cluster:
        """All of it, as of now, but for nodes that are to be emptied and what is on them. reserve_pages of each node
        are not for replicas.
        """
        if reserve_pages != self._reserve_pages:
            self._reserve_pages = reserve_pages
            self._devices.clear()
        sources = self._sources()
        leaving = {node for node, room in self._rooms.items() if room.duty is not Duty.SERVE}
        taken: Counter[str] = Counter()
        replicas = []
        for model, held in sorted(self._homes.items()):
            for nodes in held:
                if leaving and not leaving.isdisjoint(nodes):
                    taken.update({node: self._pages(model, node) for node in nodes})
                    continue
                standing = self._standing(model, nodes)
                head = self._rooms[nodes[0]].models[model]
                replicas.append(Replica(
                    model=model, devices=nodes, standing=standing, backlog_s=backlog_s(nodes[0]),
                    running=head.busy, serves=sources.get((model, nodes[0]), 0),
                ))  # fmt: skip
        devices = [self._device(node) for node in self._rooms if node not in leaving]
        if taken:
            devices = [
                msgspec.structs.replace(device, pages=max(0, device.pages - taken[device.id])) for device in devices
            ]
        return Cluster(tuple(devices), tuple(replicas))

    def leaver(self, model: str, nodes: tuple[str, ...]) -> list[str | None]:
        """Of which node that is to be emptied each of these can copy the model, where it has no copy of its own."""
        for held in self._homes.get(model, ()):
            serves = len(held) == len(nodes) and self._serves(model, held)
            if serves and any(self._rooms[node].duty is not Duty.SERVE for node in held):
                pairs = zip(nodes, held, strict=True)
                return [None if self._rooms[node].models[model].copy else source for node, source in pairs]
        return [None] * len(nodes)

    def _pages(self, model: str, node: str) -> int:
        known = self._rooms[node].models[model].known
        return known.weight_pages + known.floor_pages

    def _device(self, node: str) -> Device:
        if node not in self._devices:
            room = self._rooms[node]
            copies = tuple(name for name, belief in room.models.items() if belief.copy and belief.order is None)
            pages = max(0, room.pool_pages - self._reserve_pages)
            self._devices[node] = Device(id=node, host=room.host, domain=room.domain, pages=pages, copies=copies)
        return self._devices[node]

    def _sources(self) -> dict[tuple[str, str], int]:
        """How many copies are read of a replica now, by model and its head."""
        found: dict[tuple[str, str], int] = {}
        for model, held in self._homes.items():
            for nodes in held:
                for belief in self._beliefs(model, nodes):
                    source = belief.order.source if belief.order is not None else None
                    if source is not None and (feeder := self.of(model, source)):
                        found[model, feeder[0]] = found.get((model, feeder[0]), 0) + 1
        return found

    def _beliefs(self, model: str, nodes: tuple[str, ...]) -> list[Belief]:
        return [self._rooms[node].models[model] for node in nodes]

    def _serves(self, model: str, nodes: tuple[str, ...]) -> bool:
        return not self._torn(model, nodes) and all(belief.serving for belief in self._beliefs(model, nodes))

    def _torn(self, model: str, nodes: tuple[str, ...]) -> bool:
        return len(nodes) < self._rooms[nodes[0]].models[model].known.shards

    def _standing(self, model: str, nodes: tuple[str, ...]) -> Standing:
        """Of the shards the one that is nearest to its end counts; asked of every replica at every look."""
        standing = Standing.SINKING if self._torn(model, nodes) else Standing.ACTIVE
        for belief in self._beliefs(model, nodes):
            if belief.sinking:
                return Standing.SINKING
            if standing is Standing.SINKING or standing is Standing.DRAINING:
                continue
            if belief.draining or belief.falling:
                standing = Standing.DRAINING
            elif belief.stage is not Stage.ACTIVE:
                standing = Standing.RISING
        return standing


def _trace(belief: Belief) -> bool:
    """It is there, on its way, or to be brought up."""
    return belief.holds_pages or belief.sinking or belief.wanted_s is not None
