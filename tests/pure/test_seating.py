"""Where the steady models are to be: models of several shards beside others."""

from __future__ import annotations

from janus_server.sched.demand import Demand, Rules
from janus_server.sched.placement import Cluster, Device
from janus_server.sched.seating import Seating, seat


def homes(devices: int, *demands: Demand) -> dict[str, tuple[str, ...]]:
    """By model, from an empty cluster."""
    cluster = Cluster(devices=tuple(Device(id=f"n{i}", pages=100) for i in range(devices)), replicas=())
    found = seat(demands, cluster, Seating(), Rules(), [], [])
    assert found.refused == ()
    return {one.model: one.devices for one in found.seats}


def demand(model: str, compute: float, shards: int = 1) -> Demand:
    return Demand(model=model, hbm=0.3, compute=compute, bandwidth=compute, shards=shards)


WIDE = demand("wide", 0.2, shards=2)


def test_beside_shards_nobody_lies_while_there_is_room() -> None:
    found = homes(3, WIDE, demand("one", 0.4))
    assert not set(found["wide"]) & set(found["one"])


def test_beside_shards_lies_who_has_next_to_nothing_to_do() -> None:
    found = homes(3, WIDE, demand("one", 0.05))
    assert set(found["one"]) < set(found["wide"])


def test_without_room_models_lie_beside_shards() -> None:
    found = homes(2, WIDE, demand("one", 0.4))
    assert set(found["one"]) < set(found["wide"])
