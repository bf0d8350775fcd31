"""How good and how fast packing is: against CP-SAT over a day of 62 applications, and on up to 10,000 devices.

    janus bench packing  --traces DIR                  three shapes of the day, exact wherever the bound is not met
    janus bench packing  --traces DIR --sample 30      and CP-SAT from nothing on every 30th tick, to compare times
    janus bench packing  --scale --plot DIR            cost against applications and devices, no trace needed

Prints tables; asserts nothing. Times are this thread's processor time, since machines that run benchmarks are shared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from janus_server.sched.demand import Decision, Demand, Kind, Placement, Rules
from janus_server.sched.packing import pack

from . import packing_exact
from .packing_day import STEPS, VOLUME, Shape, read_day
from .packing_plots import draw
from .serve_options import Described

DEVICES: Final = 768
SCALES: Final = ((62, 100), (62, 768), (200, 768), (500, 768), (1000, 1000), (2000, 2000), (2000, 10000), (5000, 10000))
# Exact solves that prove a tick's optimum may take longer than those that are compared for time.
_PROOF_FACTOR: Final = 3.0


class Tick(NamedTuple):
    """One decision of a day. fewest is the optimum where it is known, volume the bound by volume alone."""

    step: int
    apps: int
    shards: int
    used: int
    bound: int
    volume: int
    fewest: int | None
    moves: int
    move_s: float
    seconds: float
    exact_s: float | None


class Scale(NamedTuple):
    """Milliseconds of a decision with nothing standing, and of one that follows it with a twentieth of it changed."""

    apps: int
    devices: int
    used: int
    bound: int
    cold_ms: float
    tick_ms: float


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    rules = Rules(models_most=options.models_most, damage_most=options.alpha, steps=options.steps)
    print(f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}; {rules}")
    days: dict[str, list[Tick]] = {}
    if not options.scale:
        for shape in [Shape(name) for name in options.shape]:
            days[shape.value] = list(_day(options, shape, rules))
            _print_day(shape.value, days[shape.value])
    scales = list(_scales(options.seed, rules)) if options.scale else []
    if scales:
        _print_scales(scales)
    if options.json is not None:
        figures = {
            "days": {k: [t._asdict() for t in v] for k, v in days.items()},
            "scale": [s._asdict() for s in scales],
        }
        options.json.write_text(json.dumps(figures, indent=1))
    if options.plot is not None:
        for path in draw(options.plot, days, scales):
            print(f"wrote {path}")
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="janus bench packing", description=__doc__, formatter_class=Described)
    default = Path(__file__).resolve().parents[2] / "shared" / "traces" / "workload62"
    parser.add_argument("--traces", type=Path, default=default, help="the folder workload62; --scale needs none")
    parser.add_argument("--shape", nargs="+", choices=[s.value for s in Shape], default=[s.value for s in Shape],
                        help="of the day")  # fmt: skip
    parser.add_argument("--volume", type=float, default=VOLUME, help="times the requests of the trace")
    parser.add_argument("--ticks", type=int, default=STEPS, help="decisions of the day, from its start")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="time CP-SAT from nothing on every Nth tick")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds for one exact solve")
    parser.add_argument("--no-exact", action="store_true", help="compare with the bound alone")
    parser.add_argument("--steps", type=int, default=Rules().steps, help="how far the search goes")
    parser.add_argument("--alpha", type=float, default=Rules().damage_most, help="of damage, before a bin is repaired")
    parser.add_argument("--models-most", type=int, default=0, help="models a device may hold; 0: any number")
    parser.add_argument("--scale", action="store_true", help="random demand on more and more devices instead of a day")
    parser.add_argument("--seed", type=int, default=0, help="of the random demand")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write pictures there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser.parse_args(arguments)


def _day(options: argparse.Namespace, shape: Shape, rules: Rules) -> Iterator[Tick]:
    """A decision every 30 s, each starting from the last one's placement."""
    day = read_day(options.traces, shape, options.volume)
    devices = [f"device{i:04d}" for i in range(DEVICES)]
    placement, costs = Placement(), {}
    for step in range(min(options.ticks, STEPS)):
        demands = day.demands(step)
        costs.update({demand.model: demand.move_s for demand in demands})
        start = time.thread_time()
        decision = pack(demands, devices, placement, rules)
        seconds = time.thread_time() - start
        placement = decision.placement
        moves = [move.model for move in decision.moves if move.kind is Kind.MOVE]
        fewest, exact_s = _optimum(options, demands, decision, step)
        volume = int(np.ceil(sum(np.array(d.shares) * d.shards for d in demands).max())) if demands else 0
        yield Tick(
            step, len(demands), sum(d.shards for d in demands), decision.devices_used, decision.devices_bound, volume,
            fewest, len(moves), sum(costs[model] for model in moves), seconds, exact_s,
        )  # fmt: skip


def _optimum(
    options: argparse.Namespace, demands: Sequence[Demand], decision: Decision, step: int
) -> tuple[int | None, float | None]:
    """The fewest devices, where known, and the time of a solve from nothing, where one was asked for.

    Where the bound is met that is the optimum. Elsewhere CP-SAT is asked for a packing on one device less.
    """
    used, exact_s, known = decision.devices_used, None, None
    if options.sample and step % options.sample == 0 and demands:
        solved = packing_exact.fewest(demands, used, options.models_most, options.limit)
        exact_s, known = solved.seconds, solved.devices if solved.proved else None
    if used == decision.devices_bound:
        return used, exact_s
    if known is None and not options.no_exact:
        solved = packing_exact.fewest(demands, used - 1, options.models_most, _PROOF_FACTOR * options.limit)
        if solved.devices is None:
            known = used if solved.bound >= used else None
        else:
            known = solved.devices if solved.proved else None
    return known, exact_s


def _scales(seed: int, rules: Rules) -> Iterator[Scale]:
    """Demand drawn so that a device holds about three models, lopsided in one dimension or another."""
    for apps, devices in SCALES:
        draws = np.random.default_rng([seed, apps, devices])
        demands = _random(draws, apps)
        names = [f"device{i:05d}" for i in range(devices)]
        start = time.thread_time()
        decision = pack(demands, names, Placement(), rules)
        cold_ms = 1e3 * (time.thread_time() - start)
        times = []
        for _ in range(5):
            changed = draws.permutation(apps)[: max(1, apps // 20)]
            fresh = _random(draws, apps)
            for i in changed.tolist():
                demands[i] = fresh[i]
            start = time.thread_time()
            decision = pack(demands, names, decision.placement, rules)
            times.append(1e3 * (time.thread_time() - start))
        yield Scale(apps, devices, decision.devices_used, decision.devices_bound, cold_ms, float(np.median(times)))


def _random(draws: np.random.Generator, apps: int) -> list[Demand]:
    share = draws.uniform(0.02, 0.3, (apps, 3))
    share[np.arange(apps), draws.integers(0, 3, apps)] += draws.uniform(0.0, 0.4, apps)
    return [
        Demand(model=f"app{i:05d}", hbm=hbm, compute=compute, bandwidth=bandwidth)
        for i, (hbm, compute, bandwidth) in enumerate(share.tolist())
    ]


def _print_day(name: str, ticks: Sequence[Tick]) -> None:
    known = [t for t in ticks if t.fewest is not None]
    over = Counter(t.used - t.fewest for t in known if t.fewest is not None)
    hard = [t for t in known if t.fewest is not None and t.fewest > t.volume]
    ms = np.percentile([1e3 * t.seconds for t in ticks], [50, 90, 99, 100])
    print(f"\n{name}: {len(ticks)} ticks, {np.mean([t.apps for t in ticks]):.1f} models awake, "
          f"{np.mean([t.shards for t in ticks]):.1f} shards")  # fmt: skip
    print(f"  devices used, mean              {np.mean([t.used for t in ticks]):10.3f}")
    print(f"  bound, mean                     {np.mean([t.bound for t in ticks]):10.3f}")
    print(f"  optimum known on ticks          {len(known):10d}")
    for extra, count in sorted(over.items()):
        print(f"  {f'{extra} over the optimum':32}{count:10d}   {100 * count / max(1, len(known)):.2f} %")
    print(f"  hard (optimum above the volume) {len(hard):10d}")
    print(
        f"  moves a tick, mean and most     {np.mean([t.moves for t in ticks]):10.2f} {max(t.moves for t in ticks):6d}"
    )
    print(f"  device-seconds of moves a tick  {np.mean([t.move_s for t in ticks]):10.2f}")
    print("  decision ms p50 p90 p99 max     " + " ".join(f"{value:9.2f}" for value in ms))
    timed = [t for t in ticks if t.exact_s is not None]
    if timed:
        exact = np.array([t.exact_s for t in timed], dtype=np.float64)
        print("  CP-SAT ms p50 p90 p99 max       "
              + " ".join(f"{1e3 * value:9.1f}" for value in np.percentile(exact, [50, 90, 99, 100])))  # fmt: skip
        ours = np.array([t.seconds for t in timed])
        print(f"  times faster, median and total  {np.median(exact / ours):10.0f} {exact.sum() / ours.sum():9.0f}")


def _print_scales(scales: Sequence[Scale]) -> None:
    print("\n  apps devices    used   bound  ms from nothing  ms a tick (a twentieth of the demand changed)")
    for s in scales:
        print(f"{s.apps:6d} {s.devices:7d} {s.used:7d} {s.bound:7d} {s.cold_ms:16.1f} {s.tick_ms:10.2f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
