"""Simulated time: what is to happen when, and the devices' part of it.

Everything that takes time is put down here as a function and its argument; `world` goes from one to the next. At the
same moment, what was put down first comes first, so that a run is the same each time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .records import Call, Emit

if TYPE_CHECKING:
    from .cluster import Node


# A device that was just asked is not asked again before this has passed: one that never ends would stop the clock.
_LEAST_S = 1e-6


class Agenda:
    """now is the moment that is being lived through."""

    __slots__ = ("_entries", "_number", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._number = 0

    def at(self, when_s: float, do: Callable[[Any], None], thing: Any) -> None:
        """Never earlier than now."""
        self._number += 1
        heapq.heappush(self._entries, (max(when_s, self.now), self._number, do, thing))

    def next_s(self) -> float | None:
        return self._entries[0][0] if self._entries else None

    def step(self) -> None:
        """Do what is due next."""
        self.now, _, do, thing = heapq.heappop(self._entries)
        do(thing)


class Pulse:
    """Lets devices go on: up to now before anything about them changes, and when something will have happened.

    emitted(node, emits) is told what they did. changed are the nodes of which anything may have changed since somebody
    took them from there, worked those that did any work.
    """

    def __init__(self, agenda: Agenda, emitted: Callable[[Node, Sequence[Emit]], None]) -> None:
        self._agenda, self._emitted = agenda, emitted
        self.changed: dict[Node, None] = {}
        self.worked: dict[Node, None] = {}

    def up(self, node: Node, model: str) -> None:
        self._advance(node)
        node.device.up(model, self._agenda.now)
        self._await(node)

    def down(self, node: Node, model: str) -> list[int]:
        """Ids of the calls that it had begun and not ended."""
        self._advance(node)
        lost = node.device.down(model, self._agenda.now)
        node.running.pop(model, None)
        self._await(node)
        return lost

    def begin(self, node: Node, calls: Sequence[Call], model: str) -> None:
        self._advance(node)
        for call in calls:
            node.device.begin(call, model, self._agenda.now)
        node.running[model] = node.running.get(model, 0) + len(calls)
        self._await(node)

    def slow(self, node: Node, factor: float) -> None:
        self._advance(node)
        node.device.slow(factor, self._agenda.now)
        self._await(node)

    def _advance(self, node: Node) -> None:
        self.changed[node] = self.worked[node] = None
        emits = node.device.advance(self._agenda.now)
        if emits:
            self._emitted(node, emits)

    def _await(self, node: Node, least_s: float = 0.0) -> None:
        due_s = node.device.next_s(self._agenda.now)
        if due_s is not None and due_s < least_s:
            due_s = least_s
        if due_s != node.due_s:
            node.due_s = due_s
            if due_s is not None:
                self._agenda.at(due_s, self._due, (node, due_s))

    def _due(self, thing: tuple[Node, float]) -> None:
        node, due_s = thing
        if node.alive and node.due_s == due_s:  # otherwise it was put off, or brought forward
            node.due_s = None
            self._advance(node)
            self._await(node, self._agenda.now + _LEAST_S)
