"""The part of a chat body that is about tools, as msgspec records; `bodies` puts them into the body. Pure.

A field that a client may leave out is nullable. What depends on several fields is checked by `tools`.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$(?!\n)"  # "$" alone would let a line end through
NAME_WORDS = "1 to 64 letters, digits, underscores, dots or dashes"

Name = Annotated[str, Meta(pattern=NAME_PATTERN)]


class Function(msgspec.Struct, kw_only=True):
    """What a model is told of a function. parameters is the JSON schema of its arguments, an object."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: Function


class ChosenFunction(msgspec.Struct, kw_only=True):
    name: str


class NamedChoice(msgspec.Struct, kw_only=True):
    """The function that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class CalledFunction(msgspec.Struct, kw_only=True):
    """arguments is a JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that an assistant's message made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


# The words for these fields, by their path: see `bodies.ALLOWED`.
TOOL_WORDS: Mapping[str, str] = types.MappingProxyType({
    "tools": "a list of tools",
    "tools[]": "an object such as {\"type\": \"function\", \"function\": {\"name\": \"…\", \"parameters\": {…}}}",
    "tools[].type": "\"function\": there are no other tools here",
    "tools[].function": "an object with 'name' and, if it takes arguments, 'parameters'",
    "tools[].function.name": NAME_WORDS,
    "tools[].function.description": "a string",
    "tools[].function.parameters": "a JSON schema, an object",
    "tools[].function.strict": "true or false",
    "tool_choice": "\"none\", \"auto\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": \"…\"}}",
    "messages[].tool_calls": "a list of tool calls",
    "messages[].tool_calls[]": "an object with 'id', 'type' and 'function'",
    "messages[].tool_calls[].id": "a string",
    "messages[].tool_calls[].type": "\"function\"",
    "messages[].tool_calls[].function": "an object with 'name' and 'arguments'",
    "messages[].tool_calls[].function.name": "a string",
    "messages[].tool_calls[].function.arguments": "a string that holds JSON",
})  # fmt: skip
