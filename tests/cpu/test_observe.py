"""What a real server tells of its requests: queues on /metrics, access lines and decisions, spans at a collector."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from server_process import REPO, Server, post, tiny_model

MEMORY = ("--memory", "64MiB", "--page-size", "16384")
SECRET = "my own words 7f3a"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1 << 15)


def chat(server: Server, **more: Any) -> tuple[int, Any]:
    body = {
        "model": "a",
        "messages": [{"role": "user", "content": SECRET}],
        "max_tokens": 5,
        "ignore_eos": True,
        **more,
    }
    status, raw = post(f"{server.url}/v1/chat/completions", json.dumps(body).encode())
    return status, raw if more.get("stream") else json.loads(raw)


def opened(server: Server, **more: Any) -> http.client.HTTPConnection:
    """A long streamed call whose first bytes have not been waited for."""
    where = urlsplit(server.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    body = {"model": "a", "prompt": [5] * 30, "max_tokens": 30_000, "ignore_eos": True, "stream": True, **more}
    connection.request("POST", "/v1/completions", json.dumps(body))
    return connection


def queue(metrics: dict[str, float]) -> tuple[float, float, float]:
    label = "engine=0,model_name=a"
    return (
        metrics[f"vllm:num_requests_running{{{label}}}"],
        metrics[f"vllm:num_requests_waiting{{{label}}}"],
        metrics[f"vllm:num_requests_waiting_by_reason{{{label},reason=capacity}}"],
    )


def test_queues_are_true_while_idle_and_busy(model: Path) -> None:
    with Server(f"a={model}", *MEMORY, "--max-num-seqs", "1", "--access-log", "off") as server:
        idle = server.metrics()
        assert queue(idle) == (0, 0, 0)
        assert idle["janus_queue_oldest_seconds{engine=0,model_name=a}"] == 0
        assert any(key.startswith("vllm:cache_config_info{block_size=") and value == 1 for key, value in idle.items())
        calls = [opened(server)]
        server.until(lambda m: queue(m) == (1, 0, 0))
        calls += [opened(server), opened(server)]
        busy = server.until(lambda m: queue(m) == (1, 2, 2))
        older = server.until(lambda m: m["janus_queue_oldest_seconds{engine=0,model_name=a}"] > 0)
        assert older["vllm:engine_healthy{engine=0,model_name=a}"] == 1
        assert busy["vllm:kv_cache_usage_perc{engine=0,model_name=a}"] > 0
        for call in calls:
            call.close()
        server.until(lambda m: queue(m) == (0, 0, 0) and m["janus_queue_oldest_seconds{engine=0,model_name=a}"] == 0)
        assert server.stop() == 0
        assert "/v1/completions" not in server.log


def json_lines(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def told(model: Path) -> tuple[str, list[dict[str, Any]]]:
    """The log of a server in JSON after one call of each kind, and its access lines."""
    with Server(f"a={model}", *MEMORY, "--log-format", "json") as server:
        assert chat(server)[0] == 200
        assert chat(server, stream=True, n=2)[0] == 200
        assert chat(server, temperature=9)[0] == 400
        assert chat(server, model=SECRET)[0] == 404
        assert post(f"{server.url}/{SECRET.replace(' ', '')}?q=1", b"{}")[0] == 404
        gone = opened(server)
        server.until(lambda m: queue(m)[0] == 1)
        gone.close()
        server.until(lambda m: queue(m) == (0, 0, 0))
        assert server.stop(signal.SIGTERM) == 0
        log = server.log
    return log, [line for line in json_lines(log) if line["logger"] == "janus.access"]


def test_each_request_has_one_line_with_what_it_was_and_cost(told: tuple[str, list[dict[str, Any]]]) -> None:
    _, access = told
    assert len(access) == 6
    whole, streamed, refused, unknown, lost, left = access
    assert {"time", "level", "message"} < set(whole)
    assert all(set(line) == set(whole) for line in access)
    assert (whole["method"], whole["route"], whole["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (whole["model"], whole["completion_tokens"], whole["end"], whole["key"]) == ("a", 5, "length", None)
    assert whole["prompt_tokens"] > 10
    assert 0 <= whole["queue_s"] <= whole["ttft_s"] <= whole["total_s"]
    assert whole["request"].startswith("req-")
    assert (streamed["completion_tokens"], streamed["end"]) == (10, "length")
    assert (refused["status"], refused["end"], refused["model"]) == (400, "invalid_value", None)
    assert (unknown["status"], unknown["end"]) == (404, "model_not_found")
    assert (lost["status"], lost["route"]) == (404, "none")
    assert (left["end"], left["model"]) == ("client_left", "a")


def test_nothing_that_a_client_wrote_is_in_the_log(told: tuple[str, list[dict[str, Any]]]) -> None:
    log, _ = told
    assert SECRET not in log
    assert SECRET.replace(" ", "") not in log
    assert "?q=" not in log


def test_decisions_have_a_line_each(told: tuple[str, list[dict[str, Any]]]) -> None:
    log, _ = told
    made = {line["kind"]: line for line in json_lines(log) if line["logger"] == "janus.decision"}
    assert made["load"]["model"] == "a"
    assert made["done"]["seconds"] > 0
    assert made["drain"]["open_requests"] == 0


def test_a_key_is_named_and_never_shown(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, wrong = "sk-5d2f-very-secret", "sk-9999-also-secret"
    monkeypatch.setenv("JANUS_API_KEY", key)
    with Server(f"a={model}", *MEMORY, "--log-format", "json") as server:
        where = urlsplit(server.url)
        for one in (key, wrong):
            connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {one}"})
            connection.getresponse().read()
        assert server.stop() == 0
    access = [line for line in json_lines(server.log) if line["logger"] == "janus.access"]
    assert [(line["status"], line["route"], line["end"]) for line in access] == [
        (200, "/v1/models", None), (401, "none", "invalid_api_key"),
    ]  # fmt: skip
    assert access[0]["key"] is not None
    assert access[1]["key"] is None
    assert key not in server.log
    assert wrong not in server.log


def test_lines_for_people_and_prompts_when_asked_for(model: Path) -> None:
    with Server(f"a={model}", *MEMORY, "--log-prompts") as server:
        assert chat(server)[0] == 200
        assert server.stop() == 0
        lines = [line for line in server.log.splitlines() if "/v1/chat/completions" in line]
        assert len(lines) == 1
        assert "5 tokens" in lines[0]
        assert lines[0].endswith(", length")
        assert SECRET in server.log


def test_a_server_whose_log_nobody_reads_goes_on_serving(model: Path) -> None:
    with Server(f"a={model}", *MEMORY) as server:  # its stderr is a pipe of 64 KiB that is not read
        for _ in range(600):
            assert post(f"{server.url}/v1/completions", b'{"model":"a"}')[0] == 400
        assert chat(server)[0] == 200


# Traces


class Collector(ThreadingHTTPServer):
    """A little OTLP/HTTP receiver: the spans that it got, by name, as OpenTelemetry's own message reads them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receive)
        self.spans: list[Any] = []
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Receive(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        import gzip

        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        message = ExportTraceServiceRequest.FromString(body)
        found = [span for r in message.resource_spans for scope in r.scope_spans for span in scope.spans]
        self.server.paths.append(self.path)
        self.server.spans.extend(found)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
    with Collector() as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_chat_request_arrives_as_spans(model: Path, collector: Collector) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with Server(f"a={model}", *MEMORY, "--otlp-endpoint", collector.url) as server:
        where = urlsplit(server.url)
        body = json.dumps({"model": "a", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 5, "seed": 1})
        for flags in ("01", "00"):  # sampled, and not sampled, by whoever calls
            connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
            headers = {"traceparent": f"00-{trace_id}-{parent_id}-{flags}"}
            connection.request("POST", "/v1/chat/completions", body, headers)
            assert connection.getresponse().status == 200
        assert server.stop() == 0
    assert set(collector.paths) == {"/v1/traces"}
    spans = {span.name: span for span in collector.spans}
    assert len(collector.spans) == len(spans) == 5
    assert set(spans) == {"POST /v1/chat/completions", "chat a", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in collector.spans} == {trace_id}
    outer, run = spans["POST /v1/chat/completions"], spans["chat a"]
    assert outer.parent_span_id.hex() == parent_id
    assert run.parent_span_id == outer.span_id
    assert {spans[name].parent_span_id for name in ("queue", "prefill", "decode")} == {run.span_id}
    edges = [spans["queue"].start_time_unix_nano, spans["queue"].end_time_unix_nano]
    edges += [spans["prefill"].start_time_unix_nano, spans["prefill"].end_time_unix_nano]
    edges += [spans["decode"].start_time_unix_nano, spans["decode"].end_time_unix_nano, run.end_time_unix_nano]
    assert edges == sorted(edges)
    assert outer.start_time_unix_nano <= run.start_time_unix_nano <= edges[0]
    assert run.end_time_unix_nano <= outer.end_time_unix_nano
    said = attributes(run)
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == "a"
    assert said["gen_ai.request.max_tokens"] == 5
    assert 1 <= said["gen_ai.usage.output_tokens"] <= 5
    assert attributes(outer)["http.route"] == "/v1/chat/completions"
    assert SECRET not in str(collector.spans)


def test_a_collector_that_is_not_there_holds_up_nothing(model: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
    with Server(f"a={model}", *MEMORY, "--otlp-endpoint", "http://127.0.0.1:9") as server:
        assert chat(server)[0] == 200
        assert server.stop() == 0


def test_without_the_packages_the_server_says_what_to_install(model: Path, tmp_path: Path) -> None:
    # A package of that name without the modules, before the real one on the path: what an import then finds.
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").write_text("")
    command = [sys.executable, "-m", "janus_server", "serve", f"a={model}", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPO}"}
    done = subprocess.run(
        [*command, "--otlp-endpoint", "http://127.0.0.1:4318"], capture_output=True, text=True, timeout=60,
        cwd=tmp_path, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "janus-server[otel]" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_of_opentelemetry_is_imported_without_an_endpoint() -> None:
    words = "import sys, janus_server.serve, janus_server.http.listen; print('opentelemetry' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("flag", ["--otlp-endpoint=localhost", "--access-log=maybe", "--log-format=xml"])
def test_settings_that_cannot_be_used_are_named(model: Path, flag: str) -> None:
    command = [sys.executable, "-m", "janus_server", "serve", f"a={model}", flag]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPO, check=False)
    assert done.returncode == 2
    assert flag.partition("=")[0] in done.stderr
    assert done.stderr.count("\n") == 1
