"""When a node that joins a cluster stands for election, and when its start is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
import pytest

from janus_server.cluster.joining import joined
from janus_server.cluster.outsider import PATIENCE_S, Outsider
from janus_server.coordinator.records import Leader, Member, View
from janus_server.errors import BadConfig
from janus_server.wire.frames import Role, Table
from janus_server.wire.trouble import Trouble


def member(name: str) -> Member:
    return Member(name=name, incarnation="i", url="ws://127.0.0.1:1")


class Link:
    """To another node."""

    def __init__(self, trouble: Trouble | None) -> None:
        self.trouble = trouble

    def state(self, role: Role) -> Trouble | None:
        return self.trouble


class Meeting:
    """What `joined` asks of the real one; view is what the coordinator shows."""

    node = "new"

    def __init__(self, others: Sequence[str], *, leader: str | None = None, term: int = 0) -> None:
        there = tuple(member(name) for name in sorted([*others, self.node]))
        self.view = View(term=term, leader=None if leader is None else Leader(leader, "i"), members=there)
        self.stood_s: float | None = None
        self.release: str | None = None
        self.links: dict[str, Link] = {}

    def link(self, node: str) -> Link | None:
        return self.links.get(node)

    def names(self) -> list[str]:
        return [one.name for one in self.view.members]

    def foreign(self) -> str | None:
        return self.release

    def stand(self) -> None:
        assert self.stood_s is None
        self.stood_s = time.monotonic()


class Start:
    """`joined` under way; table and refused are what the leader said."""

    def __init__(self, meeting: Meeting, awaited: Sequence[str] = ()) -> None:
        self.table: Table | None = None
        self.refused = ""
        self.began_s = time.monotonic()
        self.task = asyncio.create_task(
            joined(meeting, awaited, lambda: self.table, lambda: self.refused)  # type: ignore[arg-type]
        )

    async def over(self) -> None:
        async with asyncio.timeout(5):
            await self.task

    async def goes_on(self) -> None:
        await asyncio.sleep(0.2)
        assert not self.task.done()


KNOWN = Table(1, {"a": ("n0",)}, ("n0", "new"))


async def test_where_somebody_leads_it_stands_once_it_is_taken_in() -> None:
    meeting = Meeting(["n0"], leader="n0", term=4)
    start = Start(meeting, ["a"])
    await start.goes_on()
    start.table = Table(1, {"a": ("n0",)}, ("n0",))  # which tells it to present itself
    await start.goes_on()
    assert meeting.stood_s is None
    start.table = KNOWN
    await start.over()
    assert meeting.stood_s is not None


@pytest.mark.parametrize(("others", "term"), [([], 0), ([], 7), (["n0", "n1"], 0)])
async def test_where_it_is_alone_or_nobody_ever_led_it_stands_at_once(others: list[str], term: int) -> None:
    meeting = Meeting(others, term=term)
    start = Start(meeting)
    await start.goes_on()
    assert meeting.stood_s is not None
    start.task.cancel()


async def test_where_others_are_about_to_elect_one_it_leaves_that_to_them() -> None:
    meeting = Meeting(["n0", "n1"], term=7)
    start = Start(meeting)
    await start.goes_on()
    assert meeting.stood_s is None
    meeting.view = msgspec.structs.replace(meeting.view, leader=Leader("n1", "i"), term=8)
    await start.goes_on()
    assert meeting.stood_s is None
    meeting.view = msgspec.structs.replace(meeting.view, leader=None)
    vacant_s = time.monotonic()
    async with asyncio.timeout(5):
        while meeting.stood_s is None:
            await asyncio.sleep(0.01)
    assert meeting.stood_s - vacant_s >= 0.9  # they did not
    start.task.cancel()


@pytest.mark.parametrize("why", ["refused", "release"])
async def test_what_the_cluster_does_not_take_never_stands(why: str) -> None:
    meeting = Meeting(["n0"], leader="n0", term=1)
    start = Start(meeting)
    await start.goes_on()
    setattr(start if why == "refused" else meeting, why, "not of us")
    with pytest.raises(BadConfig, match="not of us"):
        await start.over()
    assert meeting.stood_s is None


async def test_a_node_that_is_turned_away_leads_nobody_while_the_others_are_away() -> None:
    meeting = Meeting(["n0"], leader="n0", term=1)
    meeting.links["n0"] = Link(Trouble.DELAYED)
    start = Start(meeting)
    await start.goes_on()
    meeting.view = View(term=1, leader=None, members=(member("new"),))
    await asyncio.sleep(1.3)  # where it is alone it would stand at once, and beside others after a second
    assert meeting.stood_s is None
    meeting.view = View(term=2, leader=Leader("n0", "i"), members=(member("n0"), member("new")))
    meeting.links["n0"].trouble = Trouble.SECRET
    with pytest.raises(BadConfig, match="n0, which leads, cannot be linked to: the cluster secret is not the same"):
        await start.over()
    assert meeting.stood_s is None


@pytest.mark.parametrize("why", [Trouble.SECRET, Trouble.DELAYED, Trouble.TLS])
def test_whom_a_leader_turned_away_it_is_until_a_link_opens_or_it_gives_up(why: Trouble) -> None:
    outsider = Outsider()
    outsider.look({"n0": why}, "n0", 1.0)
    assert outsider.barred
    assert outsider.look({}, None, 2.0) is None and outsider.barred
    assert outsider.look({"n0": Trouble.NOBODY}, None, 2.0 + PATIENCE_S) is None and outsider.barred
    assert why.sentence in (outsider.look({}, None, 2.1 + PATIENCE_S) or "")
    outsider = Outsider()
    outsider.look({"n0": why}, "n0", 1.0)
    assert outsider.look({"n0": None}, "n0", 2.0) is None and not outsider.barred


def test_a_stranger_among_others_keeps_nobody_from_standing_whom_the_others_know() -> None:
    outsider = Outsider()
    assert outsider.look({"x": Trouble.SECRET}, None, 1.0) is None and outsider.barred  # either may be the stranger
    assert outsider.look({"x": Trouble.SECRET, "n0": Trouble.NO_ANSWER}, None, 2.0) is None and outsider.barred
    assert outsider.look({"x": Trouble.SECRET, "n0": None}, None, 3.0) is None and not outsider.barred
    assert outsider.look({"x": Trouble.SECRET, "n0": None}, None, 4.0 + PATIENCE_S) is None
    assert outsider.look({}, None, 5.0 + PATIENCE_S) is None and not outsider.barred
    assert outsider.look({"x": Trouble.SECRET}, None, 20.0) is None
    assert "node x cannot be" in (outsider.look({"x": Trouble.SECRET}, None, 20.1 + PATIENCE_S) or "")


@pytest.mark.parametrize("why", [Trouble.NO_ANSWER, Trouble.NOBODY, Trouble.GONE, Trouble.PEER, Trouble.SILENT])
def test_nodes_that_are_only_away_bar_nobody(why: Trouble) -> None:
    outsider = Outsider()
    for now_s in (1.0, 2.0 + PATIENCE_S):
        assert outsider.look({"n0": why}, "n0", now_s) is None and not outsider.barred
    assert outsider.look({"n0": why}, None, 3.0 + PATIENCE_S) is None and not outsider.barred


async def test_a_start_waits_for_what_is_loaded_and_not_for_what_rests() -> None:
    meeting = Meeting([])
    start = Start(meeting, ["a", "b", "c"])
    start.table = msgspec.structs.replace(KNOWN, routes={"a": ("n0",), "b": (), "c": ()}, resting=("c",))
    await start.goes_on()
    start.table = msgspec.structs.replace(start.table, routes={"a": ("n0",), "b": ("new",), "c": ()})
    await start.over()
