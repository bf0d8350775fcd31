"""Bodies as benchmark clients, web interfaces and gateways send them, and what those clients read from the replies.

The shapes are in request_shapes.json, one for each way that a known client calls a server; each asks for 12 tokens.
The readers below look at a reply as those clients do, and at what OpenAI promises beyond that.
"""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from live_server import LiveServer

pytestmark = pytest.mark.timeout(60)

SHAPES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("request_shapes.json").read_text())
TOKENS = 12


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def send(server: LiveServer, shape: dict[str, Any]) -> Reply:
    where = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=30)
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none", **shape["headers"]}
    connection.request("POST", shape["path"], json.dumps(shape["body"]), headers)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, body)


@pytest.mark.parametrize("shape", SHAPES, ids=[shape["name"] for shape in SHAPES])
def test_a_known_client_gets_the_reply_that_it_reads(server: LiveServer, shape: dict[str, Any]) -> None:
    reply = send(server, shape)
    assert reply.status == 200, reply.body
    given = shape["headers"].get("x-request-id")
    assert reply.headers["x-request-id"] == given if given else reply.headers["x-request-id"]
    chat = shape["path"].endswith("chat/completions")
    if shape["body"].get("stream"):
        _check_stream(reply, shape["body"], chat)
    else:
        _check_whole(reply, chat)


def _check_whole(reply: Reply, chat: bool) -> None:
    assert reply.headers["content-type"].startswith("application/json")
    body = json.loads(reply.body)
    assert body["object"] == ("chat.completion" if chat else "text_completion")
    assert body["id"].startswith("chatcmpl-" if chat else "cmpl-")
    (choice,) = body["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert isinstance(choice["message"]["content"] if chat else choice["text"], str)
    usage = body["usage"]
    assert usage["completion_tokens"] == TOKENS
    assert usage["total_tokens"] == usage["prompt_tokens"] + TOKENS


def _check_stream(reply: Reply, body: dict[str, Any], chat: bool) -> None:
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert "content-encoding" not in reply.headers
    events = _events(reply.body)
    assert {event["object"] for event in events} == {"chat.completion.chunk" if chat else "text_completion"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    told = [event for event in events if event["choices"]]
    choices = [event["choices"][0] for event in told]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert choices[-1]["finish_reason"] == "length"
    if chat:
        # The first event is the first token: one with the role alone would be taken for it.
        assert choices[0]["delta"]["role"] == "assistant"
        assert choices[0]["delta"]["content"] is not None
        assert not any("role" in choice["delta"] for choice in choices[1:])
    texts = [choice["delta"].get("content") if chat else choice["text"] for choice in choices]
    assert "".join(filter(None, texts))
    _check_usage(events, body.get("stream_options") or {})


def _check_usage(events: list[dict[str, Any]], options: dict[str, Any]) -> None:
    if not options.get("include_usage"):
        assert not any(event.get("usage") for event in events)
        return
    # Benchmarks read the count of tokens from an event without choices, and only from that.
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == TOKENS
    assert [event["choices"] for event in events].count([]) == 1
    counts = [event["usage"]["completion_tokens"] if event["usage"] else None for event in events]
    if options.get("continuous_usage_stats"):
        assert None not in counts
        assert counts == sorted(counts)
    else:
        assert set(counts[:-1]) == {None}


def _events(raw: bytes) -> list[dict[str, Any]]:
    """The JSON of each event, read line by line as simple clients do; the last one says [DONE]."""
    lines = [line.strip() for line in raw.decode().split("\n")]
    data = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    assert all(line == "" or line.startswith(("data:", ":")) for line in lines)
    assert data[-1] == "[DONE]"
    assert "" not in data
    return [json.loads(one) for one in data[:-1]]


def test_the_first_listed_model_is_what_benchmarks_ask_for(server: LiveServer) -> None:
    status, raw = server.get("/v1/models")
    listed = json.loads(raw)
    assert (status, listed["object"]) == (200, "list")
    first = listed["data"][0]
    assert (first["id"], first["object"]) == ("tiny", "model")
    assert first["max_model_len"] > 0
    status, _ = server.post("/v1/completions", {"model": first["id"], "prompt": "x", "max_tokens": 1})
    assert status == 200


@pytest.mark.parametrize("path", ["/get_server_info", "/get_model_info", "/v1/nothing"])
def test_questions_that_only_other_servers_answer_get_404_and_json(server: LiveServer, path: str) -> None:
    """sglang's benchmark asks such things, and takes an answer with 200 for its own server's JSON."""
    status, raw = server.get(path)
    assert status == 404
    assert set(json.loads(raw)["error"]) == {"message", "type", "param", "code"}


def test_probes_before_a_benchmark_are_answered(server: LiveServer) -> None:
    assert server.get("/health")[0] == 200
    assert server.get("/version")[0] == 200
