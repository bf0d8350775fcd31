"""Cold models are prepared ahead of need: within the budget, in quiet moments, never at the cost of who is served."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from server_process import tiny_model
from test_lifecycle import ROOM_FOR_ONE, generate, opened, settings, until

from janus_server import lifecycle, prepared
from janus_server.errors import Refused
from janus_server.node import Node
from janus_server.orders import Stage, Wish
from janus_server.prepared import Prepared, estimate_bytes

# The tiny models' tokenizers are estimated at 2 MiB and some each.
ONE, TWO, PLENTY = "3MiB", "5MiB", "64MiB"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / name, seed=seed) for seed, name in enumerate("abcd")}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "QUIET_S", 0.05)
    monkeypatch.setattr(prepared, "_LOOK_S", 0.1)


def has(node: Node) -> str:
    """The Cold models that are prepared."""
    residents = node._lifecycle.residents  # type: ignore[union-attr]
    return "".join(name for name, one in residents.items() if one.stage is Stage.COLD and one.served is not None)


def keeper(node: Node) -> Prepared:
    assert node._prepared is not None
    return node._prepared


async def wish(node: Node, name: str, what: Wish) -> None:
    assert (await node.ask(name, what)).accepted
    await until(lambda: node.settled(name))


async def test_cold_models_are_prepared_in_order_as_far_as_the_budget_goes(models: dict[str, Path]) -> None:
    for budget, expected in ((PLENTY, "bcd"), (TWO, "bc"), (ONE, "b")):
        async with opened(settings(models, ROOM_FOR_ONE, prepare=budget)) as node:
            assert node.stages()["a"] is Stage.ACTIVE
            await until(lambda: has(node) == expected)  # noqa: B023
            await asyncio.sleep(0.3)
            assert has(node) == expected
            assert 0 < keeper(node).held_bytes <= node._config.prepare_bytes


async def test_without_a_budget_nothing_is_prepared_or_kept(models: dict[str, Path]) -> None:
    async with opened(settings(models, ROOM_FOR_ONE, prepare="0")) as node:
        await generate(node, "b")
        await wish(node, "b", Wish.EVICT)
        await until(lambda: has(node) == "")
        await asyncio.sleep(0.3)
        assert has(node) == "" and keeper(node).held_bytes == 0
        assert len(await generate(node, "b")) == 2


async def test_a_prepared_models_first_request_reads_no_tokenizer(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = {name: Path(shutil.copytree(models[name], tmp_path / name)) for name in models}
    async with opened(settings(mine, ROOM_FOR_ONE, prepare=PLENTY)) as node:
        await until(lambda: has(node) == "bcd")
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (mine["b"] / name).unlink()
        reads: list[Any] = []
        monkeypatch.setattr(lifecycle, "tokenizer_of", lambda *asked: reads.append(asked))
        tokens, _ = await generate(node, "b")
        served = await node.model("b")
        assert served is not None and served.tokenizer.encode_chat([{"role": "user", "content": "hello"}])
        assert len(tokens) == 8 and reads == []


async def test_over_the_budget_the_one_used_longest_ago_goes(models: dict[str, Path]) -> None:
    async with opened(settings(models, ROOM_FOR_ONE, prepare=TWO)) as node:
        await until(lambda: has(node) == "bc")
        for name in ("b", "d"):  # d was not prepared; what was used last stays
            await generate(node, name)
            await wish(node, name, Wish.EVICT)
        await until(lambda: has(node) == "bd")
        await generate(node, "a")  # Warm or Active it does not count
        assert node._lifecycle.residents["a"].served is not None  # type: ignore[union-attr]
        assert has(node) == "bd"
        await wish(node, "a", Wish.EVICT)
        await until(lambda: has(node) == "ad")


async def test_while_requests_run_nothing_is_prepared(models: dict[str, Path]) -> None:
    node = Node(settings(models, ROOM_FOR_ONE, prepare=PLENTY))
    try:
        await node.open(lambda model, done, total: None)
        calls = [asyncio.create_task(generate(node, "a", 300, i)) for i in range(4)]
        await until(lambda: node._lifecycle.residents["a"].flow.running == 4)  # type: ignore[union-attr]
        seen = set()
        while not all(call.done() for call in calls):
            seen.add(has(node))
            await asyncio.sleep(0.005)
        assert seen == {""}
        await until(lambda: has(node) == "bcd")
    finally:
        await node.close()


async def test_a_tokenizer_that_cannot_be_read_is_left_to_who_asks(
    models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = {name: Path(shutil.copytree(models[name], tmp_path / name)) for name in models}
    (mine["b"] / "tokenizer.json").write_text("{}")
    async with opened(settings(mine, ROOM_FOR_ONE, prepare=PLENTY)) as node:
        await until(lambda: has(node) == "cd")
        assert caplog.text.count("b: it cannot be prepared") == 1
        with pytest.raises(Refused) as refusal:
            await generate(node, "b")
        assert refusal.value.status == 503
        shutil.copy(models["b"] / "tokenizer.json", mine["b"])
        assert len((await generate(node, "b"))[0]) == 8


async def test_estimates_follow_the_size_of_the_vocabulary(models: dict[str, Path]) -> None:
    async with opened(settings(models, ROOM_FOR_ONE, prepare="0")) as node:
        one = node._lifecycle.residents["a"].opened  # type: ignore[union-attr]
        size = (models["a"] / "tokenizer.json").stat().st_size
        assert estimate_bytes(one) == (2 << 20) + 10 * size
