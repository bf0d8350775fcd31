"""Where the weights of new replicas come from, and how long that takes with links that others use too. Pure.

`rollout` and `plan` ask for one replica or for many at once. A live holder in the same interconnect domain comes first,
then the host's own copy, then a holder in another domain, then the disk. A holder feeds one copy at a time, and what
has arrived feeds others: a burst of replicas spreads as a tree instead of queueing at one holder.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from janus_server.orders import Verb
from janus_server.sched.placement import Cluster, Device, Model, Replica, Role, Standing
from janus_server.units import format_seconds


class Origin(enum.Enum):
    """Best first."""

    NEAR = "a replica in the same domain"
    HOST = "the host copy"
    FAR = "a replica in another domain"
    DISK = "the checkpoint"

    @property
    def verb(self) -> Verb:
        match self:
            case Origin.NEAR | Origin.FAR:
                return Verb.FORK
            case Origin.HOST:
                return Verb.WAKE
            case Origin.DISK:
                return Verb.LOAD


class Link(msgspec.Struct, frozen=True):
    """One kind of path: what every copy costs, what one device gets of it, and what all that share it get together,
    where they share anything."""

    fixed_s: float
    bytes_s: float
    shared_bytes_s: float | None = None

    def seconds(self, amount: int, sharing: int = 1) -> float:
        """Of `amount` bytes to a device, while `sharing` devices in all use what is shared.

        Example: 42 GB from host memory at 59 GB/s takes 0.99 s for one device, and where 16 devices share 276 GB/s,
        2.72 s.
        """
        mine = self.bytes_s if self.shared_bytes_s is None else self.shared_bytes_s / max(1, sharing)
        return self.fixed_s + amount / min(self.bytes_s, mine)


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults are a fit to published times: 8.2 and 32.8 GB a device in 0.41 and 0.78 s from a near replica.

    What is shared: host memory and the disk by the devices of a host, the network by copies into a host.
    """

    near: Link = Link(0.283, 65e9)
    host: Link = Link(0.283, 59e9, 276e9)
    far: Link = Link(0.283, 20e9, 40e9)
    disk: Link = Link(0.5, 3e9, 6e9)

    def of(self, origin: Origin) -> Link:
        match origin:
            case Origin.NEAR:
                return self.near
            case Origin.HOST:
                return self.host
            case Origin.FAR:
                return self.far
            case Origin.DISK:
                return self.disk


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's weights: from where, when it can begin and when it will have ended, in seconds from now."""

    model: str
    devices: tuple[str, ...]
    origin: Origin
    source: Replica | None
    begin_s: float
    end_s: float
    why: str


_HOST_TIER: Final = (Origin.HOST, Origin.DISK)


def choose(model: Model, devices: Sequence[str], cluster: Cluster, links: Links = Links()) -> Copy:  # noqa: B008 - frozen
    """For one replica on these devices. See `spread`."""
    return spread(model, [tuple(devices)], cluster, links)[0]


def spread(
    model: Model,
    wanted: Sequence[tuple[str, ...]],
    cluster: Cluster,
    links: Links = Links(),  # noqa: B008 - frozen
) -> list[Copy]:
    """For many replicas that are wanted at once, in their order: each takes what is best for it when its turn comes.

    A near holder that feeds nobody, the busiest of them, unless even the checkpoint is quicker; where there is none,
    whatever ends first, which may be to wait for a holder that feeds another, or for a replica that is still
    arriving.

    Example: one holder near, no host copies, a copy takes 1 s and the disk 10 s. Of three replicas the first is copied
    from 0 to 1, the second and the third from 1 to 2: from the holder, and from the first.
    """
    by_id = {device.id: device for device in cluster.devices}
    tree = _Tree(model, cluster, by_id, links)
    return [tree.grow(devices) for devices in wanted]


class _Tree:
    """Who can feed copies of one model, from when on; and how many devices use each shared link in the meantime."""

    def __init__(self, model: Model, cluster: Cluster, by_id: Mapping[str, Device], links: Links) -> None:
        self.model, self.by_id, self.links = model, by_id, links
        self.feeders: list[tuple[Replica, float]] = []
        self.using: Counter[tuple[Origin, str]] = Counter()
        for replica in cluster.replicas:
            if replica.model == model.model and replica.standing is Standing.ACTIVE:
                # Whoever feeds others now is free when they have it: by what one copy takes.
                self.feeders.append((replica, replica.serves * links.near.seconds(model.weight_bytes)))
            elif replica.standing is Standing.RISING:
                # Where it reads from is not known here; in doubt from its host, which is what is shared.
                for device in replica.devices:
                    self.using[Origin.HOST, self._host(device)] += 1

    def grow(self, devices: tuple[str, ...]) -> Copy:
        options = [self._from(feeder, since_s, devices) for feeder, since_s in self.feeders]
        options += [self._from_host(origin, devices) for origin in _HOST_TIER if self._has(origin, devices)]
        # A link that is slower than the checkpoint is no short cut.
        quick_s = max((option.end_s for option in options if option.source is None), default=math.inf)
        near = [o for o in options if o.begin_s == 0.0 and o.origin is Origin.NEAR and o.end_s <= quick_s]
        best = min(near, key=_rank) if near else min(options, key=lambda option: (option.end_s, _rank(option)))
        self._begin(best)
        return best

    def _from(self, feeder: Replica, since_s: float, devices: tuple[str, ...]) -> Copy:
        near = all(self._domain(a) == self._domain(b) for a in feeder.devices for b in devices)
        origin = Origin.NEAR if near else Origin.FAR
        end_s = since_s + self._seconds(origin, devices)
        state = f"the busiest of them, {format_seconds(feeder.backlog_s)} behind" if feeder.backlog_s else "it is free"
        if since_s > 0.0:
            state = f"which is free in {format_seconds(since_s)}"
        why = f"from {feeder.name} ({origin.value}; {state}), done in {format_seconds(end_s)}"
        return Copy(model=self.model.model, devices=devices, origin=origin, source=feeder, begin_s=since_s,
                    end_s=end_s, why=why)  # fmt: skip

    def _from_host(self, origin: Origin, devices: tuple[str, ...]) -> Copy:
        end_s = self._seconds(origin, devices)
        why = f"from {origin.value}, done in {format_seconds(end_s)}"
        return Copy(model=self.model.model, devices=devices, origin=origin, source=None, begin_s=0.0, end_s=end_s,
                    why=why)  # fmt: skip

    def _begin(self, copy: Copy) -> None:
        for device in copy.devices:
            self.using[copy.origin, self._host(device)] += 1
        if copy.source is not None:
            key = copy.source.key
            self.feeders = [(r, copy.end_s if r.key == key else since_s) for r, since_s in self.feeders]
        arrived = Replica(model=copy.model, devices=copy.devices, standing=Standing.RISING, role=Role.BOTH)
        self.feeders.append((arrived, copy.end_s))

    def _has(self, origin: Origin, devices: tuple[str, ...]) -> bool:
        if origin is Origin.DISK:
            return True
        return all(device in self.by_id and self.model.model in self.by_id[device].copies for device in devices)

    def _seconds(self, origin: Origin, devices: tuple[str, ...]) -> float:
        """Of the slowest shard."""
        link = self.links.of(origin)
        mine = Counter(self._host(device) for device in devices)
        sharing = max((self.using[origin, host] + n for host, n in mine.items()), default=1)
        return link.seconds(self.model.weight_bytes, sharing)

    def _host(self, device: str) -> str:
        return self.by_id[device].host if device in self.by_id else ""

    def _domain(self, device: str) -> str | None:
        return self.by_id[device].domain if device in self.by_id else None


def _rank(copy: Copy) -> tuple[int, bool, float, tuple[str, ...]]:
    """The best kind; then a replica that has arrived; then the busiest, which is drained last; then by name."""
    tier = list(Origin).index(copy.origin)
    source = copy.source
    if source is None:
        return tier, False, 0.0, ()
    return tier, source.standing is Standing.RISING, -source.backlog_s, source.devices
