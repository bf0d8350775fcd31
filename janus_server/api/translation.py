"""What the translations onto chat share: messages gathered turn by turn, and refusals put into the client's words.

Pure. `responses` and `messages` turn their bodies into the fields of a chat body with a `Turns`, which remembers from
where in the client's body each part came. Whatever chat then refuses is told with the client's own paths: `renamed`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from janus_server import types
from janus_server.api.bodies import ChatBody, Limits
from janus_server.api.parse import chat_of
from janus_server.api.plan import Call
from janus_server.api.reply import json_bytes
from janus_server.api.speech import Piece, Said, Speech, ToolArguments, ToolOpened
from janus_server.errors import Refused

T = TypeVar("T")

# How much deeper an object of the client's may stand when it is written than where it was read; some 20 are used.
SPARE_DEPTH = 64


class Translated(msgspec.Struct, frozen=True):
    """A body as chat has it, and from chat's paths to the client's; a path stands for all that lies below it."""

    chat: ChatBody
    places: Mapping[str, str]


class Turns:
    """The messages of a conversation, and the place in the client's body that each of their parts came from.

    A turn is gathered text by text and joined once, by `messages`: a body may hold very many small ones.
    """

    def __init__(self) -> None:
        self.places: dict[str, str] = {}
        self._turns: list[_Turn] = []

    def begin(self, role: str, text: str, place: str) -> None:
        """A message of its own."""
        self._open(role, place).texts.append(text)

    def say(self, role: str, text: str, place: str) -> None:
        """More of what this role says, a line of its own; a message of its own where another role spoke last."""
        self._last(role, place).texts.append(text)

    def think(self, text: str, place: str) -> None:
        """What the assistant reasoned with in this turn."""
        self._last("assistant", place).thoughts.append(text)

    def call(self, call_id: str, name: str, arguments: str, place: str, arguments_place: str) -> None:
        """A tool call of the assistant, in the message of its turn."""
        calls = self._last("assistant", place).calls
        where = f"messages[{len(self._turns) - 1}].tool_calls[{len(calls)}]"
        self.places[where] = place
        self.places[f"{where}.function.arguments"] = arguments_place
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, call_id: str, text: str, place: str) -> None:
        """What a tool answered."""
        turn = self._open("tool", place)
        turn.texts.append(text)
        turn.call_id = call_id

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat has it."""
        return [turn.message() for turn in self._turns]

    def _last(self, role: str, place: str) -> _Turn:
        if self._turns and self._turns[-1].role == role:
            return self._turns[-1]
        return self._open(role, place)

    def _open(self, role: str, place: str) -> _Turn:
        self.places[f"messages[{len(self._turns)}]"] = place
        self._turns.append(_Turn(role))
        return self._turns[-1]


class _Turn:
    """One message while it is gathered."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.call_id: str | None = None

    def message(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"role": self.role, "content": "\n".join(self.texts) if self.texts else None}
        if self.thoughts:
            fields["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            fields["tool_calls"] = self.calls
        if self.call_id is not None:
            fields["tool_call_id"] = self.call_id
        return fields


def translated(fields: Mapping[str, Any], places: Mapping[str, str], limits: Limits) -> Translated:
    """The chat body of these fields; what is not given stays out of it. Refused in the client's words."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return Translated(chat_of(given, limits), places)
    except Refused as refused:
        raise renamed(refused, places) from None


def renamed(refused: Refused, places: Mapping[str, str]) -> Refused:
    """A refusal by the chat path with the name that its field has in the client's body."""
    param = refused.param
    if param is None or (place := _place(param, places)) == param:
        return refused
    message = refused.message
    if re.search(r"\W|_", param):  # a plain word may stand in the sentence as a word
        message = re.sub(rf"(?<!\w){re.escape(param)}(?!\w)", lambda _: place, message)
    elif re.match(rf"{param}\b", message):
        message = place + message.removeprefix(param)
    return Refused(
        message,
        status=refused.status,
        kind=refused.kind,
        param=place,
        code=refused.code,
        retry_after_s=refused.retry_after_s,
    )


def required(value: T | None, path: str, what: str) -> T:
    """The value of a field that this kind of object must have."""
    if value is None:
        raise missing(path, what)
    return value


def missing(path: str, what: str) -> Refused:
    return Refused(f"{path} is required and must be {what}", param=path, code="missing_field")


def choose(kind: str, kinds: Mapping[str, T], path: str) -> T:
    """What stands for one kind of object; every other kind is refused by its place."""
    if kind not in kinds:
        names = ", ".join(f'"{name}"' for name in kinds)
        raise Refused(f"{path} must be one of {names}: nothing else can be read here", param=path, code="invalid_value")
    return kinds[kind]


class Heard(msgspec.Struct, frozen=True):
    """What one delta said: its pieces, and whether its tokens were reasoning. lost: tool calls so far that are none."""

    delta: types.Delta
    pieces: list[Piece]
    thought: bool
    lost: Mapping[int, str]


class Listener:
    """Cuts the one choice of a call into pieces, delta by delta."""

    def __init__(self, call: Call) -> None:
        self._speech = Speech(call.style, call.label.id)
        self.finish: types.FinishReason | None = None

    def hear(self, delta: types.Delta) -> Heard:
        thought = self._speech.thinking
        pieces = self._speech.push(delta.text) if delta.text else []
        if delta.finish is not None:
            self.finish = delta.finish
            pieces = [*pieces, *self._speech.finish()]
        return Heard(delta, pieces, thought, self._lost())

    @property
    def called(self) -> bool:
        """Whether there is a tool call in the settled answer."""
        return self._speech.calls > len(self._lost())

    @property
    def called_well(self) -> bool:
        """Whether a stream told of tool calls, and of none that came to nothing."""
        return self._speech.calls > 0 and not self._lost()

    def settled(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """All pieces of a choice that has ended: what began like a tool call and is none becomes text again."""
        lost = self._lost()
        for piece in pieces:
            match piece:
                case ToolOpened(number) if number in lost:
                    yield Said(lost[number])
                case ToolArguments(number) if number in lost:
                    pass
                case _:
                    yield piece

    def _lost(self) -> Mapping[int, str]:
        if self.finish is types.FinishReason.STOP:
            return {**self._speech.broken, **self._speech.incomplete}
        return self._speech.broken


def json_of(value: Mapping[str, Any], path: str) -> str:
    """An object of the client's as JSON text.

    Refused where it is nested so deeply that writing it again, further down the stack, could fail.
    """
    wrapped: Any = value
    for _ in range(SPARE_DEPTH):
        wrapped = [wrapped]
    try:
        text = msgspec.json.encode(wrapped).decode()
    except RecursionError:
        raise Refused(f"{path} is nested too deeply", param=path, code="invalid_value") from None
    return text[SPARE_DEPTH:-SPARE_DEPTH]


def event(name: str, fields: Mapping[str, Any]) -> bytes:
    """A named event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json_bytes(fields))


def _place(path: str, places: Mapping[str, str]) -> str:
    """The client's path for chat's, by the longest known path that it lies at or below."""
    end = len(path)
    while end > 0:
        if path[:end] in places:
            # A message was made of the whole part that it came from; what lies in it need not lie there.
            return places[path[:end]] + ("" if path.startswith("messages[") else path[end:])
        end = max(path.rfind(".", 0, end), path.rfind("[", 0, end))
    return path
