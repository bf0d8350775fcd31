"""The admin routes of a running server as terminal commands call them: which key is sent where, and what went wrong.

Every command that calls them uses it. The key is JANUS_ADMIN_KEY where that is set; else the one that a server on this
machine left for its own user, which is sent to that server's own address and nowhere else. It knows nothing of the
engine.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
from yarl import URL

from janus_server import localkey
from janus_server.api.admin import AdminError, ModelEvent
from janus_server.units import format_seconds

T = TypeVar("T")

# A node answers in one second however others are, and waits some seconds for a leader.
ANSWER_S: Final = 5.0
# What a broken, foreign or absent server can raise: a host label too long is a UnicodeError.
_NO_ANSWER: Final = (
    aiohttp.ClientError, UnicodeError, aiohttp.http.HttpProcessingError, TimeoutError, msgspec.MsgspecError,
)  # fmt: skip
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NO_KEY: Final = (
    "this needs the server's admin key: set JANUS_ADMIN_KEY (a server on this machine that was started without one "
    "answers to the user who started it)"
)


class Failed(Exception):
    """What was asked for cannot be had; the sentence is for the user.

    status and code are the server's, 0 and None without an answer.
    """

    def __init__(self, message: str, status: int = 0, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Target(msgspec.Struct, frozen=True):
    """The server to call, and the key that it gets."""

    url: URL
    key: str | None

    def __repr__(self) -> str:
        return f"Target({self.url})"


def target(url: str, key: str | None, folders: Sequence[Path]) -> Target:
    """The server at `url`; without a key, the one that this user's server on this machine has left in `folders`."""
    try:
        parsed = URL(url if "://" in url else f"http://{url}")
        host, port = parsed.host or "", parsed.port
    except ValueError:
        host, port = "", None
    if not host or port is None:
        raise Failed(f"{url} is not a URL, such as http://127.0.0.1:8000")
    base = parsed.origin()
    found = None if key is not None else localkey.find(folders, port)
    if found is None:
        return Target(base, key)
    if host == "localhost":  # a name may lead to other addresses too, where somebody else may listen
        return Target(base.with_host(found.address), found.key)
    return Target(base, found.key if _same(host, found.address) else None)


class Client:
    """Calls of one server; enter it with `async with`. Every trouble is a `Failed`. within_s bounds each call; without
    it a server may take its time, as it does with what it is asked to wait for."""

    def __init__(self, server: Target, within_s: float | None = None) -> None:
        self._server = server
        self._within_s = within_s

    async def __aenter__(self) -> Client:
        headers = {"Authorization": f"Bearer {self._server.key}"} if self._server.key else {}
        timeout = aiohttp.ClientTimeout(total=self._within_s, sock_connect=5)
        self._http = aiohttp.ClientSession(timeout=timeout, headers=headers, read_bufsize=1 << 20)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def get(self, path: str, shape: type[T], query: dict[str, str] | None = None) -> T:
        return await self._call("GET", path, query or {}, shape)

    async def post(self, path: str, query: dict[str, str], shape: type[T], body: bytes | None = None) -> T:
        return await self._call("POST", path, query, shape, body)

    async def events(self) -> Events:
        """The stream of events, once the server has begun it."""
        try:
            response = await self._http.get(self._server.url.with_path("/admin/events"))
            await self._check(response)
        except _NO_ANSWER as error:
            raise self._unreachable(error) from None
        return Events(response)

    async def _call(
        self, method: str, path: str, query: dict[str, str], shape: type[T], body: bytes | None = None
    ) -> T:
        url = self._server.url.with_path(path).with_query(query)
        try:
            async with self._http.request(method, url, data=body) as response:
                await self._check(response)
                return msgspec.json.decode(await response.read(), type=shape)
        except _NO_ANSWER as error:
            raise self._unreachable(error) from None

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status in (200, 202):
            return
        body = await response.read()
        response.close()
        try:
            error = msgspec.json.decode(body, type=AdminError).error
        except msgspec.MsgspecError:
            raise Failed(f"{self._server.url} answered with status {response.status}", response.status) from None
        if error.code in ("invalid_api_key", "admin_key_needed") and self._server.key is None:
            raise Failed(_NO_KEY, response.status)
        raise Failed(printable(error.message), response.status, error.code)

    def _unreachable(self, error: Exception) -> Failed:
        url = self._server.url
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return Failed(f"no server answers at {url}; start one with: janus serve")
        if isinstance(error, TimeoutError) and self._within_s is not None:
            return Failed(f"{url} has not answered for {format_seconds(self._within_s)}")
        return Failed(f"{url} does not answer like a Janus server ({type(error).__name__}: {printable(str(error))})")


class Events:
    """An event stream that has begun. Its end, however it comes, is the end of the iteration."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[ModelEvent]:
        try:
            async for line in self._response.content:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield msgspec.json.decode(line[5:], type=ModelEvent)
        except _NO_ANSWER:
            return

    def close(self) -> None:
        self._response.close()


def printable(text: str) -> str:
    """Without control characters: nothing that a server says moves the cursor."""
    return _CONTROL.sub("", text)


def _same(host: str, address: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")) == ipaddress.ip_address(address)
    except ValueError:
        return False


def wish_path(model: str, wish: str) -> str:
    """Slashes of the name stay: they are part of the path."""
    return f"/admin/models/{model}/{wish}"


def plain(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows of cells as aligned lines; `right` are the columns that are aligned at their end."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells: list[Any] = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
