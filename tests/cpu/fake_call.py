"""Many request streams of one API call as one: deltas in the order they came, all that are at hand at once.

`http` opens one `Merged` a call, whether it streams or not. Leaving it, by the end, by an error or by cancellation,
closes every generator that still runs, and that is what aborts the requests behind them. It knows no HTTP and no JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

import msgspec

from janus_server import types
from janus_server.errors import require


class News(msgspec.Struct, frozen=True, gc=False):
    """A delta and the number of the prompt it belongs to."""

    prompt: int
    delta: types.Delta


class Merged:
    """The merged deltas of a call's generators; one task each, so that a wait can time out without touching them."""

    def __init__(self, streams: Sequence[AsyncGenerator[types.Delta, None]]) -> None:
        self._streams = streams
        self._tasks: list[asyncio.Task[None]] = []
        self._news: list[News] = []
        self._running = 0
        self._failed: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Merged:
        for prompt, stream in enumerate(self._streams):
            task = asyncio.create_task(self._pump(prompt, stream))
            task.add_done_callback(self._ended)
            self._tasks.append(task)
            self._running += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        # Waited for, so that a request is gone from its engine before the answer's last byte is.
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def pour_into(self, sink: object) -> None:
        """Nothing is poured: all news wait for `take`."""

    async def take(self, timeout_s: float) -> list[News] | None:
        """What has come since the last call, at least one item; [] when nothing came in time; None at the end.

        Raises what a generator raised, after the deltas before it have been taken.
        """
        if not self._news and self._running and self._failed is None:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        if self._news:
            news, self._news = self._news, []
            return news
        if self._failed is not None:
            require(not self._failed.cancelled(), "a request's stream was cancelled from within")
            self._failed.result()
        return [] if self._running else None

    async def _pump(self, prompt: int, stream: AsyncGenerator[types.Delta, None]) -> None:
        async with contextlib.aclosing(stream):
            async for delta in stream:
                self._news.append(News(prompt, delta))
                self._wake()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running -= 1
        if self._failed is None and (task.cancelled() or task.exception() is not None):
            self._failed = task
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
