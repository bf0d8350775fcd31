"""The whole server as users run it: a real process, sockets, openai-python; load, disconnects, signals, bad input."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest
from server_process import REPO, Server, post, tiny_model

from janus_server.catalogue import SCRATCH_SHARE
from janus_server.kernels.choose import choose
from janus_server.kernels.table import DType
from janus_server.kv.blocks import pages_for
from janus_server.model.load import open_checkpoint
from janus_server.model.weights import layout

PAGE = 1 << 14
LONG = 30_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose answers can be longer than any test waits."""
    return tiny_model(tmp_path_factory.mktemp("slow"), max_position_embeddings=1 << 15)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with Server(f"a={model}", f"b={model}", "--memory", "64MiB", "--page-size", str(PAGE)) as running:
        yield running


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def live_kv(metrics: dict[str, float]) -> tuple[float, float]:
    """Sequences running or waiting, over all models."""
    return tuple(
        sum(v for k, v in metrics.items() if k.startswith(f"vllm:num_requests_{state}{{"))
        for state in ("running", "waiting")
    )  # type: ignore[return-value]


def idle(metrics: dict[str, float]) -> bool:
    return live_kv(metrics) == (0, 0)


def test_models_chat_and_completion_through_openai_python(server: Server) -> None:
    api = client(server)
    assert [m.id for m in api.models.list()] == ["a", "b"]
    messages = [{"role": "user", "content": "the quick brown fox"}]
    whole = api.chat.completions.create(model="a", messages=messages, max_tokens=12, temperature=0)
    assert whole.usage is not None
    assert 1 <= whole.usage.completion_tokens <= 12
    pieces = list(
        api.chat.completions.create(
            model="a", messages=messages, max_tokens=12, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    plain = api.completions.create(
        model="b", prompt=["the quick", "lazy"], n=2, max_tokens=5, seed=3, extra_body={"ignore_eos": True}
    )
    assert [c.index for c in plain.choices] == [0, 1, 2, 3]
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 20


def test_same_seed_same_text_whatever_else_runs(server: Server) -> None:
    async def run() -> None:
        api = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        async def one(seed: int) -> str:
            reply = await api.completions.create(
                model="a", prompt="the lazy dog", max_tokens=30, seed=seed, temperature=1.0, logprobs=1,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            return reply.choices[0].model_dump_json()

        alone = [await one(seed) for seed in range(6)]
        together = await asyncio.gather(*(one(seed) for seed in range(6)), *(one(100 + s) for s in range(10)))
        assert list(together[:6]) == alone
        assert len(set(alone)) == 6

    asyncio.run(run())


def test_stop_strings_ids_and_min_tokens(server: Server) -> None:
    api = client(server)
    free = api.completions.create(
        model="a", prompt="fox", max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
    )
    text = free.choices[0].text
    stop = text[8:11]
    cut = api.completions.create(
        model="a", prompt="fox", max_tokens=40, temperature=0, stop=stop, extra_body={"ignore_eos": True}
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    logged = api.completions.create(
        model="a",
        prompt="fox",
        max_tokens=10,
        temperature=0,
        logprobs=0,
        extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True},
    )
    assert logged.choices[0].logprobs is not None
    assert len(logged.choices[0].logprobs.tokens or []) == 10


def weight_pages(model: Path) -> tuple[int, str]:
    """Pages that the weights take, and the kernel table by whose stored form they were counted."""
    checkpoint = open_checkpoint(model)
    assert checkpoint.spec.dtype is DType.F32
    table, _ = choose("auto", 1, Path.home() / ".cache" / "janus")
    return pages_for(layout(checkpoint.spec, table.band_bytes).total_bytes, PAGE), table.name


def test_64_streams_with_kv_memory_for_8_all_finish(model: Path) -> None:
    weights, kernels = weight_pages(model)
    token_bytes = 3 * 2 * 2 * 16 * 4
    one = pages_for(80, PAGE // token_bytes)
    beside = next(pages for pages in itertools.count() if pages - pages // SCRATCH_SHARE == 8 * one)
    memory = (weights + beside) * PAGE
    with Server(f"a={model}", "--memory", str(memory), "--page-size", str(PAGE), "--kernels", kernels) as server:

        async def run() -> list[int]:
            api = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)

            async def one(i: int) -> int:
                count = 0
                stream = await api.completions.create(
                    model="a", prompt=[3 + (i * 7 + j) % 290 for j in range(40)], max_tokens=40, stream=True,
                    stream_options={"include_usage": True}, extra_body={"ignore_eos": True}, seed=i,
                )  # fmt: skip
                async for event in stream:
                    if event.usage is not None:
                        count = event.usage.completion_tokens
                return count

            return list(await asyncio.gather(*(one(i) for i in range(64))))

        assert asyncio.run(run()) == [40] * 64
        metrics = server.until(idle)
        prefix = metrics.get("janus_pool_pages{kind=kv,model_name=a}", 0)
        free = metrics["janus_pool_free_pages{}"]
        assert free + prefix == 8 * one
        assert metrics["janus_pool_pages{kind=scratch,model_name=(device)}"] == beside - 8 * one
        assert server.stop() == 0
        assert "Bug" not in server.log


def test_a_request_that_can_never_fit_is_refused(model: Path) -> None:
    memory = (weight_pages(model)[0] + 10) * PAGE
    with Server(f"a={model}", "--memory", str(memory), "--page-size", str(PAGE)) as server:
        card = json.loads(_get(server.url + "/v1/models")[1])["data"][0]
        limit = card["max_model_len"]
        assert limit < 512
        status, body = post(
            server.url + "/v1/completions", json.dumps({"model": "a", "prompt": [5] * limit, "max_tokens": 1}).encode()
        )
        assert status == 400
        assert json.loads(body)["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("wait_for", ["queue", "decode"])
def test_a_client_that_leaves_frees_its_pages(slow_model: Path, stream: bool, wait_for: str) -> None:
    with Server(f"a={slow_model}", "--memory", "64MiB", "--page-size", str(PAGE), "--max-num-seqs", "1") as server:
        where = urlsplit(server.url)

        def start(max_tokens: int) -> http.client.HTTPConnection:
            connection = http.client.HTTPConnection(where.hostname, where.port)
            body = {"model": "a", "prompt": [5] * 30, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
            connection.request("POST", "/v1/completions", json.dumps(body))
            return connection

        first = start(LONG)
        server.until(lambda m: live_kv(m)[0] == 1)
        if wait_for == "queue":
            second = start(LONG)
            server.until(lambda m: live_kv(m) == (1, 1))
            second.close()
            server.until(lambda m: live_kv(m)[1] == 0, 10)
        first.close()
        before = server.until(idle, 10)
        sampled = before["janus_sampled_tokens_total{engine=0,model_name=a}"]
        assert sampled < LONG
        assert server.stop() == 0


def test_ctrl_c_drains_and_ends_with_0(model: Path) -> None:
    with Server(f"a={model}", "--memory", "64MiB", "--page-size", str(PAGE)) as server:
        where = urlsplit(server.url)
        connection = http.client.HTTPConnection(where.hostname, where.port)
        body = {"model": "a", "prompt": [5] * 30, "max_tokens": 400, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        reply = connection.getresponse()
        reply.readline()
        server.process.send_signal(signal.SIGINT)
        lines = reply.read().decode().splitlines()
        assert lines[-2] == "data: [DONE]"
        assert '"finish_reason":"length"' in lines[-4]
        assert server.process.wait(30) == 0


def test_a_second_signal_ends_at_once(slow_model: Path) -> None:
    with Server(f"a={slow_model}", "--memory", "64MiB", "--page-size", str(PAGE)) as server:
        where = urlsplit(server.url)
        connection = http.client.HTTPConnection(where.hostname, where.port)
        body = {"model": "a", "prompt": [5] * 30, "max_tokens": LONG, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        connection.getresponse().readline()
        server.process.send_signal(signal.SIGINT)
        server.read_until("finishing 1 request ")
        assert server.stop() == 130


def test_a_port_in_use_is_one_line_and_exit_2(server: Server, model: Path) -> None:
    port = str(urlsplit(server.url).port)
    command = [sys.executable, "-m", "janus_server", "serve", f"a={model}", "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPO, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("janus: 127.0.0.1 port ")
    assert done.stderr.count("\n") == 1


def test_shutdown_timeout_ends_the_rest_with_an_error_event(slow_model: Path) -> None:
    with Server(f"a={slow_model}", "--memory", "64MiB", "--page-size", str(PAGE), "--shutdown-timeout", "0s") as server:
        where = urlsplit(server.url)
        connection = http.client.HTTPConnection(where.hostname, where.port)
        body = {"model": "a", "prompt": [5] * 30, "max_tokens": LONG, "n": 2, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        reply = connection.getresponse()
        reply.readline()
        server.process.send_signal(signal.SIGTERM)
        lines = [line for line in reply.read().decode().splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        assert '"error"' in lines[-2] and '"shutting_down"' in lines[-2]
        assert server.process.wait(30) == 0


BAD = [
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [5] * 600}, 400, "prompt"),
    ({"prompt": [5, 300]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": 7}, 400, "prompt"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": -5}, 400, "max_tokens"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"max_tokens": True}, 400, "max_tokens"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"top_p": 1.5}, 400, "top_p"),
    ({"n": 0}, 400, "n"),
    ({"n": 10**9}, 400, "n"),
    ({"logit_bias": {"999": 1}}, 400, "logit_bias"),
    ({"stop": ["a"] * 100}, 400, "stop"),
    ({"model": "nobody"}, 404, "model"),
]


@pytest.mark.parametrize(("change", "status", "param"), BAD, ids=[str(b[0])[:40] for b in BAD])
def test_bad_input_names_the_field_and_the_server_keeps_serving(
    server: Server, change: dict, status: int, param: str
) -> None:
    got, body = post(
        f"{server.url}/v1/completions", json.dumps({"model": "a", "prompt": "x", "max_tokens": 2, **change}).encode()
    )
    error = json.loads(body)["error"]
    assert (got, error["param"]) == (status, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert post(f"{server.url}/v1/completions", b'{"model":"a","prompt":"x","max_tokens":1}')[0] == 200


@pytest.mark.parametrize(
    ("body", "word"),
    [(b'{"model":"a","prompt":"x","temperature":NaN}', "temperature"), (b'{"model":"a"', "JSON"), (b"", "JSON"),
    (b"\xff\xfe", "JSON")],
)  # fmt: skip
def test_broken_json_is_a_400_that_says_where(server: Server, body: bytes, word: str) -> None:
    status, reply = post(f"{server.url}/v1/completions", body)
    assert status == 400
    assert word in reply.decode()


def test_a_body_of_100_mb_is_a_413(server: Server) -> None:
    where = urlsplit(server.url)
    connection = http.client.HTTPConnection(where.hostname, where.port)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", str(100 << 20))
    connection.endheaders()
    assert connection.getresponse().status == 413
    assert post(f"{server.url}/v1/completions", b'{"model":"a","prompt":"x","max_tokens":1}')[0] == 200


def test_unknown_paths_and_methods_have_openais_error_shape(server: Server) -> None:
    for path, status in (("/v1/nothing", 404), ("/v1/completions", 405)):
        got, body = _get(server.url + path)
        assert got == status
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--page-size", "4KiB", "--memory", "4GiB"], "max_map_count"),
        (["--memory", "160KiB", "--page-size", "16KiB"], "memory"),
        (["--max-model-len", "100000"], "max-model-len"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start(model: Path, arguments: list[str], words: str) -> None:
    command = [sys.executable, "-m", "janus_server", "serve", f"a={model}", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPO, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def _get(url: str) -> tuple[int, bytes]:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname, where.port)
    connection.request("GET", where.path)
    reply = connection.getresponse()
    return reply.status, reply.read()
