"""Where requests wait in an imitation of another system, and which replica each is handed to at once.

`baseline` owns one and tells it of tickets and of replicas that changed. Systems whose engines queue by themselves hand
a request over as soon as a replica serves its model; which one, a key says (`fewest_running` and so on). A request is
never handed to a replica that is not Active, and only once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from janus_server.orders import Action, Dispatch, Ticket, Traffic

from .replicas import Phase, Replica
from .yard import Yard

Key = Callable[[Replica], float]


class Line:
    """The requests that wait for one model, in order of arrival, and the sums over them."""

    __slots__ = ("tickets", "tokens", "work_s")

    def __init__(self) -> None:
        self.tickets: dict[str, Ticket] = {}
        self.work_s = self.tokens = 0.0

    def add(self, ticket: Ticket) -> None:
        self.tickets[ticket.id] = ticket
        self.work_s += ticket.work_s
        self.tokens += ticket.prompt_tokens

    def take(self, request: str) -> Ticket:
        ticket = self.tickets.pop(request)
        self.work_s -= ticket.work_s
        self.tokens -= ticket.prompt_tokens
        if not self.tickets:
            self.work_s = self.tokens = 0.0
        return ticket


class Given(NamedTuple):
    """A request that was handed over and whose prompt is not known to be computed."""

    replica: Replica
    ticket: Ticket


class Desk(Protocol):
    """What a rule and `baseline` may ask of it."""

    def line(self, model: str) -> Line:
        """Who waits for the model and was handed to nobody."""

    def hear(self, event: Traffic, now: float) -> None: ...

    def changed(self, model: str) -> None:
        """Replicas of the model came, went or are being drained."""

    def moved(self, replica: Replica) -> None:
        """A report told how many requests it has."""

    def dropped(self, model: str) -> None:
        """Who waits for it was refused."""

    def hand_over(self, now: float, actions: list[Action]) -> None: ...

    def due_s(self, now: float) -> float:
        """When `hand_over` is to be called though nothing happened; infinite: never."""


class Lines:
    """All who wait, by model, and all that were handed over."""

    def __init__(self) -> None:
        self.by_model: dict[str, Line] = {}
        self.given: dict[str, Given] = {}
        self._models: dict[str, str] = {}

    def of(self, model: str) -> Line:
        line = self.by_model.get(model)
        if line is None:
            line = self.by_model[model] = Line()
        return line

    def add(self, ticket: Ticket) -> bool:
        """False where it is told of twice. One that is asked again since its replica was lost waits again."""
        if ticket.id in self._models:
            return False
        given = self.given.get(ticket.id)
        if given is not None:
            if given.replica.phase in (Phase.ACTIVE, Phase.DRAINING):
                return False
            del self.given[ticket.id]
        self._models[ticket.id] = ticket.model
        self.of(ticket.model).add(ticket)
        return True

    def give(self, request: str, replica: Replica, now: float) -> Ticket:
        ticket = self.by_model[self._models.pop(request)].take(request)
        self.given[request] = Given(replica, ticket)
        replica.running += 1
        replica.tokens += ticket.prompt_tokens
        replica.work_s += ticket.work_s
        replica.used_s = now
        return ticket

    def computed(self, request: str) -> Given | None:
        """Its prompt is computed, or never will be."""
        given = self.given.pop(request, None)
        if given is not None:
            given.replica.work_s = max(0.0, given.replica.work_s - given.ticket.work_s)
        return given

    def leave(self, request: str) -> Ticket | None:
        """Who waited does no more."""
        model = self._models.pop(request, None)
        return None if model is None else self.by_model[model].take(request)

    def drop(self, model: str) -> None:
        line = self.of(model)
        for request in line.tickets:
            del self._models[request]
        self.by_model[model] = Line()


class LeastDesk:
    """Each request goes at once to the replica with the least key; of equals to the one chosen longest ago.

    cap(model): a replica whose key is so much gets nothing more; who came first then waits here until one has less.
    """

    def __init__(self, yard: Yard, key: Key, cap: Callable[[str], float] = lambda model: math.inf) -> None:
        self._yard, self._key, self._cap = yard, key, cap
        self._lines = Lines()
        self._heaps: dict[str, list[tuple[float, int, int, Replica]]] = {}
        self._touched: dict[str, None] = {}
        self._turns = 0

    def line(self, model: str) -> Line:
        return self._lines.of(model)

    def hear(self, event: Traffic, now: float) -> None:
        for ticket in event.arrived:
            if self._lines.add(ticket):
                self._touched[ticket.model] = None
        for request in event.started:
            self._computed(request)
        for request in event.left:
            if self._lines.leave(request) is None:
                self._computed(request)

    def _computed(self, request: str) -> None:
        given = self._lines.computed(request)
        if given is not None:
            self.moved(given.replica)

    def changed(self, model: str) -> None:
        self._heaps[model] = self._fresh(model)
        self._touched[model] = None

    def _fresh(self, model: str) -> list[tuple[float, int, int, Replica]]:
        heap = [self._entry(replica) for replica in self._yard.serving(model)]
        heapq.heapify(heap)
        return heap

    def moved(self, replica: Replica) -> None:
        """A new entry beside the old one, unless the old one still holds: which one is true shows when it is chosen."""
        heap = self._heaps.get(replica.model)
        if self._lines.of(replica.model).tickets:
            self._touched[replica.model] = None
        if heap is None or replica.phase is not Phase.ACTIVE:
            return
        if len(heap) > 4 * len(self._yard.of(replica.model)) + 16:
            self._heaps[replica.model] = self._fresh(replica.model)
        else:
            heapq.heappush(heap, self._entry(replica))

    def dropped(self, model: str) -> None:
        self._lines.drop(model)

    def due_s(self, now: float) -> float:
        return math.inf

    def hand_over(self, now: float, actions: list[Action]) -> None:
        if not self._touched:
            return
        nodes: dict[str, list[str]] = {}
        for model in self._touched:
            waiting = self._lines.of(model).tickets
            heap = self._heaps.get(model)
            cap = self._cap(model) if waiting and heap else math.inf
            while waiting and heap:
                key, turn, _, replica = heap[0]
                if replica.phase is not Phase.ACTIVE or turn != replica.turn:
                    heapq.heappop(heap)
                    continue
                if key != self._key(replica):
                    heapq.heapreplace(heap, self._entry(replica))
                    continue
                if key >= cap:
                    break
                request = next(iter(waiting))
                self._lines.give(request, replica, now)
                self._turns += 1
                replica.turn = self._turns
                heapq.heapreplace(heap, self._entry(replica))
                nodes.setdefault(replica.nodes[0], []).append(request)
        self._touched = {}
        for node, requests in nodes.items():
            actions.append(Dispatch(node, tuple(requests), f"{node}: {len(requests)} begin, it has the least to do"))

    def _entry(self, replica: Replica) -> tuple[float, int, int, Replica]:
        return self._key(replica), replica.turn, replica.number, replica


def fewest_running(replica: Replica) -> float:
    """Requests that it has, begun or queued by its engine."""
    return replica.running


def least_work(replica: Replica) -> float:
    """Predicted seconds of the prompts that it was handed and has not computed."""
    return replica.work_s


def in_turn(replica: Replica) -> float:
    """All equal: whoever was chosen longest ago."""
    return 0.0
