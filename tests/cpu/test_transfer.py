"""The transfer room by itself: who may come in, what breaks a connection, and that bytes only move under a grant.

Real sockets, real descriptors and real shared memory; the peers that misbehave are written out byte by byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import random
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_peers import (
    FREE,
    PAGE,
    PAGES,
    SIZE,
    asking,
    encoded,
    fill,
    frame,
    impostor,
    pulled,
    raw,
    reader,
    served,
    until,
)

from janus_server.errors import BadConfig
from janus_server.kv.move import Pace, Stopped, sampled_digest
from janus_server.kv.vmm_cpu import CpuMemory, PeerMemory, runs
from janus_server.transfer import plane
from janus_server.transfer.frames import (
    ANSWER_MOST_BYTES,
    ANSWERS,
    ASK_MOST_BYTES,
    QUESTIONS,
    VERSION,
    Check,
    Denial,
    Denied,
    Granted,
    Link,
    PeerTrouble,
    Release,
    Run,
    Valid,
)
from janus_server.transfer.grants import BeingRead, Given, Grants, Offer
from janus_server.transfer.mapped import pieces_of
from janus_server.transfer.pull import Want, pulling
from janus_server.transfer.rundir import RunDirectory
from janus_server.transfer.serving import MOST_LINKS, PeerServer

# The plane


def test_a_peers_memory_is_read_only_and_cannot_shrink() -> None:
    memory = CpuMemory(4, PAGE)
    memory.slab[:] = 7
    handle = plane.register(memory)
    assert fcntl.fcntl(handle.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    with pytest.raises(PermissionError):
        mmap.mmap(handle.fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError):
        os.ftruncate(handle.fd, PAGE)
    assert stat.S_IMODE(os.fstat(handle.fd).st_mode) == stat.S_IRUSR
    peer = PeerMemory(handle.fd, handle.size_bytes)
    assert int(peer.slab[-1]) == 7
    with pytest.raises(ValueError):
        peer.slab[0] = 1
    peer.close()
    handle.close()
    memory.close()


def test_memory_that_could_shrink_or_is_too_small_is_not_mapped() -> None:
    loose = os.memfd_create("loose", os.MFD_CLOEXEC)
    os.ftruncate(loose, 2 * PAGE)
    memory = CpuMemory(2, PAGE)
    handle = plane.register(memory)
    for fd, size in ((loose, PAGE), (handle.fd, 3 * PAGE), (0, PAGE)):
        with pytest.raises(OSError):
            PeerMemory(fd, size)
    os.close(loose)
    handle.close()
    memory.close()


def pull_from(handle: plane.Handle, pieces: list[plane.Piece], into: np.ndarray, pace: Pace) -> None:
    region = plane.attach(handle, pieces)
    try:
        plane.copy_from(region, pieces, [into[p.target : p.target + p.size_bytes] for p in pieces], pace)
    finally:
        region.close()


@given(pages=st.permutations(range(8)).flatmap(lambda p: st.integers(1, 8).map(lambda n: tuple(p[:n]))), cut=st.data())
def test_a_pull_puts_every_run_where_it_belongs_and_nothing_else(pages: tuple[int, ...], cut: st.DataObject) -> None:
    size = len(pages) * 4096 - cut.draw(st.integers(0, 4095))
    memory = CpuMemory(8, 4096)
    memory.slab[:] = np.random.default_rng(len(pages)).integers(0, 256, memory.slab.size, dtype=np.uint8)
    granted = Granted(
        "s", "i", "g", memory.slab.size, 4096, tuple(Run(first, count) for first, count in runs(pages)), 0, 1.0
    )
    handle = plane.register(memory)
    around = np.full(size + 128, 9, np.uint8)
    rate = cut.draw(st.sampled_from([None, 1e9, 1e5 * 8]))
    pace = Pace(lambda done: None, lambda: True, lambda: rate)
    pull_from(handle, pieces_of(granted, size), around[64 : 64 + size], pace)
    expected = np.concatenate([memory.slab[p * 4096 : (p + 1) * 4096] for p in pages])[:size]
    assert np.array_equal(around[64 : 64 + size], expected)
    assert set(around[:64].tolist()) == set(around[64 + size :].tolist()) == {9}
    handle.close()
    memory.close()


def test_a_stopped_pull_writes_nothing_more() -> None:
    memory = CpuMemory(64, 4096)
    memory.slab[:] = 1
    handle = plane.register(memory)
    target = np.zeros(64 * 4096, np.uint8)
    seen: list[int] = []
    pace = Pace(seen.append, lambda: len(seen) < 3, lambda: 4096 / 0.05)
    with pytest.raises(Stopped):
        pull_from(handle, [plane.Piece(0, 0, 64 * 4096)], target, pace)
    assert seen == [4096, 8192, 12288]
    assert int(target.sum()) == 12288
    handle.close()
    memory.close()


# Grants


OFFER = Offer(layout="L", checkpoint="C", size_bytes=SIZE, pages=PAGES, digest=5)


def give(grants: Grants, lasts_s: float = 60.0, **change: Any) -> Given | Denial:
    return grants.give(asking(**change), lambda model: OFFER if model == "m" else None, lambda size: lasts_s)


def test_a_grant_is_given_on_what_was_asked_for_and_on_nothing_else() -> None:
    grants = Grants()
    given_ = give(grants)
    assert isinstance(given_, Given)
    assert (given_.grant.peer, given_.grant.incarnation, given_.grant.pages) == ("r", "i", PAGES)
    assert give(grants, model="other") is Denial.NOT_HERE
    assert give(grants, layout="l") is Denial.OTHER_LAYOUT
    assert give(grants, size_bytes=SIZE + 1) is Denial.OTHER_LAYOUT
    assert give(grants, checkpoint="c") is Denial.OTHER_CHECKPOINT
    assert grants.readers("m") == [given_.grant]


def test_a_model_is_barred_only_while_nobody_reads_it() -> None:
    grants = Grants()
    with grants.barred("m"):
        assert give(grants) is Denial.GOING
    first, second = give(grants), give(grants)
    assert isinstance(first, Given) and isinstance(second, Given)
    for given_ in (first, second):
        with pytest.raises(BeingRead), grants.barred("m"):
            raise AssertionError("it was barred while it was being read")
        assert grants.valid(given_.grant)
        grants.release(given_.grant)
        grants.release(given_.grant)
        assert not grants.valid(given_.grant)
    with grants.barred("m"):
        pass
    assert isinstance(give(grants), Given)


def test_a_grant_ends_by_its_time_and_by_the_end_of_its_pages() -> None:
    grants = Grants()
    short, other = give(grants, lasts_s=0.02), give(grants)
    assert isinstance(short, Given) and isinstance(other, Given)
    time.sleep(0.03)
    assert not grants.valid(short.grant) and grants.valid(other.grant)
    with grants.revoked("n"):
        pass
    assert grants.valid(other.grant)
    with grants.revoked("m"):
        pass
    assert not grants.valid(other.grant) and grants.readers("m") == []


# The run directory


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_run_directory_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(mode)
    with pytest.raises(BadConfig, match="closed to others"):
        RunDirectory(run_dir)


def test_a_run_directory_of_somebody_else_a_file_or_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    RunDirectory(tmp_path / "made").close()
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "made")
    for name in ("file", "link"):
        with pytest.raises(BadConfig):
            RunDirectory(tmp_path / name)
    if os.geteuid() == 0:
        os.chown(tmp_path / "made", 65534, 65534)
        with pytest.raises(BadConfig, match="your own"):
            RunDirectory(tmp_path / "made")


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".hidden", "a\0b", "a" * 65, "a b"])
async def test_names_that_are_no_names_reach_no_file(tmp_path: Path, name: str) -> None:
    with RunDirectory(tmp_path / "run") as directory:
        with pytest.raises(BadConfig):
            directory.listen(name)
        with pytest.raises(PeerTrouble):
            directory.connect(name)
        assert list((tmp_path / "run").iterdir()) == []


async def test_one_process_a_name_and_a_dead_ones_socket_is_no_hindrance(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)  # an address has 107 characters
    async with served(deep) as source:
        with pytest.raises(BadConfig, match="called source"):
            PeerServer(source.peering, source.memory, source.grants, source.offers)
        assert np.array_equal(await pulled(source, reader(deep)), source.bytes)
    assert [path.name for path in deep.iterdir()] == ["source.lock"]
    code = (
        "import sys, os; from pathlib import Path; from janus_server.transfer.rundir import RunDirectory\n"
        "d = RunDirectory(Path(sys.argv[1])); kept = d.listen('source'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(deep)], cwd=Path(__file__).parents[2], check=False)
    assert (deep / "source.sock").exists()
    with pytest.raises(PeerTrouble, match="no such peer"):
        raw(deep)
    async with served(deep) as source:
        assert np.array_equal(await pulled(source, reader(deep)), source.bytes)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_another_user_is_turned_away_even_where_the_directory_lets_them_in(tmp_path: Path) -> None:
    base = Path("/tmp") / f"janus-test-{os.getpid()}-{random.randrange(1 << 30)}"
    async with served(base) as source:
        base.chmod(0o777)
        (base / "source.sock").chmod(0o777)
        code = (
            "import os, socket, sys\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.settimeout(5)\n"
            "try:\n s.sendall(bytes.fromhex(sys.argv[2])); print(s.recv(100))\nexcept ConnectionError: print(b'')"
        )
        command = [sys.executable, "-c", code, str(base / "source.sock"), encoded(asking()).hex()]
        child = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, cwd="/")
        assert child.stdout.strip() == "b''", child.stderr
        with pytest.raises(BadConfig):
            await pulled(source, reader(base))
        base.chmod(0o700)
        assert np.array_equal(await pulled(source, reader(base)), source.bytes)
    (base / "source.lock").unlink()
    base.rmdir()


# The side that is read


async def test_what_is_pulled_is_the_model_and_the_grant_is_over_then(tmp_path: Path) -> None:
    async with served(tmp_path / "run") as source:
        for _ in range(3):
            assert np.array_equal(await pulled(source, reader(tmp_path / "run")), source.bytes)
        await until(lambda: source.grants.readers("m") == [])
        source.offer = None
        with pytest.raises(PeerTrouble, match="does not hold it"):
            await pulled(source, reader(tmp_path / "run"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": "other"}, "another layout"),
        ({"checkpoint": "other"}, "another model"),
        ({"model": "n"}, "does not hold"),
        ({"digest": 1}, "other weights"),
    ],
)
async def test_other_weights_are_denied_before_a_byte_moves(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    async with served(tmp_path / "run") as source:
        with pytest.raises(PeerTrouble, match=words):
            async with pulling(reader(tmp_path / "run"), "source", msgspec.structs.replace(source.want, **change)):
                raise AssertionError("it was granted")
        await until(lambda: source.grants.readers("m") == [])


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    frame(b"", size=0xFFFFFFFF),
    frame(b"", size=ASK_MOST_BYTES + 1),
    frame(b"\xc1" * 20),
    frame(b"\x91" * ASK_MOST_BYTES),
    frame(msgspec.msgpack.encode({"type": "Ask"})),
    frame(msgspec.msgpack.encode({"type": "Exec", "code": "1"})),
    frame(msgspec.msgpack.encode({**msgspec.to_builtins(asking()), "more": 1})),
    encoded(asking(size_bytes=-1)),
    encoded(asking(model="m" * 600)),
    frame(msgspec.msgpack.encode(asking()), version=VERSION + 1),
    frame(b""),
    encoded(Check("x")),
    encoded(Release("x")),
    b"\x00" * 3,
    b"",
]


@pytest.mark.parametrize("sent", GARBAGE, ids=range(len(GARBAGE)))
async def test_who_sends_garbage_or_nothing_is_left_and_others_are_served(tmp_path: Path, sent: bytes) -> None:
    async with served(tmp_path / "run") as source:
        bad = raw(tmp_path / "run")
        bad.sendall(sent)
        assert np.array_equal(await pulled(source, reader(tmp_path / "run")), source.bytes)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.to_thread(bad.recv, 100) == b""
        bad.close()
        await until(lambda: source.grants.readers("m") == [])


async def test_random_bytes_never_grant_anything(tmp_path: Path) -> None:
    draw = random.Random(3)
    whole = encoded(asking())
    async with served(tmp_path / "run", reply_s=0.05) as source:
        for _ in range(60):
            data = bytearray(whole)
            for _ in range(draw.randint(1, 4)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            bad = raw(tmp_path / "run")
            bad.sendall(bytes(data[: draw.randint(1, len(data))]))
            bad.close()
            await asyncio.sleep(0.001)
        await until(lambda: source.server is not None and not source.server._links)
        assert source.grants.readers("m") == []
        assert np.array_equal(await pulled(source, reader(tmp_path / "run")), source.bytes)


async def test_a_reader_that_dies_or_talks_out_of_turn_gives_the_grant_back(tmp_path: Path) -> None:
    async with served(tmp_path / "run") as source:
        for end in (b"", encoded(asking()), encoded(Check("0" * 32)), b"\xff" * 30, encoded(Release("?"))):
            bad = raw(tmp_path / "run")
            bad.sendall(encoded(asking()))
            await until(lambda: len(source.grants.readers("m")) == 1)
            with pytest.raises(BeingRead), source.grants.barred("m"):
                raise AssertionError("it was barred while it was being read")
            if end:
                bad.sendall(end)
            else:
                bad.close()
            await until(lambda: source.grants.readers("m") == [])
            bad.close()
            with source.grants.barred("m"):
                pass


async def test_a_reader_that_stays_too_long_loses_its_grant(tmp_path: Path) -> None:
    async with served(tmp_path / "run", grant_s=0.1) as source:
        target = np.zeros(SIZE, np.uint8)
        async with pulling(reader(tmp_path / "run"), "source", source.want) as pull:
            await asyncio.to_thread(fill, pull, target, FREE)
            pull._ends_s += 60  # a reader whose clock went wrong
            await until(lambda: source.grants.readers("m") == [])
            with pytest.raises(PeerTrouble):
                await pull.confirm()
        async with pulling(reader(tmp_path / "run", bytes_per_s=SIZE / 2), "source", source.want) as pull:
            with pytest.raises(PeerTrouble, match="grant ended"):
                await asyncio.to_thread(fill, pull, target, FREE)


async def test_pages_that_went_away_are_not_confirmed(tmp_path: Path) -> None:
    async with served(tmp_path / "run") as source:
        target = np.zeros(SIZE, np.uint8)
        async with pulling(reader(tmp_path / "run"), "source", source.want) as pull:
            await asyncio.to_thread(fill, pull, target, FREE)
            with source.grants.revoked("m"):
                pass
            with pytest.raises(PeerTrouble, match="grant ended"):
                await pull.confirm()


async def test_a_crowd_of_silent_peers_is_bounded_and_passes(tmp_path: Path) -> None:
    async with served(tmp_path / "run", reply_s=0.5) as source:
        crowd = []
        for _ in range(MOST_LINKS + 20):
            with contextlib.suppress(PeerTrouble):
                crowd.append(raw(tmp_path / "run"))
            await asyncio.sleep(0)
            assert source.server is not None and len(source.server._links) <= MOST_LINKS
        await until(lambda: source.server is not None and not source.server._links)
        assert np.array_equal(await pulled(source, reader(tmp_path / "run")), source.bytes)
        for connection in crowd:
            connection.close()


# The side that reads


GRANTED = Granted(
    node="source", incarnation="i", grant="g", region_bytes=12 * PAGE, page_bytes=PAGE,
    runs=tuple(Run(first, count) for first, count in runs(PAGES)), digest=0, expires_in_s=10.0,
)  # fmt: skip

LIES: list[tuple[Any, str]] = [
    (msgspec.structs.replace(GRANTED, node="other"), "another name"),
    (msgspec.structs.replace(GRANTED, runs=(Run(0, 3),)), "other pages"),
    (msgspec.structs.replace(GRANTED, runs=(Run(0, 5),)), "other pages"),
    (msgspec.structs.replace(GRANTED, runs=()), "other pages"),
    (msgspec.structs.replace(GRANTED, page_bytes=0), "other pages"),
    (msgspec.structs.replace(GRANTED, runs=(Run(9, 4),)), "does not have"),
    (msgspec.structs.replace(GRANTED, runs=(Run(1 << 59, 4),)), "does not have"),
    (msgspec.structs.replace(GRANTED, expires_in_s=float("nan")), "no end"),
    (msgspec.structs.replace(GRANTED, expires_in_s=float("inf")), "no end"),
    (msgspec.structs.replace(GRANTED, expires_in_s=-1.0), "grant ended"),
    (msgspec.structs.replace(GRANTED, region_bytes=1 << 50), "cannot be mapped"),
    (GRANTED, "not those"),
    (Valid("g"), "out of turn"),
    (Denied(Denial.GOING), "putting it away"),
]


@pytest.mark.parametrize(("answer", "words"), LIES, ids=range(len(LIES)))
async def test_a_source_that_lies_is_not_believed(tmp_path: Path, answer: Any, words: str) -> None:
    memory = CpuMemory(12, PAGE)
    handle = plane.register(memory)
    want = Want(model="m", layout="L", checkpoint="C", size_bytes=SIZE, digest=None)
    before = len(os.listdir("/proc/self/fd"))
    async with impostor(tmp_path / "run", lambda link: link.send(answer, 1.0, handle.fd)):
        with pytest.raises(PeerTrouble, match=words):
            async with pulling(reader(tmp_path / "run"), "source", want) as pull:
                await asyncio.to_thread(fill, pull, np.zeros(SIZE, np.uint8), FREE)
    assert len(os.listdir("/proc/self/fd")) == before
    handle.close()
    memory.close()


async def _silent(link: Link) -> None:
    pass


async def _hang_up(link: Link) -> None:
    link._socket.shutdown(socket.SHUT_RDWR)


def _sends(data: bytes) -> Callable[[Link], Any]:
    async def play(link: Link) -> None:
        link._socket.sendall(data)

    return play


def _sends_fds(count: int) -> Callable[[Link], Any]:
    async def play(link: Link) -> None:
        socket.send_fds(link._socket, [encoded(GRANTED)], [0] * count)

    return play


@pytest.mark.parametrize(
    ("play", "words"),
    [
        (_silent, "in time"),
        (_hang_up, "went away"),
        (_sends(b"\x00"), "in time"),
        (_sends(frame(b"", size=ANSWER_MOST_BYTES + 1)), "too long"),
        (_sends(frame(b"", size=1000)), "in time"),
        (_sends(frame(b"x", version=9)), "another version"),
        (_sends(frame(b"\xc1")), "no frame"),
        (_sends(encoded(asking())), "no frame"),
        (_sends(encoded(GRANTED)), "no memory"),
        (_sends_fds(3), "more descriptors"),
        (_sends_fds(1), "cannot be mapped"),
    ],
)
async def test_a_source_that_sends_garbage_or_nothing_is_left(
    tmp_path: Path, play: Callable[[Link], Any], words: str
) -> None:
    want = Want(model="m", layout="L", checkpoint="C", size_bytes=SIZE, digest=None)
    before = len(os.listdir("/proc/self/fd"))
    async with impostor(tmp_path / "run", play):
        with pytest.raises(PeerTrouble, match=words):
            async with pulling(reader(tmp_path / "run"), "source", want) as pull:
                await asyncio.to_thread(fill, pull, np.zeros(SIZE, np.uint8), FREE)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def zeros() -> Iterator[tuple[plane.Handle, Granted]]:
    """A region of zeros and a true grant on it."""
    memory = CpuMemory(12, PAGE)
    handle = plane.register(memory)
    yield handle, msgspec.structs.replace(GRANTED, digest=sampled_digest(np.zeros(SIZE, np.uint8)))
    handle.close()
    memory.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [(None, "in time"), (Denied(Denial.NO_GRANT), "grant ended"), (b"", "went away"), (GRANTED, "out of turn")],
)
async def test_bytes_that_the_source_does_not_stand_for_are_not_confirmed(
    tmp_path: Path, zeros: tuple[plane.Handle, Granted], answer: Any, words: str
) -> None:
    handle, granted = zeros

    async def play(link: Link) -> None:
        await link.send(granted, 1.0, handle.fd)
        assert isinstance(await link.receive(QUESTIONS, ASK_MOST_BYTES, 5.0), Check)
        if answer == b"":
            link._socket.shutdown(socket.SHUT_RDWR)
        elif answer is not None:
            await link.send(answer, 1.0)

    want = Want(model="m", layout="L", checkpoint="C", size_bytes=SIZE, digest=None)
    async with impostor(tmp_path / "run", play):
        async with pulling(reader(tmp_path / "run"), "source", want) as pull:
            await asyncio.to_thread(fill, pull, np.zeros(SIZE, np.uint8), FREE)
            with pytest.raises(PeerTrouble, match=words):
                await pull.confirm()


async def test_frames_arrive_whole_however_they_are_cut() -> None:
    ours, theirs = socket.socketpair()
    link = Link(theirs)
    data = encoded(Valid("g" * 100)) * 2

    async def drip() -> None:
        for byte in data:
            ours.sendall(bytes([byte]))
            await asyncio.sleep(0)

    task = asyncio.create_task(drip())
    for _ in range(2):
        assert await link.receive(ANSWERS, ANSWER_MOST_BYTES, 5.0) == Valid("g" * 100)
    await task
    assert not link.gone()
    ours.close()
    assert link.gone()
    link.close()


async def test_a_long_answer_waits_for_its_reader_and_no_longer_than_allowed() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Link(ours), Link(theirs)
    many = msgspec.structs.replace(GRANTED, runs=tuple(Run(i * 2, 1) for i in range(100_000)))
    sending = asyncio.create_task(sender.send(many, 5.0, 0))
    message, fd = await receiver.receive_with_fd(ANSWERS, ANSWER_MOST_BYTES, 5.0)
    await sending
    assert message == many and fd is not None
    os.close(fd)
    with pytest.raises(PeerTrouble, match="in time"):
        await sender.send(many, 0.05)
    sender.close()
    receiver.close()
