"""How a model speaks beyond plain text: decided once from its chat template and vocabulary. Pure.

`lifecycle` asks when a model is loaded and keeps the answer in the model's `Target`; `tools` makes of it what one call
needs. A template is only looked at, never run: it is the checkpoint's, and what it says wrongly costs a worse answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from janus_server.api.speech import THINK, THOUGHT, TOOL_CALL, TOOL_CALLED, TOOL_CALLS, ToolForm

# Texts that may be tokens of their own, and that answers are cut at.
MARKERS: Final = (THINK, THOUGHT, TOOL_CALL, TOOL_CALLED, TOOL_CALLS)

# Signs of forms that use one of our markers but put something else than JSON between them.
_OTHER_FORMS: Final = ("<function=", "<arg_key>", "[ARGS]", "[CALL_ID]")
_COMMENT: Final = re.compile(r"\{#.*?#\}", re.DOTALL)


class Marker(msgspec.Struct, frozen=True):
    """A marker that is one token; a control token is left out of the text unless it is asked for."""

    text: str
    id: int
    control: bool


class Dialect(msgspec.Struct, frozen=True):
    """reads_tools: the template shows tools to the model; tools is then how the model answers, if that is known.

    reasoning: the model may think between `<think>` and `</think>`. thinking_switch: its template has a variable that
    turns this off.
    """

    reasoning: bool = False
    thinking_switch: bool = False
    reads_tools: bool = False
    tools: ToolForm | None = None
    markers: tuple[Marker, ...] = ()


def dialect_of(template: str | None, tool_template: str | None, markers: tuple[Marker, ...]) -> Dialect:
    """template: what plain conversations are written with; tool_template: those with tools, often the same."""
    plain = _COMMENT.sub("", template or "")
    tools = _COMMENT.sub("", tool_template or "")
    reads_tools = re.search(r"\btools\b", tools) is not None
    return Dialect(
        reasoning=THOUGHT in plain,
        thinking_switch=re.search(r"\benable_thinking\b", plain) is not None,
        reads_tools=reads_tools,
        tools=_form(tools) if reads_tools else None,
        markers=markers,
    )


def markers_of(known: Mapping[str, tuple[int, bool]]) -> tuple[Marker, ...]:
    """The markers among a vocabulary's added tokens: text to id, and whether it is a control token."""
    return tuple(Marker(text, *known[text]) for text in MARKERS if text in known)


def ends_in_thought(prompt: str) -> bool:
    """Whether a prompt with that end has the model begin inside a thought."""
    return prompt.rstrip().endswith(THINK)


def _form(template: str) -> ToolForm | None:
    if any(sign in template for sign in _OTHER_FORMS):
        return None
    if TOOL_CALL in template and '"arguments' in template.replace("\\", ""):
        return ToolForm.HERMES
    if TOOL_CALLS in template:
        return ToolForm.MISTRAL
    # Llama 3 is told of its form in words; the tag alone could also announce Python.
    return ToolForm.LLAMA if re.search(r'"name":[^{}]*"parameters":', template.replace("\\", "")) else None
