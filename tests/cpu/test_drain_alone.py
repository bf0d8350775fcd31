"""A server that is alone cannot be emptied, and says so; its routes want the admin key, as all others do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import REPO, Server, tiny_model

from janus_server import keys

FLAGS = ("--memory", "16MiB", "--page-size", "64KiB", "--host-memory", "16MiB", "--kernels", "cpu", "--threads", "1")
KEY = "k" * 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        patch.setenv(keys.ADMIN_VARIABLE, KEY)
        with Server(f"a={tiny_model(tmp_path_factory.mktemp('models') / 'a')}", *FLAGS, "--node", "solo") as server:
            yield server


def ask(server: Server, path: str, key: str | None = KEY) -> tuple[int, dict[str, object]]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, b"", headers), timeout=20) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]


@pytest.mark.parametrize("force", ["", "?force=true"])
def test_the_only_node_is_not_emptied(server: Server, force: str) -> None:
    status, error = ask(server, f"/admin/nodes/solo/drain{force}")
    assert (status, error["code"]) == (409, "conflict") and "it is the only node" in str(error["message"])
    assert ask(server, "/admin/nodes/solo/serve") == (
        200, {"node": "solo", "duty": "serve", "why": "solo serves: it takes models and requests"},
    )  # fmt: skip


def test_nonsense_is_refused(server: Server) -> None:
    assert ask(server, "/admin/nodes/solo/drain?force=perhaps")[0] == 400
    status, error = ask(server, "/admin/nodes/ghost/drain")
    assert status == 409 and error["message"] == "there is no node ghost; there are: solo"
    assert ask(server, "/admin/nodes/solo/drain", None)[0] == 401
    assert ask(server, f"/admin/nodes/{'n' * 5000}/drain")[0] == 409


def test_the_command_says_the_same(server: Server) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    ended = subprocess.run(
        [sys.executable, "-m", "janus_server", "drain", "solo", "--wait", "--url", server.url], env=environment,
        capture_output=True, text=True, timeout=60, cwd=Path(REPO),
    )  # fmt: skip
    assert ended.returncode == 1 and ended.stderr.startswith("janus: solo cannot be emptied, it is the only node")


def test_the_log_names_the_node_unless_a_stranger_wrote_it(server: Server) -> None:
    """The last one here: the log is read once the server has stopped."""
    assert ask(server, "/admin/nodes/n7%0Aforged/drain")[0] == 409
    assert ask(server, "/admin/nodes/stranger/drain", None)[0] == 401
    assert server.stop() == 0
    assert r"node 'n7\nforged'" in server.log and "\nforged" not in server.log and "stranger" not in server.log
