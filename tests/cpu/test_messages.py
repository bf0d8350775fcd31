"""/v1/messages over a real socket, with the anthropic client and a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, TextBlock, ThinkingBlock, ToolUseBlock
from fake_engine import FakeModel
from http_server import HI, PROMPT_TOKENS, Server, served
from pydantic import BaseModel
from scripted import CALL, ScriptedModel, letters

from janus_server.api.bodies import Limits
from janus_server.errors import Refused
from janus_server.keys import Key, KeyRing

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"name": "weather", "description": "Rain or sun", "input_schema": SCHEMA}
THINKS = [*letters("<think>\nI look it up.\n</think>\n\n"), *letters("One moment.\n" + CALL)]
ASKED: dict[str, Any] = {"model": "fake", "max_tokens": 4, "messages": HI, "extra_body": {"seed": 0}}


@contextlib.asynccontextmanager
async def asked(
    model: FakeModel | None = None, limits: Limits | None = None
) -> AsyncIterator[tuple[Server, anthropic.AsyncAnthropic]]:
    async with served(model, limits) as server:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            yield server, client


async def test_a_message() -> None:
    async with asked() as (_, client):
        answer = await client.messages.create(**ASKED)
    Message.model_validate(answer.model_dump(warnings="error"), strict=True)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "fake")
    assert answer.id.startswith("msg_")
    assert [block.text for block in answer.content if isinstance(block, TextBlock)] == ["abcd"]
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (PROMPT_TOKENS - 3, 3, 4)
    assert answer._request_id is not None
    assert answer._request_id.startswith("req-")


async def test_the_sync_client() -> None:
    def read(url: str) -> tuple[str, Message]:
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            with client.messages.stream(**ASKED) as stream:
                return "".join(stream.text_stream), stream.get_final_message()

    async with served() as server:
        text, message = await asyncio.to_thread(read, server.url)
    assert text == "abcd"
    assert message.stop_reason == "max_tokens"


async def test_options_reach_the_engine() -> None:
    async with asked() as (server, client):
        await client.messages.create(
            model="fake", max_tokens=1, messages=HI, system="Be brief.", metadata={"user_id": "u"},
            stop_sequences=["q"], extra_body={"temperature": 0.5, "top_p": 0.4, "top_k": 7},
        )  # fmt: skip
        request = server.model.requests[0]
    assert bytes(request.prompt[1:]).decode() == "system:Be brief.\nuser:hi\nassistant:"
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.4, 7)
    assert (request.stop, request.max_tokens) == (("q",), 1)


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({"max_tokens": 9, "stop_sequences": ["d", "c"]}, "stop_sequence", "c", "ab"),
        ({"max_tokens": 2, "stop_sequences": ["d"]}, "max_tokens", None, "ab"),
    ],
)
async def test_why_it_stopped(fields: dict[str, Any], reason: str, sequence: str | None, text: str) -> None:
    async with asked() as (_, client):
        whole = await client.messages.create(**{**ASKED, **fields})
        async with client.messages.stream(**{**ASKED, **fields}) as stream:
            streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)
        assert isinstance(answer.content[0], TextBlock)
        assert answer.content[0].text == text


async def test_the_end_of_a_turn() -> None:
    async with asked(ScriptedModel("Hel", "lo")) as (_, client):
        answer = await client.messages.create(model="fake", max_tokens=9, messages=HI)
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)


async def test_an_answer_of_nothing_has_an_empty_block() -> None:
    async with asked(ScriptedModel()) as (_, client):
        answer = await client.messages.create(model="fake", max_tokens=9, messages=HI)
        async with client.messages.stream(model="fake", max_tokens=9, messages=HI) as stream:
            final = await stream.get_final_message()
    assert answer.content == [TextBlock(type="text", text="")]
    assert [block.type for block in final.content] == ["text"]


async def test_the_form_on_the_wire() -> None:
    async with asked() as (server, _):
        body = {"model": "fake", "max_tokens": 2, "messages": HI, "seed": 0}
        events = await server.events("/v1/messages", body)
    names = [event.split("\n")[0].removeprefix("event: ") for event in events]
    bodies = [json.loads(event.split("\n")[1].removeprefix("data: ")) for event in events]
    assert names == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert names == [body["type"] for body in bodies]
    assert bodies[0]["message"]["content"] == []
    assert bodies[0]["message"]["usage"]["input_tokens"] == PROMPT_TOKENS - 3
    assert bodies[2]["delta"] == {"type": "text_delta", "text": "a"}
    assert bodies[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert bodies[-2]["usage"]["output_tokens"] == 2


# Reasoning, tools and structured output


async def test_thinking_and_a_tool_call() -> None:
    fields: dict[str, Any] = {"model": "fake", "max_tokens": 99, "messages": HI, "tools": [TOOL]}
    async with asked(ScriptedModel(*THINKS)) as (_, client):
        whole = await client.messages.create(**fields, thinking={"type": "enabled", "budget_tokens": 2048})
        async with client.messages.stream(**fields) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        assert answer.stop_reason == "tool_use"
        thought, text, use = answer.content
        assert isinstance(thought, ThinkingBlock)
        assert thought.thinking == "I look it up."
        assert isinstance(text, TextBlock)
        assert text.text == "One moment."
        assert isinstance(use, ToolUseBlock)
        assert (use.name, use.input) == ("weather", {"city": "Oslo"})
        assert use.id
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert {"thinking", "text", "input_json"} <= set(kinds)


async def test_a_conversation_with_a_tool_goes_on() -> None:
    async with asked(ScriptedModel(*THINKS)) as (server, client):
        answer = await client.messages.create(model="fake", max_tokens=99, messages=HI, tools=[TOOL])
        use = answer.content[-1]
        assert isinstance(use, ToolUseBlock)
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}]}
        turns: list[Any] = [*HI, answer.to_param(), {"role": "user", "content": [result]}]
        again = await client.messages.create(model="fake", max_tokens=99, messages=turns, tools=[TOOL])
        prompt = bytes(server.model.requests[1].prompt[1:]).decode()
    assert again.stop_reason == "tool_use"
    assert prompt == "user:hi\nassistant:One moment.\ntool:rain\nassistant:"


@pytest.mark.parametrize(
    ("script", "limit", "reason", "kinds"),
    [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Os', 99, "end_turn", ["text"]),
        (CALL, 19, "max_tokens", ["tool_use"]),
    ],
)
async def test_tool_calls_that_are_not_whole(script: str, limit: int, reason: str, kinds: list[str]) -> None:
    async with asked(ScriptedModel(*letters(script))) as (_, client):
        answer = await client.messages.create(model="fake", max_tokens=limit, messages=HI, tools=[TOOL])
    assert answer.stop_reason == reason
    assert [block.type for block in answer.content] == kinds


async def test_a_tool_that_must_be_called() -> None:
    async with asked(ScriptedModel(*letters(CALL))) as (server, client):
        answer = await client.messages.create(
            model="fake", max_tokens=99, messages=HI, tools=[TOOL],
            tool_choice={"type": "tool", "name": "weather"}, thinking={"type": "disabled"},
        )  # fmt: skip
        assert server.model.requests[0].grammar is not None
    assert [block.type for block in answer.content] == ["tool_use"]


class Place(BaseModel):
    city: str


async def test_structured_output_is_parsed() -> None:
    async with asked(ScriptedModel(*letters('{"city": "Oslo"}'))) as (server, client):
        answer = await client.messages.parse(model="fake", max_tokens=99, messages=HI, output_format=Place)
        grammar = server.model.requests[0].grammar
    assert answer.parsed_output == Place(city="Oslo")
    assert grammar is not None
    assert "city" in grammar.source


# Counting


async def test_counting_generates_nothing() -> None:
    async with asked() as (server, client):
        counted = await client.messages.count_tokens(model="fake", messages=HI)
        more = await client.messages.count_tokens(model="fake", messages=HI, system="x" * 600)
        assert server.model.requests == []
    assert counted.input_tokens == PROMPT_TOKENS
    assert more.input_tokens == PROMPT_TOKENS + 600 + len("system:\n")  # though the context could not hold it


# Trouble


def told(body: Any) -> dict[str, Any]:
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"max_tokens": None}, "max_tokens", "invalid_value"),
        ({"max_tokens": 600}, "max_tokens", "context_length_exceeded"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "context_length_exceeded"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type",
         "invalid_value"),
    ],
)  # fmt: skip
async def test_bad_input(fields: dict[str, Any], param: str, code: str) -> None:
    async with asked() as (server, client):
        for stream in (False, True):
            body = {"model": "fake", "max_tokens": 5, "messages": HI, "stream": stream, **fields}
            status, answer = await server.post("/v1/messages", body)
            error = told(answer)
            assert (status, error["type"], error["param"], error["code"]) == (400, "invalid_request_error", param, code)
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(**{**ASKED, "extra_body": fields})


async def test_errors_have_anthropics_form_on_every_path_below() -> None:
    limits = Limits(body_bytes=1000, keep_alive_s=0.05)
    async with asked(limits=limits) as (server, client):
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(**{**ASKED, "model": "none"})
        assert unknown.value.type == "not_found_error"
        status, answer = await server.post("/v1/messages/batches", {})
        assert (status, told(answer)["type"]) == (404, "not_found_error")
        status, answer = await server.post("/v1/messages", b"x" * 2000)
        assert (status, told(answer)["type"]) == (413, "request_too_large")
        status, answer = await server.post("/v1/messages", b"{")
        assert (status, told(answer)["code"]) == (400, "invalid_json")
        async with server.http.get("/v1/messages") as response:
            assert (response.status, told(await response.json())["code"]) == (405, "method_not_allowed")
        server.node.reason = "loading"
        with pytest.raises(anthropic.InternalServerError) as loading:
            await client.messages.create(**ASKED)
        assert (loading.value.status_code, loading.value.type) == (503, "overloaded_error")


async def test_the_key_may_come_in_anthropics_header() -> None:
    key = Key("alice", hashlib.sha256(b"a-key-of-alice").digest())
    async with served(keys=KeyRing([key])) as server:
        for given, allowed in (("a-key-of-alice", True), ("another-key", False)):
            async with anthropic.AsyncAnthropic(base_url=server.url, api_key=given, max_retries=0) as client:
                if allowed:
                    assert (await client.messages.create(**ASKED)).role == "assistant"
                    continue
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    await client.messages.create(**ASKED)
                assert told(caught.value.body)["type"] == caught.value.type == "authentication_error"


async def test_no_room_is_a_rate_limit_error() -> None:
    model = FakeModel()
    model.refusal = Refused("the queue is full", status=429, kind="rate_limit_error", code="rate_limit_exceeded")
    async with asked(model) as (_, client):
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(**ASKED)
    assert caught.value.type == "rate_limit_error"


async def test_a_bug_is_an_api_error() -> None:
    model = FakeModel()
    model.bug_at = 0
    async with asked(model) as (_, client):
        with pytest.raises(anthropic.InternalServerError) as caught:
            await client.messages.create(**ASKED)
    assert caught.value.type == "api_error"
    assert "secret" not in str(caught.value)


async def test_trouble_after_the_first_byte() -> None:
    model = FakeModel()
    model.fail_at = 2
    async with asked(model) as (_, client):
        texts = []
        with pytest.raises(anthropic.APIStatusError) as caught:
            async with client.messages.stream(**ASKED) as stream:
                async for text in stream.text_stream:
                    texts.append(text)
    assert texts == ["a", "b"]
    assert told(caught.value.body)["message"] == "the model failed"


async def test_keep_alive_comments_do_not_disturb_the_client() -> None:
    model = FakeModel()
    model.gate.clear()
    async with asked(model) as (_, client):

        async def read() -> Message:
            async with client.messages.stream(**ASKED) as stream:
                return await stream.get_final_message()

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.2)
        model.gate.set()
        assert (await reading).stop_reason == "max_tokens"
