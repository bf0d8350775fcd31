"""The admin key of a server's own user: private while the server lives, worth nothing afterwards, never in the way."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from janus_server import keys, localkey
from janus_server.keys import KeyRing
from janus_server.terminal.client import Failed, target

ADDRESS, PORT = "127.0.0.1", 8123


def test_the_file_is_for_its_user_alone_and_goes_with_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "janus"
    with localkey.offered([folder], ADDRESS, PORT) as key:
        assert key is not None
        assert len(key) >= 32
        file = folder / f"{PORT}.key"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        found = localkey.find([tmp_path / "absent", folder], PORT)
        assert found == localkey.LocalKey(ADDRESS, key)
        assert key not in repr(found)
        assert localkey.find([folder], PORT + 1) is None
    assert os.listdir(folder) == []
    assert localkey.find([folder], PORT) is None


def test_two_servers_have_two_keys(tmp_path: Path) -> None:
    with localkey.offered([tmp_path / "r"], ADDRESS, 1) as one, localkey.offered([tmp_path / "r"], ADDRESS, 2) as two:
        assert one != two
        assert [localkey.find([tmp_path / "r"], port).key for port in (1, 2)] == [one, two]  # type: ignore[union-attr]


def test_what_a_killed_server_left_is_sent_nowhere_and_swept_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "janus"
    folder.mkdir(mode=0o700)
    old = folder / f"{PORT}.key"
    old.write_bytes(b'{"address":"127.0.0.1","key":"of-a-dead-server"}')
    old.chmod(0o600)
    (folder / "notes.txt").write_text("not ours")
    assert localkey.find([folder], PORT) is None
    with localkey.offered([folder], ADDRESS, PORT + 1):
        assert sorted(os.listdir(folder)) == [f"{PORT + 1}.key", "notes.txt"]


def test_a_later_server_of_the_same_port_keeps_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "janus"
    with localkey.offered([folder], "127.0.0.2", PORT) as later:
        pass
    with localkey.offered([folder], ADDRESS, PORT):
        with localkey.offered([folder], "127.0.0.2", PORT) as later:
            pass
        # The first one's file had its name taken, and the second one removed its own.
        assert localkey.find([folder], PORT) is None
    assert later is not None
    assert os.listdir(folder) == []


@pytest.mark.parametrize("wrong", ["open", "link", "file"])
def test_a_folder_that_others_may_enter_is_passed_over(tmp_path: Path, wrong: str) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"
    if wrong == "open":
        bad.mkdir()
        bad.chmod(0o755)
    elif wrong == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        bad.symlink_to(tmp_path / "real")
    else:
        bad.write_text("")
    with localkey.offered([bad, good], ADDRESS, PORT) as key:
        assert key is not None
        assert os.listdir(good) == [f"{PORT}.key"]
    with localkey.offered([bad], ADDRESS, PORT) as key:
        assert key is None


def test_a_file_that_others_may_read_is_not_believed(tmp_path: Path) -> None:
    with localkey.offered([tmp_path / "r"], ADDRESS, PORT):
        (tmp_path / "r" / f"{PORT}.key").chmod(0o644)
        assert localkey.find([tmp_path / "r"], PORT) is None


@pytest.mark.parametrize(
    ("url", "sent_to"),
    [
        (f"http://127.0.0.1:{PORT}", f"http://127.0.0.1:{PORT}"),
        (f"127.0.0.1:{PORT}/v1", f"http://127.0.0.1:{PORT}"),
        (f"http://localhost:{PORT}/", f"http://127.0.0.1:{PORT}"),
    ],
)
def test_the_key_goes_to_the_address_of_its_server(tmp_path: Path, url: str, sent_to: str) -> None:
    with localkey.offered([tmp_path / "r"], ADDRESS, PORT) as key:
        server = target(url, None, [tmp_path / "r"])
        assert (str(server.url), server.key) == (sent_to, key)
        assert str(key) not in repr(server)


@pytest.mark.parametrize("url", ["http://127.0.0.2", "http://[::1]", "http://example.org", "http://127.0.0.1.evil.org"])
def test_the_key_goes_nowhere_else(tmp_path: Path, url: str) -> None:
    with localkey.offered([tmp_path / "r"], ADDRESS, PORT):
        assert target(f"{url}:{PORT}", None, [tmp_path / "r"]).key is None
        assert target(f"{url}:{PORT}", "given-by-hand", [tmp_path / "r"]).key == "given-by-hand"


@pytest.mark.parametrize("url", ["", "http://", "http://x:port", "http://[::1"])
def test_what_is_no_url_is_refused_in_words(url: str) -> None:
    with pytest.raises(Failed, match="is not a URL"):
        target(url, None, [])


def test_a_local_key_opens_admin_routes_and_closes_nothing() -> None:
    local = keys.local_admin("local-0123456789")
    ring = KeyRing((), local)
    assert len(ring) == 0
    assert ring.has_admin
    assert ring.find("local-0123456789") is local
    assert ring.find("other-0123456789") is None


def test_a_configured_admin_key_puts_the_local_one_out_of_force() -> None:
    configured = keys.from_environment(keys.ADMIN_VARIABLE, "admin-0123456789")
    ring = KeyRing([configured], keys.local_admin("local-0123456789"))
    assert ring.find("local-0123456789") is None
    assert ring.find("admin-0123456789") is configured
