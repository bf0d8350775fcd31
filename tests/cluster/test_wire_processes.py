"""Nodes in processes of their own that are killed, stopped and started again."""

from __future__ import annotations

import asyncio
import signal
import time

import msgspec
import pytest
from wire_nodes import QUICK, node, peer_process, run_of, token_at, tokens_of, until

from janus_server.orders import Report
from janus_server.wire.frames import Role
from janus_server.wire.handshake import Identity
from janus_server.wire.trouble import Trouble


async def test_a_killed_peer_is_seen_and_what_it_ran_is_known_to_be_lost(capsys: pytest.CaptureFixture[str]) -> None:
    patient = msgspec.structs.replace(QUICK, lost_s=600.0)  # it is the closed port that tells, not the time
    async with node("a", timing=patient) as a, peer_process("b", every_s=0.005) as b:
        link = await a.link(b.me)
        reading = link.asking.run(run_of("r", 100_000), 0.0, None, lambda: None)
        untouched = link.asking.run(run_of("late", 100_000), 0.0, None, lambda: None)
        await reading.wait()
        began = time.monotonic()
        b.process.kill()
        await until(lambda: reading.over and untouched.over)
        took_s = time.monotonic() - began
        with capsys.disabled():
            print(f"\nkill -9 of a peer: its streams were known to be lost after {took_s * 1e3:.0f} ms")
        assert reading.broken is Trouble.LOST and untouched.broken is Trouble.LOST
        # What had come before belongs to the answer, and says from where another node goes on.
        came = [emit.token for emit in reading.drain()]
        assert came == [token_at(position) for position in range(len(came))] and came


async def test_a_stopped_peer_is_seen_by_its_silence_and_goes_on_when_it_wakes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with node("a") as a, peer_process("b", every_s=0.002) as b:
        link = await a.link(b.me)
        reading = link.asking.run(run_of("r", 1500), 0.0, None, lambda: None)
        answer = asyncio.create_task(tokens_of(reading))
        await until(lambda: reading.streamed)
        began = time.monotonic()
        b.process.send_signal(signal.SIGSTOP)
        await until(lambda: ("b", Role.STREAM, Trouble.SILENT) in a.troubles)
        took_s = time.monotonic() - began
        with capsys.disabled():
            print(f"\nSIGSTOP of a peer: seen after {took_s:.2f} s (it may be silent for 1 s)")
        assert not reading.over  # it may wake
        b.process.send_signal(signal.SIGCONT)
        assert await answer == [token_at(position) for position in range(1500)]
        assert (await b.seen())["began"] == ["r"]


async def test_what_a_peer_runs_that_does_not_wake_is_lost_in_time() -> None:
    async with node("a") as a, peer_process("b", every_s=0.005) as b:
        link = await a.link(b.me)
        reading = link.asking.run(run_of("r", 100_000), 0.0, None, lambda: None)
        await reading.wait()
        b.process.send_signal(signal.SIGSTOP)
        await until(lambda: reading.over)
        assert reading.broken is Trouble.LOST
        b.process.send_signal(signal.SIGCONT)
        # It runs for nobody: when it wakes it is told so.
        await asyncio.wait_for(link.opened(Role.STREAM), 20)
        for _ in range(100):
            if "r" in (await b.seen())["cancelled"]:
                break
            await asyncio.sleep(0.1)
        assert "r" in (await b.seen())["cancelled"]


async def test_another_process_at_the_same_address_is_not_taken_for_the_one_before() -> None:
    async with node("a") as a:
        async with peer_process("b", every_s=0.005) as b:
            link = await a.link(b.me)
            reading = link.asking.run(run_of("r", 100_000), 0.0, None, lambda: None)
            await reading.wait()
            port = int(b.me.endpoint.rpartition(":")[2])
        async with peer_process("b", port=port) as fresh:
            await until(lambda: reading.over)
            assert reading.broken is Trouble.LOST
            await until(lambda: link.state(Role.CONTROL) is Trouble.PEER)
            await a.links.drop("b")
            link = await a.link(fresh.me)  # the coordinator has told of it
            reading = link.asking.run(run_of("again", 50), 0.0, None, lambda: None)
            assert await tokens_of(reading) == [token_at(position) for position in range(50)]
            assert (await fresh.seen())["began"] == ["again"]


async def test_a_node_that_starts_anew_under_its_name_is_let_in_once_the_old_process_is_gone() -> None:
    async with peer_process("b") as b:
        async with node("a", incarnation="first") as a:
            await a.link(b.me)
            async with node("a", incarnation="second") as other:
                link = await other.link(b.me, wait=False)
                await until(lambda: link.state(Role.CONTROL) is Trouble.TAKEN)
        async with node("a", incarnation="third") as again:
            link = await again.link(b.me)
            link.asking.tell(1, (Report("third", {}),))
            for _ in range(100):
                if "third" in (await b.seen())["events"]:
                    break
                await asyncio.sleep(0.05)
            assert (await b.seen())["events"] == ["third"]


async def test_nobody_at_an_address_is_known_at_once_and_asked_again() -> None:
    async with node("a") as a:
        async with node("b") as b:
            port = int(b.me.endpoint.rpartition(":")[2])
        link = await a.link(Identity("c", "b", "", f"ws://127.0.0.1:{port}"), wait=False)
        await until(lambda: link.state(Role.STREAM) is Trouble.NOBODY)
        async with node("b", port=port):
            await asyncio.wait_for(link.opened(Role.STREAM), 20)
