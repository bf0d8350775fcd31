"""Bodies of /v1/responses and /v1/messages with anything anywhere: a chat body comes of them, or a refusal by name."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janus_server import types
from janus_server.api import messages, plan, responses
from janus_server.api.bodies import Limits
from janus_server.api.translation import Translated, renamed
from janus_server.errors import Refused

LIMITS = Limits(messages=50)
TARGET = plan.Target("m", 100, 300, (257,), types.Sampling())
LABEL = plan.Label("x-1", 0, 0)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}

RESPONSES: dict[str, Any] = {
    "model": "m", "instructions": "x", "max_output_tokens": 5, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "seed": 1,
    "stream": True, "top_logprobs": 2, "parallel_tool_calls": True, "metadata": {"a": "b"}, "store": False,
    "include": ["message.output_text.logprobs"], "reasoning": {"effort": "low"}, "tool_choice": "auto",
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}], "text": {"format": {"type": "text"}},
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ],
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "x"}], "temperature": 0.5, "top_p": 0.5,
    "top_k": 3, "stop_sequences": ["x"], "stream": True, "metadata": {"user_id": "u"}, "seed": 1,
    "thinking": {"type": "enabled", "budget_tokens": 5}, "output_config": {"effort": "low"},
    "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "tool", "name": "f"},
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "x"}, {"type": "text", "text": "x"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}]},
            {"type": "text", "text": "x"},
        ]},
    ],
}  # fmt: skip

# Names of chat's that a client of these APIs never wrote.
FOREIGN = re.compile(
    r"max_completion_tokens|response_format|\bstop\b|\btool_calls|tool_call_id|function\.|reasoning_effort"
)
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 7, 10**30, 0.5, 1e308, "", "x", "user", "assistant", "text", "tool", "function", "message", [],
    ["x"], [[]], [None], {}, {"type": "text"}, {"type": "text", "text": "x"}, {"type": "function", "name": "g"},
    {"role": "user"}, "\u2028", "\x00", "x" * 5000,
)  # fmt: skip


def of_responses(raw: bytes) -> Translated:
    return responses.chat_of_responses(responses.parse_responses(raw, LIMITS), LIMITS)


def of_messages(raw: bytes) -> Translated:
    return messages.chat_of_messages(messages.parse_messages(raw, LIMITS), LIMITS)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The tree with another value at a place; `...` takes the place away."""
    tree = copy.deepcopy(tree)
    holder = tree
    try:
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]]  # an earlier change may have taken it away
        if value is ...:
            del holder[path[-1]]
        else:
            holder[path[-1]] = value
    except (KeyError, IndexError, TypeError):
        pass
    return tree


@pytest.mark.parametrize(("body", "translate"), [(RESPONSES, of_responses), (MESSAGES, of_messages)])
@settings(max_examples=300)
@given(data=st.data())
def test_anything_anywhere(body: dict[str, Any], translate: Callable[[bytes], Translated], data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(places(body))))
        body = changed(body, path, data.draw(st.sampled_from((..., *VALUES))))
    try:
        told = translate(json.dumps(body).encode())
        call = plan.plan_chat(told.chat, [1] * data.draw(st.integers(1, 120)), TARGET, LIMITS, LABEL)
    except Refused as refused:
        if "told" in locals():
            refused = renamed(refused, told.places)
        assert 400 <= refused.status < 500
        assert refused.param is not None
        assert FOREIGN.search(refused.param) is None
        assert FOREIGN.search(refused.message) is None, refused.message
        top = re.split(r"[.\[]", refused.param)[0]
        assert top in responses.ResponsesBody.__struct_fields__ or top in messages.MessagesBody.__struct_fields__
    else:
        assert call.requests[0].max_tokens >= 1
        msgspec.json.encode(call.requests)
