"""Questions between nodes on real sockets: answered, or not answered, and nobody waits for what will not come."""

from __future__ import annotations

import asyncio

import pytest
from wire_nodes import cut_control, node, until

from janus_server.orders import Answer, Asked, Wish
from janus_server.wire.frames import SIGHT_MOST_BYTES, Look, Question, Replied, Reply, Role, Sight
from janus_server.wire.questions import MOST_OPEN
from janus_server.wire.trouble import Trouble

WISH = Asked("m", Wish.LOAD, None, "a")


def answers(term: int, question: Question) -> Replied | None:
    if term != 3:
        return None
    return Sight(b"x" * SIGHT_MOST_BYTES) if isinstance(question, Look) else Answer(question.model, True, "yes")


async def test_each_question_gets_its_own_answer_however_long() -> None:
    async with node("a") as a, node("b") as b:
        b.station.on_question = answers
        asking = (await a.link(b.me)).asking
        found = await asyncio.gather(*(asking.ask(3, question, 20.0) for question in (Look(), WISH, Look(), WISH)))
        assert [type(one) for one in found] == [Sight, Answer, Sight, Answer]
        assert isinstance(found[0], Sight) and len(found[0].view) == SIGHT_MOST_BYTES
        assert found[1] == Answer("m", True, "yes")
        assert await asking.ask(2, WISH, 20.0) is None
        assert not len(asking._questions)


async def test_nobody_waits_for_a_link_that_is_not_there_or_breaks() -> None:
    async with node("a") as a, node("b") as b:
        link = await a.link(b.me)
        stuck = asyncio.Event()

        def never(term: int, question: Question) -> Replied | None:
            stuck.set()
            cut_control(b)
            return Answer("m", True, "too late")

        b.station.on_question = never
        async with asyncio.timeout(10):
            assert await link.asking.ask(1, WISH, 60.0) is None
        assert stuck.is_set()
        await b.listener.close()
        await until(lambda: link.state(Role.CONTROL) is not None)
        async with asyncio.timeout(1):
            assert await link.asking.ask(1, WISH, 60.0) is None


async def test_a_limit_ends_the_wait_and_a_late_answer_is_nobodys() -> None:
    async with node("a") as a, node("b") as b:
        link = await a.link(b.me)
        assert await link.asking.ask(1, WISH, 0.0) is None
        b.station.on_question = answers
        assert await link.asking.ask(3, WISH, 20.0) == Answer("m", True, "yes")
        assert link.state(Role.CONTROL) is None


async def test_only_so_many_are_open() -> None:
    async with node("a") as a, node("b") as b:
        b.station.on_question = answers
        asking = (await a.link(b.me)).asking
        found = await asyncio.gather(*(asking.ask(3, WISH, 20.0) for _ in range(MOST_OPEN + 5)))
        assert found.count(None) == 5


@pytest.mark.parametrize("reply", [Answer("m", True, "no sight"), "unasked"])
async def test_what_is_no_answer_ends_the_link(reply: Answer | str) -> None:
    async with node("a") as a, node("b") as b:
        link = await a.link(b.me)
        if isinstance(reply, Answer):
            b.station.on_question = lambda term, question: reply
            assert await link.asking.ask(1, Look(), 20.0) is None
        else:
            connection = next(iter(b.listener._servings.values())).control
            assert connection is not None
            connection.send(Reply(1 << 60, None))
        await until(lambda: ("b", Role.CONTROL, Trouble.GARBAGE) in a.troubles)
