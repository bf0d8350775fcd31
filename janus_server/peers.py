"""The other nodes of this user on this host and of its cluster, as last seen, and which of their weights are of use.

`leader` looks before a model is wanted, `operate` when an operator asks. Nothing is looked at on a timer, and at most
once a second unless an operator insists. It reads no weights and decides nothing.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from janus_server.config import ServeConfig
from janus_server.errors import BadConfig
from janus_server.transfer.frames import Held
from janus_server.transfer.look import Seen, look
from janus_server.transfer.pull import Want
from janus_server.transfer.rundir import Peering, first_usable

log = logging.getLogger("janus.peers")

# A request waits for a look: a peer that is stopped must not hold it up for long. One that lives answers in 1 ms.
LOOK_S = 0.1
FRESH_S = 1.0


class Use(enum.Enum):
    """Whether a model that a peer holds can be copied from it, and why not."""

    FORK = "fork"
    UNKNOWN = "this node has no model of that name"
    OTHER_LAYOUT = "it is held in another layout (other kernels or another dtype)"
    OTHER_CHECKPOINT = "it is another checkpoint of that name"


def peering_of(config: ServeConfig, folders: Sequence[Path]) -> Peering | None:
    """How this server meets others, if it has a name; in the first usable of `folders` unless told where."""
    if config.node is None:
        return None
    given = config.run_dir
    if given is None and config.join is not None and "://" not in config.join:
        given = first_usable([Path(config.join)]) / "weights"  # the coordinator's files have a folder of their own
    where = first_usable(folders if given is None else [given])
    return Peering(node=config.node, incarnation=os.urandom(8).hex(), run_dir=where)


class Peers:
    """What is known of the peers. Lives on the loop."""

    def __init__(self, peering: Peering, wants: Mapping[str, Want]) -> None:
        """wants are the models of this node's catalogue as it would hold them."""
        self.node = peering.node
        self.seen: tuple[Seen, ...] = ()
        self._peering = peering
        self._wants = wants
        self._looked_s = -FRESH_S
        self._look: asyncio.Task[None] | None = None

    async def look(self, fresh_s: float = FRESH_S) -> None:
        """Have `seen` be no older than fresh_s. Several callers share one look."""
        if time.monotonic() - self._looked_s < fresh_s:
            return
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._look_now())
        await asyncio.shield(self._look)

    def offers(self) -> dict[str, tuple[str, ...]]:
        """Nodes that hold a model of ours as we would, by model; those of this host come first, then those that fewer
        others read."""
        found: dict[str, list[tuple[bool, int, str]]] = {}
        for peer in self.seen:
            for held in peer.models:
                if self.use(held) is Use.FORK:
                    found.setdefault(held.model, []).append((peer.far, held.readers, peer.node))
        return {model: tuple(node for _, _, node in sorted(nodes)) for model, nodes in sorted(found.items())}

    def use(self, held: Held) -> Use:
        """What a peer's model is to this node."""
        want = self._wants.get(held.model)
        if want is None:
            return Use.UNKNOWN
        if (held.layout, held.size_bytes) != (want.layout, want.size_bytes):
            return Use.OTHER_LAYOUT
        return Use.FORK if held.checkpoint == want.checkpoint else Use.OTHER_CHECKPOINT

    async def _look_now(self) -> None:
        try:
            self.seen = await look(self._peering, LOOK_S)
        except (BadConfig, OSError) as error:  # the directory went away, or was opened to others
            log.warning("no peers are seen: %s", error)
            self.seen = ()
        self._looked_s = time.monotonic()
