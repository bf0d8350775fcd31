"""What `/admin/cluster` shows, on any node: its own view and those of all others, asked for when somebody looks.

A node has one `Lookout`. What was seen is shared for half a second, so that ten dashboards cost what one does, and
while nobody looks nothing is asked. A node that does not answer holds nobody up twice: its question stays open, and it
is shown as silent until it answers. Lives on the loop; it decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from janus_server.api.cluster import ClusterView, NodeView
from janus_server.cluster.sight import beside, own_view, read_view, written

if TYPE_CHECKING:
    from janus_server.cluster.meeting import Meeting
    from janus_server.cluster.sight import Shown
    from janus_server.operate import Operator
    from janus_server.wire.link import Link

SHARED_S: Final = 0.5
# Of what is told to others: as many of them may look.
_OWN_S: Final = 0.2
ANSWER_S: Final = 1.0
# A node that has left a question open is not waited for again.
_SILENT_S: Final = 0.02
_OPEN_S: Final = 30.0
# As wire.frames bounds it.
_MOST_BYTES: Final = 4 << 20
SILENT: Final = "it does not answer"
_NO_LINK: Final = "there is no link to it; the server's log says why"


class Others(Protocol):
    """The rest of a cluster. view(node) never fails: what is wrong is in it."""

    def names(self) -> Sequence[str]: ...

    def leader(self) -> str | None: ...

    async def view(self, node: str) -> NodeView: ...

    async def close(self) -> None: ...


class Lookout:
    """Alone, or among others."""

    def __init__(self, node: Shown, operator: Operator, others: Others | None) -> None:
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
        now = time.monotonic()
        if self._own is None or now - self._own[0] > _OWN_S:
            self._own = now, written(self._view(), _MOST_BYTES)
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


class Party:
    """The other nodes, over the links to them."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._asking: dict[str, asyncio.Task[bytes | None]] = {}
        self._before: dict[str, NodeView] = {}

    def names(self) -> Sequence[str]:
        return self._meeting.names()

    def leader(self) -> str | None:
        leader = self._meeting.view.leader
        return None if leader is None else leader.name

    async def view(self, node: str) -> NodeView:
        from janus_server.wire.frames import Role

        link = self._meeting.link(node)
        if link is None:
            return self._nothing(node, _NO_LINK)
        asking, limit_s = self._asking.get(node), _SILENT_S
        if asking is None:
            asking, limit_s = asyncio.create_task(self._ask(link)), ANSWER_S
            self._asking[node] = asking
            asking.add_done_callback(lambda _: self._asking.pop(node, None))
        await asyncio.wait([asking], timeout=limit_s)
        raw = asking.result() if asking.done() and not asking.cancelled() else None
        if raw is None:
            trouble = link.state(Role.CONTROL)
            return self._nothing(node, SILENT if trouble is None else trouble.sentence)
        view = read_view(raw, node)
        self._before = {name: one for name, one in self._before.items() if name in self.names()}
        self._before[node] = view
        return view

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, link: Link) -> bytes | None:
        from janus_server.wire.frames import Look, Sight

        reply = await link.asking.ask(self._meeting.term, Look(), _OPEN_S)
        return reply.view if isinstance(reply, Sight) else None

    def _nothing(self, node: str, trouble: str) -> NodeView:
        """Of a node that says nothing: where it was."""
        before = self._before.get(node, NodeView(node=node))
        return NodeView(
            node=node, url=before.url, host=before.host, domain=before.domain, version=before.version, trouble=trouble
        )
