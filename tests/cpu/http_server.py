"""A served fake node on an ephemeral port, and ways to talk to it; for the tests of the HTTP surface."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
from aiohttp import web
from fake_engine import FakeModel, FakeNode
from prometheus_client.parser import text_string_to_metric_families

from janus_server.admission import Admission, QueueBounds
from janus_server.api.bodies import Limits
from janus_server.applications import Applications
from janus_server.http.app import build_app
from janus_server.http.edge import build_runner
from janus_server.http.gate import Gate, Places
from janus_server.keys import KeyRing
from janus_server.metrics import Metrics

HI: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = {"model": "fake", "messages": HI, "seed": 0}
OPEN = Places(local=False, bound="test")
NO_KEYS = KeyRing()
ROOMY = QueueBounds(10_000, 10**9)
PROMPT_TOKENS = len("user:hi\nassistant:") + 1


class Server:
    """A served fake node and ways to talk to it."""

    gate: Gate
    admission: Admission

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

    async def raw(
        self, path: str, body: dict[str, Any], buffer_bytes: int = 65536
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request sent by hand, so that the test decides when the connection ends."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=buffer_bytes)
        data = json.dumps(body).encode()
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(data), data))
        await writer.drain()
        return reader, writer

    async def metrics(self) -> dict[str, float]:
        async with self.http.get("/metrics") as response:
            text = await response.text()
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return {s.name + "".join(f",{k}={v}" for k, v in sorted(s.labels.items())): s.value for s in samples}


@contextlib.asynccontextmanager
async def served(
    model: FakeModel | None = None,
    limits: Limits | None = None,
    *,
    keys: KeyRing = NO_KEYS,
    places: Places = OPEN,
    queue: QueueBounds = ROOMY,
    applications: Applications | None = None,
) -> AsyncIterator[Server]:
    """The node, behind a real socket; at the end no request may be left in its engine, and no grant."""
    model = model or FakeModel()
    limits = limits or Limits(body_bytes=256 * 1024, keep_alive_s=0.05)
    node = FakeNode(model)
    metrics = Metrics()
    admission = Admission(queue, queue, keys.limits())
    gate = Gate(places, keys, metrics)
    app = build_app(node, metrics=metrics, limits=limits, admission=admission, applications=applications)
    runner = build_runner(app, limits, gate)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = Server(model, node, runner.addresses[0][1])
    server.gate, server.admission = gate, admission
    try:
        yield server
    finally:
        await server.http.close()
        await server.openai.close()
        await runner.cleanup()
    assert not model.live
    assert (admission.open_calls, admission.queued(), gate.active) == (0, (0, 0), 0)


def is_error(body: Any) -> dict[str, Any]:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error
