"""What counts as a token and what as a failure, over the shapes that servers stream."""

from __future__ import annotations

import itertools
import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.reading import ChunkDecoder, Reading

DECODER = ChunkDecoder()
SSE = "text/event-stream; charset=utf-8"


def completion(text: str = "", finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}], **fields}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def usage(prompt: int, completion_tokens: int, **details: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion_tokens, "total_tokens": 0, **details}


def sse(event: dict[str, Any] | str) -> bytes:
    return f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()


def read(*events: dict[str, Any] | str, done: bool = True, keep: bool = False) -> Reading:
    """Event i arrives at second i+1."""
    reading = Reading(DECODER, wants_text=keep)
    reading.head(200, SSE)
    for i, event in enumerate(events):
        reading.body(sse(event), float(i + 1))
    if done:
        reading.body(sse("[DONE]"), 100.0)
    reading.end()
    return reading


def test_a_plain_stream() -> None:
    r = read(
        completion("a"), completion("b"), completion("c", "length"), {"choices": [], "usage": usage(7, 3)}, keep=True
    )
    assert r.failure is None
    assert (r.first_s, r.last_s, r.finish_s) == (1.0, 3.0, 3.0)
    assert list(r.gaps_s) == [1.0, 1.0]
    assert (r.event_tokens, r.completion_tokens, r.prompt_tokens) == (3, 3, 7)
    assert r.texts == ["a", "b", "c"]
    assert not r.carried


def test_a_role_or_an_empty_text_is_no_first_token() -> None:
    r = read(delta(role="assistant", content=""), delta(role="assistant"), delta(content="x"), delta("stop"))
    assert (r.first_s, r.last_s, r.event_tokens, r.finish_s) == (3.0, 3.0, 1, 4.0)
    r = read(completion(""), completion("x"), completion("", "stop"))
    assert (r.first_s, r.last_s, r.event_tokens) == (2.0, 2.0, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}]},
    ],
)
def test_reasoning_and_tool_calls_are_tokens(fields: dict[str, Any]) -> None:
    r = read(delta(role="assistant", content=None), delta(**fields), delta("tool_calls"))
    assert (r.first_s, r.event_tokens, r.failure) == (2.0, 1, None)


def test_running_counts_tell_how_many_tokens_an_event_brought_with_or_without_text() -> None:
    r = read(
        {**delta(role="assistant", content=""), "usage": usage(5, 0)},
        {**delta(content="ab"), "usage": usage(5, 2)},
        {**delta(content=""), "usage": usage(5, 3)},
        {**delta(content="cd"), "usage": usage(5, 6)},
        {**delta("length"), "usage": usage(5, 6)},
        {"choices": [], "usage": usage(5, 6)},
    )
    assert (r.first_s, r.last_s, r.event_tokens, r.completion_tokens) == (2.0, 4.0, 6, 6)
    assert r.carried == array("H", [2, 1, 3])


def test_a_sum_on_the_last_event_is_no_running_count() -> None:
    r = read(completion("a"), completion("b"), completion("c", "stop", usage=usage(5, 9)))
    assert (r.event_tokens, r.completion_tokens) == (3, 9)
    assert not r.carried


def test_events_that_show_their_ids_count_by_them() -> None:
    first, second = completion("a"), completion("")
    first["choices"][0]["token_ids"] = [5]
    second["choices"][0]["token_ids"] = [6, 7]
    r = read(first, second, completion("", "length"))
    assert (r.event_tokens, list(r.carried)) == (3, [1, 2])


def test_cached_tokens_are_read() -> None:
    r = read(completion("a", "stop"), {"choices": [], "usage": usage(9, 1, prompt_tokens_details={"cached_tokens": 8})})
    assert r.cached_tokens == 8


@pytest.mark.parametrize(
    ("events", "failure"),
    [
        (
            [completion("a"), {"error": {"message": "m", "type": "server_error", "code": None}}],
            "error_event:server_error",
        ),
        ([completion("a"), {"error": {"message": "m", "type": "t", "code": "overloaded"}}], "error_event:overloaded"),
        ([completion("a", "stop"), {"error": "late"}], "error_event"),
        ([{"object": "error", "message": "m", "type": "BadRequest"}], "error_event:BadRequest"),
        ([completion("a")], "no_finish"),
        ([], "no_finish"),
        ([completion("", "stop")], "no_tokens"),
        ([completion("a", "abort")], "finish:abort"),
        (["{"], "bad_event"),
        (["[1]"], "bad_event"),
        ([completion(5)], "bad_event"),
    ],
)
def test_failures_by_reason(events: list[Any], failure: str) -> None:
    assert read(*events).failure == failure
    assert read(*events, done=False).failure == failure


def test_a_finished_stream_needs_no_done_but_nothing_may_follow_it() -> None:
    assert read(completion("a", "stop"), done=False).failure is None
    r = Reading(DECODER)
    r.head(200, SSE)
    r.body(sse(completion("a", "stop")) + sse("[DONE]") + sse(completion("b")), 1.0)
    r.end()
    assert r.failure == "bad_stream"


def test_an_error_event_by_name_is_a_failure() -> None:
    r = Reading(DECODER)
    r.head(200, SSE)
    r.body(b'event: error\ndata: {"message": "queue full"}\n\n', 1.0)
    r.end()
    assert (r.failure, r.detail) == ("error_event", "queue full")


@pytest.mark.parametrize(
    ("status", "body", "failure", "detail"),
    [
        (
            429,
            b'{"error": {"message": "slow down", "type": "x", "code": "rate_limit"}}',
            "http_429:rate_limit",
            "slow down",
        ),
        (
            503,
            b'{"error": {"message": "loading", "type": "server_error", "code": null}}',
            "http_503:server_error",
            "loading",
        ),
        (404, b'{"detail": "Not Found"}', "http_404", '{"detail": "Not Found"}'),
        (502, b"<html>\xff", "http_502", "<html>\ufffd"),
        (500, b"", "http_500", ""),
    ],
)
def test_refusals_by_status(status: int, body: bytes, failure: str, detail: str) -> None:
    r = Reading(DECODER)
    r.head(status, "application/json")
    r.body(body[:10], 1.0)
    r.body(body[10:], 2.0)
    r.end()
    assert (r.failure, r.detail, r.first_s) == (failure, detail, None)


def test_an_answer_that_is_no_stream_is_a_failure() -> None:
    r = Reading(DECODER)
    r.head(200, "application/json")
    r.body(b'{"choices": [{"text": "a"}]}', 1.0)
    r.end()
    assert (r.failure, r.event_tokens) == ("not_a_stream", 0)


def test_a_cut_stream_keeps_its_first_trouble_and_its_tokens() -> None:
    r = Reading(DECODER)
    r.head(200, SSE)
    r.body(sse(completion("a", "stop")), 1.0)
    r.cut("closed", "the connection was closed")
    assert (r.failure, r.event_tokens) == ("closed", 1)
    r.cut("timeout", "later")
    assert r.failure == "closed"


@given(st.integers(1, 12), st.lists(st.integers(0, 5000), max_size=20))
def test_counts_do_not_depend_on_where_the_bytes_are_cut(tokens: int, places: list[int]) -> None:
    events = [completion("é") for _ in range(tokens)]
    data = b"".join(sse(e) for e in [*events, completion("", "length"), {"choices": [], "usage": usage(1, tokens)}])
    data += b": ping\n\n" + sse("[DONE]")
    edges = [0, *sorted({p % len(data) for p in places}), len(data)]
    r = Reading(DECODER, wants_text=True)
    r.head(200, SSE)
    brought = [r.body(data[a:b], float(a)) for a, b in itertools.pairwise(edges)]
    r.end()
    assert r.failure is None
    assert sum(brought) == r.event_tokens == r.completion_tokens == tokens
    assert len(r.gaps_s) == tokens - 1
    assert "".join(r.texts or ()) == "é" * tokens
