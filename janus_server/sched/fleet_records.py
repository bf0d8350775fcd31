"""How a fleet of nodes is led, and what its leader remembers of that, as frozen records. `fleet` decides. Pure."""

from __future__ import annotations

import msgspec

from janus_server.sched.demand import Rules as PackingRules
from janus_server.sched.meter import Gauge
from janus_server.sched.mind import RateTable, ScalingRules
from janus_server.sched.pools import Overlap, Pool, PoolRules, Pools
from janus_server.sched.scaling import ScalerMemory
from janus_server.sched.seating import Seating
from janus_server.sched.source import Links
from janus_server.units import LONG_AGO_S


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """fast_s and slow_s: the periods of the two paths; where prompts of a model that shares its devices pile up, or
    too many of its requests are late, the slow path goes as soon as press_s after its last time. pools: those that
    there are; with one of them alone, every model is in that one. fill: how much of a device's compute, bandwidth and
    time the models that share it may take, as a pessimist sees it: what waits behind others grows as 1 / (1 - load).
    """

    fast_s: float = 0.5
    slow_s: float = 30.0
    press_s: float = 2.0
    pools: tuple[Pool, ...] = (Pool.STEADY, Pool.ELASTIC)
    fill: float = 0.7
    overlap: Overlap = Overlap.TURNS
    scaling: ScalingRules = ScalingRules()
    table: RateTable = RateTable()
    assignment: PoolRules = PoolRules()
    packing: PackingRules = PackingRules()
    links: Links = Links()


class FleetMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a `Fleet` knows at one moment.

    homes are the nodes of each replica, seating the steady pool. called: when requests came last for a model that
    nobody had; lacking: since when requests wait for one that no replica is on its way of; asleep: models that an
    operator put to sleep and nobody has called since. noted: when what is not done, or not believed, was noted last.
    """

    homes: dict[str, tuple[tuple[str, ...], ...]] = {}
    pools: Pools = Pools()
    seating: Seating = Seating()
    scaler: ScalerMemory = ScalerMemory()
    gauges: dict[str, Gauge] = {}
    called: dict[str, float] = {}
    lacking: dict[str, float] = {}
    asleep: tuple[str, ...] = ()
    noted: dict[str, float] = {}
    since_s: float | None = None
    fast_s: float = LONG_AGO_S
    slow_s: float = LONG_AGO_S
    moving: bool = True
