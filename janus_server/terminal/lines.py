"""Lines of coloured pieces, which the pictures of `memory` and `status` are made of, and how they are printed.

rich is imported where there is a terminal to draw on, and only then.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from rich.text import Text

COLOURS: Final = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta", "bright_yellow",
                  "bright_green", "bright_blue", "bright_red")  # fmt: skip


class Span(msgspec.Struct, frozen=True):
    """A piece of a line; style is rich's, "" for none."""

    text: str
    style: str = ""


Line = tuple[Span, ...]


def show(lines: Sequence[Line]) -> None:
    """Print them, in colours where stdout is a terminal."""
    if not sys.stdout.isatty():
        print(text_of(lines))
        return
    from rich.console import Console

    Console(highlight=False).print(rich_of(lines), soft_wrap=True)


def text_of(lines: Sequence[Line]) -> str:
    return "\n".join("".join(span.text for span in line).rstrip() for line in lines)


def rich_of(lines: Sequence[Line]) -> Text:
    from rich.text import Text

    text = Text()
    for i, line in enumerate(lines):
        for span in line:
            text.append(span.text, span.style or None)
        if i + 1 < len(lines):
            text.append("\n")
    return text
