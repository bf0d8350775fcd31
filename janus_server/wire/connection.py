"""One open connection between two nodes: frames in and out, beats both ways, and one reason when it ends.

`link` and `listen` run it after the handshake; `take` gets what comes, `more` is asked for what may be sent when
nothing else waits. Urgent frames overtake the others, and long ones travel in pieces. It knows nothing of what they
mean.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol

import aiohttp
import msgspec

from janus_server.wire.frames import WHOLE_MOST_BYTES, Beat, Frame, Piece, Role, read, write
from janus_server.wire.pieces import Assembly, cut
from janus_server.wire.pulse import Heartbeat, Pulse
from janus_server.wire.trouble import Trouble

log = logging.getLogger("janus.wire")

# Two requests of the largest kind.
QUEUE_MOST_BYTES: Final = 2 * WHOLE_MOST_BYTES
# Answers to what comes: whoever asks without reading them is left.
URGENT_MOST: Final = 1 << 16
_CLOSE_CODE: Final = 4000


class Socket(Protocol):
    """What aiohttp's two kinds of WebSocket have in common."""

    async def send_bytes(self, data: bytes) -> None: ...

    async def receive(self) -> aiohttp.WSMessage: ...

    async def close(self, *, code: int = ..., message: bytes = ...) -> bool: ...


class Connection:
    """Lives on the loop. `run` ends with the connection."""

    def __init__(
        self,
        socket: Socket,
        role: Role,
        decoder: msgspec.msgpack.Decoder[Any],
        rate: Heartbeat,
        take: Callable[[Connection, Frame], Trouble | None],
        more: Callable[[], Iterable[Frame]],
    ) -> None:
        """take() may not wait; what it returns ends the connection."""
        self.role = role
        self.pulse = Pulse(rate, time.monotonic())
        self._socket = socket
        self._decoder = decoder
        self._rate = rate
        self._take = take
        self._more = more
        self._urgent: deque[bytes] = deque()
        self._queue: deque[bytes] = deque()
        self._queue_bytes = 0
        self._cutting: Iterator[bytes] = iter(())
        self._assembly = Assembly()
        self._wake = asyncio.Event()
        self._over: asyncio.Future[Trouble] = asyncio.get_running_loop().create_future()

    def send(self, frame: Frame) -> None:
        """In its turn."""
        message = write(frame)
        self._queue_bytes += len(message)
        if self._queue_bytes > QUEUE_MOST_BYTES:
            self.end(Trouble.BACKLOG)
            return
        self._queue.append(message)
        self._wake.set()

    def send_first(self, frame: Frame) -> None:
        """Before all that waits. Long ones only as the first of a connection: their pieces must not meet others."""
        self._urgent.extend(cut(write(frame)))
        if len(self._urgent) > URGENT_MOST:
            self.end(Trouble.BACKLOG)
        self._wake.set()

    def wake(self) -> None:
        """`more` has something to send."""
        self._wake.set()

    def end(self, why: Trouble) -> None:
        if not self._over.done():
            self._over.set_result(why)

    async def run(self) -> Trouble:
        """Until it ends; why it did."""
        tasks = [asyncio.create_task(work) for work in (self._reading(), self._writing(), self._beating())]
        try:
            waited: list[asyncio.Future[Any]] = [self._over, *tasks]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and (error := task.exception()) is not None:
                    log.error("a link ends by a bug", exc_info=error)
                    self.end(Trouble.FAILED)
            self.end(Trouble.GONE)
            return self._over.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.end(Trouble.CLOSED)
            await close(self._socket, self._over.result())

    async def _reading(self) -> None:
        most_bytes = self.role.most_bytes
        while not self._over.done():
            message = await receive(self._socket)
            if isinstance(message, Trouble):
                return self.end(message)
            trouble = self._took(read(message, self._decoder, most_bytes))
            if trouble is not None:
                return self.end(trouble)

    def _took(self, frame: Frame | Trouble) -> Trouble | None:
        match frame:
            case Trouble():
                return frame
            case Beat():
                return None if self.pulse.hear(frame) else Trouble.GARBAGE
            case Piece():
                whole = self._assembly.add(frame)
                if whole is None or isinstance(whole, Trouble):
                    return whole
                inner = read(whole, self._decoder, WHOLE_MOST_BYTES)
                return Trouble.GARBAGE if isinstance(inner, Piece) else self._took(inner)
        return self._take(self, frame)

    async def _writing(self) -> None:
        try:
            while True:
                while (message := self._next()) is not None:
                    await self._socket.send_bytes(message)
                self._wake.clear()
                await self._wake.wait()
        except (ConnectionError, RuntimeError):  # aiohttp raises the latter once its end is closed
            self.end(Trouble.GONE)

    def _next(self) -> bytes | None:
        if self._urgent:
            return self._urgent.popleft()
        piece = next(self._cutting, None)
        if piece is not None:
            return piece
        if not self._queue:
            for frame in self._more():
                self.send(frame)
        if not self._queue:
            return None
        message = self._queue.popleft()
        self._queue_bytes -= len(message)
        self._cutting = cut(message)
        return next(self._cutting)

    async def _beating(self) -> None:
        while True:
            beat = self.pulse.tick(time.monotonic())
            if beat is None:
                return self.end(Trouble.SILENT)
            self.send_first(beat)
            await asyncio.sleep(self._rate.beat_s)


async def receive(socket: Socket) -> bytes | Trouble:
    """The next message, or why there is none."""
    message = await socket.receive()
    match message.type:
        case aiohttp.WSMsgType.BINARY:
            return bytes(message.data)
        case aiohttp.WSMsgType.CLOSE:
            return _reason(message)
        case aiohttp.WSMsgType.ERROR:
            code = getattr(message.data, "code", None)
            return Trouble.TOO_LONG if code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG else Trouble.GARBAGE
        case aiohttp.WSMsgType.TEXT:
            return Trouble.GARBAGE
    return Trouble.GONE


async def close(socket: Socket, why: Trouble) -> None:
    try:
        await socket.close(code=_CLOSE_CODE, message=why.value.encode())
    except (ConnectionError, RuntimeError):
        pass


def _reason(message: aiohttp.WSMessage) -> Trouble:
    """What the other end said when it closed: one of our own words, or nothing."""
    named = Trouble.named(message.extra) if message.data == _CLOSE_CODE else None
    return Trouble.GONE if named is None else named
