"""Speaking to etcd 3.4 or newer: its JSON gateway over HTTP, several endpoints tried in turn, everything bounded.

`etcd` is the only caller. Whatever goes wrong is a `Trouble` with a fixed sentence; nothing that a server sends is
repeated in one. Nothing here knows what the keys mean.
"""

from __future__ import annotations

import ssl
from base64 import b64encode
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from janus_server.coordinator.base import Trouble

# A thousand members of 4 KiB in base64 and as much around them.
_MOST_BYTES: Final = 16 << 20
_LINE_BYTES: Final = 1 << 20
# gRPC's numbers, as the gateway passes them on.
_MISSING: Final = 5
_BARRED: Final = frozenset({7, 16})
# What servers say with code 3 that also means "log in first".
_USER_WANTED: Final = ("user name is empty", "authentication failed", "invalid auth token")
_SILENT: Final = "no etcd server answers"
_GARBAGE: Final = "what answers is not an etcd server of version 3.4 or newer"
_UNTRUSTED: Final = "the etcd server's certificate is not trusted here, or it does not speak TLS"
_FAILING: Final = (
    "the etcd servers cannot do what they are asked: they may have lost their majority or their disk space"
)

T = TypeVar("T")


class Barred(Trouble):
    """The server wants a user, or that user may not do it."""


class NotEtcd(Trouble):
    """Something else answers."""


class Untrusted(Trouble):
    """TLS failed."""


class Missing(Trouble):
    """The lease named is not there any more."""


class Login(msgspec.Struct, frozen=True):
    user: str
    password: str

    def __repr__(self) -> str:
        return f"Login({self.user!r})"


class Header(msgspec.Struct, frozen=True):
    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    key: bytes = b""
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0


class Range(msgspec.Struct, frozen=True):
    header: Header = Header()
    kvs: tuple[KeyValue, ...] = ()


class _Response(msgspec.Struct, frozen=True):
    response_range: Range | None = None


class Txn(msgspec.Struct, frozen=True):
    header: Header
    succeeded: bool = False
    responses: tuple[_Response, ...] = ()

    def found(self) -> KeyValue | None:
        """The first key of the first range among the responses."""
        kvs = next((r.response_range.kvs for r in self.responses if r.response_range is not None), ())
        return kvs[0] if kvs else None


class Granted(msgspec.Struct, frozen=True):
    ID: int
    TTL: int
    header: Header = Header()


class _Alive(msgspec.Struct, frozen=True):
    TTL: int = 0


class KeptAlive(msgspec.Struct, frozen=True):
    result: _Alive


class Revoked(msgspec.Struct, frozen=True):
    header: Header


class Happened(msgspec.Struct, frozen=True):
    """type is absent for a put."""

    kv: KeyValue
    type: str = "PUT"


class Watched(msgspec.Struct, frozen=True):
    header: Header = Header()
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    events: tuple[Happened, ...] = ()


class _Line(msgspec.Struct, frozen=True):
    result: Watched


class _Token(msgspec.Struct, frozen=True):
    token: str


class _Fault(msgspec.Struct, frozen=True):
    error: str = ""
    code: int = 0


class Gateway:
    """One HTTP client. Every call ends within limit_s for each endpoint."""

    def __init__(
        self, endpoints: Sequence[str], tls: ssl.SSLContext | None, limit_s: float, login: Login | None = None
    ) -> None:
        """endpoints are URLs without a path."""
        self._endpoints = tuple(endpoints)
        self._login = login
        self._headers: dict[str, str] = {}
        self._at = 0
        self._limit = aiohttp.ClientTimeout(total=limit_s)
        self._watching: aiohttp.ClientResponse | None = None
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls if tls is not None else True, limit=8),
            timeout=self._limit,
            read_bufsize=_LINE_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def limit(self, limit_s: float) -> None:
        """Change how long one endpoint may take."""
        self._limit = aiohttp.ClientTimeout(total=limit_s)

    async def call(self, path: str, ask: Mapping[str, Any], kind: type[T]) -> T:
        """The answer of the first endpoint that has one; Trouble where none has."""
        try:
            return await self._ask(path, ask, kind)
        except Barred:
            if self._login is None:
                raise
        # Tokens end, and another server may not know this one.
        self._headers = {}
        who = {"name": self._login.user, "password": self._login.password}
        self._headers = {"Authorization": (await self._ask("/v3/auth/authenticate", who, _Token)).token}
        return await self._ask(path, ask, kind)

    async def watch(self, key: bytes, end: bytes, revision: int, idle_s: float) -> AsyncGenerator[Watched, None]:
        """What happens to keys of [key, end) from this revision on. Trouble when it ends, for whatever reason.

        It is given up after idle_s of silence, and when a call has found this endpoint wanting: a server that is cut
        off from the others keeps its watches open and says nothing.
        """
        ask = {"create_request": {"key": coded(key), "range_end": coded(end), "start_revision": str(revision)}}
        limit = aiohttp.ClientTimeout(total=None, sock_connect=self._limit.total, sock_read=idle_s)
        try:
            async with self._http.post(
                f"{self._endpoints[self._at]}/v3/watch",
                json=ask,
                timeout=limit,
                headers=self._headers,
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise _trouble_of(await _bounded(response))
                self._watching = response
                while line := await response.content.readline():
                    yield _decoded(line, _Line).result
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Trouble(_SILENT) from error
        except ValueError as error:  # a line without an end
            raise NotEtcd(_GARBAGE) from error
        finally:
            self._watching = None
        raise Trouble(_SILENT)

    def stop_watching(self) -> None:
        """End the watch that goes on, if one does."""
        if self._watching is not None:
            self._watching.close()

    async def close(self) -> None:
        await self._http.close()

    async def _ask(self, path: str, ask: Mapping[str, Any], kind: type[T]) -> T:
        trouble: Trouble = Trouble(_SILENT)
        for _ in self._endpoints:
            at = self._at
            try:
                return await self._call(at, path, ask, kind)
            except (Barred, Missing):
                raise
            except Trouble as found:
                trouble = found
                self._leave(at)
        raise trouble

    async def _call(self, at: int, path: str, ask: Mapping[str, Any], kind: type[T]) -> T:
        try:
            async with self._http.post(
                f"{self._endpoints[at]}{path}",
                json=ask,
                timeout=self._limit,
                headers=self._headers,
                allow_redirects=False,
            ) as response:
                body = await _bounded(response)
        except aiohttp.ClientSSLError as error:
            raise Untrusted(_UNTRUSTED) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Trouble(_SILENT) from error
        if response.status != 200:
            raise _trouble_of(body)
        return _decoded(body, kind)

    def _leave(self, at: int) -> None:
        """Go on to the next endpoint, unless another call has done so."""
        if self._at == at and len(self._endpoints) > 1:
            self._at = (at + 1) % len(self._endpoints)
            self.stop_watching()


def coded(text: bytes) -> str:
    """Keys and values are base64 in JSON."""
    return b64encode(text).decode()


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _MOST_BYTES:
            raise NotEtcd(_GARBAGE)
    return bytes(body)


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        # Not strict: 64-bit integers come as strings.
        return msgspec.json.decode(body, type=kind, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        fault = _fault_of(body)
        raise NotEtcd(_GARBAGE) if fault is None else _judged(fault) from None


def _trouble_of(body: bytes) -> Trouble:
    fault = _fault_of(body)
    return NotEtcd(_GARBAGE) if fault is None else _judged(fault)


def _judged(fault: _Fault) -> Trouble:
    if fault.code in _BARRED or any(words in fault.error for words in _USER_WANTED):
        return Barred("the etcd servers want a user name and password that may read and write the cluster's keys: give "
                      "--etcd-login FILE, which holds USER:PASSWORD")  # fmt: skip
    return Missing("the lease has ended") if fault.code == _MISSING else Trouble(_FAILING)


def _fault_of(body: bytes) -> _Fault | None:
    """What etcd says when it refuses; within a stream the same is called a result's error."""
    try:
        fault = msgspec.json.decode(body, type=_Fault, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return fault if fault.code else None
