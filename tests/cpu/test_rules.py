"""One named regression test for each security rule that the edge keeps: what failed in other servers must fail here.

The details of each have tests of their own; these hold the sentence of the rule against a served node.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeModel, settled
from http_server import CHAT, served
from server_process import Server, post, tiny_model

from janus_server import keys
from janus_server.http.gate import Places
from janus_server.keys import KeyRing

KEY, ADMIN = "user-0123456789", "root-0123456789"
LOCAL = Places(local=True, bound="127.0.0.1")
COMPLETION = {"model": "fake", "prompt": "x", "max_tokens": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def process(checkpoint: Path) -> Iterator[Server]:
    with Server(f"a={checkpoint}", "--memory", "64MiB", "--page-size", str(1 << 14)) as running:
        yield running


def ring() -> KeyRing:
    return KeyRing([
        keys.from_environment(keys.USER_VARIABLE, KEY), keys.from_environment(keys.ADMIN_VARIABLE, ADMIN)
    ])  # fmt: skip


def test_rule_04_one_socket_on_loopback_and_no_other_link(process: Server) -> None:
    """Nothing listens but the HTTP port, and that on this machine alone unless it is told otherwise."""
    inodes = {
        link.rpartition("[")[2].rstrip("]")
        for fd in Path(f"/proc/{process.process.pid}/fd").iterdir()
        if (link := os.readlink(fd)).startswith("socket:")
    }
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process.process.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening.append(fields[1].split(":")[0])
    assert listening == ["0100007F"]


async def test_rule_05_one_gate_before_routing_default_deny() -> None:
    """Every path needs a key but liveness: those that other servers forgot, and those that do not exist."""
    async with served(keys=ring()) as server:
        forgotten = ["/v1/models", "/metrics", "/ready", "/version", "/tokenize", "/invocations", "/score", "/pause",
                     "/update_weights", "/openapi.json", "/nothing", "/v1", "/"]  # fmt: skip
        for path in forgotten:
            async with server.http.get(path) as response:
                assert response.status == 401, path
                assert KEY not in await response.text()
        async with server.http.get("/health") as response:
            assert response.status == 200
        for key, status in ((KEY, 200), (KEY[:-1], 401), ("", 401)):
            async with server.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}) as response:
                assert response.status == status


EDGE: list[dict[str, Any]] = [
    {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": -math.inf}, {"logit_bias": {"1": math.nan}},
    {"repetition_penalty": math.inf}, {"max_tokens": True}, {"n": True}, {"seed": True}, {"temperature": "1"},
    {"n": 10**9}, {"best_of": 10**9}, {"prompt": []}, {"prompt": ["x"] * 2000}, {"prompt": [[1]] * 2000},
    {"max_tokens": 10**18}, {"max_tokens": 10**40}, {"min_tokens": 10**9}, {"stop": ["x"] * 1000},
    {"stop": ["x" * 100_000]}, {"stop_token_ids": list(range(10_000))}, {"logprobs": 10**6},
    {"logit_bias": {str(i): 1 for i in range(5000)}}, {"logit_bias": {"-1": 1}}, {"prompt": [2**70]},
    {"n": 128, "prompt": ["x"] * 1000}, {"seed": 2**64}, {"top_k": -5}, {"stream_options": 5},
]  # fmt: skip


async def test_rule_06_everything_is_validated_at_the_edge() -> None:
    """Ranges, finite numbers, bool is no int, bounds on all that multiplies: refused by name, and never run."""
    async with served() as server:
        for change in EDGE:
            status, answer = await server.post("/v1/completions", json.dumps({**COMPLETION, **change}).encode())
            assert status == 400, change
            assert answer["error"]["param"] is not None, (change, answer)
        for body in (b"[" * 100_000, b'{"a":' * 50_000, b'{"model":"fake","prompt":' + b"[" * 90_000):
            assert (await server.post("/v1/completions", body))[0] == 400
        assert not server.model.requests


NASTY: list[dict[str, Any]] = [
    {"prompt": ""}, {"prompt": [[5]] * 8, "n": 4}, {"n": 8, "seed": -(2**63)}, {"seed": 2**63 - 1},
    {"top_p": 0}, {"top_p": 1e-300}, {"temperature": 1e-300}, {"temperature": 2, "top_k": 1}, {"min_p": 1},
    {"repetition_penalty": 100, "presence_penalty": 2, "frequency_penalty": -2}, {"repetition_penalty": 0.01},
    {"logit_bias": {str(i): -100 for i in range(300)}}, {"logit_bias": {"299": 100}}, {"logprobs": 20},
    {"logprobs": 0, "echo": True}, {"stop": ""}, {"stop": [""]}, {"stop": ["\u0000", "\ud83d\ude00", "\ufffd"]},
    {"stop_token_ids": [0, 299]}, {"min_tokens": 5, "max_tokens": 5, "stop_token_ids": list(range(200))},
    {"prompt": "\ud800"}, {"prompt": "<|im_end|><|endoftext|>"}, {"prompt": [0, 299, 2]}, {"prompt": [5] * 511},
    {"prompt": [5] * 512}, {"max_tokens": 0}, {"max_tokens": 10**12}, {"echo": True, "prompt": [299]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "(("}}}},
    {"response_format": {"type": "nothing"}}, {"ignore_eos": True, "min_tokens": 3, "max_tokens": 3},
]  # fmt: skip


def test_rule_07_no_request_ends_the_engine(process: Server) -> None:
    """Whatever passes the edge is safe to schedule: each ends with an answer or a refusal, and the model serves on."""
    for stream in (False, True):
        for change in NASTY:
            body = {"model": "a", "prompt": "x", "max_tokens": 4, "stream": stream, **change}
            status, answer = post(f"{process.url}/v1/completions", json.dumps(body).encode())
            assert status in (200, 400), (change, status, answer)
            assert b'"error"' not in answer or status == 400, (change, answer)
    assert post(f"{process.url}/v1/completions", b'{"model":"a","prompt":"x","max_tokens":1}')[0] == 200
    assert process.process.poll() is None


@pytest.mark.parametrize("part", [
    {"type": "image_url", "image_url": {"url": "URL"}}, {"type": "image_url", "image_url": "URL"},
    {"type": "input_audio", "input_audio": {"url": "URL"}}, {"type": "file", "file": {"file_url": "URL"}},
    {"type": "video_url", "video_url": {"url": "URL"}},
])  # fmt: skip
def test_rule_09_no_url_of_a_request_is_fetched(process: Server, part: dict[str, Any]) -> None:
    """What names a URL is refused, and nobody connects to it."""
    with socket.create_server(("127.0.0.1", 0)) as target:
        target.settimeout(0.3)
        sent = json.dumps(part).replace("URL", f"http://127.0.0.1:{target.getsockname()[1]}/x")
        body = f'{{"model":"a","messages":[{{"role":"user","content":[{sent}]}}]}}'
        status, answer = post(f"{process.url}/v1/chat/completions", body.encode())
        assert status == 400
        assert "content[0]" in json.loads(answer)["error"]["param"]
        with pytest.raises(TimeoutError):
            target.accept()


async def test_rule_10_the_clients_id_is_a_label_and_no_key() -> None:
    """Two calls under one id do not meet: neither is overwritten, and leaving one does not end the other."""
    model = FakeModel()
    model.gate.clear()
    async with served(model) as server:
        label = {"X-Request-Id": "same"}
        calls = [asyncio.create_task(server.post("/v1/chat/completions", {**CHAT, "max_tokens": 2}, **label))
                 for _ in range(3)]  # fmt: skip
        assert await settled(lambda: len(model.live) == 3)
        assert len({request.id for request in model.requests}) == 3
        assert not any("same" in request.id for request in model.requests)
        calls[0].cancel()
        assert await settled(lambda: len(model.live) == 2)
        model.gate.set()
        assert [status for status, _ in await asyncio.gather(*calls[1:])] == [200, 200]
        assert len(model.aborted) == 1


async def test_rule_14_errors_are_fixed_texts_and_logs_hold_no_prompts(caplog: pytest.LogCaptureFixture) -> None:
    """Neither an error nor the log repeats what a client wrote; a fault inside tells its id and nothing else."""
    caplog.set_level(logging.DEBUG)
    mark = "xyzzy-plugh"
    async with served() as server:
        answers = []
        for knob in (None, "fail_at", "bug_at"):
            if knob is not None:
                setattr(server.model, knob, 1)
            body = {"model": "fake", "messages": [{"role": "user", "content": mark}], mark: mark, "max_tokens": 3}
            answers.append(await server.post("/v1/chat/completions", body))
            answers.append(await server.post("/v1/completions", {"model": mark, "prompt": mark}))
            answers.append(await server.post("/v1/completions", {"model": "fake", "prompt": mark, "stop": [mark] * 99}))
            answers.append(await server.post(f"/v1/{mark}", {"prompt": mark}))
        assert [status for status, _ in answers] == [200, 404, 400, 404, 500, 404, 400, 404, 500, 404, 400, 404]
        for status, answer in answers:
            if status != 200:
                assert mark not in json.dumps(answer)
                assert "secret internals" not in json.dumps(answer)
    shown = "".join(r.getMessage() for r in caplog.records if r.name != "asyncio" and r.name.startswith("janus"))
    # The name of an unknown field is logged once; its value never is, nor any text.
    assert shown.count(mark) <= 1


def test_rule_15_names_from_clients_never_reach_the_file_system(process: Server, checkpoint: Path) -> None:
    """A model is what was configured: neither a path to one that is there, nor a way out of the tree."""
    for name in (str(checkpoint), f"{checkpoint}/", "../../etc/passwd", "/etc/passwd", "a/../a", "./a", "a\u0000"):
        status, answer = post(f"{process.url}/v1/completions", json.dumps({"model": name, "prompt": "x"}).encode())
        assert (status, json.loads(answer)["error"]["code"]) == (404, "model_not_found")
    for target in ("/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "//etc/passwd"):
        port = int(process.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
            raw.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: raw.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 404"), target
        assert b"root:" not in answer


async def test_rule_16_web_pages_cannot_use_a_local_server() -> None:
    """A name turned to this machine, a page of another origin, a preflight: all refused, and no CORS by default."""
    async with served(places=LOCAL) as server:
        asking = {"Access-Control-Request-Method": "POST"}
        for headers, method in (
            ({"Host": "evil.example"}, "POST"), ({"Origin": "https://evil.example"}, "POST"),
            ({"Origin": "null"}, "POST"), ({"Origin": "https://evil.example", **asking}, "OPTIONS"),
        ):  # fmt: skip
            async with server.http.request(method, "/v1/chat/completions", json=CHAT, headers=headers) as response:
                assert response.status == 403
                assert not any(name.lower().startswith("access-control") for name in response.headers)
        assert not server.model.requests
        assert (await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1}))[0] == 200


async def test_rule_17_what_operates_the_server_is_off_without_the_admin_key() -> None:
    """Admin, profiling, memory and weight routes: none answers without an admin key being set, whoever asks."""
    paths = ["/admin", "/admin/models", "/admin/profile", "/sleep", "/wake_up", "/start_profile", "/stop_profile",
             "/update_weights", "/collective_rpc", "/reset_prefix_cache", "/flush_cache", "/debug", "/debug/memory",
             "/release_memory_occupation", "/load_lora_adapter"]  # fmt: skip
    async with served() as server:
        for path in paths:
            for method in ("GET", "POST"):
                async with server.http.request(method, path, headers={"Authorization": f"Bearer {ADMIN}"}) as response:
                    assert response.status in (403, 404), path
    async with served(keys=ring()) as server:
        for path in paths:
            async with server.http.post(path, headers={"Authorization": f"Bearer {KEY}"}) as response:
                assert response.status in (403, 404), path
