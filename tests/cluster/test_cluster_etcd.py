"""A cluster whose coordinator is a real etcd: nodes serve on while it is away, and are led again once it is back."""

from __future__ import annotations

import signal
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from etcd_server import etcd_servers
from real_cluster import SMALL, Cluster, Load, Process, complete

from janus_server import localkey
from janus_server.api.cluster import ClusterView

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
from server_process import tiny_model


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Path]:
    return {"a": tiny_model(tmp_path / "a", seed=0)}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef" * 4)
    file.chmod(0o600)
    return file


def test_etcd_is_away_for_a_while(models: dict[str, Path], secret: Path, tmp_path: Path) -> None:
    """Longer than every lease: nobody leads, and no request fails for it."""
    with etcd_servers(tmp_path) as (etcd,):
        join = f"etcd://{etcd.endpoint}/tests"
        (tmp_path / "run").mkdir()
        with Cluster(models, tmp_path / "run", "--join", join, "--cluster-secret", str(secret), nodes=2) as cluster:
            text = complete(cluster.urls["n0"], "a", tokens=40)
            load = Load(cluster.urls, {"a": text})
            cluster.until(lambda: all(load.done(node) > 3 for node in cluster.urls))
            leader, term = cluster.leader, max(cluster.terms)
            etcd.kill()
            cluster.said(f"{leader} leads no more, term {term} is over")
            before = {node: load.done(node) for node in cluster.urls}
            time.sleep(3.0)
            cluster.until(lambda: all(load.done(node) > before[node] + 3 for node in cluster.urls))
            etcd.start()
            etcd.wait()
            cluster.until(lambda: max(cluster.terms) > term)
            before = {node: load.done(node) for node in cluster.urls}
            cluster.until(lambda: all(load.done(node) > before[node] + 3 for node in cluster.urls))
            for node, end in load.stop().items():
                assert set(end) == {"ok"}, (node, end)


def test_etcd_is_stopped_for_longer_than_the_leases(models: dict[str, Path], secret: Path, tmp_path: Path) -> None:
    """All nodes register anew, one after the other: nothing that runs or stands on a node is touched by that.

    Meanwhile each of them says that nobody leads.
    """
    models = {**models, "b": tiny_model(tmp_path / "b", seed=1)}
    with etcd_servers(tmp_path) as (etcd,):
        join = f"etcd://{etcd.endpoint}/tests"
        (tmp_path / "run").mkdir()
        with Cluster(models, tmp_path / "run", "--join", join, "--cluster-secret", str(secret), nodes=2) as cluster:
            texts = {model: complete(cluster.urls["n0"], model, tokens=480) for model in models}
            load = Load(cluster.urls, texts, tokens=480)
            cluster.until(lambda: all(load.done(node) > 1 for node in cluster.urls))
            began, stood = len(cluster.log), [stages(cluster, node) for node in cluster.urls]
            for _ in range(2):
                etcd.send(signal.SIGSTOP)
                try:
                    cluster.until(lambda: not any(looked(cluster, node).leader for node in cluster.urls))
                    time.sleep(1.0)
                finally:
                    etcd.send(signal.SIGCONT)
                cluster.until(lambda: all(looked(cluster, node).leader == cluster.leader for node in cluster.urls))
                time.sleep(2.5)  # a new leader would have moved everything by then
            assert [stages(cluster, node) for node in cluster.urls] == stood, cluster.log[began:]
            ends, log = load.stop(), cluster.log[began:]
            for node, end in ends.items():
                assert set(end) == {"ok"}, (node, end)
            assert "goes on elsewhere" not in log and "is gone" not in log, log
            assert len(cluster.terms) >= 3 and "is registered again" in log


def looked(cluster: Cluster, node: str) -> ClusterView:
    url = cluster.urls[node]
    offered = localkey.find((cluster.runtime / "janus",), urlsplit(url).port or 0)
    assert offered is not None
    request = urllib.request.Request(f"{url}/admin/cluster", headers={"Authorization": f"Bearer {offered.key}"})
    with urllib.request.urlopen(request, timeout=20) as reply:
        return msgspec.json.decode(reply.read(), type=ClusterView)


def stages(cluster: Cluster, node: str) -> dict[str, str]:
    """Where its models stand, as it says itself."""
    view = next(one for one in looked(cluster, node).nodes if one.node == node)
    return {one.model: one.stage for one in view.models}


def test_several_hosts_need_a_secret_of_their_own(models: dict[str, Path], tmp_path: Path) -> None:
    named = [f"{name}={path}" for name, path in models.items()]
    with Process([*named, "--join", "etcd://127.0.0.1:1/tests", "--port", "0", *SMALL], tmp_path) as node:
        assert node.process.wait(60) == 2
        node.until(lambda: "--cluster-secret" in node.log)
