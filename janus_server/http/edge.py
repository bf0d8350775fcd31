"""What surrounds every handler: the request's id, the one form of every failure, and the server under the application.

`http` builds its application with a `Guard` and its runner with `build_runner`. Failures that aiohttp finds before a
handler exists (broken HTTP, oversized headers) get the same form as all others. Nothing here logs what a client wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from janus_server.api.bodies import Limits
from janus_server.api.reply import error_body
from janus_server.errors import Refused
from janus_server.http.sse import SseWriter
from janus_server.metrics import Metrics

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SSE: web.RequestKey[SseWriter] = web.RequestKey("sse", SseWriter)
ID: web.RequestKey[str] = web.RequestKey("id", str)

CLIENT_LEFT = 499  # only ever counted: there is nobody to send it to


class Guard:
    """The middleware: one form for every failure, a status before the first byte and an event after it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request[ID] = _request_id(request)
        try:
            response = await handler(request)
        except (ConnectionError, asyncio.CancelledError) as error:
            self._count(request, CLIENT_LEFT)
            if isinstance(error, asyncio.CancelledError):
                raise
            return request[SSE].response if SSE in request else web.Response(status=CLIENT_LEFT)
        except Refused as error:
            return await self._fail(request, error, {})
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
        self._count(request, refused.status)
        sse: SseWriter | None = request.get(SSE)
        if sse is None or not sse.started:
            return error_response(refused, headers)
        with contextlib.suppress(ConnectionError):
            await sse.fail(refused)
        return sse.response

    def _count(self, request: web.Request, status: int) -> None:
        self._metrics.http.labels(_route(request), str(status)).inc()


async def stamp(request: web.Request, response: web.StreamResponse) -> None:
    """Put the request's id on a response, and leave aiohttp's version off it."""
    response.headers["Server"] = "janus"
    if ID in request:
        response.headers["X-Request-Id"] = request[ID]


def error_response(refused: Refused, headers: dict[str, str]) -> web.Response:
    response = web.Response(
        status=refused.status,
        body=msgspec.json.encode(error_body(refused)),
        content_type="application/json",
        headers=headers,
    )
    if refused.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, round(refused.retry_after_s)))
        response.headers["Retry-After-Ms"] = str(round(refused.retry_after_s * 1000))
    return response


def build_runner(app: web.Application, limits: Limits) -> web.AppRunner:
    """A runner that cancels handlers on disconnect, bounds headers, and hands bodies over as they were sent."""
    return _Runner(
        app,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,  # 1 MB could unpack to gigabytes, and none of the clients compresses
        max_line_size=limits.header_line_bytes,
        max_field_size=limits.header_line_bytes,
        max_headers=limits.headers,
        lingering_time=5.0,
        keepalive_timeout=75.0,
        shutdown_timeout=limits.shutdown_s,
    )


class _Runner(web.AppRunner):
    """aiohttp's runner over a server whose own errors have our form; aiohttp has no other place to hook that in."""

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        return _Server(plain.request_handler, request_factory=plain.request_factory, **self._kwargs)


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    __slots__ = ()

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


def _request_id(request: web.Request) -> str:
    """The client's id when it is a plain label, else one of ours. It is echoed and logged, and is no key."""
    given = request.headers.get("X-Request-Id", "")
    return given if re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", given) else "req-" + os.urandom(12).hex()


def _route(request: web.Request) -> str:
    """The route's own pattern: what the client wrote must not become a label or a log line."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "none"
