"""An order that a change of leader undoes has an end: whoever looks on would see it go on for ever otherwise."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from janus_server.cluster.follow import UNDONE, Follower
from janus_server.orders import Action, Done, Event, Failed, Order, Stage, Verb
from janus_server.watch import Watch


class Slow:
    """Models whose orders never end by themselves."""

    def __init__(self) -> None:
        flow = SimpleNamespace(open=True)
        self.residents = {"m": SimpleNamespace(stage=Stage.COLD, flow=flow)}
        self.begun = asyncio.Event()

    def has_copy(self, model: str) -> bool:
        return False

    async def obey(self, order: Order) -> Done:
        self.begun.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_an_order_that_is_undone_is_under_way_no_more() -> None:
    slow, watch, seen = Slow(), Watch(), list[Event | Action]()

    def see(news: Event | Action) -> None:
        seen.append(news)
        watch.see(news)

    follower = Follower("n0", slow, 1, 1, ("h", "d"), tuple, lambda told: None, see)  # type: ignore[arg-type]
    order = Order(term=1, id=7, node="n0", model="m", verb=Verb.LOAD, why="why")
    follower.obey(order)
    await slow.begun.wait()
    assert watch.under_way("m") is not None
    await follower.calm()
    assert watch.under_way("m") is None and watch.trouble("m") == UNDONE
    assert seen == [order, Failed(7, Stage.COLD, False, UNDONE)]
