"""What a client's grammar makes impossible is the client's refusal, and costly ones hold nobody else up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import aiohttp
import pytest
from server_process import Server, post, tiny_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tiny_model(tmp_path_factory.mktemp("tiny"))
    with Server(f"a={folder}", "--memory", "64MiB", "--page-size", str(1 << 14)) as running:
        yield running


def test_a_grammar_that_leads_nowhere_is_a_400(server: Server) -> None:
    body = {"model": "a", "prompt": "q", "max_tokens": 20, "guided_grammar": 'start: "x" N | "y"\nN: /a/ & /b/'}
    for bias in ({}, {"logit_bias": {"90": 50}}):
        status, answer = post(f"{server.url}/v1/completions", json.dumps({**body, **bias}).encode())
        assert status in (200, 400), answer
        if status == 400:
            assert json.loads(answer)["error"]["code"] in ("invalid_grammar", "invalid_value")


async def test_costly_grammars_do_not_hold_up_a_chat(server: Server) -> None:
    async with aiohttp.ClientSession(server.url) as http:

        async def ask(path: str, body: dict[str, object]) -> float:
            start_s = time.monotonic()
            async with http.post(path, json={"model": "a", "max_tokens": 2, **body}) as reply:
                await reply.read()
            return time.monotonic() - start_s

        schemas = [{"type": "integer", "multipleOf": 99999900 + i} for i in range(8)]
        costly = [asyncio.create_task(ask("/v1/completions", {"prompt": "x", "guided_json": one})) for one in schemas]
        await asyncio.sleep(0.1)
        chat_s = await ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        took_s = await asyncio.gather(*costly)
    assert chat_s < max(took_s) / 2
