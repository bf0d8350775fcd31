"""What dispatch is compared with: round robin, least load, earliest deadline first, and Prism's arbiter.

`PLANNERS` has all of them and ours behind one call, for the simulator and the benchmarks; the leader never plans with
these. Pure. Like ours they drop nothing; unlike ours, what is late may stand before what could be on time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Final

from .dispatch import Order, dispatch, dispatch_best, dispatch_live
from .jobs import Job, Lane, Machine, Plan, Planner, starts_ns


def round_robin(jobs: Sequence[Job], machines: Sequence[Machine], first: int = 0) -> Plan:
    """In order of arrival, each to the next machine, from the machine of index `first` on.

    Example: jobs that arrive as a, b, c on two machines: a and c on the first, b on the second.
    """
    ordered = _by_arrival(jobs)
    count = len(machines)
    queues = [ordered[(i - first) % count :: count] for i in range(count)]
    return Plan(tuple(Lane(machine, tuple(queue)) for machine, queue in zip(machines, queues, strict=True)))


def least_load(jobs: Sequence[Job], machines: Sequence[Machine]) -> Plan:
    """In order of arrival, each to the machine that is done first with what it has.

    Example: machines free at 0 and 2; jobs of 3, 1 and 1 seconds: the first two go to 0..3 and 2..3, the third to the
    first machine, 3..4.
    """
    return _listed(_by_arrival(jobs), machines)


def edf(jobs: Sequence[Job], machines: Sequence[Machine]) -> Plan:
    """Earliest deadline first: the same list scheduling in order of deadlines."""
    return _listed(sorted(jobs, key=attrgetter("deadline_s", "arrival_s", "id")), machines)


def prism(jobs: Sequence[Job], machines: Sequence[Machine]) -> Plan:
    """Prism: each device's own queue is arbitrated by Moore-Hodgson; which queue a job joins is decided by load alone.

    What differs from LST-IMH is exactly that a job that one device cannot finish in time is not offered to the others.
    """
    routed = least_load(jobs, machines)
    return Plan(tuple(dispatch(lane.queue, [lane.machine]).lanes[0] for lane in routed.lanes))


PLANNERS: Final = MappingProxyType[str, Planner](
    {
        "ours, best": dispatch_best,
        "ours, live": dispatch_live,
        "LST-IMH, latest first": dispatch,
        "LST-IMH, earliest first": partial(dispatch, order=Order.EARLIEST),
        "LST-IMH, random order": partial(dispatch, order=Order.RANDOM),
        "EDF": edf,
        "Prism": prism,
        "least load": least_load,
        "round robin": round_robin,
    }
)


def _by_arrival(jobs: Iterable[Job]) -> list[Job]:
    return sorted(jobs, key=attrgetter("arrival_s", "id"))


def _listed(jobs: Iterable[Job], machines: Sequence[Machine]) -> Plan:
    free = [(start, i) for i, start in enumerate(starts_ns(machines))]
    heapq.heapify(free)
    queues: list[list[Job]] = [[] for _ in machines]
    for job in jobs:
        end, i = free[0]
        queues[i].append(job)
        heapq.heapreplace(free, (end + round(job.work_s * 1e9), i))
    return Plan(tuple(Lane(machine, tuple(queue)) for machine, queue in zip(machines, queues, strict=True)))
