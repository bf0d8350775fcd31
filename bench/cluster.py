"""What it costs that a request comes in at one node, is seen by the leader and runs on another.

    janus bench cluster                      three nodes and a server alone, 400 requests each way
    janus bench cluster --requests 2000 --seconds 20

A small random model answers with one token, so that little is measured but the way. The same request goes in turns to a
server that is alone, to the node that runs the model, to the leader, and to the third node (front → leader →
executor): kept connections, one request at a time. Then many clients ask the two that do not lead as fast as they can,
and the leader's processor time is counted by ticket; it runs nothing and no client talks to it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp

from .chaos_nodes import Node, Nodes
from .memory_models import Shape, write_model
from .serve_options import Parser

SHAPE: Final = Shape(hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, mlp=128)
MODEL: Final = "tiny"
GOAL_ADDED_S: Final = 0.003
GOAL_TICKETS_S: Final = 2000.0
WAYS: Final = ("alone", "executor", "leader", "third")
_WORDS: Final = {
    "alone": "a server alone",
    "executor": "the node that runs it (asks the leader)",
    "leader": "the leader (another node runs it)",
    "third": "a third node: front → leader → executor",
}


class Load(NamedTuple):
    """Requests answered in so many seconds, the leader's processor seconds meanwhile, and those it takes at rest."""

    requests: int
    for_s: float
    leader_s: float
    rest_s: float

    @property
    def ticket_s(self) -> float:
        """The leader's processor time for one ticket."""
        return max(self.leader_s - self.rest_s, 0.0) / max(self.requests, 1)


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    with tempfile.TemporaryDirectory(prefix="janus-cluster-") as folder:
        times, load = asyncio.run(_measure(Path(folder), options.requests, options.seconds, options.clients))
    _print(times, load)
    return 0


def at(values: Sequence[float], share: float) -> float:
    """Example: at([1, 2, 3, 4], 0.5) is 3."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def _print(times: Mapping[str, Sequence[float]], load: Load) -> None:
    count = len(times["alone"])
    print(f"one token of a model of no size, {count} requests each way, in turns; load {os.getloadavg()[0]:.1f}")
    base = times["alone"]
    for way in WAYS:
        mine = times[way]
        added = statistics.median(a - b for a, b in zip(mine, base, strict=True))
        says = "" if way == "alone" else f"; adds {1e3 * added:.2f} ms (median of pairs)"
        print(f"  {_WORDS[way]:<42} p50 {1e3 * at(mine, 0.5):6.2f} ms, p99 {1e3 * at(mine, 0.99):6.2f} ms{says}")
    print(f"  the goal is less than {1e3 * GOAL_ADDED_S:g} ms added at p50")
    rate = load.requests / load.for_s
    print(
        f"the leader: {rate:.0f} tickets/s for {load.for_s:.0f} s took {1e6 * load.ticket_s:.0f} µs of processor each "
        f"(at rest it takes {100 * load.rest_s / load.for_s:.1f} % of a core): "
        f"{1 / max(load.ticket_s, 1e-9):.0f} tickets/s on one core, the goal is {GOAL_TICKETS_S:.0f}"
    )


async def _measure(folder: Path, requests: int, for_s: float, clients: int) -> tuple[dict[str, list[float]], Load]:
    key = secrets.token_hex(24)
    checkpoint = write_model(folder / "model", SHAPE, 0)
    environment = {"XDG_RUNTIME_DIR": str(_made(folder / "run")), "JANUS_ADMIN_KEY": key}
    common = [f"{MODEL}={checkpoint}", "--port", "0", "--memory", "256MiB", "--threads", "1", "--access-log", "off"]
    nodes = Nodes([Node(f"n{i}", [*common, "--join", str(folder / "cluster")], environment) for i in range(3)])
    alone = Nodes([Node("alone", common, environment)])
    headers = {"Authorization": f"Bearer {key}"}
    try:
        await asyncio.gather(nodes.start(), alone.start())
        async with aiohttp.ClientSession(headers=headers) as session:
            executor, third = nodes.followers
            await _move(session, nodes, executor)
            urls = {
                "alone": alone["alone"].url, "executor": nodes[executor].url, "leader": nodes[nodes.leader].url,
                "third": nodes[third].url,
            }  # fmt: skip
            times = await _times(session, urls, requests)
            pid = nodes[nodes.leader].pid
            load = await _load(session, [urls["executor"], urls["third"]], clients, for_s, pid)
        return times, load
    finally:
        nodes.stop()
        alone.stop()


async def _move(session: aiohttp.ClientSession, nodes: Nodes, executor: str) -> None:
    """Have the model run on that node and on no other."""
    await _wish(session, nodes[executor].url, "load")
    for name in nodes.all:
        if name != executor:
            await _wish(session, nodes[name].url, "evict")


async def _wish(session: aiohttp.ClientSession, url: str, wish: str) -> None:
    async with session.post(f"{url}/admin/models/{MODEL}/{wish}?wait=20") as reply:
        if reply.status >= 500:
            raise SystemExit(f"{wish} at {url} was answered {reply.status}: {await reply.text()}")


async def _times(session: aiohttp.ClientSession, urls: Mapping[str, str], requests: int) -> dict[str, list[float]]:
    """Seconds of each request, by way. The order within a round is another one each time."""
    order, found = random.Random(0), {way: [] for way in WAYS}
    for number in range(requests + 20):
        for way in order.sample(WAYS, len(WAYS)):
            start_s = time.perf_counter()
            await _ask(session, urls[way])
            if number >= 20:  # the first connect and warm up
                found[way].append(time.perf_counter() - start_s)
        if sys.stderr.isatty() and number % 20 == 0:
            print(f"\r{number} of {requests} rounds", end="", file=sys.stderr)
    return found


async def _load(
    session: aiohttp.ClientSession, urls: Sequence[str], clients: int, for_s: float, pid: int
) -> Load:  # fmt: skip
    before_s = _cpu_s(pid)
    await asyncio.sleep(for_s / 4)
    rest_s = 4 * (_cpu_s(pid) - before_s)
    until_s, counts = time.monotonic() + for_s, [0] * clients

    async def ask(number: int) -> None:
        while time.monotonic() < until_s:
            await _ask(session, urls[number % len(urls)])
            counts[number] += 1

    before_s = _cpu_s(pid)
    await asyncio.gather(*map(ask, range(clients)))
    return Load(sum(counts), for_s, _cpu_s(pid) - before_s, rest_s)


async def _ask(session: aiohttp.ClientSession, url: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": [5, 6, 7, 8], "max_tokens": 1, "temperature": 0}
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        text = await reply.text()
        if reply.status != 200:
            raise SystemExit(f"{url} answered {reply.status}: {text}")


def _cpu_s(pid: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _made(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True)
    return folder


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="janus bench cluster", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=400, help="requests each way (400)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the leader is loaded (10)")
    parser.add_argument("--clients", type=int, default=32, help="clients that load it (32)")
    return parser.parse(arguments)
