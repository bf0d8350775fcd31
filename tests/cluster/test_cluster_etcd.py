"""A cluster whose coordinator is a real etcd: nodes serve on while it is away, and are led again once it is back."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from etcd_server import etcd_servers
from real_cluster import SMALL, Cluster, Load, Process, complete

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


def test_several_hosts_need_a_secret_of_their_own(models: dict[str, Path], tmp_path: Path) -> None:
    named = [f"{name}={path}" for name, path in models.items()]
    with Process([*named, "--join", "etcd://127.0.0.1:1/tests", "--port", "0", *SMALL], tmp_path) as node:
        assert node.process.wait(60) == 2
        node.until(lambda: "--cluster-secret" in node.log)
