"""The dialled side of the links between nodes: a port of its own, where nothing is served but `/internal/wire`.

Of its own, since the port for clients has other bounds (thousands of connections, which could keep nodes out), another
certificate and other addresses, and is open to whom this one must never be. Before the handshake a connection has five
seconds and a few kilobytes, and there are only so many of them; whoever fails it meets one fixed sentence. Opened and
closed by the node; it decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

from aiohttp import web

from janus_server.errors import BadConfig
from janus_server.wire.connection import Connection, Socket, close, receive
from janus_server.wire.doorman import Doorman
from janus_server.wire.frames import (
    CONTROL_ASKS,
    CONTROL_MOST_BYTES,
    KNOCK_MOST_BYTES,
    KNOCKS,
    STREAM_ASKS,
    Challenge,
    Hello,
    Knock,
    Refusal,
    Role,
    Welcome,
    read,
    write,
)
from janus_server.wire.handshake import NONCE_BYTES, Answerer, Identity, Met, Secret
from janus_server.wire.link import PATH, Timing
from janus_server.wire.serving import Serving, Station
from janus_server.wire.tls import check_endpoint, is_loopback
from janus_server.wire.trouble import Trouble

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("janus.wire")

# All nodes of a large cluster may come at once after a pause; each is through in milliseconds.
MOST_UNPROVED: Final = 128
# Headers of the upgrade, Hello and Proof are 2 KiB.
UNPROVED_MOST_BYTES: Final = 16 << 10
# What runs for a node that is away goes on for so long; its own patience (Timing.lost_s) is shorter.
RESUME_S: Final = 10.0
_CLOSE_S: Final = 0.2


def bind(host: str, port: int, tls: bool) -> socket.socket:
    """The socket to listen on; BadConfig where others could read along, or where it cannot be had."""
    if not tls and not is_loopback(host):
        raise BadConfig(
            f"nodes would be reached at {host} without TLS: give a certificate, its key and their CA, or listen on "
            "127.0.0.1 where all nodes are on this machine"
        )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise BadConfig(f"nodes cannot be listened for on {host} port {port}: {error.strerror}") from None


class WireListener:
    """Answers other nodes until `close`. Lives on the loop."""

    def __init__(
        self, me: Identity, secret: Secret, station: Station, timing: Timing, certificate: bytes, resume_s: float,
        refused: Callable[[str, Trouble], None],
    ) -> None:  # fmt: skip
        self._me = me
        self._secret = secret
        self._station = station
        self._timing = timing
        self._certificate = certificate
        self._resume_s = resume_s
        self._refused = refused
        self._doorman = Doorman()
        self._servings: dict[str, Serving] = {}
        self._connections: set[Connection] = set()
        self._door = _Door(self._answer, timing.handshake_s)
        self._server: asyncio.Server | None = None

    @staticmethod
    async def open(
        listening: socket.socket, me: Identity, secret: Secret, station: Station, *, timing: Timing | None = None,
        tls: ssl.SSLContext | None = None, certificate: bytes = b"", resume_s: float = RESUME_S,
        refused: Callable[[str, Trouble], None] | None = None,
    ) -> WireListener:  # fmt: skip
        """Listen on a bound socket, which is closed with it. certificate is the digest of the one shown under TLS.

        refused(name, trouble) is told of whoever was refused; the name is what was claimed and may be a lie.
        """
        check_endpoint(me.endpoint)
        timing = Timing() if timing is None else timing
        one = WireListener(me, secret, station, timing, certificate, resume_s, refused or _log_refused)
        limit_s = timing.handshake_s if tls is not None else None
        one._server = await asyncio.get_running_loop().create_server(
            one._door, sock=listening, ssl=tls, ssl_handshake_timeout=limit_s
        )
        return one

    @property
    def running(self) -> int:
        """Requests of other nodes that run here."""
        return sum(map(len, self._servings.values()))

    def forget(self, node: str, incarnation: str) -> None:
        """That process is gone, as the coordinator says: what runs for it is cancelled now, not only in a while."""
        serving = self._servings.get(node)
        if serving is not None and serving.peer.incarnation == incarnation:
            del self._servings[node]
            for connection in (serving.control, serving.stream):
                if connection is not None:
                    connection.end(Trouble.GONE)
            serving.drop()

    async def close(self) -> None:
        """Leave everybody: what runs for others is cancelled."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.end(Trouble.CLOSED)
        await self._door.shutdown(self._timing.handshake_s)
        for serving in self._servings.values():
            serving.drop()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        answer = web.WebSocketResponse(
            timeout=_CLOSE_S, max_msg_size=CONTROL_MOST_BYTES, compress=False, heartbeat=None
        )
        if request.path != PATH or not answer.can_prepare(request).ok:
            return web.Response(status=404)
        try:
            await answer.prepare(request)
            met = await self._meet(answer, cast(_Guest, request.protocol), request.remote or "")
        except (ConnectionError, RuntimeError):  # aiohttp raises the latter where its end is closed already
            return answer if answer.prepared else web.Response(status=400)
        serving = self._serving(met.peer) if isinstance(met, Met) else met
        if isinstance(met, Met) and isinstance(serving, Serving):
            await self._converse(serving, answer, met.role)
        return answer

    async def _meet(self, answer: web.WebSocketResponse, guest: _Guest, address: str) -> Met | Trouble:
        """The handshake. Whoever fails it is told why and left."""
        answerer, name = Answerer(self._me, self._secret, secrets.token_bytes(NONCE_BYTES), self._certificate), ""
        while True:
            message = await receive(cast(Socket, answer))
            step: Challenge | Welcome | Trouble
            if isinstance(message, Trouble):
                # Whoever left by itself, for whatever reason, has failed at nothing.
                step = message if message in (Trouble.GARBAGE, Trouble.TOO_LONG) else Trouble.GONE
            else:
                knock = read(message, KNOCKS, KNOCK_MOST_BYTES)
                name = knock.node if isinstance(knock, Hello) else name
                step = knock if isinstance(knock, Trouble) else self._step(answerer, knock, address, name)
            if isinstance(step, Trouble):
                await self._turn_away(answer, step, address, name)
                return step
            if answerer.met is not None:
                guest.proved()
            await answer.send_bytes(write(step))
            if answerer.met is not None:
                return answerer.met

    def _step(self, answerer: Answerer, knock: Knock, address: str, name: str) -> Challenge | Welcome | Trouble:
        if self._doorman.wait_s(address, name, time.monotonic()) > 0.0:
            return Trouble.DELAYED
        step = answerer.hear(knock)
        if answerer.met is not None and not isinstance(step, Trouble):
            self._doorman.proved(address, name)
            serving = self._serving(answerer.met.peer)
            return serving if isinstance(serving, Trouble) else step
        return step

    async def _turn_away(self, answer: web.WebSocketResponse, why: Trouble, address: str, name: str) -> None:
        if why is Trouble.GONE:
            return
        if why is not Trouble.DELAYED:  # that was said before
            self._refused(name, why)
            if why is not Trouble.TAKEN:
                self._doorman.failed(address, name, time.monotonic())
        await answer.send_bytes(write(Refusal(why)))
        await close(cast(Socket, answer), why)

    def _serving(self, peer: Identity) -> Serving | Trouble:
        """What is open with that process. Another one of its name comes first to an end, or keeps it out."""
        serving = self._servings.get(peer.node)
        if serving is not None and serving.peer != peer:
            if serving.control is not None or serving.stream is not None:
                return Trouble.TAKEN
            serving.drop()
            serving = None
        if serving is None:
            serving = self._servings[peer.node] = Serving(peer, self._station, self._resume_s)
        return serving

    async def _converse(self, serving: Serving, answer: web.WebSocketResponse, role: Role) -> None:
        control = role is Role.CONTROL
        connection = Connection(
            cast(Socket, answer), role, CONTROL_ASKS if control else STREAM_ASKS, self._timing.heartbeat,
            serving.asked if control else serving.streamed, serving.nothing if control else serving.more,
        )  # fmt: skip
        before = serving.control if control else serving.stream
        if before is not None:
            before.end(Trouble.REPLACED)
            serving.down(before)
        if control:
            serving.control_up(connection)
        else:
            serving.stream_up(connection)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            serving.down(connection)


class _Door(web.Server):
    """aiohttp's server over connections that are bounded until they have proved themselves."""

    def __init__(self, handler: Callable[[web.BaseRequest], Any], limit_s: float) -> None:
        super().__init__(handler, access_log=None, keepalive_timeout=limit_s)
        self.unproved = 0
        self.limit_s = limit_s

    def __call__(self) -> web.RequestHandler:
        return _Guest(self, loop=self._loop, **self._kwargs)


class _Guest(web.RequestHandler):
    """One connection: until `proved` it has so much time, so many bytes, and is one of so many."""

    __slots__ = ("_bytes", "_door", "_timer")

    def __init__(self, door: _Door, **settings: Any) -> None:
        super().__init__(door, **settings)
        self._door = door
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._door.unproved >= MOST_UNPROVED:
            cast(asyncio.Transport, transport).abort()
            return
        self._door.unproved += 1
        self._timer = self._loop.call_later(self._door.limit_s, cast(asyncio.Transport, transport).abort)

    def data_received(self, data: bytes) -> None:
        if self._timer is not None:
            self._bytes += len(data)
            if self._bytes > UNPROVED_MOST_BYTES and self.transport is not None:
                self.transport.abort()
                return
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.proved()
        super().connection_lost(exc)

    def proved(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._door.unproved -= 1


def _log_refused(name: str, trouble: Trouble) -> None:
    # A name is of letters, digits, dots and dashes: nothing else is read as one.
    log.warning("a node that says it is %s was refused: %s", name or "(none)", trouble.sentence)
