"""The two other APIs through their own clients: Anthropic's Messages, and OpenAI's Responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from live_server import LiveServer, counted, idle

pytestmark = pytest.mark.timeout(120)

QUESTION = "How will the weather be in Paris?"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
ANSWER = "It will be sunny in Paris."
CALLED = {"city": "Paris", "days": 2}


@pytest.fixture
def claude(speaker: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=speaker.url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def api(speaker: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=speaker.v1, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def messages_tool() -> Any:
    return {"name": "weather", "description": "The weather", "input_schema": PARAMETERS}


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "speaker", "max_tokens": 50, "messages": [{"role": "user", "content": QUESTION}], **more}


def test_a_message_and_its_stream_are_the_same(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(**asked(system="Be brief.", stop_sequences=["zzz"]))
    assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "end_turn")
    (block,) = whole.content
    assert block.type == "text"
    with claude.messages.stream(**asked(system="Be brief.")) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert final.content[0].text == block.text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens == whole.usage.input_tokens
    counted_tokens = claude.messages.count_tokens(
        model="speaker", system="Be brief.", messages=[{"role": "user", "content": QUESTION}]
    )
    assert counted_tokens.input_tokens == whole.usage.input_tokens


def test_a_message_cut_by_its_limit_says_so(claude: anthropic.Anthropic) -> None:
    assert claude.messages.create(**asked(max_tokens=2)).stop_reason == "max_tokens"


def test_a_messages_tool_is_used_and_its_result_is_answered(claude: anthropic.Anthropic) -> None:
    reply = claude.messages.create(**asked(tools=[messages_tool()]))
    assert reply.stop_reason == "tool_use"
    (use,) = [block for block in reply.content if block.type == "tool_use"]
    assert (use.name, use.input) == ("weather", CALLED)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]}
    history = [*asked()["messages"], {"role": "assistant", "content": reply.content}, result]
    answer = claude.messages.create(**asked(tools=[messages_tool()], messages=history))
    assert answer.content[0].text == ANSWER
    with claude.messages.stream(**asked(tools=[messages_tool()])) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert json.loads("".join(pieces)) == CALLED
    (streamed,) = [block for block in final.content if block.type == "tool_use"]
    assert streamed.input == CALLED


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError),
        ({"extra_body": {"temperature": 9}}, anthropic.BadRequestError),
        ({"messages": []}, anthropic.BadRequestError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
    ],
    ids=["model", "temperature", "messages", "max_tokens"],
)
def test_messages_errors_have_anthropics_form(claude: anthropic.Anthropic, change: Any, error: type) -> None:
    with pytest.raises(error) as caught:
        claude.messages.create(**asked(**change))
    body = caught.value.body
    assert body["type"] == "error"
    assert set(body["error"]) >= {"type", "message"}
    assert caught.value.request_id


def test_leaving_a_message_stream_frees_its_slot(server: LiveServer) -> None:
    before = server.until(idle)
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=60) as client:
        stream = client.messages.create(
            model="tiny", max_tokens=30_000, messages=[{"role": "user", "content": "x"}], stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        stream.close()
    name = "janus_client_disconnects_total"
    server.until(lambda m: idle(m) and counted(m, name) > counted(before, name), 15)


def test_a_response_and_its_stream_are_the_same(api: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "speaker", "input": QUESTION, "instructions": "Be brief.", "temperature": 0, "max_output_tokens": 50
    }  # fmt: skip
    whole = api.responses.create(**options)
    assert (whole.object, whole.status) == ("response", "completed")
    assert whole.output_text
    with api.responses.stream(**options) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage


def test_a_response_calls_a_function_and_answers_its_result(api: openai.OpenAI) -> None:
    function: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
    options: dict[str, Any] = {"model": "speaker", "tools": [function], "temperature": 0, "max_output_tokens": 50}
    first = api.responses.create(input=QUESTION, **options)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("weather", CALLED)
    turns: Any = [
        {"role": "user", "content": QUESTION}, call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]  # fmt: skip
    assert api.responses.create(input=turns, **options).output_text == ANSWER


def test_a_stored_response_is_not_found(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError):
        api.responses.create(model="nobody", input="x")
