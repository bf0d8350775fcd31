"""A node in a process of its own that is told what to do line by line, and says how long each part took.

As a program: `memory_node SETTINGS` (JSON), then a JSON command a line on stdin and JSON answers on stdout, each with
its command's number. It ends with its stdin, so that none outlives its bench. `Remote` is the other end. Transitions
are told by the node's own events, as `/admin/events` tells them; tokens are timed where they reach the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

# house: exempt — this program is a node, not a client of one
from janus_server.config import ServeConfig, serve_config

# house: exempt — this program is a node, not a client of one
from janus_server.node import Node

# house: exempt — this program is a node, not a client of one
from janus_server.orders import Stage, Wish

# house: exempt — this program is a node, not a client of one
from janus_server.transfer.rundir import Peering
from janus_server.types import Request, Sampling

_GOALS: Final[Mapping[str, str]] = {"load": "active", "wake": "active", "fork": "active", "sleep": "warm"}
LIMIT_S: Final = 300.0
_LOOK_EVERY_S: Final = 0.5


class Remote:
    """The process of a node, as its bench sees it."""

    def __init__(self, name: str, run_dir: Path, models: Mapping[str, Path], **flags: Any) -> None:
        settings = {
            "name": name, "run_dir": str(run_dir), "models": {k: str(v) for k, v in models.items()}, "flags": flags
        }  # fmt: skip
        module = f"{__package__ or 'bench'}.memory_node"
        root = str(Path(__file__).resolve().parents[1])
        paths = [root, os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )  # fmt: skip
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def __aenter__(self) -> Remote:
        opened = self._waiting[0] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())
        await opened
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.to_thread(self._process.wait, 30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        await self._reading
        if self._process.stdout is not None:
            self._process.stdout.close()

    async def ask(self, do: str, **fields: Any) -> Any:
        """What the node answers; RuntimeError where it says that it could not."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps({"number": number, "do": do, **fields}) + "\n")
            self._process.stdin.flush()
        return await asyncio.wait_for(answer, LIMIT_S)

    async def _read(self) -> None:
        while self._process.stdout is not None and (line := await asyncio.to_thread(self._process.stdout.readline)):
            answer = json.loads(line)
            waiting = self._waiting.pop(answer["number"])
            if waiting.done():
                continue
            if "error" in answer:
                waiting.set_exception(RuntimeError(answer["error"]))
            else:
                waiting.set_result(answer["result"])
        for waiting in self._waiting.values():
            waiting.set_exception(RuntimeError("the node's process has ended"))


async def move(node: Node, model: str, wish: str, source: str | None = None) -> dict[str, Any]:
    """Wish, wait, and tell the `done` event of the transition: took_s, and its phases."""
    if node.operator is None:
        raise RuntimeError("the node is not open")
    with node.operator.watch.subscribe() as news:
        start_s = time.monotonic()
        answer = node.ask(model, Wish(wish), source)
        if not answer.accepted:
            raise RuntimeError(answer.why)
        found: dict[str, Any] = {}
        while not found or not node.settled(model):
            events = await news.take(_LOOK_EVERY_S)
            for event in events or ():
                if event.type == "failed":
                    raise RuntimeError(f"{event.verb}: {event.why}")
                if event.type == "done" and event.model == model:
                    found = msgspec.to_builtins(event)
            if not found and not events and node.settled(model):
                break  # it stood there already
        return {**found, "wish_s": time.monotonic() - start_s}


async def stream(node: Node, model: str, number: int, tokens: int) -> dict[str, Any]:
    """One request of that many tokens: when each arrived, seconds on the machine's monotonic clock."""
    served = await node.model(model)
    if served is None:
        raise RuntimeError(f"no model {model}")
    request = Request(
        id=f"{model}-{number}", model=model, prompt=(5, 6, 7, 8, 9 + number % 200), max_tokens=tokens,
        sampling=Sampling(temperature=0),
    )  # fmt: skip
    times: list[float] = []
    async with served.submit([request]) as call:
        while (news := await call.take(LIMIT_S)) is not None:
            now = time.monotonic()
            times += [now for item in news for _ in item.delta.tokens]
    return {"times": times}


async def streams(node: Node, model: str, at_once: int, tokens: int, for_s: float) -> list[dict[str, Any]]:
    """Streams one after the other, `at_once` side by side, until for_s have passed; those begun then are ended."""
    until_s, found, numbers = time.monotonic() + for_s, [], itertools.count()

    async def client() -> None:
        while time.monotonic() < until_s:
            found.append(await stream(node, model, next(numbers), tokens))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client())
    return found


@contextlib.asynccontextmanager
async def opened(settings: Mapping[str, Any]) -> AsyncIterator[Node]:
    """A node over the models of the settings."""
    models = [f"{model}={path}" for model, path in settings["models"].items()]
    config: ServeConfig = serve_config(models, flags=settings["flags"])
    peering = Peering(node=settings["name"], incarnation=os.urandom(8).hex(), run_dir=Path(settings["run_dir"]))
    node = Node(config, peering)
    try:
        await node.open(lambda model, done, total: None)
        yield node
    finally:
        await node.close()


async def _obey(node: Node, do: str, fields: dict[str, Any]) -> Any:
    match do:
        case "move":
            return await move(node, **fields)
        case "streams":
            return await streams(node, **fields)
        case "prepare":
            await node.model(fields["model"])
            return None
        case "touched":
            return node.touched
        case "stages":
            return {name: stage.value for name, stage in node.stages().items() if stage is not Stage.COLD}
    raise RuntimeError(do)


async def _main(settings: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(node: Node, command: dict[str, Any]) -> None:
        number = command.pop("number")
        try:
            said = {"number": number, "result": await _obey(node, command.pop("do"), command)}
        except RuntimeError as error:
            said = {"number": number, "error": str(error)}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()

    async with opened(settings) as node:
        sys.stdout.write('{"number": 0, "result": "open"}\n')
        sys.stdout.flush()
        while line := await lines.readline():
            task = asyncio.create_task(answer(node, json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    import uvloop

    uvloop.run(_main(json.loads(sys.argv[1])))
