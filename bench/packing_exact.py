"""The optimum that packing is held against: OR-Tools CP-SAT on the same whole millionths.

`bench.packing` and the tests call it. ortools is imported only when asked for, as the serving path must never load it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from janus_server.sched.demand import WHOLE, Demand, millionths


class Optimum(NamedTuple):
    """devices: the fewest, or the fewest found where `proved` is False; None where none was found in time. bound: fewer
    are impossible."""

    devices: int | None
    bound: int
    proved: bool
    seconds: float


def fewest(demands: Sequence[Demand], devices: int, models_most: int = 0, limit_s: float = 20.0) -> Optimum:
    """The fewest of at most `devices` devices that hold all demands, each shard on its own device.

    Devices are alike, which the solver is spared to find out: their order of use is fixed, and shards that exclude each
    other lie on the first ones. seconds includes building the model, one worker.
    """
    from ortools.sat.python import cp_model

    start_s = time.perf_counter()
    model = cp_model.CpModel()
    placed = [[model.new_bool_var(f"x{i}_{j}") for j in range(devices)] for i in range(len(demands))]
    used = [model.new_bool_var(f"y{j}") for j in range(devices)]
    table = np.array([[millionths(share) for share in demand.shares] for demand in demands]).reshape(-1, 4)
    for demand, row in zip(demands, placed, strict=True):
        model.add(sum(row) == demand.shards)
    for i, j in _excluding(table, [demand.shards for demand in demands], devices):
        model.add(placed[i][j] == 1)
    needs = table.T.tolist()
    for j in range(devices):
        column = [row[j] for row in placed]
        for need in needs:
            if any(need):
                model.add(cp_model.LinearExpr.weighted_sum(column, need) <= WHOLE * used[j])
        model.add_max_equality(used[j], column)
        if models_most:
            model.add(sum(column) <= models_most)
    for one, other in itertools.pairwise(used):
        model.add_implication(other, one)
    if models_most:
        model.add(models_most * sum(used) >= sum(demand.shards for demand in demands))
    model.minimize(sum(used))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = limit_s
    status = solver.solve(model)
    seconds = time.perf_counter() - start_s
    if status == cp_model.INFEASIBLE:
        return Optimum(None, devices + 1, True, seconds)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    bound = int(np.ceil(solver.best_objective_bound - 1e-6))
    return Optimum(round(solver.objective_value) if found else None, bound, status == cp_model.OPTIMAL, seconds)


def _excluding(table: np.ndarray, shards: Sequence[int], devices: int) -> list[tuple[int, int]]:
    """(model, device) for shards no two of which fit on one device, found greedily, largest first."""
    found: list[int] = []
    fixed: list[tuple[int, int]] = []
    for i in np.argsort(-table.max(1), kind="stable").tolist():
        if all((table[i] + table[other] > WHOLE).any() for other in found) and len(fixed) + shards[i] <= devices:
            fixed += [(i, len(fixed) + n) for n in range(shards[i])]
            found.append(i)
    return fixed
