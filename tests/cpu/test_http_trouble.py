"""The HTTP surface over real sockets when things go wrong: bad requests, failing engines, clients that leave."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from aiohttp import web
from fake_call import Merged
from fake_engine import VOCAB, ByteTokenizer, FakeModel, settled
from http_server import CHAT, HI, Server, is_error, served

from janus_server import types
from janus_server.api.bodies import Limits
from janus_server.errors import Refused
from janus_server.http.service import LOGGED_NAMES
from janus_server.http.sse import send_whole


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with served() as server:
        yield server


# Errors

TOOL = {"type": "function", "function": {"name": "f"}}


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
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL]}, 400, "tools", "unsupported_parameter"),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
         "messages[0].content[0].type", None),
        ("/v1/completions", {"model": "fake", "prompt": "x" * 600}, 400, "prompt", "context_length_exceeded"),
        ("/v1/completions", {"model": "fake", "prompt": [1, 300]}, 400, "prompt", "invalid_value"),
        ("/v1/completions", {"model": "fake", "prompt": [[1], [-1]]}, 400, "prompt", "invalid_value"),
        ("/v1/completions", {"model": "fake", "prompt": [[]]}, 400, "prompt", "invalid_value"),
        ("/v1/completions", {"model": "fake", "prompt": "", "add_special_tokens": False}, 400, "prompt",
         "invalid_value"),
        ("/v1/completions", {"model": "fake", "prompt": "x", "n": 3, "best_of": 2}, 400, "best_of", "invalid_value"),
        ("/v1/completions", {"model": "fake", "prompt": "x", "best_of": 2, "stream": True}, 400, "best_of",
         "invalid_value"),
        ("/v1/completions", {"model": "fake", "prompt": "x", "max_tokens": 0}, 400, "max_tokens", "invalid_value"),
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


class ForeignTokenizer(ByteTokenizer):
    """One that knows a token more than the model, and that must not be asked for an id nobody checked."""

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [VOCAB if c == "#" else ord(c) for c in text]

    def token_bytes(self, token: int) -> bytes:
        assert 0 <= token < VOCAB
        return super().token_bytes(token)


async def test_ids_are_checked_wherever_they_come_from(server: Server) -> None:
    server.model.tokenizer = ForeignTokenizer()
    for prompt in ("a#", ["a", "#"], [1, VOCAB], [[1], [10**30]], [-1]):
        for echo in (False, True):
            body = {"model": "fake", "prompt": prompt, "max_tokens": 1, "echo": echo}
            status, answer = await server.post("/v1/completions", body)
            assert (status, is_error(answer)["param"]) == (400, "prompt")
    assert not server.model.requests


async def test_unknown_fields_are_counted_by_route_and_logged_once(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "janus_server.http.service")
    odd = {f"odd{i}": i for i in range(200)}
    for extra in ({"user": "u"}, {"user": "u", "bad name\n": 1}, odd, {}):
        status, _ = await server.post("/v1/completions", {"model": "fake", "prompt": "x", "max_tokens": 1, **extra})
        assert status == 200
    await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1, "user": "u"})
    metrics = await server.metrics()
    assert metrics["janus_ignored_fields_total,route=/v1/completions"] == 203
    assert metrics["janus_ignored_fields_total,route=/v1/chat/completions"] == 1
    lines = [r.getMessage() for r in caplog.records if "was ignored" in r.getMessage()]
    assert len([line for line in lines if " user " in line]) == 1
    assert len(lines) == len(set(lines)) == LOGGED_NAMES
    assert not [line for line in lines if "bad name" in line]


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


@pytest.mark.parametrize(
    ("knob", "status", "code"), [("fail_at", 500, "engine_error"), ("abort_at", 503, "shutting_down")]
)
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
    # Clients that other tests left to the collector may complain through asyncio's own log.
    assert not [r for r in caplog.records if r.exc_info and r.name != "asyncio"]
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
    model = FakeModel(context=1_000_000)
    model.text = "x" * 20_000
    async with served(model, Limits(stall_s=0.2)) as server:
        _, writer = await server.raw("/v1/chat/completions", {**CHAT, "stream": True}, buffer_bytes=1024)
        assert await settled(lambda: bool(model.aborted), 20)
        writer.close()


async def test_one_failed_prompt_ends_the_others(server: Server) -> None:
    server.model.fail_at = 1
    server.model.step_s = 0.01
    status, _ = await server.post("/v1/completions", {"model": "fake", "prompt": ["a", "b"]})
    assert status == 500
    assert not server.model.live


async def test_what_is_at_hand_is_taken_at_once() -> None:
    model = FakeModel()
    request = types.Request(id="r", model="fake", prompt=(1,), max_tokens=2, n=3)
    async with Merged([model.generate(request), model.generate(request)]) as merged:
        sizes = []
        while (news := await merged.take(1.0)) is not None:
            sizes.append(len(news))
    assert sizes == [6, 6]
    async with Merged([]) as merged:
        assert await merged.take(1.0) is None


async def test_a_wait_can_time_out_without_losing_anything() -> None:
    model = FakeModel()
    model.gate.clear()
    request = types.Request(id="r", model="fake", prompt=(1,), max_tokens=1)
    async with Merged([model.generate(request)]) as merged:
        assert await merged.take(0.01) == []
        assert await merged.take(0.01) == []
        model.gate.set()
        news = await merged.take(5.0)
        assert news is not None
        assert [item.delta.text for item in news] == ["a"]
        assert await merged.take(5.0) is None
    assert not model.aborted


async def test_a_large_whole_answer_that_nobody_reads_is_not_kept() -> None:
    ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            return await send_whole(request, bytes(64 << 20), 0.3)
        except BaseException as error:
            ended.set_result(error)
            raise

    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    _, writer = await asyncio.open_connection(*runner.addresses[0][:2], limit=1024)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert isinstance(await asyncio.wait_for(ended, 30), ConnectionResetError)
    writer.close()
    await runner.cleanup()


async def test_a_large_whole_answer_arrives_whole(server: Server) -> None:
    body = {"model": "fake", "prompt": "x", "max_tokens": 200, "n": 32, "logprobs": 20, "ignore_eos": True}
    status, answer = await server.post("/v1/completions", body)
    assert status == 200
    assert len(answer["choices"]) == 32
    assert len(json.dumps(answer)) > 256 * 1024
