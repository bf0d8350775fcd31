"""The bytes of answers, without a socket: stream events, whole bodies, log probabilities, usage."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from janus_server import types
from janus_server.api import chat_reply, parse
from janus_server.api import plan as api
from janus_server.api import reply as api_reply
from janus_server.api.bodies import Limits
from janus_server.errors import Bug
from janus_server.tokens.detokenize import Detokenizer

LIMITS = Limits()
TARGET = api.Target("m", 100, 300, (257,), types.Sampling())
LABEL = api.Label("cmpl-1", 1_700_000_000, 42)


class Bytes:
    """A tokenizer whose token i is byte i; 256 and up are special and spell their number."""

    def __init__(self, strips_first_space: bool = False) -> None:
        self.strips_first_space = strips_first_space

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else f"<{token}>".encode()

    def is_special(self, token: int) -> bool:
        return token >= 256


def plan(prompts: list[list[int]] | None = None, echoes: list[str] | None = None, **fields: Any) -> api.Call:
    prompts = prompts or [[1, 2, 3]]
    body = parse.parse_completion(json.dumps({"model": "m", "prompt": prompts, **fields}).encode(), LIMITS)
    call = api.plan_completion(body, prompts, TARGET, LIMITS, LABEL)
    return msgspec.structs.replace(call, echo=tuple(echoes)) if echoes else call


def plan_chat(**fields: Any) -> api.Call:
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return api.plan_chat(parse.parse_chat(json.dumps(chat).encode(), LIMITS), [1, 2, 3], TARGET, LIMITS, LABEL)


def stream(call: api.Call, deltas: list[tuple[int, types.Delta]]) -> list[dict[str, Any]]:
    reply = (chat_reply.StreamChat if call.kind is api.Kind.CHAT else api_reply.StreamReply)(call, Bytes())
    raw = b"".join(reply.events(prompt, delta) for prompt, delta in deltas)
    events = (raw + reply.end()).split(b"\n\n")
    assert events.pop() == b""
    assert events.pop() == b"data: [DONE]"
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
    raw = chat_reply.StreamChat(call, Bytes()).events(0, types.Delta(0, text, (1,)))
    assert len(raw.decode().splitlines()) == 2
    assert json.loads(raw.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == text


def top(token: int, value: float, *others: tuple[int, float]) -> types.TokenLogprob:
    return types.TokenLogprob(token, value, others)


def test_completion_logprobs() -> None:
    call = plan(echo=False, logprobs=2)
    reply = api_reply.WholeReply(call, Bytes())
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
    reply = chat_reply.WholeChat(call, Bytes())
    reply.add(0, types.Delta(0, "a", (97,), (top(97, -2.0, (98, -0.5)),), LENGTH))
    body = json.loads(reply.body())
    assert body["choices"][0]["logprobs"]["content"] == [
        {
            "token": "a",
            "logprob": -2.0,
            "bytes": [97],
            "top_logprobs": [{"token": "b", "logprob": -0.5, "bytes": [98]}],
        }
    ]
    none_asked = plan_chat(logprobs=True)
    assert none_asked.requests[0].sampling.logprobs == 0
    [chunk, _] = stream(none_asked, [(0, types.Delta(0, "a", (97,), (top(97, -2.0),), LENGTH))])
    assert chunk["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize("k", range(4))
def test_chat_has_k_alternatives_and_completions_the_chosen_one_too(k: int) -> None:
    """What the engine sends is exactly the k likeliest; the chosen token is the third."""
    likeliest = ((98, -0.5), (99, -1.0), (97, -2.0))[:k]
    delta = types.Delta(0, "a", (97,), (types.TokenLogprob(97, -2.0, likeliest),), LENGTH)
    for call in (plan_chat(logprobs=True, top_logprobs=k, stream=True), plan_chat(logprobs=True, top_logprobs=k)):
        assert call.requests[0].sampling.logprobs == k
        whole = chat_reply.WholeChat(call, Bytes())
        whole.add(0, delta)
        streamed = stream(call, [(0, delta)])[0]
        for answer in (json.loads(whole.body()), streamed):
            [entry] = answer["choices"][0]["logprobs"]["content"]
            assert [one["token"] for one in entry["top_logprobs"]] == ["b", "c", "a"][:k]
            assert entry["logprob"] == -2.0
    whole = api_reply.WholeReply(plan(logprobs=k), Bytes())
    whole.add(0, delta)
    [top_map] = json.loads(whole.body())["choices"][0]["logprobs"]["top_logprobs"]
    assert len(top_map) == (k if k == 3 else k + 1) and top_map["a"] == -2.0


@pytest.mark.parametrize(
    ("strips", "skip", "prompt", "tokens", "shown", "offsets"),
    [
        (False, True, [1], [97, 300, 98, 257], "ab", [0, 1, 1, 2]),
        (False, False, [1], [97, 300, 98], "a<300>b", [0, 1, 6]),
        (True, True, [257], [32, 97, 32, 98], "a b", [0, 0, 1, 2]),
        (True, True, [97], [32, 97, 32, 98], " a b", [0, 1, 2, 3]),
        (False, True, [1], [0xE2, 0x82, 0xAC, 97], "€a", [0, 0, 0, 1]),
    ],
)
def test_offsets_follow_the_text_that_is_seen(
    strips: bool, skip: bool, prompt: list[int], tokens: list[int], shown: str, offsets: list[int]
) -> None:
    tokenizer = Bytes(strips)
    detokenizer = Detokenizer(tokenizer, skip, prompt)
    text = "".join(map(detokenizer.push, tokens)) + detokenizer.finish()
    assert text == shown
    call = plan([prompt], ["PP"], logprobs=0, skip_special_tokens=skip)
    whole = api_reply.WholeReply(call, tokenizer)
    whole.add(0, types.Delta(0, text, tuple(tokens), tuple(top(t, -1.0) for t in tokens), LENGTH))
    choice = json.loads(whole.body())["choices"][0]
    assert choice["text"] == "PP" + shown
    assert choice["logprobs"]["text_offset"] == [2 + at for at in offsets]


def test_a_stopping_server_says_so() -> None:
    refused = api_reply.failure(types.Delta(0, finish=types.FinishReason.ABORT))
    assert refused is not None
    assert (refused.status, refused.code, refused.retry_after_s) == (503, "shutting_down", 1.0)
    assert "shutting down" in refused.message
    failed = api_reply.failure(types.Delta(0, finish=types.FinishReason.ERROR))
    assert failed is not None
    assert (failed.status, failed.code) == (500, "engine_error")


def test_only_stop_and_length_end_an_answer() -> None:
    for finish in (types.FinishReason.ERROR, types.FinishReason.ABORT):
        with pytest.raises(Bug):
            api_reply.StreamReply(plan(), Bytes()).events(0, types.Delta(0, finish=finish))
        with pytest.raises(Bug):
            chat_reply.StreamChat(plan_chat(), Bytes()).events(0, types.Delta(0, finish=finish))
        failed = api_reply.failure(types.Delta(0, finish=finish))
        assert failed is not None
        assert failed.status >= 500
    assert api_reply.failure(types.Delta(0, "a", (1,), finish=STOP)) is None
