"""The gate over real sockets: keys, hosts, origins, limits of connections, admission, and the end of the server."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from fake_engine import FakeModel, settled
from http_server import CHAT, HI, Server, is_error, served
from yarl import URL

from janus_server import keys
from janus_server.admission import KeyLimits, QueueBounds
from janus_server.api.bodies import Limits
from janus_server.http.gate import OPEN, Gate, Places
from janus_server.keys import KeyRing
from janus_server.metrics import Metrics
from janus_server.network import is_local

ALICE, BOB, ROOT = "alice-0123456789", "bob-0123456789", "root-0123456789"
LOCAL = Places(local=True, bound="127.0.0.1")


def ring(**limits: KeyLimits) -> KeyRing:
    """Alice and Bob, and an admin."""
    made = [
        keys.Key(name, keys._digest(key), limits.get(name, KeyLimits()))
        for name, key in (("alice", ALICE), ("bob", BOB))
    ]
    return KeyRing([*made, keys.from_environment(keys.ADMIN_VARIABLE, ROOT)])


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with served(keys=ring()) as server:
        yield server


async def exchange(server: Server, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """Bytes sent by hand; status, headers and body of the answer, read to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(raw)
    head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
    writer.close()
    line, *rest = head.decode().split("\r\n")
    return int(line.split()[1]), {k.lower(): v for k, v in (one.split(": ", 1) for one in rest)}, body


def get(target: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/1.1", "Connection: close", *headers, "", ""]).encode()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# Keys


async def test_every_route_but_liveness_and_pages_without_data_wants_a_key(server: Server) -> None:
    async with server.http.get("/openapi.json", headers=bearer(ALICE)) as response:
        listed = (await response.json())["paths"]
    assert {path for path, about in listed.items() if about.get("get", {}).get("security") == []} == OPEN
    paths = {re.sub(r"\{.*?\}", "fake", path) for path in listed}
    assert len(paths) >= 8
    for path in sorted(
        paths | {"/nothing", "/v1/", "//health", "/health/", "/%68ealth", "/HEALTH", "/v1/../health", "/admin/x"}
    ):
        for method in ("GET", "POST"):
            if path in OPEN and method == "GET":
                continue
            async with server.http.request(method, URL(server.url + path, encoded=True)) as response:
                assert response.status == 401, (method, path)
                assert (await response.json())["error"]["code"] == "invalid_api_key"
                assert response.headers["x-should-retry"] == "false"
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert response.headers["X-Request-Id"].startswith("req-")
    async with server.http.get("/health?x=1") as response:
        assert response.status == 200
    assert not server.model.requests


async def test_open_paths_need_no_key_and_hold_no_names(server: Server) -> None:
    for path in OPEN:
        async with server.http.get(path) as response:
            assert response.status == 200, path
            assert "fake" not in await response.text()


@pytest.mark.parametrize("headers", [
    bearer(ALICE), {"authorization": f"bearer  {BOB} "}, {"x-api-key": ALICE}, bearer(ROOT),
    {**bearer("none-of-ours"), "x-api-key": BOB},
])  # fmt: skip
async def test_keys_as_clients_send_them(server: Server, headers: dict[str, str]) -> None:
    status, _ = await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1}, **headers)
    assert status == 200


@pytest.mark.parametrize("headers", [
    {}, bearer(ALICE[:-1]), bearer(ALICE + "x"), bearer(ALICE.upper()), {"Authorization": ALICE},
    {"Authorization": f"Basic {ALICE}"}, bearer("ü" * 16), {"x-api-key": ""}, bearer("x" * 8000),
])  # fmt: skip
async def test_other_keys_are_none(server: Server, headers: dict[str, str]) -> None:
    status, answer = await server.post("/v1/chat/completions", CHAT, **headers)
    assert status == 401
    error = is_error(answer)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert not any(value in error["message"] for value in headers.values() if value)
    assert not server.model.requests


async def test_keys_show_nowhere(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "wrong-key-9876543210"
    for key in (wrong, ALICE):
        await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1}, **bearer(key))
        await server.post("/v1/chat/completions", b"{", **bearer(key))
    async with server.http.get("/metrics", headers=bearer(ALICE)) as response:
        metrics = await response.text()
    shown = metrics + "".join(r.getMessage() for r in caplog.records) + repr(server.gate.keys.__dict__)
    for key in (ALICE, BOB, ROOT, wrong):
        assert key not in shown
        assert keys._digest(key).hex() not in shown
    assert 'janus_refused_requests_total{code="invalid_api_key"} 2.0' in metrics


@pytest.mark.parametrize("target", [
    "/admin", "/admin/models", "/%61dmin/models", "/ADMIN/x", "//admin/x", "/admin%2Fx", "/admin?x", "/%2Fadmin/x",
])  # fmt: skip
async def test_admin_paths_want_the_admin_key_however_they_are_written(server: Server, target: str) -> None:
    host = "Host: test"
    status, _, body = await exchange(server, get(target, host, f"Authorization: Bearer {ALICE}"))
    assert (status, is_error(json.loads(body))["code"]) == (403, "admin_key_needed")
    status, _, body = await exchange(server, get(target, host))
    assert status == 401
    status, _, body = await exchange(server, get(target, host, f"Authorization: Bearer {ROOT}"))
    # Nothing is there, or what is there has no models to tell of yet.
    assert (status, is_error(json.loads(body))["code"]) in ((404, "not_found"), (503, "not_ready"))


async def test_without_an_admin_key_admin_routes_are_off() -> None:
    for made in (KeyRing(), KeyRing([keys.from_environment(keys.USER_VARIABLE, ALICE)])):
        async with served(keys=made) as server, server.http.post("/admin/x", headers=bearer(ALICE)) as response:
            assert (response.status, is_error(await response.json())["code"]) == (403, "admin_off")


async def test_a_key_sees_and_uses_only_its_models() -> None:
    async with served(keys=ring(bob=KeyLimits(models=frozenset()))) as server:
        for key, status in ((ALICE, 200), (BOB, 404)):
            got, answer = await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1}, **bearer(key))
            assert got == status
            async with server.http.get("/v1/models", headers=bearer(key)) as response:
                assert len((await response.json())["data"]) == (1 if status == 200 else 0)
            async with server.http.get("/v1/models/fake", headers=bearer(key)) as response:
                assert response.status == status
        assert is_error(answer)["code"] == "model_not_found"
        for path, body in (
            ("/v1/chat/completions", {**CHAT, "max_tokens": 99999}),
            ("/v1/messages/count_tokens", {"model": "fake", "messages": HI}),
            ("/v1/responses/input_tokens", {"model": "fake", "input": "hi"}),
            ("/v1/embeddings", {"model": "fake", "input": "hi", "dimensions": 3}),
            ("/tokenize", {"model": "fake", "prompt": "hi"}),
        ):
            got, answer = await server.post(path, body, **bearer(BOB))
            assert (got, answer["error"]["code"]) == (404, "model_not_found"), path


async def test_other_keys_take_effect_at_once(server: Server) -> None:
    carol = keys.from_environment(keys.USER_VARIABLE, "carol-0123456789")
    server.gate.keys = KeyRing([carol])
    assert (await server.post("/v1/chat/completions", CHAT, **bearer(ALICE)))[0] == 401
    assert (await server.post("/v1/chat/completions", CHAT, **bearer("carol-0123456789")))[0] == 200


# Places


@pytest.mark.parametrize(("host", "status"), [
    ("localhost", 200), ("localhost:8000", 200), ("LOCALHOST.", 200), ("127.0.0.1:1", 200), ("127.9.9.9", 200),
    ("[::1]:8000", 200), ("api.example.org", 200), ("[::ffff:127.0.0.1]", 200),
    ("evil.example", 403), ("evil.localhost", 403), ("127.0.0.1.evil.example", 403), ("10.0.0.5", 403),
    ("localhost.evil.example:8000", 403), ("0.0.0.0", 403), ("xn--localhost", 403),
    ("localhost:x", 400), ("", 400), ("local host", 400), ("localhost/evil", 400), ("evil@localhost", 400),
    ("localhost\r\nHost: localhost", 400),
])  # fmt: skip
async def test_hosts_of_a_local_server(host: str, status: int) -> None:
    places = Places(local=True, bound="127.0.0.1", hosts=frozenset({"api.example.org"}))
    async with served(places=places) as server:
        got, _, body = await exchange(server, get("/v1/models", f"Host: {host}"))
        assert got == status
        if status != 200:
            is_error(json.loads(body))


@pytest.mark.parametrize(("places", "host", "status"), [
    (Places(local=False, bound="0.0.0.0"), "any.example", 200),
    (Places(local=False, bound="0.0.0.0", hosts=frozenset({"api.example"})), "any.example", 403),
    (Places(local=False, bound="0.0.0.0", hosts=frozenset({"api.example"})), "api.example:443", 200),
    (Places(local=False, bound="0.0.0.0", hosts=frozenset({"api.example"})), "10.1.2.3", 200),
    (Places(local=True, bound="my-machine"), "my-machine:8000", 200),
    (Places(local=True, bound="::1"), "[::1]", 200),
])  # fmt: skip
async def test_hosts_of_other_servers(places: Places, host: str, status: int) -> None:
    async with served(places=places) as server:
        assert (await exchange(server, get("/v1/models", f"Host: {host}")))[0] == status


async def test_requests_without_a_host_or_with_a_whole_url() -> None:
    async with served(places=LOCAL) as server:
        assert (await exchange(server, get("/v1/models")))[0] == 400
        assert (await exchange(server, b"GET /v1/models HTTP/1.0\r\n\r\n"))[0] == 200
        assert (await exchange(server, get("http://localhost/v1/models", "Host: localhost")))[0] == 400
        assert (await exchange(server, get("*", "Host: localhost", method="OPTIONS")))[0] == 400


@pytest.mark.parametrize(("origin", "status"), [
    ("http://localhost:8000", 200), ("https://localhost:8000", 200), ("https://chat.example", 200),
    ("http://localhost", 403), ("http://localhost:8001", 403), ("https://chat.example:444", 403), ("null", 403),
    ("http://chat.example", 403), ("https://evil.example", 403), ("https://chat.example.evil", 403), ("", 403),
    ("file://localhost:8000", 403), ("https://chat.example\r\nOrigin: https://evil.example", 403),
])  # fmt: skip
async def test_origins(origin: str, status: int) -> None:
    places = Places(local=True, bound="127.0.0.1", origins=frozenset({"https://chat.example"}))
    async with served(places=places, keys=ring()) as server:
        raw = get("/v1/models", "Host: localhost:8000", f"Origin: {origin}", f"X-Api-Key: {ALICE}")
        got, headers, _ = await exchange(server, raw)
        assert got == status
        cross = origin == "https://chat.example"
        assert headers.get("access-control-allow-origin") == (origin if cross else None)
        assert "access-control-allow-credentials" not in headers


async def test_a_page_that_may_call_can_read_refusals_too() -> None:
    places = Places(local=True, bound="127.0.0.1", origins=frozenset({"https://chat.example"}))
    async with served(places=places, keys=ring()) as server:
        got, headers, _ = await exchange(server, get("/v1/models", "Host: localhost", "Origin: https://chat.example"))
        assert (got, headers["access-control-allow-origin"], headers["vary"]) == (401, "https://chat.example", "Origin")


async def test_preflights_are_answered_for_listed_origins_only() -> None:
    asks = ("Host: localhost", "Access-Control-Request-Method: POST")
    places = Places(local=True, bound="127.0.0.1", origins=frozenset({"https://chat.example"}))
    async with served(places=places, keys=ring()) as server:
        for wanted, allowed in (("authorization,x-stainless-lang", "authorization,x-stainless-lang"), ("a b:c", None)):
            got, headers, body = await exchange(server, get(
                "/v1/chat/completions", *asks, "Origin: https://chat.example",
                f"Access-Control-Request-Headers: {wanted}", method="OPTIONS",
            ))  # fmt: skip
            assert (got, body) == (204, b"")
            assert headers["access-control-allow-origin"] == "https://chat.example"
            assert "POST" in headers["access-control-allow-methods"]
            if allowed is not None:
                assert headers["access-control-allow-headers"] == allowed
            else:
                assert "a b" not in headers["access-control-allow-headers"]
        for origin in ("https://evil.example", "null"):
            got, headers, _ = await exchange(server, get("/v1/models", *asks, f"Origin: {origin}", method="OPTIONS"))
            assert got == 403
            assert "access-control-allow-origin" not in headers
        assert (await exchange(server, get("/v1/models", *asks, method="OPTIONS")))[0] == 401
    async with served(places=LOCAL) as server:
        assert (await exchange(server, get("/v1/models", *asks, "Origin: https://chat.example", method="OPTIONS")))[
            0
        ] == 403


@pytest.mark.parametrize(("address", "local"), [
    ("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("::ffff:127.0.0.1", True),
    ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("::ffff:10.0.0.1", False), ("fe80::1%eth0", False),
])  # fmt: skip
def test_what_is_reached_from_this_machine_alone(address: str, local: bool) -> None:
    assert is_local(address) is local


# Expectations, time, connections


async def test_100_continue(server: Server) -> None:
    body = json.dumps({**CHAT, "max_tokens": 1}).encode()
    for key, expected in ((ALICE, b"HTTP/1.1 100"), ("nobody-at-all", b"HTTP/1.1 401")):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-Continue\r\nConnection: close\r\n"
                     b"Content-Length: %d\r\nAuthorization: Bearer %b\r\n\r\n" % (len(body), key.encode()))  # fmt: skip
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert head.startswith(expected)
        if key == ALICE:
            writer.write(body)
            assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_other_expectations_have_our_error_form(server: Server) -> None:
    raw = get("/v1/models", "Host: x", f"X-Api-Key: {ALICE}", "Expect: 200-maybe-secret")
    status, _, body = await exchange(server, raw)
    assert (status, is_error(json.loads(body))["code"]) == (417, "expectation_failed")
    assert b"maybe" not in body


@pytest.mark.parametrize("sent", [b"G", b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: 1\r\n", b"\r\n"])
async def test_headers_that_do_not_come_end_the_connection(sent: bytes) -> None:
    async with served(limits=Limits(headers_s=0.2)) as server:
        status, _, body = await exchange(server, sent)
        assert (status, is_error(json.loads(body))["code"]) == (408, "request_timeout")


async def test_the_time_for_headers_is_not_renewed_by_single_bytes_and_does_not_touch_requests() -> None:
    async with served(limits=Limits(headers_s=0.3)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        read = asyncio.create_task(reader.read())
        for letter in b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: " + b"a" * 10_000:
            if read.done():
                break
            writer.write(bytes([letter]))
            await asyncio.sleep(0.02)
        assert (await asyncio.wait_for(read, 5)).startswith(b"HTTP/1.1 408")
        writer.close()
        # A slow answer, and a second request on the same connection, are no slow headers.
        server.model.step_s = 0.2
        for _ in range(2):
            assert (await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 4}))[0] == 200


async def test_a_connection_without_requests_is_closed() -> None:
    async with served(limits=Limits(idle_s=0.2)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_a_body_that_does_not_come_is_a_408() -> None:
    async with served(limits=Limits(body_s=0.2)) as server:
        raw = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nConnection: close\r\n\r\n{"
        status, _, body = await exchange(server, raw)
        assert (status, is_error(json.loads(body))["code"]) == (408, "request_timeout")


async def test_connections_beyond_the_bound_are_refused_and_the_others_served() -> None:
    async with served(limits=Limits(connections=3)) as server:
        opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        for _, writer in opened:
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        for reader, _ in opened:
            assert (await asyncio.wait_for(reader.readuntil(b"}"), 10)).startswith(b"HTTP/1.1 200")
        status, headers, body = await exchange(server, b"")
        assert (status, is_error(json.loads(body))["code"]) == (503, "server_overloaded")
        assert headers["retry-after"] == "1"
        opened[0][1].close()
        assert await settled(lambda: len(opened) == 3)
        for _ in range(200):  # the server has not seen the end of it at once
            if (await exchange(server, get("/health", "Host: x")))[0] == 200:
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError("a place that became free was not given again")
        for _, writer in opened:
            writer.close()


async def test_bodies_that_arrive_share_a_bound_on_memory() -> None:
    async with served(limits=Limits(body_bytes=100_000, bodies_bytes=150_000)) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 100000\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head + b" " * 90_000)
        await writer.drain()
        await asyncio.sleep(0.1)
        status, _, body = await exchange(server, head + b" " * 90_000)
        assert (status, is_error(json.loads(body))["code"]) == (429, "server_overloaded")
        writer.write(b" " * 10_000)
        assert b"invalid_json" in await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert (await server.post("/v1/completions", b" " * 99_000))[0] == 400


@pytest.mark.parametrize(
    "opening", [b"[", b'{"a":', b'{"model":"fake","messages":[{"role":"user","content":', b'{"x":[']
)
async def test_nesting_is_bounded(server: Server, opening: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        status, answer = await server.post(path, opening * (200_000 // len(opening)), **bearer(ALICE))
        assert status == 400
        is_error(answer)


async def test_the_time_of_an_answer_is_bounded() -> None:
    async with served(limits=Limits(request_s=0.3, keep_alive_s=0.05)) as server:
        server.model.stall_at = 1
        async with server.http.post("/v1/chat/completions", json=CHAT) as response:
            assert (response.status, is_error(await response.json())["code"]) == (504, "deadline")
            assert response.headers["x-should-retry"] == "false"
        events = [e for e in await server.events("/v1/chat/completions", CHAT) if not e.startswith(":")]
        assert is_error(json.loads(events[-2].removeprefix("data: ")))["code"] == "deadline"
        assert events[-1] == "data: [DONE]"
        assert await settled(lambda: len(server.model.aborted) == 2)


# Admission


async def test_a_keys_rate_is_a_429_that_says_when() -> None:
    limits = {"alice": KeyLimits(requests_per_minute=2)}
    async with served(keys=ring(**limits)) as server:
        short = {**CHAT, "max_tokens": 1}
        assert [(await server.post("/v1/chat/completions", short, **bearer(ALICE)))[0] for _ in range(2)] == [200, 200]
        async with server.http.post("/v1/chat/completions", json=short, headers=bearer(ALICE)) as response:
            assert (response.status, is_error(await response.json())["code"]) == (429, "rate_limit_exceeded")
            wait_ms = int(response.headers["Retry-After-Ms"])
            assert 20_000 < wait_ms <= 30_000
            assert int(response.headers["Retry-After"]) == math.ceil(wait_ms / 1000)
            assert "x-should-retry" not in response.headers
        assert (await server.post("/v1/chat/completions", short, **bearer(BOB)))[0] == 200
        assert len(server.model.requests) == 3


async def test_tokens_that_were_not_used_come_back() -> None:
    async with served(keys=ring(alice=KeyLimits(tokens_per_minute=200))) as server:
        # 19 tokens of prompt and at most 181: all there is. Two are made.
        server.model.text = "x"
        for _ in range(3):
            status, answer = await server.post(
                "/v1/chat/completions", {**CHAT, "max_tokens": 100, "stop": "x", "min_tokens": 0}, **bearer(ALICE)
            )
            assert status == 200, answer
        assert (await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 150}, **bearer(ALICE)))[0] == 429


async def test_requests_in_progress_are_counted_until_they_end_in_any_way() -> None:
    async with served(keys=ring(alice=KeyLimits(requests=1))) as server:
        server.model.stall_at = 1
        _, writer = await raw_chat(server, ALICE, stream=True)
        assert await settled(lambda: len(server.model.live) == 1)
        assert (await server.post("/v1/chat/completions", CHAT, **bearer(ALICE)))[0] == 429
        writer.transport.abort()
        assert await settled(lambda: server.admission.open_calls == 0)
        for knob, status in (("fail_at", 500), ("bug_at", 500), ("abort_at", 503)):
            server.model.stall_at = -1
            setattr(server.model, knob, 0)
            assert (await server.post("/v1/chat/completions", CHAT, **bearer(ALICE)))[0] == status
            setattr(server.model, knob, -1)
        assert (await server.post("/v1/chat/completions", CHAT, **bearer(ALICE)))[0] == 200


async def raw_chat(server: Server, key: str, **more: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = json.dumps({**CHAT, **more}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}"
    )
    writer.write(head.encode() + b"\r\n\r\n" + body)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("queue", [QueueBounds(2, 10**6), QueueBounds(100, 40)])
async def test_a_full_queue_refuses_early_and_opens_again(queue: QueueBounds) -> None:
    async with served(queue=queue) as server:
        server.model.gate.clear()  # no first token, so all wait
        waiting = [await server.raw("/v1/chat/completions", CHAT) for _ in range(2)]
        assert await settled(lambda: len(server.model.live) == 2)
        async with server.http.post("/v1/chat/completions", json=CHAT) as response:
            assert (response.status, is_error(await response.json())["code"]) == (429, "server_overloaded")
            assert int(response.headers["Retry-After"]) >= 1
        assert len(server.model.requests) == 2
        assert (await server.metrics())["janus_refused_requests_total,code=server_overloaded"] == 1
        server.model.gate.set()
        assert await settled(lambda: server.admission.queued() == (0, 0))
        assert (await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1}))[0] == 200
        for _, writer in waiting:
            writer.close()


# The end


async def test_the_end_of_the_server_answers_what_is_still_arriving_or_stuck() -> None:
    model = FakeModel()
    model.stall_at = 1
    async with served(model) as server:
        reading, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        whole, kept = await server.raw("/v1/chat/completions", CHAT)
        stream, kept_too = await server.raw("/v1/chat/completions", {**CHAT, "stream": True})
        await asyncio.wait_for(stream.readuntil(b'"content":"a"'), 5)
        assert await settled(lambda: server.gate.active == 3)
        server.gate.end_all()
        for reader in (reading, whole):
            head = await asyncio.wait_for(reader.readuntil(b"}}"), 5)
            assert head.startswith(b"HTTP/1.1 503")
            assert b'"shutting_down"' in head
        rest = await asyncio.wait_for(stream.readuntil(b"[DONE]\n\n"), 5)
        assert b'"shutting_down"' in rest
        assert await settled(lambda: server.gate.active == 0)
        for open_one in (writer, kept, kept_too):
            open_one.close()


def test_a_gate_counts_work_and_not_readers() -> None:
    assert Gate(LOCAL, KeyRing(), Metrics()).active == 0
