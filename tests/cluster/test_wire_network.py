"""A network that holds things up: a relay between two nodes that swallows or delays what goes one way."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from wire_nodes import QUICK, SECRET, Node, Numbers, dispatch, node, run_of, token_at, tokens_of, until

from janus_server.wire.frames import Outcome, Role
from janus_server.wire.handshake import Identity, Secret
from janus_server.wire.link import Links, Timing
from janus_server.wire.listen import WireListener, bind
from janus_server.wire.pulse import Heartbeat
from janus_server.wire.trouble import Trouble


class Relay:
    """Carries bytes between whoever dials its port and another one. There: to the node; back: from it."""

    def __init__(self) -> None:
        self.there, self.back = asyncio.Event(), asyncio.Event()
        self.there.set()
        self.back.set()
        self.port = 0
        self.to = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        further, back = await asyncio.open_connection("127.0.0.1", self.to)
        pairs = ((reader, back, self.there), (further, writer, self.back))
        tasks = {asyncio.create_task(self._carry(*pair)) for pair in pairs}
        self._tasks |= tasks
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for one in (writer, back):
            one.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: asyncio.Event) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await way.wait()  # what is held up is held, as a router's queue does
                writer.write(data)
                await writer.drain()

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def behind(relay: Relay, name: str, timing: Timing = QUICK, every_s: float = 0.0) -> AsyncIterator[Node]:
    """A node that advertises the relay's address."""
    listening = bind("127.0.0.1", 0, tls=False)
    relay.to = listening.getsockname()[1]
    server = await relay.open()
    me, key = Identity("c", name, "i", f"ws://127.0.0.1:{relay.port}"), Secret(SECRET)
    station = Numbers(every_s)
    listener = await WireListener.open(listening, me, key, station, timing=timing)
    one = Node(me, Links(me, key, None, timing), listener, station)
    try:
        yield one
    finally:
        relay.there.set()
        relay.back.set()
        await one.close()
        server.close()
        relay.stop()


async def test_a_way_that_carries_nothing_is_seen_by_both_ends_though_the_other_way_works() -> None:
    relay = Relay()
    async with node("a") as a, behind(relay, "b", every_s=0.002) as b:
        link = await a.link(b.me)
        reading = link.asking.run(run_of("r", 900), 0.0, None, lambda: None)
        answer = asyncio.create_task(tokens_of(reading))
        await until(lambda: reading.streamed)
        relay.there.clear()  # a still hears b, and b hears nothing of a
        await until(lambda: ("b", Role.STREAM, Trouble.SILENT) in a.troubles)
        relay.there.set()
        assert await answer == [token_at(position) for position in range(900)]
        assert b.station.began == ["r"]


async def test_an_order_that_was_held_up_on_its_way_is_not_carried_out_late() -> None:
    """The connection holds, nothing is lost, and yet: what the leader gave for 0.4 s must not happen after 1.5 s."""
    timing = Timing(heartbeat=Heartbeat(beat_s=0.05, silent_s=30.0), longest_s=0.2)
    relay = Relay()
    async with node("leader", timing=timing) as leader, behind(relay, "a", timing) as a:
        link = await leader.link(a.me)
        await asyncio.sleep(0.2)  # beats have come
        link.asking.give(1, 1, dispatch("soon", "a"), 5.0)
        await until(lambda: a.station.given_ids == [1])
        relay.there.clear()
        link.asking.give(1, 2, dispatch("late", "a"), 0.4)
        link.asking.give(1, 3, dispatch("for long", "a"), 30.0)
        await until(lambda: ("a", 1, 2, Outcome.EXPIRED) in leader.outcomes)
        await asyncio.sleep(1.0)
        relay.there.set()
        await until(lambda: a.station.given_ids == [1, 3])
        await asyncio.sleep(0.2)
        assert a.station.given_ids == [1, 3]
        assert [t for _, _, t in leader.troubles if t is not None] == []


async def test_a_slow_way_delays_and_breaks_nothing() -> None:
    relay = Relay()
    async with node("a") as a, behind(relay, "b") as b:
        link = await a.link(b.me)
        reading = link.asking.run(run_of("r", 3000), 0.0, None, lambda: None)
        answer = asyncio.create_task(tokens_of(reading))
        began = time.monotonic()
        while not answer.done() and time.monotonic() - began < 20:
            relay.back.clear()
            await asyncio.sleep(0.05)
            relay.back.set()
            await asyncio.sleep(0.01)
        assert await answer == [token_at(position) for position in range(3000)]
        assert [t for _, _, t in a.troubles if t is not None] == []


async def test_a_node_reached_at_an_address_that_is_not_its_own_refuses() -> None:
    """Somebody who relays a node's connections from another address cannot stand between two nodes."""
    relay = Relay()
    async with node("a") as a, node("b") as b:
        relay.to = int(b.me.endpoint.rpartition(":")[2])
        server = await relay.open()
        link = await a.link(Identity("c", "b", "", f"ws://127.0.0.1:{relay.port}"), wait=False)
        await until(lambda: link.state(Role.CONTROL) is Trouble.ADDRESS)
        server.close()
        relay.stop()
