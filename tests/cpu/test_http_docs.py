"""The document against the application: every route is in it, and real answers have the shapes that it tells of."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from aiohttp import hdrs
from fake_engine import FakeModel, FakeNode
from http_server import CHAT, ROOMY, Server, served

from janus_server.admission import Admission
from janus_server.api import answers
from janus_server.api.bodies import Limits
from janus_server.http.app import build_app
from janus_server.metrics import Metrics

TEXT = {"model": "fake", "prompt": "x", "max_tokens": 3, "seed": 0}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with served() as server:
        yield server


async def told(server: Server) -> dict[str, Any]:
    async with server.http.get("/openapi.json") as response:
        assert response.status == 200
        assert response.content_type == "application/json"
        tree: dict[str, Any] = await response.json()
    return tree


async def test_the_document_has_exactly_the_routes_of_the_application(server: Server) -> None:
    admission = Admission(ROOMY, ROOMY, {})
    app = build_app(FakeNode(FakeModel()), metrics=Metrics(), limits=Limits(), admission=admission)  # type: ignore[arg-type]
    there = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.method != hdrs.METH_HEAD and route.resource is not None
    }
    tree = await told(server)
    assert {(method, path) for path, item in tree["paths"].items() for method in item} == there
    undescribed = [path for path, item in tree["paths"].items() for one in item.values() if one["tags"] == ["other"]]
    assert undescribed == [], "give these an About where they are registered"
    assert [name for name in tree["components"]["schemas"] if "." in name] == [], "two records of one name"
    ids = [one["operationId"] for item in tree["paths"].values() for one in item.values()]
    assert len(set(ids)) == len(ids)


async def test_it_is_the_same_each_time(server: Server) -> None:
    assert await told(server) == await told(server)


async def test_the_page_may_run_nothing_but_itself(server: Server) -> None:
    async with server.http.get("/docs") as response:
        assert response.status == 200
        assert response.content_type == "text/html"
        policy = response.headers["Content-Security-Policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert "openapi.json" in await response.text()


def strictly(shape: type[msgspec.Struct], value: Any) -> None:
    """`value` reads as `shape`, and has no field that the record does not know."""
    read = msgspec.convert(value, shape, strict=True)
    assert msgspec.to_builtins(read) == value


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}, {"stop": ["b"]}])
async def test_chat_answers_have_the_shapes_told(server: Server, more: dict[str, Any]) -> None:
    status, answer = await server.post("/v1/chat/completions", {**CHAT, "max_tokens": 3, **more})
    assert status == 200
    strictly(answers.ChatCompletion, answer)
    body = {**CHAT, "max_tokens": 3, "stream_options": {"include_usage": True}, **more}
    events = await server.events("/v1/chat/completions", body)
    for event in events[:-1]:
        strictly(answers.ChatCompletionChunk, json.loads(event.removeprefix("data: ")))


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"echo": True}, {"stop": ["b"]}])
async def test_completion_answers_have_the_shapes_told(server: Server, more: dict[str, Any]) -> None:
    status, answer = await server.post("/v1/completions", {**TEXT, **more})
    assert status == 200
    strictly(answers.Completion, answer)
    for event in (await server.events("/v1/completions", {**TEXT, **more}))[:-1]:
        strictly(answers.Completion, json.loads(event.removeprefix("data: ")))


async def test_small_answers_and_failures_have_the_shapes_told(server: Server) -> None:
    shapes = {
        "/health": answers.Alive,
        "/ready": answers.Alive,
        "/version": answers.Version,
        "/v1/models": answers.ModelList,
        "/v1/models/fake": answers.Model,
        "/v1/models/nobody": answers.Error,
        "/nowhere": answers.Error,
    }
    for path, shape in shapes.items():
        async with server.http.get(path) as response:
            strictly(shape, await response.json())
    status, answer = await server.post("/v1/completions", {**TEXT, "temperature": 9})
    assert status == 400
    strictly(answers.Error, answer)
