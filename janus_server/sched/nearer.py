"""A plan made better by what is cached where: prompts move to devices on which less of them is to be computed. Pure.

`dispatch` plans with one processing time for a job, the same on every machine, which is what its guarantee is about.
Here some machines do some jobs faster. `nearer` starts from such a plan and moves one job at a time, only where the job
itself is done earlier, and either more jobs are on time afterwards, or as many are and the jobs of both lanes together
are done earlier. So what a plan keeps of the most that is possible without any cache, it still keeps; of what would be
possible with the caches it may keep less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from janus_server.sched.jobs import Job, Lane, Machine, Plan

Work = Mapping[str, Mapping[str, float]]
"""By job and machine, seconds; where a machine is not named, the job takes what it says itself."""
# So many jobs are looked at, the most urgent that have a choice, on so many of the machines that do them fastest.
_MOST_JOBS: Final = 32
_MOST_MACHINES: Final = 2
_ROUNDS: Final = 2
# What is no gain: predictions are not as sharp as that.
_LEAST_GAIN_S: Final = 1e-6


class _Lane(NamedTuple):
    """One machine's queue and when each job of it is done; how many are on time, and the sum of all those times."""

    queue: Sequence[Job]
    ends_s: Sequence[float]
    on_time: int
    total_s: float


class _Moving:
    """Lanes of one plan while jobs move between them."""

    def __init__(self, plan: Plan, work: Work) -> None:
        self.machines = [lane.machine for lane in plan.lanes]
        self._work = work
        self.lanes = [self._lane(at, lane.queue) for at, lane in enumerate(plan.lanes)]
        self.at = {machine.id: at for at, machine in enumerate(self.machines)}
        self.lane_of = {job.id: at for at, lane in enumerate(plan.lanes) for job in lane.queue}

    def try_move(self, job: Job, to: int) -> bool:
        """Move a job to another lane, to its place by its deadline; False, and nothing, where that is no gain."""
        here, there = self.lanes[self.lane_of[job.id]], self.lanes[to]
        mine, now = here.queue.index(job), _urgency(job)
        place = next((at for at, other in enumerate(there.queue) if _urgency(other) > now), len(there.queue))
        begins_s = there.ends_s[place - 1] if place else self.machines[to].start_s
        if begins_s + self._took_s(job, to) > here.ends_s[mine] - _LEAST_GAIN_S:
            return False
        left = self._lane(self.lane_of[job.id], [*here.queue[:mine], *here.queue[mine + 1 :]])
        joined = self._lane(to, [*there.queue[:place], job, *there.queue[place:]])
        on_time = left.on_time + joined.on_time - here.on_time - there.on_time
        gain_s = here.total_s + there.total_s - left.total_s - joined.total_s
        if on_time < 0 or (on_time == 0 and gain_s <= _LEAST_GAIN_S):
            return False
        self.lanes[self.lane_of[job.id]], self.lanes[to] = left, joined
        self.lane_of[job.id] = to
        return True

    def _lane(self, at: int, queue: Sequence[Job]) -> _Lane:
        end_s, on_time, ends_s = self.machines[at].start_s, 0, []
        for job in queue:
            end_s += self._took_s(job, at)
            ends_s.append(end_s)
            on_time += end_s <= job.deadline_s
        return _Lane(queue, ends_s, on_time, sum(ends_s))

    def _took_s(self, job: Job, at: int) -> float:
        special = self._work.get(job.id)
        return job.work_s if special is None else special.get(self.machines[at].id, job.work_s)


def nearer(plan: Plan, work: Work) -> Plan:
    """The plan with jobs moved to where they are done earlier, and no fewer on time. Without any `work` it is the same.

    Jobs of one machine stay in their order. The most urgent choose first.

    Example: machines a and b at 0, jobs x (4, due 9) and y (4, due 9), both of which take 1 on b: x on a is done at 4
    and would be on b at 1, y moves back by 1: both run on b. With b at 4 they would not move: x is done first on a.
    """
    if not work:
        return plan
    moving = _Moving(plan, work)
    jobs = sorted((job for lane in plan.lanes for job in lane.queue if job.id in work), key=_urgency)[:_MOST_JOBS]
    for _ in range(_ROUNDS):
        moved = False
        for job in jobs:
            for machine in sorted(work[job.id], key=lambda name: (work[job.id][name], name))[:_MOST_MACHINES]:
                to = moving.at.get(machine)
                if to is not None and to != moving.lane_of[job.id] and moving.try_move(job, to):
                    moved = True
                    break
        if not moved:
            break
    lanes = zip(moving.machines, moving.lanes, strict=True)
    return Plan(tuple(Lane(machine, tuple(lane.queue)) for machine, lane in lanes))


def first_done(job: Job, machines: Sequence[Machine], work: Work) -> Machine:
    """The machine that is done with a job first if it begins as soon as it can; of equal ones, that which begins first,
    then the first of them."""
    special = work.get(job.id, {})
    return min(machines, key=lambda one: (one.start_s + special.get(one.id, job.work_s), one.start_s))


def _urgency(job: Job) -> tuple[float, float, str]:
    return job.deadline_s, job.arrival_s, job.id
