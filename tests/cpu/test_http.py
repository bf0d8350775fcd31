"""The HTTP surface over real sockets, with the openai client and a fake engine: answers, models, health, metrics."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import openai
import pytest
import pytest_asyncio
from fake_engine import EOS, FakeModel
from http_server import CHAT, HI, PROMPT_TOKENS, Server, is_error, served

from janus_server.admission import QueueBounds


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with served() as server:
        yield server


# Answers


async def test_chat(server: Server) -> None:
    answer = await server.openai.chat.completions.create(model="fake", messages=HI, max_tokens=4, seed=0, n=3)
    assert [c.message.content for c in answer.choices] == ["abcd", "bcde", "cdef"]
    assert [c.finish_reason for c in answer.choices] == ["length"] * 3
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "fake"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (PROMPT_TOKENS, 12)
    assert answer.usage.total_tokens == PROMPT_TOKENS + 12
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer._request_id is not None
    assert answer._request_id.startswith("req-")


async def test_chat_stream(server: Server) -> None:
    stream = await server.openai.chat.completions.create(
        model="fake", messages=HI, max_tokens=3, seed=0, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, ends, usages, heads = ["", ""], ["", ""], [], set()
    async for chunk in stream:
        heads.add((chunk.id, chunk.created, chunk.model))
        usages.append(chunk.usage)
        for choice in chunk.choices:
            assert ends[choice.index] == ""
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ""
    assert texts == ["abc", "bcd"]
    assert ends == ["length", "length"]
    assert len(heads) == 1
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1] is not None
    assert usages[-1].completion_tokens == 6


async def test_stream_form_on_the_wire(server: Server) -> None:
    async with server.http.post("/v1/completions", json={
        "model": "fake", "prompt": "x", "max_tokens": 2, "seed": 0, "stream": True,
    }) as response:  # fmt: skip
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        events = [e for e in (await response.text()).split("\n\n") if e]
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(e.removeprefix("data: ")) for e in events[:-1]]
    assert [c["choices"][0]["text"] for c in chunks] == ["a", "b"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, "length"]
    assert all("usage" not in c and c["object"] == "text_completion" for c in chunks)


async def test_completion_of_many_prompts(server: Server) -> None:
    answer = await server.openai.completions.create(
        model="fake", prompt=["x", "yy"], n=2, max_tokens=2, seed=0, echo=True
    )
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.text for c in answer.choices] == ["xab", "xbc", "yyab", "yybc"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2 + 3, 8)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 6
    assert [r.n for r in server.model.requests] == [2, 2]


async def test_completion_of_many_prompts_streams_merged(server: Server) -> None:
    stream = await server.openai.completions.create(
        model="fake", prompt=[[1, 2], [3]], n=2, max_tokens=3, seed=1, stream=True
    )
    texts = ["", "", "", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["bcd", "cde", "bcd", "cde"]
    assert [r.prompt for r in server.model.requests] == [(1, 2), (3,)]


async def test_prompt_of_ids_default_length_and_echo(server: Server) -> None:
    answer = await server.openai.completions.create(model="fake", prompt=[104, 105, EOS], echo=True, seed=0)
    assert answer.choices[0].text == "hi" + "abcdefghijklmnop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


async def test_stop_and_sampling_reach_the_engine(server: Server) -> None:
    answer = await server.openai.chat.completions.create(
        model="fake", messages=HI, seed=0, stop=["d"], max_tokens=9, temperature=0, logit_bias={"5": 2},
        extra_body={"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [7], "min_tokens": 2},
    )  # fmt: skip
    assert answer.choices[0].message.content == "abc"
    assert answer.choices[0].finish_reason == "stop"
    request = server.model.requests[0]
    assert request.stop == ("d",)
    assert request.stop_ids == (7, EOS)
    assert request.min_tokens == 2
    s = request.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty) == (0.0, 0.9, 7, 0.1, 1.1)
    assert s.logit_bias == ((5, 2.0),)


async def test_long_text_is_encoded_off_the_loop_alike(server: Server) -> None:
    server.model.target = msgspec.structs.replace(server.model.target, context_tokens=10_000)
    await server.openai.completions.create(model="fake", prompt="é" * 3000, max_tokens=1)
    assert bytes(server.model.requests[0].prompt[1:]).decode() == "é" * 3000


async def test_chat_logprobs(server: Server) -> None:
    answer = await server.openai.chat.completions.create(
        model="fake", messages=HI, max_tokens=2, seed=0, logprobs=True, top_logprobs=4
    )
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert [entry.token for entry in content] == ["a", "b"]
    assert content[0].bytes == [97]
    top = {entry.token: entry.logprob for entry in content[0].top_logprobs}
    assert top["a"] == content[0].logprob == -0.1 * 2 - 1e-9
    assert top["Z"] == -9999.0
    plain = await server.openai.chat.completions.create(model="fake", messages=HI, max_tokens=2, logprobs=True)
    assert all(entry.top_logprobs == [] for entry in plain.choices[0].logprobs.content)  # type: ignore[union-attr]
    none = await server.openai.chat.completions.create(model="fake", messages=HI, max_tokens=2)
    assert none.choices[0].logprobs is None


async def test_completion_logprobs(server: Server) -> None:
    answer = await server.openai.completions.create(model="fake", prompt="x", max_tokens=2, seed=0, logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b"]
    assert logprobs.top_logprobs == [{"a": logprobs.token_logprobs[0]}, {"b": logprobs.token_logprobs[1]}]
    assert logprobs.text_offset == [0, 1]
    answer = await server.openai.completions.create(model="fake", prompt="x", max_tokens=1, seed=0, logprobs=4)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs[0] == {"bytes:\\xe2": -0.05, "a": -0.2 - 1e-9, "<299>": -2.5, "Z": -9999.0}
    streamed = await server.events("/v1/completions", {
        "model": "fake", "prompt": "x", "max_tokens": 3, "seed": 0, "logprobs": 1,
    })  # fmt: skip
    chunks = [json.loads(e.removeprefix("data: ")) for e in streamed[:-1]]
    assert [c["choices"][0]["logprobs"]["text_offset"] for c in chunks] == [[0], [1], [2]]


async def test_a_waiting_stream_is_kept_alive_without_choices(server: Server) -> None:
    server.model.gate.clear()
    body = {**CHAT, "max_tokens": 1, "stream": True}
    async with server.http.post("/v1/chat/completions", json=body) as response:
        line = await response.content.readline()
        assert line == b": ping\n"
        server.model.gate.set()
        rest = (await response.read()).decode()
    events = [e for e in rest.split("\n\n") if "data:" in e]
    assert json.loads(events[0].strip().removeprefix("data: "))["choices"][0]["delta"] == {
        "role": "assistant", "content": "a",
    }  # fmt: skip
    assert events[-1].strip() == "data: [DONE]"


# The small routes


async def test_models(server: Server) -> None:
    listed = await server.openai.models.list()
    assert [m.id for m in listed.data] == ["fake"]
    one = await server.openai.models.retrieve("fake")
    assert one.object == "model"
    assert one.max_model_len == 512  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        await server.openai.models.retrieve("other")
    server.node.models["org/name"] = FakeModel("org/name")
    async with server.http.get("/v1/models/org/name") as response:
        assert (await response.json())["id"] == "org/name"


async def test_health_ready_version(server: Server) -> None:
    for path, key in (("/health", "status"), ("/ready", "status"), ("/version", "version")):
        async with server.http.get(path) as response:
            assert response.status == 200
            assert key in await response.json()
    server.node.reason = "loading weights"
    async with server.http.get("/ready") as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert "loading weights" in is_error(await response.json())["message"]
    async with server.http.get("/health") as response:
        assert response.status == 200
    for name in ("fake", "other"):
        status, answer = await server.post("/v1/chat/completions", {**CHAT, "model": name})
        assert (status, is_error(answer)["code"]) == (503, "not_ready")
    assert not server.model.requests


async def test_metrics(server: Server) -> None:
    await server.openai.chat.completions.create(model="fake", messages=HI, max_tokens=4, n=2)
    got = await server.metrics()
    label = ",engine=0,model_name=fake"
    expected = {
        f"vllm:prompt_tokens_total{label}": PROMPT_TOKENS,
        f"vllm:prompt_tokens_cached_total{label}": 3,
        f"vllm:generation_tokens_total{label}": 8,
        f"vllm:time_to_first_token_seconds_count{label}": 1,
        f"vllm:inter_token_latency_seconds_count{label}": 6,
        f"vllm:e2e_request_latency_seconds_count{label}": 1,
        f"vllm:request_time_per_output_token_seconds_count{label}": 1,
        f"vllm:request_prompt_tokens_sum{label}": PROMPT_TOKENS,
        f"vllm:request_generation_tokens_count{label}": 2,
        f"vllm:request_decode_time_seconds_count{label}": 1,
        f"vllm:request_queue_time_seconds_count{label}": 0,
        f"vllm:request_prefill_time_seconds_count{label}": 0,
        f"vllm:iteration_tokens_total_count{label}": 0,
        f"vllm:num_requests_running{label}": 0,
        f"vllm:num_requests_waiting{label}": 2,
        f"vllm:kv_cache_usage_perc{label}": 0.25,
        f"vllm:num_preemptions_total{label}": 1,
        f"vllm:prefix_cache_queries_total{label}": 20,
        f"vllm:prefix_cache_hits_total{label}": 10,
        "vllm:request_success_total,engine=0,finished_reason=length,model_name=fake": 2,
        "janus_pool_pages,kind=weights,model_name=fake": 20,
        "janus_pool_pages,kind=kv,model_name=fake": 20,
        "janus_pool_total_pages": 100,
        "janus_pool_free_pages": 60,
        f"janus_step_seconds_count{label}": 0,
        "janus_http_requests_total,route=/v1/chat/completions,status=200": 1,
    }
    assert {name: got.get(name) for name in expected} == expected
    assert not [name for name in got if "_created" in name]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": HI, "n": 3}, "messages"),
        ("/v1/completions", {"prompt": ["a", "b", "c"]}, "prompt"),
        ("/v1/embeddings", {"input": ["a", "b", "c"]}, "input"),
        ("/v1/responses", {"input": "x" * 120}, "input"),
    ],
)
async def test_a_call_too_large_for_the_queue_names_a_field_that_its_body_has(
    path: str, fields: dict[str, Any], param: str
) -> None:
    async with served(queue=QueueBounds(2, 100)) as server:
        status, answer = await server.post(path, {"model": "fake", "max_tokens": 1, **fields})
    error = is_error(answer)
    assert (status, error["code"], error["param"]) == (400, "call_too_large", param)
