"""The shell around the Brain: carries events in and actions out, on the event loop, for a cluster of one node.

It has no opinion. Before every event the Brain is told how busy the node is, so that what it decides is true when it
decides; orders run as tasks and come back as events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from janus_server.errors import Refused
from janus_server.journal import Entry
from janus_server.lifecycle import Lifecycle
from janus_server.orders import (
    Action,
    Answer,
    Asked,
    Event,
    Failed,
    Joined,
    Lost,
    Order,
    Refuse,
    Tick,
    Unwanted,
    Wanted,
    Wish,
)
from janus_server.sched.brain import Brain
from janus_server.sched.state import Standing

log = logging.getLogger("janus.leader")


class Leader:
    """One Brain and the node it leads. Everything here runs on the loop's thread."""

    def __init__(
        self,
        node: str,
        brain: Brain,
        lifecycle: Lifecycle,
        seen: Callable[[Event | Action], None],
        record: Callable[[Entry], None],
    ) -> None:
        """`seen` is told of events and actions as they come, `record` of each event with all that it led to."""
        self._record = record
        self._node = node
        self._brain = brain
        self._lifecycle = lifecycle
        self._seen = seen
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._wanted: frozenset[str] = frozenset()
        self._telling = False
        self._due = False

    def join(self, pool_pages: int, host_bytes: int) -> None:
        """Tell the Brain what the node has; from here on it leads."""
        self.tell(Joined(self._node, pool_pages, host_bytes, self._lifecycle.known()))

    def ask(self, model: str, wish: Wish, source: str | None = None) -> Answer:
        """An operator's wish, and the Brain's answer to it. FORK takes the name of the node to copy from."""
        answers = [a for a in self.tell(Asked(model, wish, source)) if isinstance(a, Answer)]
        return answers[0]

    def settled(self, model: str) -> bool:
        """True when nothing is under way for the model and nobody's wish for it is open."""
        return self._brain.settled(model)

    def standing(self, model: str) -> Standing:
        """How the Brain treats a model of the catalogue just now."""
        return self._brain.standing(model)

    def lost(self, model: str) -> None:
        """The device thread tore the model's instance down."""
        stage = self._lifecycle.lost(model)
        self.tell(Lost(model, stage, self._lifecycle.has_copy(model)))

    def changed(self) -> None:
        """Calls came or went: tell the Brain who is wanted now. Several changes within one turn of the loop are one."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._tell_changes)

    def tell(self, event: Event) -> list[Action]:
        """Bring one event to the Brain and act on what it decides."""
        now = time.monotonic()
        actions: list[Action] = []
        for one in (self._lifecycle.report(self._node), event):
            led_to = self._brain.on(one, now)
            self._record(Entry(now, one, tuple(led_to)))
            actions += led_to
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
        wanted = frozenset(name for name, one in self._lifecycle.residents.items() if one.flow.held)
        gone, self._wanted = self._wanted - wanted, wanted
        for name in sorted(gone):
            self.tell(Unwanted(name))
        for name in sorted(wanted):
            self.tell(Wanted(name))
        if not gone and not wanted:
            self.tell(Tick())

    def _act(self, action: Action) -> None:
        match action:
            case Order():
                task = asyncio.create_task(self._carry(action))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Refuse(model, why, retry_after_s):
                refused = Refused(why, status=503, kind="server_error", code="model_unavailable",
                                  retry_after_s=retry_after_s)  # fmt: skip
                self._lifecycle.residents[model].flow.refuse(refused)
            case Answer():
                pass

    async def _carry(self, order: Order) -> None:
        try:
            end = await self._lifecycle.obey(order)
        except Exception as error:  # a boundary: an order that meets a bug fails, the node lives
            log.error("order %d (%s) failed", order.id, order.why, exc_info=error)
            resident = self._lifecycle.residents[order.model]
            end = Failed(order.id, resident.stage, self._lifecycle.has_copy(order.model), "the server failed", True)
        if end is not None:
            self.tell(end)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._brain.next_wake()
        if due_s is not None:
            delay_s = max(0.0, due_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.tell, Tick())
