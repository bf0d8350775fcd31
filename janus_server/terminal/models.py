"""`janus models`: where every model of a running server stands, and wishes for one of them.

Called by `cli`. It speaks HTTP only. With --wait a bar shows how far the server is, from its events; the server's own
answer to the wish decides how the command ends: 0 when it was fulfilled (or accepted, without --wait), 1 when not.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from janus_server.api.admin import ForkBody, ManagedList, ManagedModel, ModelEvent, PeerList, Wished
from janus_server.api.cluster import ClusterView, leads_of, where_served
from janus_server.orders import Wish
from janus_server.suggest import nearest
from janus_server.terminal.client import Client, Events, Failed, Target, plain, printable, target, wish_path
from janus_server.terminal.progress import LoadProgress
from janus_server.units import format_bytes, format_seconds

LIST = "list"

_HEAD = ("MODEL", "STAGE", "WEIGHTS", "KV PAGES", "HOST COPY", "RUNNING", "HELD", "IDLE", "NOTE")
_NUMBERS = _HEAD[2:8]
_STYLES: Final = {"active": "green", "warm": "yellow", "cold": "dim"}
# How long the server is asked to wait before it is asked again: a proxy may not keep a silent request for longer.
_ASK_S = 25.0


class ModelsOptions(msgspec.Struct, frozen=True):
    """What the command line asked for. key and folders say where the admin key comes from."""

    url: str
    action: str = LIST
    model: str | None = None
    source: str | None = None
    wait: bool = False
    timeout_s: float = 600.0
    as_json: bool = False
    key: str | None = None
    folders: tuple[Path, ...] = ()

    def __repr__(self) -> str:
        return f"ModelsOptions({self.action}, {self.model})"


def run(options: ModelsOptions) -> int:
    try:
        server = target(options.url, options.key, options.folders)
        if options.action == LIST:
            asyncio.run(_list(server, options))
        else:
            print(asyncio.run(_wish(server, options)))
        return 0
    except Failed as error:
        print(f"janus: {error}", file=sys.stderr)
        return 1


async def _list(server: Target, options: ModelsOptions) -> None:
    async with Client(server) as client:
        models = (await client.get("/admin/models", ManagedList)).data
        view = None if options.as_json else await client.get("/admin/cluster", ClusterView)
        peers = None if options.as_json else await client.get("/admin/peers", PeerList)
    if options.model is not None:
        models = [one for one in models if one.model == options.model] or _no_such(options.model, models)
    if options.as_json:
        print(msgspec.json.format(msgspec.json.encode(models), indent=2).decode())
    elif view is not None:
        _print(table(models, view), models)
    if peers is not None and peers.node is not None:
        print("\n" + "\n".join(peer_lines(peers)))


async def _wish(server: Target, options: ModelsOptions) -> str:
    """What the server says of the wish; raises Failed when it is not fulfilled."""
    model = options.model or ""
    async with Client(server) as client:
        try:
            if not options.wait:
                return await _ask(client, model, options, {})
            return await _fulfil(client, model, options)
        except Failed as error:
            if error.status == 404 and error.code != "node_not_found":
                _no_such(model, (await client.get("/admin/models", ManagedList)).data)
            raise


async def _fulfil(client: Client, model: str, options: ModelsOptions) -> str:
    """Ask until it is done, with a bar beside it."""
    bar, until_s = LoadProgress(sys.stderr), time.monotonic() + options.timeout_s
    events = await client.events()
    showing = asyncio.create_task(_show(events, bar))
    try:
        while True:
            left_s = until_s - time.monotonic()
            query = {"wait": f"{max(0.001, min(left_s, _ASK_S)):.3f}"}
            try:
                return await _ask(client, model, options, query)
            except Failed as error:
                if error.status != 504:
                    raise
                if left_s <= _ASK_S:
                    late = f"{printable(model)} is still on its way after {format_seconds(options.timeout_s)}"
                    raise Failed(late, error.status) from None
    finally:
        showing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await showing
        events.close()
        bar.close()


async def _ask(client: Client, model: str, options: ModelsOptions, query: dict[str, str]) -> str:
    body = None
    if options.action == Wish.FORK.value:
        body = msgspec.json.encode(ForkBody(source=options.source))
    return printable((await client.post(wish_path(model, options.action), query, Wished, body)).why)


async def _show(events: Events, bar: LoadProgress) -> None:
    async for event in events:
        if event.type == "progress":
            bar.update(*_moved(event))


def _moved(event: ModelEvent) -> tuple[str, int, int]:
    done, total = event.done_bytes or 0, event.total_bytes or 0
    return f"{printable(event.model or '')} {event.verb or ''}", done, total


def row(one: ManagedModel) -> tuple[str, ...]:
    """The cells of one model."""
    return (
        printable(one.model),
        one.stage,
        format_bytes(one.weight_bytes),
        str(one.kv_pages),
        format_bytes(one.host_copy_bytes) if one.host_copy_bytes else "-",
        str(one.running),
        str(one.held),
        format_seconds(one.idle_s) if one.idle_s is not None else "-",
        note(one),
    )


def table(models: Sequence[ManagedModel], view: ClusterView) -> list[tuple[str, ...]]:
    """The head and a row a model. In a cluster the stage is that on the node that was asked, whoever serves it."""
    if len(view.nodes) == 1:
        return [_HEAD, *map(row, models)]
    served = where_served(view)
    rows: list[tuple[str, ...]] = [(_HEAD[0], f"ON {printable(view.asked)}", "SERVED BY", *_HEAD[2:])]
    for one in models:
        name, stage, *rest = row(led(one, view))
        rows.append((name, stage, " ".join(map(printable, served.get(one.model, ()))) or "-", *rest))
    return rows


def led(one: ManagedModel, view: ClusterView) -> ManagedModel:
    """With what the leader of the cluster knows of the model on the node that was asked."""
    here = next(
        (m for node in view.nodes if node.node == view.asked for m in node.models if m.model == one.model), None
    )
    leads = leads_of(view)
    if here is None or leads is None:
        return one
    return msgspec.structs.replace(
        one, goal=here.goal, pinned=here.pinned, draining=here.draining, prediction=leads.predictions.get(one.model)
    )


def note(one: ManagedModel) -> str:
    """What is out of the ordinary: how far it is with what, what was asked for, why it failed."""
    found = []
    if one.under_way is not None:
        total = one.under_way.total_bytes
        share = f" {one.under_way.done_bytes / total:.0%}" if total else ""
        found.append(f"{one.under_way.verb}{share}")
    elif one.goal is not None:
        found.append(f"to be {one.goal}")
    if one.draining:
        found.append("draining")
    if one.pinned:
        found.append("pinned")
    if one.source is not None:
        found.append(f"from {printable(one.source)}")
    if one.prepared and one.stage == "cold":
        found.append("prepared")
    if one.prediction is not None:
        found.append(printable(one.prediction.says))
    if one.trouble is not None:
        found.append(printable(one.trouble))
    return ", ".join(found)


def peer_lines(peers: PeerList) -> list[str]:
    """A line a peer: which models can be copied from it."""
    lines = [f"this is node {printable(peers.node or '')}; " + ("its peers:" if peers.data else "it sees no peer")]
    for peer in peers.data:
        offers = ", ".join(printable(one.model) for one in peer.models if one.why is None)
        others = [f"{printable(one.model)}: {printable(one.why)}" for one in peer.models if one.why is not None]
        said = peer.trouble or "; ".join([f"has {offers}" if offers else "has nothing to copy", *others])
        lines.append(f"  {printable(peer.node)}  {printable(said)}")
    return lines


def _no_such(model: str, models: Sequence[ManagedModel]) -> list[ManagedModel]:
    names = [printable(one.model) for one in models]
    raise Failed(f"the server has no model {model!r}{nearest(model, names)}; it has: {', '.join(names)}", 404)


def _print(rows: Sequence[Sequence[str]], models: Sequence[ManagedModel]) -> None:
    """The head and a row a model."""
    numbers = [rows[0].index(name) for name in _NUMBERS]
    if not sys.stdout.isatty():
        print("\n".join(plain(rows, numbers)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for i, name in enumerate(rows[0]):
        drawn.add_column(name, justify="right" if i in numbers else "left")
    for one, row_of in zip(models, rows[1:], strict=True):
        cells = [Text(cell) for cell in row_of]
        cells[1].stylize(_STYLES[one.stage])
        cells[-1].stylize("red" if one.trouble is not None else "cyan")
        drawn.add_row(*cells)
    Console(highlight=False).print(drawn)
