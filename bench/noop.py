"""A server that streams tokens at a set pace and computes nothing: the bench client is measured and tested against it.

`janus bench client` and tests run it in a process of its own; it prints its address and serves until it is killed. It
speaks just enough HTTP for the client: bodies with a length, chunked answers, keep-alive. A token costs it one prepared
write, so that on a small machine most of the processor is left to the client.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any, Final

_TICK_S: Final = 0.001
_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


class Noop:
    """All streams of one server, on a wheel of 1 ms ticks: no timer per stream."""

    def __init__(self, interval_s: float) -> None:
        self.streams = 0
        self.most_streams = 0
        self._slots = max(1, round(interval_s / _TICK_S))
        self._wheel: list[list[_Stream]] = [[] for _ in range(self._slots)]
        self._at = 0

    def add(self, stream: _Stream) -> None:
        """Its first token comes with the next tick, its others one turn of the wheel apart."""
        self.streams += 1
        self.most_streams = max(self.most_streams, self.streams)
        self._wheel[(self._at + 1) % self._slots].append(stream)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s += _TICK_S
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            self._at = (self._at + 1) % self._slots
            waiting, self._wheel[self._at] = self._wheel[self._at], []
            alive = [stream for stream in waiting if stream.step()]
            self.streams -= len(waiting) - len(alive)
            self._wheel[self._at] += alive


class _Stream:
    """One answer under way."""

    def __init__(self, transport: asyncio.Transport, body: dict[str, Any]) -> None:
        self._transport = transport
        self._chat = "messages" in body
        self._left = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        self._sent = 0
        prompt = body.get("prompt") or body.get("messages") or ""
        self._prompt_tokens = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
        self._token = _chunk(_event(self._chat, " a", None))
        transport.write(_HEAD)

    def step(self) -> bool:
        """Write one token, and the end after the last; False when there is nothing more to come."""
        if self._transport.is_closing():
            return False
        self._left -= 1
        self._sent += 1
        if self._left > 0:
            self._transport.write(self._token)
            return True
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._sent,
            "total_tokens": self._prompt_tokens + self._sent,
        }
        last = json.dumps({"choices": [], "usage": usage}).encode()
        ending = self._token + _chunk(_event(self._chat, "", "length")) + _chunk(b"data: " + last + b"\n\n")
        self._transport.write(ending + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return False


class _Peer(asyncio.Protocol):
    """A client's connection."""

    def __init__(self, noop: Noop) -> None:
        self._noop = noop
        self._transport: asyncio.Transport | None = None
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or self._transport is None:
            return
        head = self._buffer[:end].lower()
        if head.startswith(b"get "):
            self._buffer = b""
            self._transport.write(_models())
            return
        size = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        if len(self._buffer) - end - 4 < size:
            return
        body, self._buffer = self._buffer[end + 4 : end + 4 + size], self._buffer[end + 4 + size :]
        self._noop.add(_Stream(self._transport, json.loads(body)))


async def serve(interval_s: float) -> None:
    """Serve on an ephemeral port of the loopback and print its address."""
    noop = Noop(interval_s)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Peer(noop), "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await noop.run()


def main(arguments: Sequence[str]) -> int:
    """INTERVAL_S between the tokens of a stream."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(float(arguments[0])))
    return 0


def _event(chat: bool, text: str, finish: str | None) -> bytes:
    if chat:
        choice = {"index": 0, "delta": {"content": text} if text else {}, "logprobs": None, "finish_reason": finish}
    else:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    event = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1700000000,
        "model": "noop",
        "choices": [choice],
        "usage": None,
    }
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _models() -> bytes:
    body = json.dumps({"object": "list", "data": [{"id": "noop", "object": "model"}]}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
