"""A node that other nodes fork from or to, in this process or in one of its own that is told what to do line by line.

As a program: `fork_node.py SETTINGS` (JSON), then a JSON command a line on stdin and its JSON answer on stdout. It ends
with its stdin, so that none outlives a killed test.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from janus_server.config import serve_config
from janus_server.lifecycle import Lifecycle
from janus_server.node import Node
from janus_server.orders import Done, Failed, Lost, Order, Stage, Verb, Wish
from janus_server.transfer.rundir import Peering
from janus_server.types import PageKind, Request, Sampling

REPO = Path(__file__).parents[2]
ROOM_FOR_ALL = "16MiB"


@contextlib.asynccontextmanager
async def opened(
    name: str,
    run_dir: Path,
    models: Mapping[str, Path],
    *,
    memory: str = ROOM_FOR_ALL,
    flags: Mapping[str, Any] | None = None,
    progress: Callable[[str, int, int], None] = lambda model, done, total: None,
    **peering: Any,
) -> AsyncIterator[Node]:
    """A node over tiny models, all of them loaded at start where they fit."""
    settings = {"memory": memory, "page_size": "64KiB", "kernels": "cpu", "threads": "1", **(flags or {})}
    config = serve_config([f"{model}={path}" for model, path in models.items()], flags=settings)
    node = Node(config, Peering(node=name, incarnation=os.urandom(8).hex(), run_dir=run_dir, **peering))
    try:
        await node.open(progress)
        yield node
    finally:
        await node.close()


def life(node: Node) -> Lifecycle:
    assert node._lifecycle is not None
    return node._lifecycle


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.002)


async def wish(node: Node, model: str, what: Wish, source: str | None = None) -> Stage:
    """Ask, and wait until the model stands where it shall."""
    answer = await node.ask(model, what, source)
    assert answer.accepted, answer.why
    await until(lambda: node.settled(model))
    return node.stages()[model]


async def order(node: Node, model: str, verb: Verb, source: str | None = None, number: int = 0) -> Done | Failed:
    """One order, past the Brain: what it ended with. The Brain is told where the model stands now."""
    end = await life(node).obey(Order(1, number or next(_NUMBERS), "", model, verb, "a test", source))
    assert end is not None
    assert node._leader is not None
    node._leader.tell(Lost(node._leader._node, model, end.stage, end.copy))
    return end


_NUMBERS: Iterator[int] = itertools.count(1_000_000)


async def generate(node: Node, model: str, tokens: int = 24, number: int = 0) -> list[tuple[int, list[float]]]:
    """Greedy tokens with the five largest log probabilities of each place: equal floats are equal logits."""
    served = await node.model(model)
    assert served is not None
    sampling = Sampling(temperature=0, logprobs=5)
    request = Request(id=f"{model}-{number}", model=model, prompt=(5, 6, 7, 8), max_tokens=tokens, sampling=sampling)
    out: list[tuple[int, list[float]]] = []
    async with served.submit([request]) as call:
        while (news := await call.take(60.0)) is not None:
            for item in news:
                for one in item.delta.logprobs:
                    out.append((one.token, [one.logprob, *(value for _, value in one.top)]))
                if item.delta.finish is not None:
                    out.append((-1, [])) if item.delta.finish.value != "length" else None
    return out


async def books_are_right(node: Node) -> None:
    """Every page is free or held by an Active model's weights, KV or open prefixes; no grant is left."""
    device, residents = node._device, life(node).residents
    assert device is not None
    pool = device._pool
    await asyncio.wrap_future(device.ask(pool.check))
    held = await asyncio.wrap_future(device.ask(pool.held))
    weights = {owner.model: pages for owner, pages in held.items() if owner.kind is PageKind.WEIGHTS}
    active = {name: r.opened.weight_pages for name, r in residents.items() if r.stage is Stage.ACTIVE}
    assert weights == active
    assert {owner.model for owner in held if owner.kind is PageKind.KV} <= set(active)
    for name in residents:
        await until(lambda: life(node).grants.readers(name) == [])  # noqa: B023


class Process:
    """A node in a process of its own. Each call writes a command; `answer` waits for the next answer."""

    def __init__(self, name: str, run_dir: Path, models: Mapping[str, Path], **more: Any) -> None:
        settings = {"name": name, "run_dir": str(run_dir), "models": {k: str(v) for k, v in models.items()}, **more}
        environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        flags = ["-O"] * sys.flags.optimize
        self.process = subprocess.Popen(
            [sys.executable, *flags, __file__, json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, cwd=REPO, env=environment,
        )  # fmt: skip

    async def __aenter__(self) -> Process:
        assert await self.answer() == "open"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        await asyncio.to_thread(self.process.wait)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def tell(self, do: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()

    async def answer(self) -> Any:
        assert self.process.stdout is not None
        line = await asyncio.to_thread(self.process.stdout.readline)
        assert line, f"the node ended with {self.process.wait()}"
        return json.loads(line)

    async def ask(self, do: str, **fields: Any) -> Any:
        self.tell(do, **fields)
        return await self.answer()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


async def _obey(node: Node, do: str, fields: dict[str, Any]) -> Any:
    match do:
        case "wish":
            return (await wish(node, fields["model"], Wish(fields["what"]), fields.get("source"))).value
        case "order":
            end = await order(node, fields["model"], Verb(fields["verb"]), fields.get("source"))
            return end.reason if isinstance(end, Failed) else end.stage.value
        case "generate":
            return await generate(node, fields["model"], fields.get("tokens", 24))
        case "books":
            await books_are_right(node)
            return "right"
    raise AssertionError(do)


async def _main(settings: dict[str, Any]) -> None:
    run_dir, models = Path(settings.pop("run_dir")), settings.pop("models")
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with opened(settings.pop("name"), run_dir, models, **settings) as node:
        print(json.dumps("open"), flush=True)
        while line := await lines.readline():
            command = json.loads(line)
            print(json.dumps(await _obey(node, command.pop("do"), command)), flush=True)


if __name__ == "__main__":
    import uvloop

    uvloop.run(_main(json.loads(sys.argv[1])))
