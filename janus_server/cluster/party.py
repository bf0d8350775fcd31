"""The other nodes of a cluster, for whoever looks around: asked over the links to them what they say of themselves.

The member makes one, `lookout` asks it. A node that does not answer holds nobody up twice: its question stays open, and
it is shown as silent, where it was, until it answers. Lives on the loop; it decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from janus_server.api.cluster import NodeView
from janus_server.cluster.sight import read_view
from janus_server.wire.frames import Look, Role, Sight

if TYPE_CHECKING:
    from janus_server.cluster.meeting import Meeting
    from janus_server.wire.link import Link

ANSWER_S: Final = 1.0
# A node that has left a question open is not waited for again.
_SILENT_S: Final = 0.02
_OPEN_S: Final = 30.0
SILENT: Final = "it does not answer"
_NO_LINK: Final = "there is no link to it; the server's log says why"


class Party:
    """Everybody in the cluster, over the links to them."""

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
        """What that node says of itself. It never fails: what is wrong is in it."""
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
        reply = await link.asking.ask(self._meeting.term, Look(), _OPEN_S)
        return reply.view if isinstance(reply, Sight) else None

    def _nothing(self, node: str, trouble: str) -> NodeView:
        """Of a node that says nothing: where it was."""
        before = self._before.get(node, NodeView(node=node))
        return NodeView(
            node=node, url=before.url, host=before.host, domain=before.domain, version=before.version, trouble=trouble
        )
