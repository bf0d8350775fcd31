"""What the person who runs a node sees of its models and its memory, and how wishes are put to the leader.

`node` makes one when its catalogue is open; `http/admin` calls it. It changes nothing itself: a wish is the Brain's to
answer, and memory is looked at on the device thread between two steps.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Mapping
from typing import Literal

from janus_server.api.admin import (
    KvUse,
    ManagedModel,
    MemoryMap,
    PeerList,
    PeerModel,
    PeerNode,
    Prediction,
    Survey,
    Taking,
    memory_map,
)
from janus_server.api.cluster import Decision, LeaderView
from janus_server.errors import Refused
from janus_server.executor import DeviceThread
from janus_server.kv.host import HostCopies
from janus_server.kv.pages import PagePool
from janus_server.leader import Leads
from janus_server.lifecycle import Lifecycle
from janus_server.orders import Answer, Order, Stage, Wish, Wished
from janus_server.peers import Peers, Use
from janus_server.telemetry import Telemetry
from janus_server.types import Owner, PageKind
from janus_server.watch import Watch


class End(enum.Enum):
    """How waiting for a stage ended: the model got there, gave up elsewhere, or was still on its way."""

    REACHED = "reached"
    MISSED = "missed"
    LATE = "late"


class Operator:
    """One node's models, as an operator sees them. Lives on the loop."""

    def __init__(
        self,
        leader: Leads,
        lifecycle: Lifecycle,
        device: DeviceThread,
        pool: PagePool,
        copies: HostCopies,
        watch: Watch,
        held: Callable[[], Mapping[Owner, int]],
        page_bytes: int,
        peers: Peers | None,
        telemetry: Telemetry,
    ) -> None:
        self._telemetry = telemetry
        self._peers = peers
        self.watch = watch
        self._leader = leader
        self._lifecycle = lifecycle
        self._device = device
        self._pool = pool
        self._copies = copies
        self._held = held
        self.page_bytes = page_bytes

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._lifecycle.residents)

    @property
    def term(self) -> int:
        return self._leader.in_term

    def leading(self) -> LeaderView | None:
        """What this node knows as the leader; None where another one is."""
        return self._leader.leading()

    def decided(self) -> list[Decision]:
        """What it decided in terms that are over."""
        return self._leader.decided()

    @property
    def host_budget_bytes(self) -> int:
        """What all host copies together may take."""
        return self._copies.budget_bytes

    def models(self) -> list[ManagedModel]:
        """Every model of the catalogue."""
        return [self.model(name) for name in self.names]

    def model(self, name: str) -> ManagedModel:
        """One model of the catalogue as it stands now."""
        resident, standing = self._lifecycle.residents[name], self._leader.standing(name)
        flow, held = resident.flow, self._held()
        active = resident.stage is Stage.ACTIVE
        origin = self.watch.origin(name) if active else None
        return ManagedModel(
            model=name,
            stage=resident.stage.value,
            goal=None if standing.goal is None else standing.goal.value,
            under_way=self.watch.under_way(name),
            pinned=standing.pinned,
            draining=standing.draining,
            running=flow.running,
            held=self._leader.held(name),
            idle_s=round(time.monotonic() - flow.idle_since_s, 3) if active and not flow.running else None,
            weight_pages=resident.opened.weight_pages,
            weight_bytes=resident.opened.placed.total_bytes,
            held_pages=held.get(Owner(name, PageKind.WEIGHTS), 0),
            kv_pages=held.get(Owner(name, PageKind.KV), 0),
            host_copy_bytes=self._copies.held().get(name, 0),
            load_s=round(standing.load_s, 6),
            wake_s=round(standing.wake_s, 6),
            trouble=self.watch.trouble(name),
            prepared=resident.served is not None,
            origin=_how(origin),
            source=None if origin is None else origin.source,
            prediction=self._prediction(name),
        )

    def _prediction(self, name: str) -> Prediction | None:
        """What the Brain expects of a model with a promise."""
        found, target = self._leader.forecast(name), self._telemetry.target(name)
        if found is None or target is None:
            return None
        needs, busy = max(found.hbm, found.compute, found.bandwidth), self._telemetry.busy_share(name)
        return Prediction(
            says=f"predicted {found.attainment:.2f} of requests in time; needs {needs:.2g} of the device",
            age_s=round(found.age_s, 3),
            requests_per_s=round(found.features.request_rate, 4),
            tokens_per_s=round(found.features.token_rate, 2),
            target=target,
            attained=round(found.on_time / found.requests, 4) if found.requests else None,
            predicted=round(found.attainment, 4),
            predicted_least=round(found.attainment_least, 4),
            needs=round(needs, 4),
            needs_most=round(found.device_most, 4),
            hbm=round(found.hbm, 4),
            compute=round(found.compute, 4),
            bandwidth=round(found.bandwidth, 4),
            busy_share=None if busy is None else round(busy, 4),
            periods=found.observations,
            fitted=found.fitted,
        )

    async def ask(self, name: str, wish: Wish, source: str | None = None) -> Answer:
        """The Brain's immediate answer to a wish for a model of the catalogue.

        FORK takes the name of the peer to copy from, or picks one. Refused (404) where no peer is called so.
        """
        if wish.goal is Stage.ACTIVE:
            await self._leader.look()
        if wish is Wish.FORK and not self.fulfilled(name, wish):
            found = await self._fork_source(name, source)
            if isinstance(found, Answer):
                return found
            source = found
        return await self._leader.ask(name, wish, source)

    async def ask_leader(self, event: Wished) -> Answer:
        """The leader's answer to any other wish. Refused (503) where nobody leads just now."""
        return await self._leader.ask_leader(event)

    async def peers(self) -> PeerList:
        """Every other node of this user on this host, and what of theirs can be copied."""
        if self._peers is None:
            return PeerList(object="list", node=None, data=[])
        await self._peers.look(0.0)
        nodes = []
        for peer in self._peers.seen:
            uses = [(held, self._peers.use(held)) for held in peer.models]
            models = [
                PeerModel(
                    model=held.model, bytes=held.size_bytes, readers=held.readers,
                    why=None if use is Use.FORK else use.value,
                )
                for held, use in uses
            ]  # fmt: skip
            nodes.append(PeerNode(node=peer.node, models=models, trouble=peer.trouble))
        return PeerList(object="list", node=self._peers.node, data=nodes)

    async def _fork_source(self, name: str, source: str | None) -> str | Answer:
        """The peer to copy from, or why there is none: then nothing is ordered."""
        if self._peers is None:
            return Answer(name, False, "this server shares nothing: start it, and the other one, with --node NAME")
        if source == self._peers.node:
            return Answer(name, False, f"{source} is this server itself; GET /admin/peers lists the others")
        await self._peers.look(0.0)
        if source is None:
            best = self._peers.offers().get(name)
            return best[0] if best else Answer(name, False, f"no peer holds {name} as this server would")
        peer = next((one for one in self._peers.seen if one.node == source), None)
        if peer is None:
            names = ", ".join(one.node for one in self._peers.seen) or "none"
            message = f"no node of that name is seen on this machine; those that are: {names}"
            raise Refused(message, status=404, param="source", code="node_not_found")
        held = next((one for one in peer.models if one.model == name), None)
        if held is None:
            return Answer(name, False, f"{source} does not let {name} be copied: {peer.trouble or 'it is not active'}")
        use = self._peers.use(held)
        return source if use is Use.FORK else Answer(name, False, f"{name} cannot be copied from {source}: {use.value}")

    def fulfilled(self, name: str, wish: Wish) -> bool:
        """Whether nothing is left to do for an accepted wish."""
        if wish.goal is None:
            return True
        return self._lifecycle.residents[name].stage is wish.goal and self._leader.standing(name).goal is None

    async def until(self, name: str, wish: Wish, timeout_s: float) -> End:
        """Wait until an accepted wish is fulfilled, or given up."""
        until_s = time.monotonic() + timeout_s
        with self.watch.subscribe() as news:
            while not self.fulfilled(name, wish):
                left_s = until_s - time.monotonic()
                if self._leader.settled(name):
                    return End.MISSED
                if left_s <= 0 or await news.take(left_s) is None:
                    return End.LATE
        return End.REACHED

    async def survey(self) -> Survey:
        """The pool as it is between two steps."""
        return await asyncio.wrap_future(self._device.ask(self._look))

    def memory(self, survey: Survey) -> MemoryMap:
        """The map of what was surveyed. Any thread: a large pool takes some milliseconds."""
        takings = [
            Taking(
                name, one.opened.placed.total_bytes, one.opened.weight_pages, one.opened.kv.page_tokens,
                one.opened.kv.token_bytes,
            )
            for name, one in self._lifecycle.residents.items()
        ]  # fmt: skip
        return memory_map(survey, takings, self.page_bytes, self._copies.held(), self._copies.budget_bytes)

    def _look(self) -> Survey:
        """On the device thread, where batchers and the pool stand still."""
        held = self._pool.held()
        kv = {}
        for name, resident in self._lifecycle.residents.items():
            engine = resident.engine
            if engine is None or engine.kv_owner not in held:
                continue
            batcher = engine.batcher
            size = batcher.kv.page_tokens
            empty = sum(len(seq.pages) * size - seq.computed for seq in (*batcher.running, *batcher.waiting))
            kv[name] = KvUse(empty, batcher.prefix.evictable(len(batcher.prefix)))
        return Survey(self._pool.owners(), kv)


def _how(order: Order | None) -> Literal["load", "wake", "fork"] | None:
    """An order's verb, for the type checker."""
    match order.verb.value if order is not None else None:
        case "load" | "wake" | "fork" as verb:
            return verb
    return None
