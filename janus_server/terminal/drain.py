"""`janus drain NODE`: has a node of a running cluster emptied, so that it can be stopped; `--undo` uses it again.

Called by `cli`. It speaks HTTP only, to any node: what it is told stands in the leader's answer, how far it is in the
picture of the cluster. With `--wait` it stays until nothing is up there any more.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from janus_server.api.cluster import ClusterView, NodeView
from janus_server.api.nodes import NodeDuty
from janus_server.terminal.client import Client, Failed, Target, printable, target
from janus_server.units import format_seconds

_LOOK_S: Final = 0.5
# A change of leader takes some two seconds; a server that answers nothing for so long is gone.
_SILENCE_S: Final = 15.0


class DrainOptions(msgspec.Struct, frozen=True):
    """What the command line asked for. key and folders say where the admin key comes from."""

    url: str
    node: str
    undo: bool = False
    force: bool = False
    wait: bool = False
    timeout_s: float = 600.0
    key: str | None = None
    folders: tuple[Path, ...] = ()

    def __repr__(self) -> str:
        return f"DrainOptions({self.url}, {self.node})"


def run(options: DrainOptions) -> int:
    """0 when it was accepted, or with wait once the node is empty; 1 when it was refused or took too long."""
    try:
        asyncio.run(_run(target(options.url, options.key, options.folders), options))
        return 0
    except Failed as error:
        print(f"janus: {error}", file=sys.stderr)
        return 1


async def _run(server: Target, options: DrainOptions) -> None:
    async with Client(server) as client:
        said = await _ask(client, options)
        print(said, flush=True)
        if options.wait and not options.undo:
            await _wait(client, options, said)


async def _ask(client: Client, options: DrainOptions) -> str:
    verb = "serve" if options.undo else "drain"
    query = {"force": "true"} if options.force and not options.undo else {}
    path = f"/admin/nodes/{quote(options.node, safe='')}/{verb}"
    return printable((await client.post(path, query, NodeDuty)).why)


async def _wait(client: Client, options: DrainOptions, said: str) -> None:
    """Until the node is empty, a line for each change. A leader that knows nothing of it is told again."""
    until_s, heard_s = time.monotonic() + options.timeout_s, time.monotonic()
    empty = f"{printable(options.node)} is empty: it can be stopped"
    while said != empty:
        if time.monotonic() > until_s:
            raise Failed(f"{printable(options.node)} is not empty after {format_seconds(options.timeout_s)}")
        await asyncio.sleep(_LOOK_S)
        try:
            now = await _look(client, options, empty)
            heard_s = time.monotonic()
        except Failed:
            if time.monotonic() - heard_s > _SILENCE_S:
                raise
            continue
        if now != said:
            said = now
            print(said, flush=True)


async def _look(client: Client, options: DrainOptions, empty: str) -> str:
    view = await client.get("/admin/cluster", ClusterView)
    node = next((one for one in view.nodes if one.node == options.node), None)
    if node is None:
        return f"{printable(options.node)} is gone"
    leads = next((one.leads for one in view.nodes if one.node == view.leader), None)
    if leads is not None and options.node not in leads.draining:
        return await _ask(client, options)
    if node.trouble is not None:
        return f"{printable(options.node)}: {printable(node.trouble)}"
    return _left(node) or empty


def _left(node: NodeView) -> str:
    """What is still up there, or on its way; "" where nothing is."""
    names = sorted(one.model for one in node.models if one.stage == "active" or one.under_way is not None)
    running = sum(one.running for one in node.models)
    if not names:
        return ""
    requests = f", with {running} request{'s' if running > 1 else ''}" if running else ""
    return f"{printable(node.node)} is being emptied: {printable(', '.join(names))} still there{requests}"
