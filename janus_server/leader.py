"""The shell around the Brain: carries events in and actions out, on the event loop, for a cluster of one node.

It has no opinion. Before every event the Brain is told how busy the node is, so that what it decides is true when it
decides; orders run as tasks and come back as events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Protocol

from janus_server.api.cluster import Decision, LeaderView
from janus_server.cluster.decisions import Decisions
from janus_server.cluster.sight import leader_view
from janus_server.desk import FrontDesk
from janus_server.errors import Refused
from janus_server.fitting import Fitter
from janus_server.journal import Entry
from janus_server.lifecycle import Lifecycle
from janus_server.orders import (
    Action,
    Answer,
    Asked,
    Decided,
    Dispatch,
    Done,
    Event,
    Failed,
    Joined,
    Lost,
    Observed,
    Offered,
    Order,
    Refit,
    Refuse,
    Tick,
    Unwanted,
    Wanted,
    Wish,
    Wished,
)
from janus_server.peers import Peers
from janus_server.sched.brain import Brain
from janus_server.sched.foresight import Forecast
from janus_server.sched.state import Standing

log = logging.getLogger("janus.leader")


async def carried(lifecycle: Lifecycle, order: Order) -> Done | Failed | None:
    """How an order ended, whatever it met."""
    try:
        return await lifecycle.obey(order)
    except Exception as error:  # a boundary: an order that meets a bug fails, the node lives
        log.error("order %d (%s) failed", order.id, order.why, exc_info=error)
        resident = lifecycle.residents[order.model]
        return Failed(order.id, resident.stage, lifecycle.has_copy(order.model), "the server failed", True)


class Leads(Protocol):
    """What a node asks of whoever leads it: a `Leader` of its own, or its place in a cluster."""

    async def look(self) -> None: ...

    async def ask(self, model: str, wish: Wish, source: str | None = None) -> Answer: ...

    async def ask_leader(self, event: Wished) -> Answer: ...

    @property
    def in_term(self) -> int: ...

    def leading(self) -> LeaderView | None:
        """What it knows as the leader, without predictions; None where another node leads."""

    def decided(self) -> list[Decision]:
        """What it decided in terms that are over, the newest last."""

    def held(self, model: str) -> int:
        """Calls that came here and that nobody has begun."""

    def settled(self, model: str) -> bool: ...

    def standing(self, model: str) -> Standing: ...

    def forecast(self, model: str) -> Forecast | None: ...

    def lost(self, model: str) -> None: ...

    def observed(self, observed: Observed) -> None: ...

    async def close(self) -> None: ...


class Leader:
    """One Brain and the node it leads. Everything here runs on the loop's thread."""

    def __init__(
        self,
        node: str,
        brain: Brain,
        lifecycle: Lifecycle,
        desk: FrontDesk,
        seen: Callable[[Event | Action], None],
        record: Callable[[Entry], None],
        peers: Peers | None = None,
        fitter: Fitter | None = None,
    ) -> None:
        """`seen` is told of events and actions as they come, `record` of each event with all that it led to.

        Where there are peers, what they hold is looked up before the Brain hears that a model is wanted. Without a
        fitter the oracle is never fitted.
        """
        self._peers = peers
        self._fitter = fitter
        self._looked: frozenset[str] = frozenset()  # wanted models that were looked for since they are
        self._looking = False
        self._record = record
        self._node = node
        self._brain = brain
        self._lifecycle = lifecycle
        self._desk = desk
        self._seen = seen
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._wanted: frozenset[str] = frozenset()
        self._due = False
        self._decisions = Decisions(brain.term)

    def join(self, pool_pages: int, host_bytes: int) -> None:
        """Tell the Brain what the node has; from here on it leads."""
        offers = {} if self._peers is None else self._peers.offers()
        self.tell(Joined(self._node, pool_pages, host_bytes, self._lifecycle.known(), offers))

    async def ask(self, model: str, wish: Wish, source: str | None = None) -> Answer:
        """An operator's wish, and the Brain's answer to it. FORK takes the name of the node to copy from."""
        return await self.ask_leader(Asked(model, wish, source))

    async def ask_leader(self, event: Wished) -> Answer:
        return next(action for action in self.tell(event) if isinstance(action, Answer))

    async def look(self) -> None:
        """Tell the Brain what peers hold now."""
        if self._peers is not None:
            await self._peers.look()
            self.tell(Offered(self._peers.offers()))

    @property
    def in_term(self) -> int:
        return self._brain.term

    def leading(self) -> LeaderView:
        held = {model: self.held(model) for model in self._lifecycle.residents}
        return leader_view(self._brain, self._decisions.last(), held)

    def decided(self) -> list[Decision]:
        return []

    def held(self, model: str) -> int:
        """Calls that wait for it to be Active."""
        return self._lifecycle.residents[model].flow.held

    def settled(self, model: str) -> bool:
        """True when nothing is under way for the model and nobody's wish for it is open."""
        return self._brain.settled(self._node, model)

    def standing(self, model: str) -> Standing:
        """How the Brain treats a model of the catalogue just now."""
        return self._brain.standing(self._node, model)

    def forecast(self, model: str) -> Forecast | None:
        """What the Brain expects of the model at its present traffic; None where it knows nothing."""
        return self._brain.forecast(model, time.monotonic())

    def lost(self, model: str) -> None:
        """The device thread tore the model's instance down."""
        stage = self._lifecycle.lost(model)
        # Before any report: the Brain must not hand it one more request because it has not heard yet.
        self._tell(Lost(self._node, model, stage, self._lifecycle.has_copy(model)))

    def observed(self, observed: Observed) -> None:
        """What was measured over the period that ends now."""
        self.tell(observed)

    def changed(self) -> None:
        """Calls came or went: tell the Brain who is wanted now. Several changes within one turn of the loop are one."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._tell_changes)

    def tell(self, event: Event) -> list[Action]:
        """Bring one event to the Brain, how busy the node is before it, and act on what it decides."""
        return self._tell(self._lifecycle.report(self._node), event)

    def _tell(self, *events: Event) -> list[Action]:
        now = time.monotonic()
        actions: list[Action] = []
        for event in events:
            led_to = self._brain.on(event, now)
            self._record(Entry(now, event, tuple(led_to)))
            actions += led_to
            self._decisions.see(event, led_to, time.time())
            self._seen(event)
        for action in actions:
            self._seen(action)
            self._act(action)
        self._set_timer()
        return actions

    async def close(self) -> None:
        """Give up: orders under way are cancelled and roll back."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _tell_changes(self) -> None:
        self._due = False
        traffic = self._desk.take()
        if traffic is not None:
            self.tell(traffic)
        wanted = frozenset(name for name, one in self._lifecycle.residents.items() if one.flow.held)
        if self._peers is not None and wanted - self._looked:
            if not self._looking:
                self._looking = True
                self._start(self._look_for(wanted))
            return
        self._looked &= wanted
        gone, fresh, self._wanted = self._wanted - wanted, wanted - self._wanted, wanted
        news: list[Event] = [*map(Unwanted, sorted(gone)), *map(Wanted, sorted(fresh))]
        for event in news:
            self.tell(event)
        if not news and traffic is None:
            self.tell(Tick())

    def _act(self, action: Action) -> None:
        match action:
            case Order():
                self._start(self._carry(action))
            case Refuse(model, why, retry_after_s):
                refused = Refused(why, status=503, kind="server_error", code="model_unavailable",
                                  retry_after_s=retry_after_s)  # fmt: skip
                self._lifecycle.residents[model].flow.refuse(refused)
                self._wanted -= {model}  # who comes after them wants it anew
            case Dispatch():
                self._desk.begin(action)
            case Refit(model, why):
                log.debug("%s", why)
                self._start(self._fit(model))
            case Decided(_, why):
                log.info("%s", why)
            case Answer():
                pass

    async def _fit(self, model: str) -> None:
        """Bring the Brain what comes of a fit; where nothing does, it asks again in its own time."""
        request = self._brain.fit_request(model)
        if self._fitter is None or request is None:
            return
        fitted = await self._fitter.fit(request)
        if fitted is not None:
            self.tell(fitted)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look_for(self, wanted: frozenset[str]) -> None:
        try:
            await self.look()
        finally:
            self._looked, self._looking = wanted, False
        self._tell_changes()

    async def _carry(self, order: Order) -> None:
        end = await carried(self._lifecycle, order)
        if end is not None:
            self.tell(end)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._brain.next_wake(time.monotonic())
        if due_s is not None:
            delay_s = max(0.0, due_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.tell, Tick())
