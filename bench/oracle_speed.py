"""What the oracle costs: a fit by its size, and a tick of the fast path by the number of models.

`bench.oracle` runs it. Fits are timed where they run, in processor time, and by the clock as the leader would wait for
them; ticks by this thread's processor time, since machines that run benchmarks are shared. The numbers that are fitted
are drawn: cost does not depend on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from janus_server.sched.oracle import ATTAINMENT_INPUTS, DEMAND_INPUTS, Ask, Oracle
from janus_server.sched.oracle_arrays import pack
from janus_server.sched.oracle_records import (
    Counts,
    Features,
    FitRequest,
    Fitted,
    FittedGp,
    Hyper,
    Points,
    Promise,
    Subject,
)
from janus_server.sched.roofline import ASCEND_910C, ModelShape

SIZES: Final = (32, 64, 128, 256)
MODELS: Final = (1, 16, 62, 250)
POINTS: Final = 256
COUNTS: Final = (1, 2, 3, 4, 5, 6, 7, 8)
_RUNS: Final = 5


class FitTime(NamedTuple):
    """Of all four GPs of one model, seconds: the first fit, one that starts from it, and that one by the clock."""

    points: int
    cold_s: float
    warm_s: float
    warm_clock_s: float


class TickTime(NamedTuple):
    """Milliseconds: attainment at 8 replica counts with all models changed, with none, all demands, and the first
    question about one model after a fit of it came in."""

    models: int
    changed_ms: float
    unchanged_ms: float
    demand_ms: float
    learn_ms: float


class Speed(NamedTuple):
    start_s: float
    fits: list[FitTime]
    ticks: list[TickTime]

    def as_builtins(self) -> dict[str, Any]:
        return {
            "start_s": self.start_s,
            "fits": [f._asdict() for f in self.fits],
            "ticks": [t._asdict() for t in self.ticks],
        }


def measure(fit: Callable[[FitRequest], Fitted], seed: int) -> Speed:
    draws = np.random.default_rng(seed)
    start = time.perf_counter()
    fit(_request(16, draws))
    start_s = time.perf_counter() - start
    return Speed(start_s, [_fit_time(fit, size, draws) for size in SIZES], [_tick_time(n, draws) for n in MODELS])


def print_speed(speed: Speed) -> None:
    print(f"\nthe fitting process answers its first question after {speed.start_s:.1f} s")
    print("points   first fit s   from the last one s   by the clock s     (four GPs of one model)")
    for f in speed.fits:
        print(f"{f.points:6d} {f.cold_s:13.2f} {f.warm_s:21.3f} {f.warm_clock_s:16.3f}")
    print(f"models   all changed ms   none changed ms   demands ms   learn one ms     ({POINTS} points each)")
    for t in speed.ticks:
        print(f"{t.models:6d} {t.changed_ms:16.2f} {t.unchanged_ms:17.3f} {t.demand_ms:12.2f} {t.learn_ms:14.2f}")


def _fit_time(fit: Callable[[FitRequest], Fitted], size: int, draws: np.random.Generator) -> FitTime:
    request = _request(size, draws)
    cold = last = fit(request)
    warm, clock = [], []
    for _ in range(_RUNS):
        starts = tuple(gp.hyper for gp in (*last.demand, *filter(None, [last.attainment])))
        begin = time.perf_counter()
        last = fit(FitRequest(request.model, 0.0, request.demand, request.attainment, starts))
        clock.append(time.perf_counter() - begin)
        warm.append(last.took_s)
    return FitTime(size, cold.took_s, float(np.median(warm)), float(np.median(clock)))


def _request(size: int, draws: np.random.Generator) -> FitRequest:
    inputs = draws.normal(size=(size, ATTAINMENT_INPUTS))
    nothing, many = pack(np.zeros(size)), np.full(size, 60.0)
    demand = tuple(
        Points(
            pack(inputs[:, :DEMAND_INPUTS]), pack(0.3 * np.sin(inputs[:, k]) + 0.05 * draws.normal(size=size)),
            pack(many), nothing,
        )
        for k in range(3)
    )  # fmt: skip
    on_time = draws.binomial(60, 1.0 / (1.0 + np.exp(-3.0 - np.sin(inputs[:, 0]))))
    return FitRequest(
        "m", 0.0, demand, Counts(pack(inputs), pack(np.full(size, 3.0)), pack(many), pack(on_time), nothing)
    )


def _tick_time(models: int, draws: np.random.Generator) -> TickTime:
    oracle, fitted = Oracle(), _fitted(draws)
    names = [f"model{i:04d}" for i in range(models)]
    shape = ModelShape(name="8B", parameters=8e9, layers=36, hidden=4096, kv_bytes=147_456.0, pair_flops=589_824.0)
    for name in names:
        oracle.know(name, Subject(model=shape, device=ASCEND_910C, promise=Promise(1.0, 0.05), pace_s=0.025))
        oracle.learn(Fitted(name, fitted.at_s, fitted.demand, fitted.attainment, fitted.took_s))
    asks = [[_ask(name, draws) for name in names] for _ in range(_RUNS + 1)]
    learn_ms = _ms([lambda ask=ask: oracle.attainment([ask]) for ask in asks[0]])  # type: ignore[misc]
    oracle.demand(asks[0])
    changed = _ms([lambda a=a: oracle.attainment(a) for a in asks[1:]])  # type: ignore[misc]
    unchanged = _ms([lambda: oracle.attainment(asks[-1])] * _RUNS)
    single = [[Ask(a.model, a.features, (1,)) for a in ask] for ask in asks[1:]]
    demand = _ms([lambda a=a: oracle.demand(a) for a in single])  # type: ignore[misc]
    return TickTime(models, changed, unchanged, demand, learn_ms)


def _ms(calls: Sequence[Callable[[], object]]) -> float:
    """The median's processor time."""
    times = []
    for call in calls:
        start = time.thread_time()
        call()
        times.append(1e3 * (time.thread_time() - start))
    return float(np.median(times))


def _ask(name: str, draws: np.random.Generator) -> Ask:
    rate = float(draws.uniform(1.0, 20.0))
    return Ask(name, Features(rate * 600.0, rate, 500.0, 1e5, 100.0, 1e4), COUNTS)


def _fitted(draws: np.random.Generator) -> Fitted:
    inputs = draws.normal(size=(POINTS, ATTAINMENT_INPUTS)) + 3.0
    targets, noise = pack(draws.normal(size=POINTS)), pack(np.full(POINTS, 0.1))
    demand = FittedGp(Hyper((1.0,) * DEMAND_INPUTS, 0.3, 0.01, 0.1), pack(inputs[:, :DEMAND_INPUTS]), targets, noise)
    attainment = FittedGp(Hyper((1.0,) * ATTAINMENT_INPUTS, 1.5, 0.1, 0.0), pack(inputs), targets, noise)
    return Fitted("", 0.0, (demand,) * 3, attainment, 0.0)
