"""Requests that are wrong in the ways HTTP can be wrong, and good ones between them; each with what it deserves.

`Fate` is the whole oracle: what the bytes are owed. The last request of a case asks for the connection's end, so that a
case is over when the server closes.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import random

from harness import scribble
from http_client import Script, cut

SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\nHost: x\r\nX-Request-Id: smuggled\r\n\r\n"
PATHS = (
    b"/", b"/health", b"/v1/models", b"/v1/chat/completions", b"/nothing", b"/../../etc/passwd", b"/%2e%2e/%2f", b"/%",
    b"/%zz", b"/%00", b"/\xff\xfe", b"/a?b=c&d=%ff", b"//", b"/v1/models/%F0%9F%98%80", b"/v1/models/" + b"a" * 3000,
    b"*",
    b"http://[::1", b"http://x:99999/health", b"http://evil/health", b"//evil/health", b"/health#frag", b"?", b"",
    b"/v1/models/a/b/..%2f", b"http://", b"\\health", b"/health;x=1", b"/;", b"///v1//models", b"ht!tp://x/",
)  # fmt: skip
METHODS = (b"GET", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"TRACE", b"CONNECT", b"PATCH", b"get", b"BREW",
           b"",
           b"G\x00T", b"PRI", b"A" * 300, b"P OST", b"\x16\x03\x01")  # fmt: skip
VERSIONS = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"http/1.1", b"HTTP/1.1.1", b"HTTP/", b"",
            b"HTTP/1.10", b"HTTPS/1.1", b"HTTP/-1.1")  # fmt: skip
HEADERS = (
    b"Host: y", b"Host:", b": empty", b"No colon", b"Space : x", b"\tTab: x", b"X: a\x00b", b"X: \xff\xfe",
    b"X:" + b"a" * 9000,
    b"X: " + b"a" * 40_000, b"X" * 20_000 + b": a", b" folded", b"X: a\rb", b"X: a\nY: b",
    b"Connection: close, keep-alive",
    b"Connection: upgrade", b"Upgrade: websocket", b"Upgrade: h2c", b"Expect: 100-continue", b"Expect: nothing",
    b"TE: x",
    b"Content-Encoding: gzip", b"Content-Type: multipart/form-data", b"Content-Type: \xff", b"X-Request-Id: a\tb",
    b"X-Request-Id: " + b"i" * 500, b"Authorization: Bearer \xff", b"Range: bytes=0-", b"If-None-Match: *",
    b"Cookie: =;=",
    b"Accept-Encoding: gzip", b"Keep-Alive: timeout=-1", b"Origin: null", b"Forwarded: for=x", b"Transfer-Encoding:",
)  # fmt: skip
# Two framings of one request: which of them counts decides where the next one begins.
FRAMINGS = (
    b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: chunked\r\nContent-Length: 5",
    b"Content-Length: 5\r\nContent-Length: 6", b"Content-Length: 5, 6", b"Content-Length: +5", b"Content-Length: -5",
    b"Content-Length: 5 5", b"Content-Length: 0x5", b"Content-Length: 5\x0b", b"Content-Length: \xd9\xa5",
    b"Content-Length: 99999999999999999999999", b"Content-Length: 5_0", b"Content-Length: ", b"Content-Length: five",
    b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding: xchunked", b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding: identity, chunked\r\nContent-Length: 5", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x",
    b"Transfer-Encoding : chunked", b"Transfer-Encoding:\x0bchunked", b"Transfer-Encoding: chun\x00ked",
    b" Transfer-Encoding: chunked", b"Content-Length: 5\r\n Content-Length: 6",
    b"Content_Length: 5\r\nContent-Length : 5",
)  # fmt: skip
CHUNKS = (b"0x5\r\nhello\r\n", b"-5\r\nhello\r\n", b"5 \r\nhello\r\n", b"+5\r\nhello\r\n", b"g\r\nhello\r\n",
          b"5\nhello\n",
          b"5\r\nhelloXX", b"5\r\nhell\r\n", b"ffffffffffffffffff\r\nhello\r\n", b"\r\nhello\r\n",
          b"5;a=\x00b\r\nhello\r\n",
          b"5;" + b"e" * 30_000 + b"\r\nhello\r\n", b"5_0\r\nhello\r\n", b"\xd9\xa5\r\nhello\r\n", b"5\r\nhello",
          b"5\rhello\r\n")  # fmt: skip


class Fate(enum.Enum):
    """ANSWERED: one answer to each request, in order. REFUSED: at most one answer, an error, then the end; what
    follows is never read as a request. ANY: answers or an end, but nothing worse. UNHEARD: the client does not listen.
    """

    ANSWERED = "answered"
    REFUSED = "refused"
    ANY = "any"
    UNHEARD = "unheard"


@dataclasses.dataclass(frozen=True)
class Case:
    script: Script
    fate: Fate
    ids: tuple[str, ...] = ()


def make(rng: random.Random) -> Case:
    kind = rng.random()
    if kind < 0.25:
        return _good(rng)
    if kind < 0.40:
        raw = _request(rng.choice(METHODS), rng.choice(PATHS), rng.choice(VERSIONS), ()) + _last("end")
        return Case(_script(rng, raw), Fate.ANY)
    if kind < 0.55:
        headers = tuple(rng.choice(HEADERS) for _ in range(rng.choice((1, 1, 2, 5))))
        return Case(_script(rng, _request(b"GET", b"/health", b"HTTP/1.1", headers) + _last("end")), Fate.ANY)
    if kind < 0.70:
        head = _request(b"POST", b"/v1/completions", b"HTTP/1.1", (rng.choice(FRAMINGS),))
        body = rng.choice((b"hello", b"0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b""))
        return Case(_script(rng, head + body + SMUGGLED), Fate.REFUSED)
    if kind < 0.80:
        head = _request(b"POST", b"/v1/completions", b"HTTP/1.1", (b"Transfer-Encoding: chunked",))
        return Case(_script(rng, head + rng.choice(CHUNKS) + b"0\r\n\r\n" + SMUGGLED), Fate.ANY)
    if kind < 0.92:
        return Case(_script(rng, scribble(rng, _good(rng).script.raw)), Fate.ANY)
    raw = _good(rng).script.raw
    return Case(Script(cut(raw[: rng.randrange(len(raw))], ()), leave=True), Fate.UNHEARD)


def _good(rng: random.Random) -> Case:
    """Pipelined requests, each with its own id and its own answer."""
    parts, ids = [], []
    for number in range(rng.choice((1, 1, 2, 4))):
        ids.append(f"id-{number}-{rng.randrange(1 << 30)}")
        parts.append(_good_one(rng, ids[-1]))
    ids.append("end")
    return Case(_script(rng, b"".join(parts) + _last("end")), Fate.ANSWERED, tuple(ids))


def _good_one(rng: random.Random, label: str) -> bytes:
    name = b"X-Request-Id: " + label.encode()
    if rng.random() < 0.4:
        return _request(b"GET", rng.choice((b"/health", b"/v1/models", b"/nothing")), b"HTTP/1.1", (name,))
    body = json.dumps({
        "model": "fake", "prompt": label, "echo": True, "max_tokens": rng.randrange(1, 4), "stream": rng.random() < 0.4,
    }).encode()  # fmt: skip
    if rng.random() < 0.5:
        return _request(b"POST", b"/v1/completions", b"HTTP/1.1", (name, b"Content-Length: %d" % len(body))) + body
    pieces = cut(body, [rng.randrange(len(body)) for _ in range(3)])
    extension = rng.choice((b"", b";a=b", b";a"))
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    trailer = rng.choice((b"", b"", b"X-Trailer: 1\r\n"))
    head = _request(b"POST", b"/v1/completions", b"HTTP/1.1", (name, b"Transfer-Encoding: chunked"))
    return head + chunks + b"0\r\n" + trailer + b"\r\n"


def _request(method: bytes, path: bytes, version: bytes, headers: tuple[bytes, ...]) -> bytes:
    return b"\r\n".join((method + b" " + path + b" " + version, b"Host: x", *headers, b"", b""))


def _last(label: str) -> bytes:
    """A good request that asks for the connection's end."""
    return _request(b"GET", b"/health", b"HTTP/1.1", (b"X-Request-Id: " + label.encode(), b"Connection: close"))


def _script(rng: random.Random, raw: bytes) -> Script:
    if rng.random() < 0.7:
        return Script((raw,))
    places = [rng.randrange(max(1, len(raw))) for _ in range(rng.choice((1, 3, 10)))]
    return Script(cut(raw, places), pause_s=0.002 if rng.random() < 0.5 else 0.0)
