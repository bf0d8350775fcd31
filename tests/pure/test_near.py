"""Whom a new leader waits for: itself in any case, also before it has read that it is registered again."""

from __future__ import annotations

from pathlib import Path

from janus_server.cluster.meeting import Meeting, Place
from janus_server.coordinator.records import Member


def test_a_node_is_near_itself_and_near_what_it_is_linked_to(tmp_path: Path) -> None:
    meeting = Meeting(Place(node="n0", join=str(tmp_path)), None)  # type: ignore[arg-type]
    assert meeting.names() == [] and meeting.near() == ["n0"]
    meeting._met["n1"] = Member(name="n1", incarnation="p", url="ws://h:1")
    assert meeting.near() == ["n0", "n1"]
