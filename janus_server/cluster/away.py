"""One request that came here and runs on another node: the front's end of its stream. Lives on the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from janus_server.cluster.said import Said
from janus_server.types import Emit, Request
from janus_server.wire.credits import WINDOW_ITEMS
from janus_server.wire.frames import Run

if TYPE_CHECKING:
    from janus_server.orders import Helper
    from janus_server.wire.asking import Asking, Reading


class Away:
    """said is of the request, call that which it belongs to; news() is told when there is something to take."""

    __slots__ = ("_news", "call", "node", "pouring", "reading", "said")

    reading: Reading

    def __init__(self, said: Said, node: str, call: str, news: Callable[[], None]) -> None:
        self.said, self.node, self.call = said, node, call
        self.pouring = False
        self._news = news

    @property
    def request(self) -> Request:
        return self.said.request

    def open(
        self, asking: Asking, ticket: str, attempt: int, arrived_s: float, until_s: float | None, helper: Helper | None
    ) -> None:
        """Have it run there. Times are monotonic: when it came here, and until when anybody wants it. helper is the
        node that may compute its prompt."""
        run = Run(
            stream=0, id=self.request.id, call=ticket, attempt=attempt, upto=WINDOW_ITEMS, request=self.request,
            known=self.said.known(), ended=self.said.ended(), helper=helper,
        )  # fmt: skip
        self.reading = asking.run(run, arrived_s, until_s, self._news)

    def take(self) -> list[Emit]:
        emits = self.reading.drain()
        for emit in emits:
            self.said.hear(emit)
        return emits
