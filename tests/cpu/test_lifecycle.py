"""Models of one node come and go while requests run: nothing is lost, nothing is counted twice, every request ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from server_process import tiny_model

from janus_server import lifecycle, resident
from janus_server.config import ServeConfig, serve_config
from janus_server.errors import BadModel, Refused
from janus_server.executor import Submit
from janus_server.kv.xtensor import WeightMemory
from janus_server.node import Node
from janus_server.orders import Stage, Wish
from janus_server.types import FinishReason, PageKind, Request, Sampling

# The tiny models take 9 pages of 64 KiB each; of 22 pages 3 are scratch, and two models never fit beside a longest
# sequence.
ROOM_FOR_ONE = "1408KiB"
ROOM_FOR_ALL = "16MiB"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / name, seed=seed) for seed, name in enumerate("abc")}


def settings(models: dict[str, Path], memory: str, **more: Any) -> ServeConfig:
    flags = {"memory": memory, "page_size": "64KiB", "kernels": "cpu", "threads": "1", **more}
    return serve_config([f"{name}={path}" for name, path in models.items()], flags=flags)


@contextlib.asynccontextmanager
async def opened(config: ServeConfig) -> AsyncIterator[Node]:
    node = Node(config)
    try:
        await node.open(lambda model, done, total: None)
        yield node
    finally:
        await node.close()


def request(name: str, tokens: int = 8, number: int = 0, prompt: tuple[int, ...] = (5, 6, 7, 8)) -> Request:
    greedy = Sampling(temperature=0)
    return Request(id=f"{name}-{number}", model=name, prompt=prompt, max_tokens=tokens, sampling=greedy)


async def generate(node: Node, name: str, tokens: int = 8, number: int = 0) -> tuple[list[int], FinishReason]:
    """The tokens of one greedy request and how it ended: exactly once."""
    model = await node.model(name)
    assert model is not None
    out: list[int] = []
    ends: list[FinishReason] = []
    async with model.submit([request(name, tokens, number)]) as call:
        while (news := await call.take(30.0)) is not None:
            for item in news:
                out.extend(item.delta.tokens)
                if item.delta.finish is not None:
                    ends.append(item.delta.finish)
    assert len(ends) == 1
    return out, ends[0]


def stage(node: Node, name: str) -> Stage:
    return node.stages()[name]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def books_are_right(node: Node) -> None:
    """Every page is free or held by an Active model's weights, KV, or an open prefix; checked on the device thread."""
    device, residents = node._device, node._lifecycle.residents  # type: ignore[union-attr]
    assert device is not None
    pool = device._pool
    await asyncio.wrap_future(device.ask(pool.check))
    held = await asyncio.wrap_future(device.ask(pool.held))
    weights = {owner.model: pages for owner, pages in held.items() if owner.kind is PageKind.WEIGHTS}
    active = {name: r.opened.weight_pages for name, r in residents.items() if r.stage is Stage.ACTIVE}
    assert weights == active
    assert {owner.model for owner in held if owner.kind is PageKind.KV} <= set(active)


async def test_models_that_fit_are_loaded_at_start(models: dict[str, Path]) -> None:
    async with opened(settings(models, ROOM_FOR_ALL)) as node:
        assert set(node.stages().values()) == {Stage.ACTIVE}
        await books_are_right(node)


async def test_models_that_share_room_for_one_are_all_served_and_say_the_same(models: dict[str, Path]) -> None:
    async with opened(settings(models, ROOM_FOR_ALL)) as node:
        alone = {name: await generate(node, name, 24) for name in models}
    async with opened(settings(models, ROOM_FOR_ONE)) as node:
        assert sorted(node.stages().values(), key=str) == [Stage.ACTIVE, Stage.COLD, Stage.COLD]
        names = [random.Random(1).choice("abc") for _ in range(60)]
        answers = await asyncio.gather(*(generate(node, name, 24, i) for i, name in enumerate(names)))
        for name, answer in zip(names, answers, strict=True):
            assert answer == alone[name]
        await books_are_right(node)


async def test_a_sleeping_model_answers_with_equal_bits(models: dict[str, Path]) -> None:
    async with opened(settings(models, ROOM_FOR_ALL)) as node:
        before = await generate(node, "a", 32)
        for wish in (Wish.SLEEP, Wish.LOAD, Wish.EVICT, Wish.LOAD, Wish.SLEEP, Wish.EVICT, Wish.WAKE, Wish.LOAD):
            answer = await node.ask("a", wish)
            await until(lambda: node.settled("a"))
            assert answer.accepted == (wish is not Wish.WAKE)
            await books_are_right(node)
        assert await generate(node, "a", 32) == before


async def test_a_model_with_requests_is_drained_before_it_sleeps(models: dict[str, Path]) -> None:
    async with opened(settings(models, ROOM_FOR_ALL)) as node:
        running = asyncio.create_task(generate(node, "a", 200))
        await until(lambda: len(node.streams) == 1)
        assert (await node.ask("a", Wish.SLEEP)).accepted
        late = asyncio.create_task(generate(node, "a", 4, 1))
        assert (await running)[1] is FinishReason.LENGTH
        assert (await late)[1] is FinishReason.LENGTH  # it waited for the sleep, then had the model woken
        await books_are_right(node)


@pytest.mark.parametrize("place", ["map", "load", "move", "engine", "commit"])
async def test_a_failure_on_the_way_up_leaves_the_model_where_it_was(
    models: dict[str, Path], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(settings(models, ROOM_FOR_ALL)) as node:
        before = await generate(node, "a", 16)
        await node.ask("a", Wish.EVICT if place == "load" else Wish.SLEEP)
        await until(lambda: node.settled("a"))
        was = stage(node, "a")
        calls = 0

        def fail(*arguments: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            raise OSError(12, "injected")

        with monkeypatch.context() as patch:
            if place in ("map", "commit"):
                patch.setattr(WeightMemory, place, fail)
            elif place == "engine":
                patch.setattr(lifecycle.Lifecycle, "_engine", fail)
            else:
                patch.setattr(resident, {"load": "load_weights", "move": "move"}[place], fail)
            with pytest.raises(Refused) as refusal:
                await generate(node, "a", 16, 1)
            assert refusal.value.status == 503
            assert "injected" not in refusal.value.message
            assert calls == 3
        assert stage(node, "a") is was
        await books_are_right(node)
        assert await generate(node, "b", 4) is not None
        assert await generate(node, "a", 16, 2) == before
        await books_are_right(node)


async def test_a_failure_on_the_way_down_leaves_the_model_serving(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise OSError(12, "injected")

    async with opened(settings(models, ROOM_FOR_ALL)) as node:
        before = await generate(node, "a", 16)
        with monkeypatch.context() as patch:
            patch.setattr(resident, "move", fail)
            assert (await node.ask("a", Wish.SLEEP)).accepted
            await until(lambda: node.settled("a"))
        assert stage(node, "a") is Stage.ACTIVE
        await books_are_right(node)
        assert await generate(node, "a", 16, 1) == before


async def test_a_broken_checkpoint_refuses_its_requests_and_nothing_else(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **more: Any) -> Any:
        raise BadModel("/secret/path: injected")

    async with opened(settings(models, ROOM_FOR_ONE)) as node:
        monkeypatch.setattr(resident, "load_weights", broken)
        with pytest.raises(Refused) as refusal:
            await generate(node, "b")
        assert refusal.value.status == 503
        assert "secret" not in refusal.value.message
        assert (await generate(node, "a"))[1] is FinishReason.LENGTH
        await books_are_right(node)


async def test_clients_that_leave_while_they_wait_leave_nothing_behind(models: dict[str, Path]) -> None:
    async with opened(settings(models, ROOM_FOR_ONE)) as node:
        busy = asyncio.create_task(generate(node, "a", 300))
        await until(lambda: len(node.streams) == 1)
        waiting = [asyncio.create_task(generate(node, "b", 4, i)) for i in range(5)]
        await asyncio.sleep(0.05)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await busy
        assert len(node.streams) == 0
        await until(lambda: node.settled("a") and node.settled("b"))  # a load may have begun before they left
        await books_are_right(node)


async def test_closing_while_a_model_loads_ends_the_load_first(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = asyncio.Event()
    loop = asyncio.get_running_loop()
    real = resident.load_weights
    ended = False

    def slow(*arguments: Any, **more: Any) -> Any:
        nonlocal ended
        loop.call_soon_threadsafe(started.set)
        import time

        time.sleep(0.2)
        try:
            return real(*arguments, **more)
        finally:
            ended = True

    async with opened(settings(models, ROOM_FOR_ONE)) as node:
        monkeypatch.setattr(resident, "load_weights", slow)
        task = asyncio.create_task(generate(node, "b"))
        await started.wait()
        task.cancel()
    assert ended


async def test_a_model_is_made_while_another_is_scored(models: dict[str, Path]) -> None:
    """What one thread records must not swallow what another computes."""
    async with opened(settings(models, ROOM_FOR_ALL)) as node:
        served = await node.model("a")
        assert served is not None
        scored = msgspec.structs.replace(request("a", 1, prompt=tuple(range(5, 105))), prompt_logprobs=2)

        async def scores(number: int) -> list[float]:
            found: list[float] = []
            async with served.submit([msgspec.structs.replace(scored, id=f"scored-{number}")]) as call:
                while (news := await call.take(30.0)) is not None:
                    found += [one.logprob for item in news for one in item.delta.prompt_logprobs]
            return found

        expected = await scores(0)
        for round_ in range(1, 6):
            for name in ("b", "c"):  # made anew at their next load
                await node.ask(name, Wish.EVICT)
                await until(lambda name=name: node.settled(name))  # type: ignore[misc]
                node._lifecycle.residents[name].engine = None  # type: ignore[union-attr]
            made = [asyncio.create_task(generate(node, name, 2, round_)) for name in ("b", "c")]
            assert await asyncio.gather(*(scores(10 * round_ + i) for i in range(4))) == [expected] * 4
            await asyncio.gather(*made)


async def test_a_drained_model_whose_sleep_fails_still_makes_way(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its flow stays shut while the Brain drains it: opened by the failure, it would count as busy for ever."""
    async with opened(settings(models, ROOM_FOR_ONE)) as node:
        await generate(node, "a")
        failures = [OSError(12, "no memory"), OSError(12, "no memory")]

        def fails_twice(*arguments: Any, **more: Any) -> None:
            if failures:
                raise failures.pop()
            return real(*arguments, **more)

        real = resident.move
        monkeypatch.setattr(resident, "move", fails_twice)
        stop = False

        async def busy() -> None:
            number = 0
            while not stop:
                number += 1
                await generate(node, "a", 24, number)

        keeping_busy = asyncio.create_task(busy())
        await asyncio.sleep(0.1)
        _, end = await asyncio.wait_for(generate(node, "b"), 30)
        assert end is FinishReason.LENGTH and not failures
        stop = True
        await asyncio.wait_for(keeping_busy, 30)
        await books_are_right(node)


async def test_what_waits_beside_a_model_that_is_torn_down_is_served_by_the_next_one(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody who was not running yet hears of it: the Brain knows before it hands the model another request."""
    async with opened(settings(models, ROOM_FOR_ALL)) as node:
        expected = await generate(node, "a", 8, 99)
        thread = node._device
        assert thread is not None
        engine = thread._engines["a"]
        plan, broken = engine.batcher.plan, []

        def breaks_once(*arguments: Any, **more: Any) -> Any:
            if not broken:
                broken.append(True)
                raise RuntimeError("a kernel failed")
            return plan(*arguments, **more)

        monkeypatch.setattr(engine.batcher, "plan", breaks_once)
        post, astray = thread.post, []

        def watched(command: Any) -> None:
            if isinstance(command, Submit) and stage(node, "a") is not Stage.ACTIVE:
                astray.append(command.request.id)
            post(command)

        monkeypatch.setattr(thread, "post", watched)
        brain = node._leader._brain  # type: ignore[union-attr]
        # The first ones are given to the device, the others wait for it.
        monkeypatch.setattr(brain._dispatcher, "_ahead_s", 1e-9)
        answers = await asyncio.wait_for(asyncio.gather(*(generate(node, "a", 8, i) for i in range(12))), 30)
        assert not astray
        whole = [answer for answer in answers if answer[1] is not FinishReason.ERROR]
        assert 0 < len(whole) < 12 and whole == [expected] * len(whole)
        await books_are_right(node)
