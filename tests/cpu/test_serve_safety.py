"""The served process and its safety: who may bind what, keys and their reload, TLS, draining, and a frozen device."""

from __future__ import annotations

import http.client
import json
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest
from server_process import REPO, Server, tiny_model

from janus_server.network import connections_to_have

KEY, ADMIN = "user-0123456789", "root-0123456789"
SIZES = ("--memory", "64MiB", "--page-size", str(1 << 14))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1 << 15)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(f'[keys.alice]\nkey = "{KEY}"\nrequests_per_minute = 1000\n')
    file.chmod(0o600)
    return file


def refusal(*arguments: str, **environment: str) -> str:
    """What a server that must not start says; the port is never free for it to take."""
    command = [sys.executable, "-m", "janus_server", "serve", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=REPO, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("janus: ") and done.stderr.count("\n") == 1
    return done.stderr


def ask(server: Server, path: str, key: str | None, body: dict | None = None, **headers: str) -> tuple[int, bytes]:
    where = urlsplit(server.url)
    connection = http.client.HTTPConnection("127.0.0.1", where.port, timeout=60)
    sent = {**({"Authorization": f"Bearer {key}"} if key else {}), **headers}
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), sent)
    reply = connection.getresponse()
    return reply.status, reply.read()


def tiny(**more: object) -> dict:
    return {"model": "a", "prompt": "x", "max_tokens": 1, **more}


def test_an_address_that_others_reach_is_refused_without_a_key(model: Path, key_file: Path) -> None:
    for host in ("0.0.0.0", "::"):
        said = refusal(f"a={model}", "--host", host, "--port", "0")
        assert "JANUS_API_KEY" in said and "--insecure" in said
    with Server(f"a={model}", *SIZES, "--host", "0.0.0.0", "--api-key-file", str(key_file)) as server:
        assert "without TLS" in server.log
        assert ask(server, "/v1/completions", None, tiny())[0] == 401
        assert ask(server, "/v1/completions", KEY, tiny())[0] == 200
        assert KEY not in server.log
    with Server(f"a={model}", *SIZES, "--host", "0.0.0.0", "--insecure") as server:
        assert "--insecure" in server.log
        assert ask(server, "/v1/completions", None, tiny())[0] == 200


def test_key_files_are_read_again_on_a_hangup(model: Path, key_file: Path) -> None:
    with Server(f"a={model}", *SIZES, "--api-key-file", str(key_file)) as server:
        assert ask(server, "/v1/models", KEY)[0] == 200
        key_file.write_text('[keys.alice]\nkey = "another-0123456789"\n')
        server.process.send_signal(signal.SIGHUP)
        server.read_until("1 keys are in force")
        assert ask(server, "/v1/models", KEY)[0] == 401
        assert ask(server, "/v1/models", "another-0123456789")[0] == 200
        key_file.write_text("[keys.")
        server.process.send_signal(signal.SIGHUP)
        server.read_until("keys stay as they were")
        assert ask(server, "/v1/models", "another-0123456789")[0] == 200
        assert server.stop() == 0


def test_key_files_that_others_can_read_are_refused(model: Path, key_file: Path) -> None:
    key_file.chmod(0o644)
    assert "chmod 600" in refusal(f"a={model}", "--port", "0", "--api-key-file", str(key_file))


def test_keys_are_not_in_the_process_list(model: Path, key_file: Path) -> None:
    with Server(f"a={model}", *SIZES, "--api-key-file", str(key_file)) as server:
        listed = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
        assert KEY.encode() not in listed and b"--api-key-file" in listed


def test_pages_whose_name_was_turned_to_this_machine_are_refused(model: Path) -> None:
    with Server(f"a={model}", *SIZES, "--allowed-hosts", "api.example") as server:
        assert ask(server, "/v1/models", None, Host="evil.example")[0] == 403
        assert ask(server, "/v1/models", None, Host="api.example")[0] == 200
        assert ask(server, "/v1/completions", None, tiny(), Origin="https://evil.example")[0] == 403
        assert ask(server, "/v1/completions", None, tiny(), Origin=server.url)[0] == 200


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificate can be made")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    yield cert, key


def test_https(model: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with Server(f"a={model}", *SIZES, "--ssl-certfile", str(cert), "--ssl-keyfile", str(key)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        port = urlsplit(server.url).port
        assert port is not None
        trusting = ssl.create_default_context(cafile=str(cert))
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=trusting, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(tiny(max_tokens=4, stream=True, ignore_eos=True)))
        reply = connection.getresponse()
        assert reply.status == 200
        assert reply.read().endswith(b"data: [DONE]\n\n")
        assert connection.sock is None or connection.sock.version() in ("TLSv1.2", "TLSv1.3")
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            old.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=30))
        plain = socket.create_connection(("127.0.0.1", port), timeout=30)
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not plain.recv(100).startswith(b"HTTP")
        assert server.stop() == 0


def test_certificates_that_cannot_be_used_are_one_line(
    model: Path, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = certificate
    locked = tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "ec", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", str(locked)],
        check=True, capture_output=True,
    )  # fmt: skip
    for first, second, words in (
        (cert, cert, "not a certificate and its key"), (cert, tmp_path / "absent", "--ssl-keyfile"),
        (cert, locked, "without a passphrase"), (key, key, "not a certificate"),
    ):  # fmt: skip
        said = refusal(f"a={model}", "--port", "0", "--ssl-certfile", str(first), "--ssl-keyfile", str(second))
        assert words in said


# The end of the server


def test_a_request_still_arriving_at_the_end_is_answered(model: Path) -> None:
    with Server(f"a={model}", *SIZES, "--shutdown-timeout", "20s") as server:
        body = json.dumps(tiny()).encode()
        arriving = socket.create_connection(("127.0.0.1", urlsplit(server.url).port), timeout=60)
        arriving.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body))
        arriving.sendall(body[:5])
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        server.read_until("finishing 1 request ")
        arriving.sendall(body[5:])
        assert arriving.recv(65536).startswith(b"HTTP/1.1 503")
        assert server.process.wait(30) == 0


def test_a_request_that_never_arrives_is_answered_at_the_end(model: Path) -> None:
    with Server(f"a={model}", *SIZES, "--shutdown-timeout", "0s") as server:
        arriving = socket.create_connection(("127.0.0.1", urlsplit(server.url).port), timeout=60)
        arriving.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        answer = arriving.recv(65536)
        assert answer.startswith(b"HTTP/1.1 503") and b'"shutting_down"' in answer
        assert server.process.wait(30) == 0


def test_every_request_of_a_burst_ends_with_an_answer_or_an_error_event(model: Path) -> None:
    """Long texts, so that the signal meets requests that are read, encoded, queued and run."""
    with Server(f"a={model}", *SIZES, "--max-num-seqs", "4", "--shutdown-timeout", "1s") as server:
        ends: list[str] = []

        def call(i: int) -> None:
            api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
            try:
                text = "the quick brown fox " * (300 if i % 2 else 3)
                stream = i % 3 == 0
                made = api.completions.create(
                    model="a", prompt=text, max_tokens=20_000, stream=stream, extra_body={"ignore_eos": True}
                )
                for _ in made if stream else ():
                    pass
                ends.append("done")
            except openai.APIStatusError as error:
                ends.append(f"{error.status_code}")
            except openai.APIConnectionError:
                ends.append("silent")
            except openai.APIError as error:
                ends.append(f"event {error.code}")

        threads = [threading.Thread(target=call, args=(i,)) for i in range(24)]
        for thread in threads:
            thread.start()
        server.until(lambda m: sum(v for k, v in m.items() if k.startswith("vllm:num_requests_running")) >= 4)
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        assert len(ends) == 24
        assert set(ends) <= {"503", "event shutting_down"}, ends
        assert server.process.wait(30) == 0


def test_a_busy_server_stays_ready_and_keeps_its_queue_bounded(model: Path) -> None:
    arguments = ("--max-num-seqs", "1", "--max-queued-requests", "2", "--frozen-after", "5s")
    with Server(f"a={model}", *SIZES, *arguments) as server:
        where = urlsplit(server.url)
        opened = []
        for i in range(3):
            connection = http.client.HTTPConnection("127.0.0.1", where.port, timeout=60)
            connection.request("POST", "/v1/completions", json.dumps(tiny(max_tokens=30_000, ignore_eos=True)))
            opened.append(connection)
            if i == 0:
                server.until(lambda m: m.get("janus_sampled_tokens_total{engine=0,model_name=a}", 0) > 3)
        server.until(lambda m: m["vllm:num_requests_waiting{engine=0,model_name=a}"] == 2)
        status, body = ask(server, "/v1/completions", None, tiny())
        assert (status, json.loads(body)["error"]["code"]) == (429, "server_overloaded")
        assert ask(server, "/ready", None)[0] == 200
        for connection in opened:
            connection.close()
        server.until(lambda m: m["vllm:num_requests_waiting{engine=0,model_name=a}"] == 0)
        assert ask(server, "/v1/completions", None, tiny())[0] == 200


def test_connections_are_bounded_in_number_and_headers_in_time(model: Path) -> None:
    with Server(f"a={model}", *SIZES, "--max-connections", "2", "--header-timeout", "300ms") as server:
        port = urlsplit(server.url).port
        slow = socket.create_connection(("127.0.0.1", port), timeout=30)
        idle = socket.create_connection(("127.0.0.1", port), timeout=30)
        slow.sendall(b"GET /health HTTP/1.1\r\nX-")
        with socket.create_connection(("127.0.0.1", port), timeout=30) as third:
            answer = third.recv(65536)
            assert answer.startswith(b"HTTP/1.1 503") and b"server_overloaded" in answer
        assert slow.recv(65536).startswith(b"HTTP/1.1 408")
        slow.close()
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(65536).startswith(b"HTTP/1.1 200")
        assert ask(server, "/v1/completions", None, tiny())[0] == 200


def test_fewer_files_mean_fewer_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 8192)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.append(pair))
    assert connections_to_have(500) == 500 and limits == [(1024, 8192)]
    assert connections_to_have(4096) == 4096 and limits[-1] == (4352, 8192)
    assert connections_to_have(100_000) == 8192 - 256 and limits[-1] == (8192, 8192)
