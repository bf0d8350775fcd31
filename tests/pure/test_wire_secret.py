"""The cluster's secret in its file: closed to others, long enough, made once however many come at a time."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from janus_server.errors import BadConfig
from janus_server.wire.tls import TlsFiles, answering_context, check_endpoint, is_loopback, read_secret, shared_secret


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o602, 0o660])
def test_a_secret_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(BadConfig, match="chmod 600"):
        read_secret(write(tmp_path / "s", "x" * 40, mode))


@pytest.mark.parametrize("text", ["", "short", "x" * 31, "x" * 20 + " " + "y" * 20, "x" * 600, "ü" * 40])
def test_a_secret_that_is_none_is_refused_without_being_shown(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadConfig) as trouble:
        read_secret(write(tmp_path / "s", text))
    assert len(text) < 8 or text[:8] not in str(trouble.value)
    assert "openssl rand -hex 32" in str(trouble.value)


def test_what_is_no_file_is_refused_and_nothing_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "absent"):
        with pytest.raises(BadConfig):
            read_secret(path)


def test_nodes_that_start_together_agree_on_one_secret(tmp_path: Path) -> None:
    path = tmp_path / "cluster.secret"
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: vars(shared_secret(path))["_key"], range(64)))
    assert len(set(found)) == 1
    assert os.listdir(tmp_path) == ["cluster.secret"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert vars(read_secret(path))["_key"] == found[0]


@pytest.mark.parametrize("endpoint", ["ws://127.0.0.1:7000", "ws://[::1]:7000", "wss://10.1.2.3:1", "wss://n1.lan:7"])
def test_addresses_that_links_may_use(endpoint: str) -> None:
    check_endpoint(endpoint)


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "localhost", "example.org", ""])
def test_only_numbers_are_known_to_be_of_this_machine(host: str) -> None:
    assert not is_loopback(host)


def test_certificates_that_are_none_are_refused_by_name(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, "no certificate") for name in ("c.pem", "k.pem", "ca.pem")]
    with pytest.raises(BadConfig, match="PEM"):
        answering_context(TlsFiles(*paths))
    with pytest.raises(BadConfig, match=r"absent\.pem"):
        answering_context(TlsFiles(tmp_path / "absent.pem", paths[1], paths[2]))
