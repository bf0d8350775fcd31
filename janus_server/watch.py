"""What goes on with the models of a node, for whoever looks on: orders under way, their progress, how they ended.

The leader shows it every event and action, the copy threads every piece that moved. Readers subscribe; each has a
bounded queue, so one that is slow loses news, progress first, and holds up nobody. It decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import ParamSpec

from janus_server.api.admin import LOST, ModelEvent, UnderWay, told
from janus_server.orders import Action, Done, Event, Failed, Lost, Order, Refuse, Verb

# Progress is told at most five times a second a model, and only to readers who have kept up so far.
PROGRESS_EVERY_S = 0.2
PROGRESS_QUEUE = 32
QUEUE = 1024

P = ParamSpec("P")


def each(first: Callable[P, None], second: Callable[P, None]) -> Callable[P, None]:
    """Both, one after the other."""

    def call(*arguments: P.args, **named: P.kwargs) -> None:
        first(*arguments, **named)
        second(*arguments, **named)

    return call


class Subscription:
    """One reader's news, oldest first. Everything runs on the loop."""

    def __init__(self) -> None:
        self._queue: deque[ModelEvent] = deque()
        self._arrived = asyncio.Event()
        self._lost = 0
        self._open = True

    def put(self, event: ModelEvent) -> None:
        """Queue an event, or count it as lost where the reader is too far behind."""
        if event.type == "progress" and len(self._queue) >= PROGRESS_QUEUE:
            return
        if len(self._queue) >= QUEUE:
            self._lost += 1
            return
        self._queue.append(event)
        self._arrived.set()

    def close(self) -> None:
        """There will be no more."""
        self._open = False
        self._arrived.set()

    async def take(self, timeout_s: float) -> list[ModelEvent] | None:
        """What has come since the last call; [] when nothing came in time, None after the end."""
        if not self._queue and self._open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
        self._arrived.clear()
        events, lost = list(self._queue), self._lost
        self._queue.clear()
        self._lost = 0
        if lost:
            events.append(ModelEvent(type="gap", time=time.time(), count=lost))
        return None if not events and not self._open else events


class _Task:
    """An order under way. The copy thread writes the bytes, the loop reads them."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.started_s = time.monotonic()
        self.told_s = 0.0
        self.done_bytes = 0
        self.total_bytes: int | None = None


class Watch:
    """Sees everything once and shows it to many. All but `progress` belongs to the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[str, _Task] = {}
        self._orders: dict[int, Order] = {}
        self._troubles: dict[str, str] = {}
        self._origins: dict[str, Order] = {}
        self._failed_forks: dict[str, str] = {}
        self._readers: dict[Subscription, None] = {}

    def see(self, news: Event | Action) -> None:
        """The leader heard or decided something."""
        order = None
        if isinstance(news, Order) and news.verb.ends:
            self._orders[news.id] = news
            self._tasks[news.model] = _Task(news)
        elif isinstance(news, Done | Failed):
            order = self._orders.pop(news.order, None)
            if order is not None:
                self._tasks.pop(order.model, None)
        self._note_trouble(news, order)
        event = told(news, order, time.time())
        if event is not None:
            self._tell(event)

    def progress(self, model: str, done_bytes: int, total_bytes: int) -> None:
        """Bytes moved for the order under way. Any thread."""
        task = self._tasks.get(model)
        if task is None:
            return
        task.done_bytes, task.total_bytes = done_bytes, total_bytes
        now = time.monotonic()
        if now - task.told_s >= PROGRESS_EVERY_S or done_bytes >= total_bytes:
            task.told_s = now
            self._loop.call_soon_threadsafe(self._tell_progress, task, done_bytes, total_bytes)

    def under_way(self, model: str) -> UnderWay | None:
        """What is being done with a model, and how far it is."""
        task = self._tasks.get(model)
        if task is None:
            return None
        return UnderWay(
            order=task.order.id, verb=task.order.verb.value, why=task.order.why,
            for_s=round(time.monotonic() - task.started_s, 3), done_bytes=task.done_bytes, total_bytes=task.total_bytes,
        )  # fmt: skip

    def trouble(self, model: str) -> str | None:
        """Why its last order failed, or it was torn down, or who waited was refused; None once an order succeeded."""
        return self._troubles.get(model)

    def origin(self, model: str) -> Order | None:
        """The order by which it became Active the last time."""
        return self._origins.get(model)

    def failed_fork(self, model: str) -> str | None:
        """Why the last copy from a peer failed; None once one succeeded or is under way."""
        return self._failed_forks.get(model)

    @contextlib.contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """News from now on."""
        reader = Subscription()
        self._readers[reader] = None
        try:
            yield reader
        finally:
            self._readers.pop(reader, None)

    def close(self) -> None:
        """End every subscription: the server stops."""
        for reader in self._readers:
            reader.close()

    def _note_trouble(self, news: Event | Action, order: Order | None) -> None:
        match news:
            case Order(model=model, verb=Verb.FORK):
                self._failed_forks.pop(model, None)
            case Done() if order is not None:
                self._troubles.pop(order.model, None)
                if order.verb.raises:
                    self._origins[order.model] = order
            case Failed(reason=reason) if order is not None:
                self._troubles[order.model] = reason
                if order.verb is Verb.FORK:
                    self._failed_forks[order.model] = reason
            case Lost(_, model):
                self._troubles[model] = LOST
            case Refuse(model, why):
                self._troubles[model] = why

    def _tell_progress(self, task: _Task, done_bytes: int, total_bytes: int) -> None:
        order = task.order
        if self._tasks.get(order.model) is task:  # else it has ended since
            self._tell(ModelEvent(
                type="progress", time=time.time(), model=order.model, order=order.id, verb=order.verb.value,
                done_bytes=done_bytes, total_bytes=total_bytes,
            ))  # fmt: skip

    def _tell(self, event: ModelEvent) -> None:
        for reader in self._readers:
            reader.put(event)
