"""The grammar of an answer that must be a tool call, or have a schema, and may be thought about first. Pure.

`tools` asks for it; it is compiled where the request runs. What surrounds the arguments of a call is spelled out as the
model's own template spells it, and the arguments follow the function's schema, so that what comes can be read.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from janus_server.api.dialect import Dialect
from janus_server.api.speech import THINK, THOUGHT, TOOL_CALL, TOOL_CALLED, TOOL_CALLS, ToolForm
from janus_server.api.tool_bodies import Function
from janus_server.types import Grammar, GrammarKind

# As Python's json writes it, which is how templates do; in white space without end a small model would lose itself.
_SPACING: Final = MappingProxyType({"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "})


class Thinking(enum.Enum):
    """Whether a thought may come before the call, or is open already and must be closed."""

    NONE = "none"
    POSSIBLE = "possible"
    OPEN = "open"


def forced_calls(
    functions: Sequence[Function],
    form: ToolForm,
    dialect: Dialect,
    *,
    many: bool,
    thinking: Thinking,
    answer: str | None = None,
) -> Grammar:
    """A call of one of these functions, and with `many` more of them after it; nothing else but a thought before.

    answer: the JSON schema of what may be said instead.
    """
    marks = _Marks(dialect)
    key = "parameters" if form is ToolForm.LLAMA else "arguments"
    calls = [f"call_{i}: {_call(function, key)}" for i, function in enumerate(functions)]
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(functions))), *calls]
    match form:
        case ToolForm.HERMES:
            rules += [f'marked: {marks.of(TOOL_CALL)} "\\n" call "\\n" {marks.of(TOOL_CALLED)}']
            told = 'marked ("\\n" marked)*' if many else "marked"
        case ToolForm.MISTRAL:
            more = ' (", " call)*' if many else ""
            told = f'{marks.of(TOOL_CALLS)} / ?/ "[" call{more} "]"'
        case ToolForm.LLAMA:  # trained to make one call in a message
            told = "call"
    rules.append(f"answer: {told}" if answer is None else f"answer: {told} | %json {_spaced(json.loads(answer))}")
    return _after_thought(rules, marks, thinking)


def thoughtful_answer(schema: str, dialect: Dialect, thinking: Thinking) -> Grammar:
    """An answer of that JSON schema, and a thought before it."""
    return _after_thought([f"answer: %json {_spaced(json.loads(schema))}"], _Marks(dialect), thinking)


class _Marks:
    """Markers as terms of a grammar. One that is a token of its own may be refused as text, or the other way round,
    depending on how the vocabulary declares it: both spell the same.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._ids = {marker.text: marker.id for marker in dialect.markers}

    def of(self, text: str) -> str:
        return f"({json.dumps(text)} | <[{self._ids[text]}]>)" if text in self._ids else json.dumps(text)

    def token(self, text: str) -> str | None:
        return f"<[{self._ids[text]}]>" if text in self._ids else None


def _after_thought(rules: Sequence[str], marks: _Marks, thinking: Thinking) -> Grammar:
    """The rule `answer`, where a thought may or must come first."""
    before = {Thinking.NONE: "", Thinking.POSSIBLE: f"({marks.of(THINK)} thought)? ", Thinking.OPEN: "thought "}
    thought = [] if thinking is Thinking.NONE else _thought(marks)
    return Grammar(GrammarKind.TOOLS, "\n".join([f"start: {before[thinking]}answer", *rules, *thought]) + "\n")


def _thought(marks: _Marks) -> list[str]:
    """Anything up to the closing marker, and the line ends after it."""
    closed = marks.token(THOUGHT)
    ways = "told" if closed is None else f"told | ANYTHING {closed}"
    pattern = THOUGHT.replace("/", "\\/")
    return [f"thought: ({ways}) /\\n{{0,2}}/", f"told[lazy]: /(?s:.*){pattern}/", "ANYTHING: /(?s:.*)/"]


def _call(function: Function, key: str) -> str:
    schema = function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
    before = '{"name": "' + function.name + f'", "{key}": '
    return f'{json.dumps(before)} %json {_spaced({"type": "object", **schema})} "}}"'


def _spaced(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": dict(_SPACING)})
