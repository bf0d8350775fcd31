"""What the other nodes of this host hold just now: asked of all of them at once, and of none for long.

`peers` calls it before a model is wanted and when an operator looks. What comes back is what a peer says of itself;
only a grant, which `pull` asks for, is a promise. It reads no weights.
"""

from __future__ import annotations

import asyncio

import msgspec

from janus_server.transfer.frames import ANSWER_MOST_BYTES, ANSWERS, Held, Holding, Link, Look, PeerTrouble
from janus_server.transfer.rundir import Peering, RunDirectory

# More nodes than a host has devices. Each costs a connection of some hundred microseconds.
MOST_PEERS = 64


class Seen(msgspec.Struct, frozen=True):
    """One peer: what it would let be read, or why that is not known."""

    node: str
    models: tuple[Held, ...] = ()
    trouble: str | None = None


async def look(peering: Peering, limit_s: float) -> tuple[Seen, ...]:
    """Every other node whose process lives, in order of names; one that says nothing for limit_s is among them."""
    with RunDirectory(peering.run_dir) as directory:
        names = [name for name in directory.names() if name != peering.node][:MOST_PEERS]
        found = await asyncio.gather(*(_ask(directory, peering, name, limit_s) for name in names))
    return tuple(one for one in found if one is not None)


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
    if not isinstance(answer, Holding):
        return Seen(node, trouble="the peer spoke out of turn")
    if answer.node != node:
        return Seen(node, trouble="the peer has another name")
    return Seen(node, answer.models)
