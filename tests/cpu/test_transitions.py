"""Each transition says where its time went, keeps the pace that holds, and is undone when it takes too long."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fork_node import life, order
from server_process import tiny_model
from test_lifecycle import ROOM_FOR_ALL, books_are_right, generate, opened, settings, stage, until

from janus_server import resident
from janus_server.executor import DeviceThread
from janus_server.kv.move import Pace, Stopped
from janus_server.lifecycle import TOO_LONG
from janus_server.node import Node
from janus_server.orders import Done, Failed, Phases, Stage, Verb
from janus_server.resident import Deadlines

SHORT = Deadlines(floor_s=0.05, factor=0.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / name, seed=seed) for seed, name in enumerate("ab")}


def limit(node: Node, deadlines: Deadlines, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(life(node), "_deadlines", deadlines)


async def test_phases_add_up_to_no_more_than_the_whole(models: dict[str, Path]) -> None:
    async with opened(settings(models, ROOM_FOR_ALL)) as node:
        used = {
            Verb.SLEEP: {"touch_s", "copy_s", "commit_s", "unmap_s"},
            Verb.WAKE: {"reserve_s", "touch_s", "map_s", "copy_s", "verify_s", "commit_s"},
            Verb.UNLOAD: {"commit_s", "unmap_s"},
            Verb.LOAD: {"reserve_s", "touch_s", "map_s", "copy_s", "verify_s", "commit_s"},
        }
        for verb, names in used.items():
            end = await order(node, "a", verb)
            assert isinstance(end, Done)
            spent = {name: s for name, s in msgspec.structs.asdict(end.phases).items() if s}
            assert set(spent) == names
            assert sum(spent.values()) <= end.took_s
        assert isinstance(again := await order(node, "a", Verb.LOAD), Done)
        assert again.phases == Phases() and again.took_s == 0.0  # it was there already


async def test_a_second_sleep_copies_nothing(models: dict[str, Path]) -> None:
    async with opened(settings(models, ROOM_FOR_ALL)) as node:
        for verb in (Verb.SLEEP, Verb.WAKE):
            await order(node, "a", verb)
        end = await order(node, "a", Verb.SLEEP)
        assert isinstance(end, Done) and end.phases.copy_s == end.phases.touch_s == 0.0


@pytest.mark.parametrize("verb", [Verb.LOAD, Verb.WAKE])
async def test_a_move_in_that_takes_too_long_is_undone(
    models: dict[str, Path], verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(*arguments: Any, **more: Any) -> None:
        if verb is Verb.LOAD:
            while True:
                arguments[4](1, 2)
                time.sleep(0.002)
        pace: Pace = arguments[2]
        while pace.may_go():
            time.sleep(0.002)
        raise Stopped

    async with opened(settings(models, ROOM_FOR_ALL)) as node:
        before = await generate(node, "a", 16)
        await order(node, "a", Verb.UNLOAD if verb is Verb.LOAD else Verb.SLEEP)
        was = stage(node, "a")
        with monkeypatch.context() as patch:
            patch.setattr(resident, "load_weights" if verb is Verb.LOAD else "move", endless)
            limit(node, SHORT, patch)
            end = await order(node, "a", verb)
            assert isinstance(end, Failed) and end.reason == TOO_LONG and not end.lasting
        assert stage(node, "a") is was
        await books_are_right(node)
        assert isinstance(await order(node, "a", verb), Done)
        assert await generate(node, "a", 16, 1) == before


async def test_a_sleep_that_takes_too_long_leaves_the_model_serving(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(target: Any, source: Any, pace: Pace, *more: Any) -> None:
        while pace.may_go():
            time.sleep(0.002)
        raise Stopped

    async with opened(settings(models, ROOM_FOR_ALL)) as node:
        before = await generate(node, "a", 16)
        with monkeypatch.context() as patch:
            patch.setattr(resident, "move", endless)
            limit(node, SHORT, patch)
            end = await order(node, "a", Verb.SLEEP)
            assert isinstance(end, Failed) and end.reason == TOO_LONG
        assert stage(node, "a") is Stage.ACTIVE and not life(node).has_copy("a")
        await books_are_right(node)
        assert await generate(node, "a", 16, 1) == before


async def test_a_transition_that_fails_at_its_last_step_is_undone(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DeviceThread.attach

    def attach(self: DeviceThread, engine: Any) -> None:
        real(self, engine)
        raise OSError(12, "injected")

    async with opened(settings(models, ROOM_FOR_ALL)) as node:
        before = await generate(node, "a", 16)
        await order(node, "a", Verb.SLEEP)
        with monkeypatch.context() as patch:
            patch.setattr(DeviceThread, "attach", attach)
            assert isinstance(await order(node, "a", Verb.WAKE), Failed)
        assert stage(node, "a") is Stage.WARM
        await books_are_right(node)
        assert isinstance(await order(node, "a", Verb.WAKE), Done)
        assert await generate(node, "a", 16, 1) == before


async def test_a_cancel_at_any_moment_leaves_a_stage_that_is_true(models: dict[str, Path]) -> None:
    """The cancel comes later and later until the transition is faster."""
    async with opened(settings(models, ROOM_FOR_ALL)) as node:
        before = await generate(node, "a", 16)
        for verb, otherwise in ((Verb.SLEEP, Verb.WAKE), (Verb.WAKE, Verb.SLEEP)):
            if verb is Verb.WAKE:
                await order(node, "a", Verb.SLEEP)
            for step in range(40):
                task = asyncio.create_task(order(node, "a", verb))
                await asyncio.sleep(step * 0.0002)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await books_are_right(node)
                if stage(node, "a") is (Stage.WARM if verb is Verb.SLEEP else Stage.ACTIVE):
                    await order(node, "a", otherwise)
        await order(node, "a", Verb.WAKE)
        assert await generate(node, "a", 16, 1) == before


async def test_weights_move_slowly_only_while_requests_run(models: dict[str, Path]) -> None:
    async with opened(settings(models, ROOM_FOR_ALL, copy_rate="4MB")) as node:
        one = life(node)
        assert one.copy_rate() is None and one.resting
        running = asyncio.create_task(generate(node, "a", 300))
        await until(lambda: one.serving)
        assert one.copy_rate() == 4_000_000 and not one.resting
        slow = await order(node, "b", Verb.SLEEP)
        assert isinstance(slow, Done) and slow.phases.copy_s > 0.0
        await running
        assert one.copy_rate() is None and one.resting


async def test_what_the_catalogue_can_use_is_at_hand_after_a_rest(models: dict[str, Path]) -> None:
    async with opened(settings(models, ROOM_FOR_ALL)) as node:
        await until(lambda: node.touched)
        pages = sum(one.opened.weight_pages for one in life(node).residents.values())
        assert life(node)._xtensor.touched.missing(0, pages) == 0
        assert life(node)._copies.touched.missing(0, 2) == 0
