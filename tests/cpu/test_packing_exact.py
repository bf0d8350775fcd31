"""Packing against OR-Tools CP-SAT: on random demand, and on an hour of 62 applications where their trace is here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.packing_day import Shape, read_day
from janus_server.sched.demand import Demand, Placement, Rules
from janus_server.sched.packing import pack

pytest.importorskip("ortools")
from bench.packing_exact import fewest

TRACE = Path(__file__).resolve().parents[3] / "shared" / "traces" / "workload62"


def some(seed: int, count: int, most_shards: int) -> list[Demand]:
    draws = np.random.default_rng(seed)
    shares = draws.uniform(0.03, 0.3, (count, 3))
    shares[np.arange(count), draws.integers(0, 3, count)] += draws.uniform(0.0, 0.4, count)
    shards = draws.integers(1, most_shards + 1, count).tolist()
    return [
        Demand(model=f"m{i:02d}", hbm=h, compute=c, bandwidth=b, shards=shards[i])
        for i, (h, c, b) in enumerate(shares.tolist())
    ]


@pytest.mark.parametrize(("most_shards", "models_most"), [(1, 0), (1, 2), (3, 0)])
def test_random_demand_is_packed_within_one_device_of_the_optimum(most_shards: int, models_most: int) -> None:
    missed = 0
    for seed in range(6):
        demands = some(seed, 18 if most_shards == 1 else 9, most_shards)
        got = pack(demands, [f"d{i}" for i in range(40)], rules=Rules(models_most=models_most))
        best = fewest(demands, got.devices_used, models_most, limit_s=20.0)
        assert best.devices is not None and got.devices_bound <= best.devices
        assert got.devices_used - best.bound <= 1
        missed += got.devices_used > best.devices
    assert missed <= 1


def test_the_exact_solver_says_when_devices_do_not_suffice() -> None:
    demands = [Demand(model=m, hbm=0.6, compute=0.1, bandwidth=0.1) for m in "abc"]
    best = fewest(demands, 2)
    assert (best.devices, best.bound, best.proved) == (None, 3, True)
    assert fewest(demands, 5).devices == 3


@pytest.mark.skipif(not TRACE.is_dir(), reason="the trace workload62 is not beside the repository")
def test_an_hour_of_the_day_is_packed_at_the_optimum() -> None:
    day = read_day(TRACE, Shape.PLAIN)
    devices, placement = [f"d{i:03d}" for i in range(64)], Placement()
    for step in range(1200, 1320):
        demands = day.demands(step)
        got = pack(demands, devices, placement)
        placement = got.placement
        if got.devices_used > got.devices_bound or step % 40 == 0:
            best = fewest(demands, got.devices_used, limit_s=20.0)
            assert got.devices_used == best.devices
