"""Replicas over time when traffic bursts, and what the fast path and plans cost on up to 10,000 devices.

    janus bench scaling  --traces DIR                 a burst of the trace's most popular model, half a second a step
    janus bench scaling  --traces DIR --decide table  by the table of token rates instead of the oracle
    janus bench scaling  --cost --plot DIR            cost against models and devices, no trace needed

The scaler, the rollout, the sources and the oracle (without observations: its roofline) are the server's own; replicas
are a fluid that serves so many tokens a second. Prints tables; asserts nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from janus_server.sched.mind import Load, Question, ScalingRules, Shares
from janus_server.sched.placement import Cluster, Device, Model, Replica
from janus_server.sched.plan import plan
from janus_server.sched.reasons import Target
from janus_server.sched.rollout import roll
from janus_server.sched.scaling import Scaler

from .scaling_plots import draw
from .scaling_world import TICK_S, Prophet, Recorded, World, loads, model_of
from .serve_options import Described

_WARM_S: Final = 30.0


class Row(NamedTuple):
    """One model at one tick: tokens a second, replicas ready, on their way and wanted, seconds of work that wait."""

    at_s: float
    model: str
    tokens_s: float
    demand: float
    ready: int
    target: int
    backlog_s: float


class Cost(NamedTuple):
    """Milliseconds, or microseconds where it says so, of this thread's processor time."""

    models: int
    devices: int
    changed_ms: float
    unchanged_ms: float
    roll_ms: float
    plan_ms: float
    steps: int


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    print(f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}; {ScalingRules()}")
    rows: list[Row] = []
    said: list[tuple[float, Target]] = []
    costs: list[Cost] = []
    if options.cost:
        costs = [_cost(models, devices, options.seed) for models, devices in options.sizes]
        _print_costs(costs)
    else:
        rows, said = _run(options)
        _print_run(rows, said, options)
    if options.json is not None:
        figures = {
            "rows": [row._asdict() for row in rows],
            "targets": [{"at_s": at_s, "model": t.model, "from": t.before, "to": t.replicas, "by": t.decider.value,
                         "why": t.why} for at_s, t in said],
            "cost": [cost._asdict() for cost in costs],
        }  # fmt: skip
        options.json.write_text(json.dumps(figures, indent=1))
    if options.plot is not None:
        for path in draw(options.plot, rows, costs):
            print(f"wrote {path}")
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="janus bench scaling", description=__doc__, formatter_class=Described)
    default = Path(__file__).resolve().parents[2] / "shared" / "traces" / "workload62"
    parser.add_argument("--traces", type=Path, default=default, help="the folder workload62; --cost needs none")
    parser.add_argument(
        "--start", type=float, default=8445.0, help="second of the day; a burst of app 0 starts at 8505"
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="of simulated time")
    parser.add_argument("--devices", type=int, default=1152, help="of the elastic pool")
    parser.add_argument("--target", type=float, default=0.9, help="share of requests that are to attain")
    parser.add_argument("--decide", choices=("oracle", "table"), default="oracle", help="by what")
    parser.add_argument("--sentences", type=int, default=30, metavar="N", help="print the first N decisions")
    parser.add_argument("--cost", action="store_true", help="random clusters instead of the trace")
    parser.add_argument("--sizes", type=_size, nargs="+", metavar="MODELSxDEVICES", help="of --cost", default=[
        (62, 100), (62, 768), (200, 768), (500, 2000), (1000, 5000), (2000, 10000)])  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of random clusters")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write pictures there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser.parse_args(arguments)


def _size(text: str) -> tuple[int, int]:
    models, _, devices = text.partition("x")
    return int(models), int(devices)


def _run(options: argparse.Namespace) -> tuple[list[Row], list[tuple[float, Target]]]:
    """Half a second after the other. Time that comes before the start of the window lets replicas come up."""
    start_s = options.start - _WARM_S
    known = loads(options.traces, start_s, options.seconds + _WARM_S, options.seed)
    prophet = Prophet(known)
    models = {name: model_of(name, load, options.target) for name, load in known.items()}
    world, scaler = World(options.devices, models, prophet.able), Scaler()
    rows: list[Row] = []
    said: list[tuple[float, Target]] = []
    for k in range(len(next(iter(known.values())).rate)):
        now = k * TICK_S
        if k:
            world.pass_time(now)
        traffic = [world.serve(name, _tokens(load, k)) for name, load in known.items()]
        prophet.rate = {name: float(load.rate[k]) for name, load in known.items()}
        ask = prophet.ask if options.decide == "oracle" else _nobody
        targets, _ = scaler.decide(traffic, models, world.devices, ask, now)
        _order(world, models, scaler.targets, now)
        at_s = start_s + now - options.start
        said += [(at_s, target) for target in targets]
        rows += [
            Row(at_s, t.model, t.tokens_s, t.tokens_s / prophet.able[t.model], world.ready(t.model),
                scaler.targets.get(t.model, 0), t.backlog_s)
            for t in traffic
        ]  # fmt: skip
    return rows, said


def _order(world: World, models: dict[str, Model], targets: dict[str, int], now: float) -> None:
    """At first what is wanted stands already; later it takes its time."""
    while changes := roll(world.cluster(), models, targets).changes:
        for change in changes:
            world.begin(change, now)
        if now > 0.0:
            return
        world.pass_time(math.inf)


def _tokens(load: Recorded, tick: int) -> float:
    return float(load.rate[tick]) * (load.lengths[0] + load.lengths[2])


def _nobody(questions: Sequence[Question]) -> list[Shares | None]:
    return [None for _ in questions]


def _print_run(rows: Sequence[Row], said: Sequence[tuple[float, Target]], options: argparse.Namespace) -> None:
    print(f"\n{options.decide}, {options.devices} devices, {options.seconds:.0f} s from second {options.start:.0f}")
    print(f"{'model':28}{'tokens/s':>10}{'peak x':>8}{'replicas':>10}{'most':>6}{'changes':>9}{'turns':>7}"
          f"{'backlog s':>11}{'waiting s':>11}")  # fmt: skip
    for model in sorted({row.model for row in rows}):
        mine = [row for row in rows if row.model == model and row.at_s >= 0.0]
        tokens = np.array([row.tokens_s for row in mine])
        steps = [y.target - x.target for x, y in itertools.pairwise(mine) if x.target != y.target]
        turns = sum(x * y < 0 for x, y in itertools.pairwise(steps))
        waiting = TICK_S * sum(row.backlog_s > 0.5 * max(1, row.ready) for row in mine)
        print(f"{model:28}{np.median(tokens):10.0f}{tokens.max() / max(np.median(tokens), 1.0):8.1f}"
              f"{np.median([r.target for r in mine]):10.0f}{max(r.target for r in mine):6d}{len(steps):9d}{turns:7d}"
              f"{max(r.backlog_s / max(1, r.ready) for r in mine):11.2f}{waiting:11.1f}")  # fmt: skip
    print(
        "turns: how often a target changed its direction. waiting: seconds with more than half a second of work waiting"
    )
    if options.sentences:
        print("\ndecisions:")
    shown = [(at_s, target) for at_s, target in said if at_s >= 0.0]
    for at_s, target in shown[: options.sentences]:
        print(f"{at_s:8.1f} s  {target.why}")
    if len(shown) > options.sentences > 0:
        print(f"          ... and {len(shown) - options.sentences} more")


def _cost(models: int, devices: int, seed: int) -> Cost:
    """All traffic changed, and none; a rollout; and a plan that moves a twentieth of the replicas."""
    draws = np.random.default_rng([seed, models, devices])
    known = {f"m{i:05d}": Model(model=f"m{i:05d}", pages=10, weight_bytes=10**10) for i in range(models)}
    spots = tuple(Device(id=f"d{i:05d}", host=f"h{i // 16}", domain="d0", pages=24) for i in range(devices))
    each = max(1, int(0.8 * devices) // models)

    def able(questions: Sequence[Question]) -> list[Shares | None]:
        return [np.minimum(0.999, np.array(q.counts) / (q.factor * each)) for q in questions]

    scaler, changed, unchanged = Scaler(), [], []
    traffic: list[Load] = []
    for k in range(240):
        if k < 10:
            rates = draws.uniform(1e3, 9e3, models).tolist()
            traffic = [Load(model=name, tokens_s=rate) for name, rate in zip(known, rates, strict=True)]
        took = _ms(lambda: scaler.decide(traffic, known, spots, able, k / 2))  # noqa: B023 - called at once
        (changed if k < 10 else unchanged).append(took)
    homes = iter(draws.permutation(devices).tolist())
    held = tuple(Replica(model=name, devices=(spots[next(homes)].id,)) for name in known for _ in range(each))
    cluster = Cluster(spots, held)
    more = {name: each + (i % 20 == 0) for i, name in enumerate(known)}
    roll_ms = _ms(lambda: roll(cluster, known, more))
    moved = set(draws.permutation(len(held))[: max(1, len(held) // 20)].tolist())
    free = [spots[i].id for i in homes]
    wanted = [Replica(model=r.model, devices=(free.pop(),)) if i in moved and free else r for i, r in enumerate(held)]
    made = plan(cluster, known.values(), wanted)
    plan_ms = _ms(lambda: plan(cluster, known.values(), wanted))
    return Cost(models, devices, float(np.median(changed)), float(np.median(unchanged[-20:])), roll_ms, plan_ms,
                len(made.steps))  # fmt: skip


def _ms(call: object) -> float:
    start = time.thread_time()
    call()  # type: ignore[operator]
    return 1e3 * (time.thread_time() - start)


def _print_costs(costs: Sequence[Cost]) -> None:
    print("\nmodels devices   tick, all changed ms   unchanged ms   rollout ms   plan ms (steps)")
    for c in costs:
        print(f"{c.models:6d} {c.devices:7d} {c.changed_ms:22.2f} {c.unchanged_ms:14.3f} {c.roll_ms:12.1f}"
              f" {c.plan_ms:9.1f} ({c.steps})")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
