"""Clients that leave at random moments, in every phase, leave nothing behind in a real node.

The whole server runs in the test's own process, so that its tasks, streams, pages and sockets can be counted; its
memory is watched from outside, in a process of its own. Ten thousand requests: `janus bench soak`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import settled
from server_process import tiny_model

from bench import soak
from bench.churn import Account, Ask, Fate, churn, play
from janus_server.config import serve_config
from janus_server.executor import StepReport
from janus_server.http.listen import Listener
from janus_server.keys import KeyRing
from janus_server.kv.prefix import PrefixCache
from janus_server.node import Node
from janus_server.streams import Streams
from janus_server.types import PageKind


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


class Watched(Streams):
    """Streams that know when each was closed: in the moment in which its cancel is posted, if it had not ended."""

    def __init__(self) -> None:
        super().__init__()
        self.closed_s: dict[str, float] = {}

    def close(self, answer: Any) -> None:
        super().close(answer)
        self.closed_s[answer.request.id] = time.perf_counter()


class Served:
    """A real node behind a real socket, and what can be counted of it."""

    def __init__(self, node: Node, listener: Listener, port: int, caches: list[PrefixCache]) -> None:
        self.node = node
        self.listener = listener
        self.port = port
        self.late: collections.Counter[str] = collections.Counter()
        self.steps_after_the_last = 0
        self._caches = caches
        assert isinstance(node.streams, Watched)
        self._streams = node.streams
        node.on_step(self._on_step)

    def counts(self) -> dict[str, int]:
        return {
            "tasks": len(asyncio.all_tasks()),
            "sockets": sockets(),
            "streams": len(self.node.streams),
            "requests in progress": self.listener.active,
            "running": sum(stats.running + stats.waiting for stats in self.node.stats().values()),
            "pages without a use": self.kv_pages() - sum(map(len, self._caches)),
        }

    def kv_pages(self) -> int:
        return sum(pages for owner, pages in self.node.memory().items() if owner.kind is PageKind.KV)

    def _on_step(self, report: StepReport) -> None:
        """Counts steps that began after a request's cancel was posted and still had it; one may have missed it."""
        if report.step is None:
            return
        closed_s = self._streams.closed_s
        for request_id in {emit.request_id for emit in report.emits} & closed_s.keys():
            self.late[request_id] += report.step.start_s > closed_s[request_id]
        if not len(self._streams) and report.step.start_s > max(closed_s.values(), default=0.0):
            self.steps_after_the_last += self.kv_pages() > sum(map(len, self._caches))


def sockets() -> int:
    """Open sockets of this process, the clients' ends among them, without one for each of its helper processes.

    A second helper starts when two requests first ask at once, whenever that is.
    """
    found = -sum(len(one.read_text().split()) for one in Path("/proc/self/task").glob("*/children"))
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own descriptor is closed by now
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    return found


def prefix_caches() -> list[PrefixCache]:
    """Every one that is alive: a node shows its own to nobody."""
    return [found for found in gc.get_objects() if type(found) is PrefixCache]


@contextlib.asynccontextmanager
async def served(model: Path, *flags: tuple[str, Any]) -> AsyncIterator[Served]:
    given = {"memory": "8MiB", "page_size": "64KiB", "threads": 1, "max_num_seqs": 8}
    config = serve_config([f"m={model}"], flags={**given, **dict(flags)})
    earlier = prefix_caches()
    node, listening = Node(config), socket.create_server(("127.0.0.1", 0), backlog=1024)
    node.streams = Watched()
    await node.open(lambda *told: None)
    listener = await Listener.open(config, KeyRing(), node, listening, None)
    assert await settled(lambda: node.ready() is None)
    try:
        yield Served(node, listener, listening.getsockname()[1], [c for c in prefix_caches() if c not in earlier])
    finally:
        await listener.close()
        await node.close()


@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_clients_that_leave_leave_nothing(tiny: Path, prefix_caching: bool) -> None:
    async with served(tiny, ("prefix_cache", prefix_caching)) as server:
        await churn(server.port, "m", 30, at_once=10, seed=-1, account=Account())
        before = await idle(server, None)
        account = Account()
        await churn(server.port, "m", 400, at_once=24, seed=0, account=account, most_tokens=12)
        after = await idle(server, before)
        # Fewer than before is fine: a neighbour's last connection may have ended meanwhile.
        assert {name: after[name] for name in after if after[name] > before[name]} == {}
        assert account.faults == []
        assert account.statuses[200] > 50
        assert account.left > 100
        # The step that runs when a client leaves is its last, but for one that had just begun.
        assert max(server.late.values(), default=0) <= 1
        assert prefix_caching or server.kv_pages() == 0


async def test_slots_and_pages_are_back_after_one_step(tiny: Path) -> None:
    async with served(tiny, ("prefix_cache", False)) as server:
        for stream in (True, False):
            body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": stream, "n": 2}
            leave = [
                asyncio.create_task(play(server.port, Ask("/v1/completions", body, Fate.WAITING, 0.5, 0)))
                for _ in range(4)
            ]
            assert await settled(lambda: server.node.stats()["m"].running == 8)
            await asyncio.gather(*leave)
            assert await settled(lambda: server.kv_pages() == 0)
            assert server.counts()["running"] == 0
        assert max(server.late.values(), default=0) <= 1
        # Of each of the two bursts one step may still have been under way.
        assert server.steps_after_the_last <= 2


async def idle(server: Served, expected: dict[str, int] | None) -> dict[str, int]:
    """The counts once they are as expected, or once nothing is in progress; refused connections linger for seconds."""
    await settled(lambda: server.counts() == expected if expected else quiet(server), 15)
    return server.counts()


def quiet(server: Served) -> bool:
    found = server.counts()
    return found["streams"] == found["running"] == found["requests in progress"] == found["pages without a use"] == 0


def test_memory_stays_flat_and_nothing_is_left(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--serve={word}" for word in ("--memory", "8MiB", "--page-size", "64KiB", "--threads", "1")]
    code = soak.main(["--model", str(tiny), "--requests", "1500", "--sequences", "8", *flags])
    assert code == 0, capsys.readouterr().out


def test_the_judgement_of_memory_finds_growth() -> None:
    for grown, held in ((0, True), (1 << 20, False)):
        memory, checks = soak.Memory.__new__(soak.Memory), soak.Checks()
        memory.samples = [(100 << 20) + i * grown for i in range(90)]
        memory.judge(checks)
        assert checks.held is held
