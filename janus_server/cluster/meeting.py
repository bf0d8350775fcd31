"""Where a node meets the others: its session with the coordinator, the port for its peers, a link to each of them.

`member` opens it and hears from it who leads, who came and who is gone. Lives on the loop; it decides nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from pathlib import Path
from typing import Final, Protocol

from janus_server.cluster.freight import Freight
from janus_server.cluster.missed import Missed
from janus_server.coordinator.address import open_coordinator, read_address, read_login
from janus_server.coordinator.base import Session, boot_clock
from janus_server.coordinator.records import Altered, Back, Came, Change, Cut, Deposed, Elected, Led, Member, View, Went
from janus_server.errors import BadConfig, Bug
from janus_server.transfer.door import Pages
from janus_server.transfer.rundir import Far, Peering
from janus_server.version import server_version
from janus_server.wire.frames import Outcome, Role
from janus_server.wire.handshake import Identity, Secret
from janus_server.wire.link import Link, Links
from janus_server.wire.listen import WireListener, bind
from janus_server.wire.serving import Station
from janus_server.wire.tls import (
    TlsFiles,
    answering_context,
    dialling_context,
    own_digest,
    read_secret,
    shared_secret,
)
from janus_server.wire.trouble import Trouble

log = logging.getLogger("janus.cluster")

_LOCAL: Final = "local"
SECRET: Final = "cluster.secret"
_MACHINE: Final = Path("/proc/sys/kernel/random/boot_id")
# A link whose node has beaten within that time lives. Less than a lease: of a node that is stopped nothing is hoped.
_LIVES_S: Final = 1.0
# Ends of connections that are no news: they are dialled again, or the node has left.
_QUIET: Final = frozenset({Trouble.GONE, Trouble.CLOSED, Trouble.REPLACED, Trouble.NOBODY, Trouble.NO_ANSWER,
                           Trouble.LOST, Trouble.PEER})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """join is a run directory or etcd://…; without a secret file there is one in the run directory; login is
    the file of the one to etcd. Peers reach this node at `host`, with TLS wherever that is another machine's. process
    is drawn anew by every process."""

    node: str
    join: str
    domain: str = ""
    secret: Path | None = None
    login: Path | None = None
    host: str = "127.0.0.1"
    tls: TlsFiles | None = None
    process: str = dataclasses.field(default_factory=lambda: os.urandom(8).hex())


class Hears(Station, Protocol):
    """What the meeting tells its owner, beside what a station is told."""

    def led(self) -> None:
        """There is a new leader."""

    def elected(self, term: int) -> None: ...

    async def deposed(self) -> None: ...

    def came(self, node: str) -> None:
        """There is a link to it."""

    def gone(self, node: str) -> None:
        """It is gone, and its link is about to go."""

    def answered(self, term: int, number: int, outcome: Outcome) -> None: ...


class Meeting:
    """Open from `open` to `close`."""

    def __init__(self, place: Place, owner: Hears) -> None:
        self._place = place
        self._owner = owner
        self._session: Session | None = None
        self._links: Links | None = None
        self._shared: Secret | None = None
        self._freight: Freight | None = None
        self._listener: WireListener | None = None
        self._cluster = _LOCAL if "://" not in place.join else read_address(place.join).cluster
        self._version = server_version()
        self._met: dict[str, Member] = {}
        self._missed = Missed(self._lives, self._part)
        self._task: asyncio.Task[None] | None = None

    @property
    def node(self) -> str:
        return self._place.node

    @property
    def where(self) -> tuple[str, str]:
        """Host and domain, as others may compare them."""
        try:
            host = _MACHINE.read_text(encoding="ascii").strip()[:8]
        except OSError:
            host = ""
        return host, self._place.domain

    @property
    def view(self) -> View:
        return View() if self._session is None else self._session.view

    @property
    def term(self) -> int:
        """The newest; without a leader all up to this one are over."""
        view = self.view
        return view.term if view.leader is not None else view.term + 1

    def stale(self, term: int) -> bool:
        """Whether that term is over. Any thread."""
        return self.view.is_stale(term)

    @property
    def incarnation(self) -> str:
        return "" if self._session is None else self._session.member.incarnation

    @property
    def leads_in(self) -> int | None:
        held = None if self._session is None else self._session.leadership()
        return None if held is None else held.term

    def leads_for_s(self) -> float:
        """For how long what this node orders may still hold; nothing or less where it does not lead."""
        held = None if self._session is None else self._session.leadership()
        return 0.0 if held is None else held.until_s - boot_clock()

    def names(self) -> list[str]:
        return [member.name for member in self.view.members]

    def near(self) -> list[str]:
        """As `names`, and those that the coordinator misses while the links to them live, and this node in any case: it
        may lead before it has read that it is registered again."""
        return list(dict.fromkeys((self.node, *self.names(), *self._met)))

    def foreign(self) -> str | None:
        """Why this node cannot follow whoever leads: another release of Janus."""
        leader = self.view.leader
        member = None if leader is None else self.view.member(leader.name)
        if member is None or member.version == self._version:
            return None
        return (f"node {member.name}, which leads, runs release {member.version} of Janus and this one "
                f"{self._version}: nodes of one cluster run the same")  # fmt: skip

    def link(self, node: str) -> Link | None:
        return self._links[node] if self._links is not None and node in self._links else None

    async def open(self) -> None:
        """Listen and join. BadConfig."""
        place, tls = self._place, self._place.tls
        if _is_new(place.join):  # which may be a mistake
            log.warning("no cluster meets in %s: this node begins one there", place.join)
        secret = self._shared = self._secret()
        listening = bind(place.host, 0, tls is not None)
        port = listening.getsockname()[1]
        host = f"[{place.host}]" if ":" in place.host else place.host
        me = Identity(self._cluster, place.node, place.process, f"{'ws' if tls is None else 'wss'}://{host}:{port}")
        self._listener = await WireListener.open(
            listening, me, secret, self._owner, tls=None if tls is None else answering_context(tls),
            certificate=b"" if tls is None else own_digest(tls),
        )  # fmt: skip
        self._links = Links(me, secret, None if tls is None else dialling_context(tls))
        self._freight = Freight(self._cluster, place.node, place.process, place.host, secret, tls)
        machine, domain = self.where
        login = None if place.login is None else read_login(place.login)
        coordinator = open_coordinator(place.join, login=login)
        self._session = await coordinator.join(
            Member(
                name=place.node, incarnation=place.process, url=me.endpoint, host=machine, domain=domain,
                version=self._version, pages=self._freight.endpoint,
            )
        )  # fmt: skip
        self._task = asyncio.create_task(self._watch(self._session))
        self._task.add_done_callback(_say_why)

    def stand(self) -> None:
        """For election, from now on."""
        if self._session is not None:
            self._session.campaign()

    async def resign(self) -> None:
        """Stand for nothing more."""
        if self._session is not None:
            await self._session.resign()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._missed.close()
        if self._session is not None:
            await self._session.close()
        if self._links is not None:
            await self._links.close()
        if self._freight is not None:
            await self._freight.close()
        if self._listener is not None:
            await self._listener.close()

    def let_read(self, peering: Peering, pages: Pages) -> None:
        """Open this node's pages to those of other hosts. Once the meeting is open."""
        if self._freight is not None:
            self._freight.open(peering, pages)

    def far(self, node: str) -> Far | None:
        """As `names`, for `transfer.rundir.Others`: how another member's pages are reached."""
        return None if self._freight is None else self._freight.known(self.view.member(node), self.where[0])

    def key_for(self, purpose: str) -> bytes:
        """A key that all nodes of the cluster have, and nobody else. Once it is open."""
        if self._shared is None:
            raise Bug("there is no secret before the meeting is open")
        return self._shared.derived(purpose)

    def _secret(self) -> Secret:
        if self._place.secret is not None:
            return read_secret(self._place.secret)
        if "://" in self._place.join:
            raise BadConfig("nodes of several machines need a secret of their own: give --cluster-secret FILE to each")
        folder = Path(self._place.join)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise BadConfig(f"the run directory {folder} cannot be used: {error.strerror}") from None
        return shared_secret(folder / SECRET)

    async def _watch(self, session: Session) -> None:
        async for change in session.observe():
            await self._hear(change)

    async def _hear(self, change: Change) -> None:
        match change:
            case Came(member):
                await self._come(member)
            case Went(member):
                await self._miss(member)
            case Altered(member):
                await self._part(member)
                await self._meet(member)
            case Led(term, leader):
                if leader.name != self.node:  # that one says so itself, when it begins
                    log.info("%s leads the cluster, in term %d", leader.name, term)
                self._owner.led()
            case Elected(term):
                self._owner.elected(term)
            case Deposed():
                await self._owner.deposed()
            case Cut(why):
                log.warning("the coordinator cannot be used: %s", why)
            case Back():
                log.info("the coordinator can be used again")

    async def _miss(self, member: Member) -> None:
        if await self._missed.miss(member):
            log.info("node %s is not registered any more, but its link lives: it is waited for", member.name)

    async def _come(self, member: Member) -> None:
        if not await self._missed.back(member):
            await self._meet(member)
            return
        log.info("node %s is registered again", member.name)
        self._met[member.name] = member
        self._owner.came(member.name)

    def _lives(self, node: str) -> bool:
        link = self.link(node)
        quiet_s = None if link is None else link.asking.quiet_s
        return quiet_s is not None and quiet_s < _LIVES_S

    async def _meet(self, member: Member) -> None:
        if member.name == self._place.node or self._links is None:
            return
        if member.version != self._version:
            log.error("node %s runs another release of Janus than this one: nothing is shared with it", member.name)
            return
        peer = Identity(self._cluster, member.name, member.process, member.url)
        await self._links.drop(member.name)
        try:
            self._links.open(
                peer, lambda node, term, number, outcome: self._owner.answered(term, number, outcome), self._changed
            )
        except BadConfig as error:
            log.error("node %s cannot be linked to: %s", member.name, error)
            return
        self._met[member.name] = member
        self._owner.came(member.name)

    async def _part(self, member: Member) -> None:
        if member.name == self._place.node or self._links is None or self._listener is None:
            return
        log.info("node %s is gone", member.name)
        self._met.pop(member.name, None)
        self._owner.gone(member.name)  # before its requests look for another node
        self._listener.forget(member.name, member.process)
        await self._links.drop(member.name)

    def _changed(self, node: str, role: Role, trouble: Trouble | None) -> None:
        self._missed.look(node)
        if trouble is not None and trouble not in _QUIET:
            log.warning("the %s link to node %s: %s", role.value, node, trouble.sentence)


def _is_new(where: str) -> bool:
    """Whether it is a run directory that no cluster has used."""
    folder = Path(where)
    return "://" not in where and not (folder / SECRET).exists() and not any(folder.glob("*.member"))


def _say_why(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("who comes and goes is not seen any more", exc_info=error)
