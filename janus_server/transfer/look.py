"""What other nodes, of this host and of its cluster, hold just now: asked of all at once, and of none for long.

`peers` calls it before a model is wanted and when an operator looks. What comes back is what a peer says of itself;
only a grant, which `pull` asks for, is a promise. It reads no weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from janus_server.transfer.frames import ANSWER_MOST_BYTES, ANSWERS, Answer, Held, Holding, Link, Look, PeerTrouble
from janus_server.transfer.line import Line
from janus_server.transfer.rundir import Peering, RunDirectory
from janus_server.transfer.streamed import Streamed

# More nodes than a host has devices. Each costs a connection of some hundred microseconds.
MOST_PEERS = 64


class Seen(msgspec.Struct, frozen=True):
    """One peer: what it would let be read, or why that is not known. far: its pages would come over the network."""

    node: str
    models: tuple[Held, ...] = ()
    trouble: str | None = None
    far: bool = False


async def look(peering: Peering, limit_s: float) -> tuple[Seen, ...]:
    """Every other node whose process lives, in order of names; one that says nothing for limit_s is among them."""
    far = {name: peering.others.far(name) for name in peering.others.names() if name != peering.node}
    abroad = {name for name, known in far.items() if known is not None and not known.near}
    with RunDirectory(peering.run_dir) as directory:
        names = [name for name in directory.names() if name != peering.node and name not in abroad][:MOST_PEERS]
        near = asyncio.gather(*(_ask(directory, peering, name, limit_s) for name in names))
        away = [(name, known.dial) for name, known in sorted(far.items()) if known is not None and name not in names]
        more = asyncio.gather(*(_ask_far(dial, peering, name, limit_s) for name, dial in away[:MOST_PEERS]))
        found = [*await near, *await more]
    return tuple(sorted((one for one in found if one is not None), key=lambda one: one.node))


async def _ask(directory: RunDirectory, peering: Peering, node: str, limit_s: float) -> Seen | None:
    """None for a socket that a killed process left behind."""
    try:
        link = Link(directory.connect(node))
    except PeerTrouble as trouble:
        return None if trouble.absent else Seen(node, trouble=str(trouble))
    try:
        await link.send(Look(peering.node, peering.incarnation), limit_s)
        answer = await link.receive(ANSWERS, ANSWER_MOST_BYTES, limit_s)
    except PeerTrouble as trouble:
        return Seen(node, trouble=str(trouble))
    finally:
        link.close()
    return _seen(node, answer, far=False)


async def _ask_far(dial: Callable[[float], Line], peering: Peering, node: str, limit_s: float) -> Seen:
    try:
        way = await Streamed.open(dial, msgspec.structs.replace(peering, reply_s=limit_s))
        try:
            answer = await way.ask(Look(peering.node, peering.incarnation))
        finally:
            way.close()
    except PeerTrouble as trouble:
        return Seen(node, trouble=str(trouble), far=True)
    return _seen(node, answer, far=True)


def _seen(node: str, answer: Answer, far: bool) -> Seen:
    if not isinstance(answer, Holding):
        return Seen(node, trouble="the peer spoke out of turn", far=far)
    if answer.node != node:
        return Seen(node, trouble="the peer has another name", far=far)
    return Seen(node, answer.models, far=far)
