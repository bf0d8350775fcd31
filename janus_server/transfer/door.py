"""The side that is read by other hosts: a port of its own, a thread for each connection, and pages out of it.

Opened by the node's cluster once its memory is there. A stranger has some seconds and a few kilobytes to prove that it
knows the secret, and there are only so many of them; whoever is in reads what a grant of its own names, and nothing
else: a Fetch counts over the granted pages, so that it cannot even name others. Grants are given on the loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import math
import socket
import ssl
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import msgspec

from janus_server.kv.move import unpaced
from janus_server.kv.vmm_cpu import CpuMemory, runs
from janus_server.transfer import plane
from janus_server.transfer.frames import (
    ASK_MOST_BYTES,
    QUESTIONS,
    Ask,
    Check,
    Claim,
    Denial,
    Denied,
    Fetch,
    Granted,
    Holding,
    Look,
    PeerTrouble,
    Release,
    Sending,
    Valid,
)
from janus_server.transfer.grants import Given, Grant, Grants, Offer
from janus_server.transfer.line import Line
from janus_server.transfer.proving import Refused, answered
from janus_server.transfer.rundir import Peering
from janus_server.transfer.serving import granted_of, holding_of, lasts_s
from janus_server.wire.doorman import Doorman
from janus_server.wire.handshake import Identity, Secret

log = logging.getLogger("janus.transfer")

T = TypeVar("T")

MOST_LINES: Final = 128
MOST_STRANGERS: Final = 32
# A line that reads nothing: its reader computes or sleeps in between. Its grants end by themselves.
_IDLE_S: Final = 60.0
_PAUSE_S: Final = 0.1
# That it is crowded here is said so often.
_SAY_S: Final = 15.0


class Pages(msgspec.Struct, frozen=True):
    """What a node lets be read: its memory, the grants on it, and by model, of those named, what is on offer.

    bytes_per_s() is how fast its memory may be read now, stale(term) whether a leader's term is over.
    """

    memory: CpuMemory
    grants: Grants
    offers: Callable[[str], Offer | None]
    models: tuple[str, ...] = ()
    bytes_per_s: Callable[[], float | None] = unpaced
    stale: Callable[[int], bool] = lambda term: False


class Door:
    """Open from its making to `close`, both on the loop."""

    def __init__(
        self, listening: socket.socket, me: Identity, secret: Secret, peering: Peering, pages: Pages,
        tls: ssl.SSLContext | None = None, certificate: bytes = b"", knock_s: float = 5.0,
    ) -> None:  # fmt: skip
        """listening is bound and becomes the door's. certificate is the digest of the one that is shown under TLS."""
        self._listening = listening
        self._me = me
        self._secret = secret
        self._peering = peering
        self._pages = pages
        self._tls = tls
        self._certificate = certificate
        self._knock_s = knock_s
        self._handle = plane.register(pages.memory)
        self._slab = pages.memory.slab.data.toreadonly()
        self._loop = asyncio.get_running_loop()
        self._doorman, self._failing = Doorman(), threading.Lock()
        self._crowded_s = -math.inf
        self._strangers: set[threading.Thread] = set()
        self._threads: dict[threading.Thread, socket.socket] = {}
        listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    @property
    def lines(self) -> int:
        """Connections that are open, strangers' among them."""
        return len(self._threads)

    async def close(self) -> None:
        """Leave everybody. No page is read any more when this returns. A second time does nothing."""
        if self._accepting.done():
            return
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listening.close()
        for thread, connection in list(self._threads.items()):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
            await asyncio.to_thread(thread.join)
        self._slab.release()
        self._handle.close()

    async def _accept(self) -> None:
        while True:
            try:
                connection, address = await self._loop.sock_accept(self._listening)
            except OSError as error:  # out of descriptors, or a peer that left at once
                log.warning("a node of another host could not be accepted: %s", error.strerror)
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self._threads) >= MOST_LINES or len(self._strangers) >= MOST_STRANGERS:
                connection.close()
                self._say_crowded()
                continue
            if self._tls is not None:  # its handshake is the thread's
                try:
                    connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                except (OSError, ValueError):  # it left at once
                    connection.close()
                    continue
            thread = threading.Thread(
                target=self._serve, args=(connection, str(address[0])), name="janus-door", daemon=True
            )
            self._threads[thread] = connection
            self._strangers.add(thread)
            thread.start()

    def _say_crowded(self) -> None:
        now = time.monotonic()
        if now - self._crowded_s >= _SAY_S:
            self._crowded_s = now
            log.warning("nodes of other hosts are sent away: %d are here", len(self._threads))

    # On a thread for each connection

    def _serve(self, connection: socket.socket, address: str) -> None:
        me = threading.current_thread()
        peer: Identity | None = None
        try:
            line = self._let_in(connection)
            peer = answered(line, self._me, self._secret, self._certificate, self._knock_s)
            self._strangers.discard(me)
            with self._failing:
                self._doorman.proved(address, peer.node)
            self._answer(line, peer)
        except PeerTrouble as trouble:
            if peer is None:
                self._log_stranger(address, trouble)
            else:
                log.info("left a node of another host: %s", trouble)
        finally:
            self._strangers.discard(me)
            connection.close()
            del self._threads[me]

    def _let_in(self, connection: socket.socket) -> Line:
        if isinstance(connection, ssl.SSLSocket):
            connection.settimeout(self._knock_s)
            try:
                connection.do_handshake()
            except (OSError, ValueError):
                raise PeerTrouble("its TLS certificate is not one that this node trusts, or it has none") from None
        return Line(connection)

    def _log_stranger(self, address: str, trouble: PeerTrouble) -> None:
        """One that tries again and again is not logged again and again."""
        now, name = time.monotonic(), trouble.name if isinstance(trouble, Refused) else ""
        with self._failing:
            if self._doorman.wait_s(address, name, now) > 0:
                return
            self._doorman.failed(address, name, now)
        if isinstance(trouble, Refused):
            # A name is of letters, digits, dots and dashes: nothing else is read as one.
            log.warning("a node that says it is %s may not read here: %s", name or "(none)", trouble.why.sentence)
        else:
            log.info("left a stranger: %s", trouble)

    def _answer(self, line: Line, peer: Identity) -> None:
        """Questions of a peer that is known, until it leaves. The grant that it asked for here ends with the line."""
        mine: Grant | None = None
        reading: _Reading | None = None
        limit_s, grants, who = self._peering.reply_s, self._pages.grants, (peer.node, peer.incarnation)
        try:
            while True:
                idle_s = _IDLE_S if mine is None else max(mine.expires_s - time.monotonic(), 0.0)
                match line.receive(QUESTIONS, ASK_MOST_BYTES, idle_s):
                    case Ask() | Claim() as ask if mine is None and (ask.node, ask.incarnation) == who:
                        given = self._give(ask)
                        if isinstance(given, Denial):
                            line.send(Denied(given), limit_s)
                            return
                        mine = given.grant
                        level = logging.INFO if isinstance(ask, Ask) else logging.DEBUG
                        log.log(level, "%s: being read by %s of another host", mine.model, peer.node)
                        line.send(self._granted(given), limit_s)
                    case Look():
                        line.send(self._on_loop(self._holding), limit_s)
                        return
                    case Fetch(id, at, size_bytes):
                        found = grants.of(id, *who)
                        if isinstance(found, Denial):
                            line.send(Denied(found), limit_s)
                            return
                        if reading is None or reading.id != id:
                            reading = _Reading(found.grant, self._pages.memory.page_bytes)
                        self._send(line, reading, at, size_bytes)
                    case Check(id) if not isinstance(grants.of(id, *who), Denial):
                        line.send(Valid(id), limit_s)
                    case Check():
                        line.send(Denied(Denial.NO_GRANT), limit_s)
                        return
                    case Release(id) if mine is not None and id == mine.id:
                        return
                    case _:
                        raise PeerTrouble("the peer spoke out of turn")
        finally:
            if mine is not None:
                grants.release(mine)

    def _holding(self) -> Holding:
        return holding_of(self._peering, self._pages.models, self._pages.offers, self._pages.grants)

    def _granted(self, given: Given) -> Granted:
        page_bytes, rate = self._pages.memory.page_bytes, self._pages.bytes_per_s()
        return granted_of(given, self._peering, self._handle.size_bytes, page_bytes, rate)

    def _give(self, ask: Ask | Claim) -> Given | Denial:
        if isinstance(ask, Claim):
            return self._pages.grants.claim(ask)
        if self._pages.stale(ask.term):
            return Denial.OLD_TERM

        def give() -> Given | Denial:
            return self._pages.grants.give(ask, self._pages.offers, lambda size: lasts_s(self._peering, size))

        return self._on_loop(give)

    def _send(self, line: Line, reading: _Reading, at: int, size_bytes: int) -> None:
        if at + size_bytes > reading.size_bytes:
            raise PeerTrouble("the peer asked for more than it was granted")
        line.send(Sending(size_bytes), self._peering.reply_s)
        for offset, count in reading.spans(at, size_bytes):
            line.send_pages(self._handle.fd, self._slab, offset, count, self._peering.stall_s)

    def _on_loop(self, work: Callable[[], T]) -> T:
        """Run `work` on the loop: what is on offer changes there."""
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                done.set_result(work())

        try:
            self._loop.call_soon_threadsafe(run)
            return done.result(self._peering.reply_s)
        except (TimeoutError, RuntimeError):  # a loop that is closed
            done.cancel()
            raise PeerTrouble("this node is too busy to answer") from None


class _Reading:
    """Where a grant's bytes lie in the memory."""

    def __init__(self, grant: Grant, page_bytes: int) -> None:
        self.id = grant.id
        self.size_bytes = grant.size_bytes
        self._page_bytes = page_bytes
        self._runs = runs(grant.pages)
        self._starts = list(itertools.accumulate((count * page_bytes for _, count in self._runs), initial=0))

    def spans(self, at: int, size_bytes: int) -> Iterator[tuple[int, int]]:
        """(offset in the memory, bytes) of the part from `at` on.

        Example: of pages 3, 4, 9 of 10 bytes, 15 bytes from 8 on are (38, 12) and (90, 3).
        """
        i = bisect_right(self._starts, at) - 1
        while size_bytes:
            within = at - self._starts[i]
            count = min(self._starts[i + 1] - at, size_bytes)
            yield self._runs[i][0] * self._page_bytes + within, count
            at, size_bytes, i = at + count, size_bytes - count, i + 1
