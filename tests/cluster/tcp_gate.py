"""A gate between a client and a server that a test can shut: open, silent (as a cut network is), or talking rubbish."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from types import TracebackType


class Mode(enum.Enum):
    OPEN = "open"
    SILENT = "what is sent is kept, new connections are taken and left alone"
    RUBBISH = "everything is answered with what nobody understands"


class Gate:
    """`endpoint` leads to `target` (both host:port). Each piece that passes is late by delay_s."""

    def __init__(self, target: str, delay_s: float = 0.0) -> None:
        self.mode = Mode.OPEN
        self.endpoint = ""
        self._target = target
        self._delay_s = delay_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Gate:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # Cancelled by the gate only; the stream's own callback would report it as an error.
            with contextlib.suppress(OSError, asyncio.CancelledError):
                host, _, port = self._target.partition(":")
                onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
                with contextlib.closing(onward_writer):
                    await asyncio.gather(
                        self._pass(reader, onward_writer, writer), self._pass(onward_reader, writer, writer)
                    )
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: asyncio.StreamWriter
    ) -> None:
        while piece := await reader.read(1 << 16):
            await asyncio.sleep(self._delay_s)
            while self.mode is Mode.SILENT:
                await asyncio.sleep(0.02)
            if self.mode is Mode.RUBBISH:
                client.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{rubbish}")
            else:
                writer.write(piece)
                await writer.drain()
        writer.close()
