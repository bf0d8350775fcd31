"""Servers of one user on one machine that share their weights: over HTTP, with the terminal, by real signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fork_node import Process, books_are_right, generate, opened, until
from server_process import REPO, Server, post, tiny_model

from janus_server import keys
from janus_server.model.checkpoint import contents_of, open_checkpoint
from janus_server.operate import End
from janus_server.orders import Stage, Wish
from janus_server.transfer.look import look
from janus_server.transfer.rundir import Peering

PAGE = ("--page-size", "64KiB", "--kernels", "cpu", "--threads", "1", "--host-memory", "16MiB")
ROOM_FOR_ALL = ("--memory", "16MiB", *PAGE)
ROOM_FOR_ONE = ("--memory", "1088KiB", *PAGE)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / name, seed=seed) for seed, name in enumerate("ab")}


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the servers and commands of a test meet, instead of the user's own folder."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for variable in (keys.USER_VARIABLE, keys.ADMIN_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    yield tmp_path / "janus"


class Admin:
    """The admin routes of a server that left its key in the run folder."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.url = server.url
        self._key = json.loads((folder / f"{urlsplit(server.url).port}.key").read_text())["key"]

    def call(self, path: str, method: str = "GET", body: bytes | None = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self._key}"}
        request = urllib.request.Request(self.url + path, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def fork(self, model: str, source: str | None = None, wait_s: float = 30) -> tuple[int, Any]:
        body = b"" if source is None else json.dumps({"source": source}).encode()
        return self.call(f"/admin/models/{model}/fork?wait={wait_s}", "POST", body)

    def wish(self, model: str, wish: str) -> None:
        assert self.call(f"/admin/models/{model}/{wish}?wait=30", "POST")[0] == 200

    def model(self, name: str) -> Any:
        return next(one for one in self.call("/admin/models")[1]["data"] if one["model"] == name)

    def peers(self) -> dict[str, Any]:
        return {one["node"]: one for one in self.call("/admin/peers")[1]["data"]}

    def until(self, name: str, check: Any, limit_s: float = 30) -> Any:
        end = time.monotonic() + limit_s
        while not check(found := self.model(name)):
            assert time.monotonic() < end, found
            time.sleep(0.05)
        return found


def answer(server: Server, model: str) -> str:
    body = {"model": model, "prompt": "the quick", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    status, reply = post(f"{server.url}/v1/completions", json.dumps(body).encode())
    assert status == 200, reply
    text: str = json.loads(reply)["choices"][0]["text"]
    return text


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "janus_server", *arguments], capture_output=True, text=True, timeout=60, cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)}, check=False,
    )  # fmt: skip


def test_the_second_server_starts_by_copying_and_both_say_the_same(models: dict[str, Path], run_folder: Path) -> None:
    a, b = (f"{name}={path}" for name, path in models.items())
    with Server(a, *ROOM_FOR_ALL, "--node", "n0") as first, Server(a, b, *ROOM_FOR_ALL, "--node", "n1") as second:
        one, two = Admin(first, run_folder), Admin(second, run_folder)
        state = two.model("a")
        assert (state["stage"], state["origin"], state["source"]) == ("active", "fork", "n0")
        assert (two.model("b")["origin"], two.model("b")["source"]) == ("load", None)
        assert answer(first, "a") == answer(second, "a")
        peers = one.peers()
        assert list(peers) == ["n1"] and peers["n1"]["trouble"] is None
        held = {m["model"]: m["why"] for m in peers["n1"]["models"]}
        assert held == {"a": None, "b": "this node has no model of that name"}
        listed = command("models", "--url", second.url)
        assert (listed.returncode, listed.stderr) == (0, "")
        assert "from n0" in listed.stdout and "this is node n1; its peers:\n  n0  has a\n" in listed.stdout
        second.read_until("ready on") if "ready on" not in second.log else None
        assert first.stop() == second.stop() == 0
        assert f"node n1: shares its weights with your other nodes in {run_folder}" in second.log
        assert sorted(path.name for path in run_folder.glob("*.sock")) == []


def test_a_model_that_is_wanted_comes_from_whoever_holds_it_at_that_moment(
    models: dict[str, Path], run_folder: Path
) -> None:
    a = f"a={models['a']}"
    with Server(a, *ROOM_FOR_ALL, "--node", "n0") as first, Server(a, *ROOM_FOR_ALL, "--node", "n1") as second:
        one, two = Admin(first, run_folder), Admin(second, run_folder)
        expected = answer(first, "a")
        two.wish("a", "evict")
        assert answer(second, "a") == expected
        assert two.model("a")["source"] == "n0"
        two.wish("a", "sleep")  # its own copy is nearer
        assert answer(second, "a") == expected
        assert (two.model("a")["origin"], two.model("a")["source"]) == ("wake", None)
        two.wish("a", "evict")
        one.wish("a", "evict")  # nobody holds it now
        assert answer(second, "a") == expected
        assert two.model("a")["origin"] == "load"
        assert one.fork("a", "n1")[1]["why"] == "a is active, copied from n1"
        assert one.fork("a", "n1")[0] == 200  # once more: nothing to do
        one.wish("a", "evict")
        status, body = one.fork("a")  # a peer is chosen
        assert (status, body["state"]["source"]) == (200, "n1")
        assert answer(first, "a") == expected


def test_what_cannot_be_copied_is_said_with_what_to_do(models: dict[str, Path], run_folder: Path) -> None:
    a, b = (f"{name}={path}" for name, path in models.items())
    other = f"b={models['a']}"  # other weights under that name, with equal headers
    with (
        Server(a, b, *ROOM_FOR_ALL, "--node", "n0", "--dtype", "bfloat16") as first,
        Server(a, other, *ROOM_FOR_ALL, "--node", "n1") as second,
    ):
        one, two = Admin(first, run_folder), Admin(second, run_folder)
        for model in ("a", "b"):
            assert two.model(model)["origin"] == "load"
            two.wish(model, "evict")
        for source, status, words in (
            ("n0", 409, "a cannot be copied from n0: it is held in another layout"),
            ("n1", 409, "n1 is this server itself"),
            ("n7", 404, "no node of that name is seen on this machine; those that are: n0"),
            ("../../etc/passwd", 404, "no node of that name"),
            (None, 409, "no peer holds a as this server would"),
        ):
            got, body = two.fork("a", source)
            assert (got, words in body["error"]["message"]) == (status, True), body
            if status == 409:
                assert body["error"]["state"]["stage"] == "cold"
        one.wish("a", "sleep")
        assert "does not let a be copied: it is not active" in two.fork("a", "n0")[1]["error"]["message"]
        for wrong in (b"[1]", b'{"source": 5}', b'{"sources": "n0"}', b'{"source": "' + b"n" * 65 + b'"}'):
            status, body = two.call("/admin/models/a/fork", "POST", wrong)
            assert (status, body["error"]["param"]) == (400, "source")
        done = command("models", "fork", "a", "--from", "n7", "--wait", "--url", second.url)
        assert done.returncode == 1 and "those that are: n0" in done.stderr and done.stderr.count("\n") == 1
        assert two.model("a")["stage"] == "cold"  # nothing came of all this


def test_equal_headers_with_other_weights_are_another_checkpoint(models: dict[str, Path], run_folder: Path) -> None:
    first, second = (open_checkpoint(models[name]) for name in "ab")
    assert first.fingerprint == second.fingerprint
    assert contents_of(first) != contents_of(second)
    assert contents_of(first) == contents_of(open_checkpoint(models["a"]))
    with (
        Server(f"m={models['a']}", *ROOM_FOR_ALL, "--node", "n0"),
        Server(f"m={models['b']}", *ROOM_FOR_ALL, "--node", "n1") as server,
    ):
        two = Admin(server, run_folder)
        assert two.model("m")["origin"] == "load"
        two.wish("m", "evict")
        assert "it is another checkpoint of that name" in two.fork("m", "n0")[1]["error"]["message"]


def test_one_name_one_server_and_a_run_folder_of_ones_own(
    models: dict[str, Path], run_folder: Path, tmp_path: Path
) -> None:
    a = f"a={models['a']}"
    with Server(a, *ROOM_FOR_ALL, "--node", "n0") as first:
        again = command("serve", a, *ROOM_FOR_ALL, "--node", "n0", "--port", "0")
        assert again.returncode == 2
        assert "another node of this run directory is called n0" in again.stderr
        assert "give --node another name" in again.stderr and "Traceback" not in again.stderr
        assert answer(first, "a")
        first.process.kill()
    with Server(a, *ROOM_FOR_ALL, "--node", "n0") as third:  # the name of a killed server is free
        assert answer(third, "a")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    refused = command("serve", a, *ROOM_FOR_ALL, "--node", "n0", "--run-dir", str(shared), "--port", "0")
    assert refused.returncode == 2 and "chmod 700" in refused.stderr


def test_without_a_name_nothing_is_shared(models: dict[str, Path], run_folder: Path) -> None:
    with Server(f"a={models['a']}", *ROOM_FOR_ALL) as server:
        admin = Admin(server, run_folder)
        assert admin.call("/admin/peers")[1] == {"object": "list", "node": None, "data": []}
        assert not list(run_folder.glob("*.sock"))
        assert admin.fork("a", "n0")[0] == 200  # active already
        admin.wish("a", "evict")
        status, body = admin.fork("a", "n0")
        assert status == 409 and "with --node NAME" in body["error"]["message"]
        assert "peers" not in command("models", "--url", server.url).stdout


def test_a_peer_that_hangs_or_dies_holds_nobody_up(models: dict[str, Path], run_folder: Path) -> None:
    a = f"a={models['a']}"
    with Server(a, *ROOM_FOR_ALL, "--node", "n0") as first, Server(a, *ROOM_FOR_ALL, "--node", "n1") as second:
        two = Admin(second, run_folder)
        expected = answer(first, "a")
        two.wish("a", "evict")
        first.process.send_signal(signal.SIGSTOP)
        assert two.peers()["n0"]["trouble"] == "the peer did not answer in time"
        assert answer(second, "a") == expected
        assert two.model("a")["origin"] == "load"
        two.wish("a", "evict")
        first.process.send_signal(signal.SIGCONT)
        first.process.kill()
        first.process.wait(30)
        assert two.peers() == {}
        assert two.fork("a", "n0")[0] == 404
        assert answer(second, "a") == expected


async def test_a_source_killed_in_mid_copy_is_followed_by_the_checkpoint(
    models: dict[str, Path], tmp_path: Path
) -> None:
    moved = 0

    def progress(model: str, done: int, total: int) -> None:
        nonlocal moved
        moved = done if done < total else 0

    a, run_dir = {"a": models["a"]}, tmp_path / "run"
    async with opened("n1", run_dir, a, progress=progress, bytes_per_s=400_000) as node:
        expected = await generate(node, "a")
        operator = node.operator
        assert operator is not None
        assert (await operator.ask("a", Wish.EVICT)).accepted
        await until(lambda: node.settled("a"))
        moved = 0
        async with Process("n0", run_dir, a) as source:
            answer = await operator.ask("a", Wish.FORK, "n0")
            assert answer.accepted
            await until(lambda: moved > 0)
            assert operator.model("a").under_way.verb == "fork"  # type: ignore[union-attr]
            source.kill()
            assert await operator.until("a", Wish.FORK, 30.0) is End.REACHED
        assert operator.model("a").origin == "load"
        assert operator.watch.failed_fork("a") == "the peer went away"
        assert await generate(node, "a", number=1) == expected
        await books_are_right(node)


def test_a_prepared_model_is_copied_although_its_checkpoint_is_gone(
    models: dict[str, Path], run_folder: Path, tmp_path: Path
) -> None:
    """The destination never read the model's weights, and has neither them nor a tokenizer file any more."""
    b, a = (Path(shutil.copytree(models[name], tmp_path / name)) for name in "ba")
    with (
        Server(f"a={models['a']}", *ROOM_FOR_ALL, "--node", "n0") as first,
        Server(f"b={b}", f"a={a}", *ROOM_FOR_ONE, "--node", "n1") as second,
    ):
        two = Admin(second, run_folder)
        assert two.model("a")["stage"] == "cold"
        two.until("a", lambda found: found["prepared"])
        assert "prepared" in command("models", "--url", second.url).stdout
        shutil.rmtree(a)
        assert answer(second, "a") == answer(first, "a")
        assert two.model("a")["source"] == "n0"


async def test_a_look_sees_those_that_live(models: dict[str, Path], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    me = Peering(node="me", incarnation="i", run_dir=run_dir)
    assert await look(me, 1.0) == ()
    async with opened("n0", run_dir, {"a": models["a"]}) as node:
        (seen,) = await look(me, 1.0)
        assert (seen.node, [held.model for held in seen.models], seen.trouble) == ("n0", ["a"], None)
        await node.ask("a", Wish.SLEEP)
        await until(lambda: node.stages()["a"] is Stage.WARM)
        (seen,) = await look(me, 1.0)
        assert seen.models == ()
        (run_dir / "not a name.sock").touch()
        (run_dir / "dead.sock").touch()
        assert [one.node for one in await look(me, 1.0)] == ["n0"]
    assert await look(me, 1.0) == ()
