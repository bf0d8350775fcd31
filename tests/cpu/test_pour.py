"""News that go straight to what writes them: in order whatever it leaves, and its failure ends no other call."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_engine import ByteTokenizer

from janus_server.errors import Bug
from janus_server.executor import StepReport
from janus_server.flow import AtOnce, Flow
from janus_server.instance import ServedModel
from janus_server.streams import Streams
from janus_server.types import Emit, FinishReason, Request


class Device:
    def post(self, command: Any) -> None: ...


class Bench:
    """A model whose emits are written by hand."""

    def __init__(self) -> None:
        self.streams = Streams()
        flow = Flow("m", Device(), AtOnce())  # type: ignore[arg-type]
        flow.serve()
        nothing: Any = None
        tokenizer: Any = ByteTokenizer()
        self.model = ServedModel(nothing, nothing, tokenizer, flow, self.streams)

    def call(self, name: str) -> Any:
        return self.model.submit([Request(id=name, model="m", prompt=(1,), max_tokens=100)])

    def emit(self, *names: str, letter: str = "a", finish: FinishReason | None = None) -> None:
        self.streams.deliver(StepReport("m", [Emit(name, 0, ord(letter), finish=finish) for name in names], {}, 0))


@pytest.mark.parametrize("taken", [lambda i: True, lambda i: False, lambda i: i % 3 != 0, lambda i: i > 4])
async def test_nothing_is_lost_doubled_or_out_of_order(taken: Any) -> None:
    bench, seen, asked = Bench(), [], 0

    def sink(news: list[Any]) -> bool:
        nonlocal asked
        asked += 1
        if taken(asked):
            seen.extend(item.delta.text for item in news)
            return True
        return False

    async with bench.call("r") as call:
        call.pour_into(sink)

        async def read() -> None:
            while (news := await call.take(5.0)) is not None:
                seen.extend(item.delta.text for item in news)
                await asyncio.sleep(0)  # a handler that writes is away from `take`

        reader = asyncio.create_task(read())
        for letter in "abcdefghijklmnopqrstuvwxy":
            bench.emit("r", letter=letter)
            if letter in "dgjkq":
                await asyncio.sleep(0)
        bench.emit("r", letter="z", finish=FinishReason.LENGTH)
        await asyncio.wait_for(reader, 5)
    assert "".join(seen) == "abcdefghijklmnopqrstuvwxyz"


async def test_a_sink_that_fails_ends_its_call_alone() -> None:
    bench, seen = Bench(), []

    def broken(news: list[Any]) -> bool:
        raise RuntimeError("broken")

    def fine(news: list[Any]) -> bool:
        seen.extend(news)
        return True

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    async with bench.call("a") as one, bench.call("b") as other:
        one.pour_into(broken)
        other.pour_into(fine)
        waits = [asyncio.create_task(call.take(5.0)) for call in (one, other)]
        await asyncio.sleep(0)
        bench.emit("a", "b", finish=FinishReason.LENGTH)
        with pytest.raises(Bug):
            await asyncio.wait_for(waits[0], 5)
        assert await asyncio.wait_for(waits[1], 5) is None
    assert len(seen) == 1


async def test_take_gives_up_in_time_although_one_alarm_serves_many_waits() -> None:
    bench = Bench()
    async with bench.call("r") as call:
        for timeout_s in (30.0, 0.02, 0.01, 30.0, 0.02):
            if timeout_s < 1:
                assert await asyncio.wait_for(call.take(timeout_s), 5) == []
            else:
                bench.emit("r")
                assert len(await asyncio.wait_for(call.take(timeout_s), 5)) == 1
            waiting = asyncio.create_task(call.take(0.03))
            await asyncio.sleep(0.01)
            bench.emit("r")
            assert len(await asyncio.wait_for(waiting, 5)) == 1
