"""One model on this node, and what copy threads do to its weights: provide memory, fill, map, check, keep a copy.

`lifecycle` runs the `Mover`'s methods on a copy thread, one at a time for a model. A move goes at full speed while no
request runs on the node and at the set rate while one does; it learns of a change at its next piece. It decides nothing
and touches no stage.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from janus_server.catalogue import OpenedModel, reopened
from janus_server.config import ServeConfig
from janus_server.errors import BadModel, require
from janus_server.executor import Engine
from janus_server.flow import Flow
from janus_server.instance import ServedModel
from janus_server.kernels.table import Kernels
from janus_server.kv.host import HostCopies, HostCopy
from janus_server.kv.move import Clock, Pace, Stopped, full_digest, move, sampled_digest
from janus_server.kv.xtensor import WeightMemory, XTensor
from janus_server.model.load import load_weights
from janus_server.model.weights import Weights
from janus_server.orders import Done, Failed, Order, Phases, Stage
from janus_server.transfer.pull import Pull

log = logging.getLogger("janus.lifecycle")

Progress = Callable[[str, int, int], None]


class NotNow(Exception):
    """An order cannot be carried out as things stand; nothing was changed. The Brain may try again."""


class Deadlines(msgspec.Struct, frozen=True):
    """When a transition has hung: after floor_s, and `factor` times what it takes at the slowest that is still fine."""

    floor_s: float = 30.0
    factor: float = 2.0
    slowest_bytes_per_s: float = 50e6  # a disk far away, or beside other traffic

    def limit_s(self, size_bytes: int, copy_bytes_per_s: float | None) -> float:
        """Example: 1 GB at 50 MB/s takes 20 s; its limit is 70 s."""
        slowest = min(self.slowest_bytes_per_s, copy_bytes_per_s or self.slowest_bytes_per_s)
        return self.floor_s + self.factor * size_bytes / slowest


DEADLINES: Final = Deadlines()


class Laps:
    """Seconds by phase of the transition under way; whoever works on it adds to them, one after the other."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    @contextlib.contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Count what happens within to a field of `Phases`."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self._spent[phase] = self._spent.get(phase, 0.0) + time.monotonic() - start_s

    def phases(self) -> Phases:
        return Phases(**self._spent)


class Resident:
    """One model of the catalogue on this node: its stage, and what was made for it so far."""

    def __init__(self, opened: OpenedModel, flow: Flow) -> None:
        self.opened = opened
        self.flow = flow
        self.stage = Stage.COLD
        self.served: ServedModel | None = None
        self.engine: Engine | None = None
        self.memory: WeightMemory | None = None
        self.weights: Weights | None = None
        self.digest: int | None = None  # of the weights as they were first filled
        self.trouble: Exception | None = None  # what the last order ended with, for whoever reads the log
        self.stop = False  # the transition under way shall end at its next piece
        self.laps = Laps()  # of the transition under way, or the last one
        self.preparing = asyncio.Lock()
        self.changing = asyncio.Lock()
        self.last: tuple[Order, Done | Failed] | None = None  # the last order and its end

    @property
    def name(self) -> str:
        return self.opened.name

    def window(self, xtensor: XTensor) -> WeightMemory:
        """Its addresses, made once: nothing lies behind them until it is brought in."""
        if self.memory is None:
            self.memory = xtensor.weights(self.name, self.opened.placed.total_bytes)
        return self.memory


class Mover:
    """The work of the copy threads. Every method runs on one; what it may raise rolls the transition back."""

    def __init__(
        self,
        config: ServeConfig,
        kernels: Kernels,
        copies: HostCopies,
        progress: Progress,
        bytes_per_s: Callable[[], float | None],
    ) -> None:
        """bytes_per_s() is the rate that moves may have now; None is full speed."""
        self._config = config
        self._kernels = kernels
        self._copies = copies
        self._progress = progress
        self._bytes_per_s = bytes_per_s

    def prepare(self, resident: Resident, memory: WeightMemory) -> None:
        """Have the system provide the reserved pages: no first touch is left for whoever fills them."""
        with resident.laps.of("touch_s"):
            memory.prepare(self._pace(resident, 0))

    def load(self, resident: Resident, memory: WeightMemory) -> None:
        """Map the reserved pages and read the checkpoint into them."""
        opened = resident.opened = reopened(resident.opened)

        clock, moved_bytes = Clock(self._pace(resident, 0)), 0

        def progress(done: int, total: int) -> None:
            nonlocal moved_bytes
            if resident.stop:
                raise Stopped
            self._progress(opened.name, done, total)
            clock.next_piece_bytes()
            clock.wait(done - moved_bytes)
            moved_bytes = done

        with resident.laps.of("map_s"):
            memory.map(self.between(resident))
        with resident.laps.of("copy_s"):
            resident.weights = load_weights(
                opened.checkpoint, opened.placed, self._kernels, memory.array, progress, threads=self._config.threads
            )
        with resident.laps.of("verify_s"):
            digest = sampled_digest(memory.array)
            if resident.digest not in (None, digest):
                raise BadModel(f"{opened.name}: its files hold other weights than before; restart the server")
            resident.digest = digest

    def wake(self, resident: Resident, memory: WeightMemory, copy: HostCopy) -> None:
        """Copy the host copy into the reserved pages and map them."""
        with resident.laps.of("map_s"):
            memory.map(self.between(resident))
        with resident.laps.of("copy_s"):
            pace = self._pace(resident, copy.size_bytes)
            move(memory.parts(), copy.parts, pace, self._kernels.copy_bytes, self._config.threads)
        with resident.laps.of("verify_s"):
            self._verify(resident, memory)

    def fork(self, resident: Resident, memory: WeightMemory, pull: Pull) -> None:
        """Copy a peer's pages into the reserved ones and map them. PeerTrouble."""
        with resident.laps.of("map_s"):
            pull.attach()
            memory.map(self.between(resident))
        with resident.laps.of("copy_s"):
            pace = self._pace(resident, memory.size_bytes)
            pull.copy(memory.parts(), pace, self._kernels.copy_bytes, self._config.threads)
        with resident.laps.of("verify_s"):
            pull.verify(memory.array)

    def keep(self, resident: Resident, memory: WeightMemory) -> None:
        """Fill a host copy from the pages."""
        copy = self._copies.take(resident.name, memory.size_bytes)
        if copy is None:
            raise NotNow("the host has no memory for its copy")
        pace = self._pace(resident, memory.size_bytes)
        with resident.laps.of("touch_s"):
            self._copies.prepare(copy, pace)
        with resident.laps.of("copy_s"):
            move(copy.parts, [memory.array], pace, self._kernels.copy_bytes, self._config.threads)
        copy.digest = resident.digest

    def _verify(self, resident: Resident, memory: WeightMemory) -> None:
        """The bytes are those that were first loaded: by samples always, every one of them when debugging."""
        require(sampled_digest(memory.array) == resident.digest, f"{resident.name}: other bytes after the move")
        copy = self._copies.get(resident.name)
        if log.isEnabledFor(logging.DEBUG) and copy is not None:
            require(full_digest([memory.array]) == full_digest(copy.parts), f"{resident.name}: other bytes in the copy")

    def between(self, resident: Resident) -> Callable[[int], None]:
        """Rests between parts of mapping and unmapping, which take a quarter of what copying as much does."""
        clock = Clock(self._pace(resident, 0))

        def rest(size_bytes: int) -> None:
            clock.next_piece_bytes()
            clock.wait(size_bytes // 4)

        return rest

    def _pace(self, resident: Resident, total: int) -> Pace:
        return Pace(
            lambda done: self._progress(resident.name, done, total), lambda: not resident.stop, self._bytes_per_s
        )
