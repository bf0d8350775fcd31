"""An operator's view of a node in this process: waiting ends as it should, and what is shown is what there is."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from server_process import tiny_model
from test_lifecycle import ROOM_FOR_ALL, ROOM_FOR_ONE, generate, opened, settings, until

from janus_server import lifecycle, resident
from janus_server.node import Node
from janus_server.operate import End, Operator
from janus_server.orders import Stage, Wish


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / name, seed=seed) for seed, name in enumerate("abc")}


def operator_of(node: Node) -> Operator:
    assert node.operator is not None
    return node.operator


async def test_a_sleep_that_the_host_has_no_room_for_is_missed_not_waited_for(models: dict[str, Path]) -> None:
    async with opened(settings(models, ROOM_FOR_ALL, host_memory="1MiB")) as node:
        operator = operator_of(node)
        assert (await operator.ask("a", Wish.SLEEP)).accepted
        assert await operator.until("a", Wish.SLEEP, 20.0) is End.MISSED
        assert node.stages()["a"] is Stage.COLD
        await generate(node, "a")
        assert node.settled("a")
        assert node.stages()["a"] is Stage.ACTIVE


async def test_waiting_ends_with_what_comes_first(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    real = resident.load_weights

    def slow(*arguments: Any, **more: Any) -> Any:
        time.sleep(0.3)
        return real(*arguments, **more)

    async with opened(settings(models, ROOM_FOR_ONE)) as node:
        operator = operator_of(node)
        monkeypatch.setattr(resident, "load_weights", slow)
        assert (await operator.ask("b", Wish.LOAD)).accepted
        assert await operator.until("b", Wish.LOAD, 0.05) is End.LATE
        found = operator.model("b")
        assert found.under_way is not None or found.goal == "active"
        assert await operator.until("b", Wish.LOAD, 20.0) is End.REACHED
        assert operator.model("b").held_pages == operator.model("b").weight_pages
        assert await operator.until("b", Wish.PIN, 0.0) is End.REACHED
        await operator.ask("a", Wish.EVICT)
        assert await operator.until("a", Wish.EVICT, 20.0) is End.REACHED
        await operator.ask("b", Wish.SLEEP)
        operator.watch.close()


async def test_a_load_that_fails_is_missed_with_a_fixed_text(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **more: Any) -> Any:
        raise OSError(12, "/secret/path")

    async with opened(settings(models, ROOM_FOR_ONE)) as node:
        operator = operator_of(node)
        with monkeypatch.context() as patch:
            patch.setattr(resident, "load_weights", fail)
            await operator.ask("b", Wish.LOAD)
            assert await operator.until("b", Wish.LOAD, 20.0) is End.MISSED
        assert operator.model("b").trouble == lifecycle.UNREADABLE
        await operator.ask("b", Wish.LOAD)
        assert await operator.until("b", Wish.LOAD, 20.0) is End.REACHED
        assert operator.model("b").trouble is None


async def test_the_survey_is_true_at_every_moment_of_a_busy_node(models: dict[str, Path]) -> None:
    async with opened(settings(models, ROOM_FOR_ALL)) as node:
        operator = operator_of(node)
        calls = [asyncio.create_task(generate(node, name, 200, i)) for i in range(4) for name in models]
        await until(lambda: len(node.streams) == len(calls))
        seen_kv = 0
        while not all(call.done() for call in calls):
            survey = await operator.survey()
            found = operator.memory(survey)
            assert sum(run.count for run in found.runs) == found.pool_pages == node.pool_pages
            for one in found.models:
                kv_pages = sum(t.pages for t in found.totals if (t.model, t.kind) == (one.model, "kv"))
                seen_kv = max(seen_kv, kv_pages)
                assert 0 <= one.kv_waste_bytes <= kv_pages * found.page_bytes
                assert one.prefix_pages <= kv_pages
            await asyncio.sleep(0.01)
        assert seen_kv >= 4
        quiet = operator.memory(await operator.survey())
        for one in quiet.models:
            kv_pages = sum(t.pages for t in quiet.totals if (t.model, t.kind) == (one.model, "kv"))
            assert one.prefix_pages == kv_pages
            left = 64 * 1024 - node.cards[one.model].kv_page_tokens * 768
            assert one.kv_waste_bytes == kv_pages * left


async def test_a_model_that_was_torn_down_is_shown_as_such(models: dict[str, Path]) -> None:
    async with opened(settings(models, ROOM_FOR_ONE)) as node:
        operator = operator_of(node)
        resident = node._lifecycle.residents["a"]  # type: ignore[union-attr]
        assert resident.engine is not None

        def broken(batch: object) -> None:
            raise RuntimeError("secret internals")

        resident.engine.runner.stage = broken  # type: ignore[method-assign,assignment]
        await generate(node, "a")
        await until(lambda: operator.model("a").trouble is not None)
        assert "secret" not in str(operator.model("a").trouble)
        found = operator.memory(await operator.survey())
        assert {total.kind for total in found.totals} <= {"scratch"}
        assert found.free_pages + sum(total.pages for total in found.totals) == found.pool_pages
