"""The side that is read: answers the host's other nodes on this node's socket, one grant a connection.

`node` opens it and says what is on offer. A connection that breaks a rule is closed; one that ends for whatever reason
takes its grant with it. It reads no weights and changes none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence

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
    Granted,
    Held,
    Holding,
    Link,
    Look,
    PeerTrouble,
    Release,
    Run,
    Valid,
)
from janus_server.transfer.grants import Given, Grants, Offer
from janus_server.transfer.rundir import Peering, RunDirectory, require_own_user

log = logging.getLogger("janus.transfer")

MOST_LINKS = 32
# The slowest pull that a grant still covers: what is left of a gigabit network beside other traffic.
SLOWEST_BYTES_PER_S = 50e6
_PAUSE_S = 0.1


class PeerServer:
    """A node's socket and the connections to it. Everything here runs on the loop."""

    def __init__(
        self,
        peering: Peering,
        memory: CpuMemory,
        grants: Grants,
        offers: Callable[[str], Offer | None],
        models: Sequence[str] = (),
        bytes_per_s: Callable[[], float | None] = unpaced,
    ) -> None:
        """models are those that whoever looks is told of, where offers(model) has something to say. bytes_per_s() is
        how fast this node's memory may be read now."""
        self._bytes_per_s = bytes_per_s
        self._peering = peering
        self._models = tuple(models)
        self._page_bytes = memory.page_bytes
        self._grants = grants
        self._offers = offers
        self._directory = RunDirectory(peering.run_dir)
        try:
            self._listening, self._lock = self._directory.listen(peering.node)
        except BaseException:
            self._directory.close()
            raise
        self._handle = plane.register(memory)
        self._links: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Leave every peer, and the run directory."""
        tasks = [self._accepting, *self._links]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listening.close()
        self._directory.forget(self._peering.node)
        self._directory.close()
        self._handle.close()
        os.close(self._lock)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except OSError as error:  # out of descriptors, or a peer that left at once
                log.warning("a peer could not be accepted: %s", error.strerror)
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self._links) >= MOST_LINKS:
                log.warning("a peer was sent away: %d others are being served", len(self._links))
                connection.close()
                continue
            task = asyncio.create_task(self._serve(connection))
            self._links.add(task)
            task.add_done_callback(self._links.discard)

    async def _serve(self, connection: socket.socket) -> None:
        link = Link(connection)
        try:
            require_own_user(connection)
            await self._answer(link)
        except PeerTrouble as trouble:
            log.info("left a peer: %s", trouble)
        finally:
            link.close()

    async def _answer(self, link: Link) -> None:
        limit_s = self._peering.reply_s
        ask = await link.receive(QUESTIONS, ASK_MOST_BYTES, limit_s)
        if isinstance(ask, Look):
            await link.send(holding_of(self._peering, self._models, self._offers, self._grants), limit_s)
            return
        if isinstance(ask, Ask):
            given = self._grants.give(ask, self._offers, lambda size_bytes: lasts_s(self._peering, size_bytes))
        elif isinstance(ask, Claim):
            given = self._grants.claim(ask)
        else:
            raise PeerTrouble("the peer spoke out of turn")
        if isinstance(given, Denial):
            await link.send(Denied(given), limit_s)
            return
        grant = given.grant
        level = logging.INFO if isinstance(ask, Ask) else logging.DEBUG  # pages of prompts are claimed all the time
        log.log(level, "%s: being read by %s", grant.model, grant.peer)
        try:
            await link.send(self._granted(given), limit_s, self._handle.fd)
            while True:
                left_s = grant.expires_s - time.monotonic()
                match await link.receive(QUESTIONS, ASK_MOST_BYTES, max(left_s, 0.0)):
                    case Check(id) if id == grant.id and self._grants.valid(grant):
                        await link.send(Valid(grant.id), limit_s)
                    case Release(id) if id == grant.id:
                        return
                    case _:
                        await link.send(Denied(Denial.NO_GRANT), limit_s)
                        return
        finally:
            self._grants.release(grant)

    def _granted(self, given: Given) -> Granted:
        return granted_of(given, self._peering, self._handle.size_bytes, self._page_bytes, self._bytes_per_s())


def holding_of(
    peering: Peering, models: Sequence[str], offers: Callable[[str], Offer | None], grants: Grants
) -> Holding:  # fmt: skip
    """What is there to be read of these models. On the loop, where offers change."""
    found = ((name, offers(name)) for name in models)
    held = tuple(
        Held(name, offer.layout, offer.checkpoint, offer.size_bytes, len(grants.readers(name)))
        for name, offer in found
        if offer is not None
    )
    return Holding(peering.node, peering.incarnation, held)


def granted_of(
    given: Given, peering: Peering, region_bytes: int, page_bytes: int, bytes_per_s: float | None
) -> Granted:  # fmt: skip
    """What whoever was given it is told of it."""
    grant = given.grant
    return Granted(
        node=peering.node,
        incarnation=peering.incarnation,
        grant=grant.id,
        region_bytes=region_bytes,
        page_bytes=page_bytes,
        runs=tuple(Run(first, count) for first, count in runs(grant.pages)),
        digest=given.offer.digest,
        expires_in_s=max(grant.expires_s - time.monotonic(), 0.0),
        bytes_per_s=bytes_per_s,
    )


def lasts_s(peering: Peering, size_bytes: int) -> float:
    """For how long a grant on so many bytes is given."""
    return peering.grant_s + size_bytes / SLOWEST_BYTES_PER_S
