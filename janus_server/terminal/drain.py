"""`janus drain NODE`: has a node of a running cluster emptied, so that it can be stopped; `--undo` uses it again.

Called by `cli_admin`. It speaks HTTP only, to any node: what it is told stands in the leader's answer, how far it is in
the picture of the cluster. With `--wait` it stays until nothing is up there any more, or there is nothing to wait for.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from janus_server.api.cluster import ClusterView, NodeView, leads_of
from janus_server.api.nodes import NodeDuty
from janus_server.terminal.client import ANSWER_S, Client, Failed, Target, printable, target
from janus_server.terminal.status import look
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
    waits = options.wait and not options.undo
    term = (await look(server)).term if waits else 0
    said = await _ask(server, options)
    print(said, flush=True)
    if waits and said != empty(options.node):
        await _wait(server, options, Sights(options.node, term), said)


async def _ask(server: Target, options: DrainOptions) -> str:
    verb = "serve" if options.undo else "drain"
    query = {"force": "true"} if options.force and not options.undo else {}
    path = f"/admin/nodes/{quote(options.node, safe='')}/{verb}"
    async with Client(server, ANSWER_S) as client:
        return printable((await client.post(path, query, NodeDuty)).why)


async def _wait(server: Target, options: DrainOptions, sights: Sights, said: str) -> None:
    """Until the node is empty, a line for each change."""
    until_s, heard_s = time.monotonic() + options.timeout_s, time.monotonic()
    while said != empty(options.node):
        if time.monotonic() > until_s:
            raise Failed(f"{printable(options.node)} is not empty after {format_seconds(options.timeout_s)}")
        await asyncio.sleep(_LOOK_S)
        try:
            view = await look(server)
            if sights.forgotten(view):
                await _ask(server, options)
                sights.asked(view.term)
            heard_s = time.monotonic()
        except Failed:
            if time.monotonic() - heard_s > _SILENCE_S:
                raise
            continue
        now = sights.see(view)
        if now and now != said:
            said = now
            print(said, flush=True)


class Sights:
    """What is seen of a node after the leader of a term was asked to empty it."""

    def __init__(self, node: str, term: int) -> None:
        self._node = node
        self.asked(term)

    def asked(self, term: int) -> None:
        self._term = term
        self._known = False

    def forgotten(self, view: ClusterView) -> bool:
        """Somebody else leads and knows nothing of it: that one is to be asked again. Another who used the node again,
        or started it again, is not overruled."""
        leads = leads_of(view)
        return leads is not None and view.term != self._term and self._node not in leads.draining

    def see(self, view: ClusterView) -> str:
        """How far it is, "" where that cannot be said now. Failed where there is nothing to wait for."""
        name, leads = printable(self._node), leads_of(view)
        node = next((one for one in view.nodes if one.node == self._node), None)
        if node is None:
            raise Failed(f"{name} is gone")
        if leads is None:
            return ""
        if self._node not in leads.draining:
            if self._known and view.term == self._term:
                raise Failed(f"{name} is not being emptied any more: it was started again, or somebody uses it again")
            return ""  # a sight is shared for a moment: this one is older than what was asked for
        self._term, self._known = view.term, True
        if node.trouble is not None:
            return f"{name}: {printable(node.trouble)}"
        return empty(self._node) if node.empty else _left(node)


def empty(node: str) -> str:
    return f"{printable(node)} is empty: it can be stopped"


def _left(node: NodeView) -> str:
    """What is still up there, or on its way; "" where nothing is."""
    names = sorted(one.model for one in node.models if one.stage == "active" or one.under_way is not None)
    running = sum(one.running for one in node.models)
    if not names:
        return ""
    requests = f", with {running} request{'s' if running > 1 else ''}" if running else ""
    return f"{printable(node.node)} is being emptied: {printable(', '.join(names))} still there{requests}"
