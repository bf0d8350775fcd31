"""Asking all peers what they hold: answers from whoever lives, fixed words for whoever lies, nothing for the dead."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transfer_peers import SIZE, encoded, frame, impostor, raw, reader, served
from transfer_peers import asking as ask

from janus_server import peers as module
from janus_server.errors import BadConfig
from janus_server.peers import Peers, Use
from janus_server.transfer.frames import VERSION, Check, Granted, Held, Holding, Link, Look
from janus_server.transfer.look import Seen, look
from janus_server.transfer.pull import Want
from janus_server.transfer.rundir import RunDirectory, first_usable
from janus_server.transfer.serving import PeerServer

HELD = Held("m", "L", "C", SIZE, 0)


async def test_what_is_offered_is_seen_with_its_readers(tmp_path: Path) -> None:
    async with served(tmp_path / "run") as source:
        me = reader(tmp_path / "run")
        assert (await look(me, 1.0))[0].models == ()  # a server that names no models tells of none
        assert source.server is not None
        await source.server.close()
        source.server = PeerServer(source.peering, source.memory, source.grants, source.offers, ("m", "gone"))
        (seen,) = await look(me, 1.0)
        assert (seen.node, seen.models, seen.trouble) == ("source", (HELD,), None)
        with raw(tmp_path / "run") as asking:
            asking.sendall(encoded(ask()))
            assert await asyncio.to_thread(asking.recv, 6)
            (seen,) = await look(me, 1.0)
            assert seen.models[0].readers == 1
        source.offer = None
        assert (await look(me, 1.0))[0].models == ()


async def test_a_look_is_one_question(tmp_path: Path) -> None:
    async with served(tmp_path / "run"):
        with raw(tmp_path / "run") as connection:
            connection.sendall(encoded(Look("r", "i")) + encoded(Check("x")))
            data = b""
            with contextlib.suppress(ConnectionResetError):  # the second question was never read
                while part := await asyncio.to_thread(connection.recv, 4096):
                    data += part
            assert data.count(b"Holding") == 1  # and the connection was closed


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Holding("other", "i", (HELD,)), "the peer has another name"),
        (Granted("source", "i", "g", 1, 1, (), 0, 1.0), "the peer spoke out of turn"),
        (frame(b"\x00garbage"), "the peer sent what is no frame"),
        (frame(b"", size=64 << 20), "the peer announced a frame that is too long"),
        (frame(b"x", version=VERSION + 1), "the peer speaks another version"),
        (encoded(Holding("source", "i", (Held("m" * 600, "L", "C", 1, 0),))), "the peer sent what is no frame"),
        (encoded(Holding("source", "i", (Held("m", "L", "C", -1, 0),))), "the peer sent what is no frame"),
        (b"", "the peer did not answer in time"),
    ],
)
async def test_a_peer_that_lies_is_named_with_fixed_words(tmp_path: Path, answer: Any, words: str) -> None:
    async def play(link: Link) -> None:
        if isinstance(answer, bytes):
            link._socket.sendall(answer)
        else:
            await link.send(answer, 1.0)

    async with impostor(tmp_path / "run", play):
        (seen,) = await look(reader(tmp_path / "run"), 0.3)
        assert (seen.node, seen.models, seen.trouble) == ("source", (), words)


async def test_one_slow_peer_delays_no_other_and_not_for_long(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    listening, lock = directory.listen("hung")
    try:
        async with served(tmp_path / "run"):
            me = reader(tmp_path / "run")
            seen = {one.node: one.trouble for one in await look(me, 0.3)}
            assert seen == {"hung": "the peer did not answer in time", "source": None}
    finally:
        listening.close()
        os.close(lock)
        directory.close()


def peers(run_dir: Path) -> Peers:
    return Peers(reader(run_dir), {"m": Want(model="m", layout="L", checkpoint="C", size_bytes=SIZE, digest=None)})


async def test_offers_are_of_what_can_be_used_here_the_least_read_first(tmp_path: Path) -> None:
    one = peers(tmp_path / "run")
    other = [msgspec.structs.replace(HELD, **change) for change in ({"layout": "X"}, {"size_bytes": 1})]
    assert [one.use(held) for held in other] == [Use.OTHER_LAYOUT] * 2
    assert one.use(msgspec.structs.replace(HELD, checkpoint="X")) is Use.OTHER_CHECKPOINT
    assert one.use(msgspec.structs.replace(HELD, model="x")) is Use.UNKNOWN
    busy = msgspec.structs.replace(HELD, readers=2)
    one.seen = (Seen("n0", (busy,)), Seen("n1", tuple(other)), Seen("n2", (HELD,)), Seen("n3", (HELD,)))
    assert one.offers() == {"m": ("n2", "n3", "n0")}


async def test_many_who_want_to_know_share_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    async def counted(*asked: Any) -> Any:
        nonlocal looks
        looks += 1
        await asyncio.sleep(0.02)
        return await look(*asked)

    monkeypatch.setattr(module, "look", counted)
    async with served(tmp_path / "run"):
        one = peers(tmp_path / "run")
        await asyncio.gather(*(one.look() for _ in range(50)))
        await one.look()
        assert (looks, len(one.seen)) == (1, 1)
        waiting = asyncio.create_task(one.look(0.0))
        await asyncio.sleep(0)
        waiting.cancel()  # who leaves takes nobody's look with him
        await one.look(0.0)
        assert looks == 2
    (tmp_path / "run").rename(tmp_path / "gone")
    (tmp_path / "run").mkdir(mode=0o755)
    await one.look(0.0)
    assert one.seen == () and one.offers() == {}


def test_the_first_folder_that_is_ones_own_is_taken(tmp_path: Path) -> None:
    shared, mine = tmp_path / "shared", tmp_path / "mine"
    shared.mkdir(mode=0o755)
    shared.chmod(0o755)
    assert first_usable([shared, mine]) == mine
    assert mine.stat().st_mode & 0o777 == 0o700
    with pytest.raises(BadConfig, match="chmod 700"):
        first_usable([shared])
    with pytest.raises(BadConfig, match="--run-dir"):
        first_usable([])
