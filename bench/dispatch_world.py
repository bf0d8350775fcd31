"""Requests that arrive over time on devices that run one prefill after another: how many are on time under a policy.

The small world in which `dispatch` (the benchmark) tries the planners as a server would use them: with the real
`Backlog`, predictions that are somewhat wrong, and nothing known of what comes. `hindsight` bounds all of them.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from janus_server.sched.backlog import Backlog
from janus_server.sched.dispatch import dispatch
from janus_server.sched.jobs import Job, Machine, Pick, Plan, Planner
from janus_server.sched.rivals import PLANNERS, least_load, round_robin

from .dispatch_cases import Rows, spans

_SPAN_S: Final = 0.25


class Arrival(NamedTuple):
    """A job (its arrival_s says when it comes) and how long its prefill will really take."""

    job: Job
    takes_s: float


class Policy(Protocol):
    """What decides. machines tell when each is expected to be free; idle are those to give something to."""

    def arrived(self, job: Job, machines: Sequence[Machine]) -> None: ...

    def picks(self, idle: Sequence[Machine], machines: Sequence[Machine], now_s: float) -> Sequence[Pick]: ...


class Central:
    """Jobs wait in one place; a plan for all machines is made whenever one is idle, and its first jobs are given out.

    Jobs that are past saving wait apart, for machines that the plan has nothing for. (EDF does not tell them apart.)
    """

    def __init__(self, planner: Planner, spare_late: bool = True) -> None:
        self._planner = planner
        self._spare_late = spare_late
        self._waiting: dict[str, Job] = {}
        self._late: dict[str, Job] = {}

    def arrived(self, job: Job, machines: Sequence[Machine]) -> None:
        self._waiting[job.id] = job

    def picks(self, idle: Sequence[Machine], machines: Sequence[Machine], now_s: float) -> list[Pick]:
        if self._spare_late:
            for job in [job for job in self._waiting.values() if now_s + job.work_s > job.deadline_s]:
                self._late[job.id] = self._waiting.pop(job.id)
        free = {machine.id for machine in idle}
        plan = self._planner(list(self._waiting.values()), machines) if self._waiting else Plan(())
        picked = [Pick(lane.machine.id, lane.queue[0]) for lane in plan.lanes if lane.queue and lane.machine.id in free]
        for pick in picked:
            del self._waiting[pick.job.id]
        for machine in sorted(free - {pick.machine for pick in picked}):
            if self._late:
                picked.append(Pick(machine, self._late.pop(next(iter(self._late)))))
        return picked


class Routed:
    """Each job joins a machine's queue when it comes and stays there; `arbiter` orders the queue."""

    def __init__(self, route: Callable[[Job, Sequence[Machine]], Plan], arbiter: Planner | None) -> None:
        self._route = route
        self._arbiter = arbiter
        self._queues: dict[str, list[Job]] = {}

    def arrived(self, job: Job, machines: Sequence[Machine]) -> None:
        queued = [
            Machine(m.id, m.start_s + sum(other.work_s for other in self._queues.get(m.id, ()))) for m in machines
        ]
        machine = next(lane.machine.id for lane in self._route(job, queued).lanes if lane.queue)
        self._queues.setdefault(machine, []).append(job)

    def picks(self, idle: Sequence[Machine], machines: Sequence[Machine], now_s: float) -> list[Pick]:
        picked = []
        for machine in idle:
            queue = self._queues.get(machine.id)
            if queue:
                first = self._arbiter(queue, [machine]).lanes[0].queue[0] if self._arbiter else queue[0]
                queue.remove(first)
                picked.append(Pick(machine.id, first))
        return picked


def policies() -> dict[str, Policy]:
    """One fresh policy of each kind, by name."""
    made: dict[str, Policy] = {
        name: Central(planner) for name, planner in PLANNERS.items() if name.startswith(("ours", "LST"))
    }
    made["EDF"] = Central(PLANNERS["EDF"], spare_late=False)
    made["Prism"] = Routed(lambda job, machines: least_load([job], machines), dispatch)
    made["least load"] = Routed(lambda job, machines: least_load([job], machines), None)
    made["round robin"] = Routed(_rotating(), None)
    return made


def arrivals(rng: np.random.Generator, rows: Rows, machines: int, load: float, noise: float) -> list[Arrival]:
    """The rows with their times stretched so that the machines get `load` times what they can do.

    A prefill takes what was predicted times a log-normal factor of mean 1 and this standard deviation of its logarithm.
    """
    t_s = rows.t_s - rows.t_s[0]
    t_s = t_s * (rows.work_s.sum() / machines / load / max(t_s[-1], 1e-9))
    factor = np.exp(rng.normal(-noise * noise / 2, noise, len(t_s)))
    return [
        Arrival(Job(f"j{i:06}", float(work), float(t + ttft), float(t)), float(work * f))
        for i, (t, work, ttft, f) in enumerate(zip(t_s, rows.work_s, rows.ttft_s, factor, strict=True))
    ]


def on_time(requests: Sequence[Arrival], machines: int, policy: Policy) -> int:
    """How many of them end their prefill by their deadline. Requests are in order of arrival."""
    names = [f"m{i:03}" for i in range(machines)]
    backlogs = {name: Backlog() for name in names}
    takes = {request.job.id: request.takes_s for request in requests}
    running: list[tuple[float, str, str]] = []
    count = at = 0
    while at < len(requests) or running:
        coming_s = requests[at].job.arrival_s if at < len(requests) else np.inf
        now_s = min(coming_s, running[0][0] if running else np.inf)
        while running and running[0][0] <= now_s:
            _, name, job = heapq.heappop(running)
            backlogs[name].finished(job, now_s)
        seen = [Machine(name, backlogs[name].start_s(now_s)) for name in names]
        while at < len(requests) and requests[at].job.arrival_s <= now_s:
            policy.arrived(requests[at].job, seen)
            at += 1
        idle = [machine for machine in seen if not len(backlogs[machine.id])]
        for machine, job in policy.picks(idle, seen, now_s) if idle else ():
            backlogs[machine].given(job.id, job.work_s, now_s)
            end_s = now_s + takes[job.id]
            count += end_s <= job.deadline_s
            heapq.heappush(running, (end_s, machine, job.id))
    return count


def hindsight(requests: Sequence[Arrival], machines: int) -> float:
    """No policy has more on time, even one that knows all that comes: a linear relaxation.

    Time is cut into spans. A job may be done in parts, a share of it counting as that share, in the spans between its
    arrival and its deadline and never faster than one machine works; a span holds what all machines can do in it.
    """
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    last_s = max(request.job.deadline_s for request in requests)
    edges = np.arange(0.0, last_s + _SPAN_S, _SPAN_S)
    stretches, starts = spans(edges), edges.tolist()
    room = [solver.Constraint(0.0, machines * (end - start)) for start, end in stretches]
    for job, takes_s in requests:
        if job.arrival_s + takes_s > job.deadline_s:
            continue
        share = solver.NumVar(0.0, 1.0, "")
        solver.Objective().SetCoefficient(share, 1.0)
        whole = solver.Constraint(0.0, 0.0)
        whole.SetCoefficient(share, -takes_s)
        for at in range(max(0, bisect.bisect_right(starts, job.arrival_s) - 1), len(stretches)):
            start, end = stretches[at]
            if start >= job.deadline_s:
                break
            part = solver.NumVar(0.0, max(0.0, min(end, job.deadline_s) - max(start, job.arrival_s)), "")
            whole.SetCoefficient(part, 1.0)
            room[at].SetCoefficient(part, 1.0)
    solver.Objective().SetMaximization()
    return float(solver.Objective().Value()) if solver.Solve() == pywraplp.Solver.OPTIMAL else float("nan")


def _rotating() -> Callable[[Job, Sequence[Machine]], Plan]:
    turn = 0

    def route(job: Job, machines: Sequence[Machine]) -> Plan:
        nonlocal turn
        turn += 1
        return round_robin([job], machines, first=(turn - 1) % len(machines))

    return route
