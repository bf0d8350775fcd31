"""Where a cluster meets, as a person writes it: a run directory, or etcd://host:2379,host2:2379/cluster.

`open_coordinator` is what the shells of the cluster call. etcds:// is the same over TLS. Nothing is connected to here.
"""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from janus_server.coordinator.base import Clock, Coordinator, boot_clock
from janus_server.coordinator.etcd import EtcdCoordinator
from janus_server.coordinator.gateway import Login
from janus_server.coordinator.local import LocalCoordinator
from janus_server.coordinator.records import check_name
from janus_server.errors import BadConfig
from janus_server.secretfile import read_secret_file

_PORT: Final = 2379
_MOST_ENDPOINTS: Final = 16
_MOST_TEXT: Final = 4096
_FORM: Final = "etcd://host:2379[,host2:2379]/cluster"
_HOST: Final = re.compile(r"[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]", re.ASCII)


class EtcdAddress(msgspec.Struct, frozen=True):
    """endpoints are URLs without a path."""

    endpoints: tuple[str, ...]
    cluster: str
    tls: bool


def open_coordinator(
    where: str,
    *,
    lease_s: float | None = None,
    tls: ssl.SSLContext | None = None,
    login: Login | None = None,
    clock: Clock = boot_clock,
) -> Coordinator:
    """The coordinator that `where` names. Without lease_s each kind has its own; without tls the system's certificates
    are trusted."""
    if "://" not in where:
        return LocalCoordinator(Path(where), lease_s=2.0 if lease_s is None else lease_s, clock=clock)
    found = read_address(where)
    return EtcdCoordinator(
        found.endpoints,
        found.cluster,
        lease_s=3.0 if lease_s is None else lease_s,
        tls=tls if found.tls else None,
        login=login,
        clock=clock,
    )


def read_login(path: Path) -> Login:
    """The user and the password of a file that nobody but its owner can read."""
    line = read_secret_file(path, "the login to etcd")
    user, _, password = line.decode("utf-8", "replace").partition(":")
    if not (user and password) or len(line.splitlines()) > 1 or "\ufffd" in user + password:
        raise BadConfig(f"the login to etcd {path} must hold one line of the form USER:PASSWORD")
    return Login(user, password)


def read_address(where: str) -> EtcdAddress:
    """BadConfig unless it is of the form above."""
    scheme, _, rest = where.partition("://")
    if scheme not in ("etcd", "etcds"):
        raise BadConfig(f"--join takes {_FORM}, the same with etcds:// for TLS, or a run directory")
    hosts, _, cluster = rest.partition("/")
    if len(where) > _MOST_TEXT or not hosts or not cluster or "/" in cluster:
        raise BadConfig(f"--join must have the form {_FORM}")
    if "@" in hosts:
        raise BadConfig(
            "--join must not hold a user or password, which others on this host could read in the process list: give "
            "--etcd-login FILE"
        )
    check_name("the name of the cluster in --join", cluster)
    pieces = hosts.split(",")
    if len(pieces) > _MOST_ENDPOINTS:
        raise BadConfig(f"--join takes at most {_MOST_ENDPOINTS} etcd servers")
    http = "https" if scheme == "etcds" else "http"
    return EtcdAddress(tuple(_endpoint(http, piece) for piece in pieces), cluster, scheme == "etcds")


def _endpoint(http: str, piece: str) -> str:
    """piece is host, host:port, [v6] or [v6]:port."""
    host, port = piece, str(_PORT)
    if ":" in piece.rpartition("]")[2]:
        host, _, port = piece.rpartition(":")
    if _HOST.fullmatch(host) is None or not re.fullmatch("[0-9]{1,5}", port, re.ASCII) or not 0 < int(port) < 65536:
        raise BadConfig(f"--join: one of its servers is not host or host:port; the form is {_FORM}")
    url = f"{http}://{host}:{int(port)}"
    try:
        urlsplit(url)
    except ValueError:
        raise BadConfig(f"--join: one of its servers has an address that is none; the form is {_FORM}") from None
    return url
