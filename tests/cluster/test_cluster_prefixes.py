"""Three real nodes, two models on each: the next turn of a conversation runs where the one before did.

Requests that come one by one to idle nodes would all go to the same node otherwise.
"""

from __future__ import annotations

import concurrent.futures
import json
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_cluster import Cluster, post

from janus_server import localkey

# A page holds 85 tokens, a character of such a text is one: three pages of the first turn are full, and three blocks.
TURN, LEAST_CACHED = 300, 192
# A node tells what it holds twice a second.
TOLD_S = 1.5


@pytest.fixture
def cluster(models: dict[str, Path], tmp_path: Path) -> Iterator[Cluster]:
    pinned = "".join(f'[models.{name}]\npath = "{path}"\npin = true\n' for name, path in models.items())
    (tmp_path / "janus.toml").write_text(pinned)  # else the fleet sees no need for three of each
    with Cluster({}, tmp_path, "--config", str(tmp_path / "janus.toml")) as cluster:
        for url in cluster.urls.values():
            for model in models:
                _admin(cluster, f"{url}/admin/models/{model}/load", b"")
        cluster.until(lambda: all(_active(cluster, url) == set(models) for url in cluster.urls.values()))
        yield cluster


def _admin(cluster: Cluster, url: str, body: bytes | None = None) -> bytes:
    found = localkey.find([cluster.runtime / "janus"], int(urllib.parse.urlsplit(url).port or 0))
    assert found is not None
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {found.key}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.read()
    except urllib.error.HTTPError as error:  # it is there already
        return error.read()


def _active(cluster: Cluster, url: str) -> set[str]:
    """Models on the node, as itself sees it."""
    found = json.loads(_admin(cluster, f"{url}/admin/models"))["data"]
    return {one["model"] for one in found if one["stage"] == "active"}


def _text(seed: int, n: int = TURN) -> str:
    """No two words of it make a token."""
    return "".join(random.Random(seed).choices("bcdfghjklm", k=n))


def _ask(url: str, model: str, prompt: str, tokens: int = 8) -> tuple[str, int]:
    """What it says, and how many tokens of the prompt were cached where it ran."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    status, reply = post(f"{url}/v1/completions", body)
    assert status == 200, reply
    found = json.loads(reply)
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def _hits(url: str, model: str) -> float:
    """Tokens that came from the node's caches so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as reply:
        lines = reply.read().decode().splitlines()
    name = "vllm:prefix_cache_hits_total{"
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and f'"{model}"' in line)


def _where(urls: dict[str, str], model: str, front: str, prompt: str) -> tuple[str | None, int]:
    """The node whose cache a prompt was found in, and how much of it."""
    before = {node: _hits(url, model) for node, url in urls.items()}
    _, cached = _ask(urls[front], model, prompt)
    after = {node: _hits(url, model) for node, url in urls.items()}
    return next((node for node in urls if after[node] > before[node]), None), cached


def _begin(urls: dict[str, str], seeds: range) -> dict[int, str]:
    """First turns of conversations that come at once, so that they are spread over the nodes; what each then asks."""
    fronts = list(urls.values())

    def first(seed: int) -> str:
        prompt = _text(seed)
        return prompt + _ask(fronts[seed % len(fronts)], "ab"[seed % 2], prompt)[0] + _text(-seed - 1, 20)

    with concurrent.futures.ThreadPoolExecutor(len(seeds)) as threads:
        return dict(zip(seeds, threads.map(first, seeds), strict=True))


def test_a_conversation_stays_where_it_began_and_goes_on_elsewhere_when_that_is_gone(cluster: Cluster) -> None:
    urls, homes = dict(cluster.urls), {}
    turns: dict[int, str] = {}
    for batch in range(6):  # until more than one node has some
        turns |= _begin(urls, range(12 * batch, 12 * batch + 12))
        time.sleep(TOLD_S)
        for seed in range(12 * batch, 12 * batch + 12):
            front = sorted(urls)[(seed + 1) % 3]
            homes[seed], cached = _where(urls, "ab"[seed % 2], front, turns[seed])
            assert cached >= LEAST_CACHED, f"conversation {seed} was not sent to where it began"
        if len({home for home in homes.values() if home != cluster.leader}) > 1 and cluster.leader in homes.values():
            break
    assert len(set(homes.values())) > 1, "every conversation began on one node, where the second turns go anyway"

    lost = cluster.leader
    texts = {seed: _ask(urls[homes[seed]], "ab"[seed % 2], turns[seed])[0] for seed in turns if homes[seed]}
    cluster.kill(lost)
    terms = max(cluster.terms)
    cluster.until(lambda: max(cluster.terms) > terms)
    time.sleep(TOLD_S)
    left = {node: url for node, url in urls.items() if node != lost}
    fronts = _in_turn(left)
    stay = [seed for seed, home in homes.items() if home != lost][-6:]
    moved = [seed for seed, home in homes.items() if home == lost][-4:]
    for seed in stay:
        home, cached = _where(left, "ab"[seed % 2], next(fronts), turns[seed])
        assert cached >= LEAST_CACHED and home == homes[seed], "a new leader is told what is held where"
    for seed in moved:
        assert _ask(left[next(fronts)], "ab"[seed % 2], turns[seed])[0] == texts[seed]
    time.sleep(TOLD_S)
    for seed in moved:
        home, cached = _where(left, "ab"[seed % 2], next(fronts), turns[seed])
        assert cached >= LEAST_CACHED and home in left, "from now on it has another home"


def _in_turn(nodes: dict[str, str]) -> Iterator[str]:
    while True:
        yield from nodes
