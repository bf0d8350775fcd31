"""Records of packing: what models need of the devices, where they lie, and a decision with its sentences.

`packing` and whoever asks it speak in them. A share is a part of one device: 0.25 of its HBM. Pure; nothing decides
here, except which needs no device could ever meet.
"""

from __future__ import annotations

import enum
import math
from typing import Final

import msgspec

DIMENSIONS: Final = ("HBM", "compute", "bandwidth", "busy time")
WHOLE: Final = 1_000_000
"""A device's capacity in each dimension: shares are counted in whole millionths, so that sums are exact."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What one model needs: shares of one device for each of its shards, which lie on different devices.

    busy is the part of the time that its steps keep a device to themselves, where co-resident models take turns
    instead of overlapping. move_s: device-seconds that moving one shard costs.
    """

    model: str
    hbm: float
    compute: float
    bandwidth: float
    busy: float = 0.0
    shards: int = 1
    move_s: float = 1.0

    @property
    def shares(self) -> tuple[float, ...]:
        return (self.hbm, self.compute, self.bandwidth, self.busy)


class Seat(msgspec.Struct, frozen=True, order=True):
    model: str
    device: str


class Placement(msgspec.Struct, frozen=True):
    """Who lies where, by model and then by device.

    vain counts the decisions in a row whose search for fewer devices found nothing: the next ones search less.
    """

    seats: tuple[Seat, ...] = ()
    vain: int = 0

    @property
    def homes(self) -> dict[str, tuple[str, ...]]:
        """The devices of each model, in the order of the seats."""
        homes: dict[str, list[str]] = {}
        for seat in self.seats:
            homes.setdefault(seat.model, []).append(seat.device)
        return {model: tuple(home) for model, home in homes.items()}


class Rules(msgspec.Struct, frozen=True):
    """models_most: models a device may hold, 0 for any number. damage_most: α: changed devices above it are repaired.

    hold_s: how long a saved device is expected to stay saved: it pays for moves of that many device-seconds. steps: how
    far the search for fewer devices goes; 0 leaves it out.
    """

    models_most: int = 0
    damage_most: float = 0.5
    hold_s: float = 300.0
    steps: int = 150


class Kind(enum.Enum):
    PLACE = "place"
    MOVE = "move"
    DROP = "drop"


class Move(msgspec.Struct, frozen=True):
    """One shard comes (no source), goes (no target) or changes its device."""

    kind: Kind
    model: str
    source: str | None
    target: str | None
    why: str


class Reason(enum.Enum):
    TOO_LARGE = "too_large"
    TOO_MANY_SHARDS = "too_many_shards"
    NOT_A_DEMAND = "not_a_demand"
    NO_ROOM = "no_room"


class Refusal(msgspec.Struct, frozen=True):
    model: str
    reason: Reason
    why: str


class Decision(msgspec.Struct, frozen=True):
    """devices_bound: no packing of what is placed uses fewer devices than this."""

    placement: Placement
    moves: tuple[Move, ...]
    refusals: tuple[Refusal, ...]
    devices_used: int
    devices_bound: int


def impossible(demand: Demand, devices: int) -> Refusal | None:
    """Why no number of free devices could hold this model as it is cut, if so."""
    shares, model = demand.shares, demand.model
    if demand.shards < 1 or not all(math.isfinite(share) and share >= 0.0 for share in (*shares, demand.move_s)):
        why = f"{model} is not placed: its shares must be numbers of at least 0, and it must have a shard"
        return Refusal(model, Reason.NOT_A_DEMAND, why)
    worst = max(range(len(shares)), key=lambda k: shares[k])
    if millionths(shares[worst]) > WHOLE:
        why = (
            f"{model} is not placed: a shard of it needs {shares[worst]:.4g} of a device's {DIMENSIONS[worst]}; "
            f"it takes {math.ceil(shares[worst])} times as many shards, or as many replicas in the elastic pool"
        )
        return Refusal(model, Reason.TOO_LARGE, why)
    if demand.shards > devices:
        why = f"{model} is not placed: its {demand.shards} shards need a device each and there are {devices}"
        return Refusal(model, Reason.TOO_MANY_SHARDS, why)
    return None


def millionths(share: float) -> int:
    """Rounded up, so that what is placed fits; what is a millionth in all but its last bits stays one."""
    return math.ceil(share * WHOLE - 1e-4) if share < WHOLE else WHOLE * WHOLE
