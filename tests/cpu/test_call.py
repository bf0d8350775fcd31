"""The loop side of a call, emit by emit: what is shown, what is held back, and when a wait ends."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from janus_server import types
from janus_server.api.plan import Target
from janus_server.errors import Bug
from janus_server.executor import Cancel, StepReport, Submit
from janus_server.flow import AtOnce, Flow
from janus_server.instance import Call, ServedModel
from janus_server.streams import Streams
from janus_server.types import Delta, Emit, FinishReason, Request, Sampling, TokenLogprob

EOS = 2


class Letters:
    """Token i is the letter i places after a."""

    strips_first_space = False

    def token_bytes(self, token: int) -> bytes:
        return bytes([97 + token])

    def is_special(self, token: int) -> bool:
        return False


class Device:
    """Takes orders and does nothing: the test says what comes back."""

    def __init__(self) -> None:
        self.orders: list[Submit | Cancel] = []

    def post(self, order: Submit | Cancel) -> None:
        self.orders.append(order)


class Served:
    def __init__(self) -> None:
        self.device, self.streams = Device(), Streams()
        card = types.ModelCard("m", 0, 100, 0, 0, "float32", "llama")
        target = Target("m", 100, 20, (EOS,), Sampling())
        flow = Flow("m", self.device, AtOnce())  # type: ignore[arg-type]
        flow.serve()
        self.model = ServedModel(card, target, Letters(), flow, self.streams)  # type: ignore[arg-type]

    def tell(self, *emits: Emit) -> None:
        self.streams.deliver(StepReport("m", list(emits), {}, 0))


def request_of(**fields: Any) -> Request:
    return Request(**{"id": "r", "model": "m", "prompt": (1, 3), "max_tokens": 9, "stop_ids": (EOS,), **fields})


async def deltas(call: Call, timeout_s: float = 0.0) -> list[Delta]:
    return [one.delta for one in await call.take(timeout_s) or ()]


async def test_the_end_token_is_hidden_but_the_last_of_a_grammar_is_not() -> None:
    served = Served()
    async with served.model.submit([request_of(n=3)]) as call:
        served.tell(
            Emit("r", 0, EOS, finish=FinishReason.STOP),
            Emit("r", 1, 5, finish=FinishReason.STOP),
            Emit("r", 2, finish=FinishReason.STOP),
        )
        told = await deltas(call)
        assert [(one.text, one.tokens) for one in told] == [("", (EOS,)), ("f", (5,)), ("", ())]
        assert await call.take(0.0) is None


async def test_matchers_go_to_the_device_with_their_requests() -> None:
    served = Served()
    first, second = object(), object()
    async with served.model.submit([request_of(), request_of(id="s"), request_of(id="t")], [first, None, second]):
        orders = [order for order in served.device.orders if isinstance(order, Submit)]
        assert [order.matcher for order in orders] == [first, None, second]
    async with served.model.submit([request_of()]):
        pass
    with pytest.raises(Bug, match="one matcher a request"):
        served.model.submit([request_of(), request_of(id="s")], [first])


async def test_a_flow_counts_its_running_requests_without_asking_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()
    flow = served.model._flow
    asked: list[Call] = []
    monkeypatch.setattr(Call, "prompts", property(lambda call: asked.append(call) or len(call._answers)))
    first = served.model.submit([request_of(), request_of(id="s")])
    second = served.model.submit([request_of(id="t")])
    third = served.model.submit([request_of(id="u"), request_of(id="v"), request_of(id="w")])
    counts = []
    async with first:
        counts.append(flow.running)
        flow.hold()
        async with second, third:
            counts.append(flow.running)
            flow.serve()
            counts.append(flow.running)
            flow.leave(third)
            counts.append(flow.running)
            enough = len(asked)
            counts += [flow.running for _ in range(5)]
            assert len(asked) == enough
        counts.append(flow.running)
    async with served.model.submit([request_of(id="x")]):
        flow.hold()
    async with served.model.submit([request_of(id="y")]):
        counts.append(flow.running)
    assert counts == [2, 2, 6, 3, *[3] * 5, 2, 0] and flow.running == 0


async def test_scores_wait_for_the_first_delta() -> None:
    served = Served()
    scores = tuple(TokenLogprob(token, -float(token)) for token in range(5))
    async with served.model.submit([request_of(prompt_logprobs=0)]) as call:
        served.tell(Emit("r", 0, prompt_logprobs=scores[:2]))
        assert await call.take(0.0) == []
        served.tell(Emit("r", 0, prompt_logprobs=scores[2:4]))
        served.tell(Emit("r", 0, 7, prompt_logprobs=scores[4:]), Emit("r", 0, 8, finish=FinishReason.LENGTH))
        first, second = await deltas(call)
        assert (first.prompt_logprobs, first.text) == (scores, "h")
        assert (second.prompt_logprobs, second.finish) == ((), FinishReason.LENGTH)


async def test_an_embedding_comes_with_the_end() -> None:
    served = Served()
    async with served.model.submit([request_of(max_tokens=0, pooling=types.Pooling.MEAN)]) as call:
        served.tell(Emit("r", 0, finish=FinishReason.STOP, embedding=(0.5, 1.5)))
        (told,) = await deltas(call)
        assert (told.embedding, told.tokens, told.finish) == ((0.5, 1.5), (), FinishReason.STOP)


async def test_what_comes_after_a_choices_end_wakes_nobody() -> None:
    """A stop string ended choice 0; its tokens on their way are no news, and no reason for a keep-alive either."""
    served = Served()
    async with served.model.submit([request_of(n=2, stop=("f",))]) as call:
        served.tell(Emit("r", 0, 5))
        (told,) = await deltas(call)
        assert (told.finish, told.stop) == (FinishReason.STOP, "f")
        assert [order.index for order in served.device.orders if isinstance(order, Cancel)] == [0]
        waiting = asyncio.create_task(call.take(60.0))
        for _ in range(3):
            served.tell(Emit("r", 0, 6))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not waiting.done()
        served.tell(Emit("r", 1, 4))
        news = await waiting
        assert news is not None and [one.delta.index for one in news] == [1]


async def test_a_wait_is_as_long_as_it_was_asked_to_be_whatever_is_dropped() -> None:
    served = Served()
    async with served.model.submit([request_of(n=2, stop=("f",))]) as call:
        served.tell(Emit("r", 0, 5))
        await call.take(0.0)
        start = time.monotonic()
        waiting = asyncio.create_task(call.take(0.05))
        while not waiting.done():
            served.tell(Emit("r", 0, 6))
            await asyncio.sleep(0.005)
        assert waiting.result() == []
        assert time.monotonic() - start >= 0.05
