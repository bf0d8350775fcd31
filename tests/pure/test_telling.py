"""What a node tells its leader: everything once, then what changes, and everything again where that went wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from janus_server.cluster import telling as module
from janus_server.cluster.follow import Follower
from janus_server.cluster.front import Front
from janus_server.cluster.meeting import Meeting
from janus_server.cluster.prefixes import Prefixes
from janus_server.cluster.telling import Telling
from janus_server.coordinator.records import Leader, View
from janus_server.orders import Counted, Counts, Joined, Report, Ticket, Traffic
from janus_server.sched.prefixes import Cached
from janus_server.wire.frames import Told


def ticket(name: str) -> Ticket:
    return Ticket(id=name, model="m", prompt_tokens=4, work_s=0.1, arrived_s=0.0)


class Asking:
    """The way to a leader of another process, which may be full."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, list[Told]]] = []
        self.full = False
        self.forgotten = 0

    def tell(self, term: int, events: Sequence[Told]) -> bool:
        if not self.full:
            self.heard.append((term, list(events)))
        return not self.full

    def forget_told(self) -> None:
        self.forgotten += 1


class Here:
    """All that a Telling looks at of its node: the cluster, the front and the follower."""

    incarnation = "i"

    def __init__(self) -> None:
        self.view, self.term = View(leader=None), 0
        self.asking = Asking()
        self.waiting: list[Ticket] = []
        self.busy: Report | None = None
        self.calmed = 0
        self.counts: dict[str, Counts] = {}
        self.own: list[Told] = []

    def led(self, by: str, term: int) -> None:
        self.view, self.term = View(leader=Leader(name=by, incarnation="j")), term

    def link(self, node: str) -> Here:
        return self

    def take(self) -> Traffic | None:
        taken, self.waiting = self.waiting, []
        return Traffic(tuple(taken)) if taken else None

    def tickets(self) -> tuple[Ticket, ...]:
        taken, self.waiting = self.waiting, []
        return tuple(taken)

    async def calm(self) -> None:
        self.calmed += 1

    def introduction(self) -> list[Told]:
        return [Joined("n0", 10, 0, ())]

    def report(self) -> Report | None:
        return self.busy

    def hear(self, node: str, term: int, events: Sequence[Told]) -> None:
        self.own.extend(events)

    def telling(self) -> Telling:
        one: Any = self
        made = Telling("n0", cast(Meeting, one), cast(Front, one), Prefixes(lambda: b"k"))
        made.open(cast(Follower, one), lambda: self.counts, self.hear)
        return made


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


FIRST: list[Told] = [Joined("n0", 10, 0, ()), Cached("n0", afresh=True), Traffic(())]


async def test_before_anybody_leads_nothing_is_told_and_then_all_that_waits() -> None:
    here = Here()
    telling = here.telling()
    here.waiting.append(ticket("a"))
    telling.traffic()
    telling.present()
    await turns()
    assert here.asking.heard == [] and here.waiting == [ticket("a")]
    here.led("n1", 4)
    telling.present()
    telling.present()
    await turns()
    ((term, events),) = here.asking.heard
    assert term == 4 and here.calmed == 1 and [type(one) for one in events] == [Joined, Cached, Traffic]
    assert isinstance(events[2], Traffic) and [one.id for one in events[2].arrived] == ["a"]
    await telling.close()


async def test_calls_of_one_turn_are_told_together() -> None:
    here = Here()
    here.led("n1", 1)
    telling = here.telling()
    telling.present()
    await turns()
    here.asking.heard.clear()
    for name in "ab":
        here.waiting.append(ticket(name))
        telling.traffic()
    await turns()
    ((_, (traffic,)),) = here.asking.heard
    assert isinstance(traffic, Traffic) and [one.id for one in traffic.arrived] == ["a", "b"]


async def test_a_beat_tells_what_changed_and_a_new_term_hears_all_of_it() -> None:
    here = Here()
    here.led("n0", 1)  # this node itself
    telling = here.telling()
    telling.present()
    await turns()
    assert here.own == FIRST
    here.own.clear()
    here.counts = {"m": Counts(1, 1)}
    for _ in range(3):
        telling.beat()
        await turns()
    assert here.own == [Counted({"m": Counts(1, 1)})]
    here.busy = Report("n0", {})
    telling.beat()
    assert here.own[1:] == [here.busy]
    here.own.clear()
    here.busy = None
    here.led("n0", 2)
    telling.beat()  # a term that nothing was told yet: dropped
    assert here.own == []
    await turns()
    telling.beat()
    assert here.own == [*FIRST, Counted({"m": Counts(1, 1)})] and here.calmed == 2


async def test_a_leader_that_misses_something_hears_everything_again() -> None:
    here = Here()
    here.led("n1", 1)
    telling = here.telling()
    telling.present()
    await turns()
    here.asking.heard.clear()
    here.asking.full = True
    telling.tell([Report("n0", {})])
    here.asking.full = False
    telling.tell([Report("n0", {})])
    assert here.asking.forgotten == 1 and here.asking.heard == []
    telling.beat()
    await turns()
    assert here.asking.heard == [(1, FIRST)]


async def test_a_leader_that_does_not_know_this_node_hears_everything_again_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Here()
    here.led("n1", 1)
    telling = here.telling()
    telling.present()
    await turns()
    telling.unknown()
    await turns()
    assert len(here.asking.heard) == 1
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    telling.unknown()
    await turns()
    assert here.asking.heard[1:] == [(1, FIRST)]
