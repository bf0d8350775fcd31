"""The front of a node in a cluster: calls that came to it wait here, and run on whichever node the leader names.

`Lines` are what calls enter, one a model. The front tells of them as tickets, begins those that a `Dispatch` names here
or over a link, and pours what comes back into the calls as if the device thread had said it. What ran on a node that is
gone waits again, and goes on elsewhere from what it had said. It lives on the loop and decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from janus_server.cluster.away import Away
from janus_server.cluster.said import Said, going_on
from janus_server.cluster.tickets import ticket_id
from janus_server.errors import Refused
from janus_server.executor import Cancel, Submit
from janus_server.orders import Helper, Refuse, Ticket, Traffic
from janus_server.wire.trouble import Trouble

if TYPE_CHECKING:
    from janus_server.flow import Flow
    from janus_server.instance import Call
    from janus_server.sched.prefixes import PrefixKey
    from janus_server.streams import Streams
    from janus_server.types import Request
    from janus_server.wire.link import Link

log = logging.getLogger("janus.cluster")

PATIENCE_S: Final = 120.0
# A ticket is told again where nothing came of it: what the leader said may have been lost with a link.
AGAIN_S: Final = 2.0
MOST_ATTEMPTS: Final = 24
_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
# What no other node could mend, and what this node did itself.
_LASTING: Final = frozenset({Trouble.UNSOUND, Trouble.TOO_LATE, Trouble.FAILED, Trouble.SLOW})
_CLOSING: Final = "the server is shutting down"
# How long calls at a node that leaves wait for somebody to lead, where it is not known who else serves their model.
_LEADERLESS_S: Final = 10.0
_GIVEN_UP: Final = "the nodes that could run this request were lost one after the other; try again"


class Here(Protocol):
    """What this node runs itself."""

    def flow(self, model: str) -> Flow: ...

    def post(self, command: Submit | Cancel, helper: Helper | None = None) -> None:
        """Run a request on this node, its prompt computed by `helper` where one is named; or end one."""


class Waiter:
    """A call that is not over. node is who runs it, None while it waits, helper who may compute its prompt; told: the
    leader knows of its ticket.

    away are its requests that run elsewhere, said what other nodes had brought of them before.
    """

    __slots__ = ("again_s", "attempt", "away", "call", "helper", "model", "node", "resumed", "said", "ticket", "told")

    def __init__(self, call: Call, model: str, ticket: Ticket, now: float) -> None:
        self.call, self.model, self.ticket = call, model, ticket
        self.node: str | None = None
        self.helper: Helper | None = None
        self.attempt = 0
        self.again_s = now
        self.told = self.resumed = False
        self.away: dict[str, Away] = {}
        self.said: dict[str, Said] = {}  # what a node that is lost had brought, by request


class Line:
    """The entrance of one model's calls (`flow.Entrance`)."""

    patience_s = PATIENCE_S

    def __init__(self, model: str, front: Front) -> None:
        self.model = model
        self.device = front  # where a call's requests go is decided there, one by one
        self._front = front

    def enter(self, call: Call) -> None:
        self._front.enter(self.model, call)

    def leave(self, call: Call) -> None:
        self._front.leave(call)

    def started(self, call: Call) -> None:
        self._front.started(call)

    def held_s(self, call: Call) -> float:
        return self._front.held_s(call)


class Front:
    """Every call that came to this node. work_s(model, tokens) predicts what a prompt takes; changed() is told when
    there is something to `take`."""

    def __init__(
        self, node: str, streams: Streams, here: Here, work_s: Callable[[str, int], float],
        link: Callable[[str], Link | None], changed: Callable[[], None], request_s: float | None = None,
        keys: Callable[[Request], tuple[PrefixKey, ...]] | None = None,
    ) -> None:  # fmt: skip
        """link(node) is the link to it, request_s how long a request may take. keys(request) stand for the start of its
        prompt, for whoever chooses between nodes."""
        self._keys = keys
        self._request_s = request_s
        self._node, self._streams, self._here, self._link = node, streams, here, link
        self._work_s = work_s
        self._changed = changed
        self._calls: dict[str, Waiter] = {}
        self._tickets: dict[str, Waiter] = {}
        self._away: dict[str, Away] = {}
        self._beginning: Waiter | None = None
        self._arrived: dict[str, Ticket] = {}
        self._started: list[str] = []
        self._left: list[str] = []
        self._routes: Mapping[str, Sequence[str]] = {}
        self._unserved_s: dict[str, float] = {}
        self._turn = 0
        self.led = True
        self._until_s: float | None = None  # nothing begins here any more; so long calls wait for a leader
        self._since_s = time.monotonic()

    def line(self, model: str) -> Line:
        return Line(model, self)

    def close(self, alone: bool) -> None:
        """Nothing begins here any more. alone: other nodes stay, and one of them will lead."""
        self._until_s = time.monotonic() + (_LEADERLESS_S if alone else 0.0)

    @property
    def running(self) -> bool:
        """Calls run here."""
        return any(one.node == self._node for one in self._calls.values())

    def waiting(self, model: str) -> int:
        """Calls that nobody has begun."""
        return sum(one.node is None for one in self._calls.values() if one.model == model)

    # What calls do

    def enter(self, model: str, call: Call) -> None:
        now = time.monotonic()
        waiter = Waiter(call, model, self._ticket(model, call, 0), now)
        self._calls[call.id] = waiter
        self._queue(waiter)
        if not self.led:
            self._unled(waiter)

    def leave(self, call: Call) -> None:
        waiter = self._calls.pop(call.id, None)
        if waiter is None:
            return
        self._forget(waiter)
        if waiter.node == self._node:
            self._here.flow(waiter.model).ended(call)
        for away in waiter.away.values():
            self._end(away)

    def started(self, call: Call) -> None:
        waiter = self._calls.get(call.id)
        if waiter is not None:
            self._started.append(waiter.ticket.id)
            self._changed()

    def held_s(self, call: Call) -> float:
        """For how long it has waited while no node serves its model."""
        waiter = self._calls.get(call.id)
        if waiter is None or waiter.node is not None or self._routes.get(waiter.model):
            return 0.0
        return time.monotonic() - max(call.entered_s, self._unserved_s.get(waiter.model, self._since_s))

    def post(self, command: Submit | Cancel) -> None:
        """A request of the call that begins just now, or what is not wanted any more of one that runs."""
        if isinstance(command, Submit):
            waiter = self._beginning
            if waiter is None or waiter.node is None:
                return
            said = waiter.said.get(command.request.id)
            if said is not None and said.over:
                return
            if waiter.node != self._node:
                self._send(waiter, waiter.node, command)
                return
            if said is not None and said.begun:
                begun = going_on(command.request, said.known(), said.ended(), command.matcher)
                command = msgspec.structs.replace(command, matcher=None, begun=begun)
            self._here.post(command, waiter.helper)
            return
        away = self._away.get(command.request_id)
        if away is None:
            self._here.post(command)
        elif command.index is None:
            self._end(away)
        else:
            away.said.end(command.index)
            away.reading.cancel(command.index)

    # What the leader says

    def begin(self, requests: Sequence[str], node: str, helper: Helper | None = None) -> None:
        """Run those of them that still wait on that node; helper may compute their prompts for it."""
        for request in requests:
            waiter = self._tickets.get(request)
            if waiter is not None and waiter.node is None:
                waiter.helper = helper
                self._begin(waiter, node)

    def refuse(self, refuse: Refuse) -> None:
        """Who waits for the model is sent away."""
        refused = Refused(refuse.why, status=503, kind="server_error", code="model_unavailable",
                          retry_after_s=refuse.retry_after_s)  # fmt: skip
        for waiter in list(self._calls.values()):
            if waiter.model == refuse.model and waiter.node is None:
                waiter.call.refuse(refused)

    def route(self, routes: Mapping[str, Sequence[str]]) -> None:
        """Where models are served, as the leader sees it."""
        now = time.monotonic()
        for model in {*self._routes, *routes}:
            if routes.get(model):
                self._unserved_s.pop(model, None)
            elif self._routes.get(model):
                self._unserved_s[model] = now
        self._routes = routes

    def take(self) -> Traffic | None:
        """What happened since it was last taken; None where nothing did."""
        if not (self._arrived or self._started or self._left):
            return None
        traffic = Traffic(tuple(self._arrived.values()), tuple(self._started), tuple(self._left))
        for ticket in self._arrived:
            self._tickets[ticket].told = True
        self._arrived, self._started, self._left = {}, [], []
        return traffic

    def tickets(self) -> tuple[Ticket, ...]:
        """All that wait: what a new leader is told."""
        self._arrived, self._started, self._left = {}, [], []
        found = [waiter for waiter in self._calls.values() if waiter.node is None]
        for waiter in found:
            waiter.told = True
        return tuple(waiter.ticket for waiter in found)

    def look(self, led: bool) -> None:
        """Twice a second, led: somebody leads. Tell of tickets again of which nothing came, or begin them all the
        same."""
        now, self.led = time.monotonic(), led
        for waiter in list(self._calls.values()):
            if waiter.node is not None:
                continue
            if not led:
                self._unled(waiter)
            elif now - waiter.again_s >= AGAIN_S:
                waiter.again_s = now
                self._arrived[waiter.ticket.id] = waiter.ticket
        if self._arrived:
            self._changed()

    # How it goes

    def _unled(self, waiter: Waiter) -> None:
        """Nobody says where it shall run: the last table does."""
        nodes = self._routes.get(waiter.model, ())
        if self._until_s is not None:
            nodes = [node for node in nodes if node != self._node and self._link(node) is not None]
        if nodes:
            self._turn += 1
            self._begin(waiter, nodes[self._turn % len(nodes)])
        elif self._until_s is not None and time.monotonic() >= self._until_s:
            waiter.call.refuse(Refused(_CLOSING, status=503, kind="server_error", code="not_ready", retry_after_s=1.0))

    def _ticket(self, model: str, call: Call, attempt: int) -> Ticket:
        tokens = call.prompt_tokens
        many = len(self._routes.get(model, ())) > 1
        prefix = self._keys(call.first) if many and self._keys is not None else ()
        return Ticket(
            id=ticket_id(self._node, call.id, attempt), model=model, prompt_tokens=tokens, arrived_s=call.arrived_s,
            ttft_s=call.ttft_s, priority=call.priority, work_s=self._work_s(model, tokens), prefix=prefix,
            least_s=self._work_s(model, 1) if prefix else 0.0,
        )  # fmt: skip

    def _queue(self, waiter: Waiter) -> None:
        self._tickets[waiter.ticket.id] = waiter
        self._arrived[waiter.ticket.id] = waiter.ticket
        self._changed()

    def _forget(self, waiter: Waiter) -> None:
        del self._tickets[waiter.ticket.id]
        self._arrived.pop(waiter.ticket.id, None)
        if waiter.told:
            self._left.append(waiter.ticket.id)
            self._changed()

    def _begin(self, waiter: Waiter, node: str) -> None:
        call = waiter.call
        if node == self._node:
            flow = self._here.flow(waiter.model)
            if not flow.open or self._until_s is not None:
                self._again(waiter)
                return
            flow.admit(call)
        elif self._link(node) is None:
            self._again(waiter)
            return
        waiter.node, self._beginning = node, waiter
        try:
            call.start()
        finally:
            self._beginning = None

    def _send(self, waiter: Waiter, node: str, submit: Submit) -> None:
        link = self._link(node)
        if link is None:
            return
        request = submit.request
        said = waiter.said.setdefault(request.id, Said(request))
        away = Away(said, node, waiter.call.id, lambda: self._schedule(away))
        self._away[request.id] = waiter.away[request.id] = away
        until_s = None if self._request_s is None else submit.arrived_s + self._request_s
        away.open(link.asking, waiter.ticket.id, waiter.attempt, submit.arrived_s, until_s, waiter.helper)

    def _schedule(self, away: Away) -> None:
        """What a frame brought is poured at once, not item by item."""
        if not away.pouring:
            away.pouring = True
            asyncio.get_running_loop().call_soon(self._pour, away)

    def _pour(self, away: Away) -> None:
        away.pouring = False
        if self._away.get(away.request.id) is not away:
            return
        emits, waiter = away.take(), self._calls.get(away.call)
        self._streams.spread(emits)
        if emits and waiter is not None and waiter.resumed:
            waiter.resumed = False  # its prompt is computed once more
            self._started.append(waiter.ticket.id)
            self._changed()
        if away.reading.over:
            self._over(away)

    def _over(self, away: Away) -> None:
        del self._away[away.request.id]
        waiter, why = self._calls.get(away.call), away.reading.broken
        if waiter is None or why is None:
            self._streams.spread(away.said.rest())  # of one that ended as it should there is none
            return
        if why in _LASTING or not all(said.can_go_on for said in waiter.said.values()):
            log.warning("a request ends before it is complete: %s: %s", away.node, why.sentence)
            self._streams.spread(away.said.rest())
            return
        if away.said.begun:
            log.info("a request that ran on node %s goes on elsewhere: %s", away.node, why.sentence)
        self._again(waiter)

    def _again(self, waiter: Waiter) -> None:
        """It is to be begun anew, wherever that may be."""
        for away in waiter.away.values():
            self._end(away)
        waiter.away = {}
        self._forget(waiter)
        waiter.call.stop()
        waiter.node = waiter.helper = None
        waiter.told, waiter.resumed = False, any(said.begun for said in waiter.said.values())
        waiter.attempt += 1
        if waiter.attempt > MOST_ATTEMPTS:
            self._tickets[waiter.ticket.id] = waiter
            waiter.call.refuse(
                Refused(_GIVEN_UP, status=503, kind="server_error", code="model_unavailable", retry_after_s=5.0)
            )
            return
        waiter.ticket = self._ticket(waiter.model, waiter.call, waiter.attempt)
        self._tickets[waiter.ticket.id] = waiter
        pause_s = min(_LONGEST_PAUSE_S, _PAUSE_S * (waiter.attempt - 1))
        asyncio.get_running_loop().call_later(pause_s, self._queue_again, waiter, waiter.ticket)

    def _queue_again(self, waiter: Waiter, ticket: Ticket) -> None:
        if self._calls.get(waiter.call.id) is waiter and waiter.ticket is ticket and waiter.node is None:
            waiter.again_s = time.monotonic()
            self._queue(waiter)

    def _end(self, away: Away) -> None:
        if self._away.get(away.request.id) is away:
            del self._away[away.request.id]
        if not away.reading.over:
            away.reading.cancel()
