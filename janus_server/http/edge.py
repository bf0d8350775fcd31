"""What surrounds every handler: the request's id, the one form of every failure, and the server under the application.

`http` builds its application with a `Guard` and its runner with `build_runner`, whose connections are bounded in number
and in the time that headers may take. Failures that aiohttp finds before a handler exists (broken HTTP, oversized
headers) get the same form as all others. Nothing here logs what a client wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast

import msgspec
from aiohttp import hdrs, web

from janus_server.api.bodies import Limits
from janus_server.api.messages_reply import messages_error
from janus_server.api.reply import error_body
from janus_server.errors import Refused
from janus_server.http.sse import SseWriter
from janus_server.keys import Key
from janus_server.metrics import Metrics

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SSE: web.RequestKey[SseWriter] = web.RequestKey("sse", SseWriter)
ID: web.RequestKey[str] = web.RequestKey("id", str)
KEY: web.RequestKey[Key] = web.RequestKey("key", Key)
CORS: web.RequestKey[str] = web.RequestKey("cors", str)  # the page's origin, when it is one that may call
ENDING: web.RequestKey[bool] = web.RequestKey("ending", bool)  # cancelled by the end of the server, not by the client

ROUTE: web.RequestKey[str] = web.RequestKey("route", str)  # the route's pattern, once the request is over
CODE: web.RequestKey[str] = web.RequestKey("code", str)  # what stopped a request that did not end well

CLIENT_LEFT = 499  # only ever counted: there is nobody to send it to


class Before(Protocol):
    """What stands before the application: the gate."""

    def before(self, handler: Handler) -> Handler: ...


class Guard:
    """The middleware: one form for every failure, a status before the first byte and an event after it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except (ConnectionError, asyncio.CancelledError) as error:
            if ENDING in request and (task := asyncio.current_task()) is not None:
                task.uncancel()
                return await self._fail(request, _shutting_down(), {})
            request[CODE] = "client_left"
            self._count(request, CLIENT_LEFT)
            if isinstance(error, asyncio.CancelledError):
                raise
            return request[SSE].response if SSE in request else web.Response(status=CLIENT_LEFT)
        except Refused as error:
            # What took too long once will do so again, and a client that retries only doubles the load.
            return await self._fail(request, error, {"x-should-retry": "false"} if error.status == 504 else {})
        except web.HTTPException as error:
            kept = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            return await self._fail(request, _refused_by_framework(error.status), kept)
        except Exception:  # one of the three broad boundaries: a bug ends its request with an id, never the process
            log.exception("request %s failed on %s %s", request[ID], request.method, _route(request))
            message = f"the server failed; its log has the details under {request[ID]}"
            refused = Refused(message, status=500, kind="server_error", code="internal_error")
            # The same request would meet the same bug: clients that retry on 500 would only triple the damage.
            return await self._fail(request, refused, {"x-should-retry": "false"})
        self._count(request, response.status)
        return response

    async def _fail(self, request: web.Request, refused: Refused, headers: dict[str, str]) -> web.StreamResponse:
        request[CODE] = refused.code or "refused"
        self._count(request, refused.status)
        sse: SseWriter | None = request.get(SSE)
        if sse is None or not sse.started:
            return error_response(refused, headers, request.path)
        with contextlib.suppress(ConnectionError):
            await sse.fail(refused)
        return sse.response

    def _count(self, request: web.Request, status: int) -> None:
        request[ROUTE] = _route(request)
        self._metrics.http.labels(request[ROUTE], str(status)).inc()


async def stamp(request: web.Request, response: web.StreamResponse) -> None:
    """Put the request's id on a response, let the page that may read it read it, and hide aiohttp's version."""
    response.headers["Server"] = "janus"
    if ID in request:
        response.headers["X-Request-Id"] = request[ID]
        if request.path.startswith("/v1/messages"):
            response.headers["Request-Id"] = request[ID]  # where Anthropic's clients look
    if CORS in request:
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = request[CORS]
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = "x-request-id, retry-after, retry-after-ms"
        response.headers[hdrs.VARY] = "Origin"


def error_response(refused: Refused, headers: dict[str, str], path: str = "") -> web.Response:
    """A failure as the API of that path writes it: Anthropic's where its clients call, else OpenAI's."""
    body = messages_error(refused) if path.startswith("/v1/messages") else error_body(refused)
    response = web.Response(
        status=refused.status,
        body=msgspec.json.encode(body),
        content_type="application/json",
        headers=headers,
    )
    if refused.retry_after_s is not None:
        # Rounded up: who comes a moment early is refused again.
        response.headers["Retry-After"] = str(max(1, math.ceil(refused.retry_after_s)))
        response.headers["Retry-After-Ms"] = str(math.ceil(refused.retry_after_s * 1000))
    return response


def build_runner(app: web.Application, limits: Limits, gate: Before) -> web.AppRunner:
    """A runner with `gate` before routing, that cancels handlers on disconnect and bounds headers and connections."""
    runner = _Runner(
        app,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,  # 1 MB could unpack to gigabytes, and none of the clients compresses
        max_line_size=limits.header_line_bytes,
        max_field_size=limits.header_line_bytes,
        max_headers=limits.headers,
        lingering_time=5.0,
        keepalive_timeout=limits.idle_s,
        shutdown_timeout=limits.shutdown_s,
    )
    runner.gate, runner.limits = gate, limits
    return runner


class _Runner(web.AppRunner):
    """aiohttp's runner over a server whose own errors have our form; aiohttp has no other place to hook that in."""

    gate: Before
    limits: Limits

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        handler = self.gate.before(cast(Handler, plain.request_handler))
        server = _Server(cast(Any, handler), request_factory=plain.request_factory, **self._kwargs)
        server.limits = self.limits
        return server


class _Server(web.Server):
    limits: Limits

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    """aiohttp's connection, refused when there are too many, and ended when a request's headers do not come.

    A client that closes its sending side has left, and its request ends: until the server writes, TCP does not tell
    who only closed that side from who went away, and an answer that nobody reads must not be computed.
    """

    __slots__ = ("_headers_timer", "_limits")

    def __init__(self, server: _Server, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._limits = server.limits
        self._headers_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self._manager
        if server is not None and len(server.connections) >= self._limits.connections:
            message = "too many connections are open; come again later"
            self._turn_away(cast(asyncio.Transport, transport), Refused(
                message, status=503, kind="server_error", code="server_overloaded", retry_after_s=1.0
            ))  # fmt: skip
            return
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Bytes that are not yet a request: from the first of them the headers have their time, and not longer. A body
        # is timed by who reads it; a connection without any bytes falls to the idle time.
        if self._messages or self._current_request is not None or self._force_close:
            if self._headers_timer is not None:
                self._stop_timer()
        elif data and self._headers_timer is None and (self._request_count == 0 or self._waiting):
            self._headers_timer = self._loop.call_later(self._limits.headers_s, self._headers_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def _waiting(self) -> bool:
        """Between requests; before its first one a connection may not have come so far as to wait."""
        return self._waiter is not None and not self._waiter.done()

    def _headers_late(self) -> None:
        self._headers_timer = None
        if self._waiting and self.transport is not None:
            message = "the headers took too long to arrive"
            self._turn_away(self.transport, Refused(message, status=408, code="request_timeout"))

    def _stop_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _turn_away(self, transport: asyncio.Transport, refused: Refused) -> None:
        """Answer where there is no request to answer, and close."""
        response = error_response(refused, {"Server": "janus"})
        body = msgspec.json.encode(error_body(refused))
        lines = [f"HTTP/1.1 {refused.status} {response.reason}", *(f"{k}: {v}" for k, v in response.headers.items())]
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "Connection: close", "", ""])
        transport.write(head.encode() + body)
        transport.close()
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """aiohttp's message quotes the request, so it is neither sent nor logged."""
        log.info("a request that is not valid HTTP was refused with %d (%s)", status, type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("a response has begun; the connection ends")
        response = error_response(_refused_by_framework(status), {"Server": "janus"})
        response.force_close()
        return response


def _refused_by_framework(status: int) -> Refused:
    """What aiohttp's router or parser found, in our words."""
    texts = {
        400: ("the request is not valid HTTP, or its headers are too large", "invalid_request"),
        404: ("there is no such path; the API lives under /v1", "not_found"),
        405: ("this path does not take that method", "method_not_allowed"),
        413: ("the body is too large", "body_too_large"),
    }
    if status in texts:
        message, code = texts[status]
        return Refused(message, status=status, code=code)
    if status < 500:
        return Refused("the request cannot be served", status=status, code="invalid_request")
    return Refused("the server failed", status=status, kind="server_error", code="internal_error")


def _shutting_down() -> Refused:
    return Refused(
        "the server is shutting down", status=503, kind="server_error", code="shutting_down", retry_after_s=1.0
    )


def request_id(request: web.BaseRequest) -> str:
    """The client's id when it is a plain label, else one of ours. It is echoed and logged, and is no key."""
    given = request.headers.get("X-Request-Id", "")
    return given if re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", given) else "req-" + os.urandom(12).hex()


def _route(request: web.Request) -> str:
    """The route's own pattern: what the client wrote must not become a label or a log line."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "none"
