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
        self._asking: dict[tuple[str, bool], asyncio.Task[bytes | None]] = {}
        self._before: dict[str, NodeView] = {}
        self._leading: set[str] = set()  # who said so when it was last asked

    def names(self) -> Sequence[str]:
        return self._meeting.names()

    def leader(self) -> str | None:
        """Who leads. While the coordinator cannot be used it tells of nobody's end: whoever led last must say that it
        still does, which is as long as its lease lasts."""
        view = self._meeting.view
        if view.leader is None:
            return None
        name = view.leader.name
        if name == self._meeting.node:
            leads = self._meeting.leads_in is not None
        else:
            leads = view.cut is None or name in self._leading
        return name if leads else None

    async def view(self, node: str, past: bool = False) -> NodeView:
        """What that node says of itself, of its last minutes too. It never fails: what is wrong is in it."""
        link = self._meeting.link(node)
        if link is None:
            self._leading.discard(node)
            return self._nothing(node, _NO_LINK)
        asking, limit_s = self._asking.get((node, past)), _SILENT_S
        if asking is None:
            asking, limit_s = asyncio.create_task(self._ask(link, past)), ANSWER_S
            self._asking[node, past] = asking
            asking.add_done_callback(lambda _: self._asking.pop((node, past), None))
        await asyncio.wait([asking], timeout=limit_s)
        raw = asking.result() if asking.done() and not asking.cancelled() else None
        self._leading.discard(node)
        if raw is None:
            trouble = link.state(Role.CONTROL)
            return self._nothing(node, SILENT if trouble is None else trouble.sentence)
        view = read_view(raw, node)
        self._before = {name: one for name, one in self._before.items() if name in self.names()}
        self._before[node] = view
        if view.leads is not None:
            self._leading.add(node)
        return view

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, link: Link, past: bool) -> bytes | None:
        reply = await link.asking.ask(self._meeting.term, Look(past), _OPEN_S)
        return reply.view if isinstance(reply, Sight) else None

    def _nothing(self, node: str, trouble: str) -> NodeView:
        """Of a node that says nothing: where it was."""
        before = self._before.get(node, NodeView(node=node))
        return NodeView(
            node=node, url=before.url, host=before.host, domain=before.domain, version=before.version, trouble=trouble
        )
