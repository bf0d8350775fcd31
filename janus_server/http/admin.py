"""The routes of who runs the server: where every model stands, wishes for them, the pool's pages, and what goes on.

The gate lets nobody here without the admin key. A wish is answered at once; with ?wait=SECONDS when it is fulfilled,
given up, or late. Waiting and looking on hold up nothing: whoever leaves leaves the models to what was decided.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from janus_server.api import reply
from janus_server.api.admin import (
    WISHES,
    AdminError,
    AdminErrorDetails,
    ForkBody,
    ManagedList,
    ManagedModel,
    ModelEvent,
    Wished,
)
from janus_server.errors import Refused
from janus_server.http.edge import CODE, SSE
from janus_server.http.service import Service, no_such_model, not_ready
from janus_server.http.sse import SseWriter
from janus_server.operate import End, Operator
from janus_server.orders import Wish

WAIT_MOST_S = 600.0
# A step that takes longer is no ordinary one: /ready says what a frozen server is like.
LOOK_S = 10.0
FORK_MOST_BYTES = 4096
# A fork has a body, and a route of its own.
PATTERN = "|".join(wish.value for wish in WISHES if wish is not Wish.FORK)
State = ManagedModel | UnsetType
_TRUTHS: Final = {"1": True, "true": True, "0": False, "false": False}


class Admin:
    """The handlers under /admin."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: web.Request) -> web.Response:
        return answered(ManagedList(object="list", data=self._operator().models()))

    async def wish(self, request: web.Request) -> web.Response:
        """202 while there is something left to do, 200 when there is not, 409 where the model's state forbids it."""
        return await self._fulfil(request, Wish(request.match_info["wish"]), None)

    async def fork(self, request: web.Request) -> web.Response:
        """As `wish`; a copy that fails on the way is followed by what this node has itself, and the answer says so."""
        return await self._fulfil(request, Wish.FORK, await self._source(request))

    async def peers(self, request: web.Request) -> web.Response:
        return answered(await self._operator().peers())

    async def cluster(self, request: web.Request) -> web.Response:
        lookout = self._service.node.lookout
        if lookout is None:
            raise not_ready("the models are not known yet")
        return answered(await lookout.around(truth(request, "past")))

    async def _fulfil(self, request: web.Request, wish: Wish, source: str | None) -> web.Response:
        name = request.match_info["model"]
        wait_s = _wait_s(request)
        operator = self._operator()
        if name not in operator.names:
            raise no_such_model()
        reason = self._service.node.refusing()
        if reason is not None:
            raise not_ready(reason)
        answer = await operator.ask(name, wish, source)
        if not answer.accepted:
            return told(request, 409, "conflict", answer.why, operator.model(name))
        end = await operator.until(name, wish, wait_s) if wait_s else None
        if end is End.MISSED:
            why = _missed(operator, name, wish)
            return told(request, 409, "conflict", why, operator.model(name))
        if end is End.LATE:
            why = f"{name} is {operator.model(name).stage} and still on its way after {wait_s:g} s"
            return told(request, 504, "timeout", why, operator.model(name))
        why = _reached(operator, name, wish) if end is End.REACHED else answer.why
        done = operator.fulfilled(name, wish)
        return answered(Wished(model=name, why=why, state=operator.model(name)), 200 if done else 202)

    async def _source(self, request: web.Request) -> str | None:
        raw = await self._service.read(request)
        try:
            body = msgspec.json.decode(raw[:FORK_MOST_BYTES] or b"{}", type=ForkBody)
        except msgspec.MsgspecError:
            message = 'the body must be JSON such as {"source": "n1"}, or empty to have a peer chosen'
            raise Refused(message, param="source", code="invalid_value") from None
        return body.source

    async def memory(self, request: web.Request) -> web.Response:
        operator = self._operator()
        try:
            async with asyncio.timeout(LOOK_S):
                survey = await operator.survey()
        except TimeoutError:
            raise not_ready("the device thread is busy; its pages cannot be looked at") from None
        return answered(await self._service.on_thread(lambda: operator.memory(survey)))

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


def _missed(operator: Operator, name: str, wish: Wish) -> str:
    """Where the model stands instead, and why."""
    stage, trouble = operator.model(name).stage, operator.watch.trouble(name)
    if trouble is None and wish is Wish.SLEEP and stage == "cold":
        return f"{name} is cold: the host has no memory for a copy of it (--host-memory)"
    return f"{name} is {stage} and goes no further" + (f": {trouble}" if trouble else "")


def _reached(operator: Operator, name: str, wish: Wish) -> str:
    """Where the model stands; for a fork that became something else, why."""
    state = operator.model(name)
    said = f"{name} is {state.stage}"
    if wish is not Wish.FORK or state.origin is None:
        return said
    if state.origin == "fork":
        return f"{said}, copied from {state.source}"
    failure = operator.watch.failed_fork(name)
    own = "its checkpoint" if state.origin == "load" else "its host copy"
    return f"{said}, from {own}" + (f": the copy from a peer failed: {failure}" if failure else "")


def truth(request: web.Request, name: str) -> bool:
    """False where nothing was said."""
    found = _TRUTHS.get(request.query.get(name, "0").lower())
    if found is None:
        raise Refused(f"{name} must be true or false", param=name, code="invalid_value")
    return found


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


def told(request: web.Request, status: int, code: str, why: str, state: State = UNSET) -> web.Response:
    """A wish that was not fulfilled; state is the model's, where it was for one."""
    request[CODE] = code
    details = AdminErrorDetails(
        message=why, type="invalid_request_error" if status < 500 else "server_error", param=None, code=code,
        state=state,
    )  # fmt: skip
    response = answered(AdminError(error=details), status)
    # Asking again helps whoever waits, but at once it does not help: clients that retry on 409 would only repeat it.
    response.headers["x-should-retry"] = "false"
    return response


def _event(event: ModelEvent) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(event)


def _failure(refused: Refused) -> bytes:
    return b"data: %b\n\n%b" % (msgspec.json.encode(reply.error_body(refused)), reply.DONE)


def answered(value: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
