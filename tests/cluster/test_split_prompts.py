"""A prompt that another node computes: the answer is the same to the bit, and whatever fails, only time is lost.

Two nodes of one cluster in this process, their model on both; where one has to die, it is a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_cluster import Process
from server_process import tiny_model
from split_nodes import FLAGS, Drawn, asked, books, generate, opened, prefills, routes, until

from janus_server.cluster import lending, prefill
from janus_server.cluster.arrivals import ARRIVING, Arrival
from janus_server.cluster.prefill import Prefills
from janus_server.executor import Cancel, DeviceThread
from janus_server.node import Node
from janus_server.orders import Asked, Failed, Helper, Order, Stage, Verb, Wish
from janus_server.sched.dispatcher import Dispatcher
from janus_server.sched.split import Splits
from janus_server.transfer.pull import Pull
from janus_server.types import Request, Sampling

PAGE_TOKENS = 21  # 16 KiB of keys and values of 3 layers, 2 heads of 16, f32


def prompt_of(tokens: int, seed: int = 1) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 290) for _ in range(tokens))


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "m", max_position_embeddings=2048)


async def alone(path: Path, run_dir: Path, *requests: Request) -> list[Drawn]:
    """What one node says that computes everything itself."""
    async with opened({"m": path}, run_dir, ("n0",), pd_split="off") as (node,):
        return [drawn for request in requests for drawn, _ in await generate(node, request)]


def device(node: Node) -> DeviceThread:
    assert node._device is not None
    return node._device


async def forget(*nodes: Node) -> None:
    """Have their caches empty."""
    for node in nodes:
        for batcher in device(node)._scarcity._batchers:
            await asyncio.wrap_future(device(node).ask(lambda b=batcher: b.prefix.evict(10_000)))  # type: ignore[misc]


def totals(nodes: list[Node]) -> tuple[int, int]:
    """Prompts that came from another node, and those that did not although they were to."""
    counts = [prefills(node).counts for node in nodes]
    return sum(one.brought for one in counts), sum(one.failed for one in counts)


def requests() -> list[Request]:
    drawn = Sampling(temperature=0.9, seed=11, presence_penalty=0.4, repetition_penalty=1.1, logprobs=2)
    lengths = [1, PAGE_TOKENS, PAGE_TOKENS + 1, 2 * PAGE_TOKENS, 2 * PAGE_TOKENS + 1, 700]
    return [
        *(asked(f"greedy {n}", prompt_of(n, n)) for n in lengths),
        asked("drawn", prompt_of(500, 8), sampling=drawn),
        asked("two", prompt_of(300, 9), sampling=drawn, n=2),
        asked("tenant", prompt_of(700, 700), tenant="other"),
        asked("last", prompt_of(2048 - 12, 10)),
    ]


def on_n0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the leader would choose, requests run there."""
    give = Dispatcher._give
    monkeypatch.setattr(Dispatcher, "_give", lambda self, ticket, machine, *more: give(self, ticket, "n0", *more))


async def test_what_is_said_is_the_same_to_the_bit(
    long_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and drawn, at both sides of a page's end, with two choices; every first token once, and no tenant starts
    from another's pages. What a helper computed is not told of as cached, what its own cache gave is."""
    wanted = await alone(long_model, tmp_path / "alone", *requests())
    on_n0(monkeypatch)
    async with opened({"m": long_model}, tmp_path / "run") as nodes:
        for i, (request, expected) in enumerate(zip(requests(), wanted, strict=True)):
            before = totals(nodes)
            ((drawn, cached),) = await generate(nodes[i % 2], request)
            assert drawn == expected, request.id
            assert cached == 0, request.id
            split = len(request.prompt) > PAGE_TOKENS
            assert totals(nodes) == (before[0] + split, before[1]), request.id
        for node in nodes:
            await until_books(node)
        assert prefills(nodes[1]).counts.brought == 0
        await forget(nodes[0])
        ((drawn, cached),) = await generate(nodes[1], asked("again", requests()[5].prompt))
        assert drawn == wanted[5]
        assert 600 < cached < 700


Hook = Callable[[Node, Arrival], Awaitable[None]]


@contextlib.contextmanager
def between(nodes: list[Node], monkeypatch: pytest.MonkeyPatch, before: Hook, after: Hook) -> Iterator[list[Node]]:
    """Do something before and after pages are copied. What is yielded gets the node that they are copied from."""
    fill, sources = Prefills._fill, list[Node]()

    async def filled(self: Prefills, pull: Pull, arrival: Arrival) -> None:
        source = next(node for node in nodes if prefills(node) is not self)
        sources.append(source)
        await before(source, arrival)
        await fill(self, pull, arrival)
        await after(source, arrival)

    monkeypatch.setattr(Prefills, "_fill", filled)
    yield sources
    monkeypatch.setattr(Prefills, "_fill", fill)


async def nothing(node: Node, arrival: Arrival) -> None:
    pass


async def recalled(node: Node, arrival: Arrival) -> None:
    """Somebody who runs needs the pages: they are read no more, and written soon."""
    scarcity = device(node)._scarcity
    assert len(scarcity.loans) == 1
    await forget(node)
    assert len(scarcity.batcher("m").prefix) == 33  # type: ignore[union-attr]
    assert await asyncio.wrap_future(device(node).ask(scarcity.loans.recall))
    await forget(node)
    assert len(scarcity.batcher("m").prefix) == 0  # type: ignore[union-attr]


async def altered(node: Node, arrival: Arrival) -> None:
    """A byte of each page is another one than when its digest was taken."""
    batcher = device(node)._scarcity.batcher("m")
    assert batcher is not None
    slab, size = batcher_slab(node), 16 << 10
    for page in batcher.kv._refs:
        slab[page * size] ^= 1


async def expired(node: Node, arrival: Arrival) -> None:
    await asyncio.sleep(0.1)


async def torn_down(node: Node, arrival: Arrival) -> None:
    """An error of the helper's instance: its pages go back whoever reads them."""

    def fail() -> None:
        engine = device(node)._engines["m"]
        device(node)._fail(engine, RuntimeError("a test"))

    await asyncio.wrap_future(device(node).ask(fail))


async def closed(node: Node, arrival: Arrival) -> None:
    assert node._peers is not None
    await node._peers.close()
    node._peers = None


def batcher_slab(node: Node) -> np.ndarray:
    assert node._member is not None
    return node._member._hosting.paging.xtensor.slab


@pytest.mark.parametrize(
    ("before", "after", "lasts_s"),
    [
        (nothing, recalled, 2.0), (recalled, nothing, 2.0), (altered, nothing, 2.0), (nothing, expired, 0.0),
        (expired, nothing, 0.0), (nothing, torn_down, 2.0), (nothing, closed, 2.0), (closed, nothing, 2.0),
    ],
)  # fmt: skip
async def test_pages_that_cannot_be_trusted_are_dropped(
    before: Hook, after: Hook, lasts_s: float, long_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper gave them to others, or its bytes are not those announced, or its time is over, or it is gone: the
    prompt is computed where the request runs, and no page is lost on either side."""
    monkeypatch.setattr(lending, "LEND_S", lasts_s)
    request = asked("r", prompt_of(700))
    (wanted,) = await alone(long_model, tmp_path / "alone", request)
    async with opened({"m": long_model}, tmp_path / "run") as nodes:
        with between(nodes, monkeypatch, before, after) as sources:
            ((drawn, cached),) = await generate(nodes[0], request)
        assert (drawn, cached) == (wanted, 0)
        assert len(sources) == 1 and totals(nodes) == (0, 1)
        for node in nodes:
            await until_books(node)


async def test_a_model_that_is_read_stays_and_one_that_is_gone_helps_nobody(
    long_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its pages are read, the helper does not put the model to sleep. Once it has, prompts are computed here."""
    request, second = asked("r", prompt_of(700)), asked("s", prompt_of(700, 2))
    wanted = await alone(long_model, tmp_path / "alone", request, second)
    async with opened({"m": long_model}, tmp_path / "run") as nodes:
        ends: list[object] = []

        async def sleep(node: Node, arrival: Arrival) -> None:
            assert node._lifecycle is not None
            ends.append(
                await node._lifecycle.obey(Order(1, 1_000_000 + len(ends), node.name, "m", Verb.SLEEP, "a test"))
            )

        with between(nodes, monkeypatch, nothing, sleep) as sources:
            ((drawn, _),) = await generate(nodes[0], request)
            assert drawn == wanted[0] and totals(nodes) == (1, 0)
            assert isinstance(ends[0], Failed) and "read by a peer" in ends[0].reason
            (source,) = sources
            await sleep(source, Arrival(request, 0))
            assert source.stages()["m"] is Stage.WARM, ends
            ((drawn, _),) = await generate(source, second)
            assert drawn == wanted[1]
        assert totals(nodes)[0] == 1
        for node in nodes:
            await until_books(node)


async def test_a_model_whose_request_waits_for_pages_stays(
    long_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it runs or waits on the device where the request is to run: it is not put to sleep all the same."""
    request = asked("r", prompt_of(700))
    (wanted,) = await alone(long_model, tmp_path / "alone", request)
    on_n0(monkeypatch)
    async with opened({"m": long_model}, tmp_path / "run") as nodes:
        ends: list[object] = []

        async def sleep(source: Node, arrival: Arrival) -> None:
            here = nodes[0]._lifecycle
            assert here is not None and source is nodes[1]
            ends.append(await here.obey(Order(1, 1_000_000, "n0", "m", Verb.SLEEP, "a test")))

        with between(nodes, monkeypatch, sleep, nothing):
            ((drawn, _),) = await generate(nodes[0], request)
        assert isinstance(ends[0], Failed) and "requests came" in ends[0].reason
        assert drawn == wanted and totals(nodes) == (1, 0)
        await until(lambda: not device(nodes[0])._scarcity.awaited)
        for node in nodes:
            await until_books(node)


async def test_a_model_that_is_torn_down_where_pages_arrive_gets_none_of_them(
    long_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written beside all steps: they come back to the pool only when nobody writes them any more."""
    async with opened({"m": long_model}, tmp_path / "run") as nodes:
        seen: list[int] = []

        async def fail(source: Node, arrival: Arrival) -> None:
            (here,) = [node for node in nodes if node is not source]
            await torn_down(here, arrival)
            held = await asyncio.wrap_future(device(here).ask(device(here)._pool.held))
            seen.append(held[ARRIVING])

        with between(nodes, monkeypatch, fail, nothing):
            served = await nodes[0].model("m")
            assert served is not None
            async with served.submit([asked("r", prompt_of(700))]) as call:
                while await call.take(20.0):
                    pass
        assert seen == [33]
        for node in nodes:
            await until_books(node)


async def test_who_leaves_is_forgotten_on_both_sides(
    long_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the prompt is computed elsewhere, and while its pages are copied."""
    async with opened({"m": long_model}, tmp_path / "run") as nodes:
        copying = asyncio.Event()

        async def wait(node: Node, arrival: Arrival) -> None:
            copying.set()
            await asyncio.sleep(30)

        served = await nodes[0].model("m")
        assert served is not None
        async with served.submit([asked("early", prompt_of(1900))]):
            await until(lambda: any(len(prefills(node)) for node in nodes))
        with between(nodes, monkeypatch, wait, nothing):
            async with served.submit([asked("late", prompt_of(1900, 2))]):
                await asyncio.wait_for(copying.wait(), 20)
        await until(lambda: not any(len(prefills(node)) or node.guests or len(node.streams) for node in nodes))
        for node in nodes:
            await until_books(node)
        assert totals(nodes)[0] == 0


async def test_what_is_cached_elsewhere_is_copied_and_the_rest_computed_here(
    long_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A helper that is named for what it has computes a token of it at most."""
    request = asked("r", prompt_of(700))
    (wanted,) = await alone(long_model, tmp_path / "alone", request)
    async with opened({"m": long_model}, tmp_path / "run", pd_split="off") as nodes:
        helper: list[Helper] = []
        give = Dispatcher._give
        monkeypatch.setattr(Splits, "helper", lambda *_: helper[0] if helper else None)
        monkeypatch.setattr(Dispatcher, "_give", lambda self, ticket, machine, *more: give(self, ticket, "n1", *more))
        await generate(nodes[1], asked("first", prompt_of(700), tokens=1))
        monkeypatch.setattr(Dispatcher, "_give", lambda self, ticket, machine, *more: give(self, ticket, "n0", *more))
        before = [node.stats()["m"].computed_tokens for node in nodes]
        helper.append(Helper("n1", 20 * PAGE_TOKENS + 5, cached=True))
        ((drawn, cached),) = await generate(nodes[0], request)
        assert drawn == wanted
        assert cached == 20 * PAGE_TOKENS - 1
        here, there = (node.stats()["m"].computed_tokens - start for node, start in zip(nodes, before, strict=True))
        assert (here, there) == (700 - 20 * PAGE_TOKENS + 11, 1)
        assert prefills(nodes[0]).counts.pages == 20
        for node in nodes:
            await until_books(node)


async def until_books(node: Node) -> None:
    """As `books`, once what was cancelled has ended."""
    await until(lambda: all(batcher.idle for batcher in device(node)._scarcity._batchers))
    await until(lambda: not device(node)._scarcity.passing)
    await books(node)


async def test_a_choice_that_nobody_wants_any_more_is_not_begun(
    long_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = asked("r", prompt_of(700), n=2, sampling=Sampling(temperature=0.9, seed=4, logprobs=1))
    (wanted,) = await alone(long_model, tmp_path / "alone", request)
    async with opened({"m": long_model}, tmp_path / "run") as nodes:

        async def cancel(source: Node, arrival: Arrival) -> None:
            (here,) = [node for node in nodes if node is not source]
            prefills(here).post(Cancel("m", "r", 0))

        with between(nodes, monkeypatch, nothing, cancel):
            served = await nodes[0].model("m")
            assert served is not None
            drawn: list[int] = []
            async with served.submit([request]) as call:
                while len(drawn) < 12:
                    for one in await call.take(20.0) or []:
                        assert one.delta.index == 1
                        drawn += one.delta.tokens
        assert drawn == [token for token, _ in wanted[1]]
        assert totals(nodes) == (1, 0)
        for node in nodes:
            await until_books(node)


async def test_many_at_once_in_little_memory_are_all_right(long_model: Path, tmp_path: Path) -> None:
    """Each node computes for the other while its own requests need every page: nobody waits for ever, and no page is
    lost."""
    asks = [asked(f"r{i}", prompt_of(300 + 40 * (i % 9), i % 12), tokens=6) for i in range(36)]
    wanted = await alone(long_model, tmp_path / "alone", *asks)
    async with opened({"m": long_model}, tmp_path / "run", memory="3MiB", max_model_len=1024) as nodes:
        found = await asyncio.gather(*(generate(nodes[i % 2], ask) for i, ask in enumerate(asks)))
        for ask, ((drawn, _),), expected in zip(asks, found, wanted, strict=True):
            assert drawn == expected, ask.id
        assert totals(nodes)[0] > 0
        for node in nodes:
            await until_books(node)


async def test_who_finds_no_room_beside_pages_that_arrive_waits_for_them(
    long_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs, and a request waits: that is no fault of the model's while those pages are about to be free."""
    first, second = asked("r0", prompt_of(1000, 1)), asked("r1", prompt_of(1000, 2))
    scored = asked("scored", prompt_of(700, 3), prompt_logprobs=0)  # every row of it is computed where it runs
    wanted = await alone(long_model, tmp_path / "alone", first, second, scored)
    going_on, copying = asyncio.Event(), list[Node]()
    monkeypatch.setattr(prefill, "LEAST_S", 60.0)
    on_n0(monkeypatch)
    async with opened({"m": long_model}, tmp_path / "run", memory="3MiB", max_model_len=1100) as nodes:

        async def wait(source: Node, arrival: Arrival) -> None:
            copying.append(source)
            await going_on.wait()

        with between(nodes, monkeypatch, wait, nothing):
            tasks = [asyncio.create_task(generate(nodes[0], ask)) for ask in (first, second)]
            await until(lambda: len(copying) == 2)
            tasks.append(asyncio.create_task(generate(nodes[0], scored)))
            batcher = device(nodes[0])._scarcity.batcher("m")
            assert batcher is not None
            await until(lambda: len(batcher.waiting) == 1)
            await asyncio.sleep(0.1)
            assert len(batcher.waiting) == 1 and not batcher.running and nodes[0].stages()["m"] is Stage.ACTIVE
            going_on.set()
            found = await asyncio.gather(*tasks)
        for ((drawn, _),), expected in zip(found, wanted, strict=True):
            assert drawn == expected
        for node in nodes:
            await until_books(node)


@contextlib.asynccontextmanager
async def beside(path: Path, run_dir: Path) -> AsyncIterator[tuple[Node, Process]]:
    """A node in this process, and one of the same cluster in its own, which computes for it. The model is on both."""
    flags = [word for name, value in FLAGS.items() for word in ("--" + name.replace("_", "-"), value)]
    async with opened({"m": path}, run_dir, ("n0",)) as (node,):
        with Process(["--node", "n1", "--join", str(run_dir), "--port", "0", f"m={path}", *flags], run_dir) as other:
            assert node._member is not None
            await until(lambda: "is ready on" in other.log, 60.0)
            answer = await node._member.ask_leader(Asked("m", Wish.LOAD, None, "n1"))
            assert answer.accepted, answer.why
            await until(lambda: len(routes(node, "m")) == 2)
            yield node, other


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("when", ["computing", "reading"])
async def test_a_helper_that_dies_or_stops_costs_time_alone(
    number: signal.Signals, when: str, long_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its process is gone, the one that runs the request learns that at once, and by its patience else."""
    request = asked("r", prompt_of(1900))
    (wanted,) = await alone(long_model, tmp_path / "alone", request)
    on_n0(monkeypatch)
    run_dir = tmp_path / "run"
    async with beside(long_model, run_dir) as (node, other):
        computed = Prefills._computed

        async def end(source: Node | None = None, arrival: Arrival | None = None) -> None:
            other.process.send_signal(number)
            if number is signal.SIGKILL:
                await asyncio.to_thread(other.process.wait)

        async def ended(self: Prefills, *more: Any) -> Any:
            asyncio.get_running_loop().call_later(0.001, lambda: asyncio.ensure_future(end()))
            return await computed(self, *more)

        async def filled(self: Prefills, pull: Pull, arrival: Arrival) -> None:
            await end()
            await fill(self, pull, arrival)

        fill = Prefills._fill
        if when == "computing":
            monkeypatch.setattr(Prefills, "_computed", ended)
        else:
            monkeypatch.setattr(Prefills, "_fill", filled)
        ((drawn, cached),) = await generate(node, request)
        assert (drawn, cached) == (wanted, 0)
        assert totals([node]) == (0, 1)
        await until_books(node)
        other.process.send_signal(signal.SIGCONT)
