"""The last things that a leader decided or heard of, each as a sentence: who looks on reads them. Pure.

`leader` and `cluster/lead` show it every event with what the Brain made of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Final, Literal

from janus_server.api.admin import LOST
from janus_server.api.cluster import Decision
from janus_server.duty import Assigned
from janus_server.orders import (
    Action,
    Answer,
    Decided,
    Dispatch,
    Done,
    Event,
    Failed,
    Joined,
    Left,
    Lost,
    Order,
    Refuse,
    Report,
    Stage,
)

KEPT: Final = 200
# A leader hears thousands of events a second; most have no sentence.
_TELLING: Final = (Joined, Left, Lost, Done, Failed)
Kind = Literal["order", "decided", "refused", "done", "failed", "lost", "joined", "left", "leads"]


class Decisions:
    """Of one term. Nothing here grows with time: orders end, nodes leave."""

    def __init__(self, term: int, leader: str = "", knew: Collection[str] = ()) -> None:
        """knew are nodes that the leader knew before its term."""
        self._term, self._leader = term, leader
        self._knew = set(knew)
        self._last: deque[Decision] = deque(maxlen=KEPT)
        self._orders: dict[int, Order] = {}
        self._there: set[str] = set()
        self._active: dict[str, set[str]] = {}  # models by node, as last told

    def begin(self, there: Collection[str], now: float) -> None:
        """It decides from now on, and says first which nodes are gone that it knew. now is Unix time."""
        if not self._leader:
            return
        gone = self._knew.difference(there)
        self._knew -= gone
        are = "is" if len(gone) == 1 else "are"
        rest = f"; {', '.join(sorted(gone))} {are} gone" if gone else ""
        self._note(now, "leads", f"{self._leader} leads, term {self._term}{rest}", node=self._leader)

    def last(self) -> list[Decision]:
        """The newest last."""
        return list(self._last)

    def see(self, event: Event, actions: Sequence[Action], now: float) -> None:
        """now is Unix time."""
        if isinstance(event, Report):
            self._active[event.node] = set(event.models)
        elif isinstance(event, _TELLING):
            self._heard(event, now)
        for action in actions:
            if isinstance(action, Answer) and isinstance(event, Assigned):
                self._assigned(action, event, now)
            else:
                self._decided(action, now)

    def _heard(self, event: Event, now: float) -> None:
        match event:
            case Joined(node) if node not in self._there:
                self._there.add(node)
                self._note(now, "joined", f"{node} is there, with {event.pool_pages} pages", node=node)
            case Left(node):  # once of a node that says that it goes, and once when it is gone
                if node in self._there or node in self._knew:
                    self._note(now, "left", f"{node} is gone", node=node)
                self._there.discard(node)
                self._knew.discard(node)
                self._active.pop(node, None)
                self._orders = {number: order for number, order in self._orders.items() if order.node != node}
            case Lost(node, model) if model in self._active.get(node, ()):
                self._active[node].discard(model)
                self._note(now, "lost", f"{model} on {node}: {LOST}", model, node)
            case Done(number, stage, _, took_s):
                self._done(number, stage, took_s, now)
            case Failed(number, _, _, reason):
                order = self._orders.pop(number, None)
                if order is not None:
                    why = f"{order.model} on {order.node}: {order.verb.value} failed: {reason}"
                    self._note(now, "failed", why, order.model, order.node, order.verb.value)

    def _done(self, number: int, stage: Stage, took_s: float, now: float) -> None:
        order = self._orders.pop(number, None)
        if order is None:
            return
        if stage is Stage.ACTIVE:
            self._active.setdefault(order.node, set()).add(order.model)
        why = f"{order.model} is {stage.value} on {order.node}, {order.verb.value} took {took_s:.2g} s"
        self._note(now, "done", why, order.model, order.node, order.verb.value)

    def _assigned(self, answer: Answer, event: Assigned, now: float) -> None:
        if answer.accepted:
            self._note(now, "decided", answer.why, node=event.node)

    def _decided(self, action: Action, now: float) -> None:
        match action:
            case Dispatch():
                pass
            case Order():
                if action.verb.ends:
                    self._orders[action.id] = action
                self._note(now, "order", action.why, action.model, action.node, action.verb.value)
            case Decided(subject, why) if subject in self._there:
                self._note(now, "decided", why, node=subject)
            case Decided(subject, why):
                self._note(now, "decided", why, subject)
            case Refuse(model, why):
                self._note(now, "refused", why, model)
            case Answer(model, True, why):
                self._note(now, "decided", why, model)

    def _note(self, now: float, kind: Kind, why: str, model: str = "", node: str = "", verb: str = "") -> None:
        self._last.append(
            Decision(time=now, term=self._term, kind=kind, model=model, node=node, verb=verb, why=why)
        )  # fmt: skip
