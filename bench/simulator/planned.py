"""A front desk where requests wait for a device rather than queue in its engine, and are planned over several devices.

Rules of dispatch are compared with it on a fixed placement. What a device was handed runs in that order. The leader
hands prompts over shortly before a device is idle; the published dispatcher gives to idle ones alone, and Prism's
arbiter is on the device itself: neither is made to decide sooner. `arbiter` shares its `Backlogs`.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Sequence
from typing import Final

import msgspec

from janus_server.orders import Action, Dispatch, Ticket, Traffic
from janus_server.sched.backlog import Backlog
from janus_server.sched.jobs import Job, Machine, Planner, extended
from janus_server.sched.sequence import UNPROMISED_TTFT_S

from .frontdesk import Given, Line, Lines
from .replicas import Phase, Replica
from .yard import Yard

# BlitzScale's desk hands prompts over while less than this lies before a device.
AHEAD_S: Final = 0.2
# A device that should have been idle by now is looked at again after so long.
_AGAIN_S: Final = 0.05
# Of those that wait, one plan looks at so many: those due first.
MOST_JOBS: Final = 256


class Late(enum.Enum):
    """What becomes of those that cannot be on time any more, even if they began at once. EXTEND: they are planned among
    the others with a longer promise, as the leader does it. DEFER: they are not planned, and run where the plan leaves
    a device idle. SAME: the rule does not tell them apart."""

    EXTEND = "extend"
    DEFER = "defer"
    SAME = "same"


class Backlogs:
    """The prompts that each device was handed, and when to look at which again. ahead_s: before a device is idle it is
    handed the next ones."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.ahead_s = ahead_s
        self.by_node: dict[str, Backlog] = {}
        self._due: list[tuple[float, str]] = []
        self._due_of: dict[str, float] = {}

    def of(self, node: str) -> Backlog:
        backlog = self.by_node.get(node)
        if backlog is None:
            backlog = self.by_node[node] = Backlog()
        return backlog

    def free(self, node: str, now: float) -> bool:
        return self.of(node).start_s(now) <= now + self.ahead_s

    def computed(self, given: Given, request: str, now: float) -> str:
        node = given.replica.nodes[0]
        self.of(node).finished(request, now)
        return node

    def forget(self, lines: Lines, model: str) -> None:
        """What replicas of the model that are going had begun: it ended, or will be told of anew."""
        for request, given in list(lines.given.items()):
            if given.ticket.model == model and given.replica.phase is Phase.SINKING:
                del lines.given[request]
                self.of(given.replica.nodes[0]).work_s.pop(request, None)

    def look_again(self, start_s: float, what: str, now: float) -> None:
        """Something waits for a device that is free at start_s: it is to be looked at when it nearly is."""
        due_s = max(start_s - self.ahead_s, now + max(_AGAIN_S, self.ahead_s))
        if due_s < self._due_of.get(what, math.inf):
            self._due_of[what] = due_s
            heapq.heappush(self._due, (due_s, what))

    def due_s(self) -> float:
        while self._due and self._due_of.get(self._due[0][1]) != self._due[0][0]:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else math.inf

    def due(self, now: float) -> list[str]:
        """What is to be looked at now, once."""
        found = []
        while self.due_s() <= now:
            _, what = heapq.heappop(self._due)
            del self._due_of[what]
            found.append(what)
        return found


class PlannedDesk:
    """One queue a model, and a plan over the replicas that serve it (`planner`), made anew when anything happened."""

    def __init__(self, yard: Yard, planner: Planner, late: Late, ahead_s: float = 0.0) -> None:
        self._yard, self._planner, self._late = yard, planner, late
        self._lines, self._backlogs = Lines(), Backlogs(ahead_s)
        self._touched: dict[str, None] = {}

    def line(self, model: str) -> Line:
        return self._lines.of(model)

    def hear(self, event: Traffic, now: float) -> None:
        for ticket in event.arrived:
            if self._lines.add(ticket):
                self._touched[ticket.model] = None
        for request in event.started:
            self._computed(request, now)
        for request in event.left:
            if self._lines.leave(request) is None:
                self._computed(request, now)

    def _computed(self, request: str, now: float) -> None:
        given = self._lines.computed(request)
        if given is not None:
            self._backlogs.computed(given, request, now)
            self._touched[given.ticket.model] = None

    def changed(self, model: str) -> None:
        self._touched[model] = None
        self._backlogs.forget(self._lines, model)

    def moved(self, replica: Replica) -> None:
        pass

    def dropped(self, model: str) -> None:
        self._lines.drop(model)

    def due_s(self, now: float) -> float:
        return self._backlogs.due_s()

    def hand_over(self, now: float, actions: list[Action]) -> None:
        for model in self._backlogs.due(now):
            self._touched[model] = None
        touched, self._touched = self._touched, {}
        for model in touched:
            waiting = self._lines.of(model).tickets
            serving = {replica.nodes[0]: replica for replica in self._yard.serving(model)}
            begun: dict[str, list[str]] = {}
            while waiting and any(self._backlogs.free(node, now) for node in serving):
                picks = self._picks(list(waiting.values()), list(serving), now)
                for request, node in picks:
                    ticket = self._lines.give(request, serving[node], now)
                    self._backlogs.of(node).given(request, ticket.work_s, now)
                    begun.setdefault(node, []).append(request)
                if not picks:
                    break
            for node, requests in begun.items():
                why = f"{node}: {len(requests)} begin, {len(waiting)} wait for {model}"
                actions.append(Dispatch(node, tuple(requests), why))
            if waiting:
                start_s = min((self._backlogs.of(node).start_s(now) for node in serving), default=math.inf)
                if start_s < math.inf:
                    self._backlogs.look_again(start_s, model, now)

    def _picks(self, tickets: list[Ticket], nodes: list[str], now: float) -> list[tuple[str, str]]:
        """Requests to begin now, and where."""
        machines = [Machine(node, self._backlogs.of(node).start_s(now)) for node in nodes]
        jobs, ahead_s = [job_of(ticket) for ticket in tickets], self._backlogs.ahead_s
        late: list[Job] = []
        if self._late is Late.EXTEND:
            jobs = [extended(job, now) or msgspec.structs.replace(job, deadline_s=math.inf) for job in jobs]
        elif self._late is Late.DEFER:
            late = [job for job in jobs if now + job.work_s > job.deadline_s]
            jobs = [job for job in jobs if now + job.work_s <= job.deadline_s]
        picks = self._planner(_first(jobs, MOST_JOBS), machines).ready(now, ahead_s) if jobs else ()
        found = [(pick.job.id, pick.machine) for pick in picks]
        used = {pick.machine for pick in picks}
        idle = [machine.id for machine in machines if machine.start_s <= now + ahead_s and machine.id not in used]
        return found + [(job.id, node) for job, node in zip(_first(late, len(idle)), idle, strict=False)]


def _first(jobs: Sequence[Job], most: int) -> Sequence[Job]:
    """Those due first; all of them, in any order, where they are not more."""
    if len(jobs) <= most:
        return jobs
    return heapq.nsmallest(most, jobs, key=lambda job: (job.deadline_s, job.arrival_s, job.id))


def job_of(ticket: Ticket) -> Job:
    promised_s = UNPROMISED_TTFT_S if ticket.ttft_s is None else max(ticket.ttft_s, 1e-3)
    return Job(ticket.id, ticket.work_s, ticket.arrived_s + promised_s, ticket.arrived_s)
