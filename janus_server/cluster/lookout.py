"""What `/admin/cluster` shows, on any node: its own view and those of all others, asked for when somebody looks.

A node has one `Lookout`. What was seen is shared for half a second, so that ten dashboards cost what one does, and
while nobody looks nothing is asked; `party` asks the others. Lives on the loop; it decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from janus_server.api.cluster import ClusterView, NodeView
from janus_server.cluster.sight import beside, own_view, written

if TYPE_CHECKING:
    from janus_server.cluster.party import Party
    from janus_server.cluster.sight import Shown
    from janus_server.operate import Operator

SHARED_S: Final = 0.5
# Of what is told to others: as many of them may look.
_OWN_S: Final = 0.2


class Lookout:
    """Alone, or among others."""

    def __init__(self, node: Shown, operator: Operator, others: Party | None) -> None:
        self._node, self._operator, self._others = node, operator, others
        self._since_s = time.monotonic()
        self._version: str | None = None
        self._own: tuple[float, bytes] | None = None
        self._seen: tuple[float, ClusterView] | None = None
        self._looking: asyncio.Task[ClusterView] | None = None

    async def around(self) -> ClusterView:
        """The whole cluster, as it was half a second ago at most."""
        if self._seen is not None and time.monotonic() - self._seen[0] < SHARED_S:
            return self._seen[1]
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        return await asyncio.shield(self._looking)

    def own(self) -> bytes:
        """What others are told of this node."""
        from janus_server.wire.frames import SIGHT_MOST_BYTES  # a node alone has no use for it

        now = time.monotonic()
        if self._own is None or now - self._own[0] > _OWN_S:
            self._own = now, written(self._view(), SIGHT_MOST_BYTES)
        return self._own[1]

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        if self._others is not None:
            await self._others.close()

    def _view(self) -> NodeView:
        if self._version is None:
            from janus_server.version import server_version

            self._version = server_version()
        return own_view(self._node, self._operator, self._version, time.monotonic() - self._since_s)

    async def _look(self) -> ClusterView:
        name, others = self._node.name, self._others
        names = [] if others is None else [node for node in others.names() if node != name]
        views = await asyncio.gather(*(others.view(node) for node in names)) if others is not None else []
        own = self._view()
        leader = name if others is None else others.leader()
        view = beside(name, leader, own.term, time.time(), [own, *views])
        self._seen = time.monotonic(), view
        return view
