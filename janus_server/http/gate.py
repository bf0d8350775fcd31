"""The gate in front of routing: which host, which origin and whose key. What it refuses is never read nor routed.

`edge.build_runner` puts it before the application, so every path goes through it, those that do not exist too. All but
/health needs a key where keys are set, judged by the request target as it was sent. It keeps the requests in progress,
for the end of the server. What a client sent as a key is neither logged nor shown.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote

import msgspec
from aiohttp import hdrs, web

from janus_server.errors import Refused
from janus_server.http.edge import CODE, CORS, ENDING, ID, KEY, Handler, error_response, request_id, stamp
from janus_server.keys import Key, KeyRing
from janus_server.metrics import Metrics

LIVENESS: Final = "/health"
# Pages without data: a browser opens them before it has a key to send, and they ask for it.
OPEN: Final = frozenset({LIVENESS, "/docs", "/dashboard"})
# A dashboard's event stream may stay open for days: the end of the server waits for work, not for readers.
READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_HOST: Final = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::\d{1,5})?", re.IGNORECASE | re.ASCII)
_ADMIN: Final = re.compile(r"/+admin(?:[/?#;]|$)", re.IGNORECASE)
_HEADER_LIST: Final = re.compile(r"[A-Za-z0-9_-]{1,64}(?:\s*,\s*[A-Za-z0-9_-]{1,64}){0,63}", re.ASCII)
_METHODS: Final = "GET, POST, DELETE"
_PLAIN_HEADERS: Final = "authorization, content-type, x-api-key, x-request-id"
_NO_RETRY: Final = MappingProxyType({"x-should-retry": "false"})
_CHALLENGE: Final = MappingProxyType({**_NO_RETRY, "WWW-Authenticate": "Bearer"})


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """From where the server may be called.

    local: only this machine reaches it, so that a foreign name in Host means a web page whose name was turned to
    this address. bound is the host it was told to listen on; hosts are more names; origins are those of CORS.
    """

    local: bool
    bound: str
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()

    def answers_to(self, host: str) -> bool:
        """Whether a request addressed to `host` (lower case, IPv6 in brackets) is meant for this server."""
        if host in self.hosts or host == self.bound.lower() or host == f"[{self.bound.lower()}]":
            return True
        address = _address(host)
        if host == "localhost" or (address is not None and address.is_loopback):
            return True
        # A page's name can be turned to our address, but then it is that name that stands here, never a number.
        return not self.local and (not self.hosts or address is not None)


class Gate:
    """Judges every request before it is routed, and knows those in progress."""

    def __init__(self, places: Places, keys: KeyRing, metrics: Metrics) -> None:
        self.keys = keys
        self._places = places
        self._metrics = metrics
        self._active: dict[asyncio.Task[object], web.BaseRequest] = {}
        self.parting = False  # each answer is the last one on its connection

    def before(self, handler: Handler) -> Handler:
        """`handler` behind the gate."""

        async def enter(request: web.Request) -> web.StreamResponse:
            request[ID] = request_id(request)
            try:
                if (answer := self._judge(request)) is not None:
                    await stamp(request, answer)
                    return answer
            except _NotAllowed as stopped:
                return await self._refuse(request, stopped)
            task = asyncio.current_task()
            if task is None or request.method in READING:
                return await handler(request)
            self._active[task] = request
            try:
                return await handler(request)
            finally:
                del self._active[task]

        return enter

    @property
    def active(self) -> int:
        """Requests in progress that may do work."""
        return len(self._active)

    async def part(self, request: web.Request, response: web.StreamResponse) -> None:
        """Before an answer is written: whether its client may ask for more on that connection."""
        if self.parting:
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"

    def end_all(self) -> None:
        """Stop what is still in progress; `edge.Guard` gives each its last word."""
        for task, request in tuple(self._active.items()):
            request[ENDING] = True
            task.cancel()

    def _judge(self, request: web.Request) -> web.StreamResponse | None:
        """The answer to a preflight, or None to go on. Raises _NotAllowed."""
        target = request.raw_path
        if not target.startswith("/"):
            raise _NotAllowed(400, "invalid_request", "the request target must be a path that begins with /")
        host = self._host(request)
        origin = self._origin(request, host)
        if origin is not None:
            request[CORS] = origin
            if request.method == "OPTIONS" and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers:
                return _preflight(request)  # browsers send it without the key
        if target.partition("?")[0] not in OPEN or request.method not in ("GET", "HEAD"):
            self._check_key(request, target)
        if request.headers.get(hdrs.EXPECT, "100-continue").lower() != "100-continue":
            raise _NotAllowed(417, "expectation_failed", "of all expectations only 100-continue can be met")
        return None

    def _host(self, request: web.Request) -> str:
        """What stands in Host, refused when it is not this server. "" where HTTP/1.0 left it out."""
        given = request.headers.getall(hdrs.HOST, [])
        if not given and request.version < (1, 1):
            return ""
        found = _HOST.fullmatch(given[0]) if len(given) == 1 else None
        if found is None:
            raise _NotAllowed(400, "invalid_request", "the request must have one valid Host header")
        if not self._places.answers_to(found[1].lower().removesuffix(".")):
            message = "the Host header names another host; a server that has that name is started with --allowed-hosts"
            raise _NotAllowed(403, "host_not_allowed", message)
        return given[0].lower()

    def _origin(self, request: web.Request, host: str) -> str | None:
        """The origin of a page that CORS allows; None for our own pages and for clients that are no browsers."""
        given = request.headers.getall(hdrs.ORIGIN, [])
        if not given:
            return None
        origin = given[0].lower()
        if len(given) == 1 and origin in self._places.origins:
            return given[0]
        scheme, _, authority = origin.partition("://")
        # The scheme may differ: a proxy may have ended TLS. Ports are as the browser wrote both.
        if len(given) == 1 and scheme in ("http", "https") and host and authority == host:
            return None
        message = "web pages of other origins may not call this server; --allowed-origins names those that may"
        raise _NotAllowed(403, "origin_not_allowed", message)

    def _check_key(self, request: web.Request, target: str) -> None:
        admin = _is_admin(request, target)
        if admin and not self.keys.has_admin:
            message = "admin routes are off; the server has them when it is started with JANUS_ADMIN_KEY"
            raise _NotAllowed(403, "admin_off", message)
        if not admin and not len(self.keys):
            return
        presented = _presented(request)
        key = next((found for one in presented if (found := self.keys.find(one)) is not None), None)
        if key is None:
            message = "the API key is not valid" if presented else "an API key is needed: Authorization: Bearer KEY"
            raise _NotAllowed(401, "invalid_api_key", message, headers=_CHALLENGE)
        if admin and not key.admin:
            raise _NotAllowed(403, "admin_key_needed", "this needs the admin key")
        request[KEY] = key

    async def _refuse(self, request: web.Request, stopped: _NotAllowed) -> web.Response:
        request[CODE] = stopped.code or "refused"
        self._metrics.refused.labels(stopped.code).inc()
        self._metrics.http.labels("none", str(stopped.status)).inc()
        response = error_response(stopped, dict(stopped.headers), request.path)
        await stamp(request, response)
        return response


class _NotAllowed(Refused):
    """Stopped at the gate."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] = _NO_RETRY) -> None:
        kinds = {401: "authentication_error", 403: "permission_error"}
        super().__init__(message, status=status, kind=kinds.get(status, "invalid_request_error"), code=code)
        self.headers = headers


def key_name(request: web.BaseRequest) -> str:
    """Under which name admission counts a request."""
    key: Key | None = request.get(KEY)
    return key.name if key is not None else ""


def is_admin(request: web.BaseRequest) -> bool:
    """Whether a request came with an admin key."""
    key: Key | None = request.get(KEY)
    return key is not None and key.admin


def may_see(request: web.BaseRequest, name: str) -> bool:
    """Whether the key of a request may use a served name, and so know of it."""
    key: Key | None = request.get(KEY)
    return key is None or key.limits.models is None or name in key.limits.models


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` writes in numbers, IPv6 in brackets; None for a name."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_admin(request: web.Request, target: str) -> bool:
    """Whether any reading of the target leads below /admin: routing decodes, and so might whatever stands behind."""
    url = request.rel_url
    return any(_ADMIN.match(form) for form in (target, unquote(target), url.raw_path, url.path))


def _presented(request: web.Request) -> list[str]:
    """The keys that were sent: as OpenAI's clients do, and as Anthropic's do."""
    found = []
    scheme, _, key = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        found.append(key.strip())
    if other := request.headers.get("x-api-key", "").strip():
        found.append(other)
    return found


def _preflight(request: web.Request) -> web.Response:
    asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
    return web.Response(
        status=204,
        headers={
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
            # Client libraries add headers of their own; the origin is trusted by name, so what it asks for it may send.
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: asked if _HEADER_LIST.fullmatch(asked) else _PLAIN_HEADERS,
            hdrs.ACCESS_CONTROL_MAX_AGE: "600",
        },
    )
