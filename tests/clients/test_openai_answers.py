"""openai-python reads our answers into its types: models, completions, log probabilities, streams, objects, tools.

Both clients, synchronous and asynchronous, against a real server.
"""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import openai
import pydantic
import pytest
from live_server import LiveServer
from openai_clients import KINDS, Recorded, chat, complete

pytestmark = pytest.mark.timeout(120)

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of the coming days",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
QUESTION: Any = [{"role": "user", "content": "How will the weather be in Paris?"}]
RESULT: Any = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}


class Verdict(pydantic.BaseModel):
    """Bounded, so that even a random model comes to its end."""

    colour: Literal["red", "green"]
    sure: bool
    marks: list[Literal[1, 2]] = pydantic.Field(min_length=2, max_length=2)


@pytest.fixture(params=KINDS)
def api(request: pytest.FixtureRequest, server: LiveServer) -> Recorded:
    return Recorded(str(request.param), server.v1, max_retries=0)


@pytest.fixture(params=KINDS)
def talking(request: pytest.FixtureRequest, speaker: LiveServer) -> Recorded:
    """A client of the model that calls functions."""
    return Recorded(str(request.param), speaker.v1, max_retries=0)


def gathered(client: Recorded, call: Any) -> list[Any]:
    """All events of the stream that `call` makes."""

    async def gather(api: Any) -> list[Any]:
        return [event async for event in await call(api)]

    found: list[Any] = client.run(gather if client.kind == "async" else lambda api: list(call(api)))
    return found


def test_models_are_listed_and_found(api: Recorded) -> None:
    async def listed(client: openai.AsyncOpenAI) -> list[str]:
        return [model.id async for model in client.models.list()]

    names = api.run(listed if api.kind == "async" else lambda client: [model.id for model in client.models.list()])
    assert names == ["tiny", "org/tiny"]
    for name in names:
        model = api.run(lambda client, name=name: client.models.retrieve(name))
        assert (model.id, model.object, model.owned_by) == (name, "model", "janus")
        assert model.created > 0
    with pytest.raises(openai.NotFoundError):
        api.run(lambda client: client.models.retrieve("nobody"))
    assert chat_text(api, model="org/tiny", temperature=0) == chat_text(api, temperature=0)


def chat_text(api: Recorded, **more: Any) -> str:
    reply = api.run(lambda client: chat(client, **more))
    assert reply.model == more.get("model", "tiny")
    return str(reply.choices[0].message.content)


def test_a_completion_with_every_parameter(api: Recorded) -> None:
    def call(client: Any) -> Any:
        return complete(
            client, ["the quick", "lazy dog"], n=2, best_of=2, echo=True, max_tokens=6, temperature=0.8, top_p=0.9,
            seed=7, presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={"70": 1.5}, stop=["\u0000", "zzzz"],
            user="someone", stream=False, extra_body={"ignore_eos": True, "top_k": 50, "min_p": 0.01, "min_tokens": 2,
            "repetition_penalty": 1.1, "skip_special_tokens": True, "stop_token_ids": [1]},
        )  # fmt: skip

    reply = api.run(call)
    assert reply.object == "text_completion"
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert all(choice.text.startswith("the quick") for choice in reply.choices[:2])
    assert all(choice.text.startswith("lazy dog") for choice in reply.choices[2:])
    assert {choice.finish_reason for choice in reply.choices} <= {"length", "stop"}
    assert reply.usage.completion_tokens <= 4 * 6
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    # A seed makes even that repeatable.
    assert [choice.text for choice in api.run(call).choices] == [choice.text for choice in reply.choices]


def test_a_completion_takes_text_and_ids_alone_and_in_lists(api: Recorded) -> None:
    ids = [ord(letter) for letter in "abc"]
    counts = [(["a", "b"], 2), ("a", 1), (ids, 1), ([ids, ids[:1]], 2)]
    for prompt, choices in counts:
        reply = api.run(lambda client, prompt=prompt: complete(client, prompt, max_tokens=2))
        assert len(reply.choices) == choices


def test_a_streamed_completion_is_the_whole_one(api: Recorded) -> None:
    options: dict[str, Any] = {"n": 2, "seed": 5, "max_tokens": 20, "logprobs": 2, "extra_body": {"ignore_eos": True}}
    whole = api.run(lambda client: complete(client, **options))
    events = gathered(
        api, lambda client: complete(client, stream=True, stream_options={"include_usage": True}, **options)
    )
    for choice in whole.choices:
        mine = [c for event in events for c in event.choices if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        assert [c.finish_reason for c in mine if c.finish_reason] == ["length"]
        joined = [value for c in mine if c.logprobs for value in c.logprobs.token_logprobs]
        assert joined == choice.logprobs.token_logprobs
    assert events[-1].choices == []
    assert events[-1].usage == whole.usage
    assert all(event.usage is None for event in events[:-1])
    assert len({(event.id, event.created, event.model) for event in events}) == 1


@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_completion_logprobs(api: Recorded, logprobs: int) -> None:
    choice = api.run(lambda client: complete(client, logprobs=logprobs, max_tokens=10, temperature=0)).choices[0]
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
    for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert value <= 0
        assert top[token] == value
        assert len(top) in (logprobs, logprobs + 1)
        if logprobs:
            assert value == max(top.values()), "a greedy token is the likeliest"
    assert found.text_offset[0] == 0


def test_echoed_logprobs_cover_the_prompt(server: LiveServer, api: Recorded) -> None:
    choice = api.run(lambda client: complete(client, echo=True, logprobs=1, max_tokens=3, temperature=0)).choices[0]
    found = choice.logprobs
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert all(value is not None and -9999 <= value <= 0 for value in found.token_logprobs[1:])
    assert all(found.tokens[i] in found.top_logprobs[i] for i in range(1, len(found.tokens)))
    assert choice.text.startswith("the quick brown fox")
    prompt = "".join(found.tokens[:-3])
    assert prompt == "the quick brown fox"
    assert found.text_offset[:3] == [0, len(found.tokens[0]), len(found.tokens[0] + found.tokens[1])]
    scored = api.run(lambda client: complete(client, prompt, echo=True, logprobs=1, max_tokens=1)).choices[0]
    assert scored.logprobs.token_logprobs[:-1] == pytest.approx(found.token_logprobs[:-3])


def test_chat_logprobs_are_typed_and_spell_the_answer(api: Recorded) -> None:
    shown = {"skip_special_tokens": False, "ignore_eos": True}
    reply = api.run(
        lambda client: chat(client, logprobs=True, top_logprobs=4, max_tokens=12, temperature=0, extra_body=shown)
    )
    entries = reply.choices[0].logprobs.content
    assert len(entries) == reply.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 4
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0]
        assert sum(map(math.exp, values)) <= 1 + 1e-6
    spelled = bytes(byte for entry in entries for byte in entry.bytes).decode("utf-8", "replace")
    assert reply.choices[0].message.content == spelled


def test_several_choices_differ_and_are_counted(api: Recorded) -> None:
    reply = api.run(lambda client: chat(client, n=4, temperature=1.5, seed=1, extra_body={"ignore_eos": True}))
    assert len({choice.message.content for choice in reply.choices}) == 4
    assert reply.usage.completion_tokens == 4 * 8
    assert [choice.finish_reason for choice in reply.choices] == ["length"] * 4


def test_every_kind_of_message_is_taken(api: Recorded) -> None:
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}], "name": "me"},
        {"role": "assistant", "content": "Hi."},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        {"role": "user", "content": "Thanks"},
    ]  # fmt: skip
    assert isinstance(chat_text(api, messages=messages), str)


def test_the_streaming_helper_tells_content_and_logprobs(talking: Recorded) -> None:
    options: dict[str, Any] = {
        "model": "speaker", "messages": [*QUESTION, RESULT], "temperature": 0, "logprobs": True, "top_logprobs": 2,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    types, text, logprobs, final = _helped(talking, options)
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= types
    assert text == final.choices[0].message.content == "It will be sunny in Paris."
    assert [one.token for one in logprobs][:4] == ["It will be", " sunny", " in Paris", "."]
    assert len(logprobs) == final.usage.completion_tokens
    assert final.choices[0].finish_reason == "stop"


def test_the_streaming_helper_says_when_an_answer_was_cut_off(talking: Recorded) -> None:
    options: dict[str, Any] = {"model": "speaker", "messages": QUESTION, "temperature": 0, "max_tokens": 3}
    with pytest.raises(openai.LengthFinishReasonError):
        _helped(talking, options)


def _helped(api: Recorded, options: dict[str, Any]) -> tuple[set[str], str, list[Any], Any]:
    """The kinds of events of `client.chat.completions.stream`, joined content and log probabilities, the whole."""
    events: list[Any] = []

    def call(client: openai.OpenAI) -> Any:
        with client.chat.completions.stream(**options) as stream:
            events.extend(stream)
            return stream.get_final_completion()

    async def call_async(client: openai.AsyncOpenAI) -> Any:
        async with client.chat.completions.stream(**options) as stream:
            events.extend([event async for event in stream])
            return await stream.get_final_completion()

    final = api.run(call_async if api.kind == "async" else call)
    text = "".join(event.delta for event in events if event.type == "content.delta")
    logprobs = [one for event in events if event.type == "logprobs.content.delta" for one in event.content]
    return {event.type for event in events}, text, logprobs, final


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_parse_gives_an_object_of_the_callers_type(server: LiveServer, api: Recorded, temperature: float) -> None:
    reply = api.run(lambda client: client.chat.completions.parse(
        model="tiny", messages=QUESTION, response_format=Verdict, max_tokens=200, temperature=temperature, seed=3
    ))  # fmt: skip
    assert isinstance(reply.choices[0].message.parsed, Verdict)
    assert reply.choices[0].finish_reason == "stop"


def test_a_streamed_object_is_parsed_too(server: LiveServer, api: Recorded) -> None:
    options: dict[str, Any] = {
        "model": "tiny", "messages": QUESTION, "response_format": Verdict, "max_tokens": 200, "temperature": 1,
        "seed": 4,
    }  # fmt: skip
    _, text, _, final = _helped(api, options)
    assert isinstance(final.choices[0].message.parsed, Verdict)
    assert Verdict.model_validate_json(text) == final.choices[0].message.parsed


def test_json_mode_gives_an_object(server: LiveServer, api: Recorded) -> None:
    asked: Any = {"type": "json_object"}
    reply = api.run(lambda client: chat(client, response_format=asked, max_tokens=400, temperature=0))
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(reply.choices[0].message.content), dict)
    else:
        assert reply.choices[0].message.content.lstrip().startswith("{")


def test_a_tool_is_called_and_its_result_is_answered(speaker: LiveServer, talking: Recorded) -> None:
    asked: dict[str, Any] = {"model": "speaker", "messages": QUESTION, "tools": [WEATHER], "temperature": 0}
    reply = talking.run(lambda client: client.chat.completions.create(**asked))
    assert reply.choices[0].finish_reason == "tool_calls"
    message = reply.choices[0].message
    (call,) = message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Paris", "days": 2}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    answer = talking.run(lambda client: client.chat.completions.create(
        **{**asked, "messages": [*QUESTION, message.model_dump(exclude_none=True), result]}
    ))  # fmt: skip
    assert answer.choices[0].message.content == "It will be sunny in Paris."
    assert answer.choices[0].finish_reason == "stop"


def test_a_tool_call_streams_in_pieces_that_join_to_json(speaker: LiveServer, talking: Recorded) -> None:
    asked: dict[str, Any] = {"model": "speaker", "messages": QUESTION, "tools": [WEATHER], "temperature": 0}
    events = gathered(talking, lambda client: client.chat.completions.create(stream=True, **asked))
    deltas = [call for event in events for call in event.choices[0].delta.tool_calls or []]
    assert [d.index for d in deltas] == [0] * len(deltas)
    assert deltas[0].id and deltas[0].type == "function" and deltas[0].function.name == "weather"
    assert all(d.id is None and d.function.name is None for d in deltas[1:])
    assert json.loads("".join(d.function.arguments or "" for d in deltas)) == {"city": "Paris", "days": 2}
    assert events[-1].choices[0].finish_reason == "tool_calls"
    assert not any(event.choices[0].delta.content for event in events)
    kinds, _, _, final = _helped(talking, asked)
    assert "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].message.tool_calls[0].function.name == "weather"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_forced_call_is_parsed_even_from_a_random_model(speaker: LiveServer, talking: Recorded, choice: Any) -> None:
    """The script would say otherwise: this model wants to answer, and has to call."""
    bounded = json.loads(json.dumps(WEATHER))
    bounded["function"]["parameters"]["properties"] = {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}}
    messages = [*QUESTION, {"role": "assistant", "content": ""}, {"role": "tool", "content": "x", "tool_call_id": "1"}]
    reply = talking.run(lambda client: client.chat.completions.create(
        model="speaker", messages=messages, tools=[bounded], tool_choice=choice, temperature=0, max_tokens=200
    ))  # fmt: skip
    (call,) = reply.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Rome", "Oslo")
    assert arguments["days"] in (1, 2)


def test_embeddings_of_texts_and_ids_as_numbers_and_in_base64(api: Recorded) -> None:
    """openai-python asks for base64 by itself and decodes it; numbers come as they are."""
    texts = ["the quick", "brown fox", "the quick"]
    reply = api.run(lambda client: client.embeddings.create(model="tiny", input=texts))
    assert [one.index for one in reply.data] == [0, 1, 2]
    vectors = [one.embedding for one in reply.data]
    assert vectors[0] == vectors[2] != vectors[1]
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 0
    plain = api.run(lambda client: client.embeddings.create(model="tiny", input=texts, encoding_format="float"))
    assert plain.data[1].embedding == pytest.approx(vectors[1], rel=1e-6)
    for given, count in (("fox", 1), ([5, 6, 7], 1), ([[5, 6], [7]], 2)):
        made = api.run(lambda client, given=given: client.embeddings.create(model="tiny", input=given))
        assert len(made.data) == count
    with pytest.raises(openai.BadRequestError) as caught:
        api.run(lambda client: client.embeddings.create(model="tiny", input=[]))
    assert caught.value.param == "input"
