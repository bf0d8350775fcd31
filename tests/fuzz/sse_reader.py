"""A strict reader of event streams, written from the standard; it accepts only what this server promises to write.

Each event is one data line and an empty line, lines end in a line feed, comments start with a colon. It is fed in
pieces as they come off a socket, cut anywhere.
"""

from __future__ import annotations

import json
from typing import Any


class Malformed(Exception):
    """The stream is not what was promised."""


class SseReader:
    """Events so far; `finish` once the stream has ended."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.comments = 0
        self.done = False
        self._rest = b""
        self._data: bytes | None = None

    def feed(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._line(line)

    def finish(self) -> None:
        if self._rest or self._data is not None:
            raise Malformed("the stream ends within an event")
        if not self.done:
            raise Malformed("the stream ends without [DONE]")

    def _line(self, line: bytes) -> None:
        if b"\r" in line:
            raise Malformed("a carriage return in a line")
        if self.done and line:
            raise Malformed("something after [DONE]")
        if not line:
            if self._data is not None:
                self._event(self._data)
            self._data = None
        elif line.startswith(b":"):
            self.comments += 1
        elif not line.startswith(b"data: "):
            raise Malformed(f"a line that is no data: {line[:80]!r}")
        elif self._data is not None:
            raise Malformed("an event of two data lines")
        else:
            self._data = line[6:]

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        text = data.decode("utf-8")
        # A client may cut a text at everything that Unicode calls a line end.
        if len(text.splitlines()) != 1:
            raise Malformed(f"an event that some clients cut: {text[:80]!r}")
        value = json.loads(text, parse_constant=_refuse)
        if not isinstance(value, dict):
            raise Malformed("an event that is no object")
        self.events.append(value)


def _refuse(word: str) -> Any:
    raise Malformed(f"{word} is no JSON")
