"""Bodies of /v1/responses and /v1/messages: what they are translated to, and what is refused by which name."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import pytest

from janus_server import types
from janus_server.api import messages, plan, responses
from janus_server.api.bodies import Limits
from janus_server.api.translation import Translated, renamed
from janus_server.errors import Refused

LIMITS = Limits(messages=100)
TARGET = plan.Target("m", 100, 300, (257,), types.Sampling())
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def of_responses(**fields: Any) -> Translated:
    raw = json.dumps({"model": "m", "input": "hi", **fields}).encode()
    return responses.chat_of_responses(responses.parse_responses(raw, LIMITS), LIMITS)


def of_messages(**fields: Any) -> Translated:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **fields}
    raw = json.dumps({name: value for name, value in body.items() if value is not ...}).encode()
    return messages.chat_of_messages(messages.parse_messages(raw, LIMITS), LIMITS)


def chat(translated: Translated) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = msgspec.to_builtins(translated.chat.messages)
    return found


# What bodies become


def test_a_responses_conversation() -> None:
    found = of_responses(instructions="Be brief.", input=[
        {"role": "user", "content": "Weather in Oslo?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I ask."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "One moment.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city":"Oslo"}'},
        {"type": "function_call", "call_id": "c2", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "noon"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rain"}]},
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "user", "content": "Thanks."},
    ])  # fmt: skip
    assert chat(found) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": "One moment.", "reasoning_content": "I ask.", "tool_calls": [
            call("c1", "weather", '{"city":"Oslo"}'), call("c2", "clock", "{}"),
        ]},
        {"role": "tool", "content": "noon", "tool_call_id": "c2"},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "developer", "content": "a\nb"},
        {"role": "user", "content": "Thanks."},
    ]  # fmt: skip


def test_a_messages_conversation() -> None:
    found = of_messages(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "Weather in Oslo?"},
            {"role": "user", "content": "And the time?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "I ask.", "signature": ""},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "t2", "name": "clock", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "text", "text": "Well?"},
            ]},
            {"role": "user", "content": "Quick!"},
        ],
    )  # fmt: skip
    assert chat(found) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Oslo?\nAnd the time?"},
        {"role": "assistant", "content": "One moment.", "reasoning_content": "I ask.", "tool_calls": [
            call("t1", "weather", '{"city":"Oslo"}'), call("t2", "clock", "{}"),
        ]},
        {"role": "tool", "content": "rain", "tool_call_id": "t1"},
        {"role": "tool", "content": "error", "tool_call_id": "t2"},
        {"role": "user", "content": "Well?\nQuick!"},
    ]  # fmt: skip


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    found = {"id": call_id, "function": {"name": name, "arguments": arguments}}
    return {**found, "type": "function"}


def test_the_options_of_responses() -> None:
    found = of_responses(
        max_output_tokens=9, temperature=0.5, top_p=0.4, top_logprobs=2, stream=True, seed=3, store=True,
        metadata={"a": "b"}, user="u", reasoning={"effort": "low", "summary": "auto"}, truncation="auto",
        previous_response_id=None, background=False, include=["reasoning.encrypted_content"],
    ).chat  # fmt: skip
    assert (found.max_completion_tokens, found.temperature, found.top_p, found.seed) == (9, 0.5, 0.4, 3)
    assert (found.logprobs, found.top_logprobs, found.stream, found.reasoning_effort) == (True, 2, True, "low")
    assert of_responses(include=["message.output_text.logprobs"]).chat.logprobs is True
    assert of_responses().chat.logprobs is None


def test_the_options_of_messages() -> None:
    found = of_messages(
        temperature=0.5, top_p=0.4, top_k=7, stop_sequences=["x", "y"], stream=True, metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 2048}, output_config={"effort": "high"}, service_tier="auto",
    ).chat  # fmt: skip
    assert (found.max_tokens, found.temperature, found.top_p, found.top_k) == (5, 0.5, 0.4, 7)
    assert (found.stop, found.stream, found.reasoning_effort) == (["x", "y"], True, "high")
    assert of_messages(thinking={"type": "disabled"}).chat.reasoning_effort == "none"
    assert of_messages().chat.reasoning_effort is None


@pytest.mark.parametrize(
    ("given", "choice", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any"}, "required", None),
        ({"type": "none"}, "none", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}, None),
    ],
)
def test_tools_of_messages(given: dict[str, Any], choice: Any, parallel: bool | None) -> None:
    tools = [{"name": "weather", "description": "Rain or sun", "input_schema": SCHEMA, "type": "custom"}]
    found = of_messages(tools=tools, tool_choice=given).chat
    function = {"name": "weather", "description": "Rain or sun", "parameters": SCHEMA}
    assert [given_fields(tool) for tool in found.tools or ()] == [{"type": "function", "function": function}]
    assert msgspec.to_builtins(found.tool_choice) == choice
    assert found.parallel_tool_calls is parallel


def test_tools_of_responses() -> None:
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    found = of_responses(tools=[tool], tool_choice={"type": "function", "name": "weather"}).chat
    function = {"name": "weather", "parameters": SCHEMA, "strict": True}
    assert [given_fields(tool) for tool in found.tools or ()] == [{"type": "function", "function": function}]
    assert msgspec.to_builtins(found.tool_choice) == {"type": "function", "function": {"name": "weather"}}
    assert of_responses(tools=[tool], tool_choice="required", parallel_tool_calls=False).chat.tool_choice == "required"


def given_fields(value: Any) -> Any:
    """A record without the fields that were not given."""
    value = msgspec.to_builtins(value)
    if not isinstance(value, dict):
        return value
    return {name: given_fields(one) for name, one in value.items() if one is not None}


def test_structured_output() -> None:
    found = of_responses(text={"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}})
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    assert given_fields(found.chat.response_format) == form
    found = of_messages(output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    assert given_fields(found.chat.response_format) == form
    assert given_fields(of_responses(text={"format": {"type": "text"}}).chat.response_format) == {"type": "text"}


# What is refused

USER: dict[str, Any] = {"role": "user", "content": "hi"}
USE: dict[str, Any] = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
FUNCTION = {"type": "function", "name": "f", "parameters": SCHEMA}

BAD_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"model": 3}, "model"),
    ({"input": 3}, "input"),
    ({"input": []}, "input"),
    ({"input": ["hi"]}, "input[0]"),
    ({"input": [USER] * 101}, "input"),
    ({"input": [USER] * 100, "instructions": "x"}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * (LIMITS.parts + 1)}]}, "input"),
    ({"input": [USER, {"role": "user"}]}, "input[1].content"),
    ({"input": [{"content": "hi"}]}, "input[0].role"),
    ({"input": [{"role": "tool", "content": "hi"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "output_text", "text": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user", "content": [{"text": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    ({"input": [USER, {"type": "function_call_output", "call_id": "c", "output": ""}]}, "input[1].call_id"),
    ({"input": [{"type": "function_call_output", "output": ""}]}, "input[0].call_id"),
    ({"instructions": ["x"]}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "9"}, "max_output_tokens"),
    ({"max_output_tokens": True}, "max_output_tokens"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"metadata": {"k": "v" * 513}}, "metadata"),
    ({"metadata": {"k": 5}}, "metadata"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"tools": [FUNCTION] * 129}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [FUNCTION, {"type": "function"}]}, "tools[1].name"),
    ({"tools": [{**FUNCTION, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**FUNCTION, "parameters": 5}]}, "tools[0].parameters"),
    ({"tools": [FUNCTION], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"truncation": "middle"}, "truncation"),
]  # fmt: skip

BAD_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": ...}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"messages": ...}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [USER] * 101}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * (LIMITS.parts + 1)}]}, "messages"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "assistant", "content": "hi"}, USER]}, "messages[0].role"),
    ({"messages": [USER, {"role": "assistant", "content": "The answer is"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "magic"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type"),
    ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}, USER]},
     "messages[1].content[0].id"),
    ({"messages": [USER, {"role": "assistant", "content": [{**USE, "input": "x"}]}, USER]},
     "messages[1].content[0].input"),
    ({"messages": [USER, {"role": "assistant", "content": [USE]},
                   {"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
     "messages[2].content[0].tool_use_id"),
    ({"messages": [USER, {"role": "assistant", "content": [USE]},
                   {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2", "content": "x"}]}]},
     "messages[2].content[0].tool_use_id"),
    ({"messages": [USER, {"role": "assistant", "content": [USE]},
                   {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1",
                                                 "content": [{"type": "image"}]}]}]},
     "messages[2].content[0].content[0].type"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"temperature": 3}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools[0].type"),
    ({"tools": [{"name": "f", "input_schema": {}}] * 129}, "tools"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f f", "input_schema": {}}]}, "tools[0].name"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": {"type": "loud"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"container": "c"}, "container"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD_RESPONSES, ids=lambda value: str(value)[:60])
def test_bad_responses_bodies_name_their_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as caught:
        of_responses(**fields)
    told(caught.value, param)


@pytest.mark.parametrize(("fields", "param"), BAD_MESSAGES, ids=lambda value: str(value)[:60])
def test_bad_messages_bodies_name_their_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as caught:
        of_messages(**fields)
    told(caught.value, param)


@pytest.mark.parametrize(
    ("place", "param"),
    [
        ({"tools": [{"name": "f", "input_schema": "DEEP"}]}, "tools[0].input_schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": "DEEP"}}}, "output_config.format.schema"),
        ({"messages": [USER, {"role": "assistant", "content": [{**USE, "input": "DEEP"}]}, USER]},
         "messages[1].content[0].input"),
    ],
)  # fmt: skip
def test_what_is_almost_too_deep_to_read_is_refused(place: dict[str, Any], param: str) -> None:
    """It would have to be written again from further down the stack."""
    shape = json.dumps({"model": "m", "max_tokens": 5, "messages": [USER], **place})
    params = set()
    for depth in range(sys.getrecursionlimit() - 300, sys.getrecursionlimit()):
        raw = shape.replace('"DEEP"', '{"a":' * depth + "1" + "}" * depth).encode()
        with pytest.raises(Refused) as caught:
            messages.chat_of_messages(messages.parse_messages(raw, LIMITS), LIMITS)
            raise Refused("fine", param="fine")
        params.add(caught.value.param)
    assert {param, None} <= params


def told(refused: Refused, param: str) -> None:
    assert (refused.status, refused.param) == (400, param)
    assert refused.message.startswith(param.partition("[")[0])


def test_what_plan_refuses_has_the_clients_names() -> None:
    def refused(translated: Translated, prompt: list[int]) -> Refused:
        with pytest.raises(Refused) as caught:
            plan.plan_chat(translated.chat, prompt, TARGET, LIMITS, plan.Label("x-1", 0, 0))
        return renamed(caught.value, translated.places)

    too_many = refused(of_responses(max_output_tokens=99), [1] * 10)
    assert too_many.param == "max_output_tokens"
    assert too_many.message.count("max_output_tokens") == 2
    assert "max_completion_tokens" not in too_many.message
    assert too_many.code == "context_length_exceeded"
    assert refused(of_responses(), [1] * 100).param == "input"
    assert refused(of_messages(max_tokens=99), [1] * 10).param == "max_tokens"
    assert refused(of_messages(), [1] * 100).param == "messages"


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("messages[0].content", "instructions"),
        ("messages[1].content[0].text", "input[0].content"),
        ("messages[2].tool_calls[1].function.arguments", "input[3].arguments"),
        ("messages[2].tool_calls[1].id", "input[3]"),
        ("messages[3].tool_call_id", "input[4].output"),
        ("messages", "input"),
        ("tools[0].function.parameters.properties", "tools[0].parameters.properties"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("response_format", "text.format"),
        ("temperature", "temperature"),
    ],
)
def test_chats_paths_become_the_clients(path: str, place: str) -> None:
    translated = of_responses(instructions="x", tools=[FUNCTION], input=[
        USER, {"role": "assistant", "content": "a"},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "x"},
    ])  # fmt: skip
    refused = renamed(Refused(f"{path} must be better", param=path, code="c", status=422), translated.places)
    assert (refused.param, refused.message) == (place, f"{place} must be better")
    assert (refused.status, refused.code) == (422, "c")


def test_many_small_parts_are_joined_in_linear_time() -> None:
    """Twice the parts, about twice the copying; joined one by one these would copy gigabytes."""
    text = "x" * 200
    blocks = [{"type": "text", "text": text}] * (LIMITS.parts - 1)
    assert len(chat(of_messages(messages=[{"role": "user", "content": blocks}]))[0]["content"]) == 201 * len(blocks) - 1


def test_count_tokens_needs_no_max_tokens() -> None:
    raw = json.dumps({"model": "m", "messages": [USER], "system": "s"}).encode()
    found = messages.chat_of_messages(messages.parse_count(raw, LIMITS), LIMITS)
    assert [message["role"] for message in chat(found)] == ["system", "user"]
