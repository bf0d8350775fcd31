"""What `/admin/cluster` shows, on any node: its own view and those of all others, asked for when somebody looks.

A node has one `Lookout`. What was seen is shared for half a second, so that ten dashboards cost what one does, and
while nobody looks nothing is asked; `party` asks the others. What came to the node itself is written down every ten
seconds, for who begins to look later. Lives on the loop; it decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from janus_server.api.cluster import ClusterView, NodeView
from janus_server.cluster.past import STRETCH_S, Past
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
        # With the past and without.
        self._own: dict[bool, tuple[float, bytes]] = {}
        self._seen: dict[bool, tuple[float, ClusterView]] = {}
        self._looking: dict[bool, asyncio.Task[ClusterView]] = {}
        self._past = Past(self._since_s)
        self._timer = asyncio.get_running_loop().call_later(STRETCH_S, self._end_stretch)

    async def around(self, past: bool = False) -> ClusterView:
        """The whole cluster, as it was half a second ago at most; with its last minutes where they are asked for."""
        seen, looking = self._seen.get(past), self._looking.get(past)
        if seen is not None and time.monotonic() - seen[0] < SHARED_S:
            return seen[1]
        if looking is None or looking.done():
            self._seen.pop(True, None)  # the past is long, and asked for once
            looking = self._looking[past] = asyncio.create_task(self._look(past))
        return await asyncio.shield(looking)

    def own(self, past: bool = False) -> bytes:
        """What others are told of this node."""
        from janus_server.wire.frames import SIGHT_MOST_BYTES  # a node alone has no use for it

        now = time.monotonic()
        own = self._own.get(past)
        if own is None or now - own[0] > _OWN_S:
            own = self._own[past] = now, written(self._view(past), SIGHT_MOST_BYTES)
        return own[1]

    async def close(self) -> None:
        self._timer.cancel()
        for looking in self._looking.values():
            looking.cancel()
        await asyncio.gather(*self._looking.values(), return_exceptions=True)
        if self._others is not None:
            await self._others.close()

    def _end_stretch(self) -> None:
        self._past.end(self._node.reached.applications(), time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(STRETCH_S, self._end_stretch)

    def _view(self, past: bool) -> NodeView:
        if self._version is None:
            from janus_server.version import server_version

            self._version = server_version()
        now = time.monotonic()
        view = own_view(self._node, self._operator, self._version, now - self._since_s)
        if past:
            view.past = self._past.told(view.applications, now)
        return view

    async def _look(self, past: bool) -> ClusterView:
        name, others = self._node.name, self._others
        names = [] if others is None else [node for node in others.names() if node != name]
        views = await asyncio.gather(*(others.view(node, past) for node in names)) if others is not None else []
        own = self._view(past)
        leader = name if others is None else others.leader()
        view = beside(name, leader, own.term, time.time(), [own, *views])
        self._seen[past] = time.monotonic(), view
        return view
