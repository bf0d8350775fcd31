"""The routes of who runs the server: where every model stands, wishes for them, the pool's pages, and what goes on.

The gate lets nobody here without the admin key. A wish is answered at once; with ?wait=SECONDS when it is fulfilled,
given up, or late. Waiting and looking on hold up nothing: whoever leaves leaves the models to what was decided.
"""

from __future__ import annotations

import asyncio
import math

import msgspec
from aiohttp import web

from janus_server.api import reply
from janus_server.api.admin import WISHES, AdminError, AdminErrorDetails, ManagedList, ModelEvent, Wished
from janus_server.errors import Refused
from janus_server.http.edge import CODE, SSE
from janus_server.http.service import Service, no_such_model, not_ready
from janus_server.http.sse import SseWriter
from janus_server.operate import End, Operator
from janus_server.orders import Wish

WAIT_MOST_S = 600.0
# A step that takes longer is no ordinary one: /ready says what a frozen server is like.
LOOK_S = 10.0
PATTERN = "|".join(wish.value for wish in WISHES)


class Admin:
    """The handlers under /admin."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: web.Request) -> web.Response:
        return _json(ManagedList(object="list", data=self._operator().models()))

    async def wish(self, request: web.Request) -> web.Response:
        """202 while there is something left to do, 200 when there is not, 409 where the model's state forbids it."""
        name, wish = request.match_info["model"], Wish(request.match_info["wish"])
        wait_s = _wait_s(request)
        operator = self._operator()
        if name not in operator.names:
            raise no_such_model()
        reason = self._service.node.refusing()
        if reason is not None:
            raise not_ready(reason)
        answer = operator.ask(name, wish)
        if not answer.accepted:
            return _told(request, 409, "conflict", answer.why, operator, name)
        end = await operator.until(name, wish, wait_s) if wait_s else None
        if end is End.MISSED:
            trouble = operator.watch.trouble(name)
            why = f"{name} is {operator.model(name).stage} and goes no further" + (f": {trouble}" if trouble else "")
            return _told(request, 409, "conflict", why, operator, name)
        if end is End.LATE:
            why = f"{name} is {operator.model(name).stage} and still on its way after {wait_s:g} s"
            return _told(request, 504, "timeout", why, operator, name)
        why = f"{name} is {operator.model(name).stage}" if end is End.REACHED else answer.why
        done = operator.fulfilled(name, wish)
        return _json(Wished(model=name, why=why, state=operator.model(name)), 200 if done else 202)

    async def memory(self, request: web.Request) -> web.Response:
        operator = self._operator()
        try:
            async with asyncio.timeout(LOOK_S):
                survey = await operator.survey()
        except TimeoutError:
            raise not_ready("the device thread is busy; its pages cannot be looked at") from None
        return _json(await self._service.on_thread(lambda: operator.memory(survey)))

    async def events(self, request: web.Request) -> web.StreamResponse:
        limits = self._service.limits
        sse = request[SSE] = SseWriter(request, limits.stall_s, _failure)
        with self._operator().watch.subscribe() as news:
            await sse.ping()  # the headers: from here on the reader misses nothing
            while (events := await news.take(limits.keep_alive_s)) is not None:
                if events:
                    await sse.send(b"".join(map(_event, events)))
                else:
                    await sse.ping()
            await sse.finish(reply.DONE)
        return sse.response

    async def end(self, app: web.Application) -> None:
        """The server stops: whoever looks on is told so, and holds up nothing."""
        operator = self._service.node.operator
        if operator is not None:
            operator.watch.close()

    def _operator(self) -> Operator:
        operator = self._service.node.operator
        if operator is None:
            raise not_ready("the models are not known yet")
        return operator


def _wait_s(request: web.Request) -> float:
    """Seconds to wait, 0 where nothing was said."""
    text = request.query.get("wait", "0")
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = math.nan
    if not 0.0 <= wait_s <= WAIT_MOST_S:
        message = f"wait must be a number of seconds from 0 to {WAIT_MOST_S:g}"
        raise Refused(message, param="wait", code="invalid_value")
    return wait_s


def _told(request: web.Request, status: int, code: str, why: str, operator: Operator, name: str) -> web.Response:
    """An error with the model's state in it."""
    request[CODE] = code
    details = AdminErrorDetails(
        message=why, type="invalid_request_error" if status < 500 else "server_error", param=None, code=code,
        state=operator.model(name),
    )  # fmt: skip
    response = _json(AdminError(error=details), status)
    # Asking again helps whoever waits, but at once it does not help: clients that retry on 409 would only repeat it.
    response.headers["x-should-retry"] = "false"
    return response


def _event(event: ModelEvent) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(event)


def _failure(refused: Refused) -> bytes:
    return b"data: %b\n\n%b" % (msgspec.json.encode(reply.error_body(refused)), reply.DONE)


def _json(value: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
