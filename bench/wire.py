"""What comes back on a socket, read without touching one: an HTTP/1.1 response and the server-sent events in its body.

`connection` feeds whatever bytes arrived, cut anywhere, and gets body pieces; `reading` feeds those and gets events.
Pure: no I/O, no clock. Everything is bounded, and what breaks the framing raises WireFault with a word for the report.
"""

from __future__ import annotations

import enum
import re
from typing import Final, NamedTuple

MAX_HEAD_BYTES: Final = 64 << 10
MAX_EVENT_BYTES: Final = 16 << 20
_MAX_LINE_BYTES: Final = 4 << 10
# Plain digits only: int() would also take signs, spaces and underscores.
_CHUNK_SIZE: Final = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
_HEX: Final = b"0123456789abcdefABCDEF"
_LENGTH: Final = re.compile(rb"[0-9]{1,15}")
_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?", re.DOTALL)


class WireFault(Exception):
    """The bytes are not what the protocol allows. `reason` is one word for counting, the text is for a person."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Event(NamedTuple):
    """One server-sent event: its name ("" unless an `event:` line gave one) and its data lines joined."""

    name: str
    data: bytes


class _State(enum.Enum):
    HEAD = "head"
    SIZE = "chunk size"
    CHUNK = "chunk"
    CHUNK_END = "end of chunk"
    TRAILER = "trailer"
    LENGTH = "body"
    UNTIL_CLOSE = "body until close"
    DONE = "done"


class ResponseParser:
    """One response: `feed` returns body pieces as they come; `complete` says that it has ended.

    What follows the response's last byte stays in `rest` (nothing, from a server that answers one request at a time).
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.keep_alive = False
        self.rest = b""
        self._state = _State.HEAD
        self._left = 0
        self._trailer_bytes = 0

    @property
    def has_head(self) -> bool:
        """Whether `status` and `headers` are those of the response, not of an interim one."""
        return self._state is not _State.HEAD

    @property
    def complete(self) -> bool:
        return self._state is _State.DONE

    def feed(self, data: bytes) -> list[bytes]:
        """The pieces of body that `data` completes, in order and never empty."""
        if self.rest:
            data = self.rest + data
            self.rest = b""
        pieces: list[bytes] = []
        at = _whole_chunks(data, pieces) if self._state is _State.SIZE else 0
        if 0 < at == len(data):
            return pieces
        while self._state is not _State.DONE:
            moved = self._step(data, at, pieces)
            if moved < 0:
                break
            at = moved
        self.rest = data[at:] if at else data
        return pieces

    def eof(self) -> None:
        """The server closed: the end of a body without a length, or a response that was cut."""
        if self._state is _State.UNTIL_CLOSE:
            self._state = _State.DONE
        if self._state is not _State.DONE:
            raise WireFault("closed", f"the connection was closed in the {self._state.value} of the response")

    def _step(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        """Take one element from data[at:]; where the next one starts, or -1 when more bytes are needed."""
        match self._state:
            case _State.CHUNK | _State.LENGTH:
                return self._take_body(data, at, pieces)
            case _State.SIZE:
                return self._take_size(data, at)
            case _State.CHUNK_END:
                if len(data) - at < 2:
                    return -1
                if data[at : at + 2] != b"\r\n":
                    raise WireFault("bad_http", "a chunk is longer than its size line says")
                self._state = _State.SIZE
                return at + 2
            case _State.TRAILER:
                return self._take_trailer(data, at)
            case _State.UNTIL_CLOSE:
                if at == len(data):
                    return -1
                pieces.append(data[at:])
                return len(data)
            case _:
                return self._take_head(data, at)

    def _take_body(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        size = min(self._left, len(data) - at)
        if size == 0:
            return -1
        pieces.append(data[at : at + size])
        self._left -= size
        if self._left == 0:
            self._state = _State.CHUNK_END if self._state is _State.CHUNK else _State.DONE
        return at + size

    def _take_size(self, data: bytes, at: int) -> int:
        end = data.find(b"\r\n", at)
        if end < 0:
            if len(data) - at > _MAX_LINE_BYTES:
                raise WireFault("bad_http", "a chunk size line has no end")
            return -1
        found = _CHUNK_SIZE.fullmatch(data, at, end)
        if found is None:
            raise WireFault("bad_http", f"a chunk size line reads {data[at : min(end, at + 40)]!r}")
        self._left = int(found[1], 16)
        self._state = _State.CHUNK if self._left else _State.TRAILER
        return end + 2

    def _take_trailer(self, data: bytes, at: int) -> int:
        end = data.find(b"\r\n", at)
        self._trailer_bytes += max(0, end - at)
        if self._trailer_bytes > MAX_HEAD_BYTES or (end < 0 and len(data) - at > MAX_HEAD_BYTES):
            raise WireFault("bad_http", "the trailer has no end")
        if end < 0:
            return -1
        if end == at:
            self._state = _State.DONE
        return end + 2

    def _take_head(self, data: bytes, at: int) -> int:
        end = data.find(b"\r\n\r\n", at)
        if end < 0:
            if len(data) - at > MAX_HEAD_BYTES:
                raise WireFault("bad_http", "the head of the response has no end")
            return -1
        lines = data[at:end].split(b"\r\n")
        found = _STATUS.fullmatch(lines[0])
        if found is None:
            raise WireFault("bad_http", f"the status line reads {lines[0][:60]!r}")
        self.status = int(found[2])
        if 100 <= self.status < 200:
            return end + 4  # an interim response; the real one follows
        self.headers = _headers(lines[1:])
        tokens = {t.strip() for t in self.headers.get("connection", "").lower().split(",")}
        self.keep_alive = "close" not in tokens and (found[1] == b"1" or "keep-alive" in tokens)
        self._choose_framing()
        return end + 4

    def _choose_framing(self) -> None:
        length = self.headers.get("content-length")
        coding = self.headers.get("transfer-encoding")
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise WireFault("bad_http", "the body is compressed, though only identity was asked for")
        if self.status in (204, 304):
            self._state = _State.DONE
        elif coding is not None:
            if coding.lower() != "chunked" or length is not None:
                raise WireFault("bad_http", f"transfer-encoding {coding!r}, content-length {length!r}")
            self._state = _State.SIZE
        elif length is not None:
            if _LENGTH.fullmatch(length.encode()) is None:
                raise WireFault("bad_http", f"content-length {length!r}")
            self._left = int(length)
            self._state = _State.LENGTH if self._left else _State.DONE
        else:
            self.keep_alive = False
            self._state = _State.UNTIL_CLOSE


class SseParser:
    """Server-sent events by the standard: any line ending, comments, several data lines, cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._name = ""
        self._size_bytes = 0
        self._drop_newline = False
        self._started = False
        self.comments = 0

    @property
    def pending(self) -> bool:
        """Whether an event has begun that no blank line has ended. By the standard it is dropped at the end."""
        return bool(self._rest or self._data)

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes."""
        # Nearly every piece of a token stream is exactly one event on one line.
        if data.startswith(b"data: ") and data.find(b"\n") == len(data) - 2 and data.endswith(b"\n\n"):
            if not (self._rest or self._data or self._name or self._drop_newline) and b"\r" not in data:
                self._started = True
                return [Event("", data[6:-2])]
        return self._feed_slowly(data)

    def _feed_slowly(self, data: bytes) -> list[Event]:
        if self._drop_newline and data:
            # The line ended with the \r of a \r\n that was cut in two.
            self._drop_newline = False
            data = data[1:] if data[0] == 10 else data
        text = self._rest + data
        if not self._started and text:
            if len(text) < 3 and b"\xef\xbb\xbf".startswith(text):
                self._rest = text
                return []
            self._started = True
            text = text.removeprefix(b"\xef\xbb\xbf")
        if b"\r" in text:
            self._drop_newline = text.endswith(b"\r")
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = text.split(b"\n")
        self._rest = lines.pop()
        events: list[Event] = []
        for line in lines:
            self._take_line(line, events)
        if len(self._rest) + self._size_bytes > MAX_EVENT_BYTES:
            raise WireFault("bad_sse", f"an event is larger than {MAX_EVENT_BYTES} bytes")
        return events

    def _take_line(self, line: bytes, events: list[Event]) -> None:
        if not line:
            if self._data:
                events.append(Event(self._name, b"\n".join(self._data)))
            self._data, self._name, self._size_bytes = [], "", 0
            return
        field, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if not field:
            self.comments += 1
        elif field == b"data":
            self._data.append(value)
            self._size_bytes += len(value) + 1
        elif field == b"event":
            self._name = value.decode(errors="replace")


def _whole_chunks(data: bytes, pieces: list[bytes]) -> int:
    """Take the chunks that lie in `data` from its start to their ends; where the first other thing starts.

    This is what a token costs: streams send an event in a chunk, and chunks arrive whole. Nothing is judged here, so
    whatever looks odd is left to the careful steps.
    """
    at = 0
    while True:
        end = data.find(b"\r\n", at, at + 10)
        digits = data[at:end]
        if end <= at or digits.strip(_HEX):
            return at
        stop = end + 2 + int(digits, 16)
        if stop == end + 2 or data[stop : stop + 2] != b"\r\n":
            return at
        pieces.append(data[end + 2 : stop])
        at = stop + 2


def _headers(lines: list[bytes]) -> dict[str, str]:
    """Names in lower case. A name that comes twice is joined by commas, as the standard allows for lists."""
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise WireFault("bad_http", f"a header line reads {line[:60]!r}")
        key = name.decode("latin-1").lower()
        text = value.strip().decode("latin-1")
        found[key] = f"{found[key]}, {text}" if key in found else text
    return found
