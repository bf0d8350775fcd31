"""Tokens to text as they arrive, and stop strings cut out of that text. Pure: no I/O, no clock.

`instance` keeps one `Detokenizer` and one `StopMatcher` per choice. What `push` returns can no longer change, so it
may be sent; the rest (half a character, half a stop string) waits inside until it is decided or `finish` flushes it.
Cost per token does not depend on how much text there is already.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from janus_server.errors import require


class TokenBytes(Protocol):
    """What is needed of a tokenizer to turn ids into text."""

    @property
    def strips_first_space(self) -> bool: ...

    def token_bytes(self, token: int) -> bytes: ...

    def is_special(self, token: int) -> bool: ...


class Matched(msgspec.Struct, frozen=True):
    """What a stop matcher lets through: text that can no longer change, and the stop string that ended it, if any."""

    text: str
    stop: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop is not None


class Detokenizer:
    """Incremental decoding of one sequence; the concatenation of all it returns is `tokenizer.decode` of the same ids.

    A sentencepiece vocabulary writes a space before the first word of a text and decoding drops it. With a `prompt`
    that already has text, the first generated token is in mid-sentence and keeps its space.
    """

    __slots__ = ("_decode", "_is_special", "_kept", "_skip_special", "_strip", "_token_bytes")

    def __init__(
        self, tokenizer: TokenBytes, skip_special: bool, prompt: Sequence[int] = (), kept: Collection[int] = ()
    ) -> None:
        """kept: special tokens that are text even where the others are skipped."""
        self._token_bytes = tokenizer.token_bytes
        self._kept = kept
        self._is_special = tokenizer.is_special
        self._skip_special = skip_special
        # Both byte-level and byte-fallback vocabularies are strings of bytes, so UTF-8's own decoder knows what is
        # incomplete.
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._strip = tokenizer.strips_first_space and not any(map(self._shown, prompt))

    def push(self, token: int) -> str:
        """The text that this token completes, often "" in the middle of a character."""
        if self._skip_special and self._is_special(token) and token not in self._kept:
            return ""
        return self._first(self._decode(self._token_bytes(token)))

    def finish(self) -> str:
        """What was held back: an unfinished character becomes U+FFFD."""
        return self._first(self._decode(b"", True))

    def _first(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def _shown(self, token: int) -> bool:
        return bool(self._token_bytes(token)) and not (self._skip_special and self._is_special(token))


class Stops:
    """Stop strings with what matching them takes, made once for all choices that share them."""

    __slots__ = ("borders", "firsts", "texts")

    def __init__(self, texts: tuple[str, ...]) -> None:
        require(all(texts), "a stop string is empty")
        self.texts = texts
        self.borders = [_borders(text) for text in texts]
        self.firsts = tuple({text[0]: None for text in texts})


class StopMatcher:
    """Cuts a text that arrives in pieces where the first of several stop strings is complete.

    First means: whose last character comes first; of several that end there, the longest. That is when generation ends
    anyway, and it does not depend on how the text was cut into pieces. Knuth–Morris–Pratt per stop string: linear time.
    """

    __slots__ = ("_borders", "_ended", "_firsts", "_held", "_include", "_matched", "_stops")

    def __init__(self, stops: Stops, include: bool) -> None:
        self._stops = stops.texts
        self._include = include
        self._borders = stops.borders
        self._firsts = stops.firsts
        self._matched = [0] * len(stops.texts)  # characters of each stop that the text so far ends with
        self._held = ""
        self._ended = False

    def push(self, text: str) -> Matched:
        """The part of the text so far that is now safe to send, up to the first stop string if it is complete."""
        require(not self._ended, "text after a stop string")
        if not self._held and not any(first in text for first in self._firsts):
            return Matched(text)
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            stop = self._step(buffer[position])
            if stop is not None:
                self._ended = True
                self._held = ""
                end = position + 1
                return Matched(buffer[: end if self._include else end - len(stop)], stop)
        keep = len(buffer) - max(self._matched, default=0)
        self._held = buffer[keep:]
        return Matched(buffer[:keep])

    def finish(self) -> str:
        """The held-back text: no stop string will complete it."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Advance every stop string by one character; the longest that is now complete."""
        complete: str | None = None
        for index, stop in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = self._borders[index][matched - 1]
            if stop[matched] == character:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop) and (complete is None or len(stop) > len(complete)):
                complete = stop
        return complete


def _borders(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        if text[index] == text[length]:
            length += 1
        borders[index] = length
    return borders
