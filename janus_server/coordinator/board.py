"""The last view of a session and all who wait for the next one. Both kinds of session own one; readers only read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from janus_server.coordinator.records import Change, View, changes


class Board:
    """Lives on the loop. Nothing is queued: a reader compares what it saw with what there is, so it can be slow."""

    def __init__(self) -> None:
        self.view = View()
        self._news = asyncio.Event()
        self._closed = False

    def post(self, view: View) -> None:
        if view != self.view:
            self.view = view
            self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    async def observe(self) -> AsyncIterator[Change]:
        seen = View()
        while True:
            news, view = self._news, self.view
            for change in changes(seen, view):
                yield change
            seen = view
            if self._closed and self.view == seen:
                return
            await news.wait()

    async def changed(self, since: View, limit_s: float) -> None:
        """Wait until the view is another one, at most this long."""
        if self.view is since and not self._closed:
            await waited(self._news, limit_s)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


async def waited(event: asyncio.Event, limit_s: float) -> None:
    """Wait for the event, at most this long. Not asyncio.wait_for: in Python 3.11 it drops a cancellation that comes
    together with the event, and a session that closes would wait for its tasks for ever."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
