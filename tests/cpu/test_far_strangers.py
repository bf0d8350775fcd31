"""A door between hosts and those who should not come in, and sources that play by no rules."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from far_peers import FREE, PAGE, SECRET, dialler, pulled, reader, source, until, want
from test_far_transfer import SIZE, ask, asking, tls, with_line  # noqa: F401
from transfer_peers import fill, frame, served

from janus_server.kv.move import Pace, Stopped
from janus_server.transfer.door import MOST_STRANGERS
from janus_server.transfer.frames import (
    ANSWER_MOST_BYTES,
    ASK_MOST_BYTES,
    FETCH_MOST_BYTES,
    QUESTIONS,
    VERSION,
    Check,
    Denial,
    Denied,
    Fetch,
    Granted,
    Held,
    Look,
    PeerTrouble,
    Release,
    Run,
    Sending,
    Valid,
)
from janus_server.transfer.line import Line
from janus_server.transfer.look import Seen, look
from janus_server.transfer.proving import Refused, answered, endpoint_of
from janus_server.transfer.pull import pulling
from janus_server.wire.frames import Hello, Proof, Role, write
from janus_server.wire.handshake import Identity, Secret
from janus_server.wire.tls import TlsFiles
from janus_server.wire.trouble import Trouble


def address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.partition("//")[2].rpartition(":")
    return host, int(port)


# Who comes in


@pytest.mark.parametrize(
    ("who", "why"),
    [
        ({"secret": SECRET[::-1]}, Trouble.SECRET),
        ({"node": "source"}, Trouble.NAME),
        ({"incarnation": "older"}, Trouble.PEER),
        ({"cluster": "d"}, None),
    ],
)
async def test_who_does_not_belong_here_is_refused_and_others_are_served(
    who: dict[str, str], why: Trouble | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with source(SIZE) as one:
        for _ in range(12):
            with pytest.raises(Refused) as refused:
                await asyncio.to_thread(dialler(one.endpoint, **who), 2.0)
            assert why is None or refused.value.why is why
        await until(lambda: one.door.lines == 0)
        assert 0 < len(left(caplog)) < 12, caplog.messages
        assert SECRET not in caplog.text and SECRET[::-1] not in caplog.text
        assert np.array_equal(await pulled(reader(one.endpoint), SIZE), one.shelf.window)


def left(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "may not read here" in line or line.startswith("left a stranger")]


async def test_who_has_proved_itself_is_spoken_of_again_when_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    async with source(SIZE) as one:

        async def fail() -> None:
            with pytest.raises(Refused):
                await asyncio.to_thread(dialler(one.endpoint, secret=SECRET[::-1]), 2.0)
            await until(lambda: one.door.lines == 0)

        for _ in range(12):
            await fail()
        before = len(left(caplog))
        await pulled(reader(one.endpoint), SIZE)
        await fail()
        assert len(left(caplog)) == before + 1


async def test_a_relay_of_another_doors_proof_is_worth_nothing() -> None:
    """Who dials one door is led to another one of the cluster: the address is in the proof."""
    async with source(SIZE) as one, source(SIZE) as other:
        with pytest.raises(Refused) as refused:
            line = dialler(one.endpoint)
            relay = socket.create_server(("127.0.0.1", 0))
            there = endpoint_of("127.0.0.1", relay.getsockname()[1], False)
            task = asyncio.create_task(asyncio.to_thread(_relay, relay, address(other.endpoint)))
            assert line is not None
            try:
                await asyncio.to_thread(dialler(there), 2.0)
            finally:
                relay.close()
                await task
        assert refused.value.why is Trouble.ADDRESS


def _relay(listening: socket.socket, to: tuple[str, int]) -> None:
    mine, _ = listening.accept()
    theirs = socket.create_connection(to)

    def carry(a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(4096):
                b.sendall(data)
            b.shutdown(socket.SHUT_RDWR)

    back = threading.Thread(target=carry, args=(theirs, mine))
    back.start()
    carry(mine, theirs)
    back.join()
    mine.close()
    theirs.close()


HELLO = Hello("c", "reader", "p2", "tcp://127.0.0.1:1", "", Role.STREAM, bytes(32))
GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    frame(b"", size=0xFFFFFFFF),
    frame(b"x" * 5000),
    frame(b"\xc1" * 20),
    frame(b""),
    frame(write(Proof(bytes(32)))),
    frame(write(HELLO)),
    frame(write(HELLO), version=VERSION + 1),
    frame(msgspec.msgpack.encode(asking())),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
    b"\x00" * 3,
    b"",
]


@pytest.mark.parametrize("sent", GARBAGE, ids=range(len(GARBAGE)))
async def test_strangers_that_send_garbage_or_nothing_are_left(
    sent: bytes, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for files in (None, request.getfixturevalue("tls")):
        async with source(SIZE, files) as one:
            caplog.clear()
            bad = socket.create_connection(address(one.endpoint))
            bad.sendall(sent)
            assert np.array_equal(await pulled(reader(one.endpoint, files), SIZE), one.shelf.window)
            await until(lambda: one.door.lines == 0)
            bad.close()
            assert one.shelf.grants.readers("m") == []
            if sent:
                for _ in range(12):
                    with socket.create_connection(address(one.endpoint)) as bad:
                        bad.sendall(sent)
                await pulled(reader(one.endpoint, files), SIZE)  # it is accepted after all of them
                await until(lambda: one.door.lines == 0)
                assert 0 < len(left(caplog)) < 12, caplog.messages


async def test_random_bytes_of_a_proved_peer_grant_nothing_more() -> None:
    draw = random.Random(3)
    whole = frame(msgspec.msgpack.encode(asking()))
    async with source(SIZE, reply_s=0.3) as one:
        for _ in range(20):
            data = bytearray(whole)
            for _ in range(draw.randint(1, 4)):
                data[draw.randrange(len(data))] = draw.randrange(256)

            def play(line: Line, data: bytes = bytes(data)) -> None:
                line._socket.sendall(data)

            await asyncio.to_thread(with_line, one.endpoint, play)
        await until(lambda: one.door.lines == 0)
        assert one.shelf.grants.readers("m") == []
        assert np.array_equal(await pulled(reader(one.endpoint), SIZE), one.shelf.window)


@pytest.mark.parametrize("second", [asking(), Release("?"), Check("?"), "garbage"])
async def test_who_talks_out_of_turn_loses_the_grant(second: Any) -> None:
    async with source(SIZE) as one:

        def play(line: Line) -> None:
            assert isinstance(ask(line, asking()), Granted)
            assert len(one.shelf.grants.readers("m")) == 1
            if second == "garbage":
                line._socket.sendall(b"\xff" * 30)
            else:
                line.send(second, 1.0)
            with contextlib.suppress(PeerTrouble):
                line.receive_body(ANSWER_MOST_BYTES, 2.0)
            until_s = time.monotonic() + 10
            while one.shelf.grants.readers("m") and time.monotonic() < until_s:
                time.sleep(0.005)
            assert one.shelf.grants.readers("m") == []

        await asyncio.to_thread(with_line, one.endpoint, play)


async def test_a_crowd_of_strangers_is_bounded_and_passes(caplog: pytest.LogCaptureFixture) -> None:
    async with source(SIZE) as one:
        crowd = [socket.create_connection(address(one.endpoint)) for _ in range(MOST_STRANGERS + 20)]
        most = 0
        for _ in range(50):
            most = max(most, one.door.lines)
            await asyncio.sleep(0.005)
        assert 0 < most <= MOST_STRANGERS
        assert len([line for line in caplog.messages if "sent away" in line]) == 1
        await until(lambda: one.door.lines == 0)
        assert np.array_equal(await pulled(reader(one.endpoint), SIZE), one.shelf.window)
        for connection in crowd:
            connection.close()


async def test_tls_is_agreed_on_or_nothing_is_read(tls: TlsFiles, tmp_path: Path) -> None:  # noqa: F811
    async with source(SIZE, tls) as one:
        plain = one.endpoint.replace("tls:", "tcp:")
        for endpoint, files in ((one.endpoint, None), (plain, tls), ("tcp://192.0.2.1:9", None)):
            with pytest.raises(PeerTrouble, match="agree on TLS"):
                await asyncio.to_thread(dialler(endpoint, files), 2.0)
        for endpoint in ("x", "tcp://127.0.0.1:0", "tcp://127.0.0.1:70000", "http://127.0.0.1:80"):
            with pytest.raises(PeerTrouble, match="no address"):
                await asyncio.to_thread(dialler(endpoint), 2.0)
        with pytest.raises(PeerTrouble):  # without TLS where it is spoken
            await asyncio.to_thread(dialler(plain), 2.0)
        assert np.array_equal(await pulled(reader(one.endpoint, tls), SIZE), one.shelf.window)


# Where a node is looked for


async def test_a_node_of_this_host_is_mapped_and_one_in_another_run_directory_is_dialled(tmp_path: Path) -> None:
    dials: list[float] = []
    async with served(tmp_path / "run") as near, source(SIZE) as far:
        for run_dir, there, bytes_ in (("run", 0, near.bytes), ("other", 1, far.shelf.window)):
            peering = reader(far.endpoint, near=True, run_dir=tmp_path / run_dir)
            known = peering.others.source  # type: ignore[attr-defined]
            counted = known._replace(dial=lambda s, known=known: dials.append(s) or known.dial(s))
            peering.others.source = counted  # type: ignore[attr-defined]
            assert np.array_equal(await pulled(peering, SIZE), bytes_)
            assert len(dials) == there


async def test_looking_around_finds_nodes_of_other_hosts(tmp_path: Path) -> None:
    async with source(SIZE) as one:
        offer = one.shelf.offer
        assert offer is not None
        seen = await look(reader(one.endpoint, run_dir=tmp_path / "run"), 2.0)
        held = Held("m", "L", "C", SIZE, 0)
        assert seen == (Seen("source", (held,), far=True),)
        endpoint = one.endpoint
    gone = await look(reader(endpoint, run_dir=tmp_path / "run"), 2.0)
    assert [(one.node, one.models, one.far) for one in gone] == [("source", (), True)] and gone[0].trouble


# Sources that lie


GRANTED = Granted(
    node="source", incarnation="p1", grant="g", region_bytes=12 * PAGE, page_bytes=PAGE, runs=(Run(0, 4),), digest=0,
    expires_in_s=10.0,
)  # fmt: skip


@contextlib.contextmanager
def impostor(play: Callable[[Line], Any]) -> Iterator[str]:
    """A node of the cluster that is called "source" and plays by no rules."""
    listening = socket.create_server(("127.0.0.1", 0))
    endpoint = endpoint_of("127.0.0.1", listening.getsockname()[1], False)
    me = Identity("c", "source", "p1", endpoint)
    over = threading.Event()

    def run() -> None:
        connection, _ = listening.accept()
        line = Line(connection)
        with contextlib.suppress(PeerTrouble):
            answered(line, me, Secret(SECRET), b"", 5.0)
            line.receive(QUESTIONS, ASK_MOST_BYTES, 5.0)
            play(line)
            over.wait(30)
        line.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield endpoint
    finally:
        over.set()
        thread.join()
        listening.close()


LIES: list[tuple[Any, str]] = [
    (msgspec.structs.replace(GRANTED, node="other"), "another name"),
    (msgspec.structs.replace(GRANTED, runs=(Run(0, 3),)), "other pages"),
    (msgspec.structs.replace(GRANTED, runs=(Run(0, 5),)), "other pages"),
    (msgspec.structs.replace(GRANTED, page_bytes=0), "other pages"),
    (msgspec.structs.replace(GRANTED, expires_in_s=float("nan")), "no end"),
    (msgspec.structs.replace(GRANTED, expires_in_s=-1.0), "grant ended"),
    (msgspec.structs.replace(GRANTED, bytes_per_s=-1.0), "rate"),
    (Valid("g"), "out of turn"),
    (Sending(4), "out of turn"),
    (Denied(Denial.GOING), "putting it away"),
    (None, "in time"),
    (b"\xff" * 8, "another version"),
    (frame(b"\xc1"), "no frame"),
    (frame(b"", size=ANSWER_MOST_BYTES + 1), "too long"),
    (b"", "went away"),
]


@pytest.mark.parametrize(("answer", "words"), LIES, ids=range(len(LIES)))
async def test_a_source_that_lies_about_its_grant_is_left(answer: Any, words: str) -> None:
    def play(line: Line) -> None:
        if answer == b"":
            line.cut()
        elif isinstance(answer, bytes):
            line._socket.sendall(answer)
        elif answer is not None:
            line.send(answer, 1.0)

    with impostor(play) as endpoint:
        with pytest.raises(PeerTrouble, match=words):
            await pulled(reader(endpoint, reply_s=0.3), SIZE)


def _after(*answers: Any) -> Callable[[Line], Any]:
    """Grants, and answers the first Fetch like this."""

    def play(line: Line) -> None:
        line.send(GRANTED, 1.0)
        fetch = line.receive(QUESTIONS, ASK_MOST_BYTES, 5.0)
        assert isinstance(fetch, Fetch) and fetch.size_bytes == SIZE
        for answer in answers:
            if isinstance(answer, bytes):
                line._socket.sendall(answer)
            elif answer is None:
                line.cut()
            else:
                line.send(answer, 1.0)

    return play


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ((), "in time"),
        ((Denied(Denial.NO_GRANT),), "grant ended"),
        ((Sending(SIZE - 1),), "out of turn"),
        ((Sending(SIZE + 1),), "out of turn"),
        ((Valid("g"),), "out of turn"),
        ((b"\x00" * 100,), "another version"),
        ((Sending(SIZE), b"x" * 1000), "nothing for too long"),
        ((Sending(SIZE), b"x" * 1000, None), "went away"),
        ((Sending(SIZE), b"x" * SIZE), "not those"),
    ],
)
async def test_a_source_that_sends_other_than_it_was_asked_for_is_left(answers: tuple[Any, ...], words: str) -> None:
    with impostor(_after(*answers)) as endpoint:
        target = np.zeros(SIZE, np.uint8)
        async with pulling(reader(endpoint, stall_s=0.3), "source", want(SIZE)) as pull:
            with pytest.raises(PeerTrouble, match=words):
                await asyncio.to_thread(fill, pull, target, FREE)


async def test_a_cancel_in_the_middle_of_a_piece_waits_for_nobody() -> None:
    with impostor(_after(Sending(SIZE), b"x" * 1000)) as endpoint:
        goes = True
        async with pulling(reader(endpoint, stall_s=60.0), "source", want(SIZE)) as pull:
            pace = Pace(lambda done: None, lambda: goes)
            copying = asyncio.create_task(asyncio.to_thread(fill, pull, np.zeros(SIZE, np.uint8), pace))
            await asyncio.sleep(0.2)
            goes = False
            with pytest.raises(Stopped):
                async with asyncio.timeout(20):
                    await copying


async def test_a_source_that_trickles_is_left_when_its_grant_ends() -> None:
    def play(line: Line) -> None:
        line.send(msgspec.structs.replace(GRANTED, expires_in_s=0.5), 1.0)
        line.receive(QUESTIONS, ASK_MOST_BYTES, 5.0)
        line.send(Sending(SIZE), 1.0)
        with contextlib.suppress(OSError):
            for _ in range(200):
                line._socket.sendall(b"x")
                time.sleep(0.05)

    with impostor(play) as endpoint:
        async with pulling(reader(endpoint, stall_s=60.0), "source", want(SIZE)) as pull:
            with pytest.raises(PeerTrouble, match="grant ended"):
                await asyncio.to_thread(fill, pull, np.zeros(SIZE, np.uint8), FREE)


def test_no_frame_can_ask_for_more_than_a_piece() -> None:
    for question in (Fetch("g", 0, FETCH_MOST_BYTES + 1), Fetch("g", 0, 0), Fetch("g", -1, 1), Look("n" * 600, "i")):
        with pytest.raises(msgspec.ValidationError):
            QUESTIONS.decode(msgspec.msgpack.encode(question))
