"""Small nodes on real sockets: a listener, links, and a station that writes numbers instead of running a model.

Run as a program it is such a node in a process of its own, that can be killed and stopped: it prints its address and
then, when told to on its standard input, what it has seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from janus_server.orders import Dispatch, Report, Ticket, Traffic
from janus_server.types import Emit, FinishReason, Request
from janus_server.wire.asking import Reading
from janus_server.wire.credits import WINDOW_ITEMS
from janus_server.wire.frames import Give, Outcome, Question, Replied, Role, Run, Told
from janus_server.wire.handshake import Identity, Secret
from janus_server.wire.link import Link, Links, Timing
from janus_server.wire.listen import WireListener, bind
from janus_server.wire.pulse import Heartbeat
from janus_server.wire.serving import Answering
from janus_server.wire.tls import TlsFiles, answering_context, dialling_context, own_digest
from janus_server.wire.trouble import Trouble

SECRET = "0123456789abcdef" * 4
# Quick enough for tests, slow enough for a machine that does other things too.
QUICK = Timing(heartbeat=Heartbeat(beat_s=0.05, silent_s=1.0), longest_s=0.2, lost_s=3.0)


def token_at(position: int) -> int:
    return (position * 7919 + 13) % 50_000


def request_of(id: str, tokens: int, prompt: int = 8, n: int = 1) -> Request:
    return Request(id=id, model="m", prompt=tuple(range(prompt)), max_tokens=tokens, n=n)


def run_of(id: str, tokens: int, *, prompt: int = 8, window: int = WINDOW_ITEMS) -> Run:
    return Run(stream=0, id=id, call=id, upto=window, request=request_of(id, tokens, prompt))


class Numbers:
    """A station: answers a request with the numbers of its positions, `every_s` apart, or all as fast as they go."""

    def __init__(self, every_s: float = 0.0) -> None:
        self.every_s = every_s
        self.now_term = 1
        self.began: list[str] = []
        self.cancelled: list[tuple[str, int | None]] = []
        self.events: list[Told] = []
        self.given_ids: list[int] = []
        self.prompts: list[int] = []
        self.on_told: Callable[[Identity, int, Sequence[Told]], None] | None = None
        self.on_given: Callable[[Give], None] | None = None
        self.on_question: Callable[[int, Question], Replied | None] = lambda term, question: None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def term(self) -> int:
        return self.now_term

    def heard(self, peer: Identity, term: int, events: Sequence[Told]) -> None:
        self.events += events
        if self.on_told is not None:
            self.on_told(peer, term, events)

    def given(self, peer: Identity, give: Give, until_s: float) -> Outcome:
        self.given_ids.append(give.id)
        if self.on_given is not None:
            self.on_given(give)
        return Outcome.APPLIED

    def answer(self, peer: Identity, term: int, question: Question) -> Replied | None:
        return self.on_question(term, question)

    def run(self, run: Run, answer: Answering) -> Trouble | None:
        if run.request.model != "m":
            return Trouble.NOT_HERE
        self.began.append(run.id)
        self.prompts.append(len(run.request.prompt))
        self._tasks[run.id] = asyncio.create_task(self._write(run, answer))
        return None

    def cancel(self, answer: Answering, index: int | None) -> None:
        self.cancelled.append((answer.run.id, index))
        if index is None and answer.run.id in self._tasks:
            self._tasks[answer.run.id].cancel()

    async def _write(self, run: Run, answer: Answering) -> None:
        start = run.known[0].position if run.known else 0
        for position in range(start, run.request.max_tokens):
            last = position == run.request.max_tokens - 1
            finish = FinishReason.LENGTH if last else None
            answer.put(Emit(run.request.id, 0, token_at(position), finish=finish))
            if self.every_s:
                await asyncio.sleep(self.every_s)
            elif position % 64 == 63:
                await asyncio.sleep(0)
        answer.end()


class Node:
    """One node of a small cluster."""

    def __init__(self, me: Identity, links: Links, listener: WireListener, station: Numbers) -> None:
        self.me = me
        self.links = links
        self.listener = listener
        self.station = station
        self.troubles: list[tuple[str, Role, Trouble | None]] = []
        self.outcomes: list[tuple[str, int, int, Outcome]] = []
        self.refused: list[tuple[str, Trouble]] = []

    async def link(self, peer: Identity, *, wait: bool = True) -> Link:
        link = self.links.open(
            peer,
            lambda *outcome: self.outcomes.append(outcome),
            lambda *trouble: self.troubles.append(trouble),
        )
        if wait:
            await asyncio.wait_for(link.opened(Role.CONTROL), 20)
            await asyncio.wait_for(link.opened(Role.STREAM), 20)
        return link

    async def close(self) -> None:
        await self.links.close()
        await self.listener.close()


@contextlib.asynccontextmanager
async def node(
    name: str, *, secret: str = SECRET, cluster: str = "c", every_s: float = 0.0, timing: Timing = QUICK,
    tls: TlsFiles | None = None, incarnation: str = "", port: int = 0, resume_s: float = 10.0,
) -> AsyncIterator[Node]:  # fmt: skip
    listening = bind("127.0.0.1", port, tls is not None)
    port = listening.getsockname()[1]
    scheme = "ws" if tls is None else "wss"
    me = Identity(cluster, name, incarnation or os.urandom(8).hex(), f"{scheme}://127.0.0.1:{port}")
    station, key = Numbers(every_s), Secret(secret)
    refused: list[tuple[str, Trouble]] = []
    listener = await WireListener.open(
        listening, me, key, station, timing=timing, resume_s=resume_s,
        tls=None if tls is None else answering_context(tls), certificate=b"" if tls is None else own_digest(tls),
        refused=lambda who, why: refused.append((who, why)),
    )  # fmt: skip
    one = Node(me, Links(me, key, None if tls is None else dialling_context(tls), timing), listener, station)
    one.refused = refused
    try:
        yield one
    finally:
        await one.close()


async def tokens_of(reading: Reading, *, pause_s: float = 0.0) -> list[int]:
    """All that comes of a stream, read to its end."""
    tokens: list[int] = []
    while True:
        await asyncio.wait_for(reading.wait(), 30)
        emits = reading.drain()
        tokens += [emit.token for emit in emits if emit.token is not None]
        if reading.over and not emits:
            return tokens
        if pause_s:
            await asyncio.sleep(pause_s)


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> float:
    """Wait for it; how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, "it did not happen in time"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


def traffic(id: str) -> Traffic:
    return Traffic(arrived=(Ticket(id=id, model="m", prompt_tokens=100, work_s=0.01, arrived_s=1.0, ttft_s=0.5),))


def dispatch(id: str, to: str) -> Dispatch:
    return Dispatch(to, (id,), "it is free")


def cut_control(one: Node) -> None:
    """Break the control connections that lead to it."""
    for serving in one.listener._servings.values():
        if serving.control is not None:
            serving.control._socket._req.transport.abort()  # type: ignore[attr-defined]


class Peer:
    """A node in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, me: Identity) -> None:
        self.process = process
        self.me = me

    async def ask(self, *words: str) -> dict[str, Any]:
        """`seen`: what its station has seen. `lead` and an identity: dial that node, and answer tickets from it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n")
        return json.loads(await asyncio.wait_for(self.process.stdout.readline(), 20))

    async def seen(self) -> dict[str, Any]:
        return await self.ask("seen")


@contextlib.asynccontextmanager
async def peer_process(name: str, *, every_s: float = 0.0, port: int = 0) -> AsyncIterator[Peer]:
    root = Path(__file__).resolve().parents[2]
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, name, str(every_s), str(port), stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        yield Peer(process, Identity(**json.loads(line)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _be_a_peer(name: str, every_s: float, port: int) -> None:
    async with node(name, every_s=every_s, port=port) as one:
        _say(_words(one.me))
        while line := await asyncio.to_thread(sys.stdin.readline):
            match json.loads(line):
                case ["lead", words]:
                    await _lead(one, Identity(**json.loads(words)))
                    _say({})
                case _:
                    _say(_seen(one))


async def _lead(one: Node, follower: Identity) -> None:
    link = await one.link(follower)
    ids = iter(range(10**9))

    def answer(peer: Identity, term: int, events: Sequence[Told]) -> None:
        for event in events:
            if isinstance(event, Traffic) and event.arrived:
                link.asking.give(term, next(ids), Dispatch(peer.node, (event.arrived[0].id,), "it is free"), 2.0)

    one.station.on_told = answer


def _seen(one: Node) -> dict[str, Any]:
    station = one.station
    reports = [event.node for event in station.events if isinstance(event, Report)]
    cancelled = [id for id, _ in station.cancelled]
    return {"began": station.began, "cancelled": cancelled, "events": reports, "cpu_s": time.process_time()}


def _words(me: Identity) -> dict[str, str]:
    return {"cluster": me.cluster, "node": me.node, "incarnation": me.incarnation, "endpoint": me.endpoint}


def as_words(me: Identity) -> str:
    return json.dumps(_words(me))


def _say(words: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_be_a_peer(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
