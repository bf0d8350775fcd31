"""A server that is alone is a cluster of one: what /admin/cluster and `janus status` say of it is what there is."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from server_process import REPO, Server, post, tiny_model

from janus_server import keys
from janus_server.api.cluster import ClusterView
from janus_server.config import serve_config
from janus_server.serve import _reached_at

SETTINGS = """
memory = "16MiB"
page_size = "64KiB"
host_memory = "16MiB"
kernels = "cpu"
threads = 1
[applications.kept]
model = "a"
ttft = "5min"
attain = 0.9
[applications.impossible]
model = "a"
ttft = "1us"
tpot = "1us"
[applications.quiet]
model = "b"
tpot = "50ms"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "janus.toml").write_text(SETTINGS)
    named = [f"{name}={tiny_model(folder / name, seed=seed)}" for seed, name in enumerate("ab")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        for variable in (keys.USER_VARIABLE, keys.ADMIN_VARIABLE):
            patch.delenv(variable, raising=False)
        with Server(*named, "--config", str(folder / "janus.toml")) as server:
            yield server


def get(server: Server, path: str, key: str | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(server.url + path, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def key_of(server: Server) -> str:
    file = Path(os.environ["XDG_RUNTIME_DIR"]) / "janus" / f"{urlsplit(server.url).port}.key"
    key: str = json.loads(file.read_text())["key"]
    return key


def view_of(server: Server) -> ClusterView:
    status, body = get(server, "/admin/cluster", key_of(server))
    assert status == 200
    return msgspec.json.decode(body, type=ClusterView)


def janus(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    return subprocess.run(
        [sys.executable, "-m", "janus_server", *arguments], capture_output=True, text=True, env=environment, cwd=REPO,
        timeout=60,
    )  # fmt: skip


def test_only_an_admin_may_look(server: Server) -> None:
    assert get(server, "/admin/cluster")[0] == 401
    assert get(server, "/admin/cluster", "nonsense")[0] == 401


def test_a_server_alone_leads_itself_and_shows_what_there_is(server: Server) -> None:
    for name, count in (("kept", 3), ("impossible", 2), ("b", 1)):
        for _ in range(count):
            body = json.dumps({"model": name, "prompt": "the", "max_tokens": 4, "ignore_eos": True})
            status, _ = post(f"{server.url}/v1/completions", body.encode())
            assert status == 200
    time.sleep(0.6)  # what was seen is shared for half a second
    view = view_of(server)
    (node,) = view.nodes
    assert view.asked == view.leader == node.node and view.term == 1
    assert node.url == server.url and node.trouble is None and not node.leaving and not node.empty and node.up_s > 0.0
    assert node.page_bytes == 64 << 10 and node.pool_pages == 256
    held = sum(one.weight_pages + one.kv_pages for one in node.models) + node.scratch_pages
    assert held + node.free_pages == node.pool_pages
    assert {one.model: one.stage for one in node.models} == {"a": "active", "b": "active"}
    counts = {one.application: one for one in node.applications}
    assert {name: one.requests for name, one in counts.items()} == {"kept": 3, "impossible": 2, "quiet": 0, "b": 1}
    assert (counts["kept"].ended, counts["kept"].attained) == (3, 3)
    assert (counts["impossible"].ended, counts["impossible"].attained) == (2, 0)
    assert sum(counts["kept"].ttft.counts) == 3
    assert (counts["kept"].ttft_s, counts["kept"].attain, counts["quiet"].tpot_s) == (300.0, 0.9, 0.05)
    assert counts["b"].attain is None and sum(counts["b"].tpot.counts) == 1
    assert node.leads is not None
    assert node.leads.served == {"a": [node.node], "b": [node.node]}
    ends = [(one.kind, one.model) for one in node.leads.decisions]
    assert ("order", "a") in ends and ("done", "b") in ends and ends[0] == ("joined", "")


def test_the_terminal_shows_it_too_and_ends(server: Server) -> None:
    shown = janus("status", "--url", server.url)
    assert shown.returncode == 0, shown.stderr
    assert "n0 leads, term 1; one node" in shown.stdout and "a is active on n0" in shown.stdout
    whole = janus("status", "--json", "--url", server.url)
    assert msgspec.json.decode(whole.stdout, type=ClusterView).asked == "n0"
    listed = janus("models", "--url", server.url)
    assert listed.stdout.startswith("MODEL  STAGE") and "SERVED BY" not in listed.stdout


def test_without_a_server_it_says_so(server: Server) -> None:
    none = janus("status", "--url", "http://127.0.0.1:9")
    assert none.returncode == 1 and "no server answers at http://127.0.0.1:9" in none.stderr


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "10.1.2.3"), ("::", "10.1.2.3")])
def test_a_server_on_every_network_is_shown_where_its_peers_reach_it(host: str, shown: str, tmp_path: Path) -> None:
    config = msgspec.structs.replace(serve_config([f"a={tiny_model(tmp_path / 'a')}"]), host=host, peer_host="10.1.2.3")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert _reached_at(config, listening) == f"http://{shown}:{listening.getsockname()[1]}"
