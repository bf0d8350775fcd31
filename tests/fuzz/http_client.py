"""A client that speaks HTTP/1.1 by hand: it sends bytes in pieces, leaves when told, and reads answers strictly.

Everything it waits for is bounded: a wait that runs out is `Silent`, which a target takes for a hang wherever the
server owed an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import msgspec

WAIT_S = 20.0
MOST_BYTES = 8 << 20


class Silent(Exception):
    """Nothing came, and the connection stayed open."""


class NotHttp(Exception):
    """What came is no HTTP/1.1 answer."""


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


@dataclasses.dataclass(frozen=True)
class Script:
    """What a client does: pieces with a pause before each, then perhaps it closes its half or all of the connection."""

    pieces: tuple[bytes, ...]
    pause_s: float = 0.0
    half_close: bool = False
    leave: bool = False

    @property
    def raw(self) -> bytes:
        return b"".join(self.pieces)


async def play(port: int, script: Script, wait_s: float = WAIT_S) -> list[Answer]:
    """The answers to a script, read until the server closes or `wait_s` passes in silence (then `Silent`).

    A server may answer and close before it has read everything, so a failing write is no failure.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        raw = b""
        with contextlib.suppress(ConnectionError):
            for piece in script.pieces:
                if script.pause_s:
                    await asyncio.sleep(script.pause_s)
                writer.write(piece)
                await writer.drain()
            if script.leave:
                return []
            if script.half_close:
                writer.write_eof()
            raw = await _all(reader, wait_s)
        return parse(raw, bodiless=1 if script.raw.startswith(b"HEAD ") else 0)
    finally:
        writer.transport.abort()


async def _all(reader: asyncio.StreamReader, wait_s: float) -> bytes:
    """Everything until the end of the connection; a reset after some bytes is an end too."""
    raw = b""
    try:
        async with asyncio.timeout(wait_s):
            while piece := await reader.read(65536):
                raw += piece
                if len(raw) > MOST_BYTES:
                    raise NotHttp("more bytes than any answer has")
    except TimeoutError:
        raise Silent(f"after {len(raw)} bytes: {raw[-200:]!r}") from None
    except ConnectionError:
        pass
    return raw


def parse(raw: bytes, bodiless: int = 0) -> list[Answer]:
    """Every answer in these bytes, which hold nothing else; the first `bodiless` ones answer a HEAD."""
    answers: list[Answer] = []
    while raw:
        answer, raw = _one(raw, len(answers) < bodiless)
        if answer.status >= 200:  # 100 Continue is no answer yet
            answers.append(answer)
    return answers


def _one(raw: bytes, bodiless: bool) -> tuple[Answer, bytes]:
    head, found, rest = raw.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    version, _, status = lines[0].partition(b" ")
    # The server's parser lets CONNECT name any version, and its answer repeats it.
    if not found or not re.fullmatch(rb"HTTP/[0-9]\.[0-9]", version) or not status[:3].isdigit():
        raise NotHttp(repr(raw[:200]))
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip() or name.decode().lower() in headers:
            raise NotHttp(f"the header line {line[:200]!r}")
        headers[name.decode().lower()] = value.strip().decode("latin-1")
    code = int(status[:3])
    # Of a HEAD that is no valid HTTP the server's parser knows no method: that answer has its body.
    if (bodiless and not rest.startswith(b'{"error"')) or code < 200 or code in (204, 304):
        return Answer(code, headers, b""), rest
    if headers.get("transfer-encoding") == "chunked":
        body, rest = _chunks(rest)
    else:
        size = int(headers["content-length"])
        if len(rest) < size:
            raise NotHttp(f"a body of {len(rest)} bytes where {size} were promised")
        body, rest = rest[:size], rest[size:]
    return Answer(code, headers, body), rest


def _chunks(raw: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        size, found, raw = raw.partition(b"\r\n")
        length = int(size, 16)
        if not found or raw[length : length + 2] != b"\r\n":
            raise NotHttp("a chunk that does not end where it says")
        if length == 0:
            return body, raw[2:]
        body, raw = body + raw[:length], raw[length + 2 :]


def cut(raw: bytes, places: Sequence[int]) -> tuple[bytes, ...]:
    """`raw` in pieces, cut at these places."""
    borders = [0, *sorted(p for p in places if 0 < p < len(raw)), len(raw)]
    return tuple(raw[a:b] for a, b in itertools.pairwise(borders) if a < b)
