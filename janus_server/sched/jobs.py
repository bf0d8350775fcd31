"""Records of dispatch: what waits, where it may run, and a plan. The planners in `dispatch` and `rivals` speak in them.

Pure. Times are seconds of one clock in the records and whole nanoseconds inside, so that a sum of predicted times is
the same in whatever order it was added up, on every machine. Nothing here decides which job is kept.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from janus_server.errors import require

Ints = npt.NDArray[np.int64]
# Sums of this many nanoseconds and of the work of many jobs stay below 2^63.
_FAR_NS: Final = 1 << 61
# 28 hours of prefill are no prediction but a mistake.
_MOST_WORK_S: Final = 1e5


class Job(msgspec.Struct, frozen=True):
    """A request that waits for its prefill: predicted prefill time, and when its first token is due.

    deadline_s = arrival_s + TTFT objective; infinite where nothing is promised.
    """

    id: str
    work_s: float
    deadline_s: float
    arrival_s: float = 0.0


class Machine(msgspec.Struct, frozen=True):
    """A device that holds the jobs' model. start_s: when the prefill work of *all* its models given so far is done."""

    id: str
    start_s: float


class Lane(msgspec.Struct, frozen=True):
    """What one machine would run, in this order and one after the other, from its start on."""

    machine: Machine
    queue: tuple[Job, ...]

    @property
    def finishes_s(self) -> tuple[float, ...]:
        """When each job of the queue is predicted to be done."""
        return tuple(end / 1e9 for end in self._ends_ns())

    @property
    def on_time(self) -> tuple[Job, ...]:
        """Those that would be done by their deadline."""
        ends = zip(self.queue, self._ends_ns(), strict=True)
        return tuple(job for job, end in ends if end <= _nanoseconds(job.deadline_s))

    @property
    def late(self) -> tuple[Job, ...]:
        ends = zip(self.queue, self._ends_ns(), strict=True)
        return tuple(job for job, end in ends if end > _nanoseconds(job.deadline_s))

    def _ends_ns(self) -> list[int]:
        t, ends = _nanoseconds(self.machine.start_s), []
        for job in self.queue:
            t += _nanoseconds(job.work_s)
            ends.append(t)
        return ends


class Pick(NamedTuple):
    """A job to hand to a machine now."""

    machine: str
    job: Job


class Plan(msgspec.Struct, frozen=True):
    """A lane for each machine, in the order the machines were given; every job lies in exactly one."""

    lanes: tuple[Lane, ...]

    @property
    def on_time(self) -> int:
        """How many jobs would be done by their deadline."""
        return sum(len(lane.on_time) for lane in self.lanes)

    def ready(self, now_s: float, ahead_s: float = 0.0) -> tuple[Pick, ...]:
        """The first job of each machine that is free within ahead_s: those to hand over; the rest is planned anew.

        Example: of lanes that start at 5.0 and 9.0, ready(4.9, ahead_s=0.2) gives the first one's first job.
        """
        free = (lane for lane in self.lanes if lane.queue and lane.machine.start_s <= now_s + ahead_s)
        return tuple(Pick(lane.machine.id, lane.queue[0]) for lane in free)


Planner = Callable[[Sequence[Job], Sequence[Machine]], Plan]


class Columns(NamedTuple):
    """The jobs by earliest due date; work, due and rank are [jobs] int64 in that order, times in nanoseconds.

    Ties of the due date go by arrival, then id. rank counts by falling work; of equal ones the later by due date comes
    first, which is the one Moore-Hodgson gives up. ranked is its inverse: [jobs] the job of each rank.
    """

    jobs: list[Job]
    work: Ints
    due: Ints
    rank: Ints
    ranked: Ints


def columns(jobs: Iterable[Job]) -> Columns:
    """Sort once, O(n log n); every pass over the machines then goes through the same order."""
    ordered = sorted(jobs, key=attrgetter("deadline_s", "arrival_s", "id"))
    work_s = np.array([job.work_s for job in ordered], dtype=np.float64)
    due_s = np.array([job.deadline_s for job in ordered], dtype=np.float64)
    require(bool(np.all((work_s >= 0) & (work_s <= _MOST_WORK_S))), "a predicted prefill time is out of range")
    require(not bool(np.isnan(due_s).any()), "a deadline is not a number")
    work = np.rint(work_s * 1e9).astype(np.int64)
    due = np.rint(np.clip(due_s * 1e9, -_FAR_NS, _FAR_NS)).astype(np.int64)
    # Reversed for the ties: a stable sort then keeps the later due date first.
    ranked = len(ordered) - 1 - np.argsort(-work[::-1], kind="stable")
    rank = np.empty(len(ordered), dtype=np.int64)
    rank[ranked] = np.arange(len(ordered))
    return Columns(ordered, work, due, rank, ranked)


def subset(jobs: Columns, chosen: Ints) -> Columns:
    """The columns of these jobs alone; chosen are indices by due date, rising."""
    rank = np.empty(len(chosen), dtype=np.int64)
    ranked = np.argsort(jobs.rank[chosen])
    rank[ranked] = np.arange(len(chosen))
    return Columns([jobs.jobs[j] for j in chosen.tolist()], jobs.work[chosen], jobs.due[chosen], rank, ranked)


def extended(job: Job, now_s: float, factor: float = 2.0, most: float = 16.0) -> Job | None:
    """The job with its objective multiplied until it can be kept again if it began now; None beyond `most` times.

    For jobs that will be late and whose client still waits: with a deadline they are planned among the others, so that
    none is put off for ever under overload.

    Example: work 1, arrived at 0, due at 4; at 5 it could be done by 6, so it is due at 8, twice its objective.
    """
    objective_s = job.deadline_s - job.arrival_s
    require(factor > 1 and objective_s > 0, "an objective cannot be extended")
    times = 1.0
    while job.arrival_s + times * objective_s < now_s + job.work_s:
        times *= factor
        if times > most:
            return None
    return job if times == 1.0 else msgspec.structs.replace(job, deadline_s=job.arrival_s + times * objective_s)


def starts_ns(machines: Sequence[Machine]) -> list[int]:
    """When each machine can start, in nanoseconds."""
    require(bool(machines), "there is no machine to plan for")
    return [_nanoseconds(machine.start_s) for machine in machines]


def assemble(jobs: Columns, machines: Sequence[Machine], kept: Sequence[Sequence[int]]) -> Plan:
    """The plan that runs kept[i] (indices by due date, rising) on machine i, then what is in none of them.

    The others go by due date to the machine that is done first: late, but served. O(n log m).
    """
    work = jobs.work.tolist()
    queues = [list(lane) for lane in kept]
    ends = [start + sum(work[j] for j in lane) for start, lane in zip(starts_ns(machines), kept, strict=True)]
    taken = np.zeros(len(jobs.jobs), dtype=bool)
    for lane in kept:
        taken[list(lane)] = True
    free = [(end, i) for i, end in enumerate(ends)]
    heapq.heapify(free)
    for j in np.flatnonzero(~taken).tolist():
        end, i = free[0]
        queues[i].append(j)
        heapq.heapreplace(free, (end + work[j], i))
    lanes = (tuple(jobs.jobs[j] for j in queue) for queue in queues)
    return Plan(tuple(Lane(machine, lane) for machine, lane in zip(machines, lanes, strict=True)))


def _nanoseconds(time_s: float) -> int:
    if math.isinf(time_s):
        return _FAR_NS if time_s > 0 else -_FAR_NS
    return min(_FAR_NS, max(-_FAR_NS, round(time_s * 1e9)))
