"""One cluster under load while something is done to it: what every fault of the chaos bench is given.

A `Scene` knows who leads, waits for what has to happen, and notes when it was struck and who may suffer from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from .chaos_etcd import EtcdServer
from .chaos_load import Load
from .chaos_net import Net
from .chaos_nodes import Nodes

# A node that was gone or stopped takes part again when so many of its clients' requests ended as they should.
_AGAIN: Final = 3
_BUSY, _BUSY_S = 2, 3.0
LEAD_IN_S: Final = 1.0
_BLOCK_BYTES: Final = 4096


@dataclasses.dataclass(slots=True)
class Strike:
    """When something was done, in which term, and to whose clients errors may come of it."""

    at_s: float
    term: int
    lost: frozenset[str]


class Scene:
    """etcd and net where the cluster has them; disk is the small disk of the journals, clock moves all wall clocks;
    running(node) is what it says it runs."""

    def __init__(
        self, nodes: Nodes, load: Load, *, settle_s: float, etcd: list[EtcdServer], net: Net | None,
        disk: Path | None, clock: Callable[[float], None] | None, running: Callable[[str], float],
    ) -> None:  # fmt: skip
        self.nodes, self.load = nodes, load
        self.etcd, self.net, self.disk = etcd, net, disk
        self._clock = clock
        self.running = running
        self.settle_s = settle_s
        self.strikes: list[Strike] = []
        self.doing = ""

    @property
    def hosts(self) -> list[str]:
        """Everything that a host of the network can be cut off from."""
        return [*self.nodes.all, *(["etcd"] if self.etcd else [])]

    def strike(self, what: str, lost: Collection[str] = ()) -> None:
        """It happens now."""
        self.doing = what
        self.strikes.append(Strike(time.monotonic(), self.nodes.term, frozenset(lost)))

    async def elected(self) -> None:
        """Somebody leads who did not when it was struck."""
        term = self.strikes[-1].term
        await self.nodes.until(lambda: self.nodes.term > term, "a new leader is elected")

    async def busy(self, name: str) -> None:
        """Requests run on the node, unless it takes long: what is struck then has something to lose."""
        until_s = time.monotonic() + _BUSY_S
        while time.monotonic() < until_s and await asyncio.to_thread(self.running, name) < _BUSY:
            await asyncio.sleep(0.02)

    async def serves(self, nodes: Collection[str] | None = None) -> None:
        """Requests of all these nodes' clients (of all nodes: by default) end as they should, from now on."""
        names = list(self.nodes.all) if nodes is None else list(nodes)
        before = {name: self.load.right(name) for name in names}
        await self.nodes.until(
            lambda: all(self.load.right(name) >= before[name] + _AGAIN for name in names),
            f"requests to {', '.join(names)} are answered",
        )

    async def back(self, name: str) -> None:
        """Start it again, and wait until it serves."""
        self.doing = f"{name} comes back"
        node = self.nodes[name]
        node.wait()
        node.start()
        await self.nodes.until(lambda: node.url, f"{name} is ready again")

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def others(self, name: str) -> list[str]:
        return [other for other in self.nodes.all if other != name]

    def move_clocks(self, by_s: float) -> None:
        if self._clock is not None:
            self._clock(by_s)

    def fill_disk(self) -> None:
        """Nothing more can be written where the journals are."""
        if self.disk is None:
            return
        with contextlib.suppress(OSError), (self.disk / "ballast").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(_BLOCK_BYTES))

    def empty_disk(self) -> None:
        if self.disk is not None:
            (self.disk / "ballast").unlink(missing_ok=True)
