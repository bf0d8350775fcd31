"""Whether a node takes the requests of clients: not before its models are there, and not once it is about to end.

`node` has one. A node of a cluster has its clients wait while it starts, and lets other nodes run what they send while
it leaves: who knows its address alone notices neither. Lives on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

# How long a request waits for the start of a node of a cluster. A start takes some seconds.
START_S: Final = 15.0
_LOADING: Final = "the models are still loading"


class Intake:
    """clustered: the node belongs to a cluster. others() says whether other nodes of it could run requests."""

    def __init__(self, clustered: bool, others: Callable[[], bool]) -> None:
        self._clustered, self._others = clustered, others
        self._loaded = self._leaving = False
        self._reason: str | None = None
        self._over = asyncio.Event()  # the start: it came to its end, or the node to its own

    @property
    def ending(self) -> str | None:
        """Why the node takes nothing more, once it is about to end."""
        return self._reason

    @property
    def leaving(self) -> bool:
        """The node ends and its cluster does not."""
        return self._leaving

    def closed(self) -> str | None:
        """Why the node runs nothing that is new, or None."""
        return self._reason if self._reason is not None or self._loaded else _LOADING

    def opened(self) -> None:
        """The models are there."""
        self._loaded = True
        self._over.set()

    def pause(self, reason: str) -> None:
        """Take nothing more: the server ends, with all nodes that it has."""
        self._reason = reason
        self._over.set()

    def leave(self, reason: str) -> None:
        """Run nothing that is new. Where the cluster goes on and has others, they do."""
        self._leaving = self._clustered and self._loaded and self._reason is None
        self.pause(reason)

    async def elsewhere(self) -> bool:
        """Whether others run what comes in now. In a cluster, the start is waited for first."""
        if self._clustered and not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(START_S):
                    await self._over.wait()
        return self._leaving and self._others()
