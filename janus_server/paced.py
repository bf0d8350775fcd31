"""A node that takes as long as an imagined device would: its real, small model runs every step and waits for the rest.

For experiments alone: on two cores one node is then worth one device, and what a whole cluster does can be watched live
beside the simulator, whose physics this is (`sched.roofline`, `sched.source.Links`). `node` makes an `Imagined` of the
file that `--set paced=FILE` names, and puts it into the places where device time is spent: steps and copies of weights.
Nothing else of a node knows of it, and without that setting nothing here is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from janus_server.errors import BadConfig
from janus_server.executor import Engine
from janus_server.kv.host import HostCopy
from janus_server.kv.move import Stopped
from janus_server.kv.pages import PagePool
from janus_server.kv.xtensor import WeightMemory
from janus_server.model.runner import Runner, StepArrays
from janus_server.orders import KnownModel
from janus_server.resident import Mover, Resident
from janus_server.sched.roofline import Physics, Work, physics_of, step
from janus_server.sched.shapes import DeviceShape, ModelShape
from janus_server.sched.source import Link, Links
from janus_server.sched.state import BrainSettings
from janus_server.telemetry import Measured, Pool
from janus_server.types import Batch, Owner, PageKind, Reading

log = logging.getLogger("janus.paced")

# A device is handed its next step while one runs: what the host does between two is hidden where it takes no longer.
HIDDEN_S: Final = 5e-3
# How often a copy that waits looks whether it is still wanted.
_PIECE_S: Final = 0.02


class Pacing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file says, as JSON. models are the shapes that the served ones stand for, by served name; pool_pages
    and host_bytes are the imagined node's memory; brain is how the cluster is led, where this node leads it."""

    device: DeviceShape
    models: dict[str, ModelShape]
    pool_pages: int
    host_bytes: int
    links: Links = Links()
    brain: BrainSettings = BrainSettings()


class Clock(msgspec.Struct, frozen=True):
    """Seconds now, and how to let some pass."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


class Steps:
    """When the steps of one device are over. late counts those that the real model took longer for, late_s by how much
    in all. On the device thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_s = 0.0
        self.steps = self.late = 0
        self.late_s = self.model_s = 0.0

    def begin(self) -> float:
        """When the step that is being staged begins on the imagined device: where it follows upon another, with the
        end of that one."""
        now = self._clock.now()
        return self._due_s if self._due_s <= now <= self._due_s + HIDDEN_S else now

    def end(self, begun_s: float, takes_s: float) -> None:
        """Wait until it is over."""
        self._due_s = begun_s + takes_s
        spare_s = self._due_s - self._clock.now()
        self.steps += 1
        self.model_s += takes_s
        if spare_s >= 0.0:
            self._clock.sleep(spare_s)
        else:
            self.late += 1
            self.late_s -= spare_s


def work_of(batch: Batch) -> Work:
    """What a step computes and reads."""
    tokens = pairs = read = 0
    for chunk in batch.chunks:
        n = len(chunk.tokens)
        end = chunk.start + n
        tokens += n
        pairs += n * (chunk.start + end + 1)
        read += end
    return Work(tokens, pairs / 2, read)


class PacedRunner(Runner):
    """A Runner whose steps take as long as the physics say: all of it passes before what it drew is known."""

    def __init__(self, inner: Runner, physics: Physics, steps: Steps) -> None:
        vars(self).update(vars(inner))  # it is that runner, and waits
        self._physics = physics
        self._steps = steps
        self._begun_s = 0.0

    def stage(self, batch: Batch) -> StepArrays:
        self._begun_s = self._steps.begin()
        return super().stage(batch)

    def read(self, batch: Batch) -> list[Reading]:
        readings = super().read(batch)
        self._steps.end(self._begun_s, float(step(self._physics, work_of(batch)).seconds))
        return readings


class PacedMover(Mover):
    """A Mover whose copies take as long as the imagined weights would over the imagined links of this node."""

    def __init__(self, imagined: Imagined, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._imagined = imagined

    def load(self, resident: Resident, memory: WeightMemory) -> None:
        links = self._imagined.pacing.links
        self._take(resident, links.disk, partial(super().load, resident, memory))

    def wake(self, resident: Resident, memory: WeightMemory, copy: HostCopy) -> None:
        links = self._imagined.pacing.links
        self._take(resident, links.host, partial(super().wake, resident, memory, copy))

    def fork(self, resident: Resident, memory: WeightMemory, *source: Any) -> None:
        links = self._imagined.pacing.links
        self._take(resident, links.near, partial(super().fork, resident, memory, *source))

    def keep(self, resident: Resident, memory: WeightMemory) -> None:
        links = self._imagined.pacing.links
        back = msgspec.structs.replace(links.host, fixed_s=0.0)  # nothing waits for what is only put aside
        self._take(resident, back, partial(super().keep, resident, memory))

    def _take(self, resident: Resident, link: Link, work: Callable[[], None]) -> None:
        """The real work, and then the rest of the time. Copies over one link share it, as they come and go."""
        clock, left_bytes = self._imagined.clock, float(self._imagined.weight_bytes(resident.name))
        since_s = clock.now() + link.fixed_s
        work()
        with resident.laps.of("copy_s"), self._imagined.lanes.on(link) as sharing:
            while left_bytes >= 1.0:
                if resident.stop:
                    raise Stopped
                rate = link.bytes_s / sharing()
                clock.sleep(min(max(since_s - clock.now(), 0.0) + left_bytes / rate, _PIECE_S))
                now = clock.now()
                left_bytes -= max(0.0, now - since_s) * rate
                since_s = max(since_s, now)


class Lanes:
    """How many copies are on each link of this node. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._on: Counter[Link] = Counter()

    @contextlib.contextmanager
    def on(self, link: Link) -> Iterator[Callable[[], int]]:
        """Be one of them; what it gives tells how many there are."""
        with self._lock:
            self._on[link] += 1
        try:
            yield lambda: self._on[link]
        finally:
            with self._lock:
                self._on[link] -= 1


class Imagined:
    """The device that one node stands for."""

    def __init__(self, pacing: Pacing, clock: Clock = Clock()) -> None:  # noqa: B008 - frozen
        self.pacing = pacing
        self.clock = clock
        self.steps = Steps(clock)
        self.lanes = Lanes()

    @classmethod
    def of_file(cls, path: Path, models: Sequence[str]) -> Imagined:
        """BadConfig where the file says nothing of one of the models that are served."""
        try:
            pacing = msgspec.json.decode(path.read_bytes(), type=Pacing)
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            raise BadConfig(f"paced: {path}: {error}") from None
        lacking = [name for name in models if name not in pacing.models]
        if lacking:
            raise BadConfig(f"paced: {path} does not say what {', '.join(lacking)} stands for")
        log.warning("this node is PACED: steps and copies of weights take as long as they would on %s; its figures are "
                    "of that device and not of this machine", pacing.device.name)  # fmt: skip
        return cls(pacing)

    def weight_bytes(self, model: str) -> int:
        return round(self.pacing.models[model].weight_bytes)

    def hold_back(self, pool: PagePool) -> None:
        """Leave as many pages as the imagined device has: a small model's scratch takes a larger part of memory."""
        spare = pool.free_pages - self.pacing.pool_pages
        if spare < 0:
            raise BadConfig(f"paced: {self.pacing.pool_pages} pages are wanted and {pool.free_pages} are free; raise "
                            "--memory")  # fmt: skip
        held = pool.reserve_low(spare, Owner("held back", PageKind.WEIGHTS))
        if held is not None:
            held.commit()

    def engine(self, engine: Engine) -> Engine:
        """The same, on the imagined device."""
        physics = physics_of(self.pacing.models[engine.model], self.pacing.device, 1)
        runner = PacedRunner(engine.runner, physics, self.steps)
        return dataclasses.replace(engine, runner=runner, weight_bytes=self.weight_bytes(engine.model))

    def mover(self, *arguments: Any) -> Mover:
        return PacedMover(self, *arguments)

    def known(self, models: Sequence[KnownModel]) -> tuple[KnownModel, ...]:
        """What a leader is told of them. Pages are the real ones."""
        links = self.pacing.links
        sized = [(known, self.weight_bytes(known.model)) for known in models]
        return tuple(
            msgspec.structs.replace(
                known,
                host_bytes=size_bytes,
                load_s=links.disk.seconds(size_bytes),
                wake_s=links.host.seconds(size_bytes),
            )
            for known, size_bytes in sized
        )

    def foreseen(self, models: Mapping[str, Measured], pool: Pool) -> tuple[BrainSettings, dict[str, Measured], Pool]:
        """How the cluster is led, what is measured, and of which pool: an imagined page holds as many tokens."""
        found = {name: msgspec.structs.replace(one, shape=self.pacing.models[name]) for name, one in models.items()}
        pages = [round(one.shape.kv_bytes * one.page_tokens) for one in found.values()]
        return self.pacing.brain, found, msgspec.structs.replace(pool, page_bytes=max(pages, default=pool.page_bytes))

    def told(self) -> str:
        """How well the pace was kept."""
        steps = self.steps
        return (
            f"paced: {steps.steps} steps of {steps.model_s:.1f} s in all; {steps.late} were longer than they should "
            f"be, by {steps.late_s:.2f} s together"
        )
