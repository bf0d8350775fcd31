"""The answers of /v1/responses and /v1/messages without a socket: events build up what the whole answer says."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from janus_server import types
from janus_server.api import messages_reply, plan, responses, responses_reply
from janus_server.api.bodies import Limits
from janus_server.api.messages_reply import StreamMessage, WholeMessage
from janus_server.api.responses_reply import StreamResponse, WholeResponse
from janus_server.api.speech import Style, ToolForm
from janus_server.errors import Bug, Refused

LIMITS = Limits()
TARGET = plan.Target("m", 1000, 300, (257,), types.Sampling())
CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "x"]}}</tool_call>'
PIECES = ("<think>\n", "I see.", "\n</think>\n\n", CALL, "Hé 😀 \u2028", " there\n", '<tool_call>{"name"', "\n\n", "{")
STYLE = Style(reasoning=True, tools=ToolForm.HERMES, names=frozenset({"f"}))


class Bytes:
    """Token i is byte i."""

    def token_text(self, token: int) -> str:
        return chr(token)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


def call_of(prefix: str, style: Style = STYLE, **fields: Any) -> tuple[responses.ResponsesBody, plan.Call]:
    raw = json.dumps({"model": "m", "input": "hi", **fields}).encode()
    body = responses.parse_responses(raw, LIMITS)
    chat = responses.chat_of_responses(body, LIMITS).chat
    call = plan.plan_chat(chat, [1, 2, 3, 4], TARGET, LIMITS, plan.Label(f"{prefix}0a", 1_700_000_000, 1))
    return body, msgspec.structs.replace(call, style=style)


@st.composite
def spoken(draw: st.DrawFn) -> list[types.Delta]:
    """A choice cut at random, which ended by itself, by a stop string or by the limit."""
    text = "".join(draw(st.lists(st.sampled_from(PIECES), max_size=8)))
    cuts = sorted({0, len(text), *draw(st.lists(st.integers(0, len(text)), max_size=6))})
    parts = [text[a:b] for a, b in itertools.pairwise(cuts)] or [""]
    finish = draw(st.sampled_from((types.FinishReason.STOP, types.FinishReason.LENGTH)))
    stop = draw(st.sampled_from((None, "q"))) if finish is types.FinishReason.STOP else None
    deltas = [types.Delta(0, part, (1,), cached_tokens=2) for part in parts]
    deltas[-1] = msgspec.structs.replace(deltas[-1], finish=finish, stop=stop)
    return deltas


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """Read as the simplest client would: lines, split wherever some reader splits them."""
    found = []
    for block in raw.decode().split("\n\n")[:-1]:
        name, data = block.splitlines()
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def built_response(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items that the events of a response build up."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif kind == "content_part.added":
            items[event["output_index"]]["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            items[event["output_index"]]["content"][0]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "output_item.done":
            item = items[event["output_index"]]
            item["status"] = event["item"]["status"]
            assert item == event["item"]
            assert item["id"] not in [other["id"] for other in items[:-1]]
    return items


@given(spoken())
def test_events_build_up_the_response(deltas: list[types.Delta]) -> None:
    body, call = call_of("resp_")
    whole, stream = WholeResponse(body, call, Bytes()), StreamResponse(body, call, Bytes())  # type: ignore[arg-type]
    for delta in deltas:
        whole.add(0, delta)
    events = events_of(b"".join([*(stream.events(0, delta) for delta in deltas), stream.end()]))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1]["response"]
    assert built_response(events) == final["output"]
    assert events[-1]["type"] == f"response.{final['status']}"
    told = json.loads(whole.body())
    if not undone(deltas):
        assert told == final
    assert told["usage"]["output_tokens"] == len(deltas)
    assert told["usage"]["input_tokens_details"]["cached_tokens"] == 2


@given(spoken())
def test_events_build_up_the_message(deltas: list[types.Delta]) -> None:
    _, call = call_of("msg_")
    whole, stream = WholeMessage(call, None), StreamMessage(call, None)
    for delta in deltas:
        whole.add(0, delta)
    events = events_of(b"".join([*(stream.events(0, delta) for delta in deltas), stream.end()]))
    message = events[0]["message"]
    arguments = ""
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                name = {"text_delta": "text", "thinking_delta": "thinking"}.get(event["delta"]["type"])
                if name is not None:
                    message["content"][-1][name] += event["delta"][name]
                else:
                    arguments += event["delta"]["partial_json"]
            case "content_block_stop":
                if arguments.endswith("}"):
                    message["content"][-1]["input"] = json.loads(arguments)
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    if not undone(deltas):
        assert json.loads(whole.body()) == message


def undone(deltas: list[types.Delta]) -> bool:
    """Whether a call was begun that is none: only the whole answer can take that back."""
    text = "".join(delta.text for delta in deltas)
    return '{"name"' in text.replace(CALL, "")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 415, 429, 500, 503, 504])
def test_anthropics_names_of_errors(status: int) -> None:
    names = {
        401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
        429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 504: "timeout_error",
    }  # fmt: skip
    error = messages_reply.messages_error(Refused("no", status=status, kind="x", param="p", code="c"))
    kind = names.get(status, "invalid_request_error")
    assert error == {"type": "error", "error": {"type": kind, "message": "no", "param": "p", "code": "c"}}


def test_a_failed_response_has_its_text_and_its_error() -> None:
    body, call = call_of("resp_")
    stream = StreamResponse(body, call, Bytes())  # type: ignore[arg-type]
    raw = stream.events(0, types.Delta(0, "Hel", (1,)))
    raw += stream.error(Refused("too many", status=429, kind="rate_limit_error", code="rate_limit_exceeded"))
    *_, failed, error = events_of(raw)
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "rate_limit_exceeded", "message": "too many"}
    assert failed["response"]["output"][0]["content"][0]["text"] == "Hel"
    assert error["message"] == error["error"]["message"] == "too many"


def test_log_probabilities_go_with_their_text() -> None:
    """Those of held-back tokens wait for it, those of the reasoning are left out."""
    style = Style(reasoning=True)
    body, call = call_of("resp_", style, include=["message.output_text.logprobs"])
    deltas = [
        types.Delta(0, text, (token,), (types.TokenLogprob(token, -1.0),))
        for text, token in (("<think>x", 65), ("</think>", 66), ("", 67), ("yes", 68))
    ]
    deltas.append(types.Delta(0, "", (69,), (types.TokenLogprob(69, float("nan")),), types.FinishReason.STOP))
    stream = StreamResponse(body, call, Bytes())  # type: ignore[arg-type]
    events = events_of(b"".join(stream.events(0, delta) for delta in deltas))
    (said,) = [event for event in events if event["type"] == "response.output_text.delta"]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert [entry["token"] for entry in said["logprobs"]] == ["C", "D"]
    assert [entry["token"] for entry in done["logprobs"]] == ["C", "D", "E"]
    assert done["logprobs"][-1]["logprob"] == -9999.0


def test_an_answer_is_not_written_before_its_end() -> None:
    body, call = call_of("resp_")
    with pytest.raises(Bug):
        WholeResponse(body, call, Bytes()).body()  # type: ignore[arg-type]
    with pytest.raises(Bug):
        WholeMessage(call, None).body()
    assert responses_reply.PREFIX == "resp_"


def test_a_stream_does_not_vouch_for_a_call_that_came_to_nothing() -> None:
    """Its item was told already: it ends incomplete, and the message does not stop for a tool's use."""
    deltas = [
        types.Delta(0, '<tool_call>{"name": "f", "arguments": {"a": ', (1,)),
        types.Delta(0, "oops", (1,), finish=types.FinishReason.STOP),
    ]
    body, call = call_of("resp_")
    response = StreamResponse(body, call, Bytes())  # type: ignore[arg-type]
    final = events_of(b"".join([*(response.events(0, delta) for delta in deltas), response.end()]))[-1]["response"]
    item = final["output"][0]
    assert (final["status"], item["type"], item["status"]) == ("completed", "function_call", "incomplete")
    message = StreamMessage(call, None)
    events = events_of(b"".join([*(message.events(0, delta) for delta in deltas), message.end()]))
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
