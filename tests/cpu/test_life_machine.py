"""The whole life of three models that share room for one and a half, with something failing at every place in turn.

Requests, leaving clients and wishes come in any order while a copy thread, an allocation, a mapping, a step or a wait
fails. Afterwards every page is accounted for, every request has ended exactly once, what was answered has the bits of
the first answer, no host copy is gone that nobody dropped, and all models serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as effort
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from server_process import tiny_model
from test_lifecycle import ROOM_FOR_ONE, books_are_right, opened, settings

from janus_server import node as node_module
from janus_server.errors import Refused
from janus_server.executor import DeviceThread
from janus_server.kv.host import CHUNK_BYTES, HostCopies
from janus_server.kv.vmm_cpu import Window
from janus_server.kv.xtensor import WeightMemory
from janus_server.lifecycle import Lifecycle
from janus_server.model.runner import Runner
from janus_server.node import Node
from janus_server.orders import Done, Failed, Order, Stage, Verb, Wish
from janus_server.sched.state import BrainSettings
from janus_server.types import FinishReason, Request, Sampling

T = TypeVar("T")

NAMES = ("a", "b", "c")
ONE_COPY = f"{CHUNK_BYTES}B"  # a tiny model takes one chunk
TOKENS = 40
# The Brain's pauses in small, so that busy models give way and failed orders are tried again within the test.
HASTY = BrainSettings(patience_s=0.05, stay_s=0.1, backoff_s=0.01, broken_s=0.2)

# A token with its log probability and the five largest: equal floats are equal logits.
Said = tuple[int, float, tuple[tuple[int, float], ...]]


class Place(enum.Enum):
    """Where something can fail."""

    BEFORE_COPYING = "a copy thread fails before its work"
    AFTER_COPYING = "a copy thread fails after its work"
    RESERVE = "the pool has no pages for weights"
    MAP = "the system refuses to map"
    UNMAP = "the system refuses to unmap"
    COMMIT = "the device thread fails to commit"
    HOST = "the host has no memory for a copy"
    STEP = "a step of a model fails"
    WAIT = "an order is cancelled while it waits for a thread"


class Faults:
    """Counts how often each place is passed, and lets one of them fail once, and another one when it comes next."""

    def __init__(self) -> None:
        self.passed: dict[Place, int] = dict.fromkeys(Place, 0)
        self._armed: tuple[Place, int] | None = None
        self._then: Place | None = None
        self.order: asyncio.Future[Any] | None = None  # what a failing wait cancels

    def arm(self, place: Place, number: int, then: Place | None = None) -> None:
        """Let the `number`-th pass from now on fail, counted from 1; after that, the first pass of `then`."""
        self._armed, self._then = (place, self.passed[place] + number), then

    def disarm(self) -> bool:
        """No failure from now on; True when what was armed has happened."""
        armed, self._armed, self._then = self._armed, None, None
        return armed is None

    def due(self, place: Place) -> bool:
        self.passed[place] += 1
        if self._armed != (place, self.passed[place]):
            return False
        self._armed = None if self._then is None else (self._then, self.passed[self._then] + 1)
        self._then = None
        return True


class FailingThreads:
    """The copy threads as the lifecycle uses them: what they are given may fail before it is done or after."""

    def __init__(self, threads: Any, faults: Faults) -> None:
        self._threads = threads
        self._faults = faults

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Any:
        before, after = self._faults.due(Place.BEFORE_COPYING), self._faults.due(Place.AFTER_COPYING)
        cancel_when_due(self._faults)

        def run() -> Any:
            if before:
                raise OSError(5, "injected")
            result = work(*arguments)
            if after:
                raise OSError(5, "injected")
            return result

        return self._threads.submit(run)

    def shutdown(self, **how: Any) -> None:
        self._threads.shutdown(**how)


def cancel_when_due(faults: Faults) -> None:
    """Called where work is handed to a thread: the order is told while it waits for that."""
    if faults.due(Place.WAIT) and faults.order is not None:
        faults.order.cancel()


@contextlib.contextmanager
def fallible(faults: Faults) -> Iterator[None]:
    """Every place of the classes a node is made of can fail."""

    def raises(place: Place, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if faults.due(place):
                raise OSError(12, "injected")
            return real(*arguments, **more)

        return call

    def gives(place: Place, nothing: Any, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **more: nothing if faults.due(place) else real(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_module, "BrainSettings", lambda **given: msgspec.structs.replace(HASTY, **given))
        patch.setattr(Window, "map", raises(Place.MAP, Window.map))
        patch.setattr(Window, "unmap", raises(Place.UNMAP, Window.unmap))
        patch.setattr(WeightMemory, "commit", raises(Place.COMMIT, WeightMemory.commit))
        patch.setattr(WeightMemory, "reserve", gives(Place.RESERVE, False, WeightMemory.reserve))
        patch.setattr(HostCopies, "take", gives(Place.HOST, None, HostCopies.take))
        patch.setattr(Runner, "forward", raises(Place.STEP, Runner.forward))
        ask = DeviceThread.ask

        def asking(device: DeviceThread, work: Callable[[], Any]) -> Any:
            cancel_when_due(faults)
            return ask(device, work)

        patch.setattr(DeviceThread, "ask", asking)
        yield


class Stream:
    """One request and what came of it."""

    def __init__(self, node: Node, number: int, model: str, tokens: int, choices: int) -> None:
        self.model = model
        self.tokens = tokens
        self.said: list[list[Said]] = [[] for _ in range(choices)]
        self.ends: list[list[FinishReason]] = [[] for _ in range(choices)]
        self.refused: Refused | None = None
        self.left = False
        greedy = Sampling(temperature=0, logprobs=5)
        # No end token: greedy answers are as long as asked.
        request = Request(
            id=f"{model}-{number}", model=model, prompt=(5, 6, 7, 8), max_tokens=tokens, n=choices, sampling=greedy
        )
        self.task = asyncio.get_running_loop().create_task(self._run(node, request))

    async def _run(self, node: Node, request: Request) -> None:
        try:
            served = await node.model(request.model)
            assert served is not None
            async with served.submit([request]) as call:
                while (news := await call.take(30.0)) is not None:
                    assert news, "nothing came for 30 s"
                    for delta in (one.delta for one in news):
                        self.said[delta.index] += [(one.token, one.logprob, one.top) for one in delta.logprobs]
                        if delta.finish is not None:
                            self.ends[delta.index].append(delta.finish)
        except Refused as refused:
            self.refused = refused
        except asyncio.CancelledError:
            self.left = True

    def check(self, first: Mapping[str, list[Said]]) -> None:
        """It ended exactly once, and what was said is what was said first, as far as it came."""
        assert self.task.done()
        self.task.result()
        for said, ends in zip(self.said, self.ends, strict=True):
            assert said == first[self.model][: len(said)]
            if self.refused is not None:
                assert self.refused.status == 503 and not ends
                assert "injected" not in self.refused.message
            elif not self.left:
                assert ends in ([FinishReason.LENGTH], [FinishReason.ERROR])
                assert ends != [FinishReason.LENGTH] or len(said) == self.tokens


class Life:
    """A node with its faults, the answers that its models gave first, and all streams since."""

    def __init__(self, node: Node, faults: Faults) -> None:
        self.node = node
        self.faults = faults
        self.first: dict[str, list[Said]] = {}
        self.streams: list[Stream] = []
        self.dropped: set[str] = set()  # models whose copy an order may have dropped since the last check
        self.copies: set[str] = set()
        self._number = 0
        life = self.life
        life._threads = FailingThreads(life._threads, faults)  # type: ignore[assignment]
        obey = life.obey

        async def noting(order: Order) -> Any:
            if order.verb in (Verb.EVICT, Verb.UNLOAD):
                self.dropped.add(order.model)
            return await obey(order)

        life.obey = noting  # type: ignore[method-assign]

    @property
    def life(self) -> Lifecycle:
        assert self.node._lifecycle is not None
        return self.node._lifecycle

    @property
    def device(self) -> DeviceThread:
        assert self.node._device is not None
        return self.node._device

    def ask(self, model: str, tokens: int = TOKENS, choices: int = 1) -> Stream:
        self._number += 1
        stream = Stream(self.node, self._number, model, tokens, choices)
        self.streams.append(stream)
        return stream

    async def quiet(self) -> None:
        """Until every request has ended and no order is open."""
        async with asyncio.timeout(30):
            await asyncio.gather(*(stream.task for stream in self.streams), return_exceptions=True)
            while len(self.node.streams) or not all(self.node.settled(name) for name in NAMES):
                await asyncio.sleep(0.002)
            await asyncio.wrap_future(self.device.ask(lambda: None))  # cancels have been heard

    async def books(self) -> None:
        """Pages add up, and the device thread gives turns to the Active models alone, each once."""
        await books_are_right(self.node)
        device = self.device
        turns = await asyncio.wrap_future(device.ask(lambda: sorted(device._engines)))
        sharing = await asyncio.wrap_future(device.ask(lambda: [b.kv.owner.model for b in device._scarcity._batchers]))
        active = [name for name in NAMES if self.node.stages()[name] is Stage.ACTIVE]
        assert turns == sorted(sharing) == active

    async def check(self) -> None:
        """Everything that must hold once all is quiet."""
        await self.quiet()
        await self.books()
        streams, self.streams = self.streams, []
        for stream in streams:
            stream.check(self.first)
        held = {name for name in NAMES if self.life.has_copy(name)}
        assert set(self.life._copies.held()) == held, "memory of a copy that is not there"
        assert self.copies - held <= self.dropped, "a copy went that no order dropped"
        self.copies, self.dropped = held, set()
        (room,) = self.node._leader._brain.memory().rooms  # type: ignore[union-attr]
        for belief in room.models:
            name, resident = belief.known.model, self.life.residents[belief.known.model]
            assert (belief.stage, belief.copy) == (resident.stage, name in held)
            assert resident.flow.held == resident.flow.running == 0
            if resident.stage is Stage.ACTIVE:
                assert resident.memory is not None and len(resident.memory.pages) == resident.opened.weight_pages

    async def serves(self) -> None:
        """All models answer as they did first."""
        for name in NAMES:
            await self.node.ask(name, Wish.UNPIN)
        for name in NAMES:
            await self.node.ask(name, Wish.LOAD)  # what failed before is tried again at once
            stream = self.ask(name)
            await stream.task
            assert stream.ends == [[FinishReason.LENGTH]], stream.refused
            assert stream.said == [self.first[name]]
        await self.check()

    async def forget(self) -> None:
        """All models cold, as at the start of a script."""
        for name in NAMES:
            await self.node.ask(name, Wish.UNPIN)
            await self.node.ask(name, Wish.EVICT)
            await self.quiet()
        assert set(self.node.stages().values()) == {Stage.COLD}
        self.copies = set()


@contextlib.asynccontextmanager
async def living(models: Mapping[str, Path]) -> AsyncIterator[Life]:
    """A node whose models have all answered once."""
    faults = Faults()
    with fallible(faults):
        async with opened(settings(dict(models), ROOM_FOR_ONE, host_memory=ONE_COPY)) as node:
            life = Life(node, faults)
            for name in NAMES:
                stream = life.ask(name)
                await stream.task
                assert stream.ends == [[FinishReason.LENGTH]]
                life.first[name] = stream.said[0]
            await life.check()
            yield life


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / name, seed=seed) for seed, name in enumerate(NAMES)}


async def script(life: Life) -> None:
    """Every transition there is: load, sleep, wake, evict, unload, with requests that wait and one that leaves."""
    for name in ("a", "b", "a"):  # b's load puts a to sleep; a's wake has to find host memory for b's copy
        await asyncio.wait([life.ask(name).task])
    both = [life.ask("a", 20, choices=2), life.ask("c", 10)]
    leaves = life.ask("b", 10)
    await asyncio.sleep(0.01)
    leaves.task.cancel()
    await asyncio.wait([one.task for one in both])
    for name, wish in (("c", Wish.SLEEP), ("c", Wish.WAKE), ("c", Wish.SLEEP), ("b", Wish.LOAD), ("b", Wish.EVICT)):
        await life.node.ask(name, wish)
        await life.quiet()


PLACES = tuple(place for place in Place if place is not Place.WAIT)
MOST_TURNS = 36  # of steps, which are passed more often, the first so many


@pytest.mark.parametrize("then", [None, Place.UNMAP], ids=["alone", "and its way back fails too"])
async def test_each_place_fails_at_each_of_its_turns(models: dict[str, Path], then: Place | None) -> None:
    """Exhaustive: the script is run again for every place and every time that it is passed."""
    async with living(models) as life:
        await life.forget()
        before = dict(life.faults.passed)
        await script(life)
        await life.check()
        turns = {place: life.faults.passed[place] - before[place] for place in PLACES}
        assert all(turns.values()), "the script does not pass every place"
        for place in PLACES:
            happened = 0
            for number in range(1, min(turns[place], MOST_TURNS) + 1):
                await life.forget()
                life.faults.arm(place, number, then)
                await script(life)
                happened += life.faults.disarm()
                await life.check()
            assert happened, place
            await life.serves()


async def test_an_order_that_is_cancelled_at_any_wait_leaves_the_model_where_it_was_or_where_it_shall(
    models: dict[str, Path],
) -> None:
    way_back = {Verb.SLEEP: Verb.WAKE, Verb.WAKE: Verb.SLEEP, Verb.UNLOAD: Verb.LOAD, Verb.LOAD: Verb.UNLOAD}
    async with living(models) as life:
        await life.forget()
        await asyncio.wait([life.ask("a").task])
        numbers = itertools.count(1_000_000)

        def order(verb: Verb) -> asyncio.Future[Done | Failed | None]:
            """Past the Brain: it would do more than was said."""
            return asyncio.ensure_future(life.life.obey(Order(1, next(numbers), "", "a", verb, "a test")))

        for verb in (Verb.SLEEP, Verb.WAKE, Verb.UNLOAD, Verb.LOAD):
            before = life.node.stages()["a"]
            for turn in itertools.count(1):
                life.faults.arm(Place.WAIT, turn)
                life.faults.order = order(verb)
                await asyncio.wait([life.faults.order])
                cancelled = life.faults.disarm()
                assert life.faults.order.cancelled() == cancelled
                await life.books()
                if life.node.stages()["a"] is Stage.ACTIVE:
                    stream = life.ask("a")
                    await stream.task
                    assert stream.said == [life.first["a"]]
                if not cancelled:
                    break
                if life.node.stages()["a"] is not before:  # the cancel came when all was done
                    assert isinstance(await order(way_back[verb]), Done)
            assert turn > 3
            assert isinstance(life.faults.order.result(), Done)
        await life.serves()


class Machine(RuleBasedStateMachine):
    """Anything in any order, something failing now and then. `models` is bound by the test."""

    models: Mapping[str, Path]
    streams = Bundle("streams")

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.node = living(self.models)
        self.life = self.run(self.node.__aenter__())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @rule(target=streams, model=st.sampled_from(NAMES), tokens=st.integers(1, TOKENS), choices=st.integers(1, 2))
    def ask(self, model: str, tokens: int, choices: int) -> Stream:
        async def begin() -> Stream:
            return self.life.ask(model, tokens, choices)

        return self.run(begin())

    @rule(stream=streams)
    def leave(self, stream: Stream) -> None:
        async def leave() -> None:
            stream.task.cancel()

        self.run(leave())

    @rule(model=st.sampled_from(NAMES), wish=st.sampled_from([wish for wish in Wish if wish is not Wish.FORK]))
    def wish(self, model: str, wish: Wish) -> None:
        async def ask() -> None:
            await self.life.node.ask(model, wish)

        self.run(ask())

    @rule(place=st.sampled_from(PLACES), number=st.integers(1, 6), then=st.sampled_from([None, *PLACES]))
    def fail(self, place: Place, number: int, then: Place | None) -> None:
        self.life.faults.arm(place, number, then)

    @rule(ms=st.sampled_from((0, 1, 3, 10, 30, 120)))
    def go_on(self, ms: int) -> None:
        self.run(asyncio.sleep(ms / 1000))

    @rule()
    def settle(self) -> None:
        """Whatever is armed stays so: the books are right also after a failure in the last moment."""
        for name in NAMES:  # or who waits for room would wait for ever
            self.wish(name, Wish.UNPIN)
        self.run(self.life.check())

    def teardown(self) -> None:
        if not hasattr(self, "life"):
            return
        try:
            self.life.faults.disarm()
            self.settle()
            self.run(self.life.serves())
        finally:
            self.run(self.node.__aexit__(None, None, None))
            self.runner.close()


def test_any_life_ends_with_its_books_right(models: dict[str, Path]) -> None:
    bound = type("Bound", (Machine,), {"models": models})
    run_state_machine_as_test(
        bound,
        settings=effort(
            max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
