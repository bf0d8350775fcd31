"""The life of models on this node: executes the Brain's orders, each wholly or not at all. It decides nothing.

To Active it is the checkpoint (LOAD), the host copy (WAKE) or a peer's pages (FORK) that is read; Active → Warm keeps
a copy (SLEEP), and what a peer is reading stays. A transition
reserves pages, moves bytes on a copy thread, verifies, and commits on the device thread; whatever fails on the way is
undone in reverse order and the model stands where it stood. Runtime state (tokenizer, layout, decoder with its
captured step, address range) is made once and kept: only bytes move afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from janus_server.catalogue import OpenedModel, tokenizer_of
from janus_server.config import ServeConfig
from janus_server.engine import engine_of
from janus_server.errors import BadConfig, BadModel, require
from janus_server.executor import DeviceThread, Engine
from janus_server.flow import Flow
from janus_server.fork import offer_of, want_of
from janus_server.instance import ServedModel, Streams
from janus_server.kernels.table import Kernels
from janus_server.kv.host import HostCopies
from janus_server.kv.move import Pace, Stopped, full_digest, move, sampled_digest
from janus_server.kv.xtensor import WeightMemory, XTensor
from janus_server.model.load import load_weights
from janus_server.model.weights import Weights, bind
from janus_server.observe.log import decision
from janus_server.orders import Busy, Done, Failed, KnownModel, Order, Report, Stage, Verb
from janus_server.sched.scarcity import Scarcity
from janus_server.tokens.render import Renderers
from janus_server.transfer.frames import PeerTrouble
from janus_server.transfer.grants import BeingRead, Grants, Offer
from janus_server.transfer.pull import pulling
from janus_server.transfer.rundir import Peering
from janus_server.types import ModelCard
from janus_server.units import format_bytes

log = logging.getLogger("janus.lifecycle")

T = TypeVar("T")
Progress = Callable[[str, int, int], None]

COPY_THREADS = 2
UNREADABLE = "the model could not be loaded; the server's log says why"


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
        self.preparing = asyncio.Lock()
        self.changing = asyncio.Lock()
        self.last: tuple[Order, Done | Failed] | None = None  # the last order and its end

    @property
    def name(self) -> str:
        return self.opened.name


class NotNow(Exception):
    """An order cannot be carried out as things stand; nothing was changed. The Brain may try again."""


class Lifecycle:
    """Owns every model's stage on the node. Everything but the copying itself runs on the event loop."""

    def __init__(
        self,
        config: ServeConfig,
        catalogue: tuple[OpenedModel, ...],
        xtensor: XTensor,
        kernels: Kernels,
        device: DeviceThread,
        scarcity: Scarcity,
        streams: Streams,
        renderers: Renderers,
        copies: HostCopies,
        changed: Callable[[], None],
        progress: Progress,
        peering: Peering | None = None,
    ) -> None:
        self._config = config
        self._xtensor = xtensor
        self._kernels = kernels
        self._device = device
        self._scarcity = scarcity
        self._streams = streams
        self._renderers = renderers
        self._copies = copies
        self._progress = progress
        self._peering = peering
        self.grants = Grants()
        self.cards: Mapping[str, ModelCard] = {one.name: one.card(config.prefix_cache) for one in catalogue}
        self._threads = ThreadPoolExecutor(COPY_THREADS, "janus-copy")
        self.residents: Mapping[str, Resident] = {
            one.name: Resident(one, Flow(one.name, device, changed)) for one in catalogue
        }

    def known(self) -> tuple[KnownModel, ...]:
        return tuple(resident.opened.known() for resident in self.residents.values())

    def report(self, node: str) -> Report:
        """How busy every Active model is."""
        now = time.monotonic()
        busy = {
            name: Busy(resident.flow.running, 0, now - resident.flow.idle_since_s)
            for name, resident in self.residents.items()
            if resident.stage is Stage.ACTIVE
        }
        return Report(node, busy)

    async def prepare(self, name: str) -> ServedModel:
        """The model as it is asked for, whatever its stage: its tokenizer is read at first. BadModel, OSError."""
        resident = self.residents[name]
        if resident.served is None:
            async with resident.preparing:
                if resident.served is None:
                    resident.served = await self._served(resident)
        return resident.served

    async def obey(self, order: Order) -> Done | Failed | None:
        """Carry out one order; None for those that take effect at once and have no end."""
        resident = self.residents[order.model]
        decision(order.why, kind=order.verb.value, model=order.model)
        match order.verb:
            case Verb.DRAIN:
                resident.flow.hold()
                return None
            case Verb.SERVE:
                resident.flow.serve()
                return None
            case Verb.EVICT:
                self._copies.drop(order.model)
                if resident.stage is Stage.WARM:
                    resident.stage = Stage.COLD
                return self._done(order, resident, 0.0)
            case _:
                async with resident.changing:
                    if resident.last is None or resident.last[0] != order:  # told twice, it is done once
                        resident.last = order, await self._carry_out(order, resident)
                    return resident.last[1]

    def offer(self, name: str) -> Offer | None:
        """The model's weights for peers to read; None unless it is Active."""
        resident = self.residents.get(name)
        if resident is None or resident.stage is not Stage.ACTIVE:
            return None
        return offer_of(resident.opened, self._kernels, resident.memory, resident.digest)

    def lost(self, name: str) -> Stage:
        """A model's instance was torn down on the device thread: its engine is gone, its pages are free again."""
        resident = self.residents[name]
        resident.flow.hold()
        resident.engine = None
        resident.stage = Stage.COLD if self._copies.get(name) is None else Stage.WARM
        return resident.stage

    def release_lost(self, name: str) -> None:
        """Give the weights of a torn-down instance back. On the device thread."""
        memory = self.residents[name].memory
        if memory is not None:
            with self.grants.revoked(name):
                memory.unmap()
                memory.release()

    def trouble(self, name: str) -> Exception:
        """What went wrong with the model's last order."""
        return self.residents[name].trouble or BadModel(f"{name}: {UNREADABLE}")

    def has_copy(self, name: str) -> bool:
        return self._copies.get(name) is not None

    def close(self) -> None:
        """End the copy threads; orders under way were cancelled before."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    # Orders

    async def _carry_out(self, order: Order, resident: Resident) -> Done | Failed:
        start_s = time.monotonic()
        if resident.stage is Stage.ACTIVE and order.verb in (Verb.LOAD, Verb.WAKE, Verb.FORK):
            return self._done(order, resident, 0.0)
        resident.stop, resident.trouble = False, None
        steps: Mapping[Verb, Callable[[Resident], Awaitable[None]]] = {
            Verb.LOAD: self._load, Verb.WAKE: self._wake, Verb.SLEEP: self._sleep, Verb.UNLOAD: self._unload,
            Verb.FORK: lambda resident: self._fork(resident, order.source),
        }  # fmt: skip
        try:
            await steps[order.verb](resident)
        except (NotNow, PeerTrouble, BeingRead) as reason:
            log.info("%s: %s failed: %s", order.model, order.verb.value, reason)
            return Failed(order.id, resident.stage, self.has_copy(order.model), str(reason))
        except (BadModel, BadConfig) as error:
            log.error("%s: %s", order.model, error)
            resident.trouble = error
            return Failed(order.id, resident.stage, self.has_copy(order.model), UNREADABLE, lasting=True)
        except (OSError, Stopped) as error:
            resident.trouble = error
            log.error("%s: %s failed: %s", order.model, order.verb.value, type(error).__name__, exc_info=error)
            return Failed(order.id, resident.stage, self.has_copy(order.model), UNREADABLE)
        took_s = time.monotonic() - start_s
        size = format_bytes(resident.opened.placed.total_bytes)
        decision(
            f"{order.model}: {order.verb.value} of {size} took {took_s:.3f} s; it is {resident.stage.value}",
            kind="done", model=order.model, stage=resident.stage.value, seconds=round(took_s, 3),
        )  # fmt: skip
        return self._done(order, resident, took_s)

    def _done(self, order: Order, resident: Resident, took_s: float) -> Done:
        return Done(order.id, resident.stage, self.has_copy(order.model), took_s)

    async def _load(self, resident: Resident) -> None:
        await self._bring_in(resident, lambda memory: self._fill(resident, memory))

    async def _wake(self, resident: Resident) -> None:
        copy = self._copies.get(resident.name)
        if copy is None:
            raise NotNow("there is no host copy to wake from")

        def fill(memory: WeightMemory) -> None:
            move([memory.array], copy.parts, self._pace(resident, copy.size_bytes))
            self._verify(resident, memory)

        await self._bring_in(resident, fill)

    async def _fork(self, resident: Resident, source: str | None) -> None:
        if self._peering is None or source is None:
            raise NotNow("this node has no peers to copy from")
        want = want_of(resident.opened, self._kernels, resident.digest)
        async with pulling(self._peering, source, want) as pull:

            def fill(memory: WeightMemory) -> None:
                pull.fill(memory.array, self._pace(resident, want.size_bytes))

            async def confirm() -> None:
                await pull.confirm()
                resident.digest = pull.digest

            await self._bring_in(resident, fill, confirm)

    async def _bring_in(
        self,
        resident: Resident,
        fill: Callable[[WeightMemory], None],
        confirm: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Reserve pages, map them, fill them, commit, attach and serve; or leave everything as it was.

        What `confirm` raises at the last moment undoes it all too.
        """
        memory = resident.memory
        if memory is None:
            memory = resident.memory = self._xtensor.weights(resident.name, resident.opened.placed.total_bytes)
        if not await self._on_device(lambda: self._scarcity.clear(memory.n_pages) and memory.reserve()):
            raise NotNow("its pages are not free yet")
        prepared = asyncio.ensure_future(self.prepare(resident.name))
        try:
            await self._on_copy_thread(resident, memory.map)
            await self._on_copy_thread(resident, lambda: fill(memory))
            engine = await self._on_copy_thread(resident, lambda: self._engine(resident, memory))
            await prepared
            if confirm is not None:
                await confirm()
            await self._on_device(memory.commit)
        except BaseException:
            # A cancel that comes while the device thread commits finds the pages committed: they go back all the same.
            await asyncio.shield(self._on_copy_thread(resident, memory.unmap))
            await asyncio.shield(self._on_device(memory.release))
            raise
        finally:
            prepared.cancel()
        await self._on_device(lambda: self._device.attach(engine))
        resident.stage = Stage.ACTIVE
        resident.flow.serve()

    async def _sleep(self, resident: Resident) -> None:
        with self.grants.barred(resident.name):
            await self._take_out(resident, keep=True)

    async def _unload(self, resident: Resident) -> None:
        with self.grants.barred(resident.name):
            await self._take_out(resident, keep=False)

    async def _take_out(self, resident: Resident, keep: bool) -> None:
        """Stop the model's turns, keep a copy where asked to, then give its pages back."""
        name, memory, engine = resident.name, resident.memory, resident.engine
        if memory is None or engine is None:
            raise NotNow("it is not on the device")
        resident.flow.hold()
        if not await self._on_device(lambda: self._device.detach(name)):
            resident.flow.serve()
            raise NotNow("requests came for it")
        try:
            if keep and self._copies.get(name) is None:
                await self._on_copy_thread(resident, lambda: self._copy_out(resident, memory))
        except BaseException:
            self._copies.drop(name)
            await asyncio.shield(self._on_device(lambda: self._device.attach(engine)))
            resident.flow.serve()
            raise
        if not keep:
            self._copies.drop(name)
        await self._on_copy_thread(resident, memory.unmap)
        await self._on_device(memory.release)
        resident.stage = Stage.WARM if keep else Stage.COLD

    # On a copy thread

    def _fill(self, resident: Resident, memory: WeightMemory) -> None:
        """Read the checkpoint into mapped pages."""
        opened = resident.opened

        def progress(done: int, total: int) -> None:
            if resident.stop:
                raise Stopped
            self._progress(opened.name, done, total)

        resident.weights = load_weights(
            opened.checkpoint, opened.placed, self._kernels, memory.array, progress, threads=self._config.threads
        )
        digest = sampled_digest(memory.array)
        require(resident.digest in (None, digest), f"{opened.name}: a second load gave other weights")
        resident.digest = digest

    def _copy_out(self, resident: Resident, memory: WeightMemory) -> None:
        copy = self._copies.take(resident.name, memory.size_bytes)
        if copy is None:
            raise NotNow("the host has no memory for its copy")
        move(copy.parts, [memory.array], self._pace(resident, memory.size_bytes))
        copy.digest = resident.digest

    def _verify(self, resident: Resident, memory: WeightMemory) -> None:
        """The bytes are those that were first loaded: by samples always, every one of them when debugging."""
        require(sampled_digest(memory.array) == resident.digest, f"{resident.name}: other bytes after the move")
        copy = self._copies.get(resident.name)
        if log.isEnabledFor(logging.DEBUG) and copy is not None:
            require(full_digest([memory.array]) == full_digest(copy.parts), f"{resident.name}: other bytes in the copy")

    def _pace(self, resident: Resident, total: int) -> Pace:
        return Pace(lambda done: self._progress(resident.name, done, total), lambda: not resident.stop)

    def _engine(self, resident: Resident, memory: WeightMemory) -> Engine:
        """The device side, made at the first load and kept: the addresses it is bound to stay the same."""
        if resident.engine is None:
            opened = resident.opened
            weights = resident.weights or bind(opened.placed, self._kernels, memory.array)
            resident.engine = engine_of(opened, weights, self._config, self._xtensor, self._kernels, self._scarcity)
        return resident.engine

    async def _served(self, resident: Resident) -> ServedModel:
        """The model's face, with its tokenizer. BadModel where that cannot be read."""
        opened = resident.opened
        tokenizer = await asyncio.to_thread(tokenizer_of, opened, self._renderers)
        return ServedModel(self.cards[opened.name], opened.target(tokenizer), tokenizer, resident.flow, self._streams)

    async def _on_device(self, work: Callable[[], T]) -> T:
        """Run `work` between two steps. Once asked for it is done, also when this is cancelled."""
        answer = asyncio.wrap_future(self._device.ask(work))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await asyncio.wait([answer])
            raise

    async def _on_copy_thread(self, resident: Resident, work: Callable[[], T]) -> T:
        """Run `work` on a copy thread. When this is cancelled, the work is told and has ended before it is left:
        nobody may unmap what a thread still writes."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            resident.stop = True
            await asyncio.wait([running])
            raise
