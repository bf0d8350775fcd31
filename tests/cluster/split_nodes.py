"""Nodes of one cluster in the test's own process: what one of them computes and another runs can be looked at."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from janus_server.cluster.arrivals import ARRIVING
from janus_server.cluster.prefill import Prefills
from janus_server.config import serve_config
from janus_server.node import Node
from janus_server.orders import Stage, Wish
from janus_server.peers import peering_of
from janus_server.serve import _place
from janus_server.types import PageKind, Request, Sampling

FLAGS = {"memory": "8MiB", "page_size": "16KiB", "host_memory": "8MiB", "kernels": "cpu", "threads": "1"}


@contextlib.asynccontextmanager
async def opened(
    models: Mapping[str, Path], run_dir: Path, names: tuple[str, ...] = ("n0", "n1"), **flags: Any
) -> AsyncIterator[list[Node]]:
    """Nodes of one cluster, every model Active on each."""
    run_dir.mkdir(mode=0o700, exist_ok=True)
    nodes = []
    for name in names:
        settings = {**FLAGS, "pd_split": "always", "join": str(run_dir), "node": name, **flags}
        config = serve_config([f"{model}={path}" for model, path in models.items()], flags=settings)
        peering = peering_of(config, [run_dir])
        nodes.append(Node(config, peering, _place(config, peering)))
    try:
        await asyncio.gather(*(node.open(lambda model, done, total: None) for node in nodes))
        for node in nodes:
            for model in models:
                answer = await node.ask(model, Wish.LOAD)
                assert answer.accepted, answer.why
        for model in models:
            await until(lambda: all(node.stages()[model] is Stage.ACTIVE for node in nodes))  # noqa: B023
            await until(lambda: all(len(routes(node, model)) == len(nodes) for node in nodes))  # noqa: B023
        yield nodes
    finally:
        await asyncio.gather(*(node.close() for node in nodes), return_exceptions=True)


def routes(node: Node, model: str) -> tuple[str, ...]:
    assert node._member is not None
    table = node._member._table
    return () if table is None else table.routes.get(model, ())


def prefills(node: Node) -> Prefills:
    assert node._member is not None and node._member._handover.prefills is not None
    return node._member._handover.prefills


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.002)


def asked(name: str, prompt: tuple[int, ...], tokens: int = 12, model: str = "m", **fields: Any) -> Request:
    sampling = fields.pop("sampling", Sampling(temperature=0.0, logprobs=3))
    return Request(id=name, model=model, prompt=prompt, max_tokens=tokens, sampling=sampling, **fields)


Drawn = dict[int, list[tuple[int, tuple[float, ...]]]]


async def generate(node: Node, *requests: Request) -> list[tuple[Drawn, int]]:
    """Of each request: by choice its tokens with their log probabilities, and how many tokens a cache gave."""
    served = await node.model(requests[0].model)
    assert served is not None
    drawn: list[Drawn] = [{} for _ in requests]
    cached = [0] * len(requests)
    async with served.submit(list(requests)) as call:
        while (news := await call.take(60.0)) is not None:
            assert news, "nothing came"
            for one in news:
                cached[one.prompt] += one.delta.cached_tokens
                assert one.delta.message is None, one.delta
                for scored in one.delta.logprobs:
                    numbers = (scored.logprob, *(value for _, value in scored.top))
                    drawn[one.prompt].setdefault(one.delta.index, []).append((scored.token, numbers))
    return list(zip(drawn, cached, strict=True))


async def books(node: Node) -> dict[str, int]:
    """Pages by what they are for; none is on its way, and the pool's own books are right."""
    device = node._device
    assert device is not None
    await asyncio.wrap_future(device.ask(device._pool.check))
    held = await asyncio.wrap_future(device.ask(device._pool.held))
    assert ARRIVING not in held
    assert not device._scarcity.awaited
    assert device._scarcity.expecting == 0 and len(device._scarcity.loans) == 0
    batchers = device._scarcity._batchers
    assert all(not batcher.kv._refs or set(batcher.kv._refs.values()) == {1} for batcher in batchers)
    assert {owner.model: pages for owner, pages in held.items() if owner.kind is PageKind.KV} == {
        batcher.kv.owner.model: batcher.kv.held for batcher in batchers if batcher.kv.held
    }
    assert all(batcher.kv.held == len(batcher.prefix) for batcher in batchers)
    return {f"{owner.model} {owner.kind.value}": pages for owner, pages in held.items()}
