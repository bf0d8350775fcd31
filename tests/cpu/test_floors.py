"""Floors, ceilings and the idle time of prefixes on a whole node: what was configured holds while models run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from server_process import tiny_model

from janus_server.config import ServeConfig, serve_config
from janus_server.kv.pages import PagePool
from janus_server.node import Node
from janus_server.orders import Stage, Wish
from janus_server.types import Owner, PageKind, Request, Sampling

KV_A, KV_B = (Owner(name, PageKind.KV) for name in "ab")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / name, seed=seed) for seed, name in enumerate("ab")}


def settings(models: dict[str, Path], folder: Path, options: str, **more: Any) -> ServeConfig:
    """Options are lines for both models, in the order a, b, apart by a blank line."""
    file = folder / "janus.toml"
    parts = options.split("\n\n")
    tables = (
        f'[models.{name}]\npath = "{path}"\n{part}\n' for (name, path), part in zip(models.items(), parts, strict=True)
    )
    file.write_text("".join(tables))
    flags = {"memory": "4MiB", "page_size": "64KiB", "kernels": "cpu", "threads": "1", **more}
    return serve_config(file=file, flags=flags)


@contextlib.asynccontextmanager
async def opened(config: ServeConfig) -> AsyncIterator[tuple[Node, PagePool]]:
    node = Node(config)
    try:
        await node.open(lambda model, done, total: None)
        assert node._device is not None
        yield node, node._device._pool
    finally:
        await node.close()


async def generate(node: Node, name: str, number: int, tokens: int = 8, prompt: int = 20) -> None:
    model = await node.model(name)
    assert model is not None
    ids = tuple(5 + (7 * number + i) % 290 for i in range(prompt))
    request = Request(
        id=f"{name}-{number}", model=name, prompt=ids, max_tokens=tokens, sampling=Sampling(temperature=0)
    )  # fmt: skip
    async with model.submit([request]) as call:
        while await call.take(30.0) is not None:
            pass


async def until_stage(node: Node, name: str, wish: Wish, stage: Stage) -> None:
    assert (await node.ask(name, wish)).accepted
    async with asyncio.timeout(20):
        while node.stages()[name] is not stage:
            await asyncio.sleep(0.005)


async def test_a_floor_is_kept_while_its_model_is_active(models: dict[str, Path], tmp_path: Path) -> None:
    config = settings(models, tmp_path, 'kv_floor = "640KiB"\n\n')
    async with opened(config) as (node, pool):
        assert pool.kept_pages == 10 and pool.available() == pool.free_pages - 10
        await generate(node, "a", 0, prompt=200)
        held = pool.held()[KV_A]
        assert 0 < held < 10 and pool.kept_pages == 10 - held, "cached prefixes count"
        await until_stage(node, "a", Wish.SLEEP, Stage.WARM)
        assert (pool.kept_pages, KV_A in pool.held()) == (0, False), "nothing outlives the sleep"
        await until_stage(node, "a", Wish.WAKE, Stage.ACTIVE)
        assert pool.kept_pages == 10
        await generate(node, "a", 0, prompt=200)


async def test_a_flood_of_one_model_leaves_the_others_floor_alone(models: dict[str, Path], tmp_path: Path) -> None:
    """b is answered at once from its floor, and nobody of a's is preempted for it."""
    config = settings(models, tmp_path, '\n\nkv_floor = "384KiB"', memory="2560KiB")
    async with opened(config) as (node, pool):
        flood = asyncio.gather(*(generate(node, "a", i, tokens=120, prompt=100) for i in range(30)))
        await asyncio.sleep(0.2)
        for number in range(5):
            before = pool.available(KV_B)
            assert before >= 6 - pool.held().get(KV_B, 0)
            await generate(node, "b", number, tokens=4)
        await flood


async def test_a_model_never_holds_more_than_its_ceiling(models: dict[str, Path], tmp_path: Path) -> None:
    config = settings(models, tmp_path, 'kv_ceiling = "256KiB"\n\n')
    seen = []
    async with opened(config) as (node, pool):
        node.on_step(lambda report: seen.append(report.pages.get(KV_A, 0)))
        await asyncio.gather(*(generate(node, "a", i, tokens=40, prompt=60) for i in range(12)))
        assert max(seen) == 4 and pool.free_pages > 12
        assert node.stats()["a"].waiting == 0


async def test_unused_prefixes_go_back_to_the_pool_of_a_node_at_rest(models: dict[str, Path], tmp_path: Path) -> None:
    config = settings(models, tmp_path, "\n\n", prefix_idle="200ms")
    async with opened(config) as (node, pool):
        free = pool.free_pages
        await generate(node, "a", 0, prompt=200)
        await generate(node, "b", 0, prompt=200)
        async with asyncio.timeout(20):
            while node.free_pages != free:
                await asyncio.sleep(0.01)
        assert KV_A not in node.memory() and KV_B not in node.memory()
        await generate(node, "a", 0, prompt=200)


async def test_unused_prefixes_stay_where_nobody_bounds_them(models: dict[str, Path], tmp_path: Path) -> None:
    config = settings(models, tmp_path, "\n\n", prefix_idle="never")
    async with opened(config) as (node, pool):
        await generate(node, "a", 0, prompt=200)
        assert node._device is not None and node._device._scarcity.next_period() is None
        assert pool.held()[KV_A] >= 2
