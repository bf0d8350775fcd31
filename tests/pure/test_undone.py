"""What a change of leader undoes has an end, or whoever looks on would see it go on; and what it must not undo."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from janus_server.cluster.follow import UNDONE, Follower
from janus_server.duty import Charge, Duty
from janus_server.orders import Action, Done, Event, Failed, Joined, KnownModel, Order, Report, Stage, Verb
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


class Standing:
    """Models that stand still."""

    def __init__(self) -> None:
        self.residents = {"m": SimpleNamespace(stage=Stage.ACTIVE), "n": SimpleNamespace(stage=Stage.COLD)}

    def has_copy(self, model: str) -> bool:
        return False

    def report(self, node: str) -> Report:
        return Report(node, {})


def test_every_leader_is_told_what_is_pinned() -> None:
    known = tuple(KnownModel(model=m, weight_pages=1, host_bytes=1, longest_pages=1, pinned=m == "n") for m in "mn")
    follower = Follower("n0", Standing(), 9, 9, ("h", "d"), lambda: known, print, print)  # type: ignore[arg-type]

    def pinned() -> dict[str, bool]:
        joined = follower.introduction()[0]
        assert isinstance(joined, Joined)
        return {one.model: one.pinned for one in joined.models}

    assert pinned() == {"m": False, "n": True}
    follower.pinned("m", True)
    follower.pinned("n", False)
    assert pinned() == {"m": True, "n": False} == pinned()


def test_every_leader_is_told_the_last_that_an_operator_wished() -> None:
    """What an older leader still says changes nothing."""
    follower = Follower("n0", Standing(), 9, 9, ("h", "d"), tuple, print, print)  # type: ignore[arg-type]

    def told() -> Joined:
        joined = follower.introduction()[0]
        assert isinstance(joined, Joined)
        return joined

    process = told().process
    assert (told().duty, told().since) == (Duty.SERVE, (0, 0)) and process
    for charge in (Charge(Duty.FORCE, (2, 1)), Charge(), Charge(Duty.SERVE, (1, 7))):
        follower.assigned(charge)
        assert (told().duty, told().since, told().process) == (Duty.FORCE, (2, 1), process)
    follower.assigned(Charge(Duty.SERVE, (3, 1)))
    assert (told().duty, told().since) == (Duty.SERVE, (3, 1))
