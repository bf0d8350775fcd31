"""What the leader of a live cluster was told and decided, from its journals: nodes, replicas over time, orders.

Times are seconds on the machine's monotonic clock, which all of its processes share. `live_run` reads a run's journals
when its nodes have ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from janus_server.errors import BadConfig
from janus_server.orders import Action, Done, Event, Failed, Joined, Left, Lost, Observed, Order, Stage
from janus_server.sched.oracle_records import Subject
from janus_server.sched.state import BrainSettings


class _Heading(msgspec.Struct, tag="heading"):
    """What is of interest of a journal's first line."""

    settings: BrainSettings


class _Entry(msgspec.Struct, tag="entry"):
    now: float
    event: Event
    actions: tuple[Action, ...]


class Moved(NamedTuple):
    """A model came to stand somewhere else on a node."""

    at_s: float
    node: str
    model: str
    stage: Stage


class Ordered(NamedTuple):
    """An order for weights to move: when it was given and when it ended, None where that was never told."""

    at_s: float
    end_s: float | None
    node: str
    model: str
    verb: str
    why: str
    failed: str = ""


class Told(NamedTuple):
    """joined are the nodes as they presented themselves first, settings those of the Brain; lessons: when it was told
    how models run here."""

    joined: tuple[Joined, ...]
    joined_s: float
    settings: BrainSettings
    moved: tuple[Moved, ...]
    ordered: tuple[Ordered, ...]
    lessons: tuple[tuple[float, dict[str, Subject]], ...]
    terms: int


def told(journals: Sequence[Path]) -> Told:
    """Of all terms together."""
    terms = [_Term(path) for path in journals]
    terms = sorted((term for term in terms if term.joined), key=lambda term: term.joined_s)
    if not terms:
        raise BadConfig(f"no journal tells of any node: {', '.join(map(str, journals)) or 'there is none'}")
    first = terms[0]
    moved = sorted((one for term in terms for one in term.moved), key=lambda one: one.at_s)
    ordered = sorted((one for term in terms for one in term.ordered()), key=lambda one: one.at_s)
    nodes = tuple(sorted(first.joined.values(), key=lambda one: one.node))
    lessons = tuple(lesson for term in terms for lesson in term.lessons)
    return Told(nodes, first.joined_s, first.settings, tuple(moved), tuple(ordered), lessons, len(terms))


class _Term:
    """One journal, read to its end."""

    def __init__(self, path: Path) -> None:
        self.settings = BrainSettings()
        self.joined: dict[str, Joined] = {}
        self.joined_s = 0.0
        self.moved: list[Moved] = []
        self.lessons: list[tuple[float, dict[str, Subject]]] = []
        self._orders: dict[int, Ordered] = {}
        decoder = msgspec.json.Decoder(_Heading | _Entry)
        for text in path.read_bytes().splitlines():
            try:
                line = decoder.decode(text)
            except msgspec.DecodeError as error:
                raise BadConfig(f"{path} is no journal: {error}") from None
            if isinstance(line, _Heading):
                self.settings = line.settings
            else:
                self._entry(line)

    def ordered(self) -> Iterator[Ordered]:
        return iter(self._orders.values())

    def _entry(self, entry: _Entry) -> None:
        now = entry.now
        match entry.event:
            case Joined():
                if not self.joined:
                    self.joined_s = now
                self.joined.setdefault(entry.event.node, entry.event)
            case Done(order, stage) | Failed(order, stage) if order in self._orders:
                given = self._orders[order]
                reason = entry.event.reason if isinstance(entry.event, Failed) else ""
                self._orders[order] = given._replace(end_s=now, failed=reason)
                self.moved.append(Moved(now, given.node, given.model, stage))
            case Observed(subjects=subjects) if subjects:
                self.lessons.append((now, subjects))
            case Lost(node, model, stage):
                self.moved.append(Moved(now, node, model, stage))
            case Left(node):
                models = {one.model for one in self.moved if one.node == node}
                self.moved += [Moved(now, node, model, Stage.COLD) for model in sorted(models)]
            case _:
                pass
        for action in entry.actions:
            if isinstance(action, Order) and action.verb.ends:
                self._orders[action.id] = Ordered(now, None, action.node, action.model, action.verb.value, action.why)
