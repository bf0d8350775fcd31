"""Nodes of a real cluster are emptied, stopped and started again under load: no request of anybody fails."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from real_cluster import REPO, SMALL, Cluster, Load, Outcome, Process, complete, post

# What a client may meet at the address of a node that joined and stops: it has not begun, and asks another node. Where
# nodes are started together, nobody meets that: whoever watches them has their sockets.
AWAY = {"ok", "refused 503", "no connection"}


def janus(runtime: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "XDG_RUNTIME_DIR": str(runtime)}
    return subprocess.run(
        [sys.executable, "-m", "janus_server", *arguments], env=environment, cwd=REPO, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip


def drain(cluster: Cluster, node: str, *more: str, by: str = "n0") -> str:
    """What `janus drain` prints, asked of node `by`."""
    ended = janus(cluster.runtime, "drain", node, "--url", cluster.urls[by], *more)
    assert ended.returncode == 0, (ended, cluster.log)
    return ended.stdout


def draining(cluster: Cluster, by: str) -> list[str]:
    """As the leader says; [] while nobody leads."""
    view = json.loads(janus(cluster.runtime, "status", "--json", "--url", cluster.urls[by]).stdout)
    return [name for node in view["nodes"] if node["leads"] for name in node["leads"]["draining"]]


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=20) as reply:
            return bool(reply.status == 200)
    except urllib.error.HTTPError:
        return False


def up(cluster: Cluster, node: str) -> list[str]:
    view = json.loads(janus(cluster.runtime, "status", "--json", "--url", cluster.urls["n0"]).stdout)
    return [one["model"] for seen in view["nodes"] if seen["node"] == node for one in seen["models"]
            if one["stage"] == "active"]  # fmt: skip


def goes_on(cluster: Cluster, load: Load, nodes: list[str]) -> None:
    before = {node: load.done(node) for node in nodes}
    cluster.until(lambda: all(load.done(node) > before[node] + 5 for node in nodes))


def restarted(cluster: Cluster, node: str) -> None:
    """It is told to stop, and whoever watches it starts it again."""
    starts = cluster.log.count(f"{node} | Janus is ready on")
    cluster.kill(node, signal.SIGINT)
    cluster.until(lambda: cluster.log.count(f"{node} | Janus is ready on") > starts)


def keep_asking(url: str, texts: dict[str, str], over: threading.Event, ends: Outcome) -> None:
    """One client, on one connection as long as it is not told that it ends."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    while not over.is_set():
        for model, text in texts.items():
            body = {"model": model, "prompt": "the quick", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                reply = connection.getresponse()
                answer = reply.read()
            except (OSError, http.client.HTTPException) as error:
                ends[type(error).__name__] += 1
                connection.close()
                continue
            said = json.loads(answer)["choices"][0]["text"] if reply.status == 200 else None
            ends["ok" if said == text else f"{reply.status}"] += 1
    connection.close()


def never_failed(ends: dict[str, Outcome], stopped: list[str], log: str) -> None:
    for node, end in ends.items():
        assert set(end) <= (AWAY if node in stopped else {"ok"}), (node, ends, log)


def the_journals_replay(tmp_path: Path, terms: Callable[[], dict[int, str]], runtime: Path) -> None:
    """All of them at once, as a person would who looks for what was decided."""
    files = sorted(str(path) for path in tmp_path.glob("journal.*"))
    assert {Path(file).name for file in files} == {f"journal.{node}.{term}" for term, node in terms().items()}
    ended = janus(runtime, "replay", *files)
    assert ended.returncode == 0, ended
    assert ended.stdout.count("the same decisions") == len(files) + (len(files) > 1)


def test_an_emptied_node_serves_no_more_and_its_clients_notice_nothing(
    models: dict[str, Path], texts: dict[str, str], tmp_path: Path
) -> None:
    """The leader, which runs all models at first; then whoever leads is killed, and the next one still knows."""
    with Cluster(models, tmp_path, "--journal", str(tmp_path / "journal")) as cluster:
        load, first = Load(cluster.urls, texts), cluster.leader
        goes_on(cluster, load, list(cluster.urls))
        by = next(node for node in cluster.urls if node != first)
        assert f"{first} is empty: it can be stopped" in drain(cluster, first, "--wait", by=by)
        assert up(cluster, first) == [] and draining(cluster, by) == [first]
        goes_on(cluster, load, list(cluster.urls))  # its own clients too: their requests run elsewhere
        refused = janus(cluster.runtime, "models", "load", "a", "--url", cluster.urls[first])
        assert refused.returncode == 1 and "is being emptied" in refused.stderr
        restarted(cluster, first)
        goes_on(cluster, load, [node for node in cluster.urls if node != first])
        never_failed(load.stop(), [], cluster.log)
        assert draining(cluster, by) == []  # started again, it serves
        # Of the others one that leads nothing is emptied, and the leader dies.
        leader = cluster.leader
        node, other = (name for name in cluster.urls if name != leader)
        assert "is empty" in drain(cluster, node, "--wait", by=leader)
        load = Load({name: cluster.urls[name] for name in (node, other)}, texts)
        goes_on(cluster, load, [node, other])
        term = max(cluster.terms)
        cluster.kill(leader)
        cluster.until(lambda: max(cluster.terms) > term)
        cluster.until(lambda: draining(cluster, other) == [node])
        assert drain(cluster, node, by=other) == f"{node} is empty: it can be stopped\n"
        assert "serves again" in drain(cluster, node, "--undo", by=other)
        goes_on(cluster, load, [node, other])
        never_failed(load.stop(), [], cluster.log)
        cluster.until(lambda: cluster.log.count(f"{leader} | Janus is ready on") == (3 if leader == first else 2))
        terms = dict(cluster.terms)
    the_journals_replay(tmp_path, lambda: terms, tmp_path)


@pytest.mark.parametrize("emptied", [True, False], ids=["emptied", "stopped"])
def test_every_node_is_restarted_in_its_turn_and_no_request_fails(
    models: dict[str, Path], texts: dict[str, str], tmp_path: Path, emptied: bool
) -> None:
    """Also where it is only told to stop: what it runs is finished first, for its own clients and those of others."""
    with Cluster(models, tmp_path) as cluster:
        first = cluster.leader
        for node in sorted(cluster.urls, key=lambda name: name != first):
            load = Load(cluster.urls, texts)
            goes_on(cluster, load, list(cluster.urls))
            if emptied:
                by = next(name for name in cluster.urls if name != node)
                assert "is empty" in drain(cluster, node, "--wait", by=by)
            restarted(cluster, node)
            goes_on(cluster, load, list(cluster.urls))
            never_failed(load.stop(), [], cluster.log)
            assert complete(cluster.urls[node], "b", tokens=40) == texts["b"]


def test_clients_of_one_address_notice_no_restart_of_its_node(
    models: dict[str, Path], texts: dict[str, str], tmp_path: Path
) -> None:
    """Those that keep their connections, too: each answer says whether there is a next one on its own."""
    with Cluster(models, tmp_path) as cluster:
        urls, over, ends = dict(cluster.urls), threading.Event(), Outcome()
        threads = [threading.Thread(target=keep_asking, args=(url, texts, over, ends), daemon=True)
                   for url in urls.values() for _ in range(2)]  # fmt: skip
        for thread in threads:
            thread.start()
        for node in urls:
            restarted(cluster, node)
            before = ends["ok"]
            cluster.until(lambda before=before: ends["ok"] > before + 20)
        over.set()
        for thread in threads:
            thread.join(60)
        assert set(ends) == {"ok"}, (ends, cluster.log)
        assert cluster.urls == urls


def test_half_of_the_nodes_are_taken_away_and_no_request_fails(
    models: dict[str, Path], texts: dict[str, str], tmp_path: Path
) -> None:
    named = [f"{name}={path}" for name, path in models.items()]
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(models, tmp_path, nodes=2))
        urls, more = dict(cluster.urls), {}
        for node in ("x2", "x3"):
            join = ["--join", cluster.where, "--node", node, "--port", "0", *SMALL]
            more[node] = stack.enter_context(Process([*named, *join], cluster.runtime))
        for node, process in more.items():
            urls[node] = process.said(r"Janus is ready on (\S+)")[1]
        for node in urls:  # each has something to lose
            ended = janus(cluster.runtime, "models", "load", "ab"[len(node) % 2], "--wait", "--url", urls[node])
            assert ended.returncode == 0, ended
        load = Load(urls, texts)
        goes_on(cluster, load, list(urls))
        for node in more:
            assert "is empty" in drain(cluster, node, "--wait")
        goes_on(cluster, load, list(urls))
        for node, process in more.items():
            assert process.stop() == 0, (node, process.log)
        goes_on(cluster, load, list(cluster.urls))
        ends = load.stop()
        never_failed(ends, list(more), cluster.log)
        assert all(re.search(rf"{node}: it is empty", cluster.log) for node in more)


def test_what_was_said_by_force_holds_over_leaders_and_pauses(models: dict[str, Path], tmp_path: Path) -> None:
    """All are emptied: nobody waits for long. Undone while it is stopped, a node serves when it goes on."""
    with Cluster(models, tmp_path, nodes=2) as cluster:
        leader = cluster.leader
        (other,) = set(cluster.urls) - {leader}
        for node in (leader, other):
            drain(cluster, node, "--force", by=leader)
        cluster.until(lambda: not any(map(ready, cluster.urls.values())))  # before, what is still up answers
        status, reply = post(f"{cluster.urls[leader]}/v1/completions", {"model": "a", "prompt": "the", "max_tokens": 1})
        assert status == 503 and "every node is being emptied" in reply.decode()
        cluster.kill(other, signal.SIGSTOP)
        drain(cluster, other, "--undo", by=leader)
        cluster.until(lambda: re.search(rf"{leader} \| .*node {other} is gone", cluster.log))
        cluster.kill(other, signal.SIGCONT)
        cluster.until(lambda: draining(cluster, leader) == [leader] and ready(cluster.urls[other]))
