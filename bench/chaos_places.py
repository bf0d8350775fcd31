"""The clusters that the chaos bench makes: of one host, of one host with etcd, and of hosts of a network of their own.

Each is a context manager that yields a `Place` whose nodes are not started yet. What cannot be had here is a `Missing`
with its reason.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from . import chaos_clock, chaos_etcd, chaos_net
from .chaos_clock import WallClock
from .chaos_etcd import EtcdServer, etcd_servers, free_ports
from .chaos_net import Net
from .chaos_nodes import Node, Nodes

STEM: Final = "journal"
_DISK_BYTES: Final = 64 << 20
_DAY_S: Final = 86400.0
_CLIENT_PORT, _PEER_PORT, _HTTP_PORT = 2379, 2380, 8000


class Missing(Exception):
    """Why this kind of cluster cannot be made here."""


class Settings(NamedTuple):
    """models by name, flags of every node, how many nodes; folder is for all files."""

    models: Mapping[str, Path]
    flags: tuple[str, ...]
    nodes: int
    folder: Path

    @property
    def names(self) -> list[str]:
        return [f"n{i}" for i in range(self.nodes)]

    def arguments(self, join: str, port: int, *more: str) -> list[str]:
        named = [f"{name}={path}" for name, path in self.models.items()]
        return [*named, *self.flags, "--access-log", "off", "--join", join, "--port", str(port), "--journal",
                str(self.journals / STEM), *more]  # fmt: skip

    @property
    def journals(self) -> Path:
        return self.folder / "journals"


class Place(NamedTuple):
    """missing: why something that is to be done to it cannot be done here, by the fault's name. ahead_s: by how much
    the clocks of nodes are ahead of this one."""

    nodes: Nodes
    key: str
    missing: Mapping[str, str]
    etcd: list[EtcdServer]
    net: Net | None = None
    disk: Path | None = None
    clock: Callable[[float], None] | None = None
    ahead_s: Mapping[str, float] = MappingProxyType({})


@contextlib.contextmanager
def local(settings: Settings) -> Iterator[Place]:
    """Nodes that meet in a run directory; their journals are on a small disk, their wall clocks can be moved."""
    keys = _keys(settings.folder)
    missing: dict[str, str] = {}
    clock = None
    if (why := chaos_clock.why_not()) is None:
        clock = WallClock(settings.folder)
        keys |= clock.environment
    else:
        missing["clock"] = why
    with _small_disk(settings.journals) as disk:
        if disk is None:
            missing["disk"] = "no small disk may be mounted here: it takes the rights of root"
        join = settings.folder / "cluster"
        ports = free_ports(settings.nodes)
        nodes = Nodes([
            Node(name, settings.arguments(str(join), port), keys)
            for name, port in zip(settings.names, ports, strict=True)
        ])  # fmt: skip
        yield Place(nodes, keys["JANUS_ADMIN_KEY"], missing, [], None, disk, None if clock is None else clock.move)


@contextlib.contextmanager
def etcd(settings: Settings) -> Iterator[Place]:
    """Nodes that meet in an etcd of three servers. Their clocks have as little in common as those of hosts that were
    started on different days, where that can be had."""
    _need_etcd()
    keys = _keys(settings.folder)
    settings.journals.mkdir()
    with etcd_servers(settings.folder, 3) as servers:
        join = f"etcd://{','.join(server.endpoint for server in servers)}/chaos"
        secret = _secret(settings.folder)
        ports = free_ports(settings.nodes)
        ahead_s = {name: _DAY_S * number for number, name in enumerate(settings.names)} if _can_be_ahead() else {}
        nodes = Nodes([
            Node(name, settings.arguments(join, port, "--cluster-secret", str(secret)), keys, _ahead(ahead_s.get(name)))
            for name, port in zip(settings.names, ports, strict=True)
        ])  # fmt: skip
        yield Place(nodes, keys["JANUS_ADMIN_KEY"], {}, servers, ahead_s=ahead_s)


@contextlib.contextmanager
def net(settings: Settings) -> Iterator[Place]:
    """Nodes and an etcd server on hosts of their own, as network namespaces are; peers speak TLS."""
    _need_etcd()
    if (why := chaos_net.why_not()) is not None:
        raise Missing(why)
    if shutil.which("openssl") is None:
        raise Missing("openssl is not installed: no certificates can be made")
    keys = _keys(settings.folder)
    settings.journals.mkdir()
    secret, tls = _secret(settings.folder), _certificates(settings.folder)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Net([*settings.names, "etcd"]))
        host = network.address("etcd")
        server = EtcdServer(
            settings.folder, "e0", _CLIENT_PORT, _PEER_PORT, f"e0=http://{host}:{_PEER_PORT}", host=host,
            before=network.before("etcd"),
        )  # fmt: skip
        stack.callback(server.kill)
        server.start()
        server.wait()
        join = f"etcd://{host}:{_CLIENT_PORT}/chaos"
        nodes = []
        for name in settings.names:
            own = network.address(name)
            more = ["--cluster-secret", str(secret), "--host", own, "--peer-host", own, *tls]
            nodes.append(Node(name, settings.arguments(join, _HTTP_PORT, *more), keys, network.before(name)))
        yield Place(Nodes(nodes), keys["JANUS_ADMIN_KEY"], {}, [server], network)


PLACES: Final = {"local": local, "etcd": etcd, "net": net}


def running(url: str, key: str) -> float:
    """Requests that a node says run on it, its own and those of others."""
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        text = reply.read().decode()
    return sum(float(value) for value in re.findall(r"^vllm:num_requests_running\{[^}]*\} (\S+)$", text, re.MULTILINE))


def load_everywhere(place: Place, models: Sequence[str]) -> None:
    """Have every node serve every model, as far as its leader agrees: whichever is killed, requests run there."""
    for node in place.nodes.all.values():
        for model in models:
            request = urllib.request.Request(
                f"{node.url}/admin/models/{model}/load?wait=10", b"", {"Authorization": f"Bearer {place.key}"}
            )
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=20) as reply:
                reply.read()


def _keys(folder: Path) -> dict[str, str]:
    """The environment of nodes that nobody else may use; run directories are in that folder."""
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700)
    return {"JANUS_ADMIN_KEY": secrets.token_hex(24), "JANUS_API_KEY": secrets.token_hex(24),
            "XDG_RUNTIME_DIR": str(runtime)}  # fmt: skip


def _secret(folder: Path) -> Path:
    path = folder / "secret"
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return path


def _certificates(folder: Path) -> list[str]:
    """The flags of nodes that all have one certificate, which is its own CA."""
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=node".split()
    key, certificate = folder / "key.pem", folder / "node.pem"
    subprocess.run([*words, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    key.chmod(0o600)
    return ["--peer-certfile", str(certificate), "--peer-keyfile", str(key), "--peer-cafile", str(certificate)]


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Path | None]:
    """A disk of its own at that folder, or None where none may be mounted: then it is a folder like any other."""
    folder.mkdir()
    if os.geteuid() != 0:
        yield None
        return
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES},mode=700", "chaos", str(folder)], check=False,
        capture_output=True,
    )  # fmt: skip
    if mounted.returncode != 0:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def _ahead(by_s: float | None) -> list[str]:
    """The beginning of a command whose clocks that only go forward are ahead."""
    if by_s is None:
        return []
    return ["unshare", "--time", "--fork", "--kill-child=SIGKILL", f"--monotonic={by_s:.0f}", f"--boottime={by_s:.0f}"]


def _can_be_ahead() -> bool:
    return shutil.which("unshare") is not None and subprocess.run([*_ahead(1.0), "true"], check=False).returncode == 0


def _need_etcd() -> None:
    if shutil.which(chaos_etcd.PROGRAM) is None:
        raise Missing(chaos_etcd.MISSING)
