"""The body of /v1/responses (OpenAI's Responses) as a record, and its translation to a chat body.

Pure. `http` parses, translates, and answers as for chat; `responses_reply` writes what comes of it. Nothing is kept
between calls, so what would need an earlier call is refused by name. Every refusal names the client's own field.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from janus_server.api.bodies import NAME_CHARS, Limits, Natural, NotYet, Positive, Unit, plain_fields
from janus_server.api.checks import need, refuse_given
from janus_server.api.parse import decode
from janus_server.api.translation import Translated, Turns, choose, json_of, missing, required, translated
from janus_server.errors import Refused

LOGPROBS = "message.output_text.logprobs"
STATELESS = ("previous_response_id", "conversation", "background", "prompt", "context_management")


class InputPart(msgspec.Struct, kw_only=True):
    """One part of an item's content; which fields it must have depends on its type."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """One item of the input; which fields it must have depends on its type, which is "message" where left out."""

    type: str | None = None
    role: Literal["developer", "system", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class FlatTool(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """What a client sends. seed, top_k and ignore_eos are not OpenAI's; they mean what they mean in chat."""

    model: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS)]
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[FlatTool] | None = None
    tool_choice: str | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Positive | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: Natural | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    previous_response_id: NotYet = None
    conversation: NotYet = None
    background: NotYet = None
    prompt: NotYet = None
    context_management: NotYet = None


def parse_responses(raw: bytes, limits: Limits) -> ResponsesBody:
    """The body of /v1/responses, its fields in range."""
    body = decode(raw, ResponsesBody, ALLOWED)
    why = "is not supported: this server keeps nothing between calls; send the whole conversation"
    refuse_given(body, STATELESS, why)
    pairs = body.metadata or {}
    fitting = len(pairs) <= 16 and all(len(key) <= 64 and len(value) <= 512 for key, value in pairs.items())
    need(fitting, "metadata", ALLOWED["metadata"])
    need((body.top_logprobs or 0) <= limits.logprobs, "top_logprobs", f"from 0 to {limits.logprobs}")
    need(len(body.tools or ()) <= limits.tools, "tools", f"at most {limits.tools} tools")
    if not isinstance(body.input, str):
        need(0 < len(body.input) <= limits.messages, "input", f"a text or a list of 1 to {limits.messages} items")
        parts = sum(
            len(held) for i in body.input for held in (i.content, i.output, i.summary) if isinstance(held, list)
        )
        need(parts <= limits.parts, "input", f"items of at most {limits.parts} parts together")
    return body


def chat_of_responses(body: ResponsesBody, limits: Limits) -> Translated:
    """The chat body that asks for the same."""
    turns = Turns()
    if body.instructions is not None:
        turns.begin("system", body.instructions, "instructions")
    _translate_input(body.input, turns)
    places = {**turns.places, "messages": "input", **_FIELD_PLACES}
    logprobs = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    fields = {
        "model": body.model,
        "messages": turns.messages(),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "seed": body.seed,
        "ignore_eos": body.ignore_eos,
        "stream": body.stream,
        "logprobs": True if logprobs else None,
        "top_logprobs": body.top_logprobs,
        "tools": [_function(tool, i, places) for i, tool in enumerate(body.tools)] if body.tools else None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body.text),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
    }
    return translated(fields, places, limits)


# The input


def _translate_input(given: str | Sequence[InputItem], turns: Turns) -> None:
    if isinstance(given, str):
        turns.begin("user", given, "input")
        return
    asked: set[str] = set()
    for i, item in enumerate(given):
        where = f"input[{i}]"
        match choose(item.type or "message", _ITEMS, f"{where}.type"):
            case "message":
                _message(item, where, turns)
            case "reasoning":
                _reasoning(item, where, turns)
            case "function_call":
                call_id = required(item.call_id, f"{where}.call_id", "a string")
                name = required(item.name, f"{where}.name", "a string")
                arguments = required(item.arguments, f"{where}.arguments", "a string")
                turns.call(call_id, name, arguments, where, f"{where}.arguments")
                asked.add(call_id)
            case _:
                call_id = required(item.call_id, f"{where}.call_id", "a string")
                need(call_id in asked, f"{where}.call_id", "the call_id of a function_call before it")
                turns.result(call_id, _text(item.output, f"{where}.output", ("input_text",)), f"{where}.output")


def _message(item: InputItem, where: str, turns: Turns) -> None:
    role = required(item.role, f"{where}.role", ALLOWED["input[].role"])
    kinds = ("input_text", "output_text", "refusal") if role == "assistant" else ("input_text",)
    text = _text(item.content, f"{where}.content", kinds)
    if role == "assistant":  # one turn may come as several items
        turns.say(role, text, f"{where}.content")
    else:
        turns.begin(role, text, f"{where}.content")


def _reasoning(item: InputItem, where: str, turns: Turns) -> None:
    """The reasoning itself where it was kept, else its summary."""
    held, name, kind = (
        (item.content, "content", "reasoning_text") if item.content else (item.summary, "summary", "summary_text")
    )
    if held:
        turns.think(_text(held, f"{where}.{name}", (kind,)), f"{where}.{name}")


def _text(content: str | Sequence[InputPart] | None, where: str, kinds: Sequence[str]) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise missing(where, ALLOWED["input[].content"])
    texts = []
    for j, part in enumerate(content):
        if part.type not in kinds:
            path = f"{where}[{j}].type"
            names = " or ".join(f'"{kind}"' for kind in kinds)
            raise Refused(f"{path} must be {names}: only text is served", param=path, code="invalid_value")
        held, name = (part.refusal, "refusal") if part.type == "refusal" else (part.text, "text")
        texts.append(required(held, f"{where}[{j}].{name}", "a string"))
    return "\n".join(texts)


# The options


def _function(tool: FlatTool, i: int, places: dict[str, str]) -> dict[str, Any]:
    where = f"tools[{i}]"
    choose(tool.type, _TOOLS, f"{where}.type")
    places[f"{where}.function"] = where
    json_of(tool.parameters or {}, f"{where}.parameters")
    fields = {
        "name": required(tool.name, f"{where}.name", "a string"),
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _tool_choice(choice: str | FunctionChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if isinstance(choice, str):
        return choose(choice, _CHOICES, "tool_choice")
    choose(choice.type, _TOOLS, "tool_choice.type")
    return {"type": "function", "function": {"name": required(choice.name, "tool_choice.name", "a string")}}


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    given = text.format
    if choose(given.type, _FORMATS, "text.format.type") != "json_schema":
        return {"type": given.type}
    schema = required(given.schema, "text.format.schema", "a JSON schema, an object")
    json_of(schema, "text.format.schema")
    fields = {
        "name": required(given.name, "text.format.name", "a string"),
        "schema": schema,
        "description": given.description,
        "strict": given.strict,
    }
    held = {name: value for name, value in fields.items() if value is not None}
    return {"type": "json_schema", "json_schema": held}


_ITEMS: Mapping[str, str] = types.MappingProxyType(
    {name: name for name in ("message", "reasoning", "function_call", "function_call_output")}
)
_TOOLS: Mapping[str, str] = types.MappingProxyType({"function": "function"})
_CHOICES: Mapping[str, str] = types.MappingProxyType({name: name for name in ("none", "auto", "required")})
_FORMATS: Mapping[str, str] = types.MappingProxyType({name: name for name in ("text", "json_object", "json_schema")})

_FIELD_PLACES: Mapping[str, str] = types.MappingProxyType({
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "logprobs": "include",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
})  # fmt: skip

# What each field may hold, by its path with the indices left out: see `bodies.ALLOWED`.
ALLOWED: Mapping[str, str] = types.MappingProxyType({
    **plain_fields(ResponsesBody),
    **plain_fields(InputItem, "input[]."),
    **plain_fields(InputPart, "input[].content[]."),
    **plain_fields(InputPart, "input[].output[]."),
    **plain_fields(InputPart, "input[].summary[]."),
    **plain_fields(FlatTool, "tools[]."),
    **plain_fields(FunctionChoice, "tool_choice."),
    **plain_fields(TextFormat, "text.format."),
    **plain_fields(TextOptions, "text."),
    **plain_fields(ReasoningOptions, "reasoning."),
    "model": f"the name of a served model, a string of 1 to {NAME_CHARS} characters",
    "input": "a text or a list of at least one item",
    "input[]": "an object such as {\"role\": \"user\", \"content\": \"…\"}",
    "input[].role": "one of developer, system, user, assistant",
    "input[].content": "a string or a list of parts such as {\"type\": \"input_text\", \"text\": \"…\"}",
    "input[].content[]": "an object such as {\"type\": \"input_text\", \"text\": \"…\"}",
    "input[].summary": "a list of parts such as {\"type\": \"summary_text\", \"text\": \"…\"}",
    "input[].output": "a string or a list of parts such as {\"type\": \"input_text\", \"text\": \"…\"}",
    "top_k": "a whole number of at least 0, or -1 for all",
    "seed": "a whole number that fits in 64 bits, signed",
    "stream_options": "an object",
    "tools": "a list of tools",
    "tools[]": "an object such as {\"type\": \"function\", \"name\": \"…\", \"parameters\": {…}}",
    "tools[].parameters": "a JSON schema, an object",
    "tool_choice": "none, auto, required, or an object such as {\"type\": \"function\", \"name\": \"…\"}",
    "text": "an object with 'format'",
    "text.format": "an object with 'type'",
    "text.format.schema": "a JSON schema, an object",
    "reasoning": "an object with 'effort'",
    "reasoning.effort": "one of none, minimal, low, medium, high, xhigh, max",
    "include": "a list of strings",
    "metadata": "an object of at most 16 strings of at most 512 characters, with names of at most 64",
    "truncation": "auto or disabled",
})  # fmt: skip
