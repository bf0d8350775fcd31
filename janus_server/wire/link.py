"""The dialling side of the links between nodes: a control and a stream connection to each other node, kept open.

The node opens `Links` once, takes a `Link` for each member that the coordinator tells of and drops it when the member
is gone. A connection that breaks is dialled again, sooner at first and later in the end; what was open goes on where it
was (`asking`). It decides nothing, and what it tells people is fixed text.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from janus_server.errors import require
from janus_server.wire.asking import Asking
from janus_server.wire.connection import Connection, Socket, close, receive
from janus_server.wire.frames import (
    CONTROL_ANSWERS,
    KNOCK_MOST_BYTES,
    KNOCKS,
    STREAM_ANSWERS,
    Outcome,
    Role,
    read,
    write,
)
from janus_server.wire.handshake import NONCE_BYTES, Caller, Identity, Met, Secret
from janus_server.wire.pulse import Heartbeat
from janus_server.wire.tls import check_endpoint, digest_of
from janus_server.wire.trouble import Trouble

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("janus.wire")

PATH: Final = "/internal/wire"
_CLOSE_S: Final = 0.2
# What no repetition mends before a person or the coordinator does something: asked again at the slowest pace.
_LASTING: Final = frozenset({
    Trouble.VERSION, Trouble.CLUSTER, Trouble.NAME, Trouble.SECRET, Trouble.ADDRESS, Trouble.DELAYED, Trouble.TLS,
    Trouble.GARBAGE,
})  # fmt: skip
# The process is gone for certain: its port is closed, or another process has it.
_DEAD: Final = frozenset({Trouble.NOBODY, Trouble.PEER})


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How long what may take.

    A connection is dialled again after first_s, then after twice as long each time up to longest_s, less up to half of
    it by chance, so that nodes that lost the same one do not come back at once. Requests are lost once there was no
    connection for lost_s, or as soon as the process is known to be gone.
    """

    heartbeat: Heartbeat = Heartbeat()
    handshake_s: float = 5.0
    first_s: float = 0.05
    longest_s: float = 2.0
    lost_s: float = 3.0


class Link:
    """This node's two connections to one process of another node."""

    def __init__(
        self, links: Links, peer: Identity, answered: Callable[[str, int, int, Outcome], None],
        changed: Callable[[str, Role, Trouble | None], None],
    ) -> None:  # fmt: skip
        """answered(node, term, id, outcome) tells what became of orders; changed(node, role, trouble) that a connection
        came up (None), or why it ended or there is none: each trouble once until it changes."""
        self.peer = peer
        self.asking = Asking(time.monotonic_ns() // 1000, lambda term, id, end: answered(peer.node, term, id, end))
        self._links = links
        self._changed = changed
        self._state: dict[Role, Trouble | None] = dict.fromkeys(Role, Trouble.NO_ANSWER)
        self._news = asyncio.Condition()
        self._losing: asyncio.TimerHandle | None = None
        self._lose_later()
        self._keeping = [asyncio.create_task(self._keep(role)) for role in Role]
        for task in self._keeping:
            task.add_done_callback(_log_bug)

    def state(self, role: Role) -> Trouble | None:
        """None while that connection is open, else why it is not."""
        return self._state[role]

    async def opened(self, role: Role) -> None:
        """Until that connection is open."""
        async with self._news:
            await self._news.wait_for(lambda: self._state[role] is None)

    async def close(self, why: Trouble = Trouble.CLOSED) -> None:
        """Leave the other node: what still runs there for this one ends with `why`."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        self._stop_losing()
        self.asking.close(why)

    async def _keep(self, role: Role) -> None:
        timing, attempt = self._links.timing, 0
        while True:
            began_s = time.monotonic()
            trouble = await self._links.converse(self, role)
            attempt = 0 if time.monotonic() - began_s > timing.longest_s else attempt + 1
            if trouble in _LASTING:
                attempt = 32
            if trouble in _DEAD:
                self.asking.lost(Trouble.LOST)
            await self._tell(role, trouble)
            delay_s = min(timing.longest_s, timing.first_s * 2 ** min(attempt, 16))
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))

    async def up(self, connection: Connection) -> None:
        """A connection is open, and has not sent anything."""
        if connection.role is Role.CONTROL:
            self.asking.control_up(connection)
        else:
            self._stop_losing()
            self.asking.stream_up(connection)
        await self._tell(connection.role, None)

    def down(self, connection: Connection) -> None:
        self.asking.down(connection)
        if connection.role is Role.STREAM:
            self._lose_later()

    async def _tell(self, role: Role, trouble: Trouble | None) -> None:
        if trouble is self._state[role]:
            return
        self._state[role] = trouble
        async with self._news:
            self._news.notify_all()
        self._changed(self.peer.node, role, trouble)

    def _lose_later(self) -> None:
        self._stop_losing()
        loop = asyncio.get_running_loop()
        self._losing = loop.call_later(self._links.timing.lost_s, self._lose)

    def _lose(self) -> None:
        self.asking.lost(Trouble.LOST)
        self._lose_later()  # what is asked for meanwhile waits no longer either

    def _stop_losing(self) -> None:
        if self._losing is not None:
            self._losing.cancel()
            self._losing = None


class Links:
    """All links that this node dials. Lives on the loop."""

    def __init__(
        self, me: Identity, secret: Secret, tls: ssl.SSLContext | None = None, timing: Timing | None = None
    ) -> None:
        self.me = me
        self.timing = Timing() if timing is None else timing
        self._secret = secret
        self._tls = tls
        # Neither proxies nor cookies: whoever is dialled is a node of this cluster.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), cookie_jar=aiohttp.DummyCookieJar()
        )
        self._links: dict[str, Link] = {}

    def __getitem__(self, node: str) -> Link:
        return self._links[node]

    def __contains__(self, node: str) -> bool:
        return node in self._links

    def open(
        self, peer: Identity, answered: Callable[[str, int, int, Outcome], None],
        changed: Callable[[str, Role, Trouble | None], None],
    ) -> Link:  # fmt: skip
        """Keep a link to that process. BadConfig for an address that no link may use. One link a node: drop the other
        before."""
        require(peer.node not in self._links, "a node has two links")
        check_endpoint(peer.endpoint)
        link = self._links[peer.node] = Link(self, peer, answered, changed)
        return link

    async def drop(self, node: str, why: Trouble = Trouble.LOST) -> None:
        link = self._links.pop(node, None)
        if link is not None:
            await link.close(why)

    async def close(self) -> None:
        await asyncio.gather(*(self.drop(node, Trouble.CLOSED) for node in list(self._links)))
        await self._session.close()

    async def converse(self, link: Link, role: Role) -> Trouble:
        """Dial, prove, and carry frames until the connection ends; why it did."""
        socket: Socket | None = None
        try:
            async with asyncio.timeout(self.timing.handshake_s):
                socket = opened = await self._dial(link.peer, role)
                met = await self._prove(opened, link.peer, role)
        except TimeoutError:
            met = Trouble.LATE if socket is not None else Trouble.NO_ANSWER
        except asyncio.CancelledError:
            if socket is not None:
                await close(socket, Trouble.CLOSED)
            raise
        except (aiohttp.ClientError, OSError) as error:
            met = _trouble_of(error)
        if not isinstance(met, Met):
            if socket is not None:
                await close(socket, met)
            return met
        asking, control = link.asking, role is Role.CONTROL
        connection = Connection(
            opened, role, CONTROL_ANSWERS if control else STREAM_ANSWERS, self.timing.heartbeat,
            asking.heard if control else asking.streamed, asking.nothing if control else asking.more,
        )  # fmt: skip
        try:
            await link.up(connection)
            return await connection.run()
        finally:
            link.down(connection)

    async def _dial(self, peer: Identity, role: Role) -> aiohttp.ClientWebSocketResponse:
        url = peer.endpoint.replace("ws", "http", 1) + PATH
        return await self._session.ws_connect(
            url, max_msg_size=role.most_bytes, compress=0, heartbeat=None, autoping=True,
            ssl=True if self._tls is None else self._tls,
            timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
        )  # fmt: skip

    async def _prove(self, socket: aiohttp.ClientWebSocketResponse, peer: Identity, role: Role) -> Met | Trouble:
        shown = socket.get_extra_info("ssl_object")
        certificate = b"" if shown is None else digest_of(shown.getpeercert(binary_form=True))
        caller = Caller(self.me, peer, role, self._secret, secrets.token_bytes(NONCE_BYTES), certificate)
        await socket.send_bytes(write(caller.hello))
        while True:
            message = await receive(socket)
            if isinstance(message, Trouble):
                return message
            knock = read(message, KNOCKS, KNOCK_MOST_BYTES)
            step = knock if isinstance(knock, Trouble) else caller.hear(knock)
            if isinstance(step, Met | Trouble):
                return step
            await socket.send_bytes(write(step))


def _log_bug(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a link is kept no longer, by a bug", exc_info=error)


def _trouble_of(error: aiohttp.ClientError | OSError) -> Trouble:
    if isinstance(error, aiohttp.ClientSSLError):
        return Trouble.TLS
    if isinstance(error, aiohttp.WSServerHandshakeError):
        return Trouble.GARBAGE
    refused = isinstance(error, aiohttp.ClientConnectorError | OSError) and error.errno == errno.ECONNREFUSED
    return Trouble.NOBODY if refused else Trouble.NO_ANSWER
