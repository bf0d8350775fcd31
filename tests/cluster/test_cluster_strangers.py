"""Nodes that do not belong, and whoever sends rubbish to one that does: refused with a sentence, the rest serve on."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from etcd_server import etcd_servers
from real_cluster import SMALL, Cluster, Load, Process, complete

from janus_server.coordinator.records import Member
from janus_server.wire.frames import KNOCK_MOST_BYTES, KNOCKS, STREAM_MOST_BYTES, Proof, Role, Welcome, read, write
from janus_server.wire.handshake import Caller, Identity
from janus_server.wire.tls import read_secret


@pytest.fixture(scope="module")
def cluster(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(models, tmp_path_factory.mktemp("run"), nodes=2) as cluster:
        yield cluster


@pytest.fixture
def load(cluster: Cluster, texts: dict[str, str]) -> Iterator[Load]:
    """Clients of all nodes, of whom none may notice anything."""
    load = Load(cluster.urls, texts, each=1)
    cluster.until(lambda: all(load.done(node) > 1 for node in cluster.urls))
    yield load
    before = {node: load.done(node) for node in cluster.urls}
    cluster.until(lambda: all(load.done(node) > before[node] + 2 for node in cluster.urls))
    for node, ends in load.stop().items():
        assert set(ends) == {"ok"}, (node, ends, cluster.log)


def member(cluster: Cluster, node: str) -> Member:
    """As it presents itself to others."""
    told = json.loads((Path(cluster.where) / f"{node}.member").read_bytes())["member"]
    return Member(**told)


def given(models: dict[str, Path]) -> list[str]:
    return [f"{name}={path}" for name, path in models.items()]


@pytest.mark.parametrize(
    ("names", "more", "sentence"),
    [
        ("a", [], r"node odd lacks b, which node n\d has: nodes of one cluster are given the same models"),
        ("abc", [], r"node odd has c, which node n\d lacks: nodes of one cluster are given the same models"),
        ("ab", ["--max-model-len", "100"], r"node odd has sequences of 100 tokens of a and node n\d of 512: give all"),
        ("ab", ["--dtype", "bfloat16"], r"computes a in bfloat16 \(keys and values bf16\) and node n\d in float32 "),
    ],
    ids=["fewer", "more", "shorter", "coarser"],
)
def test_a_node_with_other_models_is_refused(
    cluster: Cluster, load: Load, models: dict[str, Path], names: str, more: list[str], sentence: str
) -> None:
    named = [f"{name}={models.get(name, models['a'])}" for name in names]
    join = ["--join", cluster.where, "--node", "odd", "--port", "0", *SMALL, *more]
    with Process([*named, *join], cluster.runtime) as odd:
        assert odd.process.wait(60) == 2
        odd.said(sentence)
        assert "odd leads" not in odd.log


def test_a_node_with_another_secret_never_leads(models: dict[str, Path], tmp_path: Path) -> None:
    """Neither where one that has the right one leads, nor while that one is killed and comes back."""
    other = tmp_path / "other"
    other.write_text("0123456789abcdef" * 4)
    other.chmod(0o600)
    join = ["--join", str(tmp_path / "meet"), "--port", "0", *SMALL]
    with Process([*given(models), "--node", "m1", *join], tmp_path) as first:
        url = first.said(r"Janus is ready on (\S+)")[1]
        expected = complete(url, "a")
        odd = [*given(models), "--node", "x1", *join, "--cluster-secret", str(other)]
        with Process(odd, tmp_path) as stranger:
            assert stranger.process.wait(60) == 2
            stranger.said("m1, which leads, cannot be linked to: the cluster secret is not the same on both nodes")
        with Process(odd, tmp_path) as stranger:
            first.until(lambda: first.log.count("says it is x1 was refused") > 2)
            first.stop(signal.SIGKILL)
            with Process([*given(models), "--node", "m1", *join], tmp_path) as again:
                assert complete(again.said(r"Janus is ready on (\S+)")[1], "a") == expected
                assert stranger.process.wait(60) == 2
                assert "x1 leads" not in stranger.log + again.log
                assert again.stop() == 0


def test_a_node_of_another_release_is_refused(
    cluster: Cluster, load: Load, models: dict[str, Path], tmp_path: Path
) -> None:
    """It is told to be of that release by its package's metadata."""
    metadata = tmp_path / "janus_server-99.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: janus-server\nVersion: 99.9\n")
    arguments = [*given(models), "--join", cluster.where, "--node", "newer", "--port", "0", *SMALL]
    with Process(arguments, cluster.runtime, tmp_path) as newer:
        assert newer.process.wait(60) == 2
        newer.said(r"node n\d, which leads, runs release \S+ of Janus and this one 99.9: nodes of one cluster run")


def test_a_folder_without_a_cluster_is_said_to_begin_one(models: dict[str, Path], tmp_path: Path) -> None:
    where = tmp_path / "mistyped"
    with Process([*given(models), "--join", str(where), "--port", "0", *SMALL], tmp_path) as node:
        node.said(f"no cluster meets in {re.escape(str(where))}: this node begins one there")
        node.said("Janus is ready on")
        assert node.stop() == 0


def test_nodes_that_join_take_names_that_are_free(
    cluster: Cluster, load: Load, models: dict[str, Path], texts: dict[str, str]
) -> None:
    arguments = [*given(models), "--join", cluster.where, "--nodes", "2", "--port", "0", "--access-log", "off", *SMALL]
    with Process(arguments, cluster.runtime) as more:
        more.said("2 nodes are one server")
        urls = dict(re.findall(r"^(n\d+) \| Janus is ready on (\S+)", more.log, re.MULTILINE))
        assert set(urls) == {"n2", "n3"}
        for url in urls.values():
            assert complete(url, "b", tokens=40) == texts["b"]
        assert more.stop() == 0
    assert Path(cluster.where).is_dir()  # it is not theirs


def test_rubbish_on_the_port_for_peers_harms_nobody(cluster: Cluster, load: Load) -> None:
    host, _, port = member(cluster, cluster.leader).url.removeprefix("ws://").partition(":")
    draw = random.Random(5)
    for bytes_ in (draw.randbytes(64), b"GET /internal/wire HTTP/1.1\r\nX: " + b"x" * (1 << 20), bytes(8 << 20)):
        with socket.create_connection((host, int(port)), 10) as stranger:
            try:
                stranger.sendall(bytes_)
                while stranger.recv(65536):
                    pass
            except OSError:  # closed before all was sent
                pass


@pytest.mark.parametrize("message", [bytes(STREAM_MOST_BYTES + 1), b"\x91" * 100_000], ids=["huge", "garbage"])
async def test_a_peer_that_knows_the_secret_and_sends_rubbish_loses_its_link_alone(
    cluster: Cluster, load: Load, message: bytes
) -> None:
    leader = member(cluster, cluster.leader)
    them = Identity("local", leader.name, leader.process, leader.url)
    secret = read_secret(Path(cluster.where) / "cluster.secret")
    caller = Caller(Identity("local", "bad", "i", "ws://127.0.0.1:1"), them, Role.STREAM, secret, os.urandom(32))
    async with aiohttp.ClientSession() as session:
        url = leader.url.replace("ws", "http", 1) + "/internal/wire"
        async with session.ws_connect(url) as link:
            await link.send_bytes(write(caller.hello))
            step = caller.hear(read((await link.receive(10)).data, KNOCKS, KNOCK_MOST_BYTES))  # type: ignore[arg-type]
            assert isinstance(step, Proof)
            await link.send_bytes(write(step))
            assert isinstance(read((await link.receive(10)).data, KNOCKS, KNOCK_MOST_BYTES), Welcome)
            await link.send_bytes(message)
            while (heard := await link.receive(10)).type is aiohttp.WSMsgType.BINARY:
                pass
            assert heard.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSING)


def test_an_etcd_that_wants_a_password_is_said_to_and_given_it(models: dict[str, Path], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    with etcd_servers(tmp_path) as (etcd,):
        for path, what in (
            ("user/add", {"name": "root", "password": "pw"}), ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):  # fmt: skip
            urllib.request.urlopen(f"{etcd.url}/v3/auth/{path}", json.dumps(what).encode(), timeout=20).read()
        for nodes in ("1", "2"):  # by itself, and where names are looked up first
            join = ["--join", f"etcd://{etcd.endpoint}/tests", "--cluster-secret", str(secret), "--nodes", nodes]
            with Process([*given(models), *join, "--port", "0", *SMALL], tmp_path) as node:
                assert node.process.wait(60) == 2
                node.said(r"want a user name and password .* give --etcd-login FILE")
        login = tmp_path / "login"
        for text, mode, code, sentence in (
            ("root:pw", 0o644, 2, "others than you may use the login to etcd"),
            ("root", 0o600, 2, "must hold one line of the form USER:PASSWORD"),
            ("root:no", 0o600, 2, "want a user name and password"),
            ("root:pw\n", 0o600, 0, "2 nodes are one server"),
        ):
            login.write_text(text)
            login.chmod(mode)
            with Process([*given(models), *join, "--etcd-login", str(login), "--port", "0", *SMALL], tmp_path) as node:
                node.said(sentence)
                assert (node.process.wait(60) if code else node.stop()) == code
                assert "pw" not in node.log


def test_a_run_directory_goes_with_the_nodes_that_made_it(models: dict[str, Path], tmp_path: Path) -> None:
    with Cluster({"a": models["a"]}, tmp_path, nodes=2) as cluster:
        where = Path(cluster.where)
        assert where.is_dir()
        assert cluster.stop() == 0
    assert not where.exists()


def test_what_is_wrong_with_all_nodes_is_said_once(models: dict[str, Path], tmp_path: Path) -> None:
    with Process([*given(models), "--nodes", "3", "--host", "0.0.0.0", "--port", "0", *SMALL], tmp_path) as open_to_all:
        assert open_to_all.process.wait(60) == 2
        open_to_all.until(lambda: open_to_all.log.count("no API key is set") == 1)


def test_a_model_that_has_no_room_beside_the_others_keeps_nobody_waiting(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """The cluster is ready without it, says so, and serves the others."""
    many = {f"m{number}": models["a"] for number in range(11)}
    with Cluster(many, tmp_path, "--memory", "4MiB", nodes=2) as cluster:
        cluster.said("not loaded at start, there is no room beside the others: m8, m9, m10")
        took_s = [float(said) for said in re.findall(r"is ready on \S+ after (\S+) s", cluster.log)]
        assert max(took_s) < 15.0  # the patience with models that somebody loads
        assert complete(cluster.urls["n1"], "m0") == complete(cluster.urls["n0"], "m10")
