"""The bytes of answers, without a socket: stream events, whole bodies, log probabilities, usage."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janus_server import types
from janus_server.api import plan as api
from janus_server.api import reply as api_reply
from janus_server.api.bodies import Limits
from janus_server.errors import Bug

LIMITS = Limits()
TARGET = api.Target("m", 100, 300, (257,), types.Sampling())
LABEL = api.Label("cmpl-1", 1_700_000_000, 42)


class Names:
    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


def plan(prompts: list[list[int]] | None = None, echoes: list[str] | None = None, **fields: Any) -> api.Call:
    prompts = prompts or [[1, 2, 3]]
    body = api.parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), LIMITS)
    return api.plan_completion(body, prompts, echoes or [""] * len(prompts), TARGET, LIMITS, LABEL)


def plan_chat(**fields: Any) -> api.Call:
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return api.plan_chat(api.parse_chat(json.dumps(chat).encode(), LIMITS), [1, 2, 3], TARGET, LIMITS, LABEL)


def stream(call: api.Call, deltas: list[tuple[int, types.Delta]]) -> list[dict[str, Any]]:
    reply = api_reply.StreamReply(call, Names())
    raw = b"".join(reply.events(prompt, delta) for prompt, delta in deltas)
    if call.include_usage:
        raw += reply.usage_event()
    events = raw.split(b"\n\n")
    assert events.pop() == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


STOP, LENGTH = types.FinishReason.STOP, types.FinishReason.LENGTH


def test_chat_chunks() -> None:
    call = plan_chat(stream=True, stream_options={"include_usage": True})
    chunks = stream(
        call,
        [
            (0, types.Delta(0, "a", (97,), cached_tokens=2)),
            (0, types.Delta(0, "", (98,), cached_tokens=2)),
            (0, types.Delta(0, "c", (99,), finish=LENGTH)),
        ],
    )
    assert [c["object"] for c in chunks] == ["chat.completion.chunk"] * 5
    deltas = [c["choices"][0]["delta"] for c in chunks[:4]]
    assert deltas == [{"role": "assistant", "content": "a"}, {"content": ""}, {"content": "c"}, {}]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:4]] == [None, None, None, "length"]
    assert [c["usage"] for c in chunks[:4]] == [None] * 4
    assert chunks[4]["choices"] == []
    assert chunks[4]["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 2}
    }  # fmt: skip
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1


def test_a_choice_that_ends_at_once_still_has_a_role_and_one_end() -> None:
    chunks = stream(plan_chat(stream=True), [(0, types.Delta(0, "", (257,), finish=STOP))])
    assert [c["choices"][0]["delta"] for c in chunks] == [{"role": "assistant", "content": ""}, {}]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, "stop"]
    assert all("usage" not in c for c in chunks)


def test_completion_chunks_count_choices_over_prompts() -> None:
    call = plan(
        [[1], [2, 3]], ["P0", "P1"], n=2, echo=True, stream=True, stream_options={"continuous_usage_stats": True}
    )
    chunks = stream(call, [(1, types.Delta(1, "x", (5,), finish=STOP)), (0, types.Delta(0, "y", (5,)))])
    assert [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks] == [(3, "P1x"), (0, "P0y")]
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2]
    assert chunks[0]["usage"]["prompt_tokens"] == 3


@given(st.text())
def test_any_text_survives_and_no_line_reader_can_cut_it(text: str) -> None:
    call = plan_chat(stream=True)
    raw = api_reply.StreamReply(call, Names()).events(0, types.Delta(0, text, (1,)))
    assert len(raw.decode().splitlines()) == 2
    assert json.loads(raw.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == text


def top(token: int, value: float, *others: tuple[int, float]) -> types.TokenLogprob:
    return types.TokenLogprob(token, value, others)


def test_completion_logprobs() -> None:
    call = plan(echo=False, logprobs=2)
    reply = api_reply.WholeReply(call, Names())
    value = -0.1 - 1e-17
    first = top(97, value, (97, value), (98, -math.inf))
    partial = top(0xE2, -1.5, (98, -0.5), (0xE3, -1.25))
    reply.add(0, types.Delta(0, "a", (97, 0xE2, 0x82), (first, partial)))
    reply.add(0, types.Delta(0, "€b", (0xAC, 98), (top(0x82, -1.0), top(0xAC, -1.0), top(98, math.nan)), STOP))
    choice = json.loads(reply.body())["choices"][0]
    assert choice["text"] == "a€b"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
    assert logprobs["token_logprobs"] == [value, -1.5, -1.0, -1.0, -9999.0]
    assert logprobs["top_logprobs"][0] == {"a": value, "b": -9999.0}
    assert logprobs["top_logprobs"][1] == {"b": -0.5, "bytes:\\xe3": -1.25, "bytes:\\xe2": -1.5}
    assert logprobs["top_logprobs"][2] == {"bytes:\\x82": -1.0}
    assert logprobs["text_offset"] == [0, 1, 1, 1, 2]


def test_chat_logprobs() -> None:
    call = plan_chat(logprobs=True, top_logprobs=1)
    reply = api_reply.WholeReply(call, Names())
    reply.add(0, types.Delta(0, "a", (97,), (top(97, -2.0, (98, -0.5)),), LENGTH))
    body = json.loads(reply.body())
    assert body["choices"][0]["logprobs"]["content"] == [
        {
            "token": "a",
            "logprob": -2.0,
            "bytes": [97],
            "top_logprobs": [
                {"token": "b", "logprob": -0.5, "bytes": [98]},
                {"token": "a", "logprob": -2.0, "bytes": [97]},
            ],
        }
    ]
    none_asked = plan_chat(logprobs=True)
    assert none_asked.requests[0].sampling.logprobs == 0
    [chunk, _] = stream(none_asked, [(0, types.Delta(0, "a", (97,), (top(97, -2.0),), LENGTH))])
    assert chunk["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_only_stop_and_length_end_an_answer() -> None:
    for finish in (types.FinishReason.ERROR, types.FinishReason.ABORT):
        with pytest.raises(Bug):
            api_reply.StreamReply(plan(), Names()).events(0, types.Delta(0, finish=finish))
        failed = api_reply.failure(types.Delta(0, finish=finish))
        assert failed is not None
        assert failed.status >= 500
    assert api_reply.failure(types.Delta(0, "a", (1,), finish=STOP)) is None
