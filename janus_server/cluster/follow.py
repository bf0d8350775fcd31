"""A node's side towards whoever leads: it obeys orders, says how they ended, and what models stand where.

Orders of one term are not carried on into the next: what is under way is undone first, then the new leader is told
what there is. Lives on the loop and decides nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from janus_server.duty import Charge
from janus_server.leader import carried
from janus_server.orders import (
    Action,
    Event,
    Failed,
    Joined,
    KnownModel,
    Lost,
    Observed,
    Order,
    Report,
    Stage,
)
from janus_server.sched.oracle_records import Subject
from janus_server.wire.frames import Outcome, Told

if TYPE_CHECKING:
    from janus_server.lifecycle import Lifecycle

UNDONE = "another leader took over, and what was under way was undone"


class Follower:
    """The models of one node. tell(events) brings them to whoever leads, seen() is shown orders and their ends."""

    def __init__(
        self, node: str, lifecycle: Lifecycle, pool_pages: int, host_bytes: int, places: tuple[str, str],
        models: Callable[[], tuple[KnownModel, ...]], tell: Callable[[Sequence[Told]], None],
        seen: Callable[[Event | Action], None],
    ) -> None:  # fmt: skip
        """places are the node's host and domain."""
        self._node, self._lifecycle, self._tell, self._seen = node, lifecycle, tell, seen
        self._models = models
        self._pool_pages, self._host_bytes = pool_pages, host_bytes
        self._host, self._domain = places
        self._tasks: set[asyncio.Task[None]] = set()
        self._known = False
        self._withdrawn = False
        self._process = secrets.token_hex(8)
        self._charge = Charge()
        self._pinned: dict[str, bool] = {}
        self._subjects: dict[str, Subject] = {}
        self._said: dict[str, float] | None = None  # since when each model rests

    def withdraw(self) -> None:
        """The node takes nothing more: for its leader it is gone."""
        self._withdrawn = True
        self._tell([Joined(self._node, 0, 0, ())])

    def assigned(self, charge: Charge) -> None:
        """What an operator has the node do, as the leader says, unless it was told something later: the next leader is
        told."""
        if charge.since > self._charge.since:
            self._charge = charge

    def pinned(self, model: str, pinned: bool) -> None:
        """An operator pinned it here, or let it go again, and the leader took it: the next one is told."""
        self._pinned[model] = pinned

    def introduction(self) -> list[Told]:
        """What a leader that knows nothing is told of this node.

        What is to be loaded at start is said to the first one alone: later ones find it where it is.
        """
        if self._withdrawn:
            return [Joined(self._node, 0, 0, ())]
        models = tuple(
            msgspec.structs.replace(
                one, preload=one.preload and not self._known, pinned=self._pinned.get(one.model, one.pinned)
            )
            for one in self._models()
        )
        self._known = True
        joined = Joined(
            self._node, self._pool_pages, self._host_bytes, models, {}, self._host, self._domain,
            self._charge.duty, self._charge.since, self._process,
        )  # fmt: skip
        told: list[Told] = [joined]
        for name, resident in self._lifecycle.residents.items():
            if self._lifecycle.has_copy(name):  # no other event says that the host holds one
                told.append(Lost(self._node, name, resident.stage, True))
        told.append(self._lifecycle.report(self._node))
        if self._subjects:
            told.append(Observed({}, dict(self._subjects)))
        return told

    async def calm(self) -> None:
        """End what an older leader had begun, each order wholly or not at all, and take requests wherever they can be.

        Draining was its wish too.
        """
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._withdrawn:
            for resident in self._lifecycle.residents.values():
                if resident.stage is Stage.ACTIVE and not resident.flow.open:
                    resident.flow.serve()

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def obey(self, order: Order) -> Outcome:
        if order.model not in self._lifecycle.residents or order.node != self._node or self._withdrawn:
            return Outcome.REFUSED
        self._seen(order)
        task = asyncio.create_task(self._carry(order))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return Outcome.APPLIED

    def lost(self, model: str) -> None:
        """The device thread tore the model's instance down."""
        stage = self._lifecycle.lost(model)
        event = Lost(self._node, model, stage, self._lifecycle.has_copy(model))
        self._seen(event)
        self._tell([event])

    def observed(self, observed: Observed) -> None:
        self._subjects.update(observed.subjects)
        self._tell([observed])

    def report(self) -> Report | None:
        """How busy the node is; None where it rests since before it was last said.

        While anything runs it is said each time: the leader counts what it has begun on top of the last one.
        """
        report, now = self._lifecycle.report(self._node), time.monotonic()
        said = {name: round(now - busy.idle_for_s, 3) for name, busy in report.models.items() if not busy.running}
        if self._withdrawn or (said == self._said and len(said) == len(report.models)):
            return None
        self._said = said
        return report

    def settled(self, model: str) -> bool:
        return not self._lifecycle.residents[model].changing.locked()

    async def _carry(self, order: Order) -> None:
        try:
            end = await carried(self._lifecycle, order)
        except asyncio.CancelledError:
            resident = self._lifecycle.residents[order.model]
            copy = self._lifecycle.has_copy(order.model)
            self._seen(Failed(order.id, resident.stage, copy, UNDONE))  # or whoever looks on sees it go on for ever
            raise
        if end is not None:
            self._seen(end)
        told: list[Told] = [self._lifecycle.report(self._node)]
        self._tell(told if end is None else [*told, end])
