"""What a node tells whoever leads: once all that there is, to each leader of each term, and from then on what changes.

The member has one. A leader that misses something, or says that it does not know this node, is told everything again;
where nobody leads, or nobody was told yet what there is, news are dropped: the beginning will hold them. Lives on the
loop; it decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from janus_server.cluster.tally import changed
from janus_server.cluster.tickets import aged
from janus_server.orders import Counted, Counts, Traffic
from janus_server.wire.frames import Told

if TYPE_CHECKING:
    from janus_server.cluster.follow import Follower
    from janus_server.cluster.front import Front
    from janus_server.cluster.meeting import Meeting
    from janus_server.cluster.prefixes import Prefixes
    from janus_server.sched.prefixes import Cached

log = logging.getLogger("janus.cluster")

# A node that its leader does not know says so at most this often.
_AGAIN_S: Final = 1.0


class Telling:
    """Made with the node's front, which may call `traffic` from then on; told the rest by `open`."""

    def __init__(self, node: str, meeting: Meeting, front: Front, prefixes: Prefixes) -> None:
        self._node, self._meeting, self._front, self._prefixes = node, meeting, front, prefixes
        self._follower: Follower
        self._counts: Callable[[], Mapping[str, Counts]]
        self._hear: Callable[[str, int, Sequence[Told]], None]
        self._presented: tuple[int, str] | None = None  # in which term, and which process
        self._presented_s = 0.0
        self._presenting: asyncio.Task[None] | None = None
        self._due = False
        self._counted: dict[str, Counts] = {}

    def open(
        self, follower: Follower, counts: Callable[[], Mapping[str, Counts]],
        hear: Callable[[str, int, Sequence[Told]], None],
    ) -> None:  # fmt: skip
        """counts() are this node's totals by model; hear(node, term, events) is told where this node leads itself."""
        self._follower, self._counts, self._hear = follower, counts, hear

    async def close(self) -> None:
        if self._presenting is not None:
            self._presenting.cancel()
            await asyncio.gather(self._presenting, return_exceptions=True)

    def tell(self, events: Sequence[Told]) -> None:
        """Bring events to whoever leads."""
        term, leader = self._meeting.term, self._meeting.view.leader
        if leader is None or self._presented != self._now():
            return
        if leader.name == self._node:
            self._hear(self._node, term, events)
            return
        link = self._meeting.link(leader.name)
        if link is not None and not link.asking.tell(term, aged(events, time.monotonic())):
            link.asking.forget_told()
            self._presented = None  # too much is missing: from the beginning

    def traffic(self) -> None:
        """Calls came or went: several changes within one turn of the loop are told together."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._tell_traffic)

    def beat(self) -> None:
        """Twice a second: present this node where that is to be done, and tell how busy it is, and what it counted."""
        self.present()
        counts = dict(self._counts())
        news = changed(counts, self._counted)
        self._counted = counts
        told = (self._follower.report(), Counted(news) if news else None, self._held())
        events: list[Told] = [one for one in told if one is not None]
        if events:
            self.tell(events)

    def present(self) -> None:
        """Tell whoever leads now what there is here, unless that was done."""
        if self._presenting is None or self._presenting.done():
            self._presenting = asyncio.create_task(self._present())
            self._presenting.add_done_callback(say_why)

    def unknown(self) -> None:
        """Whoever leads does not know this node. Right after it was presented that is no news."""
        if time.monotonic() - self._presented_s > _AGAIN_S:
            self._presented = None
            self.present()

    def _now(self) -> tuple[int, str]:
        """One that registers anew is the same process still. A leader that gave it up meanwhile says so (`unknown`);
        one that did not would for a moment see a node on which nothing stands."""
        return self._meeting.term, self._meeting.incarnation.partition(".")[0]

    def _tell_traffic(self) -> None:
        self._due = False
        if self._presented is not None and (traffic := self._front.take()) is not None:
            self.tell([traffic])

    async def _present(self) -> None:
        while self._meeting.view.leader is not None:
            now = self._now()
            if self._presented == now:
                return
            self._presented = None
            await self._follower.calm()
            if now != self._now():
                continue
            self._presented, self._presented_s = now, time.monotonic()
            self._counted = {}
            self._prefixes.restart()
            held = self._prefixes.news(self._node)
            self.tell([*self._follower.introduction(), *([held] if held else []), Traffic(self._front.tickets())])

    def _held(self) -> Cached | None:
        """What came to the caches here, and went, for a leader that was told what there was before."""
        if self._presented == self._now():
            return self._prefixes.news(self._node)
        self._prefixes.look()
        return None


def say_why(task: asyncio.Task[None]) -> None:
    """For tasks that tell: one that fails ends, and nobody waits for it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the node says nothing more to its leader", exc_info=error)
