"""The coordinator of one host: a run directory that only its owner may enter, in which every node keeps one file.

Nothing to install and no server: nodes look at each other's files several times within a lease. A node whose process is
gone is missed at the next look, a stopped one when its lease is over, as the leader is in both cases: what it last
ordered may still be on its way. Called by the shells of the cluster through `base`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from janus_server.coordinator.base import Clock, Trouble, boot_clock
from janus_server.coordinator.board import Board, waited
from janus_server.coordinator.lease import LEAST_LEASE_S, MOST_LEASE_S, Turn, renew_s, take_turn
from janus_server.coordinator.records import Change, Leader, Leadership, Member, View, check_member
from janus_server.coordinator.rundir import Beat, RunFiles
from janus_server.errors import BadConfig

log = logging.getLogger("janus.coordinator")

_LOOK_S: Final = 0.2
# Others try a file's lock for an instant, to see whether its process lives.
_ENTER_TRIES: Final = 20
_ENTER_S: Final = 0.05


class LocalCoordinator:
    """The cluster of one run directory."""

    def __init__(self, run_dir: Path, *, lease_s: float = 2.0, clock: Clock = boot_clock) -> None:
        """All nodes of a directory must be given the same lease_s, and a clock that all processes of the host share."""
        if not LEAST_LEASE_S <= lease_s <= MOST_LEASE_S:
            raise BadConfig(f"the lease must last from {LEAST_LEASE_S} to {MOST_LEASE_S:.0f} s")
        self._run_dir = run_dir
        self._lease_s = lease_s
        self._clock = clock

    async def join(self, member: Member) -> LocalSession:
        check_member(member)
        files = await asyncio.to_thread(RunFiles, self._run_dir)
        session = LocalSession(files, member, self._lease_s, self._clock)
        try:
            await self._enter(files, member.name)
            await session.start()
        except BaseException as error:
            await session.close()
            if isinstance(error, OSError):
                raise BadConfig(f"the run directory {self._run_dir} cannot be used: {error.strerror}") from None
            if isinstance(error, Trouble):
                raise BadConfig(f"{error} ({self._run_dir})") from None
            raise
        return session

    async def _enter(self, files: RunFiles, name: str) -> None:
        for _ in range(_ENTER_TRIES):
            if await asyncio.to_thread(files.enter, name):
                return
            await asyncio.sleep(_ENTER_S)
        raise BadConfig(f"a node named {name} runs in {self._run_dir} already; give this one another name")


class _Round(msgspec.Struct, frozen=True):
    """What one look at the directory found."""

    turn: Turn
    beats: dict[str, Beat]


class LocalSession:
    """See `base.Session`. One task looks at the files and renews what is this node's."""

    def __init__(self, files: RunFiles, member: Member, lease_s: float, clock: Clock) -> None:
        self.member = member
        self._files = files
        self._lease_s = lease_s
        self._clock = clock
        self._board = Board()
        self._held: Leadership | None = None
        self._beat_s: float | None = None
        self._stands = False
        self._hurry = asyncio.Event()
        # Its own: a lease must not wait until others are done with the loop's threads.
        self._thread = ThreadPoolExecutor(1, "janus-coordinator")
        self._looking = asyncio.Lock()  # the session's task, `resign` and `close` meet there
        self._task: asyncio.Task[None] | None = None

    @property
    def view(self) -> View:
        return self._board.view

    def observe(self) -> AsyncIterator[Change]:
        return self._board.observe()

    def campaign(self) -> None:
        self._stands = True
        self._hurry.set()

    def leadership(self) -> Leadership | None:
        held = self._held
        return held if held is not None and self._clock() < held.until_s else None

    async def resign(self) -> None:
        self._stands = False
        self._held = None
        self._post(leading=None)
        with contextlib.suppress(Trouble, OSError):
            await self._look()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            await self.resign()
        async with self._looking:
            self._files.close()
        self._thread.shutdown()
        self._board.close()

    async def start(self) -> None:
        beats = await self._look()
        if any(beat.boot != self._files.boot for beat in beats.values()):
            raise Trouble("nodes of another machine use this run directory; several hosts need etcd")
        self._task = asyncio.create_task(self._forever())
        self._task.add_done_callback(self._ended)

    async def _forever(self) -> None:
        while True:
            self._hurry.clear()
            try:
                await self._look()
            except OSError as error:
                self._post(cut=f"the run directory cannot be used: {error.strerror}")
            except Trouble as trouble:
                self._post(cut=str(trouble))
            await waited(self._hurry, self._pause_s())
            if self._held is not None and self._clock() >= self._held.until_s:
                self._post(leading=None)

    def _pause_s(self) -> float:
        """Until the next look; sooner where a deadline comes first."""
        pause_s = min(renew_s(self._lease_s), _LOOK_S)
        left_s = self._held.until_s - self._clock() if self._held is not None else pause_s
        return min(pause_s, left_s) if left_s > 0.0 else pause_s

    async def _look(self) -> dict[str, Beat]:
        """Say that this node lives, see who else does, renew or take the lease; returns the beats of all who live."""
        async with self._looking:
            # Not to be abandoned: the thread would go on with files that are closed by then.
            work = asyncio.get_running_loop().run_in_executor(self._thread, self._round)
            try:
                found = await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.gather(work, return_exceptions=True)
                raise
            self._held = found.turn.held if self._stands else None
        self._show(found)
        return found.beats

    def _round(self) -> _Round:
        """On a thread. Whoever was silent for a whole lease comes back as another incarnation."""
        now_s = self._clock()
        silent = self._beat_s is not None and now_s >= self._beat_s + self._lease_s
        member = self.member.reborn() if silent else self.member
        self._files.beat(member, now_s)
        # Here and not by the loop: it is said, whatever becomes of the rest.
        self.member, self._beat_s = member, now_s
        beats = self._files.nodes()
        with self._files.lease(renew_s(self._lease_s)) as (record, write):
            # Where somebody removed the file, terms go on from the highest that this node knows.
            known = msgspec.structs.replace(record, term=max(record.term, self.view.term))
            turn = take_turn(
                known,
                Leader(member.name, member.incarnation),
                self._held,
                stands=self._stands,
                now_s=self._clock(),
                boot=self._files.boot,
                lease_s=self._lease_s,
            )
            if turn.record != record:
                write(turn.record)
        return _Round(turn, beats)

    def _show(self, found: _Round) -> None:
        now_s, boot, record = self._clock(), self._files.boot, found.turn.record
        fresh = [beat.member for beat in found.beats.values() if beat.is_fresh(now_s, boot, self._lease_s)]
        self._post(
            term=record.term,
            leader=record.leader() if record.is_held(now_s, boot) else None,
            members=tuple(sorted(fresh, key=lambda member: member.name)),
            leading=None if self._held is None or now_s >= self._held.until_s else self._held.term,
            cut=None,
        )

    def _post(self, **parts: object) -> None:
        self._board.post(msgspec.structs.replace(self.view, **parts))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The task ends with the session only; where it fails, this node must not lead any more."""
        if not task.cancelled():
            log.error("the run directory is not looked at any more", exc_info=task.exception())
            self._stands, self._held = False, None
            self._post(leading=None, cut="the coordinator's client has failed")
