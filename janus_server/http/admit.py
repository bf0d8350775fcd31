"""The shell around admission: it brings the time, counts what is refused, and gives every grant back.

`generate` enters `Door.admit` once for each call, before the call is queued; nothing reaches a model another way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from aiohttp import web

from janus_server.admission import Admission, Grant, Ticket
from janus_server.api import plan
from janus_server.applications import Application
from janus_server.errors import Refused
from janus_server.http.gate import key_name
from janus_server.metrics import Metrics

if TYPE_CHECKING:
    from janus_server.instance import Call, News, Sink


class Door:
    """Lets calls in."""

    def __init__(self, admission: Admission, metrics: Metrics, request_s: float | None) -> None:
        self.admission = admission
        self._metrics = metrics
        self._request_s = request_s

    @contextlib.contextmanager
    def admit(
        self, request: web.BaseRequest, call: plan.Call, application: Application, arrived_s: float
    ) -> Iterator[Entry]:
        """The right to run `call` within; raises Refused when it may not. arrived_s is monotonic seconds.

        The queue is the model's, whichever of its applications a call counts for.
        """
        ticket = Ticket(
            key=key_name(request),
            model=application.model,
            param=call.kind.param,
            prompt_tokens=call.prompt_tokens,
            most_tokens=sum(one.max_tokens * one.n for one in call.requests),
            choices=sum(one.n for one in call.requests),
        )
        grant = self.admission.admit(ticket, time.monotonic())
        if isinstance(grant, Refused):
            self._metrics.refused.labels(grant.code or "").inc()
            self._metrics.application(application).turned_away(call.requests, grant)
            raise grant
        deadline_s = None if self._request_s is None else arrived_s + self._request_s
        entry = Entry(self.admission, grant, deadline_s)
        try:
            yield entry
        finally:
            used = call.prompt_tokens + entry.made_tokens if entry.ran else 0
            self.admission.finish(grant, used, time.monotonic())


class Entry:
    """A call that was let in: what it has made so far, and until when it may go on."""

    def __init__(self, admission: Admission, grant: Grant, deadline_s: float | None) -> None:
        self.started = self.ran = False
        self.made_tokens = 0
        self._admission = admission
        self._grant = grant
        self._deadline_s = deadline_s

    def over(self, call: Call) -> Admitted:
        self.ran = True  # who leaves before the first token has had the prompt computed all the same
        return Admitted(self, call)

    def saw(self, news: list[News]) -> None:
        made = 0
        for item in news:
            made += len(item.delta.tokens)
        self.made_tokens += made
        if not self.started:
            self.started = True
            self._admission.start(self._grant, time.monotonic())

    def left_s(self, most_s: float) -> float:
        """How long to wait for news, at most `most_s`. Refused once the time of the whole answer is over."""
        if self._deadline_s is None:
            return most_s
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise Refused(
                "the answer took longer than this server allows", status=504, kind="server_error", code="deadline"
            )
        return min(most_s, left_s)


class Admitted:
    """A running call whose news are counted and whose time is bounded."""

    def __init__(self, entry: Entry, call: Call) -> None:
        self._entry = entry
        self._call = call

    def pour_into(self, sink: Sink) -> None:
        """As `Call.pour_into`."""

        def counted(news: list[News]) -> bool:
            taken = sink(news)
            if taken:
                self._entry.saw(news)
            return taken

        self._call.pour_into(counted)

    async def take(self, timeout_s: float) -> list[News] | None:
        """As `Call.take`; Refused (504) when the call's time is over."""
        news = await self._call.take(self._entry.left_s(timeout_s))
        if news:
            self._entry.saw(news)
        return news
