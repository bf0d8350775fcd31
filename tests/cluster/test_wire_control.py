"""Events and orders between nodes on real sockets: once, in order, in time, and only for the present term."""

from __future__ import annotations

import asyncio
import time

import pytest
from wire_nodes import (
    as_words,
    cut_control,
    dispatch,
    node,
    peer_process,
    run_of,
    token_at,
    tokens_of,
    traffic,
    until,
)

from janus_server.orders import Dispatch, Report
from janus_server.wire.frames import Give, Outcome, Role


async def test_events_arrive_once_and_in_order_over_connections_that_break() -> None:
    async with node("a") as a, node("leader") as leader:
        link = await a.link(leader.me)
        for number in range(400):
            assert link.asking.tell(1, (Report(f"n{number}", {}),))
            if number % 100 == 50:
                cut_control(leader)
            if number % 10 == 0:
                await asyncio.sleep(0.01)
        await until(lambda: len(leader.station.events) >= 400)
        await until(lambda: not link.asking._tray.unheard())
        assert [event.node for event in leader.station.events if isinstance(event, Report)] == [
            f"n{number}" for number in range(400)
        ]


async def test_a_leader_that_hears_nothing_is_kept_only_so_much() -> None:
    async with node("a") as a, node("leader") as leader:
        link = await a.link(leader.me)
        await leader.listener.close()
        await until(lambda: link.state(Role.CONTROL) is not None)
        told = 0
        while link.asking.tell(1, (Report("n", {}),)):
            told += 1
            assert told < 100_000
        assert told > 1000
        link.asking.forget_told()
        assert link.asking.tell(1, (Report("n", {}),))


async def test_orders_are_carried_out_once_and_answered() -> None:
    async with node("leader") as leader, node("a") as a:
        link = await leader.link(a.me)
        # Carried out, and the answer is lost on its way: it comes again.
        a.station.on_given = lambda give: cut_control(a) if give.id % 30 == 10 else None
        for id in range(100):
            assert link.asking.give(1, id, dispatch(f"r{id}", "a"), 20.0)
            if id % 10 == 0:
                await asyncio.sleep(0.02)
        await until(lambda: len(leader.outcomes) == 100)
        assert sorted(a.station.given_ids) == list(range(100))  # none twice
        assert {outcome for *_, outcome in leader.outcomes} == {Outcome.APPLIED, Outcome.ALREADY}


async def test_orders_of_an_older_term_are_stale_and_those_of_one_unheard_of_wait() -> None:
    async with node("leader") as leader, node("a") as a:
        link = await leader.link(a.me)
        a.station.now_term = 7
        link.asking.give(6, 1, dispatch("old", "a"), 5.0)
        link.asking.give(8, 2, dispatch("new", "a"), 5.0)
        await until(lambda: ("a", 6, 1, Outcome.STALE) in leader.outcomes)
        await asyncio.sleep(0.2)
        assert a.station.given_ids == []
        a.station.now_term = 8  # the coordinator has told it
        await until(lambda: ("a", 8, 2, Outcome.APPLIED) in leader.outcomes)
        assert a.station.given_ids == [2]


async def test_an_order_dies_with_its_time_wherever_it_is() -> None:
    async with node("leader") as leader, node("a") as a:
        link = await leader.link(a.me)
        await a.listener.close()
        await until(lambda: link.state(Role.CONTROL) is not None)
        link.asking.give(1, 1, dispatch("r", "a"), 0.3)
        await until(lambda: ("a", 1, 1, Outcome.EXPIRED) in leader.outcomes)
        assert a.station.given_ids == []


async def test_the_way_of_a_ticket_and_of_its_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Front to leader and back, in two processes on loopback: printed, since it is no test of a machine."""
    async with node("front") as front, peer_process("leader") as leader:
        up = await front.link(leader.me)
        await leader.ask("lead", as_words(front.me))
        went: dict[str, float] = {}
        took_ms: list[float] = []
        came = asyncio.Event()

        def given(give: Give) -> None:
            assert isinstance(give.action, Dispatch)
            took_ms.append((time.perf_counter() - went.pop(give.action.requests[0])) * 1e3)
            came.set()

        front.station.on_given = given
        for number in range(400):  # one at a time
            went[f"r{number}"] = time.perf_counter()
            came.clear()
            up.asking.tell(1, (traffic(f"r{number}"),))
            await asyncio.wait_for(came.wait(), 20)
        alone = sorted(took_ms)
        before, began = (await leader.seen())["cpu_s"], time.perf_counter()
        for number in range(400, 4400):  # as many as there is room for
            went[f"r{number}"] = time.perf_counter()
            up.asking.tell(1, (traffic(f"r{number}"),))
            if number % 50 == 0:
                await asyncio.sleep(0)
        await until(lambda: len(took_ms) == 4400, limit_s=60)
        tickets_per_s = 4000 / (time.perf_counter() - began)
        cpu_ms = ((await leader.seen())["cpu_s"] - before) * 1e3 / 4
        assert len(set(front.station.given_ids)) == 4400
    with capsys.disabled():
        print(
            f"\nticket to dispatch: p50 {alone[200]:.2f} ms, p99 {alone[396]:.2f} ms; {tickets_per_s:.0f} tickets/s, "
            f"{cpu_ms:.0f} ms of the leader's CPU for 1,000 (the wire alone: nothing is decided)"
        )


async def test_tokens_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    """Both ends in one process: printed too."""
    async with node("front") as front, node("b") as b:
        link = await front.link(b.me)
        began = time.perf_counter()
        answers = [link.asking.run(run_of(f"r{i}", 3000), 0.0, None, lambda: None) for i in range(16)]
        for answer in answers:
            assert await tokens_of(answer) == [token_at(position) for position in range(3000)]
        with capsys.disabled():
            print(f"\n{48_000 / (time.perf_counter() - began):.0f} tokens/s in 16 streams, both ends in one process")
