"""Both ends of a transfer between hosts for tests: a door over a memory with one model, in this process or in one of
its own, and nodes that read from it.

As a program: `far_peers.py SETTINGS` (JSON); it says where its door is, and ends with its stdin, so that none outlives
a killed test.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transfer_peers import fill

from janus_server.cluster.freight import Known
from janus_server.kv.move import Pace, sampled_digest
from janus_server.kv.vmm_cpu import CpuMemory
from janus_server.transfer.door import Door, Pages
from janus_server.transfer.grants import Grants, Offer
from janus_server.transfer.line import Line
from janus_server.transfer.proving import dial, endpoint_of
from janus_server.transfer.pull import Want, pulling
from janus_server.transfer.rundir import Peering
from janus_server.wire.handshake import Identity, Secret
from janus_server.wire.listen import bind
from janus_server.wire.tls import TlsFiles, answering_context, dialling_context, own_digest

REPO = Path(__file__).parents[2]
SECRET = "0123456789abcdef" * 4
PAGE = 1 << 16
FREE = Pace(lambda done: None, lambda: True)


@dataclasses.dataclass
class Shelf:
    """A memory with the model "m", of size_bytes, in every second page from the last one on."""

    memory: CpuMemory
    size_bytes: int
    grants: Grants = dataclasses.field(default_factory=Grants)
    rate: float | None = None
    terms_over: int = -1

    def __post_init__(self) -> None:
        self.memory.slab[:] = content(self.memory.slab.size)
        count = -(-self.size_bytes // self.memory.page_bytes)
        last = self.memory.n_pages - 1
        self.pages = tuple(range(last, last - 2 * count, -2))
        self.window = window_of(self.memory, self.pages, self.size_bytes)
        self.offer: Offer | None = Offer(
            layout="L", checkpoint="C", size_bytes=self.size_bytes, pages=self.pages,
            digest=sampled_digest(self.window),
        )  # fmt: skip

    def offers(self, model: str) -> Offer | None:
        return self.offer if model == "m" else None

    def readable(self) -> Pages:
        return Pages(
            self.memory, self.grants, self.offers, ("m", "n"), lambda: self.rate, lambda term: term <= self.terms_over
        )


@dataclasses.dataclass
class Cluster:
    source: Known

    def names(self) -> tuple[str, ...]:
        return ("reader", "source")

    def far(self, node: str) -> Known | None:
        return self.source if node == "source" else None


@dataclasses.dataclass
class Source:
    shelf: Shelf
    door: Door
    endpoint: str


def content(size: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8)


def window_of(memory: CpuMemory, pages: tuple[int, ...], size: int) -> np.ndarray:
    page = memory.page_bytes
    return np.concatenate([memory.slab[p * page : (p + 1) * page] for p in pages])[:size]


def expected(size: int, page: int = PAGE) -> np.ndarray:
    """What a source of that size holds, whichever process it is in."""
    memory = CpuMemory(2 * -(-size // page), page)
    try:
        return Shelf(memory, size).window
    finally:
        memory.close()


@contextlib.asynccontextmanager
async def source(size: int, tls: TlsFiles | None = None, page: int = PAGE, **peering: Any) -> AsyncIterator[Source]:
    """A door in this process."""
    memory = CpuMemory(2 * -(-size // page), page)
    shelf = Shelf(memory, size)
    listening = bind("127.0.0.1", 0, tls is not None)
    endpoint = endpoint_of("127.0.0.1", listening.getsockname()[1], tls is not None)
    me = Identity("c", "source", "p1", endpoint)
    mine = Peering(node="source", incarnation="p1", run_dir=Path("/nowhere"), **{"reply_s": 1.0, **peering})
    context, digest = (None, b"") if tls is None else (answering_context(tls), own_digest(tls))
    door = Door(listening, me, Secret(SECRET), mine, shelf.readable(), context, digest, knock_s=1.0)
    try:
        yield Source(shelf, door, endpoint)
    finally:
        await door.close()
        memory.close()


def dialler(
    endpoint: str, tls: TlsFiles | None = None, secret: str = SECRET, node: str = "reader", process: str = "p2",
    **peer: str,
) -> Callable[[float], Line]:  # fmt: skip
    me = Identity("c", node, process, "tcp://127.0.0.1:1")
    named = {"cluster": "c", "node": "source", "incarnation": "p1", "endpoint": endpoint, **peer}
    context = None if tls is None else dialling_context(tls)
    return lambda limit_s: dial(me, Identity(**named), Secret(secret), context, limit_s)


def reader(endpoint: str, tls: TlsFiles | None = None, near: bool = False, **more: Any) -> Peering:
    """A node whose cluster knows "source"."""
    settings = {"reply_s": 1.0, "run_dir": Path("/nowhere"), **more}
    return Peering(node="reader", incarnation="p2", others=Cluster(Known(near, dialler(endpoint, tls))), **settings)


def want(size: int, **change: Any) -> Want:
    return Want(**{"model": "m", "layout": "L", "checkpoint": "C", "size_bytes": size, "digest": None, **change})


async def pulled(peering: Peering, size: int, pace: Pace = FREE, **change: Any) -> np.ndarray:
    """The model, with a margin of nines around it that stays."""
    around = np.full(size + 128, 9, np.uint8)
    async with pulling(peering, "source", want(size, **change)) as pull:
        await asyncio.to_thread(fill, pull, around[64 : 64 + size], pace)
        await pull.confirm()
    assert set(around[:64].tolist()) == set(around[64 + size :].tolist()) == {9}
    return around[64 : 64 + size]


@contextlib.contextmanager
def process(size: int, **settings: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A source in a process of its own, and its endpoint."""
    command = [sys.executable, *(["-O"] * sys.flags.optimize), __file__, json.dumps({"size": size, **settings})]
    environment = {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPO, env=environment
    )
    assert child.stdout is not None and child.stdin is not None
    try:
        yield child, child.stdout.readline().strip()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stdin.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def _main(settings: dict[str, Any]) -> None:
    async with source(settings["size"], page=settings.get("page", PAGE)) as one:
        one.shelf.rate = settings.get("rate")
        print(one.endpoint, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main(json.loads(sys.argv[1])))
