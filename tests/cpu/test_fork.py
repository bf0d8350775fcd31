"""Weights copied from node to node: equal bits at the end of every path, nothing left over after every failure."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fork_node import Process, books_are_right, generate, life, opened, order, until, wish
from server_process import tiny_model

from janus_server.errors import BadConfig
from janus_server.model.runner import Runner
from janus_server.orders import (
    Answer,
    Asked,
    Busy,
    Done,
    Failed,
    Joined,
    KnownModel,
    Order,
    Report,
    Stage,
    Verb,
    Wish,
)
from janus_server.sched.brain import Brain
from janus_server.sched.state import BrainSettings
from janus_server.transfer.grants import BEING_READ

# 17 pages of 64 KiB: room for one of two models of 9 pages.
ROOM_FOR_ONE = "1088KiB"
SLOW = 600_000  # bytes a second: a pull of the tiny model takes one second


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / name, seed=seed) for seed, name in enumerate("ab")}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


class Watch:
    """Progress of a node, to know when a pull is half way."""

    def __init__(self) -> None:
        self.done = 0

    def __call__(self, model: str, done: int, total: int) -> None:
        self.done = done if done < total else 0

    async def half_way(self) -> None:
        self.done = 0
        await until(lambda: self.done > 0)


@pytest.mark.parametrize("before", ["never prepared", "cold", "warm", "cold after a fork"])
async def test_a_fork_ends_active_with_equal_bits_from_wherever_it_started(
    models: dict[str, Path], run_dir: Path, before: str
) -> None:
    a, b = {"a": models["a"]}, {"b": models["b"]}
    memory = ROOM_FOR_ONE if before == "never prepared" else "16MiB"
    flags = {"prepare": "0"} if before == "never prepared" else {}
    async with (
        opened("n0", run_dir, a) as source,
        opened("n1", run_dir, {**b, **a}, memory=memory, flags=flags) as node,
    ):
        expected = await generate(source, "a")
        resident = life(node).residents["a"]
        if before == "never prepared":
            assert resident.served is resident.memory is resident.digest is None
        elif before == "warm":
            assert await wish(node, "a", Wish.SLEEP) is Stage.WARM
        else:
            assert await wish(node, "a", Wish.EVICT) is Stage.COLD
        if before == "cold after a fork":
            assert await wish(node, "a", Wish.FORK, "n0") is Stage.ACTIVE
            assert await wish(node, "a", Wish.EVICT) is Stage.COLD
        assert await wish(node, "a", Wish.FORK, "n0") is Stage.ACTIVE
        assert await generate(node, "a") == expected
        assert life(node).has_copy("a") == (before == "warm")
        mine, theirs = resident.memory, life(source).residents["a"].memory
        assert mine is not None and theirs is not None and (mine.array == theirs.array).all()
        for one in (source, node):
            await books_are_right(one)
        # What came by fork sleeps, wakes and is forked from like any other.
        assert await wish(node, "a", Wish.SLEEP) is Stage.WARM
        assert await wish(node, "a", Wish.WAKE) is Stage.ACTIVE
        assert await wish(source, "a", Wish.EVICT) is Stage.COLD
        assert await wish(source, "a", Wish.FORK, "n1") is Stage.ACTIVE
        assert await generate(source, "a", number=1) == expected == await generate(node, "a", number=1)


async def test_a_destination_needs_no_checkpoint(models: dict[str, Path], run_dir: Path, tmp_path: Path) -> None:
    mine = {name: Path(shutil.copytree(models[name], tmp_path / name)) for name in ("b", "a")}
    async with (
        opened("n0", run_dir, {"a": models["a"]}) as source,
        opened("n1", run_dir, mine, memory=ROOM_FOR_ONE) as node,
    ):
        (mine["a"] / "model.safetensors").unlink()
        assert isinstance(await order(node, "a", Verb.LOAD), Failed)
        assert await wish(node, "b", Wish.SLEEP) is Stage.WARM
        assert await wish(node, "a", Wish.FORK, "n0") is Stage.ACTIVE
        assert await generate(node, "a") == await generate(source, "a")
        await books_are_right(node)


async def test_a_fork_makes_room_like_a_load_and_pages_need_not_be_neighbours(
    models: dict[str, Path], run_dir: Path
) -> None:
    async with opened("n0", run_dir, models) as source, opened("n1", run_dir, models, memory=ROOM_FOR_ONE) as node:
        expected = [await generate(source, name) for name in "ab"]
        await wish(source, "a", Wish.EVICT)
        await wish(source, "b", Wish.SLEEP)
        pool = life(source)._xtensor.pool
        gaps = pool.reserve_low(12, life(source).residents["a"].memory.owner)  # type: ignore[union-attr]
        assert gaps is not None
        pool.release(gaps.owner, gaps.pages[::2])
        await wish(source, "a", Wish.LOAD)
        assert len(life(source).residents["a"].memory.pages) == 9  # type: ignore[union-attr]
        assert life(source).residents["a"].memory.pages[:3] == (0, 2, 4)  # type: ignore[union-attr]
        await wish(source, "b", Wish.WAKE)
        for turn in range(2):
            for name, tokens in zip("ab", expected, strict=True):
                await wish(node, name, Wish.SLEEP if node.stages()[name] is Stage.ACTIVE else Wish.EVICT)
                assert await wish(node, name, Wish.FORK, "n0") is Stage.ACTIVE
                assert await generate(node, name, number=turn) == tokens
                await books_are_right(node)


async def test_an_order_told_twice_is_done_once(models: dict[str, Path], run_dir: Path) -> None:
    a = {"a": models["a"]}
    async with opened("n0", run_dir, a) as source, opened("n1", run_dir, a, bytes_per_s=SLOW * 4) as node:
        await wish(node, "a", Wish.EVICT)
        orders = [asyncio.create_task(order(node, "a", Verb.FORK, "n0", number=7)) for _ in range(3)]
        await until(lambda: life(source).grants.readers("a") != [])
        ends = await asyncio.gather(*orders)
        assert isinstance(ends[0], Done) and ends[0] == ends[1] == ends[2]
        assert await order(node, "a", Verb.FORK, "n0", number=7) is ends[0]
        assert isinstance(await order(node, "a", Verb.FORK, "n0", number=8), Done)  # another, already fulfilled
        assert isinstance(await order(node, "a", Verb.FORK, "nobody", number=9), Done)
        await books_are_right(node)


async def test_a_source_that_is_being_read_does_not_let_its_pages_go(models: dict[str, Path], run_dir: Path) -> None:
    a, watch = {"a": models["a"]}, Watch()
    async with opened("n0", run_dir, a) as source, opened("n1", run_dir, a, progress=watch, bytes_per_s=SLOW) as node:
        await wish(node, "a", Wish.EVICT)
        pages = life(source).residents["a"].memory.pages  # type: ignore[union-attr]
        fork = asyncio.create_task(order(node, "a", Verb.FORK, "n0"))
        await watch.half_way()
        for verb in (Verb.SLEEP, Verb.UNLOAD):
            end = await order(source, "a", verb)
            assert isinstance(end, Failed) and end.reason == BEING_READ and not end.lasting
            assert end.stage is Stage.ACTIVE
        assert life(source).residents["a"].memory.pages == pages  # type: ignore[union-attr]
        expected = await generate(source, "a")
        assert isinstance(await fork, Done)
        assert await generate(node, "a") == expected
        await until(lambda: life(source).grants.readers("a") == [])
        assert isinstance(await order(source, "a", Verb.SLEEP), Done)


async def test_a_sleeping_source_gives_no_grant_meanwhile(
    models: dict[str, Path], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = {"a": models["a"]}
    async with opened("n0", run_dir, a) as source, opened("n1", run_dir, a) as node:
        await wish(node, "a", Wish.EVICT)
        going, go_on = asyncio.Event(), asyncio.Event()
        real = life(source)._take_out

        async def slowly(*arguments: Any, **more: Any) -> None:
            going.set()
            await go_on.wait()
            await real(*arguments, **more)

        monkeypatch.setattr(life(source), "_take_out", slowly)
        sleep = asyncio.create_task(order(source, "a", Verb.SLEEP))
        await going.wait()
        end = await order(node, "a", Verb.FORK, "n0")
        assert isinstance(end, Failed) and "putting it away" in end.reason
        go_on.set()
        assert isinstance(await sleep, Done)
        end = await order(node, "a", Verb.FORK, "n0")
        assert isinstance(end, Failed) and "does not hold" in end.reason
        await books_are_right(node)


async def test_a_failed_fork_falls_back_to_what_the_node_has(models: dict[str, Path], run_dir: Path) -> None:
    a = {"a": models["a"]}
    async with opened("n1", run_dir, a) as node:
        expected = await generate(node, "a")
        for down in (Wish.EVICT, Wish.SLEEP):
            await wish(node, "a", down)
            assert await wish(node, "a", Wish.FORK, "nobody") is Stage.ACTIVE
            assert await generate(node, "a") == expected
            await books_are_right(node)
        await wish(node, "a", Wish.EVICT)
        assert not (await node.ask("a", Wish.FORK)).accepted


async def test_a_cancelled_fork_stops_and_leaves_nothing(models: dict[str, Path], run_dir: Path) -> None:
    a, watch = {"a": models["a"]}, Watch()
    async with opened("n0", run_dir, a) as source, opened("n1", run_dir, a, progress=watch, bytes_per_s=SLOW) as node:
        await wish(node, "a", Wish.EVICT)
        fork = asyncio.create_task(order(node, "a", Verb.FORK, "n0"))
        await watch.half_way()
        fork.cancel()
        await asyncio.gather(fork, return_exceptions=True)
        assert fork.cancelled() and node.stages()["a"] is Stage.COLD
        await books_are_right(node)
        await books_are_right(source)
        assert isinstance(await order(node, "a", Verb.LOAD), Done)


async def test_another_layout_is_refused_before_a_page_is_taken(
    models: dict[str, Path], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = {"a": models["a"]}
    async with (
        opened("n0", run_dir, a, flags={"dtype": "float32"}),
        opened("n1", run_dir, a, flags={"dtype": "bfloat16"}) as node,
    ):
        await wish(node, "a", Wish.EVICT)
        monkeypatch.setattr(life(node)._scarcity, "clear", None)  # whoever reserves calls it
        end = await order(node, "a", Verb.FORK, "n0")
        assert isinstance(end, Failed) and "another layout" in end.reason and not end.lasting


async def test_another_model_of_that_name_is_refused(models: dict[str, Path], run_dir: Path, tmp_path: Path) -> None:
    config = tiny_model(tmp_path / "c", seed=0, rope_theta=5e5)
    async with (
        opened("n0", run_dir, {"a": models["a"]}),
        opened("n1", run_dir, {"a": models["b"]}) as seed,
        opened("n2", run_dir, {"a": config}) as theta,
    ):
        for node in (seed, theta):
            before = await generate(node, "a")
            for down in (Wish.SLEEP, Wish.EVICT):
                await wish(node, "a", down)
                end = await order(node, "a", Verb.FORK, "n0")
                assert isinstance(end, Failed) and "another model of that name" in end.reason
                await books_are_right(node)
                await wish(node, "a", Wish.LOAD)
                assert await generate(node, "a") == before


async def test_bytes_that_are_not_those_announced_are_rolled_back(
    models: dict[str, Path], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, a = {"b": models["b"]}, {"a": models["a"]}
    async with opened("n0", run_dir, a) as source, opened("n1", run_dir, {**b, **a}, memory=ROOM_FOR_ONE) as node:
        await wish(node, "b", Wish.EVICT)
        expected = await generate(source, "a")
        memory = life(source).residents["a"].memory
        assert memory is not None
        memory.array[0] ^= 1  # in the first sampled bytes
        end = await order(node, "a", Verb.FORK, "n0")
        assert isinstance(end, Failed) and "not those" in end.reason
        assert life(node).residents["a"].digest is None
        memory.array[0] ^= 1
        await books_are_right(node)
        assert isinstance(await order(node, "a", Verb.FORK, "n0"), Done)
        assert await generate(node, "a") == expected


async def test_a_source_torn_down_in_mid_pull_takes_its_grant_back(
    models: dict[str, Path], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("injected")

    a, watch = {"a": models["a"]}, Watch()
    async with opened("n0", run_dir, a) as source, opened("n1", run_dir, a, progress=watch, bytes_per_s=SLOW) as node:
        expected = await generate(node, "a")
        await wish(node, "a", Wish.EVICT)
        fork = asyncio.create_task(order(node, "a", Verb.FORK, "n0"))
        await watch.half_way()
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "forward", fail)
            assert (await generate(source, "a"))[-1][0] == -1
        await until(lambda: source.stages()["a"] is Stage.COLD)
        end = await fork
        assert isinstance(end, Failed) and "grant ended" in end.reason
        await books_are_right(node)
        await books_are_right(source)
        assert await wish(source, "a", Wish.LOAD) is Stage.ACTIVE
        assert isinstance(await order(node, "a", Verb.FORK, "n0"), Done)
        assert await generate(node, "a", number=1) == expected == await generate(source, "a", number=1)


async def test_an_expired_grant_ends_the_fork_and_frees_the_source(models: dict[str, Path], run_dir: Path) -> None:
    a = {"a": models["a"]}
    async with (
        opened("n0", run_dir, a, grant_s=0.2) as source,
        opened("n1", run_dir, a, bytes_per_s=SLOW) as slow,
        opened("n2", run_dir, a) as fast,
    ):
        for node in (slow, fast):
            await wish(node, "a", Wish.EVICT)
        end = await order(slow, "a", Verb.FORK, "n0")
        assert isinstance(end, Failed) and "grant ended" in end.reason
        await books_are_right(slow)
        assert life(source).grants.readers("a") == []
        assert isinstance(await order(fast, "a", Verb.FORK, "n0"), Done)
        assert isinstance(await order(source, "a", Verb.SLEEP), Done)


# Two processes


async def test_a_source_serves_as_before_while_another_process_copies_it(
    models: dict[str, Path], run_dir: Path
) -> None:
    a = {"a": models["a"]}
    async with Process("n0", run_dir, a) as source, opened("n1", run_dir, a, bytes_per_s=SLOW * 2) as node:
        expected = await source.ask("generate", model="a", tokens=400)
        await wish(node, "a", Wish.EVICT)
        source.tell("generate", model="a", tokens=400)
        assert await wish(node, "a", Wish.FORK, "n0") is Stage.ACTIVE
        assert await source.answer() == expected
        assert [list(row) for row in await generate(node, "a", 400)] == expected
        assert await source.ask("books") == "right"
        assert await source.ask("wish", model="a", what="sleep") == "warm"
        await books_are_right(node)


async def test_a_source_killed_in_mid_pull_is_rolled_back(models: dict[str, Path], run_dir: Path) -> None:
    b, a, watch = {"b": models["b"]}, {"a": models["a"]}, Watch()
    async with opened("n1", run_dir, {**b, **a}, memory=ROOM_FOR_ONE, progress=watch, bytes_per_s=SLOW) as node:
        expected = await generate(node, "b")
        await wish(node, "b", Wish.SLEEP)
        descriptors = len(os.listdir("/proc/self/fd"))
        async with Process("n0", run_dir, a) as source:
            fork = asyncio.create_task(order(node, "a", Verb.FORK, "n0"))
            await watch.half_way()
            source.kill()
            end = await fork
            assert isinstance(end, Failed) and end.reason == "the peer went away" and end.stage is Stage.COLD
            assert watch.done > 0  # it did not go on to the end of what is still mapped
            await books_are_right(node)
        assert "r--s" not in [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines()
                              if "janus-pages" in line]  # fmt: skip
        assert len(os.listdir("/proc/self/fd")) == descriptors
        async with Process("n0", run_dir, a) as source:  # the next process of that name
            assert isinstance(await order(node, "a", Verb.FORK, "n0"), Done)
            assert [list(row) for row in await generate(node, "a")] == await source.ask("generate", model="a")
            await order(node, "a", Verb.UNLOAD)
            await wish(node, "b", Wish.WAKE)
            assert await generate(node, "b") == expected


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_reader_that_dies_or_hangs_lets_the_source_sleep_in_the_end(
    models: dict[str, Path], run_dir: Path, number: signal.Signals
) -> None:
    a = {"a": models["a"]}
    grant_s = 30.0 if number is signal.SIGKILL else 1.0
    async with opened("n0", run_dir, a, grant_s=grant_s) as source:
        async with Process("n1", run_dir, a, bytes_per_s=SLOW) as node:
            assert await node.ask("wish", model="a", what="evict") == "cold"
            node.tell("order", model="a", verb="fork", source="n0")
            await until(lambda: life(source).grants.readers("a") != [])
            assert isinstance(await order(source, "a", Verb.SLEEP), Failed)
            node.process.send_signal(number)
            await until(lambda: life(source).grants.readers("a") == [])
            assert isinstance(await order(source, "a", Verb.SLEEP), Done)
            await books_are_right(source)
            if number is signal.SIGSTOP:
                assert isinstance(await order(source, "a", Verb.WAKE), Done)
                node.process.send_signal(signal.SIGCONT)
                assert "grant ended" in await node.answer()  # it copied nothing from pages that may have moved
                assert await node.ask("books") == "right"
                assert await node.ask("order", model="a", verb="fork", source="n0") == "active"


async def test_offers_are_only_of_what_is_active(models: dict[str, Path], run_dir: Path) -> None:
    async with opened("n0", run_dir, {"a": models["a"]}) as node:
        offer = life(node).offer("a")
        assert offer is not None and msgspec.structs.asdict(offer)["size_bytes"] > 0
        assert life(node).offer("b") is None
        await wish(node, "a", Wish.SLEEP)
        assert life(node).offer("a") is None


async def test_three_nodes_that_fork_sleep_and_serve_at_random_lose_nothing(
    models: dict[str, Path], run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(5)
    caplog.set_level("INFO")
    async with (
        opened("n0", run_dir, models) as first,
        opened("n1", run_dir, models, memory=ROOM_FOR_ONE, bytes_per_s=SLOW * 20) as second,
        opened("n2", run_dir, models, bytes_per_s=SLOW * 20, grant_s=0.03) as third,
    ):
        nodes = {"n0": first, "n1": second, "n2": third}
        expected = {name: await generate(first, name, 12) for name in models}

        async def client(number: int) -> None:
            for turn in range(6):
                name, node = draw.choice("ab"), nodes[draw.choice(list(nodes))]
                assert await generate(node, name, 12, number * 100 + turn) == expected[name]

        async def operator(name: str) -> None:
            """Requests may have the model back before the fork comes: then there is nothing to do."""
            for _ in range(15):
                node, source = nodes[draw.choice(["n1", "n2"])], draw.choice([*nodes, "n0", "n0", "nobody"])
                await node.ask(name, draw.choice([Wish.SLEEP, Wish.EVICT]))
                await until(lambda: node.settled(name))  # noqa: B023
                await node.ask(name, Wish.FORK, source)
                await asyncio.sleep(draw.random() * 0.05)

        async with asyncio.timeout(120):
            await asyncio.gather(operator("a"), operator("b"), *(client(number) for number in range(6)))
        for node in nodes.values():
            for name in models:
                await until(lambda: node.settled(name))  # noqa: B023
            await books_are_right(node)
        assert "fork of" in caplog.text and "fork failed" in caplog.text


async def test_two_nodes_of_one_name_do_not_meet(models: dict[str, Path], run_dir: Path) -> None:
    async with opened("n0", run_dir, {"a": models["a"]}) as node:
        with pytest.raises(BadConfig, match="called n0"):
            async with opened("n0", run_dir, {"a": models["a"]}):
                raise AssertionError("it opened")
        assert await generate(node, "a", 4)


def test_the_brain_forks_once_and_then_takes_what_the_node_has() -> None:
    known = KnownModel(model="a", weight_pages=10, host_bytes=1, longest_pages=1, preload=False)
    other = KnownModel(model="b", weight_pages=10, host_bytes=1, longest_pages=1)
    brain = Brain(BrainSettings())
    (load,) = brain.on(Joined("n1", 15, 1, (known, other)), 0.0)
    assert isinstance(load, Order)
    brain.on(Done(load.id, Stage.ACTIVE, False, 0.1), 1.0)
    brain.on(Report("n1", {"b": Busy(0, 0, 1.0)}), 1.5)
    answer, sleep = brain.on(Asked("a", Wish.FORK, "n0"), 2.0)
    assert isinstance(answer, Answer) and answer.accepted
    assert isinstance(sleep, Order) and (sleep.model, sleep.verb, sleep.source) == ("b", Verb.SLEEP, None)
    (fork,) = brain.on(Done(sleep.id, Stage.WARM, True, 0.1), 3.0)
    assert isinstance(fork, Order) and (fork.verb, fork.source) == (Verb.FORK, "n0")
    (again,) = brain.on(Failed(fork.id, Stage.COLD, False, "the peer went away"), 4.0)
    assert isinstance(again, Order) and (again.verb, again.source) == (Verb.LOAD, None)
    (refused,) = brain.on(Asked("b", Wish.FORK), 6.0)
    assert isinstance(refused, Answer) and not refused.accepted
