"""The leader's own Brain with a part of it taken away, so that what the part brings can be measured.

`policies` makes them. Each differs from the Brain by settings, or by a wrapper that changes its orders on the way out
without its knowing; where neither can be done honestly, the ablation is refused by name and not imitated.
"""

from __future__ import annotations

import msgspec

from janus_server.orders import Action, Done, Event, Failed, Left, Lost, Order, Verb
from janus_server.sched.brain import Brain
from janus_server.sched.oracle_records import FitRequest
from janus_server.sched.source import Link
from janus_server.sched.state import BrainSettings

# So slow that no plan counts on it.
_NEVER = Link(0.283, 1.0, 1.0)


def without_forks(settings: BrainSettings) -> BrainSettings:
    """Its plans are made as if no node could feed another."""
    links = msgspec.structs.replace(settings.fleet.links, near=_NEVER, far=_NEVER)
    return msgspec.structs.replace(settings, fleet=msgspec.structs.replace(settings.fleet, links=links))


class HostOnly:
    """The Brain without copies from device to device: what it would still fork is read from the host's copy, or from
    the checkpoint where the host has none. It plans with links on which a fork is never the quickest way."""

    def __init__(self, brain: Brain) -> None:
        self._brain = brain
        self._copies: dict[str, dict[str, None]] = {}
        self._open: dict[int, tuple[str, str]] = {}

    def on(self, event: Event, now: float) -> list[Action]:
        match event:
            case Done(order, _, copy) | Failed(order, _, copy) if order in self._open:
                self._note(*self._open.pop(order), copy)
            case Lost(node, model, _, copy):
                self._note(node, model, copy)
            case Left(node):
                self._copies.pop(node, None)
            case _:
                pass
        return [self._changed(action) for action in self._brain.on(event, now)]

    def next_wake(self, now: float) -> float | None:
        return self._brain.next_wake(now)

    def fit_request(self, model: str) -> FitRequest | None:
        """What a `Refit` of the Brain wants fitted."""
        return self._brain.fit_request(model)

    def _note(self, node: str, model: str, copy: bool) -> None:
        held = self._copies.setdefault(node, {})
        held.pop(model, None)
        if copy:
            held[model] = None

    def _changed(self, action: Action) -> Action:
        if not isinstance(action, Order) or not action.verb.ends:
            return action
        self._open[action.id] = (action.node, action.model)
        if action.verb is not Verb.FORK:
            return action
        verb = Verb.WAKE if action.model in self._copies.get(action.node, ()) else Verb.LOAD
        return msgspec.structs.replace(action, verb=verb, source=None, why=f"{action.why}; not copied from a device")
