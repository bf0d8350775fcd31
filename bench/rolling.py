"""What clients of a cluster feel while its operator works on it: `janus bench rolling`.

  janus bench rolling                     four nodes: each is restarted, emptied first; each again, only told to stop;
                                          then half of them are taken away
  janus bench rolling --nodes 3 restart   of three nodes, these steps alone

Prints a row for each node: how long it took to be empty, to stop and to be ready again, and how requests ended: those
of other nodes' clients, of which none may fail, and those of its own, of which none may break off: what it has not
begun it turns away while it stops, and a load balancer asks another node. The exit code is 1 when that did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp

from janus_server.errors import BadConfig

from .chaos import FLAGS, small_models
from .chaos_load import Asking, Load, Tally, together, undisturbed
from .chaos_nodes import Nodes
from .chaos_places import Place, Settings, load_everywhere, local
from .serve_options import Parser, above_zero, count
from .writable import check_file

STEPS: Final = ("restart", "stop", "shrink")
_WORDS: Final = {
    "restart": "emptied and restarted", "stop": "only restarted", "shrink": "emptied and taken away",
}  # fmt: skip
_HEAD: Final = ("node", "what", "empty after", "stopped after", "ready after", "elsewhere", "failed", "its own",
                "turned away", "failed", "slowest")  # fmt: skip
# Words that the bench client has for requests that were not begun.
_AWAY: Final = ("http_503", "connect")
_AGAIN: Final = 3
_LOOK_S: Final = 0.05
_LIMIT_S: Final = 120.0
_LEAD_IN_S: Final = 1.0


@dataclasses.dataclass(slots=True)
class Row:
    """own are the requests of the node's own clients, away those of them that it did not begin."""

    node: str
    step: str
    led: bool
    empty_s: float | None
    stopped_s: float
    ready_s: float | None
    elsewhere: Tally
    own: Tally

    @property
    def away(self) -> int:
        return sum(n for why, n in self.own.reasons.items() if why.startswith(_AWAY))

    @property
    def broken(self) -> int:
        return self.own.not_right - self.away

    @property
    def held(self) -> bool:
        return not self.elsewhere.not_right and not self.broken


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    check_file(options.json)
    machine = f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}"
    load = f"{options.nodes} nodes, {options.rate:g} requests of {options.tokens} tokens a second on each"
    print(f"{machine}; {load}", flush=True)
    with tempfile.TemporaryDirectory(prefix="janus-rolling-") as folder:
        models = {f"m{i}": path for i, path in enumerate(options.model)} or small_models(Path(folder))
        flags = () if options.model else FLAGS
        with local(Settings(models, flags, options.nodes, Path(folder))) as place:
            rows = asyncio.run(_run(place, tuple(models), options))
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(figures(rows), indent=1) + "\n")
    return 0 if all(row.held for row in rows) else 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("janus bench rolling", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of: {', '.join(STEPS)}; by default all")
    parser.add_argument("--nodes", type=count, default=4, metavar="N", help="of the cluster")
    parser.add_argument("--model", type=Path, action="append", default=[], metavar="PATH",
                        help="serve this one (may come twice) instead of two tiny random ones")  # fmt: skip
    parser.add_argument("--rate", type=above_zero, default=4.0, metavar="RPS", help="requests a second on each node")
    parser.add_argument("--tokens", type=count, default=120, metavar="N", help="of each answer")
    parser.add_argument("--seed", type=count, default=0, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse(arguments)
    if unknown := [step for step in options.steps if step not in STEPS]:
        raise BadConfig(f"there is no step {unknown[0]!r}; there are: {', '.join(STEPS)}")
    if options.nodes < 2:
        parser.error("--nodes: at least 2, or nobody is left when one is stopped")
    return options


async def _run(place: Place, models: tuple[str, ...], options: argparse.Namespace) -> list[Row]:
    nodes, rows = place.nodes, []
    asking = Asking(models, options.rate, options.tokens, place.key)
    try:
        await nodes.start()
        await asyncio.to_thread(load_everywhere, place, models)
        texts = await undisturbed(asking, next(iter(nodes.urls.values())))
        for step in options.steps or STEPS:
            names = list(nodes.all)
            for node in names[len(names) // 2 :] if step == "shrink" else names:
                urls = {name: url for name, url in nodes.urls.items() if nodes[name].running}
                load = Load(asking, texts, urls, options.seed)
                rows.append(await _step(step, node, place, load))
                print(
                    f"{node} {_WORDS[step]}: {'held' if rows[-1].held else 'did not hold'}", file=sys.stderr, flush=True
                )
    finally:
        await asyncio.to_thread(nodes.stop)
    return rows


async def _step(step: str, name: str, place: Place, load: Load) -> Row:
    nodes, node = place.nodes, place.nodes[name]
    load.begin()
    await asyncio.sleep(_LEAD_IN_S)
    led, began_s = nodes.leader == name, time.monotonic()
    empty_s = None
    if step != "stop":
        await _emptied(place, name)
        empty_s = time.monotonic() - began_s
    began_s = time.monotonic()
    node.send(signal.SIGINT)
    await nodes.until(lambda: not node.running, f"{name} has ended", _LIMIT_S)
    stopped_s, ready_s = time.monotonic() - began_s, None
    if step != "shrink":
        began_s = time.monotonic()
        node.start()
        await nodes.until(lambda: node.url, f"{name} is ready again")
        ready_s = time.monotonic() - began_s
    others = [one for one in nodes.all if one != name and nodes[one].running]
    await _goes_on(nodes, load, others)
    tallies = await load.end()
    return Row(name, step, led, empty_s, stopped_s, ready_s, together(tallies, others), tallies[name])


async def _goes_on(nodes: Nodes, load: Load, names: Sequence[str]) -> None:
    before = {name: load.right(name) for name in names}
    await nodes.until(lambda: all(load.right(name) >= before[name] + _AGAIN for name in names), "requests are answered")


async def _emptied(place: Place, name: str) -> None:
    """As `janus drain NODE --wait` does it, by another node."""
    by = next(node.url for node in place.nodes.all.values() if node.name != name and node.running)
    headers = {"Authorization": f"Bearer {place.key}"}
    until_s = time.monotonic() + _LIMIT_S
    async with aiohttp.ClientSession(headers=headers) as http:
        while time.monotonic() < until_s:
            async with http.post(f"{by}/admin/nodes/{name}/drain") as reply:
                said = await reply.json()
            if reply.status == 409:
                raise BadConfig(said["error"]["message"])
            if reply.status == 200 and said["why"].startswith(f"{name} is empty"):
                return
            await asyncio.sleep(_LOOK_S)
    raise BadConfig(f"{name} is not empty after {_LIMIT_S:g} s")


def table(rows: Sequence[Row]) -> str:
    """Markdown, and what went wrong."""
    cells = [_HEAD, *map(_cells, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_HEAD))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    for row in rows:
        if not row.held:
            reasons = row.elsewhere.reasons + row.own.reasons
            lines.append(f"{row.node}, {_WORDS[row.step]}: {', '.join(f'{n} x {why}' for why, n in reasons.items())}")
    total = together({str(i): row.elsewhere for i, row in enumerate(rows)}, [str(i) for i in range(len(rows))])
    own = together({str(i): row.own for i, row in enumerate(rows)}, [str(i) for i in range(len(rows))])
    broken = sum(row.broken for row in rows)
    lines.append(f"{total.begun + own.begun} requests, {total.not_right + broken} failed, "
                 f"{sum(row.away for row in rows)} turned away by nodes that stopped")  # fmt: skip
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} s"

    name = f"{row.node} (led)" if row.led else row.node
    other, own = row.elsewhere, row.own
    return (name, _WORDS[row.step], seconds(row.empty_s), seconds(row.stopped_s), seconds(row.ready_s),
            str(other.begun), str(other.not_right), str(own.begun), str(row.away), str(row.broken),
            seconds(max(other.slowest_s, own.slowest_s)))  # fmt: skip


def figures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {"node": row.node, "step": row.step, "led": row.led, "empty_s": row.empty_s, "stopped_s": row.stopped_s,
         "ready_s": row.ready_s, "elsewhere": row.elsewhere.begun, "elsewhere_right": row.elsewhere.right,
         "own": row.own.begun, "own_right": row.own.right, "turned_away": row.away, "held": row.held}
        for row in rows
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
