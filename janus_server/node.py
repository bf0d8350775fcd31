"""One node: memory, kernels, models and the device thread, put together. `serve` runs it, the HTTP layer reads it.

What takes time at start (compiling, headers) is done on a worker thread; afterwards models come and go by orders. The
node executes and decides nothing: `leader` carries the Brain's orders here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from janus_server.applications import Applications
from janus_server.catalogue import OpenedModel
from janus_server.cluster.lookout import Lookout
from janus_server.cluster.sight import Reached
from janus_server.config import OracleChoice, ServeConfig
from janus_server.desk import FrontDesk, NoDesk
from janus_server.errors import BadModel, Refused
from janus_server.executor import DeviceThread, EndAll, StepReport, Stop
from janus_server.fitting import Fitter, possible
from janus_server.fork import want_of
from janus_server.instance import ServedModel
from janus_server.intake import Intake
from janus_server.journal import Entry, Journal
from janus_server.kv.host import HostCopies
from janus_server.kv.touch import TouchAhead
from janus_server.leader import Leader, Leads
from janus_server.lifecycle import UNREADABLE, Lifecycle
from janus_server.observe.log import decision
from janus_server.opening import Opened, ahead_of, open_node
from janus_server.operate import Operator
from janus_server.orders import Action, Answer, Event, Stage, Wish
from janus_server.peers import Peers
from janus_server.prepared import Prepared
from janus_server.resident import Progress
from janus_server.sched.brain import Brain
from janus_server.sched.scarcity import Scarcity
from janus_server.sched.split import SplitSettings
from janus_server.sched.state import BrainSettings
from janus_server.starting import Start
from janus_server.streams import Streams
from janus_server.telemetry import Pool, Telemetry, measured
from janus_server.tokens.render import Renderers
from janus_server.transfer.rundir import Peering
from janus_server.transfer.serving import PeerServer
from janus_server.types import BatcherStats, HandedOver, Load, ModelCard, Owner
from janus_server.watch import Watch, each

if TYPE_CHECKING:
    from janus_server.cluster.hosting import Hosting
    from janus_server.cluster.meeting import Place
    from janus_server.cluster.member import Member
    from janus_server.paced import Imagined

log = logging.getLogger("janus.node")

NODE = "n0"


class Node:
    """What this process serves and with which memory. Lives on the loop's thread."""

    def __init__(self, config: ServeConfig, peering: Peering | None = None, place: Place | None = None) -> None:
        """With peering, other nodes of this host may copy its weights, and it theirs. With a place, a cluster."""
        self._place = place
        self._member: Member | None = None
        self._config = config
        self._peering = peering
        self._peers: PeerServer | None = None
        self.cards: Mapping[str, ModelCard] = MappingProxyType({})
        self._settings = BrainSettings(split=SplitSettings(choice=config.pd_split))
        self.telemetry = Telemetry(self._settings.oracle.window_s)
        self.streams = Streams(self.telemetry.arrived)
        self.pool_pages = config.memory_bytes // config.page_bytes
        self.free_pages = self.pool_pages
        self._intake = Intake(place is not None, lambda: self._member is not None and self._member.accompanied)
        self._device: DeviceThread | None = None
        self._toucher: TouchAhead | None = None
        self._lifecycle: Lifecycle | None = None
        self._leader: Leads | None = None
        self._desk: FrontDesk | NoDesk | None = None
        self.operator: Operator | None = None
        self.reached = Reached()
        self.lookout: Lookout | None = None
        self._prepared: Prepared | None = None
        self._renderers = Renderers()
        self._stats: Mapping[str, BatcherStats] = MappingProxyType({})
        self._pages: Mapping[Owner, int] = MappingProxyType({})
        self._listeners: list[Callable[[StepReport], None]] = []
        self._journal: Journal | None = None
        self._fitter: Fitter | None = None

    def on_step(self, listener: Callable[[StepReport], None]) -> None:
        """`listener` is called on the loop after each step (metrics)."""
        self._listeners.append(listener)

    def refusing(self) -> str | None:
        """Why no model can take requests just now, or None."""
        if (why := self._intake.closed()) is not None:
            return why
        if self._device is None or not self._device.alive:
            return "the device thread has ended"
        return None

    async def turning_away(self) -> str | None:
        """Why a client's request is not taken, or None. In a cluster it may wait for the start, or run elsewhere."""
        return None if await self._intake.elsewhere() else self.refusing()

    def ready(self) -> str | None:
        """None when requests are taken, else the reason why not."""
        return self.refusing() or self._frozen() or (None if self._member is None else self._member.emptied())

    @property
    def prepared(self) -> Mapping[str, ServedModel]:
        """The models whose tokenizers are read: every one that ever had a request."""
        residents = self._lifecycle.residents if self._lifecycle is not None else {}
        return {name: resident.served for name, resident in residents.items() if resident.served is not None}

    def troubled(self) -> frozenset[str]:
        """The models whose last order failed."""
        residents = self._lifecycle.residents if self._lifecycle is not None else {}
        return frozenset(name for name, resident in residents.items() if resident.trouble is not None)

    def stages(self) -> Mapping[str, Stage]:
        """Where every model of the catalogue stands."""
        residents = self._lifecycle.residents if self._lifecycle is not None else {}
        return {name: resident.stage for name, resident in residents.items()}

    async def ask(self, name: str, wish: Wish, source: str | None = None) -> Answer:
        """An operator's wish for a model of the catalogue, and what the Brain answers. FORK names the source's node."""
        if self._leader is None:
            return Answer(name, False, "the node is still starting")
        return await self._leader.ask(name, wish, source)

    def settled(self, name: str) -> bool:
        """True when the model stands where the Brain wants it, as far as it is known now."""
        return self._leader is not None and self._leader.settled(name)

    async def model(self, name: str) -> ServedModel | None:
        """The model of that name, ready to take requests (it may have to be loaded for them); None when unknown."""
        if self._lifecycle is None or name not in self._lifecycle.residents:
            return None
        try:
            return await self._lifecycle.prepare(name)
        except (BadModel, OSError) as error:
            log.error("%s: its tokenizer cannot be read: %s", name, error)
            raise Refused(UNREADABLE, status=503, kind="server_error", code="model_failed") from None

    def stats(self) -> Mapping[str, BatcherStats]:
        return self._stats

    def loads(self) -> Mapping[str, Load]:
        """What is open of each model, counted where requests come in."""
        return self.streams.loads(time.monotonic())

    def memory(self) -> Mapping[Owner, int]:
        """Pages held, by owner, after the last step."""
        return self._pages

    async def open(self, progress: Progress) -> None:
        """Read the catalogue, start the device thread, and load what the Brain wants at start.

        Raises BadModel or BadConfig when a model cannot be served here.
        """
        loop = asyncio.get_running_loop()
        opened = await asyncio.to_thread(open_node, self._config, self._peering is not None)
        xtensor = opened.xtensor
        copies, watch = HostCopies(self._config.host_memory_bytes), Watch()
        toucher = self._toucher = TouchAhead(xtensor.touched, copies.touched, lambda: lifecycle.resting)
        scarcity = Scarcity(xtensor.pool, self._config.prefix_idle_s)
        device = self._device = DeviceThread(
            xtensor.pool, scarcity, lambda report: _hand_over(loop, self._deliver, report), toucher.below,
            lambda model: lifecycle.release_lost(model),
        )  # fmt: skip
        sizes = {one.name: one.placed.total_bytes for one in opened.catalogue}
        tokens = self._config.max_num_batched_tokens
        desk = FrontDesk(sizes, tokens, lambda: leader.changed())
        unused = NoDesk(sizes, tokens)
        member = None if self._place is None else self._join(self._place, unused)
        here = self._desk = desk if member is None else unused
        lifecycle = self._lifecycle = Lifecycle(
            self._config, opened.catalogue, xtensor, opened.kernels, device, scarcity, self.streams, self._renderers,
            copies, here, each(watch.progress, progress), self._peering,
            outside=member,
        )  # fmt: skip
        prepared = self._prepared = Prepared(lifecycle, self._config.prepare_bytes)
        peers = None if self._peering is None else await self._share(self._peering, opened, lifecycle)
        self.cards = MappingProxyType(lifecycle.cards)
        self._stats = MappingProxyType({name: BatcherStats(0, 0, 0, 0, 0, 0, 0) for name in self.cards})
        settings = self._foresee(opened.catalogue, xtensor.pool.free_pages, lifecycle.imagined)
        see = each(each(watch.see, self.telemetry.see), prepared.see)
        device.start()
        toucher.start(ahead_of(opened.catalogue))
        self._pages, self.free_pages = xtensor.pool.held(), xtensor.pool.free_pages
        start = Start(lifecycle.trouble)
        leads: Leads | None = member
        if leads is None:
            leads = leader = self._alone(settings, lifecycle, desk, each(see, start.see), peers)
            leader.join(self.free_pages, lifecycle.host_bytes)
        self._leader = leads
        self.operator = Operator(
            leads, lifecycle, device, xtensor.pool, copies, watch, self.memory, self._config.page_bytes, peers,
            self.telemetry,
        )  # fmt: skip
        lookout = self.lookout = Lookout(self, self.operator, None if member is None else member.party)
        start.all_given()
        await start.over
        if member is not None:
            await member.open(self._hosting(settings, lifecycle, see, lookout.own, opened, device, scarcity))
        toucher.below(xtensor.pool.high_mark)  # scratch at first; not beside the load, which is waited for
        self._intake.opened()
        prepared.start()
        self.telemetry.start(self._active, leads.observed)

    async def _share(self, peering: Peering, opened: Opened, lifecycle: Lifecycle) -> Peers:
        """Let other nodes copy weights from here, and look for theirs."""
        names = [one.name for one in opened.catalogue]
        self._peers = PeerServer(peering, opened.memory, lifecycle.grants, lifecycle.offer, names, lifecycle.copy_rate)
        peers = Peers(peering, {o.name: want_of(o, opened.kernels, None) for o in opened.catalogue})
        await peers.look()
        return peers

    def _alone(
        self, settings: BrainSettings, lifecycle: Lifecycle, desk: FrontDesk, see: Callable[[Event | Action], None],
        peers: Peers | None,
    ) -> Leader:  # fmt: skip
        """The leader of a cluster of one node."""
        brain = Brain(settings)
        if self._config.journal is not None:
            self._journal = Journal(self._config.journal, brain, log.error)
        record = _nothing if self._journal is None else self._journal.write
        return Leader(self.name, brain, lifecycle, desk, see, record, peers, self._fitter)

    def _join(self, place: Place, desk: NoDesk) -> Member:
        """The node's place in its cluster, in a leader's stead."""
        from janus_server.cluster.member import Member

        config = self._config
        self._member = Member(place, self.streams, desk.costs.work_s, config.request_timeout_s, config.prefix_cache)
        if self._peering is not None:
            self._peering = msgspec.structs.replace(self._peering, others=self._member.meeting)
        return self._member

    def _hosting(
        self, settings: BrainSettings, lifecycle: Lifecycle, see: Callable[[Event | Action], None],
        sight: Callable[[bool], bytes], opened: Opened, device: DeviceThread, scarcity: Scarcity,
    ) -> Hosting:  # fmt: skip
        from janus_server.cluster.hosting import Hosting, Paging, known_models

        priced = self._desk.costs.priced if isinstance(self._desk, NoDesk) else dict
        return Hosting(
            lifecycle, self.free_pages, lifecycle.host_bytes, settings,
            lambda: known_models(lifecycle, self.telemetry, self._config.applications), see,
            lambda: priced(self.telemetry.counts()), sight, self._peering, opened.memory,
            Paging(device, scarcity, opened.xtensor, opened.kernels.name), self._fitter, self._config.journal,
        )  # fmt: skip

    def served_by(self, model: str) -> Sequence[str]:
        """The other nodes of the cluster that take its requests."""
        return () if self._member is None else self._member.served_by(model)

    @property
    def guests(self) -> int:
        """Requests of other nodes that run here."""
        return 0 if self._member is None else self._member.busy

    @property
    def relaying(self) -> bool:
        """It leaves, and its cluster has other nodes."""
        return self._intake.leaving and self._member is not None and self._member.accompanied

    @property
    def busy(self) -> bool:
        """Requests of a cluster run here, its own clients' or others'."""
        return self._member is not None and self._member.running

    def handed_over(self) -> HandedOver | None:
        """What other nodes computed for requests that run here; None where there are none."""
        return None if self._member is None else self._member.handed_over()

    @property
    def name(self) -> str:
        return self._peering.node if self._peering is not None else NODE

    @property
    def where(self) -> tuple[str, str]:
        """Host and domain, as nodes of a cluster compare them; empty for one that is alone."""
        return ("", "") if self._member is None else self._member.where

    @property
    def leaving(self) -> bool:
        """It refuses new requests and is about to end."""
        return self._intake.ending is not None

    def _active(self) -> list[str]:
        return [name for name, stage in self.stages().items() if stage is Stage.ACTIVE]

    def _foresee(self, catalogue: Sequence[OpenedModel], pages: int, imagined: Imagined | None) -> BrainSettings:
        """Have models with a promise measured and, where that is possible, what is measured learnt from."""
        models = measured(catalogue, Applications(self._config.applications))
        settings, pool = self._settings, Pool(pages, self._config.page_bytes)
        if imagined is not None:
            settings, models, pool = imagined.foreseen(models, pool)
        if models and self._config.oracle is OracleChoice.AUTO:
            self.telemetry.measure(models, pool)
            if imagined is None and possible():
                self._fitter = Fitter()
            elif imagined is None:
                log.info("gpytorch is not installed: what is predicted rests on shapes and step times alone")
        every_s = None if self._fitter is None else settings.refit_every_s
        return msgspec.structs.replace(settings, refit_every_s=every_s)

    @property
    def touched(self) -> bool:
        """True once the memory that the catalogue can use is at hand: no transition has to wait for the system."""
        return self._toucher is not None and self._toucher.finished

    def pause(self, reason: str) -> None:
        """Refuse new requests of clients; what other nodes of the cluster send is still run."""
        self._intake.pause(reason)

    def drain(self, reason: str) -> None:
        """Run no new requests, which are refused where no other node runs them; running ones go on."""
        self._intake.leave(reason)
        if self._member is not None:
            self._member.withdraw(self._intake.leaving)
        open_requests = len(self.streams)
        decision(f"no new requests: {reason}; {open_requests} go on", kind="drain", open_requests=open_requests)

    def end_all(self) -> None:
        """End what still runs with an error event."""
        if self._device is not None:
            self._device.post(EndAll())

    async def close(self) -> None:
        """End the threads and helper processes, the device thread after its step. Memory goes with the process."""
        await self.telemetry.close()
        if self.lookout is not None:
            await self.lookout.close()
        if self._prepared is not None:
            await self._prepared.close()
        if self._leader is not None:
            await self._leader.close()
        if self._peers is not None:
            await self._peers.close()
        if self._journal is not None:
            self._journal.close()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._fitter is not None:
            self._fitter.close()
        if self._lifecycle is not None:
            self._lifecycle.close()
        if self._toucher is not None:
            self._toucher.close()
        if self._device is not None and self._device.alive:
            self._device.post(Stop())
            self._device.join(timeout_s=60.0)
        self._renderers.close()

    def _frozen(self) -> str | None:
        """Work waits and nothing moves: a busy node ends a step now and then, a frozen one never does."""
        stalled_s = self._device.stalled_s(time.monotonic()) if self._device is not None else 0.0
        if stalled_s <= self._config.frozen_after_s:
            return None
        return (
            f"work waits and no step has ended for {stalled_s:.0f} s (--frozen-after {self._config.frozen_after_s:g})"
        )

    def _deliver(self, report: StepReport) -> None:
        if report.stats is not None:
            self._stats = MappingProxyType({**self._stats, report.model: report.stats})
        self._pages, self.free_pages = report.pages, report.free_pages
        self.streams.deliver(report)
        if self._desk is not None:
            self._desk.observe(report)
        self.telemetry.step(report)
        if report.failed and self._leader is not None:
            self._leader.lost(report.model)
        for listener in self._listeners:
            listener(report)


def _nothing(entry: Entry) -> None:
    """No journal was asked for."""


def _hand_over(loop: asyncio.AbstractEventLoop, deliver: Callable[[StepReport], None], report: StepReport) -> None:
    loop.call_soon_threadsafe(deliver, report)
