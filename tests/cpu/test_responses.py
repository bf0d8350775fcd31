"""/v1/responses over a real socket, with the openai client and a fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from fake_engine import FakeModel
from http_server import PROMPT_TOKENS, Server, is_error, served
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
)
from pydantic import BaseModel
from scripted import CALL, ScriptedModel, letters

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
EXTRA = {"seed": 0}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with served() as server:
        yield server


async def test_a_text_in_and_a_text_out(server: Server) -> None:
    answer = await server.openai.responses.create(
        model="fake", input="hi", max_output_tokens=4, metadata={"a": "b"}, user="u", extra_body=EXTRA
    )
    Response.model_validate(answer.model_dump(warnings="error"), strict=True)  # every field of its declared type
    assert answer.output_text == "abcd"
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.model, answer.status) == ("response", "fake", "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.metadata, answer.user, answer.max_output_tokens) == ({"a": "b"}, "u", 4)
    assert (answer.temperature, answer.top_p, answer.error, answer.previous_response_id) == (0.7, 0.9, None, None)
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (PROMPT_TOKENS, 4)
    assert answer.usage.total_tokens == PROMPT_TOKENS + 4
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    message = answer.output[0]
    assert isinstance(message, ResponseOutputMessage)
    assert (message.role, message.status) == ("assistant", "incomplete")
    assert isinstance(message.content[0], ResponseOutputText)
    assert message.content[0].annotations == []


async def test_the_answer_does_not_depend_on_how_it_is_asked_for(server: Server) -> None:
    """Chat with the same messages gives the same text; the sync client reads it as well."""
    asked = {"model": "fake", "max_output_tokens": 5, "extra_body": {"seed": 3}}
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    plain = await server.openai.responses.create(**asked, input=items)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        sync = await asyncio.to_thread(client.responses.create, **asked, input="hi")
    chat = await server.openai.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=5, seed=3
    )
    assert plain.output_text == sync.output_text == chat.choices[0].message.content
    assert len({request.prompt for request in server.model.requests}) == 1


async def test_instructions_and_sampling_reach_the_engine(server: Server) -> None:
    answer = await server.openai.responses.create(
        model="fake", input="hi", instructions="Be brief.", max_output_tokens=1, temperature=0, top_p=0.5,
        extra_body={"seed": 3, "top_k": 7},
    )  # fmt: skip
    request = server.model.requests[0]
    assert bytes(request.prompt[1:]).decode() == "system:Be brief.\nuser:hi\nassistant:"
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.0, 0.5, 7)
    assert (answer.instructions, answer.temperature, answer.top_p) == ("Be brief.", 0.0, 0.5)


async def test_log_probabilities(server: Server) -> None:
    answer = await server.openai.responses.create(
        model="fake", input="hi", max_output_tokens=2, top_logprobs=2, extra_body=EXTRA,
        include=["message.output_text.logprobs"],
    )  # fmt: skip
    assert isinstance(answer.output[0], ResponseOutputMessage)
    part = answer.output[0].content[0]
    assert isinstance(part, ResponseOutputText)
    assert part.logprobs is not None
    assert [entry.token for entry in part.logprobs] == ["a", "b"]
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2, 2]
    assert part.logprobs[0].logprob == part.logprobs[0].top_logprobs[1].logprob
    assert part.logprobs[0].top_logprobs[0].bytes == [0xE2]


# Streams


async def test_the_events_of_a_text(server: Server) -> None:
    stream = await server.openai.responses.create(
        model="fake", input="hi", max_output_tokens=3, stream=True, extra_body=EXTRA
    )
    events = [event async for event in stream]
    assert [event.type for event in events] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * 3, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        type(event).model_validate(event.model_dump(warnings="error"), strict=True)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "abc"
    items = {event.item_id for event in events if hasattr(event, "item_id")}
    assert len(items) == 1
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == "abc"
    assert last.response.output[0].id in items
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 3


async def test_the_form_on_the_wire(server: Server) -> None:
    events = await server.events("/v1/responses", {"model": "fake", "input": "hi", "max_output_tokens": 1, "seed": 0})
    names = [event.split("\n")[0].removeprefix("event: ") for event in events]
    bodies = [json.loads(event.split("\n")[1].removeprefix("data: ")) for event in events]
    assert names == [body["type"] for body in bodies]
    assert names[-1] == "response.incomplete"
    assert bodies[0]["response"]["output"] == []
    assert bodies[0]["response"]["usage"] is None


async def test_the_streaming_helper(server: Server) -> None:
    async with server.openai.responses.stream(
        model="fake", input="hi", max_output_tokens=3, extra_body=EXTRA
    ) as stream:
        texts = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
    assert texts == ["a", "ab", "abc"]


async def test_the_streaming_helper_of_the_sync_client() -> None:
    def read(url: str) -> tuple[list[str], Response]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            with client.responses.stream(model="fake", input="hi") as stream:
                kinds = [event.type for event in stream]
            return kinds, stream.get_final_response()

    async with served(ScriptedModel("Hel", "lo")) as server:
        kinds, answer = await asyncio.to_thread(read, server.url)
    assert kinds[-1] == "response.completed"
    assert (answer.status, answer.output_text) == ("completed", "Hello")


async def test_an_answer_of_nothing_is_an_empty_message() -> None:
    async with served(ScriptedModel()) as server:
        answer = await server.openai.responses.create(model="fake", input="hi")
        assert (answer.status, answer.output_text, len(answer.output)) == ("completed", "", 1)
        async with server.openai.responses.stream(model="fake", input="hi") as stream:
            final = await stream.get_final_response()
        assert (final.output_text, len(final.output)) == ("", 1)


# Reasoning, tools and structured output

THINKS = [*letters("<think>\nI look it up.\n</think>\n\n"), *letters("One moment.\n" + CALL)]


async def test_reasoning_and_a_tool_call() -> None:
    async with served(ScriptedModel(*THINKS)) as server:
        answer = await server.openai.responses.create(model="fake", input="Weather in Oslo?", tools=[TOOL])
        async with server.openai.responses.stream(model="fake", input="Weather in Oslo?", tools=[TOOL]) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    for one in (answer, final):
        assert one.status == "completed"
        thought, message, call = one.output
        assert isinstance(thought, ResponseReasoningItem)
        assert thought.content is not None
        assert thought.content[0].text == "I look it up."
        assert isinstance(message, ResponseOutputMessage)
        assert one.output_text == "One moment."
        assert isinstance(call, ResponseFunctionToolCall)
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
        assert call.call_id
        assert call.status == "completed"
        assert one.usage is not None
        assert 0 < one.usage.output_tokens_details.reasoning_tokens < one.usage.output_tokens
    assert [tool.type for tool in answer.tools] == ["function"]
    kinds = [event.type for event in events]
    for kind in ("response.reasoning_text.delta", "response.reasoning_text.done",
                 "response.function_call_arguments.delta", "response.function_call_arguments.done"):  # fmt: skip
        assert kind in kinds
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_conversation_with_a_tool_goes_on() -> None:
    """What came out goes back in as it is, and the template is given both call and result."""
    async with served(ScriptedModel(*THINKS)) as server:
        items: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]
        answer = await server.openai.responses.create(model="fake", input=items, tools=[TOOL])
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        call = answer.output[-1]
        assert isinstance(call, ResponseFunctionToolCall)
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
        again = await server.openai.responses.create(model="fake", input=items, tools=[TOOL])
        assert again.status == "completed"
        prompt = bytes(server.model.requests[1].prompt[1:]).decode()
    assert prompt == "user:Weather in Oslo?\nassistant:One moment.\ntool:rain\nassistant:"


async def test_what_only_looks_like_a_tool_call_is_text() -> None:
    broken = '<tool_call>\n{"name": "weather", "arguments": {"city": "Os'
    async with served(ScriptedModel(*letters(broken))) as server:
        answer = await server.openai.responses.create(model="fake", input="hi", tools=[TOOL])
    assert answer.output_text.strip() == broken
    assert [item.type for item in answer.output] == ["message"]


async def test_a_tool_call_that_the_limit_cuts_is_incomplete() -> None:
    async with served(ScriptedModel(*letters(CALL))) as server:
        answer = await server.openai.responses.create(model="fake", input="hi", tools=[TOOL], max_output_tokens=19)
    assert answer.status == "incomplete"
    call = answer.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.status == "incomplete"
    assert json.loads(call.arguments + 'lo"}') == {"city": "Oslo"} or not call.arguments.endswith("}")


class Place(BaseModel):
    city: str


async def test_structured_output_is_parsed() -> None:
    async with served(ScriptedModel(*letters('{"city": "Oslo"}'))) as server:
        answer = await server.openai.responses.parse(model="fake", input="hi", text_format=Place)
        grammar = server.model.requests[0].grammar
        async with server.openai.responses.stream(model="fake", input="hi", text_format=Place) as stream:
            final = await stream.get_final_response()
    assert answer.output_parsed == final.output_parsed == Place(city="Oslo")
    assert grammar is not None
    assert "city" in grammar.source
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"


# Trouble


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", None),
        ({"max_output_tokens": 600}, "max_output_tokens", "context_length_exceeded"),
        ({"input": "x" * 600}, "input", "context_length_exceeded"),
        ({"temperature": 9}, "temperature", "invalid_value"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
    ],
)
async def test_bad_input(server: Server, fields: dict[str, Any], param: str, code: str | None) -> None:
    for stream in (False, True):
        status, answer = await server.post(
            "/v1/responses", {"model": "fake", "input": "hi", "stream": stream, **fields}
        )
        error = is_error(answer)
        assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
        assert error["code"] == code or code is None
        assert error["message"].startswith((param, "the prompt has"))


async def test_an_unknown_model_and_a_stored_response(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await server.openai.responses.create(model="none", input="hi")
    assert unknown.value.code == "model_not_found"
    for attempt in (server.openai.responses.retrieve, server.openai.responses.delete, server.openai.responses.cancel):
        with pytest.raises(openai.NotFoundError) as stored:
            await attempt("resp_1")
        assert stored.value.code == "response_not_found"
        assert "keeps no responses" in stored.value.message


async def test_unknown_fields_are_counted(server: Server) -> None:
    asked = {"model": "fake", "input": "hi", "max_output_tokens": 1, "moderation": {}, "invented": 1}
    assert (await server.post("/v1/responses", asked))[0] == 200
    metrics = await server.metrics()
    assert [value for name, value in metrics.items() if "ignored" in name and "/v1/responses" in name] == [2.0]


async def test_trouble_after_the_first_byte(server: Server) -> None:
    server.model.fail_at = 2
    stream = await server.openai.responses.create(
        model="fake", input="hi", max_output_tokens=5, stream=True, extra_body=EXTRA
    )
    seen = []
    with pytest.raises(openai.APIError) as caught:
        async for event in stream:
            seen.append(event)
    assert caught.value.message == "the model failed"
    failed = seen[-1]
    assert failed.type == "response.failed"
    assert (failed.response.status, failed.response.output_text) == ("failed", "ab")
    assert failed.response.error is not None
    assert (failed.response.error.code, failed.response.error.message) == ("server_error", "the model failed")
    server.model.fail_at = 0
    with pytest.raises(openai.InternalServerError):
        await server.openai.responses.create(model="fake", input="hi")


async def test_trouble_after_a_keep_alive_still_opens_the_response(server: Server) -> None:
    """A comment was the first byte: the failure is an event, and the helper needs response.created before it."""
    server.model.stall_at = 0
    server.model.gate.clear()
    reading = asyncio.create_task(server.events("/v1/responses", {"model": "fake", "input": "hi"}))
    await asyncio.sleep(0.2)
    server.model.stall_at, server.model.fail_at = -1, 0
    server.model.gate.set()
    names = [event.split("\n")[0] for event in await reading if not event.startswith(":")]
    assert names == [f"event: {name}" for name in
                     ("response.created", "response.in_progress", "response.failed", "error")]  # fmt: skip


async def test_leaving_in_mid_stream_aborts() -> None:
    model = FakeModel()
    model.stall_at = 2
    async with served(model) as server:
        stream = await server.openai.responses.create(model="fake", input="hi", stream=True, extra_body=EXTRA)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        async with asyncio.timeout(5):
            while not model.aborted:
                await asyncio.sleep(0.01)


async def test_counting_the_input(server: Server) -> None:
    counted = await server.openai.responses.input_tokens.count(model="fake", input="hi")
    assert counted.input_tokens == PROMPT_TOKENS
    assert server.model.requests == []


async def test_a_schema_that_no_format_reads_is_not_echoed(server: Server) -> None:
    deep = "{" + '"a":{' * 900 + "}" * 901
    raw = b'{"model":"fake","input":"hi","text":{"format":{"type":"text","schema":%b}}}' % deep.encode()
    status, answer = await server.post("/v1/responses", raw)
    assert status == 200
    assert answer["text"]["format"] == {"type": "text"}
