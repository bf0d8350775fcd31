"""Both ends of a transfer for tests: a served memory with one model, its readers, an impostor that obeys no rule."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from janus_server.kv.move import Pace, sampled_digest
from janus_server.kv.vmm_cpu import CpuMemory
from janus_server.transfer.frames import ASK_MOST_BYTES, QUESTIONS, VERSION, Ask, Link
from janus_server.transfer.grants import Grants, Offer
from janus_server.transfer.pull import Pull, Want, pulling
from janus_server.transfer.rundir import Peering, RunDirectory
from janus_server.transfer.serving import PeerServer

PAGE = 1 << 16
PAGES = (3, 4, 9, 1)
SIZE = 4 * PAGE - 100
FREE = Pace(lambda done: None, lambda: True)


@dataclasses.dataclass
class Source:
    """A served memory whose model "m" lies in PAGES; `offer` may be changed."""

    memory: CpuMemory
    peering: Peering
    grants: Grants
    offer: Offer | None
    bytes: np.ndarray
    server: PeerServer | None = None

    def offers(self, model: str) -> Offer | None:
        return self.offer if model == "m" else None

    @property
    def want(self) -> Want:
        return Want(model="m", layout="L", checkpoint="C", size_bytes=SIZE, digest=None)


@contextlib.asynccontextmanager
async def served(run_dir: Path, **peering: Any) -> AsyncIterator[Source]:
    memory = CpuMemory(12, PAGE)
    filler = np.random.default_rng(1)
    memory.slab[:] = filler.integers(0, 256, memory.slab.size, dtype=np.uint8)
    window = np.concatenate([memory.slab[p * PAGE : (p + 1) * PAGE] for p in PAGES])[:SIZE]
    offer = Offer(layout="L", checkpoint="C", size_bytes=SIZE, pages=PAGES, digest=sampled_digest(window))
    settings = Peering(node="source", incarnation="i1", run_dir=run_dir, **{"reply_s": 0.3, **peering})
    source = Source(memory, settings, Grants(), offer, window)
    source.server = PeerServer(settings, memory, source.grants, source.offers)
    try:
        yield source
    finally:
        await source.server.close()
        memory.close()


def reader(run_dir: Path, **more: Any) -> Peering:
    return Peering(node="reader", incarnation="i2", run_dir=run_dir, **{"reply_s": 0.3, **more})


def raw(run_dir: Path) -> socket.socket:
    with RunDirectory(run_dir) as directory:
        connection = directory.connect("source")
    connection.setblocking(True)
    connection.settimeout(5.0)
    return connection


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def fill(pull: Pull, target: np.ndarray, pace: Pace) -> None:
    """All that copy threads do of a pull."""
    pull.attach()
    pull.copy([target], pace)
    pull.verify(target)


async def pulled(source: Source, peering: Peering, **want: Any) -> np.ndarray:
    target = np.zeros(SIZE, np.uint8)
    async with pulling(peering, "source", msgspec.structs.replace(source.want, **want)) as pull:
        await asyncio.to_thread(fill, pull, target, FREE)
        await pull.confirm()
    return target


def asking(**change: Any) -> Ask:
    fields = {"node": "r", "incarnation": "i", "model": "m", "layout": "L", "checkpoint": "C", "size_bytes": SIZE}
    return Ask(**{**fields, **change})


def frame(body: bytes, version: int = VERSION, size: int | None = None) -> bytes:
    return struct.pack(">HI", version, len(body) if size is None else size) + body


def encoded(message: Any) -> bytes:
    return frame(msgspec.msgpack.encode(message))


@contextlib.asynccontextmanager
async def impostor(run_dir: Path, play: Callable[[Link], Any]) -> AsyncIterator[None]:
    """A process of ours that is called "source" and plays by no rules."""
    with RunDirectory(run_dir) as directory:
        listening, lock = directory.listen("source")

        async def run() -> None:
            connection, _ = await asyncio.get_running_loop().sock_accept(listening)
            link = Link(connection)
            try:
                await link.receive(QUESTIONS, ASK_MOST_BYTES, 5.0)
                await play(link)
                await asyncio.sleep(30)
            finally:
                link.close()

        task = asyncio.create_task(run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            directory.forget("source")
            listening.close()
            os.close(lock)
