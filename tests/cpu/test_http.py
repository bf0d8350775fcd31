"""The HTTP surface over real sockets, with the openai client and a fake engine: answers, errors, leaving, metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from aiohttp import web
from fake_engine import EOS, FakeModel, FakeNode, settled
from prometheus_client.parser import text_string_to_metric_families

from janus_server.api_types import Limits
from janus_server.errors import Refused
from janus_server.http import build_app
from janus_server.http_edge import build_runner
from janus_server.metrics import Metrics

HI: list[Any] = [{"role": "user", "content": "hi"}]
LIMITS = Limits(body_bytes=256 * 1024, keep_alive_s=0.05)
CHAT = {"model": "fake", "messages": HI, "seed": 0}


class Server:
    """A served fake node and ways to talk to it."""

    def __init__(self, model: FakeModel, node: FakeNode, port: int) -> None:
        self.model = model
        self.node = node
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.openai = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self.http = aiohttp.ClientSession(self.url)

    async def post(self, path: str, body: bytes | dict[str, Any], **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(path, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[str]:
        async with self.http.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200
            return [part for part in (await response.text()).split("\n\n") if part]

    async def raw(self, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request sent by hand, so that the test decides when the connection ends."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = json.dumps(body).encode()
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(data), data))
        await writer.drain()
        return reader, writer

    async def metrics(self) -> dict[str, float]:
        async with self.http.get("/metrics") as response:
            text = await response.text()
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return {s.name + "".join(f",{k}={v}" for k, v in sorted(s.labels.items())): s.value for s in samples}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    model = FakeModel()
    node = FakeNode(model)
    runner = build_runner(build_app(node, metrics=Metrics(), limits=LIMITS), LIMITS)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    server = Server(model, node, port)
    yield server
    await server.http.close()
    await server.openai.close()
    await runner.cleanup()
    assert not model.live


# Answers


async def test_chat(server: Server) -> None:
    answer = await server.openai.chat.completions.create(model="fake", messages=HI, max_tokens=4, seed=0, n=3)
    assert [c.message.content for c in answer.choices] == ["abcd", "bcde", "cdef"]
    assert [c.finish_reason for c in answer.choices] == ["length"] * 3
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "fake"
    assert answer.usage is not None
    prompt = len("user:hi\nassistant:") + 1
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 12)
    assert answer.usage.total_tokens == prompt + 12
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
    server.model.card = type(server.model.card)("fake", 0, 10_000, 1, 1, "float32", "fake")
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


# Errors


def is_error(body: Any) -> dict[str, Any]:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/v1/chat/completions", b"{", 400, None, "invalid_json"),
        ("/v1/chat/completions", b'{"model":"fake","messages":[{"role":"user","content":"x"}],"top_p":NaN}', 400,
         "top_p", "invalid_value"),
        ("/v1/chat/completions", {**CHAT, "model": "other"}, 404, "model", "model_not_found"),
        ("/v1/chat/completions", {**CHAT, "messages": []}, 400, "messages", "invalid_value"),
        ("/v1/chat/completions", {**CHAT, "temperature": 3}, 400, "temperature", "invalid_value"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 5000}, 400, "max_tokens", "context_length_exceeded"),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools", "unsupported_parameter"),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
         "messages[0].content[0].type", None),
        ("/v1/completions", {"model": "fake", "prompt": "x" * 600}, 400, "prompt", "context_length_exceeded"),
        ("/v1/completions", {"model": "fake", "prompt": [1, 300]}, 400, "prompt", "invalid_value"),
        ("/v1/completions", {"model": "fake", "prompt": [[1], [-1]]}, 400, "prompt", "invalid_value"),
        ("/v1/completions", {"model": "fake", "prompt": [[]]}, 400, "prompt", "invalid_value"),
        ("/v1/completions", {"model": "fake", "prompt": "", "add_special_tokens": False}, 400, "prompt",
         "invalid_value"),
        ("/v1/completions", {"model": "fake", "prompt": "x", "echo": True, "logprobs": 1}, 400, "echo",
         "unsupported_parameter"),
        ("/v1/completions", {"model": "fake", "prompt": "x", "n": 2, "best_of": 3}, 400, "best_of", "invalid_value"),
        ("/v1/nothing", {}, 404, None, "not_found"),
        ("/v1/models", {}, 405, None, "method_not_allowed"),
    ],
)  # fmt: skip
async def test_errors_have_one_shape(
    server: Server, path: str, body: Any, status: int, param: str | None, code: str | None
) -> None:
    got, answer = await server.post(path, body)
    assert got == status
    error = is_error(answer)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert not server.model.requests


async def test_the_content_type_does_not_matter(server: Server) -> None:
    status, _ = await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1}, **{"Content-Type": "text/plain"})
    assert status == 200
    status, answer = await server.post("/v1/chat/completions", b"\x1f\x8b", **{"Content-Encoding": "gzip"})
    assert (status, is_error(answer)["code"]) == (415, "unsupported_encoding")


async def test_openai_raises_its_own_classes(server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        await server.openai.chat.completions.create(model="other", messages=HI)
    with pytest.raises(openai.BadRequestError) as caught:
        await server.openai.chat.completions.create(model="fake", messages=HI, n=500)
    assert caught.value.param == "n"


async def test_an_engine_refusal_is_a_status_even_when_streaming(server: Server) -> None:
    server.model.refusal = Refused("full", status=503, kind="server_error", code="no_room", retry_after_s=2.0)
    for stream in (False, True):
        async with server.http.post("/v1/chat/completions", json={**CHAT, "stream": stream}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "2"
            assert is_error(await response.json())["code"] == "no_room"


@pytest.mark.parametrize(("knob", "status", "code"), [("fail_at", 500, "engine_error"), ("abort_at", 503, "aborted")])
async def test_trouble_before_and_after_the_first_byte(server: Server, knob: str, status: int, code: str) -> None:
    setattr(server.model, knob, 0)
    for stream in (False, True):
        got, answer = await server.post("/v1/chat/completions", {**CHAT, "stream": stream})
        assert (got, is_error(answer)["code"]) == (status, code)
    setattr(server.model, knob, 2)
    got, answer = await server.post("/v1/chat/completions", CHAT)
    assert (got, is_error(answer)["code"]) == (status, code)
    events = await server.events("/v1/chat/completions", CHAT)
    assert events[-1] == "data: [DONE]"
    assert is_error(json.loads(events[-2].removeprefix("data: ")))["code"] == code
    with pytest.raises(openai.APIError):
        async for _ in await server.openai.chat.completions.create(model="fake", messages=HI, stream=True):
            pass


async def test_a_bug_tells_its_id_and_nothing_else(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.model.bug_at = 1
    async with server.http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "label-7"}) as response:
        assert response.status == 500
        assert response.headers["X-Request-Id"] == "label-7"
        assert response.headers["x-should-retry"] == "false"
        text = await response.text()
    error = is_error(json.loads(text))
    assert "label-7" in error["message"]
    assert "secret" not in text
    assert "Traceback" not in text
    assert len([r for r in caplog.records if r.exc_info]) == 1
    events = await server.events("/v1/chat/completions", CHAT)
    assert events[-1] == "data: [DONE]"
    assert is_error(json.loads(events[-2].removeprefix("data: ")))["code"] == "internal_error"
    status, _ = await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1})
    assert status == 200


async def test_request_ids(server: Server) -> None:
    for given, echoed in (("trace-1.a:b", True), ("x" * 200, False), ("a b", False), ("", False)):
        async with server.http.get("/health", headers={"X-Request-Id": given}) as response:
            got = response.headers["X-Request-Id"]
            assert (got == given) is echoed
            assert got
    async with server.http.get("/nothing") as response:
        assert response.status == 404
        assert response.headers["X-Request-Id"].startswith("req-")
        assert response.headers["Server"] == "janus"


async def test_a_declared_huge_body_is_refused_before_it_is_sent(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert head.startswith(b"HTTP/1.1 413")
    writer.close()


async def test_a_chunked_huge_body_is_refused_while_it_is_read(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    head = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
    sent = 0
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    while not head.done() and sent < 100_000_000:
        writer.write(chunk)
        await writer.drain()
        await asyncio.sleep(0)
        sent += 65536
    assert (await asyncio.wait_for(head, 5)).startswith(b"HTTP/1.1 413")
    assert sent < 50_000_000
    writer.close()


async def test_a_whole_huge_body_gets_its_answer(server: Server) -> None:
    status, answer = await server.post("/v1/completions", b" " * 3_000_000)
    assert (status, is_error(answer)["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    "raw",
    [
        b"NONSENSE\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X%d: 1\r\n" % i for i in range(300)) + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc",
    ],
)
async def test_broken_http_gets_the_same_error_shape(
    server: Server, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(raw)
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") or head.startswith(b"HTTP/1.0 400")
    assert is_error(json.loads(body))["code"] == "invalid_request"
    assert b"aiohttp" not in head
    assert not [r for r in caplog.records if r.exc_info]
    writer.close()


# Clients that leave


async def test_leaving_in_the_queue_aborts(server: Server) -> None:
    server.model.gate.clear()
    for stream in (False, True):
        _, writer = await server.raw("/v1/chat/completions", {**CHAT, "stream": stream})
        assert await settled(lambda: len(server.model.live) == 1)
        writer.transport.abort()
        assert await settled(lambda: not server.model.live)
    assert len(server.model.aborted) == 2


async def test_leaving_in_mid_stream_aborts(server: Server) -> None:
    server.model.stall_at = 2
    reader, writer = await server.raw("/v1/chat/completions", {**CHAT, "stream": True, "n": 2})
    await asyncio.wait_for(reader.readuntil(b'"content":"b"'), 5)
    writer.close()
    assert await settled(lambda: not server.model.live)
    assert len(server.model.aborted) == 1


async def test_leaving_while_tokens_flow_aborts(server: Server) -> None:
    server.model.step_s = 0.002
    server.model.text = "x" * 2000
    reader, writer = await server.raw("/v1/chat/completions", {**CHAT, "stream": True})
    await asyncio.wait_for(reader.readuntil(b'"content":"x'), 5)
    writer.transport.abort()
    assert await settled(lambda: bool(server.model.aborted))
    assert not server.model.live


async def test_leaving_a_call_that_does_not_stream_aborts_all_its_prompts(server: Server) -> None:
    server.model.stall_at = 1
    _, writer = await server.raw("/v1/completions", {"model": "fake", "prompt": ["a", "b", "c"]})
    assert await settled(lambda: len(server.model.live) == 3)
    writer.close()
    assert await settled(lambda: not server.model.live)
    assert len(server.model.aborted) == 3
    metrics = await server.metrics()
    assert metrics["janus_client_disconnects_total,engine=0,model_name=fake"] == 1
    assert metrics["vllm:request_success_total,engine=0,finished_reason=abort,model_name=fake"] == 3


async def test_openai_client_that_stops_reading_aborts(server: Server) -> None:
    server.model.stall_at = 3
    stream = await server.openai.chat.completions.create(model="fake", messages=HI, stream=True)
    async for _ in stream:
        break
    await stream.close()
    assert await settled(lambda: bool(server.model.aborted))


async def test_a_reader_that_stalls_is_cut_off() -> None:
    limits = Limits(stall_s=0.2)
    model = FakeModel(context=1_000_000)
    model.text = "x" * 20_000
    runner = build_runner(build_app(FakeNode(model), metrics=Metrics(), limits=limits), limits)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1], limit=1024)
    data = json.dumps({**CHAT, "stream": True}).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
    assert await settled(lambda: bool(model.aborted), 20)
    assert not model.live
    writer.close()
    await runner.cleanup()
    assert reader is not None


async def test_one_failed_prompt_ends_the_others(server: Server) -> None:
    server.model.fail_at = 1
    server.model.step_s = 0.01
    status, _ = await server.post("/v1/completions", {"model": "fake", "prompt": ["a", "b"]})
    assert status == 500
    assert not server.model.live


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
    status, answer = await server.post("/v1/chat/completions", {**CHAT, "model": "other"})
    assert (status, is_error(answer)["code"]) == (503, "not_ready")


async def test_metrics(server: Server) -> None:
    await server.openai.chat.completions.create(model="fake", messages=HI, max_tokens=4, n=2)
    got = await server.metrics()
    label = ",engine=0,model_name=fake"
    prompt = len("user:hi\nassistant:") + 1
    expected = {
        f"vllm:prompt_tokens_total{label}": prompt,
        f"vllm:prompt_tokens_cached_total{label}": 3,
        f"vllm:generation_tokens_total{label}": 8,
        f"vllm:time_to_first_token_seconds_count{label}": 1,
        f"vllm:inter_token_latency_seconds_count{label}": 6,
        f"vllm:e2e_request_latency_seconds_count{label}": 1,
        f"vllm:request_time_per_output_token_seconds_count{label}": 1,
        f"vllm:request_prompt_tokens_sum{label}": prompt,
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
