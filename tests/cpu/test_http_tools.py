"""Tool calls and reasoning in chat over real sockets, with the openai client and a model that says what is written."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pytest
from fake_engine import FakeModel
from http_server import CHAT, HI, Server, is_error, served
from scripted import CALL, DIALECT, ScriptedModel, letters

from janus_server import types
from janus_server.api.speech import ToolForm

WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TIME: Any = {"type": "function", "function": {"name": "time"}}
TIME_CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


class LikelyModel(ScriptedModel):
    """Tells the log probability of each token: -1 for the first, -2 for the second, and so on."""

    def _delta(self, request: types.Request, index: int, step: int) -> types.Delta:
        delta = super()._delta(request, index, step)
        logprob = types.TokenLogprob(ord("a") + step, -1.0 - step)
        return msgspec.structs.replace(delta, logprobs=(logprob,))


async def whole(server: Server, **fields: Any) -> Any:
    answer = await server.openai.chat.completions.create(model="fake", messages=HI, tools=[WEATHER, TIME], **fields)
    return answer.choices[0]


class Streamed:
    """What a streamed choice came to; that its chunks keep the rules is checked on the way."""

    def __init__(self) -> None:
        self.roles = 0
        self.chunks = 0
        self.content, self.reasoning = "", ""
        self.calls: list[dict[str, Any]] = []
        self.reason: str | None = None
        self.usage: Any = None

    def take(self, chunk: Any) -> None:
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            assert self.reason is None, "a chunk after the end"
            self.chunks += 1
            delta = choice.delta
            self.roles += delta.role is not None
            assert (delta.role is not None) == (self.chunks == 1)
            self.content += delta.content or ""
            told = delta.model_extra or {}
            assert told.get("reasoning_content") == told.get("reasoning")
            self.reasoning += told.get("reasoning_content") or ""
            for call in delta.tool_calls or []:
                if call.id is not None:
                    assert (call.index, call.type, call.function.arguments) == (len(self.calls), "function", "")
                    self.calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                else:
                    assert call.index == len(self.calls) - 1 and call.function.name is None and call.type is None
                    self.calls[call.index]["arguments"] += call.function.arguments
            self.reason = choice.finish_reason
            if self.reason is not None:
                assert not delta.model_dump(exclude_none=True)


async def streamed(server: Server, **fields: Any) -> Streamed:
    fields = {"tools": [WEATHER, TIME], **fields}
    heard = Streamed()
    async for chunk in await server.openai.chat.completions.create(
        model="fake", messages=HI, stream=True, stream_options={"include_usage": True}, **fields
    ):
        heard.take(chunk)
    return heard


def named(calls: Any) -> list[tuple[str, Any]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in calls or ()]


# Answers


async def test_one_call() -> None:
    async with served(ScriptedModel(*letters(CALL))) as server:
        choice = await whole(server)
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        assert named(choice.message.tool_calls) == [("weather", {"city": "Oslo"})]
        assert choice.message.tool_calls[0].type == "function"
        assert choice.message.tool_calls[0].id.startswith("call_")
        heard = await streamed(server)
        assert (heard.content, heard.reason, heard.roles) == ("", "tool_calls", 1)
        assert [(c["name"], c["arguments"]) for c in heard.calls] == [("weather", '{"city": "Oslo"}')]
        assert heard.chunks > 5, "the arguments did not come as they were written"
        assert heard.calls[0]["id"] != choice.message.tool_calls[0].id


async def test_thought_text_and_parallel_calls() -> None:
    text = f"<think>\nI must ask.\n</think>\n\nLet me look.\n{CALL}\n{TIME_CALL}"
    async with served(ScriptedModel(*letters(text))) as server:
        choice = await whole(server)
        assert choice.message.content == "Let me look."
        assert choice.message.reasoning_content == choice.message.reasoning == "I must ask."
        assert named(choice.message.tool_calls) == [("weather", {"city": "Oslo"}), ("time", {})]
        heard = await streamed(server)
        assert (heard.content, heard.reasoning, heard.reason) == ("Let me look.", "I must ask.", "tool_calls")
        assert [json.loads(c["arguments"]) for c in heard.calls] == [{"city": "Oslo"}, {}]
        thought = heard.usage.completion_tokens_details.reasoning_tokens
        assert 5 <= thought < heard.usage.completion_tokens
        single = await whole(server, parallel_tool_calls=False)
        assert named(single.message.tool_calls) == [("weather", {"city": "Oslo"})]


async def test_reasoning_without_tools() -> None:
    async with served(ScriptedModel(*letters("<think>\nso\n</think>\n\nParis <b>"))) as server:
        heard = await streamed(server, tools=openai.NOT_GIVEN)
        assert (heard.reasoning, heard.content, heard.reason) == ("so", "Paris <b>", "stop")
        answer = await server.openai.chat.completions.create(model="fake", messages=HI)
        message = answer.choices[0].message.model_dump()
        assert (message["reasoning"], message["content"], message["tool_calls"]) == ("so", "Paris <b>", None)
        for off in ("separate_reasoning", "include_reasoning"):
            together = await streamed(server, tools=openai.NOT_GIVEN, extra_body={off: False})
            assert (together.reasoning, together.content) == ("", "<think>\nso\n</think>\n\nParis <b>")
            assert together.usage.completion_tokens_details is None


async def test_a_call_that_the_limit_cuts_off_is_length_in_both_modes() -> None:
    cut = len(letters(CALL)) - 8
    async with served(ScriptedModel(*letters(CALL))) as server:
        choice = await whole(server, max_tokens=cut)
        heard = await streamed(server, max_tokens=cut)
        assert choice.finish_reason == heard.reason == "length"
        [call] = choice.message.tool_calls
        assert call.function.arguments == heard.calls[0]["arguments"] == '{"city": "O'[: len(call.function.arguments)]
        assert call.function.arguments.startswith('{"ci')


async def test_a_malformed_call_is_given_back() -> None:
    for text in ("<tool_call>\nweather(Oslo)\n</tool_call> sorry", '<tool_call>{"name": "weather", "arguments": [1]}'):
        async with served(ScriptedModel(*letters(text))) as server:
            choice = await whole(server)
            assert (choice.message.content, choice.finish_reason) == (text, "stop")
            assert choice.message.tool_calls is None
            heard = await streamed(server)
            assert (heard.content, heard.calls, heard.reason) == (text, [], "stop")


async def test_a_call_that_breaks_midway_is_no_call() -> None:
    """A stream has told its start by then; it does not say that there is a call to make."""
    text = CALL.replace('"Oslo"', "Oslo")
    async with served(ScriptedModel(*letters(text))) as server:
        choice = await whole(server)
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
        heard = await streamed(server)
        assert heard.calls[0]["arguments"] == '{"city": '
        assert (heard.content, heard.reason) == ("Oslo}}\n</tool_call>", "stop")
    for end in ('"Os', '"Oslo"'):
        async with served(ScriptedModel(*letters(CALL[: CALL.index('"Oslo')] + end))) as server:
            assert (await whole(server)).finish_reason == (await streamed(server)).reason == "stop"


async def test_required_and_named_calls_reach_the_engine_as_a_grammar() -> None:
    async with served(ScriptedModel(*letters(CALL))) as server:
        # The fake engine knows no grammar, so only what it was asked is looked at.
        for choice, reason, both in (("required", "tool_calls", True), (NAMED, "stop", False)):
            answer = await whole(server, tool_choice=choice)
            assert answer.finish_reason == reason
            assert named(answer.message.tool_calls) == [("weather", {"city": "Oslo"})]
            assert (await streamed(server, tool_choice=choice)).reason == reason
            grammar = server.model.requests[-1].grammar
            assert grammar is not None and grammar.kind is types.GrammarKind.TOOLS
            assert "weather" in grammar.source and ('\\"time\\"' in grammar.source) is both
        await whole(server)
        assert server.model.requests[-1].grammar is None


async def test_tools_that_may_not_be_called_are_not_looked_for() -> None:
    async with served(ScriptedModel(*letters(CALL))) as server:
        choice = await whole(server, tool_choice="none")
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")
        heard = await streamed(server, tools=openai.NOT_GIVEN)
        assert (heard.content, heard.calls) == (CALL, [])


async def test_the_other_families() -> None:
    for form, text in (
        (ToolForm.LLAMA, '{"name": "weather", "parameters": {"city": "Oslo"}}'),
        (ToolForm.MISTRAL, '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]'),
    ):
        model = ScriptedModel(*letters(text))
        model.target = msgspec.structs.replace(model.target, dialect=msgspec.structs.replace(DIALECT, tools=form))
        async with served(model) as server:
            choice = await whole(server)
            assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
            assert named(choice.message.tool_calls) == [("weather", {"city": "Oslo"})]
            assert json.loads((await streamed(server)).calls[0]["arguments"]) == {"city": "Oslo"}


async def test_several_choices_have_ids_of_their_own() -> None:
    async with served(ScriptedModel(*letters(CALL))) as server:
        answer = await server.openai.chat.completions.create(model="fake", messages=HI, tools=[WEATHER], n=3)
        assert len({call.id for c in answer.choices for call in c.message.tool_calls or ()}) == 3
        assert {c.finish_reason for c in answer.choices} == {"tool_calls"}


async def test_log_probabilities_come_with_their_text() -> None:
    pieces = ["<think>", "a", "</think>", "b", " ", "c"]
    async with served(LikelyModel(*pieces)) as server:
        told: list[tuple[str, list[float]]] = []
        async for chunk in await server.openai.chat.completions.create(
            model="fake", messages=HI, stream=True, logprobs=True
        ):
            [choice] = chunk.choices
            delta = choice.delta.model_dump()
            text = delta.get("reasoning") or delta["content"] or ""
            told.append((text, [e.logprob for e in choice.logprobs.content] if choice.logprobs else []))
        # The end token's own is the last.
        assert told == [("a", [-1.0, -2.0]), ("b", [-3.0, -4.0]), (" ", [-5.0]), ("c", [-6.0]), ("", [-7.0])]
        answer = await server.openai.chat.completions.create(model="fake", messages=HI, logprobs=True)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert [e.logprob for e in logprobs.content or ()] == [-1.0 - i for i in range(7)]


# Requests


async def test_a_conversation_with_tools_goes_through() -> None:
    async with served(ScriptedModel("It rains.")) as server:
        messages: Any = [
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ]  # fmt: skip
        answer = await server.openai.chat.completions.create(
            model="fake", messages=messages, tools=[WEATHER], reasoning_effort="low"
        )
        assert answer.choices[0].message.content == "It rains."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice.function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ],
)  # fmt: skip
async def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    async with served(ScriptedModel("x")) as server:
        status, answer = await server.post("/v1/chat/completions", {**CHAT, **fields})
        assert (status, is_error(answer)["param"]) == (400, param)
        assert not server.model.requests


async def test_a_model_without_tools_says_so() -> None:
    async with served(FakeModel()) as server:
        status, answer = await server.post("/v1/chat/completions", {**CHAT, "tools": [WEATHER]})
        error = is_error(answer)
        assert (status, error["param"], error["code"]) == (400, "tools", "unsupported_parameter")
        assert "chat template knows no tools" in error["message"]
        status, _ = await server.post("/v1/chat/completions", {**CHAT, "tools": [WEATHER], "tool_choice": "none"})
        assert status == 200
