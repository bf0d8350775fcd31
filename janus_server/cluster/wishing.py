"""An operator's wish on any node of a cluster, brought to whoever leads, and the leader's own answer to it.

`Member.ask_leader(event)` is the way in, for an `Asked` as for every other event in `orders.Wished`. Asking twice
does no harm, so a wish is put again, within its time, where a link breaks or another node is elected meanwhile. Lives
on the loop; it decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import msgspec

from janus_server.cluster.lead import Lead
from janus_server.cluster.meeting import Meeting
from janus_server.errors import Refused
from janus_server.orders import Answer, Wished

# An election after a kill takes some two seconds: whoever waits so long meets the next leader.
LIMIT_S: Final = 3.5
# A leader that says nothing for so long may be no leader any more.
_TRY_S: Final = 1.0
_PAUSE_S: Final = 0.05
# Of a name that another node says.
_TEXT_MOST: Final = 512


class Wishing:
    """One node's way to its leader, and what it answers others while it leads. lead() is the term that it has."""

    def __init__(self, node: str, meeting: Meeting, lead: Callable[[], Lead | None]) -> None:
        self._node, self._meeting, self._lead = node, meeting, lead

    async def ask(self, event: Wished, limit_s: float = LIMIT_S) -> Answer:
        """The leader's answer. Refused (503) where nobody leads, or who does says nothing, for limit_s."""
        until_s = time.monotonic() + limit_s
        while True:
            left_s = until_s - time.monotonic()
            answer = await self._once(event, max(0.0, min(left_s, _TRY_S)))
            if answer is not None:
                return answer
            if time.monotonic() + _PAUSE_S >= until_s:
                raise self._unanswered()
            await asyncio.sleep(_PAUSE_S)

    def answer(self, term: int, event: Wished) -> Answer | None:
        """The answer of this node to a wish for the leader of that term; None where it is not that."""
        lead = self._lead()
        if lead is None or lead.term != term or lead.listening or self._meeting.leads_for_s() <= 0.0:
            return None
        if any(isinstance(said, str) and len(said) > _TEXT_MOST for said in msgspec.structs.astuple(event)):
            return Answer("", False, "a name in the wish is too long")
        return lead.ask(event)

    async def _once(self, event: Wished, limit_s: float) -> Answer | None:
        leader, term = self._meeting.view.leader, self._meeting.term
        if leader is None:
            return None
        if leader.name == self._node:
            return self.answer(term, event)
        link = self._meeting.link(leader.name)
        if link is None:
            return None
        answer = await link.asking.ask(term, event, limit_s)
        return answer if isinstance(answer, Answer) else None

    def _unanswered(self) -> Refused:
        leader = self._meeting.view.leader
        why = (
            "the cluster has no leader at the moment; ask again"
            if leader is None
            else f"{leader.name}, which leads the cluster, does not answer; ask again"
        )
        return Refused(why, status=503, kind="server_error", code="no_leader", retry_after_s=1.0)
