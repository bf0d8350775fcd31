"""What a chat model says, cut into its kinds: content, reasoning, and tool calls. Pure.

`reply` and the translations (`responses`, `messages`) write pieces; they never look at a model's own markup. A piece
can no longer change: what could still become markup waits inside until it is decided.
"""

from __future__ import annotations

import msgspec


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
