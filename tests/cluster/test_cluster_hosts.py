"""A cluster of several hosts: weights are copied from one to the other over the network, and texts stay the same.

A host is a mount namespace with a boot id and a run directory of its own; skipped where none can be made.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from etcd_server import etcd_servers
from real_cluster import SMALL, Process, complete

BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Host:
    """Where nodes run that find another machine under them."""

    def __init__(self, folder: Path, number: int) -> None:
        self.run = folder / f"run{number}"
        self.run.mkdir(mode=0o700)
        machine = folder / f"boot{number}"
        machine.write_text(f"{number}{number}{number}{number}0000-0000-0000-0000-000000000000\n")
        self.python = folder / f"python{number}"
        inside = f'mount --make-rprivate / && mount --bind {machine} {BOOT_ID} && exec {sys.executable} "$@"'
        self.python.write_text(f"#!/bin/sh\nexec unshare -m sh -c '{inside}' sh \"$@\"\n")
        self.python.chmod(0o755)

    def works(self) -> bool:
        command = [str(self.python), "-c", f"print(open('{BOOT_ID}').read()[:8])"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        return said.returncode == 0 and said.stdout[0] == said.stdout[1] == self.run.name[-1]


@pytest.fixture
def hosts(tmp_path: Path) -> list[Host]:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed: no host can be made")
    made = [Host(tmp_path, number) for number in (1, 2)]
    if not all(host.works() for host in made):
        pytest.skip("mount namespaces are not permitted here: no host can be made")
    return made


@pytest.fixture
def tls(tmp_path: Path) -> tuple[str, ...]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificates can be made")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=node".split()
    subprocess.run([*make, "-keyout", "key.pem", "-out", "node.pem"], cwd=tmp_path, check=True, capture_output=True)
    certificate = str(tmp_path / "node.pem")
    return ("--peer-certfile", certificate, "--peer-keyfile", str(tmp_path / "key.pem"), "--peer-cafile", certificate)


class Nodes:
    """Of one cluster, on several hosts."""

    def __init__(self, models: dict[str, Path], *more: str) -> None:
        self._arguments = [*(f"{name}={path}" for name, path in models.items()), "--port", "0", *SMALL, *more]

    def start(self, host: Host, name: str, *more: str) -> Process:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", str(host.python))
            return Process([*self._arguments, "--node", name, *more], host.run)


class Admin:
    """Of one node, with the key of whoever started it."""

    def __init__(self, node: Process) -> None:
        self.url = node.said(r"Janus is ready on (\S+)")[1]
        file = next(node.runtime.rglob(f"{self.url.rpartition(':')[2]}.key"))
        self._key = json.loads(file.read_text())["key"]

    def wished(self, model: str, wish: str, **body: str) -> str:
        """What an operator's wish came to."""
        return str(self._ask(f"models/{model}/{wish}?wait=60", json.dumps(body).encode())["why"])

    def peers(self) -> dict[str, Any]:
        return {one["node"]: one for one in self._ask("peers", None)["data"]}

    def _ask(self, path: str, body: bytes | None) -> Any:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        try:
            request = urllib.request.Request(f"{self.url}/admin/{path}", body, headers)
            with urllib.request.urlopen(request, timeout=90) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read()) from None


@pytest.fixture
def nodes(models: dict[str, Path], tls: tuple[str, ...], tmp_path: Path) -> Iterator[Nodes]:
    """To be started, of a cluster over etcd with TLS between nodes."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    with etcd_servers(tmp_path) as (etcd,):
        yield Nodes(models, "--join", f"etcd://{etcd.endpoint}/tests", "--cluster-secret", str(secret), *tls)


def test_weights_come_from_another_host_over_the_network(
    hosts: list[Host], nodes: Nodes, texts: dict[str, str], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(nodes.start(hosts[0], "n0"))
        there = Admin(first)
        here = Admin(stack.enter_context(nodes.start(hosts[1], "n1")))
        assert there.wished("a", "load") == "a is active"
        seen = here.peers()
        assert set(seen) == {"n0"} and seen["n0"]["trouble"] is None and seen["n0"]["models"], seen
        assert here.wished("a", "evict") == "a is cold"
        assert here.wished("a", "fork", source="n0") == "a is active, copied from n0"
        assert re.search("a: being read by n1 of another host", first.log), first.log
        assert there.wished("a", "evict") == "a is cold"  # n1 alone answers: with what it was sent
        for admin in (here, there):
            assert complete(admin.url, "a", tokens=40) == texts["a"]
