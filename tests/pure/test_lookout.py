"""Ten who look cost what one does, and while nobody looks nothing is asked."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from janus_server.api.cluster import ApplicationView, Decision, LeaderView, NodeView, Spread
from janus_server.cluster import lookout
from janus_server.cluster.lookout import Lookout
from janus_server.cluster.party import Party
from janus_server.cluster.sight import Reached, Shown
from janus_server.operate import Operator


class Alone:
    """The little of a node and of its operator that is looked at."""

    name, where, pool_pages, free_pages, leaving = "n0", ("host", "rack"), 10, 4, False
    term, page_bytes, host_budget_bytes = 3, 64, 1000

    def __init__(self) -> None:
        self.reached = Reached()
        self.looked = 0

    def memory(self) -> dict[Any, int]:
        return {}

    def models(self) -> list[Any]:
        self.looked += 1
        return []

    def leading(self) -> LeaderView:
        return LeaderView(served={}, predictions={}, decisions=[])

    def decided(self) -> list[Decision]:
        return []


class Two:
    """Two other nodes; their views come when the test lets them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.past: list[bool] = []
        self.open = asyncio.Event()

    def names(self) -> list[str]:
        return ["n0", "n1", "n2"]

    def leader(self) -> str | None:
        return "n1"

    async def view(self, node: str, past: bool = False) -> NodeView:
        self.asked.append(node)
        self.past.append(past)
        await self.open.wait()
        return NodeView(node=node)

    async def close(self) -> None:
        pass


def looking(node: Alone, others: Two | None) -> Lookout:
    return Lookout(cast(Shown, node), cast(Operator, node), cast(Party | None, others))


async def test_who_looks_at_once_or_soon_shares_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    node, others = Alone(), Two()
    out = looking(node, others)
    await asyncio.sleep(0.02)
    assert others.asked == [] and node.looked == 0
    many = [asyncio.create_task(out.around()) for _ in range(10)]
    await asyncio.sleep(0.02)
    many.append(asyncio.create_task(out.around()))
    many[0].cancel()  # who leaves takes nobody's view away
    others.open.set()
    views = await asyncio.gather(*many[1:])
    assert others.asked == ["n1", "n2"] and node.looked == 1
    assert all(view is views[0] for view in views)
    assert [one.node for one in views[0].nodes] == ["n0", "n1", "n2"] and views[0].leader == "n1"
    assert await out.around() is views[0]
    monkeypatch.setattr(lookout, "SHARED_S", 0.0)
    assert await out.around() is not views[0]
    assert others.asked == ["n1", "n2"] * 2
    await out.close()


async def test_alone_it_leads_itself_and_what_others_are_told_is_kept_for_a_moment() -> None:
    node = Alone()
    out = looking(node, None)
    view = await out.around()
    assert (view.asked, view.leader, view.term, view.nodes[0].host) == ("n0", "n0", 3, "host")
    assert view.nodes[0].leads is not None
    before = node.looked
    assert out.own() == out.own() and node.looked == before + 1
    await out.close()


async def test_the_past_is_told_to_who_asks_for_it_and_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout, "STRETCH_S", 0.02)
    node, others = Alone(), Two()
    others.open.set()
    count = 0

    def counted() -> list[ApplicationView]:
        nonlocal count
        count += 1
        spread = Spread(bounds_s=[1.0], counts=[count, 0])
        return [ApplicationView(application="app", model="a", requests=count, ttft=spread, tpot=spread)]

    node.reached.applications = counted
    out = looking(node, others)
    while count < 5:
        await asyncio.sleep(0.01)
    first, plain = await out.around(past=True), await out.around()
    assert others.past == [True, True, False, False]
    past = first.nodes[0].past
    assert len(past) >= 5 and plain.nodes[0].past == []
    assert sum(one.requests for stretch in past for one in stretch.came) == first.nodes[0].applications[0].requests
    assert b'"came"' in out.own(past=True) and b'"came"' not in out.own()
    await out.close()
    count = 0
    await asyncio.sleep(0.1)
    assert count == 0, "a node that is closed writes nothing down"
