"""Three real nodes are one server: any of them answers for every model, and says what a single one would."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_cluster import SMALL, Cluster, Load, Process, complete, open_requests, post, stream


@pytest.fixture(scope="module")
def cluster(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(models, tmp_path_factory.mktemp("run")) as cluster:
        yield cluster


def test_any_port_answers_for_every_model_as_a_single_node_does(cluster: Cluster, texts: dict[str, str]) -> None:
    assert len(set(cluster.urls.values())) == 3
    for url in cluster.urls.values():
        for model, text in texts.items():
            assert complete(url, model, tokens=40) == text
            assert stream(url, model, tokens=40) == (text, "ok")


def test_what_an_answer_has_beside_its_text_crosses_nodes_too(cluster: Cluster) -> None:
    """Several prompts and choices, log probabilities, stop strings, an answer that follows a grammar, the usage."""
    replies = []
    for url in cluster.urls.values():
        body = {"model": "a", "prompt": ["the fox", "the dog jumps"], "n": 2, "max_tokens": 8, "temperature": 0.7,
                "seed": 5, "logprobs": 2, "echo": True}  # fmt: skip
        status, whole = post(f"{url}/v1/completions", body)
        assert status == 200, whole
        stopped = {"model": "b", "prompt": "the", "max_tokens": 60, "temperature": 0, "stop": ["own", "x"]}
        _, stop = post(f"{url}/v1/completions", stopped)
        shaped = {
            "model": "b",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 60,
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 22]}}},
        }
        status, shape = post(f"{url}/v1/chat/completions", shaped)
        assert json.loads(json.loads(shape)["choices"][0]["message"]["content"]) in (1, 22)
        _, vector = post(f"{url}/v1/embeddings", {"model": "a", "input": "the quick brown fox"})
        found = json.loads(whole)
        replies.append([
            found["choices"], found["usage"], json.loads(stop)["choices"], json.loads(vector)["data"],
        ])  # fmt: skip
    assert replies[0] == replies[1] == replies[2]


def test_a_client_that_leaves_is_forgotten_wherever_its_request_runs(cluster: Cluster) -> None:
    import socket

    for url in cluster.urls.values():
        host, _, port = url.removeprefix("http://").partition(":")
        body = json.dumps(
            {"model": "a", "prompt": "the", "max_tokens": 480, "stream": True, "ignore_eos": True}
        ).encode()
        with socket.create_connection((host, int(port)), 20) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            client.recv(4096)
    cluster.until(lambda: all(open_requests(url) == 0 for url in cluster.urls.values()), 30)


def test_a_node_joins_later_and_is_of_use(cluster: Cluster, models: dict[str, Path], texts: dict[str, str]) -> None:
    named = [f"{name}={path}" for name, path in models.items()]
    with Process([*named, "--join", cluster.where, "--node", "late", "--port", "0", *SMALL], cluster.runtime) as late:
        url = late.said(r"Janus is ready on (\S+)")[1]
        for model, text in texts.items():
            assert complete(url, model, tokens=40) == text
        assert late.stop() == 0
    assert complete(cluster.urls["n0"], "a", tokens=40) == texts["a"]


def test_a_second_node_of_one_name_and_one_with_another_secret_are_refused(
    cluster: Cluster, models: dict[str, Path], texts: dict[str, str], tmp_path: Path
) -> None:
    named = [f"{name}={path}" for name, path in models.items()]
    join = ["--join", cluster.where, "--port", "0", *SMALL]
    with Process([*named, *join, "--node", "n1"], cluster.runtime) as second:
        assert second.process.wait(60) == 2
        second.until(lambda: "n1" in second.log and "runs" in second.log)
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    with Process([*named, *join, "--node", "stranger", "--cluster-secret", str(secret)], cluster.runtime) as stranger:
        cluster.said("stranger was refused: .*secret")
        for url in cluster.urls.values():
            assert complete(url, "a", tokens=40) == texts["a"]
        assert stranger.process.poll() is None
        assert "Janus is ready" not in stranger.log


def test_all_nodes_end_together_once_their_requests_are_done(
    models: dict[str, Path], texts: dict[str, str], tmp_path: Path
) -> None:
    with Cluster(models, tmp_path) as cluster:
        load = Load(cluster.urls, texts)
        cluster.until(lambda: all(load.done(node) > 3 for node in cluster.urls))
        assert cluster.stop(signal.SIGTERM) == 0
        ends = load.stop()
    for node, end in ends.items():
        assert set(end) <= {"ok", "refused 503", "no connection"}, (node, end)


def test_a_node_with_other_files_under_a_name_is_refused(
    cluster: Cluster, models: dict[str, Path], texts: dict[str, str]
) -> None:
    named = [f"a={models['b']}", f"b={models['b']}"]
    with Process([*named, "--join", cluster.where, "--node", "odd", "--port", "0", *SMALL], cluster.runtime) as odd:
        assert odd.process.wait(60) == 2
        odd.until(lambda: "node odd has other files of a than node n" in odd.log)
    for url in cluster.urls.values():
        assert complete(url, "a", tokens=40) == texts["a"]


def test_nodes_speak_tls_where_they_are_given_certificates(
    models: dict[str, Path], texts: dict[str, str], tmp_path: Path
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificates can be made")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=node".split()
    subprocess.run([*make, "-keyout", "key.pem", "-out", "node.pem"], cwd=tmp_path, check=True, capture_output=True)
    certificate = str(tmp_path / "node.pem")  # its own CA
    tls = ("--peer-certfile", certificate, "--peer-keyfile", str(tmp_path / "key.pem"), "--peer-cafile", certificate)
    (tmp_path / "run").mkdir()
    with Cluster(models, tmp_path / "run", *tls, nodes=2) as cluster:
        for url in cluster.urls.values():
            assert complete(url, "a", tokens=40) == texts["a"]
