"""The start of a node that leads itself: over when everything that was ordered then has ended. `node` owns one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from janus_server.orders import Action, Done, Event, Failed, Order, Verb


class Start:
    """Waits until everything that the Brain ordered at start has ended; the first failure is the start's."""

    def __init__(self, trouble: Callable[[str], Exception]) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._trouble = trouble
        self._open: dict[int, Order] = {}

    def all_given(self) -> None:
        """There are no more orders of the start; with none at all it is over."""
        if not self._open and not self.over.done():
            self.over.set_result(None)

    def see(self, news: Event | Action) -> None:
        if self.over.done():
            return
        if isinstance(news, Order):
            self._open[news.id] = news
        elif isinstance(news, Failed):
            order = self._open.pop(news.order)
            if order.verb is not Verb.FORK or news.lasting:  # after a copy that failed, another way is ordered next
                self.over.set_exception(self._trouble(order.model))
        elif isinstance(news, Done):
            del self._open[news.order]
            if not self._open:
                self.over.set_result(None)
