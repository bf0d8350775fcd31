"""A node that the coordinator misses is given up when its link dies or in a while, unless the same process is back."""

from __future__ import annotations

import asyncio

import pytest

from janus_server.cluster.missed import Missed
from janus_server.coordinator.records import Member

SHORT_S = 0.3  # three looks


def member(incarnation: str = "p", url: str = "ws://h:1") -> Member:
    return Member(name="n1", incarnation=incarnation, url=url)


class World:
    """A link that lives until the test says otherwise, and who was given up."""

    def __init__(self, grace_s: float = 60.0) -> None:
        self.alive = True
        self.parted: list[str] = []
        self.missed = Missed(lambda node: self.alive, self._part, grace_s)

    async def _part(self, one: Member) -> None:
        await asyncio.sleep(0)
        self.parted.append(one.incarnation)

    async def until_parted(self) -> None:
        while not self.parted:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("again", ["p.1", "p"])
async def test_the_same_process_comes_back_and_nothing_was_given_up(again: str) -> None:
    world = World()
    assert await world.missed.miss(member())
    assert await world.missed.back(member(again))
    await world.missed.close()
    assert world.parted == [] and not await world.missed.back(member("p.2"))


@pytest.mark.parametrize("other", [member("q"), member("pp.1"), member("p.1", "ws://h:2")])
async def test_another_process_or_place_is_another_node(other: Member) -> None:
    world = World()
    assert await world.missed.miss(member())
    assert not await world.missed.back(other)
    assert world.parted == ["p"]
    await world.missed.close()
    assert world.parted == ["p"]


async def test_without_a_link_it_is_given_up_at_once() -> None:
    world = World()
    world.alive = False
    assert not await world.missed.miss(member())
    assert world.parted == ["p"] and not await world.missed.back(member("p.1"))


async def test_a_link_that_dies_meanwhile_ends_the_waiting() -> None:
    """The grace of a minute is not waited for."""
    world = World()
    await world.missed.miss(member())
    await asyncio.sleep(0.05)
    assert world.parted == []
    world.alive = False
    world.missed.look("n1")
    world.missed.look("n2")
    await world.until_parted()
    assert world.parted == ["p"] and not await world.missed.back(member("p.1"))
    await world.missed.close()


async def test_in_a_while_it_is_given_up_although_its_link_lives() -> None:
    world = World(SHORT_S)
    await world.missed.miss(member())
    await world.until_parted()
    assert world.parted == ["p"] and not await world.missed.back(member("p.1"))


async def test_who_is_missed_again_is_waited_for_anew() -> None:
    """What waited the first time has nothing to say of the second."""
    world = World(SHORT_S)
    for times in range(4):
        assert await world.missed.miss(member(f"p.{times}"))
        await asyncio.sleep(SHORT_S / 2)
        assert await world.missed.back(member(f"p.{times + 1}"))
    await asyncio.sleep(2 * SHORT_S)
    assert world.parted == []
    await world.missed.close()
