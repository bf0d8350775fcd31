"""Prism's front desk: one queue a device over all models on it, ordered by Moore-Hodgson on TTFT deadlines.

Which queue a request joins is decided by load alone, and it stays there as long as the replica does. What cannot be on
time any more comes after all that can. `planned` has the desks that plan over several devices.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence

from janus_server.orders import Action, Dispatch, Ticket, Traffic
from janus_server.sched.jobs import Job

from .frontdesk import Line, Lines
from .planned import MOST_JOBS, Backlogs, job_of
from .replicas import Phase, Replica
from .yard import Yard

_Key = tuple[float, float, str]


class Queue:
    """Of one device: requests that can be on time, by deadline, and those that cannot even if they began at once."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.work_s = 0.0
        self._hopeful: list[_Key] = []
        self._late: list[_Key] = []
        self._starts: list[tuple[float, _Key]] = []

    def add(self, job: Job) -> None:
        key = (job.deadline_s, job.arrival_s, job.id)
        self.jobs[job.id] = job
        self.work_s += job.work_s
        bisect.insort(self._hopeful, key)
        heapq.heappush(self._starts, (job.deadline_s - job.work_s, key))

    def remove(self, request: str) -> None:
        job = self.jobs.pop(request)
        self.work_s = self.work_s - job.work_s if self.jobs else 0.0
        key = (job.deadline_s, job.arrival_s, job.id)
        _drop(self._hopeful, key) or _drop(self._late, key)

    def order(self, start_s: float, now: float) -> Iterator[str]:
        """Who begins, one after the other: of those due first, the most that can be on time, by deadline; then the
        others by deadline. One plan looks at so many of them at most."""
        while self._starts and self._starts[0][0] < now:
            _, key = heapq.heappop(self._starts)
            if key[2] in self.jobs and _drop(self._hopeful, key):
                bisect.insort(self._late, key)
        jobs = [self.jobs[request] for _, _, request in self._hopeful[:MOST_JOBS]]
        on_time = most_on_time(jobs, start_s)
        yield from on_time
        chosen = frozenset(on_time)
        yield from [job.id for job in jobs if job.id not in chosen]
        yield from [request for _, _, request in self._late[:MOST_JOBS]]


def most_on_time(jobs: Sequence[Job], start_s: float) -> list[str]:
    """Moore-Hodgson on one device: of jobs by deadline, the most that can be done in time from start_s, in that order.

    What `sched.dispatch` does for one machine, without its arrays: here one is planned for every prompt computed.

    Example: from 0, (work, due) a (5, 6), b (2, 7), c (2, 8): a and b would end at 7, c at 9: a, the longest, is given
    up; b and c.
    """
    end_s = start_s
    kept: list[tuple[float, int]] = []
    for i, job in enumerate(jobs):
        heapq.heappush(kept, (-job.work_s, -i))
        end_s += job.work_s
        if end_s > job.deadline_s:
            end_s += heapq.heappop(kept)[0]
    return [jobs[-i].id for i in sorted((i for _, i in kept), reverse=True)]


def _drop(keys: list[_Key], key: _Key) -> bool:
    i = bisect.bisect_left(keys, key)
    if i < len(keys) and keys[i] == key:
        del keys[i]
        return True
    return False


class ArbiterDesk:
    """One queue a device, over all of its models: Moore-Hodgson on TTFT deadlines. A request joins the queue with the
    least predicted work of those whose device serves its model, and stays there."""

    def __init__(self, yard: Yard) -> None:
        self._yard = yard
        self._lines, self._backlogs = Lines(), Backlogs()
        self._queues: dict[str, Queue] = {}
        self._where: dict[str, Replica] = {}
        self._touched: dict[str, None] = {}

    def line(self, model: str) -> Line:
        return self._lines.of(model)

    def hear(self, event: Traffic, now: float) -> None:
        for ticket in event.arrived:
            if self._lines.add(ticket):
                self._route(ticket)
        for request in event.started:
            self._computed(request, now)
        for request in event.left:
            self._unroute(request)
            if self._lines.leave(request) is None:
                self._computed(request, now)

    def _computed(self, request: str, now: float) -> None:
        given = self._lines.computed(request)
        if given is not None:
            self._touched[self._backlogs.computed(given, request, now)] = None

    def _route(self, ticket: Ticket) -> None:
        serving = self._yard.serving(ticket.model)
        if not serving:
            return

        def load_s(replica: Replica) -> tuple[float, int]:
            queue = self._queues.get(replica.nodes[0])
            return replica.work_s + (0.0 if queue is None else queue.work_s), replica.number

        replica = serving[0] if len(serving) == 1 else min(serving, key=load_s)
        node = replica.nodes[0]
        self._queues.setdefault(node, Queue()).add(job_of(ticket))
        self._where[ticket.id] = replica
        self._touched[node] = None

    def _unroute(self, request: str) -> None:
        replica = self._where.pop(request, None)
        if replica is not None:
            self._queues[replica.nodes[0]].remove(request)

    def changed(self, model: str) -> None:
        """Who queues for a replica that is not there any more joins another queue, or waits until there is one."""
        for request, ticket in list(self._lines.of(model).tickets.items()):
            replica = self._where.get(request)
            if replica is not None and replica.phase is not Phase.ACTIVE:
                self._unroute(request)
            if request not in self._where:
                self._route(ticket)
        self._backlogs.forget(self._lines, model)

    def moved(self, replica: Replica) -> None:
        pass

    def dropped(self, model: str) -> None:
        for request in self._lines.of(model).tickets:
            self._unroute(request)
        self._lines.drop(model)

    def due_s(self, now: float) -> float:
        return self._backlogs.due_s()

    def hand_over(self, now: float, actions: list[Action]) -> None:
        for node in self._backlogs.due(now):
            self._touched[node] = None
        touched, self._touched = self._touched, {}
        for node in touched:
            queue = self._queues.get(node)
            if queue is None or not queue.jobs:
                continue
            backlog = self._backlogs.of(node)
            begun: list[str] = []
            start_s = backlog.start_s(now)
            for request in queue.order(start_s, now) if start_s <= now else ():
                replica = self._where[request]
                self._unroute(request)
                ticket = self._lines.give(request, replica, now)
                backlog.given(request, ticket.work_s, now)
                begun.append(request)
                start_s = backlog.start_s(now)
                if start_s > now:
                    break
            if begun:
                why = f"{node}: {len(begun)} begin, most on time of those in its queue; {len(queue.jobs)} wait"
                actions.append(Dispatch(node, tuple(begun), why))
            if queue.jobs:
                self._backlogs.look_again(start_s, node, now)
