"""Streams between nodes on real sockets: whole and once whatever happens to connections, none held up by another."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from wire_nodes import Node, Numbers, node, run_of, token_at, tokens_of, until

from janus_server.wire import asking, serving
from janus_server.wire.connection import QUEUE_MOST_BYTES
from janus_server.wire.credits import AHEAD_ITEMS
from janus_server.wire.frames import Role, write
from janus_server.wire.trouble import Trouble


def expected(count: int) -> list[int]:
    return [token_at(position) for position in range(count)]


def nothing() -> None:
    pass


def cut_streams(one: Node) -> int:
    """Break every stream connection that a node answers, as a network does: without a word. How many those were."""
    found = [s.stream for s in one.listener._servings.values() if s.stream is not None]
    for connection in found:
        connection._socket._req.transport.abort()  # type: ignore[attr-defined]
    return len(found)


async def test_a_request_is_run_once_and_answered_whole() -> None:
    async with node("a") as a, node("b") as b:
        link = await a.link(b.me)
        reading = link.asking.run(run_of("r1", 5000), 0.0, None, nothing)
        assert await tokens_of(reading) == expected(5000)
        assert reading.broken is None and reading.count == 5000
        assert b.station.began == ["r1"]
        await until(lambda: len(link.asking) == 0 and not b.listener._servings["a"]._flow)


async def test_a_prompt_of_megabytes_travels_and_holds_up_nobody() -> None:
    async with node("a") as a, node("b", every_s=0.002) as b:
        link = await a.link(b.me)
        short = link.asking.run(run_of("short", 300), 0.0, None, nothing)
        long = link.asking.run(run_of("long", 3, prompt=1_500_000), 0.0, None, nothing)
        assert await tokens_of(short) == expected(300)
        assert await tokens_of(long) == expected(3)
        assert b.station.prompts == [8, 1_500_000]
        assert [t for _, _, t in a.troubles if t is not None] == []


async def test_more_long_prompts_at_once_than_a_queue_may_hold_all_arrive() -> None:
    async with node("a") as a, node("b") as b:
        link = await a.link(b.me)
        prompt = tuple(range(100_000, 400_000))
        runs = [run_of(f"r{i}", 3) for i in range(60)]
        runs = [msgspec.structs.replace(r, request=msgspec.structs.replace(r.request, prompt=prompt)) for r in runs]
        assert len(write(runs[0])) * len(runs) > QUEUE_MOST_BYTES
        readings = [link.asking.run(run, 0.0, None, nothing) for run in runs]
        assert [await tokens_of(reading) for reading in readings] == [expected(3)] * 60
        assert b.station.began == [run.id for run in runs]
        assert [t for _, _, t in a.troubles if t is not None] == []


async def test_connections_that_break_in_the_middle_lose_nothing_and_repeat_nothing() -> None:
    async with node("a") as a, node("b", every_s=0.001) as b:
        link = await a.link(b.me)
        readings = [link.asking.run(run_of(f"r{i}", 600), 0.0, None, nothing) for i in range(8)]
        answers = [asyncio.create_task(tokens_of(reading)) for reading in readings]
        breaks = 0
        while not all(task.done() for task in answers):
            await asyncio.sleep(0.1)
            breaks += cut_streams(b)
        assert [task.result() for task in answers] == [expected(600)] * 8
        assert breaks > 3
        assert sorted(b.station.began) == sorted(f"r{i}" for i in range(8))  # each was begun once


async def test_a_slow_reader_holds_up_nobody_and_ends_when_it_is_too_far_behind() -> None:
    async with node("a") as a, node("b") as b:
        link = await a.link(b.me)
        count = AHEAD_ITEMS + 2000
        asleep = link.asking.run(run_of("asleep", count, window=64), 0.0, None, nothing)
        slow = link.asking.run(run_of("slow", 400, window=16), 0.0, None, nothing)
        slowly = asyncio.create_task(tokens_of(slow, pause_s=0.01))
        for i in range(10):
            assert await tokens_of(link.asking.run(run_of(f"r{i}", 1000), 0.0, None, nothing)) == expected(1000)
        await until(lambda: asleep.over)
        assert asleep.broken is Trouble.SLOW
        assert ("asleep", None) in b.station.cancelled
        assert [emit.token for emit in asleep.drain()] == expected(64)  # what it was allowed, and not one more
        assert await slowly == expected(400)
        assert slow.broken is None


async def test_a_cancel_reaches_the_node_that_runs_it_even_where_the_connection_breaks() -> None:
    async with node("a") as a, node("b", every_s=0.005) as b:
        link = await a.link(b.me)
        first = link.asking.run(run_of("first", 100_000), 0.0, None, nothing)
        second = link.asking.run(run_of("second", 100_000), 0.0, None, nothing)
        await first.wait()
        first.cancel()
        await until(lambda: b.station.cancelled == [("first", None)])
        cut_streams(b)
        second.cancel()  # while there is no connection, or one that is already dead
        await until(lambda: ("second", None) in b.station.cancelled)
        assert first.broken is Trouble.CLOSED and second.broken is Trouble.CLOSED


async def test_the_cancel_of_one_choice_is_told_with_its_index() -> None:
    async with node("a") as a, node("b", every_s=0.01) as b:
        link = await a.link(b.me)
        reading = link.asking.run(run_of("r", 100_000), 0.0, None, nothing)
        reading.cancel(0)
        await until(lambda: ("r", 0) in b.station.cancelled)
        other = link.asking.run(run_of("other", 100_000), 0.0, None, nothing)
        await other.wait()
        cut_streams(b)
        other.cancel(0)  # into a connection that is dead already
        await until(lambda: ("other", 0) in b.station.cancelled)
        reading.cancel()
        other.cancel()


async def test_a_request_asked_for_before_there_is_a_connection_runs_when_there_is() -> None:
    async with node("a") as a, node("b") as b:
        link = await a.link(b.me, wait=False)
        reading = link.asking.run(run_of("early", 10), 0.0, None, nothing)
        assert await tokens_of(reading) == expected(10)
        assert b.station.began == ["early"]


async def test_what_cannot_be_run_there_is_answered_so() -> None:
    async with node("a") as a, node("b") as b:
        link = await a.link(b.me)
        run = run_of("r", 10)
        wrong = link.asking.run(
            type(run)(stream=0, id="x", call="x", upto=8, request=type(run.request)(
                id="x", model="other", prompt=(1,), max_tokens=1)), 0.0, None, nothing)  # fmt: skip
        await wrong.wait()
        assert wrong.broken is Trouble.NOT_HERE
        late = link.asking.run(run_of("late", 10), 0.0, 0.001, nothing)
        await late.wait()
        assert late.broken is Trouble.TOO_LATE
        unsound = link.asking.run(run_of("unsound", 10, prompt=0), 0.0, None, nothing)
        await unsound.wait()
        assert unsound.broken is Trouble.UNSOUND
        assert b.station.began == []


async def test_streams_without_end_are_refused_at_either_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_STREAMS", 2)
    async with node("a") as a, node("b", every_s=0.01) as b:
        link = await a.link(b.me)
        readings = [link.asking.run(run_of(f"r{i}", 20), 0.0, None, nothing) for i in range(3)]
        await until(lambda: readings[2].over)
        assert readings[2].broken is Trouble.CROWDED
        monkeypatch.setattr(asking, "MOST_STREAMS", 2)
        assert link.asking.run(run_of("r3", 20), 0.0, None, nothing).broken is Trouble.CROWDED
        assert [await tokens_of(reading) for reading in readings[:2]] == [expected(20)] * 2
        assert b.station.began == ["r0", "r1"]


async def test_what_runs_for_a_node_that_stays_away_is_cancelled() -> None:
    async with node("b", every_s=0.01, resume_s=0.3) as b:
        async with node("a") as a:
            link = await a.link(b.me)
            link.asking.run(run_of("orphan", 100_000), 0.0, None, nothing)
            await until(lambda: b.station.began == ["orphan"])
        await until(lambda: ("orphan", None) in b.station.cancelled)


async def test_what_runs_for_a_process_that_is_said_to_be_gone_is_cancelled_at_once() -> None:
    async with node("a") as a, node("b", every_s=0.01) as b:
        link = await a.link(b.me)
        reading = link.asking.run(run_of("r", 100_000), 0.0, None, nothing)
        await reading.wait()
        b.listener.forget("a", "another")
        assert b.listener.running == 1
        b.listener.forget("a", a.me.incarnation)
        assert b.station.cancelled == [("r", None)] and b.listener.running == 0
        await until(lambda: reading.broken is Trouble.LOST)  # it lives after all, and is told so


async def test_a_node_that_closes_its_door_ends_what_it_ran() -> None:
    async with node("a") as a:
        async with node("b", every_s=0.01) as b:
            link = await a.link(b.me)
            reading = link.asking.run(run_of("r", 100_000), 0.0, None, nothing)
            await reading.wait()
        await reading.wait()
        await until(lambda: reading.over)
        assert reading.broken is Trouble.LOST
        assert reading.streamed
        assert link.state(Role.STREAM) is not None


async def test_a_second_request_under_one_id_replaces_the_first() -> None:
    async with node("a") as a, node("b", every_s=0.01) as b:
        assert isinstance(b.station, Numbers)
        link = await a.link(b.me)
        first = link.asking.run(run_of("same", 100_000), 0.0, None, nothing)
        await first.wait()
        second = link.asking.run(run_of("same", 20), 0.0, None, nothing)
        await until(lambda: first.over)
        assert first.broken is Trouble.REPLACED
        assert await tokens_of(second) == expected(20)
