"""The servers that `janus bench http` compares, each in a process of its own: our API layer over an engine that
computes nothing; bare aiohttp that writes the same bytes; and the same fed by that engine.

`http` starts this file as a program with the name of a side and the number of streams; it prints its port and serves
until it is killed. The engine is a thread like the device thread: it hands one token of every stream to the loop a
step, and makes the next step when the loop has taken the last.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

# The measured side is the server's own code, from the socket to the engine's hand-over.
from janus_server.api.plan import Target  # house: exempt — what is measured is the API layer itself
from janus_server.config import serve_config  # house: exempt — as above
from janus_server.executor import Cancel, StepReport, StepTime, Submit  # house: exempt — as above
from janus_server.flow import AtOnce, Flow
from janus_server.instance import ServedModel  # house: exempt — as above
from janus_server.streams import Streams  # house: exempt — as above
from janus_server.telemetry import Telemetry
from janus_server.types import BatcherStats, Emit, FinishReason, Load, ModelCard, Owner, Request, Sampling

MODEL: Final = "noop"
VOCAB: Final = 1000
CONTEXT: Final = 1 << 20


class Vocabulary:
    """What the API layer asks of a tokenizer: a thousand words of one to nine letters."""

    longest_token_chars = 10
    strips_first_space = False
    vocab_size = VOCAB

    def __init__(self) -> None:
        letters = "etaoinshrdlu"
        words = (
            " " + "".join(letters[(i * 7 + j * (i % 5 + 1)) % 12] for j in range(1 + i * 31 % 9)) for i in range(VOCAB)
        )
        self._bytes = tuple(word.encode() for word in words)

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token]

    def token_text(self, token: int) -> str:
        return self._bytes[token].decode()

    def is_special(self, token: int) -> bool:
        return False

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [1]

    def encode_chat(self, messages: Any, **options: Any) -> list[int]:
        return [1]

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return b"".join(map(self.token_bytes, ids)).decode()


class Engine:
    """Stands where the device thread does. Waits until `streams` requests are there, then steps them to their end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[StepReport], None], streams: int) -> None:
        self._loop = loop
        self._deliver = deliver
        self._streams = streams
        self._posted: collections.deque[Any] = collections.deque()
        self._wake = threading.Event()
        self._taken = threading.Semaphore(0)
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def post(self, command: Any) -> None:
        self._posted.append(command)
        self._wake.set()

    def _run(self) -> None:
        running: dict[str, Request] = {}
        made: dict[str, int] = {}
        step = 0
        while True:
            if len(running) < self._streams and not any(made.values()):
                self._wake.wait()
                self._wake.clear()
            while self._posted:
                match self._posted.popleft():
                    case Submit(_, request):
                        running[request.id], made[request.id] = request, 0
                    case Cancel(_, request_id):
                        running.pop(request_id, None)
                        made.pop(request_id, None)
            if running and (len(running) >= self._streams or any(made.values())):
                step += 1
                self._step(running, made, step)

    def _step(self, running: dict[str, Request], made: dict[str, int], step: int) -> None:
        start_s = time.perf_counter()
        emits = []
        for request_id, request in tuple(running.items()):
            made[request_id] += 1
            finish = FinishReason.LENGTH if made[request_id] == request.max_tokens else None
            first_s = 0.0 if made[request_id] == 1 else None
            emits.append(Emit(request_id, 0, (step * 37 + 11) % VOCAB, finish=finish, queued_s=first_s))
            if finish is not None:
                del running[request_id], made[request_id]
        now = time.perf_counter()
        stats = BatcherStats(len(emits), 0, 0, 0, 0, step * self._streams, step * self._streams)
        report = StepReport(MODEL, emits, {}, 1, stats, StepTime(len(emits), start_s, now, now, now))
        self._loop.call_soon_threadsafe(self._hand_over, report)
        self._taken.acquire()

    def _hand_over(self, report: StepReport) -> None:
        self._deliver(report)
        self._taken.release()


class Node:
    """As much of a node as the HTTP layer looks at."""

    pool_pages = 1
    free_pages = 1

    def __init__(self, streams: int) -> None:
        self.telemetry = Telemetry(30.0)
        self.reached = types.SimpleNamespace()
        self.streams = Streams(self.telemetry.arrived)
        card = ModelCard(MODEL, int(time.time()), CONTEXT, 1, 1, "float32", "noop")
        target = Target(MODEL, CONTEXT, VOCAB, (), Sampling())
        engine: Any = Engine(asyncio.get_running_loop(), self._deliver, streams)
        vocabulary: Any = Vocabulary()
        flow = Flow(MODEL, engine, AtOnce())
        flow.serve()
        self.cards = {MODEL: card}
        self.prepared = {MODEL: ServedModel(card, target, vocabulary, flow, self.streams)}
        self._listeners: list[Callable[[StepReport], None]] = []
        self._stats: dict[str, BatcherStats] = {}

    def on_step(self, listener: Callable[[StepReport], None]) -> None:
        self._listeners.append(listener)

    async def model(self, name: str) -> ServedModel | None:
        return self.prepared.get(name)

    def troubled(self) -> frozenset[str]:
        return frozenset()

    def stages(self) -> dict[str, Any]:
        return {}

    def ready(self) -> str | None:
        return None

    def refusing(self) -> str | None:
        return None

    async def turning_away(self) -> str | None:
        return None

    def stats(self) -> dict[str, BatcherStats]:
        return self._stats

    def loads(self) -> dict[str, Load]:
        return self.streams.loads(time.monotonic())

    def memory(self) -> dict[Owner, int]:
        return {}

    def _deliver(self, report: StepReport) -> None:
        if report.stats is not None:
            self._stats = {**self._stats, report.model: report.stats}
        self.streams.deliver(report)
        for listener in self._listeners:
            listener(report)


async def serve_ours(listening: socket.socket, streams: int) -> None:
    """The whole HTTP layer as `janus serve` opens it."""
    from janus_server.http.listen import Listener  # house: exempt — as above
    from janus_server.keys import KeyRing  # house: exempt — as above

    node: Any = Node(streams)
    with tempfile.TemporaryDirectory() as folder:  # settings want a model that is there, and nobody reads it
        Path(folder, "config.json").write_text("{}")
        await Listener.open(serve_config([f"{MODEL}={folder}"]), KeyRing(), node, listening, None)
    await asyncio.Event().wait()


class Script(NamedTuple):
    """What a bare server answers: headers, and the body piece by piece."""

    headers: dict[str, str]
    chunks: list[bytes]


async def serve_bare(listening: socket.socket) -> None:
    """aiohttp and nothing else, as fast as its loop turns: one piece a stream and turn."""

    async def pieces(script: Script) -> AsyncIterator[bytes]:
        for chunk in script.chunks:
            yield chunk
            await asyncio.sleep(0)  # the other streams' turn: without it one write would carry a whole answer

    await _serve_script(listening, pieces)


async def serve_fed(listening: socket.socket, streams: int) -> None:
    """aiohttp whose handlers wait for the engine's tokens and write a prepared piece for each."""
    loop = asyncio.get_running_loop()
    waiting: dict[str, asyncio.Future[None]] = {}
    engine = Engine(loop, lambda report: _wake_all(waiting, report), streams)
    numbers = itertools.count()

    async def pieces(script: Script) -> AsyncIterator[bytes]:
        name = str(next(numbers))
        tokens = len(script.chunks) - 1
        waiting[name] = loop.create_future()
        engine.post(Submit(MODEL, Request(id=name, model=MODEL, prompt=(1,), max_tokens=tokens), 0.0))
        for chunk in script.chunks[:tokens]:
            await waiting[name]
            waiting[name] = loop.create_future()
            yield chunk
        del waiting[name]
        yield script.chunks[-1]

    await _serve_script(listening, pieces)


def _wake_all(waiting: dict[str, asyncio.Future[None]], report: StepReport) -> None:
    for emit in report.emits:
        future = waiting[emit.request_id]
        if not future.done():
            future.set_result(None)


async def _serve_script(listening: socket.socket, pieces: Callable[[Script], AsyncIterator[bytes]]) -> None:
    """POST /script says what the answer to POST /stream is."""
    from aiohttp import web

    scripts = [Script({}, [])]

    async def learn(request: web.Request) -> web.Response:
        told = await request.json()
        scripts[0] = Script(told["headers"], [chunk.encode() for chunk in told["chunks"]])
        return web.Response()

    async def stream(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers=scripts[0].headers)
        await response.prepare(request)
        async for chunk in pieces(scripts[0]):
            await response.write(chunk)
        await response.write_eof()
        return response

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/script", learn)
    app.router.add_post("/stream", stream)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.SockSite(runner, listening, backlog=1024).start()
    await asyncio.Event().wait()


def main(arguments: Sequence[str]) -> int:
    """SIDE STREAMS: "ours", "bare" or "fed"."""
    import uvloop

    side, streams = arguments[0], int(arguments[1])
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listening.getsockname()[1], flush=True)
    match side:
        case "ours":
            uvloop.run(serve_ours(listening, streams))
        case "bare":
            uvloop.run(serve_bare(listening))
        case _:
            uvloop.run(serve_fed(listening, streams))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
