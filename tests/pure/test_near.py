"""Whom a new leader waits for: itself in any case, also before it has read that it is registered again."""

from __future__ import annotations

from pathlib import Path

import pytest

from janus_server.cluster.meeting import Meeting, Place
from janus_server.coordinator.records import Member
from janus_server.duty import Awaited
from janus_server.orders import Busy, Event, Joined, KnownModel, Order, Report, Tick
from janus_server.sched.brain import Brain
from janus_server.sched.state import BrainSettings


def test_a_node_is_near_itself_and_near_what_it_is_linked_to(tmp_path: Path) -> None:
    meeting = Meeting(Place(node="n0", join=str(tmp_path)), None)  # type: ignore[arg-type]
    assert meeting.names() == [] and meeting.near() == ["n0"]
    meeting._met["n1"] = Member(name="n1", incarnation="p", url="ws://h:1")
    assert meeting.near() == ["n0", "n1"]


@pytest.mark.parametrize("awaited", [True, False])
def test_nodes_that_join_at_once_are_planned_for_together(awaited: bool) -> None:
    """What the second of them serves looks, before it has said so, as if it were nowhere."""
    brain, now = Brain(BrainSettings(), 2), 100.0
    known = tuple(
        KnownModel(model=name, weight_pages=4, host_bytes=1, longest_pages=2, preload=False, attain=0.9)
        for name in "ab"
    )
    up = {name: Busy(2, 0, 0.0) for name in "ab"}
    events: list[Event] = [Awaited(("n0", "n1"))] if awaited else []
    events += [Joined("n1", 100, 0, known), Report("n1", {}), Joined("n0", 100, 0, known), Report("n0", up)]
    orders = [action for event in events for action in brain.on(event, now) if isinstance(action, Order)]
    for _ in range(8):
        now += 0.5
        orders += [action for action in brain.on(Tick(), now) if isinstance(action, Order)]
    assert (orders == []) is awaited


def test_a_node_that_never_reports_is_waited_for_a_second() -> None:
    brain = Brain(BrainSettings(), 2)
    known = (KnownModel(model="a", weight_pages=4, host_bytes=1, longest_pages=2, preload=False, attain=0.9),)
    events: list[Event] = [
        Awaited(("n0", "n1")),
        Joined("n1", 100, 0, known),
        Joined("n0", 100, 0, known),
        Report("n1", {}),
    ]
    assert not [action for event in events for action in brain.on(event, 100.0) if isinstance(action, Order)]
    due_s = brain.next_wake(100.0)
    assert due_s is not None and due_s <= 101.0
    later = [action for half_s in range(8) for action in brain.on(Tick(), 101.0 + half_s / 2)]
    assert [action for action in later if isinstance(action, Order)]
