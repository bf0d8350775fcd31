"""The coordinator of one host where its run directory is damaged, foreign, full, locked or removed."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from janus_server.coordinator.address import open_coordinator, read_address
from janus_server.coordinator.base import boot_clock
from janus_server.coordinator.etcd import EtcdCoordinator
from janus_server.coordinator.local import LocalCoordinator, LocalSession
from janus_server.coordinator.records import Member
from janus_server.errors import BadConfig

LEASE_S = 1.0
PATIENCE_S = 60.0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@contextlib.asynccontextmanager
async def joined(run_dir: Path, *names: str) -> AsyncIterator[list[LocalSession]]:
    """Sessions that all stand, one of which leads."""
    sessions: list[LocalSession] = []
    try:
        for name in names:
            sessions.append(await LocalCoordinator(run_dir, lease_s=LEASE_S).join(member(name)))
            sessions[-1].campaign()
        await until("one leads", lambda: any(s.leadership() for s in sessions))
        await until("all see all", lambda: all(len(s.view.members) == len(names) for s in sessions))
        yield sessions
    finally:
        for each in sessions:
            await each.close()


def member(name: str) -> Member:
    return Member(name=name, incarnation=f"{time.monotonic_ns():x}", url="ws://127.0.0.1:1")


async def until(what: str, holds: Callable[[], Any]) -> None:
    began_s = time.monotonic()
    while not holds():
        assert time.monotonic() < began_s + PATIENCE_S, f"in vain: {what}"
        await asyncio.sleep(0.01)


def leader(sessions: list[LocalSession]) -> LocalSession:
    return next(session for session in sessions if session.leadership() is not None)


def lease_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "leader.lease").read_bytes())


async def test_terms_grow_over_restarts_of_the_nodes_and_of_the_machine(run_dir: Path) -> None:
    terms = []
    for _ in range(3):
        async with joined(run_dir, "a") as sessions:
            held = sessions[0].leadership()
            assert held is not None
            terms.append(held.term)
    assert terms == [1, 2, 3]
    left = {"term": 7, "name": "b", "incarnation": "b", "until_s": boot_clock() + 1e6, "boot": "before"}
    (run_dir / "leader.lease").write_text(json.dumps(left))
    async with joined(run_dir, "a") as sessions:
        assert sessions[0].view.leading == 8


async def test_a_lease_whose_holder_is_gone_is_waited_for(run_dir: Path) -> None:
    async with joined(run_dir, "a"):
        pass
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    until_s = boot_clock() + 1.5
    left = {"term": 7, "name": "b", "incarnation": "b", "until_s": until_s, "boot": boot}
    (run_dir / "leader.lease").write_text(json.dumps(left))
    async with joined(run_dir, "a") as sessions:
        assert boot_clock() >= until_s
        assert sessions[0].view.leading == 8


async def test_a_leader_that_leaves_is_followed_at_once(run_dir: Path) -> None:
    async with joined(run_dir, "a", "b", "c") as sessions:
        first = leader(sessions)
        left_s = lease_of(run_dir)["until_s"]
        await first.resign()
        assert first.leadership() is None
        await until("another leads", lambda: any(s.leadership() for s in sessions))
        second = leader(sessions)
        assert boot_clock() < left_s + LEASE_S
        await second.close()
        assert second.leadership() is None
        await until("the last one leads", lambda: any(s.leadership() for s in sessions))
        assert leader(sessions) not in (first, second)


async def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name, sentence in (("open", "chmod 700"), ("file", "cannot be used"), ("link", "cannot be used")):
        with pytest.raises(BadConfig, match=sentence):
            async with joined(tmp_path / name, "a"):
                pass


async def test_a_directory_of_several_machines_is_refused(run_dir: Path) -> None:
    async with joined(run_dir, "a"):
        with (run_dir / "far.member").open("w+") as far:
            beat = {"member": {"name": "far", "incarnation": "f", "url": ""}, "beat_s": boot_clock(), "boot": "far"}
            far.write(json.dumps(beat))
            far.flush()
            fcntl.flock(far, fcntl.LOCK_EX)
            with pytest.raises(BadConfig, match="several hosts need etcd"):
                async with joined(run_dir, "b"):
                    pass


async def test_a_damaged_lease_stops_leading_and_a_removed_one_starts_it_again(run_dir: Path) -> None:
    async with joined(run_dir, "a", "b") as sessions:
        term = leader(sessions).view.leading
        assert term is not None
        (run_dir / "leader.lease").write_bytes(b'{"term": "')
        await until("nobody leads", lambda: not any(s.leadership() for s in sessions))
        await until("all say why", lambda: all("damaged" in (s.view.cut or "") for s in sessions))
        assert all(len(s.view.members) == 2 for s in sessions)
        with pytest.raises(BadConfig, match="damaged"):
            async with joined(run_dir, "c"):
                pass
        (run_dir / "leader.lease").unlink()
        await until("one leads", lambda: any(s.leadership() for s in sessions))
        assert leader(sessions).view.term > term
        await until("no cut", lambda: not any(s.view.cut for s in sessions))


async def test_a_lease_that_somebody_keeps_locked_is_given_up_in_time(run_dir: Path) -> None:
    async with joined(run_dir, "a", "b") as sessions:
        held = leader(sessions).leadership()
        assert held is not None
        with (run_dir / "leader.lease").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            await until("nobody leads", lambda: not any(s.leadership() for s in sessions))
            await until("all say why", lambda: all("locked" in (s.view.cut or "") for s in sessions))
            await asyncio.sleep(2 * LEASE_S)
        await until("one leads", lambda: any(s.leadership() for s in sessions))
        assert leader(sessions).view.term > held.term
        # They never stopped saying that they live.
        assert not any("." in member.incarnation for member in sessions[0].view.members)


async def test_what_else_lies_in_the_directory_does_no_harm(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700)
    (run_dir / "dead.member").write_text("{}")
    (run_dir / "folder.member").mkdir()
    (run_dir / "link.member").symlink_to("/etc/hostname")
    os.mkfifo(run_dir / "pipe.member")
    with (run_dir / "junk.member").open("wb") as junk:
        junk.write(os.urandom(10_000))
        junk.flush()
        fcntl.flock(junk, fcntl.LOCK_EX)
        async with joined(run_dir, "a", "b") as sessions:
            assert [m.name for m in sessions[0].view.members] == ["a", "b"]
    assert not (run_dir / "dead.member").exists()
    assert Path("/etc/hostname").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    where = tmp_path / "small"
    where.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", where], capture_output=True)
        mounted = done.returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small file system is not permitted here")
    yield where
    subprocess.run(["umount", where], check=True)


async def test_a_full_disk_deposes_nobody(small_disk: Path) -> None:
    async with joined(small_disk / "run", "a", "b") as sessions:
        with pytest.raises(OSError, match="space"), (small_disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 4096)
        term = leader(sessions).view.term
        await asyncio.sleep(2 * LEASE_S)
        assert leader(sessions).view.term == term
        await leader(sessions).resign()
        await until("the other leads", lambda: any(s.leadership() for s in sessions))
        assert not any(s.view.cut for s in sessions)
        with pytest.raises(BadConfig, match="cannot be used"):
            async with joined(small_disk / "run", "c"):
                pass


def test_addresses() -> None:
    assert isinstance(open_coordinator("/run/janus"), LocalCoordinator)
    assert isinstance(open_coordinator("etcd://h/c"), EtcdCoordinator)
    found = read_address("etcd://h:1,h2,[::1]:3/prod-1")
    assert found.endpoints == ("http://h:1", "http://h2:2379", "http://[::1]:3")
    assert (found.cluster, found.tls) == ("prod-1", False)
    assert read_address("etcds://h/c").endpoints == ("https://h:2379",)


@pytest.mark.parametrize(
    "where",
    [
        "http://h/c", "etcd://", "etcd://h", "etcd://h/", "etcd:///c", "etcd://h/c/d", "etcd://h/C", "etcd://h:0/c",
        "etcd://h:70000/c", "etcd://h:x/c", "etcd://,/c", "etcd://h?x/c", "etcd://h#x/c", "etcd://a b/c",
        "etcd://[::1/c", "etcd://[1.2.3]/c", "etcd://h/c?x", "etcd://" + "h," * 20 + "h/c", "etcd://user:pw@h/c",
    ],
)  # fmt: skip
def test_addresses_that_are_none(where: str) -> None:
    with pytest.raises(BadConfig, match=r"--join|a-z") as error:
        read_address(where)
    assert "pw" not in str(error.value)


@pytest.mark.parametrize("lease_s", [0.0, 0.1, 1e9, -1.0, float("nan")])
def test_leases_that_are_none(lease_s: float) -> None:
    for where in ("/run/janus", "etcd://h/c"):
        with pytest.raises(BadConfig, match="lease"):
            open_coordinator(where, lease_s=lease_s)
