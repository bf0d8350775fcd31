"""What every imitation of another system knows of the cluster: nodes, replicas on them, and which orders are open.

`baseline` tells it the world's events, its rules ask it for replicas (`bring`, `lower`) and it makes the orders: whence
the weights come, when pages are free, what becomes of a replica that lost a shard. It takes the same paths over the
same links as the leader does. It decides nothing about who runs where, and must never spend a page twice.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from janus_server.orders import (
    Action,
    Busy,
    Done,
    Event,
    Failed,
    Joined,
    KnownModel,
    Left,
    Lost,
    Order,
    Refuse,
    Report,
    Stage,
    Verb,
)
from janus_server.sched.source import Links

from .replicas import Failures, Path, Phase, Replica, Site, Ways, pages_of


class _Open(NamedTuple):
    """An order that was given and has not ended."""

    order: Order
    replica: Replica | None


# What could not be put to sleep is tried again after so long.
_AGAIN_S: Final = 1.0


class Yard:
    """Nodes and replicas. tree: a replica waits for another one of its model that is on its way rather than have all of
    them read the same disk; each that has arrived feeds the next."""

    def __init__(self, links: Links = Links(), *, tree: bool = False) -> None:  # noqa: B008 - frozen
        self._ways, self._tree = Ways(links), tree
        self.known: dict[str, KnownModel] = {}
        self.sites: dict[str, Site] = {}
        self.replicas: dict[str, list[Replica]] = {}
        self.actions: list[Action] = []
        self.moved: list[Replica] = []
        self.changed: dict[str, None] = {}
        self.refused: list[str] = []
        self._failures = Failures()
        self._able: dict[str, bool] = {}
        self._pools: dict[str, int] = {}
        self._open: dict[int, _Open] = {}
        self._later: list[tuple[float, int, Replica]] = []
        self._numbers = 0

    # Asking

    def of(self, model: str) -> list[Replica]:
        """Its replicas in the order they were planned."""
        return self.replicas.get(model, [])

    def serving(self, model: str) -> list[Replica]:
        return [replica for replica in self.replicas.get(model, ()) if replica.phase is Phase.ACTIVE]

    def coming(self, model: str) -> list[Replica]:
        return [replica for replica in self.replicas.get(model, ()) if replica.coming]

    def able(self, model: str) -> bool:
        """Whether the nodes that were ever there could hold one replica, had they nothing else."""
        if model not in self._able:
            known = self.known.get(model)
            large = sum(pages >= pages_of([known]) for pages in self._pools.values()) if known else 0
            self._able[model] = known is not None and large >= known.shards
        return self._able[model]

    def fits(self, site: Site, model: str, without: Iterable[str] = ()) -> bool:
        """One more model beside those that are there; without: as if these were gone."""
        if model in site.held or model in site.busy:
            return False
        gone = frozenset(without)
        held = [self.known[name] for name in site.held if name not in gone]
        return pages_of([*held, self.known[model]]) <= site.pool_pages

    def path(self, model: str, site: Site, shard: int = 0) -> Path:
        """The quickest way for a shard of the model to a node."""
        feeders = (
            (replica, self.sites[replica.nodes[shard]].domain) for replica in self.of(model)
            if replica.phase is Phase.ACTIVE and replica.doomed is None and shard < len(replica.nodes)
        )  # fmt: skip
        return self._ways.quickest(self.known[model], site, shard, feeders)

    def sleep_s(self, model: str) -> float:
        """What it takes to give its host a copy of a shard."""
        return self._ways.links.host.seconds(self.known[model].host_bytes)

    def barred(self, model: str, now: float) -> bool:
        """It failed a moment ago, and is not to be tried yet."""
        return self._failures.barred(model, now)

    def due_s(self) -> float:
        """When to call `retry`."""
        return self._later[0][0] if self._later else math.inf

    # Deciding on behalf of a rule

    def bring(self, model: str, sites: Sequence[Site], why: str, now: float) -> Replica:
        """A replica on these nodes, which must be able to hold it; it starts as soon as it can."""
        self._numbers += 1
        replica = Replica(model, tuple(site.name for site in sites), self._numbers, why, now)
        self.replicas.setdefault(model, []).append(replica)
        for site in sites:
            site.held[model] = replica
        self._start(replica, now)
        return replica

    def lower(self, replica: Replica, why: str, now: float) -> None:
        """It goes: its requests end first, and copies that are read of it. What is on its way arrives before."""
        if replica.doomed is None:
            replica.doomed = why
            self._step(replica, now)

    def retry(self, now: float) -> None:
        """Take up what failed some time ago."""
        while self._later and self._later[0][0] <= now:
            self._step(heapq.heappop(self._later)[2], now)

    # Hearing

    def hear(self, event: Event, now: float) -> None:
        match event:
            case Report():
                self._report(event, now)
            case Joined(node):
                if node in self.sites:
                    self._left(node, now)
                self.sites[node], self._pools[node] = Site(event), event.pool_pages
                self.known.update((known.model, known) for known in event.models)
                self._able = {}
            case Left(node) if node in self.sites:
                self._left(node, now)
            case Done(order) | Failed(order) if order in self._open:
                self._close(event, self._open.pop(order), now)
            case Lost(node, model, stage, copy) if node in self.sites:
                self._keep(self.sites[node], model, copy)
                replica = self.sites[node].held.get(model)
                if replica is not None and node not in replica.open and stage is not Stage.ACTIVE:
                    self._torn(replica, node, f"{model} was lost on {node}", now)
            case _:
                pass

    def _report(self, event: Report, now: float) -> None:
        site = self.sites.get(event.node)
        if site is None:
            return
        for model, busy in event.models.items():
            replica = site.held.get(model)
            if replica is None:
                replica = self._adopt(model, site, busy, now)
            if replica is None or replica.nodes[0] != site.name:
                continue
            before, replica.running = replica.running, busy.running + busy.waiting
            if replica.running:
                replica.used_s = now
            if replica.running != before:
                # Which of them ended is not told; on the average they were like the others.
                replica.tokens *= min(1.0, replica.running / before) if before else 0.0
                self.moved.append(replica)
            if replica.phase is Phase.DRAINING and not replica.running:
                self._step(replica, now)

    def _adopt(self, model: str, site: Site, busy: Busy, now: float) -> Replica | None:
        """A node has a model that this one never ordered: another policy led before. Single shards are taken over;
        which shards belong together is not told, so those are given up."""
        if model not in self.known or model in site.busy:
            return None
        self._numbers += 1
        replica = Replica(model, (site.name,), self._numbers, f"{model}: found on {site.name}", now)
        replica.up[site.name], replica.phase = None, Phase.ACTIVE
        replica.running = busy.running + busy.waiting
        planned = [other for other in site.held.values() if other.phase is Phase.PLANNED]
        site.held[model] = replica
        self.replicas.setdefault(model, []).append(replica)
        self.changed[model] = None
        for other in planned:
            self.lower(other, f"{other.model}: {site.name} has less room than it seemed", now)
        if self.known[model].shards > 1:
            self.lower(replica, f"{model}: a shard on {site.name}, and nobody knows where the others are", now)
        return replica

    def _left(self, node: str, now: float) -> None:
        site = self.sites.pop(node)
        for number in site.busy.values():
            given = self._open.pop(number)
            if given.replica is not None:
                given.replica.open.pop(node, None)
                self._unlink(given.order, given.replica, site.host, now)
        for replica in list(site.held.values()):
            self._torn(replica, node, f"{replica.model}: node {node} is gone", now)
            # What waited for a copy of it finds another way.
            self._start_planned(replica.model, now)

    def _torn(self, replica: Replica, node: str, why: str, now: float) -> None:
        """A shard is gone, and the replica with it."""
        replica.up.pop(node, None)
        site = self.sites.get(node)
        if site is not None:
            site.held.pop(replica.model, None)
        replica.doomed = replica.doomed or why
        replica.running, replica.tokens, replica.work_s = 0, 0.0, 0.0
        if replica.phase in (Phase.ACTIVE, Phase.DRAINING):
            replica.phase = Phase.SINKING
            self.changed[replica.model] = None
        self._step(replica, now)

    def _close(self, event: Done | Failed, given: _Open, now: float) -> None:
        order, replica = given
        site = self.sites[order.node]
        site.busy.pop(order.model, None)
        self._keep(site, order.model, event.copy)
        if replica is None:
            self._start_planned(order.model, now)
            return
        self._unlink(order, replica, site.host, now)
        replica.open.pop(order.node, None)
        if event.stage is Stage.ACTIVE:
            replica.up[order.node] = None
        else:
            replica.up.pop(order.node, None)
        if isinstance(event, Failed):
            self._failed(event, order, replica, now)
        else:
            if order.verb.raises:
                self._failures.ended_well(order.model)
            self._step(replica, now)
        self._start_planned(order.model, now)

    def _failed(self, event: Failed, order: Order, replica: Replica, now: float) -> None:
        if order.verb.lowers:
            # It is still there, and nobody else is to have its pages: again a little later.
            heapq.heappush(self._later, (now + _AGAIN_S, replica.number, replica))
            return
        if order.verb is Verb.FORK and not event.lasting and replica.doomed is None:
            site = self.sites[order.node]
            self._raise(replica, site, Path(Verb.WAKE if order.model in site.copies else Verb.LOAD, 0.0))
            return
        replica.doomed = replica.doomed or event.reason
        pause_s = self._failures.failed(order.model, event.lasting, now)
        if pause_s is not None:
            self.refuse(order.model, event.reason, None if event.lasting else pause_s)
        self._step(replica, now)

    def refuse(self, model: str, why: str, retry_after_s: float | None) -> None:
        """Those who wait for it hear that it cannot be had."""
        self.refused.append(model)
        self.actions.append(Refuse(model, why, retry_after_s))

    # Steps

    def _step(self, replica: Replica, now: float) -> None:
        """The next thing to do for a replica, where anything is."""
        phase = replica.phase
        if phase is Phase.PLANNED and replica.doomed is not None:
            self._sink(replica)
        elif phase is Phase.RISING and not replica.open:
            if replica.doomed is None and len(replica.up) == len(replica.nodes):
                replica.phase, replica.since_s, replica.used_s = Phase.ACTIVE, now, now
                self.changed[replica.model] = None
            else:
                replica.phase = Phase.SINKING
                self._sink(replica)
        elif phase is Phase.ACTIVE and replica.doomed is not None:
            self.changed[replica.model] = None
            if replica.running or replica.feeding:
                for name in replica.nodes:
                    self._order(name, replica, Verb.DRAIN, f"{replica.doomed}; {replica.running} requests end first")
                replica.phase = Phase.DRAINING
            else:
                replica.phase = Phase.SINKING
                self._sink(replica)
        elif phase is Phase.DRAINING and not replica.running and not replica.feeding:
            replica.phase = Phase.SINKING
            self._sink(replica)
        elif phase is Phase.SINKING:
            self._sink(replica)

    def _start(self, replica: Replica, now: float) -> None:
        """Order the copies of a planned replica, or leave it planned until one that is on its way can feed it."""
        sites = [self.sites[name] for name in replica.nodes]
        if any(replica.model in site.busy for site in sites):
            return
        paths = [self.path(replica.model, site, shard) for shard, site in enumerate(sites)]
        if self._tree and self._worth_waiting(replica, paths):
            return
        replica.phase = Phase.RISING
        for site, path in zip(sites, paths, strict=True):
            self._raise(replica, site, path)

    def _worth_waiting(self, replica: Replica, paths: Sequence[Path]) -> bool:
        others = [other for other in self.of(replica.model) if other is not replica]
        ends = any(other.phase is Phase.RISING and other.doomed is None for other in others)
        feeding = any(other.phase is Phase.ACTIVE and other.feeding for other in others)
        fork_s = self._ways.fork_s(self.known[replica.model])
        slow = any(path.verb is Verb.LOAD and path.takes_s > 2 * fork_s for path in paths)
        queued = any(path.source is not None and path.source.feeding for path in paths)
        return (ends and slow) or ((ends or feeding) and queued)

    def _start_planned(self, model: str, now: float) -> None:
        for replica in list(self.of(model)):
            if replica.phase is Phase.PLANNED:
                self._start(replica, now)

    def _raise(self, replica: Replica, site: Site, path: Path) -> None:
        source = None if path.source is None else path.source.nodes[replica.nodes.index(site.name)]
        self._ways.begin(replica, site, path)
        self._order(site.name, replica, path.verb, replica.why, source)

    def _sink(self, replica: Replica) -> None:
        """Free what it holds, once no copies are read of it; what is free is nobody's at once."""
        if replica.feeding:
            return
        for name in replica.nodes:
            site = self.sites.get(name)
            if site is None or name in replica.open:
                continue
            if name in replica.up:
                self._free(site, replica)
            elif site.held.get(replica.model) is replica:
                del site.held[replica.model]
        if not replica.open:
            self._remove(replica)

    def _free(self, site: Site, replica: Replica) -> None:
        """SLEEP, host copies that were used longest ago making room for its own; UNLOAD where there is none."""
        why = replica.doomed or ""
        verb = Verb.SLEEP
        if replica.model not in site.copies:
            missing = sum(site.copies.values()) + self.known[replica.model].host_bytes - site.host_bytes
            spare = [name for name in site.copies if name not in site.held and name not in site.busy]
            dropped: list[str] = []
            while missing > 0 and spare:
                dropped.append(spare.pop(0))
                missing -= site.copies[dropped[-1]]
            if missing > 0:
                verb, why = Verb.UNLOAD, f"{why}; no host memory for a copy"
            else:
                for name in dropped:
                    self._evict(site, name, replica.model)
        self._order(site.name, replica, verb, why)
        if verb is Verb.SLEEP:
            self._keep(site, replica.model, True)

    def _evict(self, site: Site, model: str, room_for: str) -> None:
        self._numbers += 1
        why = f"{model}: its host memory goes to {room_for}"
        order = Order(1, self._numbers, site.name, model, Verb.EVICT, why)
        self._open[order.id] = _Open(order, None)
        site.busy[model] = order.id
        del site.copies[model]
        self.actions.append(order)

    def _keep(self, site: Site, model: str, copy: bool) -> None:
        """Whether the host has the weights; the one used last stands at the end."""
        site.copies.pop(model, None)
        if copy and model in self.known:
            site.copies[model] = self.known[model].host_bytes

    def _unlink(self, order: Order, replica: Replica, host: str, now: float) -> None:
        """If it raised, what it used is free again; who fed it may go."""
        if order.verb.raises:
            feeder = self._ways.end(replica, order.node, order.verb, host)
            if feeder is not None and not feeder.feeding and feeder.phase in (Phase.DRAINING, Phase.SINKING):
                self._step(feeder, now)

    def _order(self, node: str, replica: Replica, verb: Verb, why: str, source: str | None = None) -> None:
        self._numbers += 1
        nodes = replica.nodes if self.known[replica.model].shards > 1 else ()
        order = Order(1, self._numbers, node, replica.model, verb, why, source, nodes)
        if verb.ends:
            self._open[order.id] = _Open(order, replica)
            self.sites[node].busy[replica.model] = order.id
            replica.open[node] = order.id
        self.actions.append(order)

    def _remove(self, replica: Replica) -> None:
        held = self.replicas.get(replica.model, [])
        if replica in held:
            held.remove(replica)
        self.changed[replica.model] = None
