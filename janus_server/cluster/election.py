"""The terms that this node is elected for: a `Lead` and a journal each, from `begin` to `end`. Lives on the loop.

Nodes may hear of a term before the elected node does: what they tell it meanwhile waits here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

from janus_server.api.cluster import Decision
from janus_server.cluster.decisions import Decisions
from janus_server.cluster.hosting import Hosting
from janus_server.cluster.lead import Lead
from janus_server.cluster.meeting import Meeting
from janus_server.cluster.sight import DECIDED_MOST
from janus_server.errors import BadConfig
from janus_server.journal import Entry, Journal
from janus_server.sched.brain import Brain
from janus_server.wire.frames import Given, Told

log = logging.getLogger("janus.cluster")

_MOST_EARLY: Final = 10_000


class Election:
    """At most one term at a time."""

    def __init__(
        self, node: str, hosting: Hosting, meeting: Meeting, give_here: Callable[[int, Given], None],
        knew: Callable[[], Collection[str]],
    ) -> None:  # fmt: skip
        """give_here(number, action) is for what this node gives itself; knew() are the nodes of the term before."""
        self.lead: Lead | None = None
        self._knew = knew
        self._decided: deque[Decision] = deque(maxlen=DECIDED_MOST)
        self._node, self._hosting, self._meeting = node, hosting, meeting
        self._give_here = give_here
        self._early: list[tuple[str, int, Sequence[Told]]] = []
        self._journal: Journal | None = None

    @property
    def brain(self) -> Brain | None:
        """Once it decides."""
        return None if self.lead is None or self.lead.listening else self.lead.brain

    def decided(self) -> list[Decision]:
        """The last decisions of terms that are over, the newest last."""
        return list(self._decided)

    def begin(self, term: int) -> None:
        brain = Brain(self._hosting.settings, term)
        self._journal = self._open(brain)
        record = _nothing if self._journal is None else self._journal.write
        decisions = Decisions(term, self._node, self._knew())
        self.lead = Lead(brain, self._meeting.near, self._give, record, self._hosting.fitter, decisions)
        log.info("%s leads, in term %d", self._node, term)
        early, self._early = self._early, []
        for node, of_term, events in early:
            self.hear(node, of_term, events)

    async def end(self) -> None:
        lead, self.lead = self.lead, None
        if lead is not None:
            log.info("%s leads no more, term %d is over", self._node, lead.term)
            self._decided += lead.decided()
            await lead.close()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def hear(self, node: str, term: int, events: Sequence[Told]) -> None:
        """What a node tells the leader of that term."""
        lead = self.lead
        if lead is not None and lead.term == term:
            lead.hear(node, events)
        elif term >= self._meeting.term and (lead is None or term > lead.term) and len(self._early) < _MOST_EARLY:
            self._early = [one for one in self._early if one[1] >= term]
            self._early.append((node, term, events))

    def _give(self, node: str, number: int, action: Given) -> bool:
        lead, left_s = self.lead, self._meeting.leads_for_s()
        if lead is None or left_s <= 0.0 or lead.term != self._meeting.leads_in:
            return False
        if node == self._node:
            asyncio.get_running_loop().call_soon(self._give_here, number, action)
            return True
        link = self._meeting.link(node)
        return link is not None and link.asking.give(lead.term, number, action, left_s)

    def _open(self, brain: Brain) -> Journal | None:
        path = self._hosting.journal
        if path is None:
            return None
        try:
            return Journal(path.with_name(f"{path.name}.{self._node}.{brain.term}"), brain, log.error)
        except BadConfig as error:  # a full disk keeps nobody from leading
            log.error("this term has no journal: %s", error)
            return None


def _nothing(entry: Entry) -> None:
    """No journal was asked for."""
