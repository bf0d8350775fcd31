"""Records of who runs where: devices, models, replicas, and the changes between two placements. Frozen.

`pools`, `scaling`, `rollout`, `source` and `plan` speak in them, and whoever drives a cluster or imitates one. A
replica is known by its model and its devices: a model is on a device once at most. Pages are those of each device of a
replica. Nothing here decides. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import msgspec

from janus_server.orders import Verb as Verb


class Role(enum.Enum):
    """What a replica does for its model. Where prompts and tokens are computed apart, a lone DECODE does both."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Standing(enum.Enum):
    """RISING: its pages are taken, its weights are on the way. DRAINING: no new requests. SINKING: its pages are being
    freed. Each of the four holds its pages."""

    RISING = "rising"
    ACTIVE = "active"
    DRAINING = "draining"
    SINKING = "sinking"


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One node: its machine, its interconnect domain, and the pages that replicas may share.

    copies are the models of which its host memory holds what this device would need of them.
    """

    id: str
    host: str = ""
    domain: str = ""
    pages: int
    copies: tuple[str, ...] = ()


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica takes on each of its `shards` devices: pages for weights and the least KV, and weights to
    be copied.

    target is the share of requests that are to attain; a higher priority goes first. idle_s: without traffic for so
    long, no replica is kept; None keeps one. split: prompts and tokens are computed on replicas of their own.
    outage_s: how long it is gone where it must be stopped before it starts elsewhere.
    """

    model: str
    pages: int
    weight_bytes: int = 0
    shards: int = 1
    priority: int = 0
    target: float = 0.95
    idle_s: float | None = None
    split: bool = False
    outage_s: float = 1.0


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """backlog_s: prefill work that waits at it. running: requests that it has begun. serves: copies read of it now."""

    model: str
    devices: tuple[str, ...]
    standing: Standing = Standing.ACTIVE
    role: Role = Role.BOTH
    backlog_s: float = 0.0
    running: int = 0
    serves: int = 0

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        return self.model, self.devices

    @property
    def name(self) -> str:
        return f"{self.model}@{'+'.join(self.devices)}"


class Cluster(msgspec.Struct, frozen=True):
    """All devices, and every replica on any of them."""

    devices: tuple[Device, ...] = ()
    replicas: tuple[Replica, ...] = ()


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One order for all devices of a replica, and why. verb None changes its role alone.

    source is the device to copy from where the verb is FORK: the first of the replica that has it. takes_s: how long
    the copy is predicted to take, 0 where there is none.
    """

    verb: Verb | None
    model: str
    devices: tuple[str, ...]
    why: str
    role: Role = Role.BOTH
    source: str | None = None
    takes_s: float = 0.0


class Note(msgspec.Struct, frozen=True):
    """Something that is not done, or not believed, and why."""

    subject: str
    why: str


def free_pages(cluster: Cluster, models: Iterable[Model]) -> dict[str, int]:
    """Pages of each device that no replica holds. A model nobody described takes a whole device."""
    pages = {model.model: model.pages for model in models}
    free = {device.id: device.pages for device in cluster.devices}
    whole = dict(free)
    for replica in cluster.replicas:
        for device in replica.devices:
            if device in free:
                free[device] -= pages.get(replica.model, whole[device])
    return free


def whole(devices: Sequence[Device]) -> int:
    """The pages that one device counts for where models share them: what most of the memory comes in. Smaller devices
    are shared by nobody.

    Example: of 100, 100 and 40 pages it is 100 (200 in all; three of 40 are 120), of 100, 80 and 80 it is 80.
    """
    sizes = sorted((device.pages for device in devices), reverse=True)
    return max(1, max(((n * size, size) for n, size in enumerate(sizes, 1)), default=(0, 1))[1])
