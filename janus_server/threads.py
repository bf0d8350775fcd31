"""Waiting for work on other threads from the event loop, so that it has ended before anybody goes on, cancelled or not.

`lifecycle` uses it: nobody may unmap what a thread still writes, nor leave a transition half undone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def ended(work: asyncio.Future[T], cancelled: Callable[[], None] = lambda: None) -> T:
    """The result of `work`. When this is cancelled, however often, `cancelled` is told and the work has ended before
    it is left; what it raised is then nobody's.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        cancelled()
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()
        raise


async def whole(work: Coroutine[Any, Any, T]) -> T:
    """Do all of `work`, also when this is cancelled meanwhile."""
    return await ended(asyncio.ensure_future(work))
