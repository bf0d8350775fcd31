"""A policy that imitates another system: its rule says which replicas there are, its front desk who gets which request.

The world drives it as it drives the leader's Brain. It only tells yard, rule and desk of events in the right order;
what makes a system that system is in its rule (`static`, `serverlessllm`, `prism`, `blitzscale`, `llumnix`). Pure.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

from janus_server.orders import Action, Counted, Event, Joined, Ticket, Traffic, Wanted

from .frontdesk import Desk
from .yard import Yard

# All nodes join at the same moment, and say what they have: who decided at the first of them would plan for a cluster
# of one, or on pages of models that a leader before this one brought up.
_SETTLE_S: Final = 0.01


class Rule(Protocol):
    """Which replicas there are."""

    period_s: float

    def came(self, tickets: tuple[Ticket, ...], now: float) -> None:
        """Requests came, and wait at the desk."""

    def wanted(self, model: str, now: float) -> None:
        """The world says that somebody waits for a model which nobody serves."""

    def counted(self, event: Counted, now: float) -> None: ...

    def turned(self, now: float) -> None:
        """Replicas came or went, or nodes did."""

    def round(self, now: float) -> bool:
        """Once a period; False where nothing is left that time alone could change."""


class Baseline:
    """A `Policy` of three parts. Rounds stop where nothing happens, so that a world can come to its end."""

    def __init__(self, yard: Yard, desk: Desk, rule: Rule) -> None:
        self.yard, self.desk, self.rule = yard, desk, rule
        self._due_s = self._settled_s = math.inf
        self._last_s = -math.inf
        self._early: list[Ticket] = []

    def on(self, event: Event, now: float) -> list[Action]:
        yard = self.yard
        actions: list[Action] = []
        yard.actions = actions
        if type(event) is Traffic:
            self.desk.hear(event, now)
            if event.arrived and now < self._settled_s:
                self._early += event.arrived
            elif event.arrived:
                self.rule.came(event.arrived, now)
                self._arm(now)
        else:
            self._hear(event, now)
        if yard.due_s() <= now:
            yard.retry(now)
        if self._due_s <= now:
            self._last_s, self._due_s = now, math.inf
            if self._early:
                early, self._early = tuple(self._early), []
                self.rule.came(early, now)
            if self.rule.round(now):
                self._arm(now)
        if yard.changed or yard.refused or yard.moved:
            self._tell(now)
        self.desk.hand_over(now, actions)
        return actions

    def next_wake(self, now: float) -> float | None:
        due_s = min(self._due_s, self.yard.due_s(), self.desk.due_s(now))
        return None if due_s == math.inf else max(due_s, now)

    def _hear(self, event: Event, now: float) -> None:
        self.yard.hear(event, now)
        match event:
            case Joined():
                self._settled_s = min(self._settled_s, now + _SETTLE_S)
                self._arm(now)
            case Counted():
                self.rule.counted(event, now)
                self._arm(now)
            case Wanted(model) if now >= self._settled_s:
                self.rule.wanted(model, now)
                self._arm(now)
            case _:
                pass

    def _arm(self, now: float) -> None:
        self._due_s = min(self._due_s, max(now, self._last_s + self.rule.period_s, self._settled_s))

    def _tell(self, now: float) -> None:
        """What the yard has noted since: until nothing follows from it."""
        yard = self.yard
        for replica in yard.moved:
            self.desk.moved(replica)
        yard.moved.clear()
        if yard.changed:
            self._arm(now)
        while yard.changed or yard.refused:
            changed, refused = list(yard.changed), list(yard.refused)
            yard.changed.clear()
            yard.refused.clear()
            for model in refused:
                self.desk.dropped(model)
            for model in changed:
                self.desk.changed(model)
            if changed and now >= self._settled_s:
                self.rule.turned(now)
