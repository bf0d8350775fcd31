"""Replicas and nodes as imitations of other systems know them, and the ways by which weights come to a node.

`yard` changes them, rules and front desks read them. Estimates of time only choose between ways: how long a copy takes
is decided by the world. They are made of the same links as the leader's own.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final, NamedTuple

from janus_server.orders import Joined, KnownModel, Verb
from janus_server.sched.source import Link, Links


class Phase(enum.Enum):
    """Of a replica. PLANNED: its pages are taken, nothing is ordered yet. DRAINING and SINKING: no new requests."""

    PLANNED = "planned"
    RISING = "rising"
    ACTIVE = "active"
    DRAINING = "draining"
    SINKING = "sinking"


class Replica:
    """A model on its nodes, the head first.

    running: its requests as its head reported last, and those handed over since; tokens and work_s: of their prompts,
    the latter of those not computed yet. up are the nodes whose shard is Active, open the orders by node, feeding
    counts the copies that are read of it. doomed: why it is to go as soon as it can. turn: when it was chosen last.
    """

    __slots__ = ("doomed", "feeding", "model", "nodes", "number", "open", "phase", "running", "since_s", "sources",
                 "tokens", "tries", "turn", "up", "used_s", "why", "work_s")  # fmt: skip

    def __init__(self, model: str, nodes: tuple[str, ...], number: int, why: str, now: float) -> None:
        self.model, self.nodes, self.number, self.why = model, nodes, number, why
        self.phase = Phase.PLANNED
        self.running = self.feeding = self.turn = self.tries = 0
        self.tokens = self.work_s = 0.0
        self.since_s = self.used_s = now
        self.up: dict[str, None] = {}
        self.open: dict[str, int] = {}
        self.sources: dict[str, Replica] = {}
        self.doomed: str | None = None

    @property
    def serving(self) -> bool:
        return self.phase is Phase.ACTIVE

    @property
    def coming(self) -> bool:
        """It is up or on its way, and to stay."""
        return self.doomed is None and self.phase in (Phase.PLANNED, Phase.RISING, Phase.ACTIVE)

    @property
    def name(self) -> str:
        return f"{self.model}@{'+'.join(self.nodes)}"


class Site:
    """One node: replicas that hold its pages, or will, by model; host copies, the one used longest ago first; and the
    models with an order open there."""

    __slots__ = ("busy", "copies", "domain", "held", "host", "host_bytes", "name", "pool_pages")

    def __init__(self, event: Joined) -> None:
        self.name, self.host, self.domain = event.node, event.host or event.node, event.domain
        self.pool_pages, self.host_bytes = event.pool_pages, event.host_bytes
        self.held: dict[str, Replica] = {}
        self.copies: dict[str, int] = {}
        self.busy: dict[str, int] = {}


class Path(NamedTuple):
    """A way for one shard's weights to a node, and how long it is estimated to take with what uses it already."""

    verb: Verb
    takes_s: float
    source: Replica | None = None


class Ways:
    """What uses the links now, and which way is quickest beside that."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self._loads: dict[tuple[Verb, str], int] = {}

    def quickest(self, known: KnownModel, site: Site, shard: int, feeders: Iterable[tuple[Replica, str]]) -> Path:
        """For one shard: the host copy, one of the replicas that could feed it (with their domains), or the checkpoint.

        Ties go to the host copy, then to the checkpoint, which need nobody else.
        """
        best = Path(Verb.LOAD, self._shared(self.links.disk, known, Verb.LOAD, site.host))
        if known.model in site.copies:
            wake = Path(Verb.WAKE, self._shared(self.links.host, known, Verb.WAKE, site.host))
            best = wake if wake.takes_s <= best.takes_s else best
        for replica, domain in feeders:
            link = self.links.near if domain == site.domain else self.links.far
            takes_s = link.seconds(known.host_bytes) * (1 + replica.feeding)
            if takes_s < best.takes_s:
                best = Path(Verb.FORK, takes_s, replica)
        return best

    def fork_s(self, known: KnownModel) -> float:
        """Of one shard, from a replica near by that feeds nobody else."""
        return self.links.near.seconds(known.host_bytes)

    def _shared(self, link: Link, known: KnownModel, verb: Verb, host: str) -> float:
        return link.seconds(known.host_bytes, self._loads.get((verb, host), 0) + 1)

    def begin(self, replica: Replica, site: Site, path: Path) -> None:
        if path.source is not None:
            path.source.feeding += 1
            replica.sources[site.name] = path.source
        else:
            key = (path.verb, site.host)
            self._loads[key] = self._loads.get(key, 0) + 1

    def end(self, replica: Replica, node: str, verb: Verb, host: str) -> Replica | None:
        """Whatever came of it; returns the replica that fed it."""
        feeder = replica.sources.pop(node, None)
        if feeder is None:
            self._loads[verb, host] -= 1
        else:
            feeder.feeding -= 1
        return feeder


# After a failure a model is not tried again for so long, twice as long each time; three in a row refuse who waits.
_BACKOFF_S: Final = 0.5
_TRIES: Final = 3
_BROKEN_S: Final = 30.0


class Failures:
    """Models that could not be brought up, and until when they are left alone."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        self._until_s: dict[str, float] = {}

    def barred(self, model: str, now: float) -> bool:
        return self._until_s.get(model, now) > now

    def ended_well(self, model: str) -> None:
        self._in_a_row.pop(model, None)

    def failed(self, model: str, lasting: bool, now: float) -> float | None:
        """Once more. How long those who wait would have to, where they are to be refused."""
        count = self._in_a_row.get(model, 0) + 1
        pause_s = _BROKEN_S if lasting else _BACKOFF_S * 2.0**count
        self._until_s[model] = now + pause_s
        given_up = lasting or count >= _TRIES
        self._in_a_row[model] = 0 if given_up else count
        return pause_s if given_up else None


def pages_of(models: Iterable[KnownModel]) -> int:
    """Pages that must exist for these to be Active together, so that the longest sequence of any can end."""
    weights = beyond = 0
    for known in models:
        weights += known.weight_pages + known.floor_pages
        beyond = max(beyond, known.longest_pages - known.floor_pages)
    return weights + beyond
