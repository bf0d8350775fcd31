"""How good dispatch is, and how fast: against the exact optimum, against bounds, and in a small world of arrivals.

    janus bench dispatch                           all parts (about four minutes)
    janus bench dispatch  --part guarantee         ratios to the exact optimum by machines and order
    janus bench dispatch  --trace FOLDER           trace-shaped instances too: requests.csv.gz and apps.csv lie there
    janus bench dispatch  --plot FOLDER            pictures of the parts run

Everything is drawn from --seed. Times are processor time of one core, the best of several runs.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from janus_server.sched.dispatch import dispatch, dispatch_best, dispatch_live
from janus_server.sched.jobs import Planner, columns, starts_ns
from janus_server.sched.rivals import PLANNERS
from janus_server.sched.stream import most_possible

from . import dispatch_plots, dispatch_world
from .dispatch_cases import Case, Rows, backlog, drawn_rows, from_rows, most_on_time, small, trace_rows
from .serve_options import Parser

_PARTS: Final = ("guarantee", "runtime", "snapshot", "arrivals")
_GRID: Final = tuple(
    (n, m) for n in (100, 1_000, 4_000, 10_000) for m in (8, 32, 128, 768, 10_000) if n * m <= 40_000_000
)
_TIMED: Final = (
    ("dispatch", dispatch, 40_000_000),
    ("dispatch_best", dispatch_best, 8_000_000),
    ("dispatch_live", dispatch_live, 100_000_000),
)
_LOADS: Final = (0.5, 0.75, 1.0, 1.25, 1.5)
_MACHINES: Final = 8
_SNAPSHOT_JOBS: Final = 120
_ARRIVALS: Final = 1_000
_PREDICTION_ERROR: Final = 0.1


class Timing(NamedTuple):
    """Seconds of one plan."""

    planner: str
    jobs: int
    machines: int
    took_s: float


# Shares by name of what is compared, one a load.
Shares = dict[str, list[float]]


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    parts = options.part or list(_PARTS)
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, seed {options.seed}")
    if "guarantee" in parts:
        guarantee(options.seed, options.instances)
    if "runtime" in parts:
        timings = runtime(options.seed)
        if options.plot:
            dispatch_plots.runtime(options.plot, timings)
    sources = _sources(options)
    for part, measure in (("snapshot", snapshot), ("arrivals", arriving)):
        for name, rows in sources.items() if part in parts else ():
            shares = measure(options, name, rows)
            if options.plot:
                dispatch_plots.shares(options.plot, f"{part}_{name}", _loads(part), shares)
    return 0


def guarantee(seed: int, instances: int) -> None:
    """Worst ratio and ratio of sums to the exact optimum, by machines and order, over small random instances."""
    print(f"\nJobs on time against the exact optimum, {instances} instances of up to 9 jobs a line")
    print(f"{'machines':>8}  {'planner':24} {'worst':>6} {'sum':>8} {'short of it':>11} {'guarantee':>9}")
    for m in (1, 2, 3, 4):
        drawn = {same: _drawn(seed + m, instances, m, same) for same in (False, True)}
        lines: list[tuple[str, Planner, bool, float]] = [
            ("LST-IMH, equal starts", dispatch, True, 1 - (1 - 1 / m) ** m),
            ("LST-IMH, latest first", dispatch, False, m / (2 * m - 1)),
            ("LST-IMH, earliest first", PLANNERS["LST-IMH, earliest first"], False, 0.5 if m > 1 else 1.0),
            ("LST-IMH, random order", PLANNERS["LST-IMH, random order"], False, 0.5 if m > 1 else 1.0),
            ("ours, best", dispatch_best, False, m / (2 * m - 1)),
            ("ours, live", dispatch_live, False, m / (2 * m - 1)),
        ]
        for name, planner, same, promised in lines:
            kept = np.array([planner(*case).on_time for case, _ in drawn[same]])
            most = np.array([exact for _, exact in drawn[same]])
            worst, whole = (kept / most).min(), kept.sum() / most.sum()
            print(f"{m:8}  {name:24} {worst:6.3f} {whole:8.4f} {(kept < most).mean():11.2%} {promised:9.3f}")


def runtime(seed: int) -> list[Timing]:
    """Processor time by jobs and machines. per pair: nanoseconds / (n m log2 n), which stays flat at O(m n log n)."""
    print("\nTime of one plan at load 1.25, ms (ns a pair of job and machine and log2 n)")
    print(f"{'jobs':>6} {'machines':>8}" + "".join(f" {name:>22}" for name, _, _ in _TIMED))
    timings = []
    for n, m in _GRID:
        case = backlog(np.random.default_rng(seed), n, m, 1.25)
        cells = []
        for name, planner, most in _TIMED:
            if n * m > most:
                cells.append("-")
                continue
            took_s = _best_of(partial(planner, *case))
            timings.append(Timing(name, n, m, took_s))
            cells.append(f"{took_s * 1e3:.2f} ({took_s * 1e9 / (n * m * math.log2(n)):6.2f})")
        print(f"{n:6} {m:8}" + "".join(f" {cell:>22}" for cell in cells), flush=True)
    return timings


def snapshot(options: argparse.Namespace, name: str, rows: Rows | None) -> Shares:
    """Share of the waiting jobs on time by planner and load: everything known, nothing comes."""
    count = max(5, options.instances // 75)
    _head(f"Jobs on time of {_SNAPSHOT_JOBS} that wait, {_MACHINES} machines, {name}, {count} instances a load", _LOADS)
    found: Shares = {}
    for load in _LOADS:
        rng = np.random.default_rng(options.seed)
        cases = [
            backlog(rng, _SNAPSHOT_JOBS, _MACHINES, load)
            if rows is None
            else from_rows(rng, rows, _SNAPSHOT_JOBS, _MACHINES, load)
            for _ in range(count)
        ]
        whole = _SNAPSHOT_JOBS * count
        for planner in PLANNERS:
            kept = sum(PLANNERS[planner](*case).on_time for case in cases)
            found.setdefault(planner, []).append(kept / whole)
        bound = sum(most_possible(columns(case.jobs), starts_ns(case.machines)) for case in cases)
        found.setdefault("bound", []).append(bound / whole)
    _rows(found)
    return found


def arriving(options: argparse.Namespace, name: str, rows: Rows | None) -> Shares:
    """Share of the requests on time by policy and load when they come over time and predictions are a little wrong."""
    loads = _loads("arrivals")
    _head(f"Requests on time of {_ARRIVALS} that arrive, {_MACHINES} machines, {name}", loads)
    found: Shares = {}
    for load in loads:
        rng = np.random.default_rng(options.seed)
        part = drawn_rows(rng, _ARRIVALS) if rows is None else _slice(rng, rows)
        requests = dispatch_world.arrivals(rng, part, _MACHINES, load, _PREDICTION_ERROR)
        for policy, decides in dispatch_world.policies().items():
            kept = dispatch_world.on_time(requests, _MACHINES, decides)
            found.setdefault(policy, []).append(kept / len(requests))
        found.setdefault("hindsight bound", []).append(dispatch_world.hindsight(requests, _MACHINES) / len(requests))
    _rows(found)
    return found


def _loads(part: str) -> tuple[float, ...]:
    return (*_LOADS, 2.0) if part == "arrivals" else _LOADS


def _drawn(seed: int, instances: int, machines: int, same: bool) -> list[tuple[Case, int]]:
    rng = np.random.default_rng(seed)
    cases = [small(rng, machines, same) for _ in range(instances)]
    return [(case, most) for case in cases if (most := most_on_time(case))]


def _slice(rng: np.random.Generator, rows: Rows) -> Rows:
    at = int(rng.integers(0, len(rows.t_s) - _ARRIVALS + 1))
    return Rows(*(column[at : at + _ARRIVALS] for column in rows))


def _best_of(run: Callable[[], object]) -> float:
    """At least three runs, more of short ones."""
    took: list[float] = []
    while len(took) < 3 or (sum(took) < 0.15 and len(took) < 20):
        began = time.process_time()
        run()
        took.append(time.process_time() - began)
    return min(took)


def _sources(options: argparse.Namespace) -> dict[str, Rows | None]:
    sources: dict[str, Rows | None] = {"random": None}
    if options.trace is not None:
        sources["trace"] = trace_rows(options.trace)
    return sources


def _head(title: str, loads: Sequence[float]) -> None:
    print(f"\n{title}\n{'load':26}" + "".join(f"{load:8.2f}" for load in loads))


def _rows(shares: Shares) -> None:
    for name, values in shares.items():
        print(f"{name:26}" + "".join(f"{value:8.1%}" for value in values), flush=True)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("janus bench dispatch", __doc__ or "")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--part", action="append", choices=_PARTS, help="run this part alone; may be given repeatedly")
    parser.add_argument("--instances", type=int, default=3_000, metavar="N", help="small instances a line")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="requests.csv.gz and apps.csv of a workload")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write PNG files there")
    return parser.parse(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
