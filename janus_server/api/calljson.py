"""JSON as a model writes it, read while it arrives: one value, or the object that is a tool call. Pure.

`speech` feeds both character by character and passes arguments on before they are complete, so what is wrong must be
found where it stands and not at the end. Linear in the text; nothing here ever raises for what a model wrote.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Collection
from typing import Final

SPACE: Final = " \t\n\r"
MAX_DEPTH: Final = 128  # clients read arguments with recursive parsers
MAX_NUMBER_CHARS: Final = 1000  # Python's own parser refuses integers of more than 4300 digits

_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_SPACES: Final = re.compile(r"[ \t\n\r]*")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LONE: Final = re.compile("[\ud800-\udfff]")  # half a character, which no answer can carry
_RAW: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ARGUMENTS: Final = ("arguments", "parameters")
_KEYS: Final = ("name", "type", "id", *_ARGUMENTS)

# A number's progress: what may follow in each state, and the states in which it may end.
_NUMBER: Final = {
    "": {"-": "-", "0": "0", "9": "i"},
    "-": {"0": "0", "9": "i"},
    "0": {".": ".", "e": "e"},
    "i": {"0": "i", "9": "i", ".": ".", "e": "e"},
    ".": {"0": "f", "9": "f"},
    "f": {"0": "f", "9": "f", "e": "e"},
    "e": {"-": "s", "+": "s", "0": "x", "9": "x"},
    "s": {"0": "x", "9": "x"},
    "x": {"0": "x", "9": "x"},
}
_NUMBER_ENDS: Final = "0ifx"


def skip_space(text: str, at: int) -> int:
    """The place of the first character from `at` on that is no white space."""
    found = _SPACES.match(text, at)
    return found.end() if found else at


class _Next(enum.Enum):
    """What may come next in a value."""

    VALUE = enum.auto()
    FIRST_ITEM = enum.auto()
    FIRST_KEY = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    AFTER = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    NUMBER = enum.auto()
    LITERAL = enum.auto()


class JsonValue:
    """One JSON value that arrives in pieces. After `feed`, `raw` has the places of line ends and tabs that stand bare
    inside a string: models that write programs leave them so, and escaping them changes nothing else.
    """

    __slots__ = ("_hex", "_key", "_next", "_number", "_number_chars", "_open", "_rest", "bad", "done", "raw")

    def __init__(self) -> None:
        self.done = False
        self.bad = False
        self.raw: list[int] = []
        self._next = _Next.VALUE
        self._open: list[str] = []
        self._key = False  # the string being read is a key
        self._hex = 0
        self._number = ""
        self._number_chars = 0
        self._rest = ""

    def feed(self, text: str, at: int) -> int:
        """Read on from `at`; the place after the value, of what cannot belong to it, or the end of the text."""
        self.raw = []
        while at < len(text) and not self.done and not self.bad:
            at = self._read(text, at)
        return at

    def _read(self, text: str, at: int) -> int:
        match self._next:
            case _Next.STRING:
                return self._string(text, at)
            case _Next.NUMBER:
                return self._digits(text, at)
            case _Next.LITERAL:
                return self._literal(text[at], at)
            case _Next.ESCAPE:
                return self._escape(text[at], at)
            case _Next.HEX:
                return self._hex_digit(text[at], at)
        at = skip_space(text, at)
        return at if at == len(text) else self._mark(text[at], at)

    def _mark(self, mark: str, at: int) -> int:
        """What stands between strings, numbers and literals."""
        expected = self._next
        if mark == '"' and expected is not _Next.COLON and expected is not _Next.AFTER:
            self._key = expected in (_Next.FIRST_KEY, _Next.KEY)
            self._next = _Next.STRING
        elif expected in (_Next.VALUE, _Next.FIRST_ITEM) and mark in "{[":
            self._open.append(mark)
            self.bad = len(self._open) > MAX_DEPTH
            self._next = _Next.FIRST_KEY if mark == "{" else _Next.FIRST_ITEM
        elif expected is _Next.COLON and mark == ":":
            self._next = _Next.VALUE
        elif expected is _Next.AFTER and mark == ",":
            self._next = _Next.KEY if self._open[-1] == "{" else _Next.VALUE
        elif mark == "}" and (expected is _Next.FIRST_KEY or (expected is _Next.AFTER and self._open[-1] == "{")):
            self._close()
        elif mark == "]" and (expected is _Next.FIRST_ITEM or (expected is _Next.AFTER and self._open[-1] == "[")):
            self._close()
        elif expected in (_Next.VALUE, _Next.FIRST_ITEM):
            return self._scalar(mark, at)
        else:
            self.bad = True
        return at if self.bad else at + 1

    def _scalar(self, mark: str, at: int) -> int:
        for word in ("true", "false", "null"):
            if word[0] == mark:
                self._rest, self._next = word, _Next.LITERAL
                return at
        self._number, self._number_chars, self._next = "", 0, _Next.NUMBER
        if mark not in "-0123456789":
            self.bad = True
        return at

    def _close(self) -> None:
        self._open.pop()
        self._ended()

    def _ended(self) -> None:
        """A value inside ended, or the whole of it."""
        self._next = _Next.AFTER
        self.done = not self._open

    def _string(self, text: str, at: int) -> int:
        found = _PLAIN.match(text, at)
        at = found.end() if found else at
        if at == len(text):
            return at
        mark = text[at]
        if mark == '"':
            if self._key:
                self._next = _Next.COLON
            else:
                self._ended()
        elif mark == "\\":
            self._next = _Next.ESCAPE
        elif mark in _RAW:
            self.raw.append(at)
        else:
            self.bad = True
            return at
        return at + 1

    def _escape(self, mark: str, at: int) -> int:
        if mark == "u":
            self._hex, self._next = 4, _Next.HEX
        elif mark in '"\\/bfnrt':
            self._next = _Next.STRING
        else:
            self.bad = True
            return at
        return at + 1

    def _hex_digit(self, mark: str, at: int) -> int:
        if mark not in "0123456789abcdefABCDEF":
            self.bad = True
            return at
        self._hex -= 1
        if self._hex == 0:
            self._next = _Next.STRING
        return at + 1

    def _digits(self, text: str, at: int) -> int:
        while at < len(text):
            mark = text[at]
            kind = "9" if mark in "123456789" else mark.lower() if mark in "eE" else mark
            follows = _NUMBER[self._number].get(kind)
            if follows is None or self._number_chars == MAX_NUMBER_CHARS:
                self.bad = follows is not None or self._number not in _NUMBER_ENDS or not self._number
                if not self.bad:
                    self._ended()
                return at
            self._number = follows
            self._number_chars += 1
            at += 1
        return at

    def _literal(self, mark: str, at: int) -> int:
        if mark != self._rest[0]:
            self.bad = True
            return at
        self._rest = self._rest[1:]
        if not self._rest:
            self._ended()
        return at + 1


class CallObject:
    """`{"name": …, "arguments": {…}}` as it arrives; "parameters" says the same, "type" and "id" are passed over.

    `name` is set once it is known, and `take` then gives the arguments, as JSON text, as far as they have come.
    Arguments that are null or missing are an empty object; a string that holds an object is that object.
    """

    __slots__ = ("_arguments", "_key", "_names", "_next", "_seen", "_streams", "_text", "_value", "bad", "done", "name")

    def __init__(self, names: Collection[str] | None = None) -> None:
        """names: the functions that a call may name; None for any."""
        self.done = False
        self.bad = False
        self.name: str | None = None
        self._names = names
        self._next = "{"  # a mark, "key", "value" (its first character), or "inside" one
        self._seen: set[str] = set()
        self._key = ""
        self._value = JsonValue()
        self._streams = False  # arguments that begin as an object are passed on as they come
        self._text: list[str] = []
        self._arguments: list[str] = []

    def feed(self, text: str, at: int) -> int:
        """Read on from `at`; the place after the object, of what cannot belong to it, or the end of the text."""
        while at < len(text) and not self.done and not self.bad:
            if self._next == "inside":
                at = self._inside(text, at)
                continue
            at = skip_space(text, at)
            if at < len(text):
                at = self._mark(text[at], at)
        return at

    @property
    def enough(self) -> bool:
        """Whether all that matters has been read: some models forget the last brace."""
        return self._next == "after" and self.name is not None and "arguments" in self._seen

    def take(self) -> str:
        """The arguments that came since the last call; none before the name is known."""
        if self.name is None:
            return ""
        ready, self._arguments = "".join(self._arguments), []
        return ready

    def _mark(self, mark: str, at: int) -> int:
        if self._next == "key" and mark == '"':
            return self._begin("", at)
        if self._next == "value" and self._fits(mark):
            self._streams = self._key in _ARGUMENTS and mark == "{"
            return self._begin(self._key, at)
        if self._next == "after" and mark == "}":
            return self._end(at)
        if self._next == "after" and mark == ",":
            self._next = "key"
        elif mark == self._next == "{":
            self._next = "key"
        elif mark == self._next == ":":
            self._next = "value"
        else:
            self.done = self.enough
            return at if self.done else self._refuse(at)
        return at + 1

    def _refuse(self, at: int) -> int:
        self.bad = True
        return at

    def _fits(self, mark: str) -> bool:
        """Whether a value of the key at hand may begin so."""
        if self._key == "name":
            return mark == '"'
        return mark in '{"n' if self._key in _ARGUMENTS else mark not in "{["

    def _begin(self, key: str, at: int) -> int:
        """A value begins here, or with key "" a key."""
        self._key, self._next = key, "inside"
        self._value, self._text = JsonValue(), []
        return at

    def _inside(self, text: str, at: int) -> int:
        value = self._value
        end = value.feed(text, at)
        streams = self._streams and self._key in _ARGUMENTS
        (self._arguments if streams else self._text).append(_escaped(text, at, end, value.raw))
        self.bad = value.bad
        if value.done and streams:
            self._next = "after"
        elif value.done:
            self._ended("".join(self._text))
        return end

    def _ended(self, text: str) -> None:
        """A key or value that was kept until it was complete."""
        self._next = "after"
        if self._key == "":
            self._learn_key(json.loads(text))
        elif self._key == "name":
            self.name = str(json.loads(text))
            self.bad = not _NAME.fullmatch(self.name) or (self._names is not None and self.name not in self._names)
        elif self._key in _ARGUMENTS:
            held = "{}" if text == "null" else _object_in(json.loads(text))
            self.bad = held is None
            self._arguments.append(held or "")

    def _learn_key(self, key: str) -> None:
        kind = "arguments" if key in _ARGUMENTS else key
        self.bad = key not in _KEYS or kind in self._seen
        self._seen.add(kind)
        self._key, self._next = key, ":"

    def _end(self, at: int) -> int:
        if self.name is None:
            return self._refuse(at)
        if "arguments" not in self._seen:
            self._arguments.append("{}")
        self.done = True
        return at + 1


def _escaped(text: str, at: int, end: int, raw: list[int]) -> str:
    """text[at:end] with the line ends and tabs at `raw` escaped."""
    if not raw:
        return text[at:end]
    parts = []
    for place in raw:
        parts += [text[at:place], _RAW[text[place]]]
        at = place + 1
    return "".join([*parts, text[at:end]])


def _object_in(text: str) -> str | None:
    """The JSON object that a string holds, or None."""
    value = JsonValue()
    at = skip_space(text, 0)
    if not text.startswith("{", at) or _LONE.search(text):
        return None
    end = value.feed(text, at)
    return _escaped(text, at, end, value.raw) if value.done and skip_space(text, end) == len(text) else None
