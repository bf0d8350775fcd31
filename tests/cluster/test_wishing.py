"""A wish's way to the leader where something is in the way: over real links, with an election that is told by hand."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from wire_nodes import cut_control, node

from janus_server.cluster.lead import Lead
from janus_server.cluster.meeting import Meeting
from janus_server.cluster.wishing import Wishing
from janus_server.coordinator.records import Leader, View
from janus_server.errors import Refused
from janus_server.orders import Answer, Asked, Wish, Wished
from janus_server.wire.frames import Question, Replied
from janus_server.wire.link import Link

WISH = Asked("m", Wish.LOAD, None, "a")
YES = Answer("m", True, "yes")


class Told:
    """What a meeting knows, as the test says."""

    def __init__(self) -> None:
        self.view = View()
        self.links: dict[str, Link] = {}
        self.lease_s = 1.0

    @property
    def term(self) -> int:
        return self.view.term

    def link(self, node: str) -> Link | None:
        return self.links.get(node)

    def leads_for_s(self) -> float:
        return self.lease_s

    def led_by(self, name: str, term: int) -> None:
        self.view = View(term=term, leader=Leader(name, "1"))


class Term:
    """A leader's term."""

    def __init__(self, term: int, listening: bool = False) -> None:
        self.term, self.listening = term, listening
        self.asked: list[Wished] = []

    def ask(self, event: Wished) -> Answer:
        self.asked.append(event)
        return YES


def wishing(told: Told, lead: Term | None = None) -> Wishing:
    return Wishing("a", cast(Meeting, told), lambda: cast("Lead | None", lead))


async def test_nobody_leads_and_it_says_so() -> None:
    with pytest.raises(Refused, match="no leader at the moment") as refused:
        await wishing(Told()).ask(WISH, 0.2)
    assert (refused.value.status, refused.value.code) == (503, "no_leader")


async def test_a_leader_without_a_link_is_named() -> None:
    told = Told()
    told.led_by("b", 3)
    with pytest.raises(Refused, match="b, which leads the cluster, does not answer"):
        await wishing(told).ask(WISH, 0.2)


async def test_a_leader_that_is_elected_meanwhile_answers() -> None:
    """Here, and on another node after the one asked first has broken its link."""
    told, lead = Told(), Term(4)
    asking = asyncio.create_task(wishing(told, lead).ask(WISH, 20.0))
    await asyncio.sleep(0.1)
    assert not asking.done()
    told.led_by("a", 4)
    assert await asking == YES and lead.asked == [WISH]
    async with node("a") as a, node("b") as b, node("c") as c:
        told.links = {"b": await a.link(b.me), "c": await a.link(c.me)}

        def breaks(term: int, question: Question) -> Replied | None:
            told.led_by("c", 6)
            cut_control(b)
            return None

        b.station.on_question = breaks
        c.station.on_question = lambda term, question: YES if (term, question) == (6, WISH) else None
        told.led_by("b", 5)
        assert await wishing(told).ask(WISH, 20.0) == YES


@pytest.mark.parametrize(
    ("term", "change"),
    [(3, {}), (5, {}), (4, {"listening": True}), (4, {"lease_s": 0.0}), (4, {"lead": None})],
    ids=["older", "newer", "listening", "lease over", "no lead"],
)
async def test_only_the_leader_of_that_term_answers(term: int, change: dict[str, Any]) -> None:
    told, lead = Told(), Term(4, change.get("listening", False))
    told.lease_s = change.get("lease_s", 1.0)
    assert wishing(told, None if "lead" in change else lead).answer(term, WISH) is None
    assert not lead.asked


async def test_names_of_another_node_are_bounded() -> None:
    lead = Term(4)
    answer = wishing(Told(), lead).answer(4, Asked("m" * 10_000, Wish.LOAD))
    assert answer is not None and not answer.accepted and len(answer.why) < 100
    assert not lead.asked
