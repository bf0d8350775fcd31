"""Three real nodes, each of which shows the whole cluster, and brings an operator's wish to whoever leads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from real_cluster import REPO, Cluster, complete

from janus_server import localkey
from janus_server.api.cluster import ClusterView, Decision, ModelView, NodeView, decisions_of
from janus_server.cluster.party import SILENT


@pytest.fixture(scope="module")
def cluster(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(models, tmp_path_factory.mktemp("run")) as cluster:
        yield cluster


def call(cluster: Cluster, node: str, path: str, method: str = "GET") -> tuple[int, Any]:
    url = cluster.urls[node]
    offered = localkey.find((cluster.runtime / "janus",), urlsplit(url).port or 0)
    assert offered is not None
    request = urllib.request.Request(url + path, method=method, headers={"Authorization": f"Bearer {offered.key}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def view_of(cluster: Cluster, node: str) -> ClusterView:
    status, body = call(cluster, node, "/admin/cluster")
    assert status == 200, body
    return msgspec.convert(body, ClusterView)


def seen(view: ClusterView, node: str) -> NodeView | None:
    return next((one for one in view.nodes if one.node == node), None)


def model_on(view: ClusterView, node: str, model: str) -> ModelView:
    found = seen(view, node)
    assert found is not None
    return next(one for one in found.models if one.model == model)


def others(cluster: Cluster) -> list[str]:
    return sorted(set(cluster.urls) - {cluster.leader})


def janus(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "XDG_RUNTIME_DIR": str(cluster.runtime)}
    return subprocess.run(
        [sys.executable, "-m", "janus_server", *arguments], capture_output=True, text=True, env=environment, cwd=REPO,
        timeout=60,
    )  # fmt: skip


def test_every_node_shows_the_same_cluster(cluster: Cluster) -> None:
    for name, url in cluster.urls.items():
        complete(url, "a", tokens=4)

        def told(name: str = name) -> ClusterView | None:
            """What was seen before is shared for half a second."""
            view = view_of(cluster, name)
            one = seen(view, name)
            return view if one is not None and any(app.requests for app in one.applications) else None

        view = cluster.until(told)
        assert (view.asked, view.leader) == (name, cluster.leader)
        assert {one.node: one.url for one in view.nodes} == cluster.urls
        assert not any(one.trouble for one in view.nodes)
        assert [one.node for one in view.nodes if one.leads is not None] == [cluster.leader]
        assert len({one.host for one in view.nodes}) == 1 and view.nodes[0].host
        leads = next(one.leads for one in view.nodes if one.leads is not None)
        assert set(leads.served) == {"a", "b"} and all(leads.served.values())
        for model, nodes in leads.served.items():
            assert all(model_on(view, node, model).stage == "active" for node in nodes)
        assert {one.node for one in leads.decisions if one.kind == "joined"} == set(cluster.urls)
        for one in view.nodes:
            held = sum(model.weight_pages + model.kv_pages for model in one.models) + one.scratch_pages
            assert held + one.free_pages == one.pool_pages


def test_a_wish_on_any_node_has_the_leaders_own_answer(cluster: Cluster) -> None:
    follower = others(cluster)[0]
    assert call(cluster, follower, "/admin/models/a/evict?wait=20", "POST")[0] == 200
    status, refused = call(cluster, follower, "/admin/models/a/sleep", "POST")
    assert status == 409 and "nothing to sleep" in refused["error"]["message"]
    status, told = call(cluster, follower, "/admin/models/a/load?wait=30", "POST")
    assert (status, told["state"]["stage"]) == (200, "active")
    status, told = call(cluster, follower, "/admin/models/a/pin", "POST")
    assert status == 200 and told["why"] == "a is pinned and active"
    for name in cluster.urls:
        cluster.until(lambda name=name: model_on(view_of(cluster, name), follower, "a").pinned)
    listed = janus(cluster, "models", "--url", cluster.urls[follower])
    line = next(line for line in listed.stdout.splitlines() if line.startswith("a "))
    assert follower in line and "pinned" in line and f"ON {follower}" in listed.stdout
    assert call(cluster, follower, "/admin/models/a/unpin", "POST")[0] == 200
    shown = janus(cluster, "status", "--url", cluster.urls[follower])
    assert f"{cluster.leader} leads" in shown.stdout and "3 of 3 nodes answer" in shown.stdout
    assert call(cluster, follower, "/admin/models/ghost/load", "POST")[0] == 404


def test_a_node_that_is_stopped_is_shown_as_silent_then_as_gone(cluster: Cluster) -> None:
    stopped, asked = others(cluster)
    url = cluster.urls[stopped]
    os.kill(pid := cluster.pid(stopped), signal.SIGSTOP)
    try:
        silent = cluster.until(lambda: (one := seen(view_of(cluster, asked), stopped)) and one.trouble and one)
        assert silent.trouble == SILENT and silent.url == url and not silent.models
        cluster.until(lambda: seen(view_of(cluster, asked), stopped) is None)
        assert all(one.trouble is None for one in view_of(cluster, asked).nodes)
    finally:
        os.kill(pid, signal.SIGCONT)
    cluster.until(lambda: (one := seen(view_of(cluster, asked), stopped)) and one.trouble is None and one.models)


def test_a_wish_while_the_leader_is_stopped_is_answered_all_the_same(cluster: Cluster) -> None:
    """By the next one, or with a sentence: nobody waits without end."""
    follower, leader = others(cluster)[0], cluster.leader
    os.kill(pid := cluster.pid(leader), signal.SIGSTOP)
    try:
        status, body = call(cluster, follower, "/admin/models/b/load?wait=30", "POST")
        assert status == 200 or (status, body["error"]["code"]) == (503, "no_leader"), body

        def led_anew() -> bool:
            view = view_of(cluster, follower)
            return view.leader not in (None, leader) and any(one.leads is not None for one in view.nodes)

        cluster.until(led_anew)
        successor = view_of(cluster, follower).leader
        cluster.until(lambda: call(cluster, follower, "/admin/models/b/load?wait=30", "POST")[0] == 200)
        assert model_on(view_of(cluster, follower), follower, "b").stage == "active"
    finally:
        os.kill(pid, signal.SIGCONT)

    def told() -> list[Decision] | None:
        """By both: the one that led before is there again, and knows what it decided."""
        view = view_of(cluster, follower)
        before = seen(view, leader)
        return decisions_of(view) if before is not None and before.decided else None

    decisions = cluster.until(told)
    assert [one.time for one in decisions] == sorted(one.time for one in decisions)
    starts = [one for one in decisions if one.kind == "leads"]
    assert {leader, successor} <= {one.node for one in starts}
    assert starts[0].why == f"{leader} leads, term {starts[0].term}"
    after = next(one for one in starts if one.node == successor)
    gone = [one for one in decisions if one.kind == "left" and one.node == leader and one.term == after.term]
    assert f"{leader} is gone" in after.why or gone, [one.why for one in decisions]
    assert len({msgspec.structs.astuple(one) for one in decisions}) == len(decisions)
