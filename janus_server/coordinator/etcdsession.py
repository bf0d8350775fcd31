"""A node's place in a cluster that meets in etcd: one lease, which carries its registration and, where it leads, the
leader's place.

A term is the revision at which the leader's key was created: etcd never gives one twice. `etcd` makes sessions; the
shells of the cluster use them through `base`. Nothing here tries again faster than a lease allows, and nothing is kept
but one view.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final

import msgspec

from janus_server.coordinator.base import Clock, Trouble
from janus_server.coordinator.board import Board, waited
from janus_server.coordinator.etcdkeys import Keys
from janus_server.coordinator.gateway import (
    Gateway,
    Granted,
    KeptAlive,
    Range,
    Revoked,
    Txn,
)
from janus_server.coordinator.lease import (
    Seat,
    Step,
    deadline_s,
    extended_s,
    next_step,
    renew_s,
)
from janus_server.coordinator.records import Change, Leader, Leadership, Member, View, overdue

log = logging.getLogger("janus.coordinator")

# A watch that is silent for this many leases is opened anew, with a full reading: nothing lasts that was missed.
_IDLE_LEASES: Final = 3
_POLL_S: Final = 0.25

Work = Callable[[], Coroutine[Any, Any, None]]


class NameTaken(Trouble):
    """Another process is registered under this name."""


class _Lease(msgspec.Struct, frozen=True):
    id: int
    granted_s: float
    until_s: float


class EtcdSession:
    """See `base.Session`. Three tasks: one renews the lease, one follows the keys, one stands for election."""

    def __init__(self, gateway: Gateway, keys: Keys, member: Member, lease_s: int, clock: Clock) -> None:
        self.member = member
        self.granted_s = float(lease_s)
        self._gateway = gateway
        self._keys = keys
        self._asks_s = lease_s
        self._clock = clock
        self._board = Board()
        self._lease: _Lease | None = None
        self._registered_at = 0  # the revision
        self._newest = 0  # the highest revision that this session has seen
        self._leading: int | None = None
        self._spent = 0
        self._stands = False
        self._faults: dict[str, str] = {}  # by task
        self._lenient_s = 0.0  # until when registrations that ended are taken for the servers' fault
        self._hurry = asyncio.Event()  # the lease is to be looked at now
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def view(self) -> View:
        return self._board.view

    def observe(self) -> AsyncIterator[Change]:
        return self._board.observe()

    def campaign(self) -> None:
        self._stands = True
        self._hurry.set()

    def leadership(self) -> Leadership | None:
        lease, term = self._lease, self._leading
        if lease is None or term is None or self._clock() >= lease.until_s:
            return None
        return Leadership(term, lease.until_s)

    async def resign(self) -> None:
        self._stands = False
        self._stop_leading()
        with contextlib.suppress(Trouble):
            await self._leave_seat()

    async def close(self) -> None:
        self._stands = False
        self._stop_leading()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        lease, self._lease = self._lease, None
        if lease is not None:
            with contextlib.suppress(Trouble):
                await self._gateway.call("/v3/lease/revoke", {"ID": str(lease.id)}, Revoked)
        await self._gateway.close()
        self._board.close()

    async def start(self) -> None:
        """Register and read what there is; the tasks begin when both went well."""
        await self._register()
        await self._read()
        works = [self._forever(work) for work in (self._keep, self._follow, self._stand)]
        self._tasks = [asyncio.create_task(work) for work in (*works, self._expire())]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    # The lease.

    async def _keep(self) -> None:
        """Renew the lease once, or register anew where it is gone; then wait until it is due again."""
        self._hurry.clear()
        asked_s = self._clock()
        lease = self._lease
        if lease is None:
            await self._register()
        else:
            alive = await self._gateway.call("/v3/lease/keepalive", {"ID": str(lease.id)}, KeptAlive)
            if self._lease is lease:
                self._renewed(lease, asked_s, float(alive.result.TTL))
        if lease is None or self._keep.__name__ in self._faults:
            # A watch that outlived trouble may have lost events on its way.
            self._gateway.stop_watching()
        self._well(self._keep)
        if self._lease is not None:
            pause_s = renew_s(self.granted_s) - (self._clock() - asked_s)
            await waited(self._hurry, max(pause_s, 0.0))

    def _renewed(self, lease: _Lease, asked_s: float, granted_s: float) -> None:
        if granted_s <= 0.0:
            self._lose()
            return
        until_s = extended_s(lease.until_s, self._clock(), asked_s, granted_s)
        if until_s is None:
            self._stop_leading()
            until_s = deadline_s(asked_s, granted_s)
        self._lease = _Lease(lease.id, granted_s, until_s)

    def _lose(self) -> None:
        """Others have seen this node go: what follows is another registration."""
        self._stop_leading()
        self._lease = None
        self.member = self.member.reborn()
        log.warning("the lease of node %s ended; it registers anew", self.member.name)

    async def _register(self) -> None:
        asked_s = self._clock()
        granted = await self._gateway.call("/v3/lease/grant", {"TTL": str(self._asks_s)}, Granted)
        self._check_history(granted.header.revision)
        self.granted_s = float(granted.TTL)
        self._gateway.limit(self.granted_s / 5)
        answer = await self._gateway.call("/v3/kv/txn", self._keys.enter(self.member, granted.ID), Txn)
        if not answer.succeeded:
            there = answer.found()
            held = self._keys.member_of(there) if there is not None else None
            if there is not None and held is not None and held.process == self.member.process:
                # This process's own, under a lease that has ended or whose answer got lost.
                again = self._keys.enter_over(self.member, granted.ID, there)
                answer = await self._gateway.call("/v3/kv/txn", again, Txn)
            if not answer.succeeded:
                await self._gateway.call("/v3/lease/revoke", {"ID": str(granted.ID)}, Revoked)
                raise NameTaken("another node has registered under this name")
        self._registered_at = self._newest = answer.header.revision
        self._lease = _Lease(granted.ID, self.granted_s, deadline_s(asked_s, self.granted_s))

    # The keys.

    async def _follow(self) -> None:
        """Read everything, then watch from there until the watch ends."""
        revision = await self._read()
        self._well(self._follow)
        idle_s = self.granted_s * _IDLE_LEASES
        # Why a watch ends does not matter: the next reading tells whether the servers answer.
        with contextlib.suppress(Trouble):
            await self._watch(revision + 1, idle_s)
        await self._breathe()

    async def _watch(self, revision: int, idle_s: float) -> None:
        events = self._gateway.watch(self._keys.prefix, self._keys.end, revision, idle_s)
        async with contextlib.aclosing(events):
            async for news in events:
                if news.canceled:
                    return
                at = self._keys.apply(news)
                if at is not None:
                    self._look(at)

    async def _read(self) -> int:
        found = await self._gateway.call("/v3/kv/range", self._keys.everything(), Range)
        revision = found.header.revision
        self._check_history(revision)
        self._keys.replace(found)
        self._look(revision)
        return revision

    def _look(self, revision: int) -> None:
        """Make the view from the keys, which are those of this revision."""
        self._newest = max(self._newest, revision)
        seat, before = self._keys.seat(), self.view
        # Whoever leads next does so from a later revision: this one and all before it are over.
        term = seat.term if seat.holder is not None else max(before.term, revision)
        self._judge(seat, revision)
        self._post(term=term, leader=seat.holder, members=self._members())
        gone = not self._keys.has(self.member.name)
        if gone and self._lease is not None and revision >= self._registered_at:
            self._lose()
            self._hurry.set()

    def _members(self) -> tuple[Member, ...]:
        """A server that was away ends every lease on its return: all get one lease's time to register anew."""
        lenient = bool(self._faults) or self._clock() < self._lenient_s
        return overdue(self.view.members, self._keys.members()) if lenient else self._keys.members()

    def _check_history(self, revision: int) -> None:
        """Revisions that go back mean an etcd whose data are gone: terms would be given twice."""
        if revision < self._newest:
            raise Trouble("the etcd servers have lost what they knew; start the nodes of this cluster again")

    # The election.

    def _own(self) -> Leader:
        return Leader(self.member.name, self.member.incarnation)

    def _judge(self, seat: Seat, revision: int) -> None:
        if self._leading is not None and revision < self._leading:
            return
        step = next_step(seat, self._own(), self._leading, self._spent, self._stands)
        if step is Step.STOP:
            self._stop_leading()
        elif step is Step.LEAD:
            self._lead(seat.term)

    async def _stand(self) -> None:
        """Take the place when it is free, give it back when it is this node's without its leading."""
        view, lease = self.view, self._lease
        if lease is not None and self._leading is None:
            step = next_step(self._keys.seat(), self._own(), None, self._spent, self._stands)
            if step is Step.TAKE:
                ask = self._keys.take_seat(self._own(), lease.id, self._registered_at)
                taken = await self._gateway.call("/v3/kv/txn", ask, Txn)
                if taken.succeeded and self._lease is not None and self._lease.id == lease.id:
                    self._lead(taken.header.revision)
            elif step is Step.LEAD:
                self._lead(self._keys.seat().term)
            elif step is Step.LEAVE:
                await self._leave_seat()
        self._well(self._stand)
        await self._board.changed(view, _POLL_S)

    def _lead(self, term: int) -> None:
        """Begin a term, unless its lease has ended already or it was led before."""
        lease = self._lease
        if self._stands and lease is not None and term > self._spent and self._clock() < lease.until_s:
            self._leading = self._spent = term
            self._post()

    def _stop_leading(self) -> None:
        if self._leading is not None:
            self._leading = None
            self._post()

    async def _leave_seat(self) -> None:
        await self._gateway.call("/v3/kv/txn", self._keys.leave_seat(self._own()), Txn)

    async def _expire(self) -> None:
        """What happens by the clock alone: stop leading at the deadline, for those who only observe (`leadership`
        knows by itself), and miss those who have not come back."""
        while True:
            self._post(members=self._members())
            lease, pause_s = self._lease, _POLL_S
            if lease is not None and self._leading is not None:
                pause_s = min(pause_s, lease.until_s - self._clock())
                if pause_s <= 0.0:
                    self._stop_leading()
                    continue
            await asyncio.sleep(pause_s)

    # What the tasks share.

    async def _forever(self, work: Work) -> None:
        while True:
            try:
                await work()
            except Trouble as trouble:
                self._faults[work.__name__] = str(trouble)
                self._post()
                await self._breathe()

    def _well(self, work: Work) -> None:
        """This one of the tasks reaches the servers."""
        if self._faults.pop(work.__name__, None) is not None:
            self._lenient_s = self._clock() + self.granted_s
        self._post()

    async def _breathe(self) -> None:
        """Short of a renewal's turn, and not at the same moment as everybody else."""
        await asyncio.sleep(renew_s(self.granted_s) * random.uniform(0.2, 0.5))

    def _post(self, **parts: Any) -> None:
        cut = next(iter(self._faults.values()), None)
        self._board.post(msgspec.structs.replace(self.view, leading=self._leading, cut=cut, **parts))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task ends with the session only; where it fails, this node must not lead any more."""
        if not task.cancelled():
            log.error("the coordinator's client failed", exc_info=task.exception())
            self._stands = False
            self._faults["client"] = "the coordinator's client has failed"
            self._stop_leading()
            self._post()
