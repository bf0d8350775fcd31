"""One node's place in a cluster: it follows whoever leads, leads when it is elected, and runs requests for others.

`node` makes one instead of a `leader.Leader` and uses it in the same way. Here meet the coordinator (who is there, who
leads), the links to all others, the front (calls that came here), the guests (requests of others) and the follower
(orders). What crosses a link is checked here once more against who said it. Lives on the loop; it decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

from janus_server.api.cluster import Decision, LeaderView
from janus_server.cluster.election import Election
from janus_server.cluster.follow import Follower
from janus_server.cluster.front import Front, Line
from janus_server.cluster.guests import Guests
from janus_server.cluster.handover import Handover
from janus_server.cluster.hosting import Hosting
from janus_server.cluster.joining import joined
from janus_server.cluster.meeting import Meeting, Place
from janus_server.cluster.party import Party
from janus_server.cluster.prefixes import Prefixes, Trail
from janus_server.cluster.telling import Telling, say_why
from janus_server.cluster.tickets import dated
from janus_server.cluster.wishing import Wishing
from janus_server.duty import NOBODY, Charge, Duty
from janus_server.flow import Flow
from janus_server.orders import (
    Answer,
    Asked,
    Dispatch,
    Helper,
    Joined,
    Lost,
    Observed,
    Order,
    Refuse,
    Report,
    Wish,
    Wished,
)
from janus_server.sched.foresight import Forecast
from janus_server.sched.prefixes import Cached
from janus_server.sched.state import Standing
from janus_server.transfer.door import Pages
from janus_server.types import HandedOver
from janus_server.wire.frames import Give, Given, Outcome, Question, Replied, Run, Sight, Table, Told
from janus_server.wire.handshake import Identity
from janus_server.wire.serving import Answering
from janus_server.wire.trouble import Trouble

if TYPE_CHECKING:
    from janus_server.executor import Cancel, Submit
    from janus_server.streams import Streams

BEAT_S: Final = 0.5
# A leader says something every second. One that has not for so long is not waited for: the last table says where
# models are. An election takes some two seconds.
SILENCE_S: Final = 3.0
_ASKED_S: Final = 3.0


class Member:
    """Made before the node's models are opened (`line` is what their calls enter), and opened after them."""

    def __init__(
        self, place: Place, streams: Streams, work_s: Callable[[str, int], float], request_s: float | None,
        caching: bool,
    ) -> None:  # fmt: skip
        """caching: starts of prompts are kept, so that it matters where the next one runs."""
        self.node = place.node
        self.meeting = Meeting(place, self)
        self.party = Party(self.meeting)
        self._prefixes = Prefixes(lambda: self.meeting.key_for("prefixes"))
        self._caching = caching
        keys = self._prefixes.keys.of if caching else None
        self.front = Front(
            place.node, streams, self, work_s, self.meeting.link, lambda: self._telling.traffic(), request_s, keys
        )  # fmt: skip
        self._telling = Telling(place.node, self.meeting, self.front, self._prefixes)
        self.guests = Guests(
            lambda: self._hosting.lifecycle, streams, lambda: self._closing is not None, self.post,
            lambda: self._handover.lending,
        )  # fmt: skip
        self._work_s = work_s
        self._handover: Handover
        self._hosting: Hosting
        self._follower: Follower
        self._election: Election
        self._wishing = Wishing(place.node, self.meeting, lambda: self._election.lead)
        self._opened = False
        self._refused = ""
        self._voice_s = time.monotonic()
        self._table: Table | None = None
        self._asked_s: dict[str, float] = {}
        self._beating: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def open(self, hosting: Hosting) -> None:
        """Join, and wait until somebody leads and knows this node. BadConfig where it cannot belong to the cluster."""
        self._hosting, self._opened = hosting, True
        self._follower = Follower(
            self.node, hosting.lifecycle, hosting.pool_pages, hosting.host_bytes, self.meeting.where,
            hosting.known, self._telling.tell, hosting.seen,
        )  # fmt: skip
        self._handover = Handover(hosting, self.meeting.link, self._work_s, self.term)
        self._election = Election(self.node, hosting, self.meeting, self._given_here, self._knew)
        self._telling.open(self._follower, hosting.counts, self._election.hear)
        await self.meeting.open()
        if hosting.peering is not None:
            mine, stale = hosting.lifecycle, self.meeting.stale
            pages = Pages(hosting.memory, mine.grants, mine.offer, tuple(mine.residents), mine.copy_rate, stale)
            self.meeting.let_read(hosting.peering, pages)
        self._beating = asyncio.create_task(self._beat())
        self._beating.add_done_callback(say_why)
        awaited = [one.model for one in hosting.lifecycle.known() if one.preload]
        await joined(self.meeting, awaited, lambda: self._table, lambda: self._refused)

    def flow(self, model: str) -> Flow:
        """What runs a model's requests on this node."""
        return self._hosting.lifecycle.residents[model].flow

    def post(self, command: Submit | Cancel, helper: Helper | None = None) -> None:
        """Run a request here, with what a helper has of its prompt; or end one."""
        self._handover.post(command, helper)

    def handed_over(self) -> HandedOver:
        """What helpers computed for requests that run here."""
        return self._handover.counts() if self._opened else HandedOver()

    def line(self, model: str) -> Line:
        return self.front.line(model)

    def trail(self, model: str) -> Trail | None:
        return self._prefixes.trail(model) if self._caching else None

    def served_by(self, model: str) -> list[str]:
        """The other nodes that take its requests, as far as the leader said."""
        routes = () if self._table is None else self._table.routes.get(model, ())
        return [node for node in routes if node != self.node]

    def emptied(self) -> str | None:
        """Why no node takes a request, where all are emptied, as far as the leader said."""
        table = self._table
        if table is None or not table.nodes or any(table.routes.values()):
            return None
        leaving = {node for node, charge in table.charges.items() if charge.duty is not Duty.SERVE}
        return NOBODY if leaving.issuperset(table.nodes) else None

    @property
    def busy(self) -> int:
        """Requests of other nodes that run here."""
        return len(self.guests)

    @property
    def running(self) -> bool:
        """Requests run here, of whomever."""
        return bool(len(self.guests)) or self.front.running

    @property
    def accompanied(self) -> bool:
        """There are other nodes, as far as the leader said."""
        return self._table is not None and any(node != self.node for node in self._table.nodes)

    def withdraw(self, alone: bool) -> None:
        """Run nothing more, and lead no more: what runs here goes on. alone: the others stay."""
        if self._closing is None:
            self.front.close(alone)
            self._follower.withdraw()
            self._closing = asyncio.create_task(self.meeting.resign())

    async def close(self) -> None:
        """Leave. What runs here for others ends."""
        tasks = [task for task in (self._beating, self._closing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._telling.close()
        if self._opened:
            await self._handover.close()
            await self._election.end()
            await self.meeting.close()
            await self._follower.close()
        await self.guests.close()

    # What the node asks of whoever leads

    async def look(self) -> None:
        """Whose weights may be copied the leader knows by itself."""

    async def ask(self, model: str, wish: Wish, source: str | None = None) -> Answer:
        """An operator's wish for this node."""
        answer = await self.ask_leader(Asked(model, wish, source, self.node))
        if answer.accepted:
            self._asked_s[model] = time.monotonic()
            if wish in (Wish.PIN, Wish.UNPIN):
                self._follower.pinned(model, wish is Wish.PIN)
        return answer

    async def ask_leader(self, event: Wished) -> Answer:
        """The answer of whoever leads to an operator's wish. Refused (503) where nobody answers in some seconds."""
        return await self._wishing.ask(event)

    @property
    def where(self) -> tuple[str, str]:
        """Host and domain."""
        return self.meeting.where

    @property
    def in_term(self) -> int:
        return self.meeting.view.term

    def leading(self) -> LeaderView | None:
        return None if self._election.lead is None else self._election.lead.view()

    def decided(self) -> list[Decision]:
        return self._election.decided()

    def held(self, model: str) -> int:
        return self.front.waiting(model)

    def settled(self, model: str) -> bool:
        brain = self._election.brain
        if brain is not None and self.node in brain.nodes():
            return brain.settled(self.node, model)
        asked_s = self._asked_s.get(model)
        return self._follower.settled(model) and (asked_s is None or time.monotonic() - asked_s > _ASKED_S)

    def standing(self, model: str) -> Standing:
        brain = self._election.brain
        if brain is not None and self.node in brain.nodes():
            return brain.standing(self.node, model)
        resident = self._hosting.lifecycle.residents[model]
        known = resident.opened.known()
        return Standing(known.pinned, False, None, known.load_s, known.wake_s)

    def forecast(self, model: str) -> Forecast | None:
        brain = self._election.brain
        return None if brain is None else brain.forecast(model, time.monotonic())

    def lost(self, model: str) -> None:
        """The device thread tore the model's instance down."""
        self._follower.lost(model)

    def observed(self, observed: Observed) -> None:
        self._follower.observed(observed)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._telling.beat()
            self.front.look(time.monotonic() - self._voice_s < SILENCE_S)

    # What others say (`meeting.Hears` and `wire.Station`)

    def led(self) -> None:
        self._telling.present()

    def elected(self, term: int) -> None:
        self._election.begin(term)

    async def deposed(self) -> None:
        await self._election.end()

    def came(self, node: str) -> None:
        if self._election.lead is not None:
            self._election.lead.came(node)

    def gone(self, node: str) -> None:
        if self._election.lead is not None:
            self._election.lead.left(node)

    def answered(self, term: int, number: int, outcome: Outcome) -> None:
        lead = self._election.lead
        if lead is not None and lead.term == term:
            lead.outcome(number, outcome)

    def term(self) -> int:
        return self.meeting.term

    def heard(self, peer: Identity, term: int, events: Sequence[Told]) -> None:
        theirs = [event for event in dated(events, time.monotonic()) if _of(event) in (None, peer.node)]
        self._election.hear(peer.node, term, theirs)

    def given(self, peer: Identity, give: Give, until_s: float) -> Outcome:
        leader = self.meeting.view.leader
        if leader is None or leader.name != peer.node:
            return Outcome.STALE
        return self._take(give.action)

    def answer(self, peer: Identity, term: int, question: Question) -> Replied | None:
        if isinstance(question, Wished):
            return self._wishing.answer(term, question)
        return Sight(self._hosting.sight(question.past))

    def run(self, run: Run, answer: Answering) -> Trouble | None:
        return self.guests.run(answer)

    def cancel(self, answer: Answering, index: int | None) -> None:
        self.guests.cancel(answer, index)

    def _given_here(self, number: int, action: Given) -> None:
        """This node leads, and gives itself something."""
        outcome, lead = self._take(action), self._election.lead
        if lead is not None:
            lead.outcome(number, outcome)

    def _knew(self) -> Collection[str]:
        """The nodes that the last leader had."""
        return () if self._table is None else self._table.nodes

    def _take(self, action: Given) -> Outcome:
        self._voice_s = time.monotonic()
        match action:
            case Order():
                return self._follower.obey(action)
            case Dispatch(node, requests, _, helper):
                self.front.begin(requests, node, helper)
            case Refuse():
                self.front.refuse(action)
            case Table():
                self._table = action
                self.front.route(action.routes)
                if self.node in action.nodes:
                    self._follower.assigned(action.charges.get(self.node, Charge()))
                elif self._closing is None:
                    self._telling.unknown()
            case Answer(_, False, why):  # of whoever presented itself; wishes are answered where they are put
                self._refused = why
        return Outcome.APPLIED


def _of(event: Told) -> str | None:
    """The node that an event is about, where it is about one."""
    return event.node if isinstance(event, Joined | Report | Lost | Cached) else None
