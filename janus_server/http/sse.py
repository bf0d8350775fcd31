"""Server-sent events on one aiohttp response: headers, drain, keep-alive comments, and an end in any case.

`generate` writes through it; what an event says is `api`'s business. The response starts with the first write, so
that a refusal before it can still be an HTTP status. A reader that leaves the socket full for too long is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from janus_server.errors import Refused

SMALL_BYTES = 16 * 1024
PIECE_BYTES = 256 * 1024
PING = b": ping\n\n"  # a comment: clients skip it, proxies see traffic


class SseWriter:
    """Writes whole events. Once `started`, a byte is out and only an event can report trouble: `error` words it."""

    def __init__(self, request: web.Request, stall_s: float, error: Callable[[Refused], bytes]) -> None:
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        self._request = request
        self._stall_s = stall_s
        self._error = error
        self._wrote = False
        self._transport: asyncio.Transport | None = None
        self._chunked = False

    @property
    def started(self) -> bool:
        return self.response.prepared

    @property
    def flowing(self) -> bool:
        """True when `send_now` can be used: a byte is out, the reader is there and keeps up."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and transport.get_write_buffer_size() == 0

    def send_now(self, events: bytes) -> None:
        """Write a few events while `flowing`, framed here: around a write aiohttp does more than the write costs."""
        if self._transport is not None:
            self._transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
            self._wrote = True

    async def send(self, events: bytes) -> None:
        """Write events and wait while the socket is full. Raises ConnectionError when the reader is gone or stalled."""
        if not self.response.prepared:
            await self.response.prepare(self._request)
            self._transport = self._request.transport
            self._chunked = "Transfer-Encoding" in self.response.headers
        transport = self._request.transport
        if transport is not None and len(events) <= SMALL_BYTES and transport.get_write_buffer_size() == 0:
            # Cannot block: it stays under the transport's mark even if the kernel takes nothing. Saves a timer.
            await self.response.write(events)
            return
        try:
            async with asyncio.timeout(self._stall_s):
                await self.response.write(events)
        except TimeoutError:
            if transport is not None:
                transport.abort()
            raise ConnectionResetError("the reader stalled") from None

    async def ping(self) -> None:
        """A comment, unless something was written since the last one was due."""
        if not self._wrote:
            await self.send(PING)
        self._wrote = False

    async def finish(self, events: bytes) -> None:
        """The last events and the end of the body."""
        await self.send(events)
        await self.response.write_eof()

    async def fail(self, refused: Refused) -> None:
        """The error event: clients that know errors raise, the others at least see the end."""
        await self.finish(self._error(refused))


async def send_whole(request: web.BaseRequest, body: bytes, stall_s: float) -> web.StreamResponse:
    """A JSON answer. A large one is written here, piece by piece, so that it is in progress until its last byte and a
    reader who takes nothing for `stall_s` is cut off, instead of having the server keep 30 MB for it."""
    if len(body) <= PIECE_BYTES:
        return web.Response(body=body, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = len(body)
    await response.prepare(request)
    try:
        for first in range(0, len(body), PIECE_BYTES):
            async with asyncio.timeout(stall_s):
                await response.write(body[first : first + PIECE_BYTES])
        async with asyncio.timeout(stall_s):
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the reader stalled") from None
    return response
