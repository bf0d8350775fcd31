"""Instances for dispatch, drawn with a seed or cut from a trace, and the exact optimum of small ones.

`dispatch` (the benchmark) and the tests use these. Nothing here plans; nothing is measured here.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from janus_server.errors import BadConfig
from janus_server.sched.jobs import Job, Machine, columns, starts_ns

from .traces import TraceRow, TraceSlice, read_trace

# Prefill time of the public artifact's predictor without a profile: a line in the prompt's length.
PREFILL_S: Final = 0.06727
PREFILL_S_PER_TOKEN: Final = 0.0000964
# Prompts whose first token could never be in time tell nothing about dispatch.
_HOPELESS: Final = 0.9
_LARGEST_B: Final = 100.0


class Case(NamedTuple):
    """What a planner is given."""

    jobs: list[Job]
    machines: list[Machine]


class Rows(NamedTuple):
    """Prompts of a workload in order of arrival: seconds, predicted prefill time, and TTFT objective."""

    t_s: np.ndarray
    work_s: np.ndarray
    ttft_s: np.ndarray


def small(rng: np.random.Generator, machines: int, equal: bool = False) -> Case:
    """Up to 9 jobs in whole seconds, tight enough for the order to matter; equal: all machines start together."""
    count = int(rng.integers(2 * machines if machines < 4 else 6, 10))
    pairs = [(int(rng.integers(1, 10)), int(rng.integers(1, 17))) for _ in range(count)]
    starts = [0] * machines if equal else [int(rng.integers(0, 7)) for _ in range(machines)]
    return case(pairs, starts)


def case(pairs: Sequence[tuple[float, float]], starts: Sequence[float]) -> Case:
    """Jobs of (work, deadline) named j0, j1, …, machines m0, m1, …, all in seconds."""
    jobs = [Job(f"j{i}", work, due, float(i)) for i, (work, due) in enumerate(pairs)]
    return Case(jobs, [Machine(f"m{i:05}", start) for i, start in enumerate(starts)])


def backlog(rng: np.random.Generator, jobs: int, machines: int, load: float) -> Case:
    """Jobs that wait now: work log-normal (mean 0.16 s), due at any time until the machines could do 1/load of them."""
    work = rng.lognormal(-2.0, 1.0, jobs)
    until = work.sum() / machines / load
    pairs = zip(work.tolist(), rng.uniform(0, until, jobs).tolist(), strict=True)
    return case(list(pairs), rng.uniform(0, 0.2 * until, machines).tolist())


def from_rows(rng: np.random.Generator, rows: Rows, jobs: int, machines: int, load: float) -> Case:
    """Successive prompts of a trace that wait now, some of their time already gone, on devices as fast as load says."""
    at = int(rng.integers(0, len(rows.t_s) - jobs + 1))
    left = rows.ttft_s[at : at + jobs] * rng.uniform(0.2, 1.0, jobs)
    work = rows.work_s[at : at + jobs]
    work = work * (load * machines * left.mean() / work.sum())
    starts = rng.uniform(0, 0.2 * left.mean(), machines)
    return case(list(zip(work.tolist(), left.tolist(), strict=True)), starts.tolist())


def drawn_rows(rng: np.random.Generator, count: int) -> Rows:
    """Poisson arrivals (the rate is set by whoever replays them), log-normal work, objectives of 0.5, 1 and 2 s."""
    work = np.minimum(rng.lognormal(-2.8, 1.0, count), 0.45)
    return Rows(np.cumsum(rng.exponential(1.0, count)), work, rng.choice([0.5, 1.0, 2.0], count))


def trace_rows(folder: Path) -> Rows:
    """Prompts of the models that fit on one device, with the objectives of their applications.

    folder holds requests.csv.gz (t_ms, app, input_tokens, output_tokens) and apps.csv (app, params_b, ttft_slo_s).
    """
    path = folder / "apps.csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            apps = {
                row["app"]: float(row["ttft_slo_s"]) for row in csv.DictReader(file) if _fits(float(row["params_b"]))
            }
    except (OSError, KeyError, ValueError) as error:
        raise BadConfig(f"{path}: {error}") from None
    rows = read_trace(folder / "requests.csv.gz", TraceSlice(apps=frozenset(apps)))
    timed = [(row.t_s, _prefill_s(row), apps[row.app]) for row in rows]
    kept = np.array([row for row in timed if row[1] <= _HOPELESS * row[2]])
    return Rows(kept[:, 0], kept[:, 1], kept[:, 2])


def most_on_time(given: Case) -> int:
    """The most jobs that can be on time, by trying everything: for up to about 12 jobs.

    On each machine those on time may as well run by due date, so a plan of the first jobs by due date matters to the
    others only by when each machine is then free, and machines that are free at once are the same.
    """
    jobs = columns(given.jobs)
    states = {tuple(sorted(starts_ns(given.machines))): 0}
    for work, due in zip(jobs.work.tolist(), jobs.due.tolist(), strict=True):
        for free, count in list(states.items()):
            for i, start in enumerate(free):
                if start + work <= due and (i == 0 or start != free[i - 1]):
                    after = tuple(sorted((*free[:i], start + work, *free[i + 1 :])))
                    states[after] = max(states.get(after, 0), count + 1)
    return max(states.values())


def spans(edges: np.ndarray) -> list[tuple[float, float]]:
    """The stretches between successive edges."""
    return list(pairwise(edges.tolist()))


def _fits(parameters_b: float) -> bool:
    return parameters_b <= _LARGEST_B


def _prefill_s(row: TraceRow) -> float:
    return PREFILL_S + PREFILL_S_PER_TOKEN * row.input_tokens
