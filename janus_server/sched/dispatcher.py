"""Which waiting request a device begins next: the live side of dispatch. Pure; the Brain owns one.

It keeps the tickets of requests that wait, and for each device the prefills that it was given (`backlog`). Whenever
something happened it plans anew (`dispatch_live`) and hands over what the devices that are nearly free shall begin.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from janus_server.orders import Ticket
from janus_server.sched.backlog import Backlog, Cadence
from janus_server.sched.dispatch import dispatch_live
from janus_server.sched.jobs import Job, Machine, extended
from janus_server.sched.nearer import first_done, nearer
from janus_server.sched.prefixes import Cached, Shortcuts
from janus_server.sched.rules import Rule, Turns
from janus_server.sched.sequence import UNPROMISED_TTFT_S

_Kind = tuple[int, str]
"""Of tickets that are planned together: their priority, negative, and their model."""
# A plan for 1,000 waiting requests takes a few milliseconds; so many events within this time are one plan.
SPACING_S: Final = 0.005
_OLDEST_EVERY: Final = 8
# So many of those who wait are planned, the most urgent: who is due after them is not begun before the next plan.
_PLANNED_MOST: Final = 256
# What is handed over while a step runs joins the next one. Where that may be three long prompts it is never half empty
# (on paced devices with steps of 50 to 85 ms 100 % of requests were on time instead of 95); where it were a crowd of
# short ones, those who come next wait behind it (in bursts on 72 devices the worst application got 77 % instead of 90).
_FEW_PROMPTS: Final = 3


class Given(NamedTuple):
    """A request to begin now, on which device, and how much less of its prompt is to be computed there."""

    ticket: Ticket
    machine: str
    saved_s: float = 0.0


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """What a `Dispatcher` knows at one moment: what waits, what was given to which machine, and when to plan again:
    where nothing happens before, at look_s; what nodes hold of prompts, and until when who waits for that may."""

    tickets: tuple[Ticket, ...] = ()
    look_s: float | None = None
    given: dict[str, str] = {}
    begun: int = 0
    backlogs: dict[str, Backlog] = {}
    cadence: Cadence = msgspec.field(default_factory=lambda: Cadence(SPACING_S))
    held: dict[str, frozenset[int]] = {}
    until_s: dict[str, float] = {}
    turns: dict[str, dict[str, int]] = {}


class Dispatcher:
    """Tickets in, requests to begin out.

    A device is given work while less than ahead_s of it lies before it, half as much where that are many prompts:
    enough that it never runs dry between two decisions, and little enough that who comes next can still be put before
    those who wait here. What is late already
    is planned with a longer objective, twice as long each time, up to 16 times; then it comes after all others. Every
    eighth request that is begun is the one that has waited longest, whatever was promised and whatever its priority: so
    the n-th of those who wait is begun after 8 n others at most, and no flood keeps anybody waiting for ever.

    Where nodes hold the start of a prompt, it goes to the one that is done with it first: it may wait for that beside
    an idle device, for as long as the cache saves at most, and not where fewer would be on time (`nearer`).

    Example: ahead_s 0.1, one device; a (work 1 s, due in 5 s) is begun at once; b (2 s, due in 9 s) and c (1 s, due in
    3 s) wait. When a is nearly done, c is begun, then b.
    """

    def __init__(self, ahead_s: float, known: Waiting | None = None, rule: Rule = Rule.LST_IMH) -> None:
        known = copy.deepcopy(known or Waiting())
        self._turns = Turns(rule, known.turns)
        self._ahead_s = ahead_s
        self._cadence = known.cadence
        self._waiting: dict[str, Ticket] = {}
        self._kinds: dict[_Kind, dict[str, Ticket]] = {}
        self._jobs: dict[str, tuple[Job, float]] = {}
        for ticket in known.tickets:
            self._add(ticket)
        self._look_s = known.look_s
        self._given = known.given
        self._begun = known.begun
        self._backlogs = known.backlogs
        self._shortcuts = Shortcuts(known.held)
        self._until_s = known.until_s

    def memory(self) -> Waiting:
        """What it knows now, as a copy."""
        return copy.deepcopy(
            Waiting(tickets=tuple(self._waiting.values()), look_s=self._look_s, given=self._given,
                    begun=self._begun, backlogs=self._backlogs, cadence=self._cadence,
                    held=self._shortcuts.holders.memory(), until_s=self._until_s, turns=self._turns.chosen)
        )  # fmt: skip

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def waiting_s(self) -> dict[str, float]:
        """How much prefill work waits to be begun, by model, behind the longest that does: more devices would hasten
        that one by nothing."""
        work_s: dict[str, float] = {}
        longest_s: dict[str, float] = {}
        for ticket in self._waiting.values():
            work_s[ticket.model] = work_s.get(ticket.model, 0.0) + ticket.work_s
            longest_s[ticket.model] = max(longest_s.get(ticket.model, 0.0), ticket.work_s)
        return {model: work - longest_s[model] for model, work in work_s.items()}

    def backlog_s(self, machine: str, now: float) -> float:
        """How much prefill work lies before a device."""
        backlog = self._backlogs.get(machine)
        return 0.0 if backlog is None else max(0.0, backlog.start_s(now) - now)

    def arrived(self, ticket: Ticket, now: float) -> None:
        """A request came. One whose id is known is told of twice."""
        if ticket.id not in self._waiting and ticket.id not in self._given:
            self._add(ticket)
            self._cadence.changed(now)

    def started(self, request: str, now: float) -> None:
        """A request's prompt is computed: its device has that much less before it."""
        machine = self._given.pop(request, None)
        if machine is not None:
            self._backlogs[machine].finished(request, now)
            self._cadence.changed(now)

    def left(self, request: str, now: float) -> None:
        """A request ended before its prompt was computed, or will never be; unknown ones are fine."""
        machine = self._given.pop(request, None)
        if machine is not None:
            self._backlogs[machine].cancelled(request, now)
        if machine is not None or self._remove(request) is not None:
            self._cadence.changed(now)

    def held(self, held: Cached) -> None:
        """A node told what its caches hold."""
        self._shortcuts.holders.hear(held)

    def gone(self, machine: str) -> None:
        """A device is gone, and what it was given."""
        self._turns.gone(machine)
        self._shortcuts.holders.gone(machine)
        self._backlogs.pop(machine, None)
        self._given = {request: where for request, where in self._given.items() if where != machine}

    def changed(self, now: float) -> None:
        """A device takes requests for one more model, or for one less."""
        if self._waiting:
            self._cadence.changed(now)

    def due_s(self, now: float) -> float | None:
        """When to call `begin` at the latest; None where only an event can change anything.

        A device at work is looked at when it is expected to be nearly free, and every ahead_s once it should have been.
        One that is idle beside those who wait takes none of their models: that changes by an event.
        """
        if not self._waiting:
            return None
        due_s = min(self._cadence.due_s(), math.inf if self._look_s is None else self._look_s)
        return None if due_s == math.inf else max(due_s, now)

    def begin(self, now: float, machines_of: Callable[[str], Sequence[str]]) -> list[Given]:
        """What to begin now. machines_of(model) are the devices that take its requests just now.

        Models are planned one after the other, the one with the most urgent request first: devices are shared, and what
        one model's plan gives to a device is before the next one's.
        """
        if self._turns.rule is not Rule.LST_IMH:
            return self._at_once(now, machines_of)
        models = dict.fromkeys(model for _, model in self._kinds)
        holders = {model: tuple(machines_of(model)) for model in models}
        machines = {name: Machine(name, self._backlog(name).start_s(now)) for one in holders.values() for name in one}
        given: list[Given] = []
        jobs: dict[_Kind, list[Job]] = {}
        while self._kinds and (more := self._next(now, holders, machines, jobs)):
            given += more
        self._cadence.planned(now)
        ends = [machine.start_s for machine in machines.values() if machine.start_s > now]
        self._look_s = max(min(ends) - self._ahead_s, now + self._ahead_s) if ends else None
        if self._look_s is not None and self._until_s:
            self._look_s = min([self._look_s, *(until_s for until_s in self._until_s.values() if until_s > now)])
        return given

    def _next(
        self,
        now: float,
        holders: Mapping[str, tuple[str, ...]],
        machines: dict[str, Machine],
        jobs: dict[_Kind, list[Job]],
    ) -> list[Given]:
        """What free devices begin next; [] when none is free for what waits. `jobs` are those planned with so far.

        Higher priorities first; of those the model whose request is due first, of which any can be begun.
        """
        free = {name for name, machine in machines.items() if machine.start_s <= now + self._reach_s(name)}
        able = [kind for kind in self._kinds if not free.isdisjoint(holders[kind[1]])]
        if able and self._begun % _OLDEST_EVERY == _OLDEST_EVERY - 1:
            heads = (next(iter(self._kinds[kind].values())) for kind in able)  # in the order in which they came
            oldest = min(heads, key=lambda ticket: (ticket.arrived_s, ticket.id))
            able_machines = [machines[name] for name in sorted(free.intersection(holders[oldest.model]))]
            first = first_done(self._job(oldest, now), able_machines, self._work([oldest], holders[oldest.model]))
            return [self._give(oldest, first.id, now, machines)]
        for kind in able:
            waiting, planned = self._kinds[kind], jobs.get(kind)
            if planned is None:
                jobs[kind] = sorted((self._job(ticket, now) for ticket in waiting.values()), key=_urgency)
            elif len(planned) != len(waiting):
                jobs[kind] = [job for job in planned if job.id in waiting]
        for kind in sorted(able, key=lambda kind: (kind[0], _urgency(jobs[kind][0]))):
            able_machines = [machines[name] for name in holders[kind[1]]]
            planned = jobs[kind][:_PLANNED_MOST]
            work = self._work([self._waiting[job.id] for job in planned], holders[kind[1]], now)
            if len(planned) == 1:  # the commonest case by far, and any plan's
                first = first_done(planned[0], able_machines, work)
                if first.id in free:
                    return [self._give(self._waiting[planned[0].id], first.id, now, machines)]
                self._hold(planned[0], work, now)
                continue
            plan = dispatch_live(planned, able_machines)
            ready = (nearer(plan, work) if work else plan).ready(now, self._ahead_s)
            picks = [pick for pick in ready if pick.machine in free]
            if work:
                begun = {pick.job.id for pick in picks}
                for pick in plan.ready(now, self._ahead_s):
                    if pick.machine in free and pick.job.id not in begun:
                        self._hold(pick.job, work, now)
            if picks:
                return [self._give(self._waiting[pick.job.id], pick.machine, now, machines) for pick in picks]
        return []

    def _reach_s(self, machine: str) -> float:
        """How much work may lie before a device that is given more."""
        return self._ahead_s / 2 if len(self._backlog(machine)) > _FEW_PROMPTS else self._ahead_s

    def _work(
        self, tickets: Sequence[Ticket], nodes: tuple[str, ...], now: float = -math.inf
    ) -> dict[str, dict[str, float]]:
        """What prompts take on nodes that hold a part of them; not of those that have waited for that long enough."""
        if not self._shortcuts or len(nodes) < 2:
            return {}
        found = ((ticket.id, self._shortcuts.work_s(ticket, nodes)) for ticket in tickets)
        return {name: work for name, work in found if work and now < self._until_s.get(name, math.inf)}

    def _hold(self, job: Job, work: Mapping[str, Mapping[str, float]], now: float) -> None:
        """It waits although a device is free: for no longer than what it waits for saves."""
        if job.id in work:
            self._until_s.setdefault(job.id, now + job.work_s - min(work[job.id].values()))

    def _at_once(self, now: float, machines_of: Callable[[str], Sequence[str]]) -> list[Given]:
        """Everybody whose model any device takes, in the order in which they came."""
        given: list[Given] = []
        for ticket in sorted(self._waiting.values(), key=lambda one: (one.arrived_s, one.id)):
            if names := machines_of(ticket.model):
                name = self._turns.pick(ticket.model, names, lambda machine: self.backlog_s(machine, now))
                given.append(self._give(ticket, name, now, {}))
        self._cadence.planned(now)
        self._look_s = None
        return given

    def _give(self, ticket: Ticket, machine: str, now: float, machines: dict[str, Machine]) -> Given:
        self._remove(ticket.id)
        self._begun += 1
        self._given[ticket.id] = machine
        work_s = self._shortcuts.on(ticket, machine)
        backlog = self._backlog(machine)
        backlog.given(ticket.id, work_s, now)
        machines[machine] = Machine(machine, backlog.start_s(now))
        return Given(ticket, machine, ticket.work_s - work_s)

    def pending(self, machine: str) -> int:
        """How many prompts lie before a device."""
        backlog = self._backlogs.get(machine)
        return 0 if backlog is None else len(backlog)

    def cached(self, ticket: Ticket, nodes: Sequence[str]) -> dict[str, int]:
        """How many tokens of its prompt are cached on those nodes that have any."""
        return self._shortcuts.holders.cached(ticket.prefix, nodes)

    def moved(self, ticket: Ticket, machine: str, now: float) -> None:
        """The prompt of a request that was given a moment ago is computed by another device than that which runs it."""
        self._backlogs[self._given[ticket.id]].cancelled(ticket.id, now)
        self._given[ticket.id] = machine
        self._backlog(machine).given(ticket.id, self._shortcuts.on(ticket, machine), now)

    def _backlog(self, machine: str) -> Backlog:
        return self._backlogs.setdefault(machine, Backlog())

    def _add(self, ticket: Ticket) -> None:
        self._waiting[ticket.id] = ticket
        self._kinds.setdefault((-ticket.priority, ticket.model), {})[ticket.id] = ticket

    def _remove(self, request: str) -> Ticket | None:
        ticket = self._waiting.pop(request, None)
        if ticket is not None:
            self._jobs.pop(request, None)
            self._until_s.pop(request, None)
            self._shortcuts.forget(request)
            kind = (-ticket.priority, ticket.model)
            del self._kinds[kind][request]
            if not self._kinds[kind]:
                del self._kinds[kind]
        return ticket

    def _job(self, ticket: Ticket, now: float) -> Job:
        """The ticket as the planners know it, with the objective that can still be kept; remembered for as long as that
        is the same.
        """
        known = self._jobs.get(ticket.id)
        if known is not None and now <= known[1]:
            return known[0]
        promised_s = UNPROMISED_TTFT_S if ticket.ttft_s is None else max(ticket.ttft_s, 1e-3)
        job = Job(ticket.id, ticket.work_s, ticket.arrived_s + promised_s, ticket.arrived_s)
        job = extended(job, now) or msgspec.structs.replace(job, deadline_s=math.inf)
        self._jobs[ticket.id] = (job, job.deadline_s - job.work_s)
        return job


def _urgency(job: Job) -> tuple[float, float, str]:
    return job.deadline_s, job.arrival_s, job.id
