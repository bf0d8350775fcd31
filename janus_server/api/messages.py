"""The body of /v1/messages (Anthropic's Messages) as a record, and its translation to a chat body.

Pure. `http` parses, translates, and answers as for chat; `messages_reply` writes what comes of it, errors included.
Every refusal names the client's own field. `count_tokens` takes the same body, and needs no max_tokens.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from janus_server.api.bodies import NAME_CHARS, Limits, Natural, NotYet, Positive, Unit, plain_fields
from janus_server.api.checks import need, refuse_given
from janus_server.api.parse import decode
from janus_server.api.translation import Translated, Turns, choose, json_of, required, translated

STATEFUL = ("container", "mcp_servers", "context_management")


class InnerBlock(msgspec.Struct, kw_only=True):
    """A block inside a tool's result."""

    type: str
    text: str | None = None


class ContentBlock(msgspec.Struct, kw_only=True):
    """One block of a message's content; which fields it must have depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[InnerBlock] | None = None
    is_error: bool | None = None


class BlockMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class SchemaTool(msgspec.Struct, kw_only=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolUseChoice(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(msgspec.Struct, kw_only=True):
    type: str
    budget_tokens: Positive | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """What decides how long the prompt is; all of the body of count_tokens."""

    model: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS)]
    messages: list[BlockMessage]
    system: str | list[InnerBlock] | None = None
    tools: list[SchemaTool] | None = None
    tool_choice: ToolUseChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    container: NotYet = None
    mcp_servers: NotYet = None
    context_management: NotYet = None


class MessagesBody(CountBody, kw_only=True):
    """What a client sends. seed and ignore_eos are not Anthropic's; they mean what they mean in chat."""

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Unit | None = None
    top_k: Natural | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    ignore_eos: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


def parse_messages(raw: bytes, limits: Limits) -> MessagesBody:
    """The body of /v1/messages, its fields in range."""
    body = decode(raw, MessagesBody, ALLOWED)
    _check(body, limits)
    return body


def parse_count(raw: bytes, limits: Limits) -> CountBody:
    """The body of /v1/messages/count_tokens, its fields in range."""
    body = decode(raw, CountBody, ALLOWED)
    _check(body, limits)
    return body


def chat_of_messages(body: CountBody, limits: Limits) -> Translated:
    """The chat body that asks for the same."""
    turns = Turns()
    if body.system is not None:
        turns.say("system", _text(body.system, "system"), "system")
    asked: set[str] = set()
    for i, message in enumerate(body.messages):
        _translate(message, f"messages[{i}]", turns, asked)
    places = {**turns.places, "messages": "messages", **_FIELD_PLACES}
    choice = body.tool_choice
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": turns.messages(),
        "tools": [_function(tool, i, places) for i, tool in enumerate(body.tools)] if body.tools else None,
        "tool_choice": None if choice is None else _tool_choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "response_format": _response_format(body.output_config),
        "reasoning_effort": _effort(body),
    }
    if isinstance(body, MessagesBody):
        fields |= {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "seed": body.seed,
            "ignore_eos": body.ignore_eos,
            "stop": body.stop_sequences,
            "stream": body.stream,
        }
    return translated(fields, places, limits)


def _check(body: CountBody, limits: Limits) -> None:
    refuse_given(body, STATEFUL, "is not supported here")
    need(len(body.tools or ()) <= limits.tools, "tools", f"at most {limits.tools} tools")
    messages = body.messages
    need(0 < len(messages) <= limits.messages, "messages", f"a list of 1 to {limits.messages} messages")
    blocks = [block for message in messages if not isinstance(message.content, str) for block in message.content]
    inner = sum(len(block.content) for block in blocks if isinstance(block.content, list))
    need(len(blocks) + inner <= limits.parts, "messages", f"of at most {limits.parts} blocks together")
    first = next((i for i, message in enumerate(messages) if message.role != "system"), 0)
    need(messages[first].role != "assistant", f"messages[{first}].role", '"user": a conversation begins with the user')
    last = len(messages) - 1
    need(
        messages[last].role != "assistant", f"messages[{last}].role",
        '"user" in the last message: this server does not continue an answer that was begun',
    )  # fmt: skip


# The conversation


def _translate(message: BlockMessage, where: str, turns: Turns, asked: set[str]) -> None:
    if isinstance(message.content, str):
        turns.say(message.role, message.content, f"{where}.content")
        return
    readers = {"user": _USER, "assistant": _ASSISTANT, "system": _SYSTEM}[message.role]
    for j, block in enumerate(message.content):
        path = f"{where}.content[{j}]"
        choose(block.type, readers, f"{path}.type")(block, path, message.role, turns, asked)


def _read_text(block: ContentBlock, path: str, role: str, turns: Turns, asked: set[str]) -> None:
    turns.say(role, required(block.text, f"{path}.text", "a string"), f"{path}.text")


def _read_thinking(block: ContentBlock, path: str, role: str, turns: Turns, asked: set[str]) -> None:
    turns.think(required(block.thinking, f"{path}.thinking", "a string"), f"{path}.thinking")


def _read_redacted(block: ContentBlock, path: str, role: str, turns: Turns, asked: set[str]) -> None:
    """Only its author can read it."""


def _read_tool_use(block: ContentBlock, path: str, role: str, turns: Turns, asked: set[str]) -> None:
    call_id = required(block.id, f"{path}.id", "a string")
    name = required(block.name, f"{path}.name", "a string")
    given = required(block.input, f"{path}.input", "an object")
    turns.call(call_id, name, json_of(given, f"{path}.input"), path, f"{path}.input")
    asked.add(call_id)


def _read_tool_result(block: ContentBlock, path: str, role: str, turns: Turns, asked: set[str]) -> None:
    call_id = required(block.tool_use_id, f"{path}.tool_use_id", "a string")
    need(call_id in asked, f"{path}.tool_use_id", "the id of a tool_use block before it")
    text = "" if block.content is None else _text(block.content, f"{path}.content")
    # Chat has no word for it, and a tool that failed without one must not look like one that had nothing to say.
    turns.result(call_id, text or ("error" if block.is_error else ""), f"{path}.content")


def _text(content: str | Sequence[InnerBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for j, block in enumerate(content):
        choose(block.type, _TEXT, f"{where}[{j}].type")
        texts.append(required(block.text, f"{where}[{j}].text", "a string"))
    return "\n".join(texts)


Reader = Callable[[ContentBlock, str, str, Turns, set[str]], None]

_SYSTEM: Mapping[str, Reader] = types.MappingProxyType({"text": _read_text})
_USER: Mapping[str, Reader] = types.MappingProxyType({"text": _read_text, "tool_result": _read_tool_result})
_ASSISTANT: Mapping[str, Reader] = types.MappingProxyType({
    "text": _read_text, "thinking": _read_thinking, "redacted_thinking": _read_redacted, "tool_use": _read_tool_use,
})  # fmt: skip
_TEXT: Mapping[str, str] = types.MappingProxyType({"text": "text"})


# The options


def _function(tool: SchemaTool, i: int, places: dict[str, str]) -> dict[str, Any]:
    where = f"tools[{i}]"
    choose(tool.type or "custom", _TOOLS, f"{where}.type")
    places[f"{where}.function"] = where
    places[f"{where}.function.parameters"] = f"{where}.input_schema"
    schema = required(tool.input_schema, f"{where}.input_schema", "a JSON schema, an object")
    json_of(schema, f"{where}.input_schema")
    fields = {
        "name": tool.name,
        "description": tool.description,
        "parameters": schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _tool_choice(choice: ToolUseChoice) -> str | dict[str, Any]:
    word = choose(choice.type, _CHOICES, "tool_choice.type")
    if word != "tool":
        return word
    return {"type": "function", "function": {"name": required(choice.name, "tool_choice.name", "a string")}}


def _response_format(config: OutputConfig | None) -> dict[str, Any] | None:
    if config is None or config.format is None:
        return None
    choose(config.format.type, _FORMATS, "output_config.format.type")
    schema = required(config.format.schema, "output_config.format.schema", "a JSON schema, an object")
    json_of(schema, "output_config.format.schema")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _effort(body: CountBody) -> str | None:
    """Chat's word for how much to think: none at all where thinking is disabled."""
    if body.thinking is not None and choose(body.thinking.type, _THINKING, "thinking.type") == "none":
        return "none"
    return body.output_config.effort if body.output_config is not None else None


_TOOLS: Mapping[str, str] = types.MappingProxyType({"custom": "custom"})
_CHOICES: Mapping[str, str] = types.MappingProxyType(
    {"auto": "auto", "any": "required", "tool": "tool", "none": "none"}
)
_FORMATS: Mapping[str, str] = types.MappingProxyType({"json_schema": "json_schema"})
_THINKING: Mapping[str, str] = types.MappingProxyType(
    {"enabled": "some", "adaptive": "some", "between_tools": "some", "disabled": "none"}
)

_FIELD_PLACES: Mapping[str, str] = types.MappingProxyType({
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "tool_choice.function": "tool_choice",
    "reasoning_effort": "output_config.effort",
})  # fmt: skip

# What each field may hold, by its path with the indices left out: see `bodies.ALLOWED`.
ALLOWED: Mapping[str, str] = types.MappingProxyType({
    **plain_fields(MessagesBody),
    **plain_fields(BlockMessage, "messages[]."),
    **plain_fields(ContentBlock, "messages[].content[]."),
    **plain_fields(InnerBlock, "messages[].content[].content[]."),
    **plain_fields(InnerBlock, "system[]."),
    **plain_fields(SchemaTool, "tools[]."),
    **plain_fields(ToolUseChoice, "tool_choice."),
    **plain_fields(ThinkingOptions, "thinking."),
    **plain_fields(OutputFormat, "output_config.format."),
    "model": f"the name of a served model, a string of 1 to {NAME_CHARS} characters",
    "messages": "a list of at least one message, each an object with 'role' and 'content'",
    "messages[]": "an object with 'role' and 'content'",
    "messages[].role": "one of user, assistant, system",
    "messages[].content": "a string or a list of blocks such as {\"type\": \"text\", \"text\": \"…\"}",
    "messages[].content[]": "an object such as {\"type\": \"text\", \"text\": \"…\"}",
    "messages[].content[].input": "an object",
    "messages[].content[].content": "a string or a list of text blocks",
    "system": "a string or a list of text blocks",
    "stop_sequences": "a list of strings",
    "tools": "a list of tools",
    "tools[]": "an object such as {\"name\": \"…\", \"input_schema\": {…}}",
    "tools[].input_schema": "a JSON schema, an object",
    "tool_choice": "an object such as {\"type\": \"auto\"}",
    "thinking": "an object such as {\"type\": \"enabled\", \"budget_tokens\": 1024}",
    "output_config": "an object with 'format' and 'effort'",
    "output_config.effort": "one of low, medium, high, xhigh, max",
    "output_config.format": "an object such as {\"type\": \"json_schema\", \"schema\": {…}}",
    "output_config.format.schema": "a JSON schema, an object",
    "metadata": "an object",
    "seed": "a whole number that fits in 64 bits, signed",
})  # fmt: skip
