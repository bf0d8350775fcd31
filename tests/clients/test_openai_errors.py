"""openai-python and trouble: typed errors, what is retried and what is not, timeouts, answers that nobody reads on.

Both clients, synchronous and asynchronous, against a real server.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import LiveServer, counted, idle, launched, running_and_waiting, serving
from openai_clients import KINDS, Recorded, chat, complete

pytestmark = pytest.mark.timeout(120)

# Far more than a test waits for: some seconds of work even for the tiny model.
ENDLESS = {"max_tokens": 30_000, "extra_body": {"ignore_eos": True}}
LONG_LOAD = 48  # models that are loaded one after the other


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def narrow(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose batch holds one sequence."""
    folder = tmp_path_factory.mktemp("narrow")
    with serving(folder, f"tiny={model}", "--memory", "256MiB", "--max-num-seqs", "1") as running:
        yield running


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("call", [chat, complete], ids=["chat", "completions"])
def test_an_unknown_model_is_a_not_found_error_that_is_not_retried(
    server: LiveServer, kind: str, call: Callable[..., Any]
) -> None:
    client = Recorded(kind, server.v1)
    with pytest.raises(openai.NotFoundError) as caught:
        client.run(lambda api: call(api, model="nobody"))
    error = caught.value
    assert (error.status_code, error.code, error.param, error.type) == (
        404, "model_not_found", "model", "invalid_request_error"
    )  # fmt: skip
    assert client.statuses == [404]
    assert error.request_id


BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 4000}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 10**9}, "max_completion_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"stop": ["x"] * 40}, "stop"),
    ({"seed": 2**70}, "seed"),
    ({"extra_body": {"min_p": 7}}, "min_p"),
    ({"stream_options": {"include_usage": "yes"}, "stream": True}, "stream_options.include_usage"),
]


@pytest.mark.parametrize(("change", "param"), BAD_CHAT, ids=[f"{param}={str(c)[:40]}" for c, param in BAD_CHAT])
def test_a_bad_chat_field_is_a_bad_request_error_that_names_it(
    server: LiveServer, kind: str, change: dict[str, Any], param: str
) -> None:
    client = Recorded(kind, server.v1)
    with pytest.raises(openai.BadRequestError) as caught:
        client.run(lambda api: chat(api, **change))
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    assert caught.value.code
    assert client.statuses == [400]


BAD_COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [5, 10**6]}, "prompt"),
    ({"prompt": [[5], [10**6]]}, "prompt"),
    ({"prompt": [5] * 40_000}, "prompt"),
    ({"logprobs": 99}, "logprobs"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"suffix": " the end"}, "suffix"),
]


@pytest.mark.parametrize(
    ("change", "param"), BAD_COMPLETION, ids=[f"{param}={str(c)[:40]}" for c, param in BAD_COMPLETION]
)
def test_a_bad_completion_field_is_a_bad_request_error_that_names_it(
    server: LiveServer, kind: str, change: dict[str, Any], param: str
) -> None:
    client = Recorded(kind, server.v1)
    with pytest.raises(openai.BadRequestError) as caught:
        client.run(lambda api: complete(api, **change))
    assert caught.value.param == param
    assert client.statuses == [400]


def test_a_path_that_does_not_exist_is_a_not_found_error(server: LiveServer, kind: str) -> None:
    client = Recorded(kind, server.v1)
    with pytest.raises(openai.NotFoundError) as caught:
        client.run(lambda api: api.fine_tuning.jobs.retrieve("ft-1"))
    assert set(caught.value.body) == {"message", "type", "param", "code"}  # type: ignore[arg-type]
    assert client.statuses == [404]


def test_a_server_that_loads_is_retried_until_it_answers(model: Path, tmp_path: Path, kind: str) -> None:
    """It listens before it loads: 503 says when to come back, and the client does."""
    models = [f"{name}={model}" for name in ("tiny", *(f"m{i}" for i in range(LONG_LOAD)))]
    with launched(tmp_path, *models, "--memory", "512MiB", "--port", "0") as running:
        running.url = running.wait_for_port()
        client = Recorded(kind, running.v1, max_retries=10)
        reply = client.run(chat)
        assert reply.choices[0].message.content is not None
        assert client.statuses[-1] == 200
        assert set(client.statuses[:-1]) == {503}, "no request met the server while it loaded"
        refused = client.seen[0]
        assert int(refused.headers["retry-after"]) >= 1
        assert float(refused.headers["retry-after-ms"]) > 0
        assert "x-should-retry" not in refused.headers


def test_a_client_that_does_not_retry_gets_an_internal_server_error_while_models_load(
    model: Path, tmp_path: Path, kind: str
) -> None:
    models = [f"{name}={model}" for name in ("tiny", *(f"m{i}" for i in range(LONG_LOAD)))]
    with launched(tmp_path, *models, "--memory", "512MiB", "--port", "0") as running:
        running.url = running.wait_for_port()
        client = Recorded(kind, running.v1, max_retries=0)
        with pytest.raises(openai.InternalServerError) as caught:
            client.run(chat)
        assert (caught.value.status_code, caught.value.code) == (503, "not_ready")
        assert client.statuses == [503]


def test_nobody_listening_is_a_connection_error(kind: str) -> None:
    with pytest.raises(openai.APIConnectionError):
        Recorded(kind, f"http://127.0.0.1:{_free_port()}/v1", max_retries=0).run(chat)


def test_an_answer_that_is_late_is_a_timeout_error_and_frees_its_slot(server: LiveServer, kind: str) -> None:
    before = server.until(idle)
    client = Recorded(kind, server.v1, max_retries=0, timeout=0.5)
    with pytest.raises(openai.APITimeoutError):
        client.run(lambda api: chat(api, **ENDLESS))
    _assert_one_left(server, before)


def test_a_stream_that_waits_in_the_queue_times_out_and_leaves_the_queue(narrow: LiveServer, kind: str) -> None:
    def wait(api: openai.OpenAI) -> None:
        with complete(api, stream=True, **ENDLESS) as first:
            next(iter(first))
            with pytest.raises(openai.APITimeoutError):
                complete(api.with_options(timeout=0.5), stream=True, **ENDLESS)
            narrow.until(lambda m: running_and_waiting(m) == (1, 0), 15)

    async def wait_async(api: openai.AsyncOpenAI) -> None:
        async with await complete(api, stream=True, **ENDLESS) as first:
            await anext(aiter(first))
            with pytest.raises(openai.APITimeoutError):
                await complete(api.with_options(timeout=0.5), stream=True, **ENDLESS)
            narrow.until(lambda m: running_and_waiting(m) == (1, 0), 15)

    before = narrow.until(idle)
    Recorded(kind, narrow.v1, max_retries=0).run(wait_async if kind == "async" else wait)
    after = narrow.until(idle)
    name = "janus_client_disconnects_total"
    assert counted(after, name) == counted(before, name) + 2


def test_leaving_a_stream_in_its_middle_frees_its_slot(server: LiveServer, kind: str) -> None:
    before = server.until(idle)

    def leave(api: openai.OpenAI) -> int:
        with complete(api, stream=True, n=3, **ENDLESS) as stream:
            for seen, _ in enumerate(stream):
                if seen == 20:
                    return seen
        raise AssertionError("the stream ended by itself")

    async def leave_async(api: openai.AsyncOpenAI) -> int:
        async with await complete(api, stream=True, n=3, **ENDLESS) as stream:
            seen = 0
            async for _ in stream:
                seen += 1
                if seen == 20:
                    return seen
        raise AssertionError("the stream ended by itself")

    assert Recorded(kind, server.v1).run(leave_async if kind == "async" else leave) == 20
    _assert_one_left(server, before)


def _assert_one_left(server: LiveServer, before: dict[str, float]) -> None:
    """Since `before` one client left, and nothing of its request runs on or ended by itself."""
    name = "janus_client_disconnects_total"
    after = server.until(lambda m: idle(m) and counted(m, name) > counted(before, name), 15)
    assert counted(after, name) == counted(before, name) + 1
    finished = [
        key for key in after if key.startswith("vllm:request_success_total") and "finished_reason=length" in key
    ]
    assert sum(after[key] - before[key] for key in finished) == 0


def test_a_hundred_async_calls_at_once_all_end_and_leave_nothing(server: LiveServer) -> None:
    async def run() -> list[str]:
        api = openai.AsyncOpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=60)

        async def one(i: int) -> str:
            if i % 4 == 0:
                with pytest.raises(openai.BadRequestError):
                    await chat(api, temperature=9)
                return "refused"
            if i % 4 == 1:
                async with await chat(api, stream=True, **ENDLESS) as stream:
                    async for _ in stream:
                        return "left"
            reply = await chat(api, extra_body={"ignore_eos": True})
            return str(reply.usage.completion_tokens)

        return list(await asyncio.gather(*(one(i) for i in range(100))))

    assert sorted(set(asyncio.run(run()))) == ["8", "left", "refused"]
    assert running_and_waiting(server.until(idle)) == (0, 0)


def test_request_ids_and_headers_reach_the_raw_response(server: LiveServer, kind: str) -> None:
    client = Recorded(kind, server.v1)
    minted = client.run(lambda api: chat(api))
    assert re.fullmatch(r"req-[0-9a-f]{24}", minted._request_id)
    given = {"X-Request-Id": "label-of.mine:7"}
    raw = client.run(lambda api: api.chat.completions.with_raw_response.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=2, extra_headers=given
    ))  # fmt: skip
    assert raw.headers["x-request-id"] == given["X-Request-Id"]
    assert raw.headers["content-type"].startswith("application/json")
    assert raw.parse().id.startswith("chatcmpl-")
    streamed = client.run(lambda api: api.chat.completions.with_raw_response.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=2, stream=True
    ))  # fmt: skip
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["cache-control"] == "no-cache"
    assert streamed.headers["x-request-id"]
