"""Questions to one other process that are answered at once or not at all, over whichever connection is open just now.

`asking` has one for each process. Nothing is repeated: where the connection breaks, or no answer comes in time, there
is none, and whoever asked decides whether to ask again. Lives on the loop; decides nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from janus_server.orders import Answer
from janus_server.wire.frames import Ask, Look, Question, Replied, Reply, Sight
from janus_server.wire.trouble import Trouble

if TYPE_CHECKING:
    from janus_server.wire.connection import Connection

# Whoever looks shares what is seen, and wishes are a person's: more are a fault.
MOST_OPEN: Final = 256


class Questions:
    """Those that wait for their answer."""

    def __init__(self, first: int) -> None:
        """first is where its numbers begin."""
        self._next = first
        self._open: dict[int, tuple[Question, asyncio.Future[Replied | None]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def ask(self, connection: Connection | None, term: int, question: Question, limit_s: float) -> Replied | None:
        """The answer; None where there is none in that time, or the other has nothing to say to it."""
        if connection is None or len(self._open) >= MOST_OPEN:
            return None
        number, self._next = self._next, self._next + 1
        answer: asyncio.Future[Replied | None] = asyncio.get_running_loop().create_future()
        self._open[number] = question, answer
        connection.send(Ask(number, term, question))
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._open.pop(number, None)

    def take(self, reply: Reply) -> Trouble | None:
        """What the other says. To a question that nobody waits for any more it is dropped."""
        if reply.number >= self._next:
            return Trouble.GARBAGE
        found = self._open.get(reply.number)
        if found is None:
            return None
        question, answer = found
        if reply.answer is not None and not isinstance(reply.answer, Sight if isinstance(question, Look) else Answer):
            return Trouble.GARBAGE
        if not answer.done():
            answer.set_result(reply.answer)
        return None

    def drop(self) -> None:
        """The connection is gone, and with it what was asked over it."""
        for _, answer in self._open.values():
            if not answer.done():
                answer.set_result(None)
