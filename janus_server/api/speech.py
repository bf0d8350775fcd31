"""What a chat model says, cut into its kinds: content, reasoning, and tool calls. Pure.

`chat_reply` and the translations (`responses`, `messages`) write pieces; they never look at a model's own markup. A
piece can no longer change: what could still become markup waits inside until it is decided. Linear in the text, and
what the pieces join to does not depend on how the text was cut. Tool calls that are not well-formed are content.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterable, Mapping

import msgspec

from janus_server.api.calljson import SPACE, CallObject, skip_space

THINK, THOUGHT = "<think>", "</think>"
TOOL_CALL, TOOL_CALLED = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS = "[TOOL_CALLS]"


class Said(msgspec.Struct, frozen=True):
    """Text that is part of the answer."""

    text: str


class Thought(msgspec.Struct, frozen=True):
    """Text that the model reasoned with before it answered."""

    text: str


class ToolOpened(msgspec.Struct, frozen=True):
    """A tool call begins: its number within the choice, the id that the server made for it, and the function's name."""

    number: int
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of a tool call's arguments."""

    number: int
    text: str


Piece = Said | Thought | ToolOpened | ToolArguments


class ToolForm(enum.Enum):
    """How a model writes tool calls: `<tool_call>` around each (Qwen, Hermes); the bare object as the whole message
    (Llama 3); one list after `[TOOL_CALLS]` (Mistral).
    """

    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"


class Style(msgspec.Struct, frozen=True):
    """How the choices of one call are cut. The default cuts nothing, and then no `Speech` is needed.

    in_thought: the prompt ends inside a thought. names: the functions that were offered; a bare object that names none
    of them is an answer that happens to be JSON. single: only the first tool call counts. named: the client named the
    function that had to be called, and so does not need to hear that one was.
    """

    reasoning: bool = False
    in_thought: bool = False
    tools: ToolForm | None = None
    names: frozenset[str] = frozenset()
    single: bool = False
    named: bool = False


class FunctionCall(msgspec.Struct, frozen=True):
    """A tool call as a whole; arguments is JSON text."""

    id: str
    name: str
    arguments: str


class Utterance(msgspec.Struct, frozen=True):
    """All that one choice said."""

    content: str
    reasoning: str
    calls: tuple[FunctionCall, ...]


class Speech:
    """One choice's text, cut as it arrives.

    calls counts the tool calls that were told. broken has those whose arguments were begun and are not JSON, by number,
    with the text they were written as; incomplete the one that the end of the text left open. Where a choice ended by
    itself, an incomplete call is as good as broken.
    """

    def __init__(self, style: Style, key: str) -> None:
        """key: what the ids of tool calls are made from; another one for each choice of each call."""
        self.calls = 0
        self.broken: dict[int, str] = {}
        self.incomplete: dict[int, str] = {}
        self._style = style
        self._key = key
        self._out: list[Piece] = []
        self._held = ""  # the start of a marker
        self._spaces: list[str] = []  # white space that belongs to a text only if more of it follows
        self._begun = not style.in_thought  # before that, line ends belong to the markup
        self._spoke = False
        self._called = False  # nothing but space came after a tool call
        self._call = CallObject()
        self._raw: list[str] = []
        self._number: int | None = None  # of the call at hand, once it was told
        self._step: Callable[[str, int], int] = self._start if style.reasoning else self._turn
        if style.in_thought:
            self._step = self._inside_thought

    @property
    def thinking(self) -> bool:
        """True while a thought is open."""
        return self._step == self._inside_thought

    def push(self, text: str) -> list[Piece]:
        """The pieces that this text completes."""
        self._out = []
        text = self._held + text
        self._held = ""
        at = 0
        while at < len(text):
            at = self._step(text, at)
        return self._out

    def finish(self) -> list[Piece]:
        """What was held back: no more text will come."""
        self._out = []
        held, self._held = self._held, ""
        if self._step == self._inside_thought:
            self._think(held)
        elif self._step in (self._inside_call, self._before_list):
            if not self._call.enough:
                self._leave_call()
        elif self._step != self._after_hermes and (held or not self._called):
            self._say("".join([*self._spaces, held]))
        return self._out

    # Reasoning

    def _start(self, text: str, at: int) -> int:
        """White space, then a thought or none: models think before they speak, and may write of the marker later."""
        at = self._skip(text, at)
        if at == len(text) or self._wait(text, at, THINK):
            return len(text)
        if text.startswith(THINK, at):
            self._spaces.clear()
            self._begun = False
            self._step = self._inside_thought
            return at + len(THINK)
        self._step = self._turn
        return at

    def _inside_thought(self, text: str, at: int) -> int:
        close = text.find(THOUGHT, at)
        end = close if close >= 0 else _marker_start(text, at, THOUGHT)
        self._think(text[at:end])
        if close < 0:
            self._held = text[end:]
            return len(text)
        self._spaces.clear()
        self._begun = False
        self._step = self._turn
        return close + len(THOUGHT)

    def _think(self, text: str) -> None:
        shown = self._without_edges(text)
        if shown:
            self._out.append(Thought(shown))

    # Content

    def _turn(self, text: str, at: int) -> int:
        """To the kind of content that the style asks for."""
        if self._style.tools is None:
            self._step = self._plain
        else:
            self._step = self._bare if self._style.tools is ToolForm.LLAMA else self._content
        return at

    def _plain(self, text: str, at: int) -> int:
        """Nothing but content from here on."""
        shown = "".join([*self._spaces, text[at:]])
        self._spaces.clear()
        self._say(shown if self._begun else shown.lstrip("\n"))
        return len(text)

    def _content(self, text: str, at: int) -> int:
        """Content up to the next tool call."""
        marker = TOOL_CALL if self._style.tools is ToolForm.HERMES else TOOL_CALLS
        found = text.find(marker, at)
        end = found if found >= 0 else _marker_start(text, at, marker)
        self._say(self._without_edges(text[at:end]))
        if found < 0:
            self._held = text[end:]
            return len(text)
        self._raw = []
        self._enter_call(marker)
        if self._style.tools is ToolForm.MISTRAL:
            self._step = self._before_list
        return end + len(marker)

    def _bare(self, text: str, at: int) -> int:
        """Where an object would be a tool call: at the start of the message, or after another call."""
        at = self._skip(text, at, ";," if self._called else "")
        if at == len(text) or self._wait(text, at, PYTHON_TAG):
            return len(text)
        tag = PYTHON_TAG if text.startswith(PYTHON_TAG, at) else ""
        if tag or text[at] == "{":
            self._raw = []
            self._enter_call(tag)
        else:
            self._step = self._plain
        return at + len(tag)

    # Tool calls

    def _enter_call(self, marker: str) -> None:
        """An object should follow. Should it not be a tool call, all of this was text, and so was the space before."""
        self._raw += [*self._spaces, marker]
        self._spaces.clear()
        self._call = CallObject(self._style.names if self._style.tools is ToolForm.LLAMA else None)
        self._number = None
        self._step = self._inside_call

    def _before_list(self, text: str, at: int) -> int:
        """Between Mistral's marker and its list."""
        end = skip_space(text, at)
        self._raw.append(text[at:end])
        if end == len(text):
            return end
        if text[end] != "[":
            self._leave_call()
            return end
        self._raw.append("[")
        self._step = self._inside_call
        return end + 1

    def _inside_call(self, text: str, at: int) -> int:
        end = self._call.feed(text, at)
        self._raw.append(text[at:end])
        self._tell()
        if self._call.bad:
            self._leave_call()
            self.broken |= self.incomplete
            self.incomplete.clear()
        elif self._call.done:
            self._called = True
            self._begun = self._spoke
            match self._style.tools:
                case ToolForm.HERMES:
                    self._step = self._after_hermes
                case ToolForm.MISTRAL:
                    self._step = self._after_mistral
                case _:
                    self._step = self._bare
        return end

    def _leave_call(self) -> None:
        """What was read is no whole tool call: text, if nothing was told of it yet."""
        raw = "".join(self._raw)
        self._begun = True
        self._step = self._plain if self._style.tools is ToolForm.LLAMA else self._content
        if self._number is None:
            self._say(raw)
        else:
            self.incomplete[self._number] = raw

    def _tell(self) -> None:
        """Pass on what is known of the call: its name once its arguments have begun, and these."""
        arguments = self._call.take()
        if not arguments or (self._style.single and self.calls == 1 and self._number is None):
            return
        if self._number is None:
            self._number = self.calls
            self.calls += 1
            self._out.append(ToolOpened(self._number, self._call_id(), self._call.name or ""))
        self._out.append(ToolArguments(self._number, arguments))

    def _call_id(self) -> str:
        word = hashlib.blake2b(f"{self._key} {self._number}".encode(), digest_size=12).hexdigest()
        # Mistral's templates refuse conversations whose ids have another form than nine letters and digits.
        return word[:9] if self._style.tools is ToolForm.MISTRAL else "call_" + word

    def _after_hermes(self, text: str, at: int) -> int:
        """The closing marker, which some models leave out."""
        at = self._skip(text, at)
        if at == len(text) or self._wait(text, at, TOOL_CALLED):
            return len(text)
        self._step = self._content
        if not text.startswith(TOOL_CALLED, at):
            return at
        self._spaces.clear()
        return at + len(TOOL_CALLED)

    def _after_mistral(self, text: str, at: int) -> int:
        at = self._skip(text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self._raw = []
            self._enter_call(",")
        else:
            self._step = self._content
        if text[at] == "]":
            self._spaces.clear()
        return at + 1 if text[at] in ",]" else at

    # Small pieces

    def _say(self, text: str) -> None:
        if text:
            self._begun = self._spoke = True
            self._called = False
            self._out.append(Said(text))

    def _without_edges(self, text: str) -> str:
        """`text` but for the space at its end, which waits, and for line ends where nothing has begun yet."""
        core = text.rstrip(SPACE)
        space = text[len(core) :]
        if not core:
            self._spaces.append(space)
            return ""
        shown = "".join([*self._spaces, core])
        shown, self._begun = (shown if self._begun else shown.lstrip("\n")), True
        self._spaces = [space]
        return shown

    def _skip(self, text: str, at: int, marks: str = "") -> int:
        """The place of the first character from `at` on that is neither white space nor one of `marks`."""
        end = skip_space(text, at)
        while marks and end < len(text) and text[end] in marks:
            end = skip_space(text, end + 1)
        self._spaces.append(text[at:end])
        return end

    def _wait(self, text: str, at: int, marker: str) -> bool:
        """Whether the text from `at` on could be the start of the marker; then it is held."""
        rest = text[at:]
        if len(rest) >= len(marker) or not marker.startswith(rest):
            return False
        self._held = rest
        return True


def gathered(pieces: Iterable[Piece], lost: Mapping[int, str]) -> Utterance:
    """Pieces as a whole. lost: calls by number that are content after all, with their text."""
    content, reasoning = [], []
    opened: dict[int, ToolOpened] = {}
    arguments: dict[int, list[str]] = {}
    for piece in pieces:
        match piece:
            case Said(text):
                content.append(text)
            case Thought(text):
                reasoning.append(text)
            case ToolOpened(number) if number in lost:
                content.append(lost[number])
            case ToolOpened(number):
                opened[number], arguments[number] = piece, []
            case ToolArguments(number, text) if number in opened:
                arguments[number].append(text)
    calls = (FunctionCall(call.id, call.name, "".join(arguments[number])) for number, call in opened.items())
    return Utterance("".join(content), "".join(reasoning), tuple(calls))


def _marker_start(text: str, at: int, marker: str) -> int:
    """Where the end of the text, from `at` on, could be the start of the marker; its length where it could not."""
    for size in range(min(len(marker) - 1, len(text) - at), 0, -1):
        if marker.startswith(text[-size:]):
            return len(text) - size
    return len(text)
