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

import msgspec

from janus_server.catalogue import OpenedModel, tokenizer_of
from janus_server.config import ServeConfig
from janus_server.engine import engine_of, imagined_of
from janus_server.errors import BadConfig, BadModel
from janus_server.executor import DeviceThread, Engine
from janus_server.flow import Desk, Entrance, Flow, Outside
from janus_server.fork import offer_of, want_of
from janus_server.instance import ServedModel
from janus_server.kernels.table import Kernels
from janus_server.kv.host import HostCopies
from janus_server.kv.move import Stopped
from janus_server.kv.xtensor import WeightMemory, XTensor
from janus_server.model.weights import bind
from janus_server.observe.log import decision
from janus_server.orders import Busy, Done, Failed, KnownModel, Order, Phases, Report, Stage, Verb
from janus_server.resident import DEADLINES, Deadlines, Laps, Mover, NotNow, Progress, Resident
from janus_server.sched.scarcity import Scarcity
from janus_server.streams import Streams
from janus_server.threads import ended, whole
from janus_server.tokens.render import Renderers
from janus_server.transfer.frames import PeerTrouble
from janus_server.transfer.grants import BeingRead, Grants, Offer
from janus_server.transfer.pull import pulling
from janus_server.transfer.rundir import Peering
from janus_server.types import ModelCard
from janus_server.units import format_bytes

log = logging.getLogger("janus.lifecycle")

T = TypeVar("T")

COPY_THREADS = 2
TOO_LONG = "it took longer than it may, and was undone"
UNREADABLE = "the model could not be loaded; the server's log says why"


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
        desk: Desk,
        progress: Progress,
        peering: Peering | None = None,
        deadlines: Deadlines = DEADLINES,
        outside: Outside | None = None,
    ) -> None:
        self._outside = outside
        self._config = config
        self._xtensor = xtensor
        self._kernels = kernels
        self._device = device
        self._scarcity = scarcity
        self._streams = streams
        self._renderers = renderers
        self._copies = copies
        self._peering = peering
        self._deadlines = deadlines
        self.imagined = imagined_of(config)
        if self.imagined is not None:
            self.imagined.hold_back(xtensor.pool)
        mover = Mover if self.imagined is None else self.imagined.mover
        self._mover = mover(config, kernels, copies, progress, self.copy_rate)
        self.grants = Grants()
        self.cards: Mapping[str, ModelCard] = {one.name: one.card(config.prefix_cache) for one in catalogue}
        self._threads = ThreadPoolExecutor(COPY_THREADS, "janus-copy")
        self.residents: Mapping[str, Resident] = {
            one.name: Resident(one, Flow(one.name, device, desk)) for one in catalogue
        }

    def known(self) -> tuple[KnownModel, ...]:
        known = tuple(resident.opened.known() for resident in self.residents.values())
        return known if self.imagined is None else self.imagined.known(known)

    @property
    def host_bytes(self) -> int:
        """The budget for host copies, as a leader is told of it."""
        return self._config.host_memory_bytes if self.imagined is None else self.imagined.pacing.host_bytes

    @property
    def serving(self) -> bool:
        """True while requests run, whose steps a copy would hold up. Any thread."""
        return any(resident.flow.running for resident in self.residents.values())

    @property
    def resting(self) -> bool:
        """True while no request runs and no weights move. Any thread."""
        return not self.serving and not any(resident.changing.locked() for resident in self.residents.values())

    def report(self, node: str) -> Report:
        """How busy every Active model is."""
        now = time.monotonic()
        busy = {
            name: Busy(resident.flow.running, resident.flow.ready, now - resident.flow.idle_since_s)
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
                    tokenizer = await asyncio.to_thread(tokenizer_of, resident.opened, self._renderers)
                    target = resident.opened.target(tokenizer)
                    flow: Entrance = resident.flow if self._outside is None else self._outside.line(name)
                    resident.served = ServedModel(self.cards[name], target, tokenizer, flow, self._streams)
        return resident.served

    async def prepare_engine(self, name: str) -> None:
        """Make what is bound to the model's addresses, which takes no byte of its weights."""
        resident = self.residents[name]
        async with resident.changing:
            await self._on_copy_thread(resident, lambda: self._engine(resident, resident.window(self._xtensor)))

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
                try:
                    memory.unmap()
                except OSError as error:
                    log.warning("%s: its addresses stay mapped: %s", name, error.strerror)
                memory.release()

    def trouble(self, name: str) -> Exception:
        """What went wrong with the model's last order."""
        return self.residents[name].trouble or BadModel(f"{name}: {UNREADABLE}")

    def has_copy(self, name: str) -> bool:
        return self._copies.get(name) is not None

    def close(self) -> None:
        """End the copy threads; orders under way were cancelled before."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self.imagined is not None:
            log.warning("%s", self.imagined.told())

    # Orders

    async def _carry_out(self, order: Order, resident: Resident) -> Done | Failed:
        start_s, before = time.monotonic(), resident.stage
        if resident.stage is Stage.ACTIVE and order.verb.raises:
            return self._done(order, resident, 0.0)
        resident.stop, resident.trouble, resident.laps = False, None, Laps()
        steps: Mapping[Verb, Callable[[Resident], Awaitable[None]]] = {
            Verb.LOAD: self._load, Verb.WAKE: self._wake, Verb.SLEEP: self._sleep, Verb.UNLOAD: self._unload,
            Verb.FORK: lambda resident: self._fork(resident, order),
        }  # fmt: skip
        limit_s = self._deadlines.limit_s(resident.opened.placed.total_bytes, self._config.copy_bytes_per_s)
        try:
            async with asyncio.timeout(limit_s) as limit:
                await steps[order.verb](resident)
        except (NotNow, PeerTrouble, BeingRead) as reason:
            log.info("%s: %s failed: %s", order.model, order.verb.value, reason)
            return self._failed(order, resident, str(reason))
        except (BadModel, BadConfig) as error:
            log.error("%s: %s", order.model, error)
            resident.trouble = error
            gone = isinstance(error.__cause__, OSError)  # a file that cannot be opened or read now may come back
            return self._failed(order, resident, UNREADABLE, lasting=not gone)
        except (OSError, Stopped) as error:
            if limit.expired() and resident.stage is not before:  # time was over when there was nothing left to undo
                return self._done(order, resident, time.monotonic() - start_s)
            resident.trouble = error
            if limit.expired():
                log.error("%s: %s was undone: it took longer than %.0f s", order.model, order.verb.value, limit_s)
                return self._failed(order, resident, TOO_LONG)
            log.error("%s: %s failed: %s", order.model, order.verb.value, type(error).__name__, exc_info=error)
            return self._failed(order, resident, UNREADABLE)
        took_s, phases = time.monotonic() - start_s, resident.laps.phases()
        size = format_bytes(resident.opened.placed.total_bytes)
        decision(
            f"{order.model}: {order.verb.value} of {size} took {took_s:.3f} s; it is {resident.stage.value}",
            kind="done", model=order.model, stage=resident.stage.value, seconds=round(took_s, 3),
            **{name: round(spent_s, 4) for name, spent_s in msgspec.structs.asdict(phases).items() if spent_s},
        )  # fmt: skip
        return self._done(order, resident, took_s)

    def _failed(self, order: Order, resident: Resident, reason: str, lasting: bool = False) -> Failed:
        return Failed(order.id, resident.stage, self.has_copy(order.model), reason, lasting)

    def _done(self, order: Order, resident: Resident, took_s: float) -> Done:
        phases = resident.laps.phases() if took_s else Phases()
        return Done(order.id, resident.stage, self.has_copy(order.model), took_s, phases)

    async def _load(self, resident: Resident) -> None:
        await self._bring_in(resident, lambda memory: self._mover.load(resident, memory))

    async def _wake(self, resident: Resident) -> None:
        copy = self._copies.get(resident.name)
        if copy is None:
            raise NotNow("there is no host copy to wake from")
        await self._bring_in(resident, lambda memory: self._mover.wake(resident, memory, copy))

    async def _fork(self, resident: Resident, order: Order) -> None:
        if self._peering is None or order.source is None:
            raise NotNow("this node has no peers to copy from")
        want = want_of(resident.opened, self._kernels, resident.digest, order.term)
        async with pulling(self._peering, order.source, want) as pull:

            async def confirm() -> None:
                await pull.confirm()
                resident.digest = pull.digest

            await self._bring_in(resident, lambda memory: self._mover.fork(resident, memory, pull), confirm)

    async def _bring_in(
        self,
        resident: Resident,
        fill: Callable[[WeightMemory], None],
        confirm: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Reserve pages, fill and map them, commit, attach and serve; or leave everything as it was.

        What `confirm` raises at the last moment undoes it all too.
        """
        memory, laps = resident.window(self._xtensor), resident.laps
        prepared = asyncio.ensure_future(self.prepare(resident.name))
        try:
            with laps.of("reserve_s"):
                if not await self._on_device(lambda: self._scarcity.clear(memory.n_pages) and memory.reserve()):
                    raise NotNow("its pages are not free yet")
            await self._on_copy_thread(resident, lambda: self._mover.prepare(resident, memory))
            await self._on_copy_thread(resident, lambda: fill(memory))
            engine = await self._on_copy_thread(resident, lambda: self._engine(resident, memory))
            await prepared
            if confirm is not None:
                await confirm()
            with laps.of("commit_s"):
                await self._on_device(lambda: self._take_in(memory, engine))
        except BaseException:
            # A cancel that comes while the device thread takes it in finds it there: it goes back all the same.
            await whole(self._take_back(resident, memory))
            raise
        finally:
            prepared.cancel()
        resident.stage = Stage.ACTIVE
        resident.flow.serve()

    def _take_in(self, memory: WeightMemory, engine: Engine) -> None:
        memory.commit()
        self._device.attach(engine)

    async def _take_back(self, resident: Resident, memory: WeightMemory) -> None:
        """Undo whatever a transition to Active has done so far."""
        await self._on_device(lambda: self._device.detach(resident.name))
        await self._vacate(resident, memory)

    async def _vacate(self, resident: Resident, memory: WeightMemory) -> None:
        """Give the model's pages back; no turn and no copy thread uses them any more.

        What cannot be unmapped stays mapped until the next map: nobody uses the addresses, so the pages may go.
        """
        try:
            with resident.laps.of("unmap_s"):
                await self._on_copy_thread(resident, lambda: memory.unmap(self._mover.between(resident)))
        except OSError as error:
            log.warning("%s: its addresses stay mapped: %s", resident.name, error.strerror)
        await self._on_device(memory.release)

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
        detached, served = False, resident.flow.open

        def detach() -> bool:
            nonlocal detached
            detached = self._device.detach(name)
            return detached

        resident.flow.hold()
        try:
            with resident.laps.of("commit_s"):
                if not await self._on_device(detach):
                    raise NotNow("requests came for it")
            if keep and not self.has_copy(name):
                await self._on_copy_thread(resident, lambda: self._mover.keep(resident, memory))
        except BaseException:
            if not self.has_copy(name):
                self._copies.drop(name)
            if detached:
                await whole(self._on_device(lambda: self._device.attach(engine)))
            # Not what was being drained, nor what was torn down meanwhile: whether those serve is the Brain's to say.
            if served and resident.stage is Stage.ACTIVE:
                resident.flow.serve()
            raise
        await whole(self._let_go(resident, memory, keep))

    async def _let_go(self, resident: Resident, memory: WeightMemory, keep: bool) -> None:
        if not keep:
            self._copies.drop(resident.name)
        await self._vacate(resident, memory)
        resident.stage = Stage.WARM if keep else Stage.COLD

    def copy_rate(self) -> float | None:
        """How fast weights may move now; None is full speed."""
        return self._config.copy_bytes_per_s if self.serving else None

    def _engine(self, resident: Resident, memory: WeightMemory) -> Engine:
        """The device side, made at the first load and kept: the addresses it is bound to stay the same."""
        if resident.engine is None:
            opened = resident.opened
            weights = resident.weights or bind(opened.placed, self._kernels, memory.array)
            trail = None if self._outside is None else self._outside.trail(opened.name)
            engine = engine_of(opened, weights, self._config, self._xtensor, self._kernels, self._scarcity, trail)
            resident.engine = engine if self.imagined is None else self.imagined.engine(engine)
        return resident.engine

    async def _on_device(self, work: Callable[[], T]) -> T:
        """Run `work` between two steps. Once asked for it is done, also when this is cancelled."""
        return await ended(asyncio.wrap_future(self._device.ask(work)))

    async def _on_copy_thread(self, resident: Resident, work: Callable[[], T]) -> T:
        """Run `work` on a copy thread; when this is cancelled, the work is told to stop."""

        def stop() -> None:
            resident.stop = True

        return await ended(asyncio.get_running_loop().run_in_executor(self._threads, work), stop)
