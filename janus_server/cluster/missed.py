"""Nodes that the coordinator calls gone while the links to them live: for a moment nothing of theirs is given up.

After an outage of the coordinator all leases are over and everybody registers anew, each a little later than the
other; what runs on a node, and what stands there, has not changed by that. `meeting` has one. Lives on the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from janus_server.coordinator.board import waited
from janus_server.coordinator.records import Member

GRACE_S: Final = 2.0
_LOOK_S: Final = 0.1


class _Missing:
    __slots__ = ("member", "news")

    def __init__(self, member: Member) -> None:
        self.member = member
        self.news = asyncio.Event()


class Missed:
    """lives(node): whether its link does. part(member) gives the node up; it is called once for each that is missed
    and does not come back."""

    def __init__(
        self, lives: Callable[[str], bool], part: Callable[[Member], Awaitable[None]], grace_s: float = GRACE_S
    ) -> None:
        self._lives, self._part, self._grace_s = lives, part, grace_s
        self._missing: dict[str, _Missing] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def miss(self, member: Member) -> bool:
        """The coordinator does not know it any more; whether it is waited for."""
        if not self._lives(member.name):
            await self._part(member)
            return False
        missing = self._missing[member.name] = _Missing(member)
        task = asyncio.create_task(self._wait(missing))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def back(self, member: Member) -> bool:
        """A node has registered; whether it is one that was waited for, the same process at the same place."""
        missing = self._missing.pop(member.name, None)
        if missing is None:
            return False
        missing.news.set()
        if (missing.member.process, missing.member.url) == (member.process, member.url):
            return True
        await self._part(missing.member)
        return False

    def look(self, node: str) -> None:
        """Something happened to its link."""
        if node in self._missing:
            self._missing[node].news.set()

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, missing: _Missing) -> None:
        """Counted in looks: a process that was stopped itself first reads what came meanwhile."""
        node = missing.member.name
        for _ in range(max(1, round(self._grace_s / _LOOK_S))):
            missing.news.clear()
            await waited(missing.news, _LOOK_S)
            if self._missing.get(node) is not missing:
                return
            if not self._lives(node):
                break
        if self._missing.get(node) is missing:
            del self._missing[node]
            await self._part(missing.member)
