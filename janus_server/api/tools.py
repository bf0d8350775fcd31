"""Tools and reasoning of one chat call: what the template is given, how the answer is cut, what it is forced to be.

Pure. `parse` checks a body's tools with `check_tools`; `http` asks `talk_of` before the prompt is written and
`spoken_by` once it is. A call with tool_choice "none" is one without tools: they are not shown to the model either,
since a small model that sees tools calls them, and nobody would read that call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from janus_server.api.bodies import ChatBody, Limits
from janus_server.api.checks import deeper, json_of, need
from janus_server.api.dialect import Dialect, ends_in_thought
from janus_server.api.speech import THINK, THOUGHT, TOOL_CALL, TOOL_CALLED, TOOL_CALLS, Style, ToolForm
from janus_server.api.tool_bodies import Function, NamedChoice
from janus_server.api.tool_grammar import Thinking, forced_calls, thoughtful_answer
from janus_server.errors import Refused
from janus_server.types import Grammar, GrammarKind

if TYPE_CHECKING:
    from janus_server.api.plan import Call


class Talk(msgspec.Struct, frozen=True):
    """tools and kwargs are for the template; offered are the functions that may be called, forced those of which one
    must be. many: one answer may hold several calls.
    """

    dialect: Dialect
    tools: tuple[Mapping[str, Any], ...] | None
    kwargs: Mapping[str, Any] | None
    offered: tuple[Function, ...]
    forced: tuple[Function, ...]
    named: bool
    many: bool
    reasoning: bool


def check_tools(body: ChatBody, limits: Limits) -> None:
    """Refuse tools, and messages about them, that are out of bounds or do not go together."""
    _check_messages(body)
    tools, choice = body.tools or [], body.tool_choice
    need(len(tools) <= limits.tools, "tools", f"at most {limits.tools} tools")
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        name = tool.function.name
        need(name not in seen, f"tools[{i}].function.name", "another name than those of the tools before it")
        seen.add(name)
        kind = (tool.function.parameters or {}).get("type", "object")
        need(kind == "object", f"tools[{i}].function.parameters.type", '"object"')
    if isinstance(choice, NamedChoice):
        need(choice.function.name in seen, "tool_choice.function.name", "the name of one of the tools")
    need(choice != "required" or bool(tools), "tool_choice", '"none" or "auto" where there are no tools')
    json_of(tools, "tools", limits.tool_bytes, limits.tool_depth)  # all of them are small before one is walked
    for i, tool in enumerate(tools):
        where = f"tools[{i}].function.parameters"
        deep = deeper(tool.function.parameters or {}, limits.tool_depth)
        need(not deep, where, f"nested at most {limits.tool_depth} deep")


def talk_of(body: ChatBody, dialect: Dialect) -> Talk:
    """How this call is spoken with a model of that dialect; refused where the model cannot be told of tools."""
    choice = body.tool_choice or "auto"
    offered = tuple(tool.function for tool in body.tools or ()) if choice != "none" else ()
    if offered and not dialect.reads_tools:
        raise _no_tools("this model's chat template knows no tools; leave tools out, or choose another model")
    if offered and dialect.tools is None:
        raise _no_tools("this model writes tool calls in a form that is not supported yet")
    named = choice.function.name if isinstance(choice, NamedChoice) else None
    must = choice == "required" or named is not None
    return Talk(
        dialect=dialect,
        tools=tuple(map(_shown, offered)) or None,
        kwargs=_template_kwargs(body, dialect),
        offered=offered,
        forced=tuple(one for one in offered if named in (None, one.name)) if must else (),
        named=named is not None,
        many=body.parallel_tool_calls is not False and named is None,
        reasoning=dialect.reasoning and body.separate_reasoning is not False and body.include_reasoning is not False,
    )


def spoken_by(call: Call, talk: Talk, prompt_end: str) -> Call:
    """The planned call with its style and grammar. prompt_end: the last characters of the prompt, control tokens and
    all, which tell whether the model begins inside a thought.
    """
    in_thought = talk.dialect.reasoning and ends_in_thought(prompt_end)
    form = talk.dialect.tools if talk.offered else None
    asked = call.requests[0].grammar
    grammar = _grammar(talk, prompt_end, in_thought, asked)
    style = Style(
        reasoning=talk.reasoning,
        # A grammar that is not ours starts with the answer: nothing will close the thought.
        in_thought=talk.reasoning and in_thought and (grammar is None or grammar is not asked),
        tools=form,
        names=frozenset(one.name for one in talk.offered),
        single=form is not None and not talk.many,
        named=talk.named,
    )
    if style == Style() and grammar is None:
        return call
    shown = _shown_controls(talk, form)
    requests = [msgspec.structs.replace(one, grammar=grammar, shown_ids=shown) for one in call.requests]
    source = "tools" if talk.forced else call.grammar_from
    return msgspec.structs.replace(call, style=style, requests=tuple(requests), grammar_from=source)


def _grammar(talk: Talk, prompt_end: str, in_thought: bool, asked: Grammar | None) -> Grammar | None:
    """What the answers must follow. asked: the grammar that the client wants of what is said."""
    form = talk.dialect.tools if talk.offered else None
    thinking = Thinking.OPEN if in_thought else Thinking.NONE
    if talk.dialect.reasoning and not in_thought and not prompt_end.rstrip().endswith(THOUGHT):
        thinking = Thinking.POSSIBLE
    if form is not None and talk.forced:
        return forced_calls(talk.forced, form, talk.dialect, many=talk.many, thinking=thinking)
    if asked is None:
        return None
    schema = {GrammarKind.JSON_SCHEMA: asked.source, GrammarKind.JSON_OBJECT: '{"type": "object"}'}.get(asked.kind)
    if form is not None and schema is None:
        raise _no_tools("an answer that must follow a regular expression or grammar leaves no room for them")
    if form is ToolForm.LLAMA:
        raise _no_tools("this model's calls are JSON objects like the answers asked for; set tool_choice")
    if form is not None:
        return forced_calls(talk.offered, form, talk.dialect, many=talk.many, thinking=thinking, answer=schema)
    if schema is not None and talk.reasoning and thinking is not Thinking.NONE:
        return thoughtful_answer(schema, talk.dialect, thinking)
    return asked


def _shown_controls(talk: Talk, form: ToolForm | None) -> tuple[int, ...]:
    """Control tokens that must appear in the text, because answers are cut at them."""
    wanted: set[str] = set()
    if talk.reasoning:
        wanted |= {THINK, THOUGHT}
    if form is ToolForm.HERMES:
        wanted |= {TOOL_CALL, TOOL_CALLED}
    if form is ToolForm.MISTRAL:
        wanted.add(TOOL_CALLS)
    return tuple(sorted(marker.id for marker in talk.dialect.markers if marker.control and marker.text in wanted))


def _shown(function: Function) -> dict[str, Any]:
    """A tool as templates read it. strict is not for the model; parameters are looked into by many templates."""
    fields: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        fields["description"] = function.description
    fields["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": fields}


def _template_kwargs(body: ChatBody, dialect: Dialect) -> Mapping[str, Any] | None:
    """What a client gives the template itself goes before what its effort implies."""
    given = body.chat_template_kwargs
    if body.reasoning_effort == "none" and dialect.thinking_switch:
        return {"enable_thinking": False, **(given or {})}
    return given


def _check_messages(body: ChatBody) -> None:
    for i, message in enumerate(body.messages):
        where = f"messages[{i}]"
        if message.role == "tool":
            need(message.tool_call_id is not None, f"{where}.tool_call_id", "the id of the call that this answers")
        if message.tool_calls:
            need(message.role == "assistant", f"{where}.tool_calls", "left out where the role is not assistant")


def _no_tools(message: str) -> Refused:
    return Refused(f"tools cannot be used: {message}", param="tools", code="unsupported_parameter")
