"""Three real nodes compute prompts for each other: texts are those of one node alone, whoever is killed meanwhile."""

from __future__ import annotations

import itertools
import json
import re
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_cluster import Cluster, Outcome, complete, judged, open_requests, stream
from server_process import Server, tiny_model

# A page holds 21 tokens of these models; what nodes can cache is a few of the prompts.
FLAGS = ("--page-size", "16KiB", "--memory", "5MiB", "--max-model-len", "1000")
PROMPTS = [f"{number} foxes: " + "the quick brown fox jumps over the lazy dog and " * 50 for number in range(8)]


@pytest.fixture(scope="module")
def long_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / name, seed=seed, max_position_embeddings=2048) for seed, name in enumerate("ab")}


@pytest.fixture(scope="module")
def long_texts(long_models: dict[str, Path]) -> dict[str, list[str]]:
    """What one node alone answers."""
    small = ("--kernels", "cpu", "--threads", "1", *FLAGS)
    with Server(*(f"{name}={path}" for name, path in long_models.items()), *small) as server:
        return {name: [complete(server.url, name, prompt, tokens=30) for prompt in PROMPTS] for name in long_models}


@pytest.fixture
def cluster(long_models: dict[str, Path], tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(long_models, tmp_path, *FLAGS, "--pd-split", "always") as cluster:
        for url in cluster.urls.values():
            everywhere(cluster, url, long_models)
        yield cluster


def everywhere(cluster: Cluster, url: str, models: dict[str, Path]) -> None:
    """Every model on that node, to stay."""
    file = next(cluster.runtime.rglob(f"{url.rpartition(':')[2]}.key"))
    key = json.loads(file.read_text())["key"]

    def wished(model: str, wish: str) -> bool:
        """False where something else happens to the model just now."""
        headers = {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{url}/admin/models/{model}/{wish}?wait=60", b"", headers)
        try:
            with urllib.request.urlopen(request, timeout=90) as reply:
                return bool(reply.status == 200)
        except urllib.error.HTTPError as error:
            print(wish, model, url, error.read())
            assert error.code in (409, 503)
            return False

    for model in models:
        for wish in ("pin", "load"):
            cluster.until(lambda: wished(model, wish))  # noqa: B023


def outcomes(url: str) -> dict[str, int]:
    """Prompts of requests that ran on this node and that others were to compute, by what came of it."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as reply:
        text = reply.read().decode()
    found = re.findall(r'^janus_prompts_elsewhere_total\{outcome="([^"]+)"\} (\S+)', text, re.MULTILINE)
    return {outcome: int(float(count)) for outcome, count in found}


class Asking:
    """Clients of every node, each with the prompts in turn, until `stop`."""

    def __init__(self, cluster: Cluster, texts: dict[str, list[str]]) -> None:
        self.ends = {node: Outcome() for node in cluster.urls}
        self._cluster = cluster
        self._over = threading.Event()
        self._turns = itertools.count()
        self._threads = [
            threading.Thread(target=self._ask, args=(node, model, answers), daemon=True)
            for node in self.ends
            for model, answers in texts.items()
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, node: str, model: str, texts: list[str]) -> None:
        while not self._over.is_set():
            turn = next(self._turns) % len(PROMPTS)
            expected = texts[turn]
            end = judged(*stream(self._cluster.urls[node], model, PROMPTS[turn], tokens=30), expected)
            self.ends[node][end] += 1
            if end != "ok":
                self._over.wait(0.1)

    def stop(self) -> dict[str, Outcome]:
        self._over.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a request never ended"
        return self.ends


def pages(url: str) -> dict[str, float]:
    """Held, by owner and kind."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as reply:
        text = reply.read().decode()
    found = re.findall(r'^janus_pool_pages\{kind="(\w+)",model_name="([^"]+)"\} (\S+)', text, re.MULTILINE)
    return {f"{model} {kind}": float(count) for kind, model, count in found}


def test_prompts_are_computed_elsewhere_and_nodes_may_die_of_it(
    cluster: Cluster, long_models: dict[str, Path], long_texts: dict[str, list[str]]
) -> None:
    """Each node is killed in turn, computing for others and running requests whose prompts others computed."""
    asking = Asking(cluster, long_texts)
    cluster.until(lambda: sum(outcomes(url)["brought"] for url in cluster.urls.values()) > 20)
    for node in sorted(cluster.urls):
        others = [other for other in cluster.urls if other != node]
        before = {other: asking.ends[other]["ok"] for other in others}
        cluster.kill(node, signal.SIGKILL)
        cluster.until(lambda: all(asking.ends[other]["ok"] > before[other] + 3 for other in others))  # noqa: B023
        cluster.until(lambda: cluster.log.count(f"{node} | Janus is ready on") == 2)  # noqa: B023
        everywhere(cluster, cluster.urls[node], long_models)
    ends = asking.stop()
    for node, found in ends.items():
        assert set(found) <= {"ok", "cut", "refused 503", "no connection"}, ends
        assert found["ok"] > 10, (node, ends)
    urls = list(cluster.urls.values())
    assert sum(outcomes(url)["brought"] for url in urls) > 0
    cluster.until(lambda: all(open_requests(url) == 0 for url in urls))
    cluster.until(lambda: not any("(arriving) kv" in pages(url) for url in urls))
    for url in urls:
        for model, texts in long_texts.items():
            assert [complete(url, model, prompt, tokens=30) for prompt in PROMPTS] == texts
