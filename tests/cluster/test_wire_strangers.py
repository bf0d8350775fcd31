"""What comes to a node's port and is no node of its cluster: each is refused with a sentence, the others keep on."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
from pathlib import Path

import aiohttp
import msgspec
import pytest
from wire_nodes import QUICK, SECRET, Node, node, run_of, token_at, tokens_of, until

from janus_server.errors import BadConfig
from janus_server.wire.frames import (
    KNOCK_MOST_BYTES,
    KNOCKS,
    STREAM_MOST_BYTES,
    Beat,
    Challenge,
    Hello,
    Proof,
    Refusal,
    Resume,
    Role,
    Run,
    Tokens,
    Welcome,
    read,
    write,
)
from janus_server.wire.handshake import Caller, Identity, Secret
from janus_server.wire.link import Links, Timing
from janus_server.wire.listen import MOST_UNPROVED, UNPROVED_MOST_BYTES, bind
from janus_server.wire.tls import TlsFiles, dialling_context
from janus_server.wire.trouble import Trouble


async def works(a: Node, b: Node) -> None:
    """The two serve each other as if nothing had happened."""
    reading = a.links[b.me.node].asking.run(run_of(os.urandom(4).hex(), 100), 0.0, None, lambda: None)
    assert await tokens_of(reading) == [token_at(position) for position in range(100)]


async def knock(session: aiohttp.ClientSession, b: Node) -> aiohttp.ClientWebSocketResponse:
    return await session.ws_connect(b.me.endpoint.replace("ws", "http", 1) + "/internal/wire")


async def answer_of(socket: aiohttp.ClientWebSocketResponse) -> object:
    message = await asyncio.wait_for(socket.receive(), 10)
    return read(message.data, KNOCKS, KNOCK_MOST_BYTES) if message.type is aiohttp.WSMsgType.BINARY else message.type


@pytest.mark.parametrize(
    ("other", "trouble"),
    [
        ({"secret": SECRET[::-1]}, Trouble.SECRET),
        ({"cluster": "elsewhere"}, Trouble.CLUSTER),
        ({"name": "b"}, Trouble.NAME),
    ],
)
async def test_who_does_not_belong_is_refused_with_its_sentence(other: dict[str, str], trouble: Trouble) -> None:
    async with node("a") as a, node("b") as b:
        await a.link(b.me)
        async with node(**{"name": "x", **other}) as stranger:
            link = await stranger.link(Identity(stranger.me.cluster, "b", "", b.me.endpoint), wait=False)
            await until(lambda: link.state(Role.CONTROL) is trouble and link.state(Role.STREAM) is trouble)
            assert trouble.sentence
            if trouble is not Trouble.NAME:  # that one is found by who dials, too
                assert (stranger.me.node, trouble) in b.refused
        await works(a, b)


async def test_another_version_is_refused_by_its_first_bytes() -> None:
    async with node("a") as a, node("b") as b, aiohttp.ClientSession() as session:
        await a.link(b.me)
        async with await knock(session, b) as socket:
            await socket.send_bytes(b"\x00\x63" + b"whatever that version says")
            assert await answer_of(socket) == Refusal(Trouble.VERSION)
        await works(a, b)


async def test_a_node_of_another_version_that_answers_is_left() -> None:
    async def answer(request: aiohttp.web.BaseRequest) -> aiohttp.web.StreamResponse:
        socket = aiohttp.web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.send_bytes(b"\x00\x63xyz")
        await socket.receive()
        return socket

    import aiohttp.web

    server = aiohttp.web.ServerRunner(aiohttp.web.Server(answer))
    await server.setup()
    listening = bind("127.0.0.1", 0, tls=False)
    await aiohttp.web.SockSite(server, listening).start()
    async with node("a") as a:
        endpoint = f"ws://127.0.0.1:{listening.getsockname()[1]}"
        link = await a.link(Identity("c", "b", "", endpoint), wait=False)
        await until(lambda: link.state(Role.CONTROL) is Trouble.VERSION)
    await server.cleanup()


async def test_garbage_before_the_handshake_closes_that_connection_alone() -> None:
    chance = random.Random(7)
    async with node("a") as a, node("b") as b, aiohttp.ClientSession() as session:
        await a.link(b.me)
        for size in (0, 1, 2, 3, 100, KNOCK_MOST_BYTES, KNOCK_MOST_BYTES + 1):
            async with await knock(session, b) as socket:
                await socket.send_bytes(b"\x00\x01"[:size] + chance.randbytes(max(0, size - 2)))
                refusal = await answer_of(socket)
                assert refusal in (Refusal(Trouble.GARBAGE), Refusal(Trouble.TOO_LONG), Refusal(Trouble.DELAYED))
        async with await knock(session, b) as socket:
            await socket.send_str("hello")
            assert await answer_of(socket) in (Refusal(Trouble.GARBAGE), Refusal(Trouble.DELAYED))
        await works(a, b)


async def test_whoever_sends_too_much_before_the_handshake_is_cut_off() -> None:
    async with node("a") as a, node("b") as b, aiohttp.ClientSession() as session:
        await a.link(b.me)
        async with await knock(session, b) as socket:
            with pytest.raises((ConnectionError, aiohttp.ClientError, AssertionError)):
                await socket.send_bytes(bytes(UNPROVED_MOST_BYTES * 4))
                message = await socket.receive()
                assert message.type is aiohttp.WSMsgType.BINARY  # it is not: the connection is gone
        await works(a, b)


async def test_whoever_says_nothing_is_cut_off_and_there_are_only_so_many_of_them() -> None:
    quick = Timing(heartbeat=QUICK.heartbeat, handshake_s=1.0, longest_s=0.2)
    async with node("a") as a, node("b", timing=quick) as b:
        await a.link(b.me)
        port = int(b.me.endpoint.rpartition(":")[2])
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MOST_UNPROVED + 20)]
        await works(a, b)  # a connection that has proved itself counts no longer
        for reader, writer in idle:
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
        assert b.listener._door.unproved == 0
        async with node("late") as late:
            await late.link(b.me)


async def test_nothing_else_is_served_on_that_port() -> None:
    async with node("b") as b, aiohttp.ClientSession() as session:
        base = b.me.endpoint.replace("ws", "http", 1)
        for path in ("/", "/v1/models", "/metrics", "/internal/wire", "/internal/wire/x", "/internal"):
            async with session.get(base + path) as response:
                assert response.status == 404 and await response.text() == ""
        async with session.post(base + "/internal/wire", data=b"x") as response:
            assert response.status == 404


async def test_a_name_that_fails_too_often_waits_and_its_neighbours_do_not() -> None:
    async with node("b") as b, aiohttp.ClientSession() as session:
        me = Identity("c", "x", "i", "ws://127.0.0.1:1")
        seen = []
        for _ in range(8):
            async with await knock(session, b) as socket:
                caller = Caller(me, b.me, Role.CONTROL, Secret("wrong" * 10), os.urandom(32))
                await socket.send_bytes(write(caller.hello))
                step = await answer_of(socket)
                if isinstance(step, Challenge):
                    proof = caller.hear(step)
                    assert isinstance(proof, Proof)
                    await socket.send_bytes(write(proof))
                    step = await answer_of(socket)
                assert isinstance(step, Refusal)
                seen.append(step.why)
        assert seen == [Trouble.SECRET] * 5 + [Trouble.DELAYED] * 3
        async with node("a") as a:
            await a.link(b.me)
            await works(a, b)


async def test_a_node_whose_knowledge_is_old_leaves_by_itself_and_has_not_failed() -> None:
    async with node("a") as a, node("b") as b:
        link = await a.link(msgspec.structs.replace(b.me, incarnation="before"), wait=False)
        await until(lambda: link.state(Role.CONTROL) is Trouble.PEER)
        await asyncio.sleep(1.0)  # it asks again and again
        assert len(b.listener._doorman) == 0 and b.refused == []
        await a.links.drop("b")
        await a.link(b.me)
        await works(a, b)


async def test_a_recorded_handshake_opens_nothing() -> None:
    async with node("b") as b, aiohttp.ClientSession() as session:
        caller = Caller(Identity("c", "a", "i", "ws://127.0.0.1:1"), b.me, Role.STREAM, Secret(SECRET), os.urandom(32))
        async with await knock(session, b) as socket:
            await socket.send_bytes(write(caller.hello))
            challenge = await answer_of(socket)
            assert isinstance(challenge, Challenge)
            proof = caller.hear(challenge)
            assert isinstance(proof, Proof)
            await socket.send_bytes(write(proof))
            assert isinstance(await answer_of(socket), Welcome)
        async with await knock(session, b) as socket:
            await socket.send_bytes(write(caller.hello))
            assert isinstance(await answer_of(socket), Challenge)
            await socket.send_bytes(write(proof))
            assert await answer_of(socket) == Refusal(Trouble.SECRET)


@pytest.mark.parametrize(
    "message",
    [
        write(Resume(())) + b"x",
        b"\x00\x01" + b"\x91" * 100_000,
        bytes(STREAM_MOST_BYTES + 1),
        write(Tokens(())),  # a frame of the other direction
        write(Hello("c", "a", "i", "", "", Role.STREAM, bytes(32))),
        write(Beat(1, 99)),  # of a beat that was never sent
        write(Run(stream=1, id="r", call="r", upto=1, request=run_of("r", 5).request)),  # before Resume
    ],
    ids=["trailing", "nested", "huge", "other direction", "handshake", "beat", "no resume"],
)
async def test_a_node_that_sends_what_it_must_not_loses_its_link_and_nobody_else_does(message: bytes) -> None:
    async with node("a") as a, node("b") as b, aiohttp.ClientSession() as session:
        await a.link(b.me)
        caller = Caller(
            Identity("c", "bad", "i", "ws://127.0.0.1:1"), b.me, Role.STREAM, Secret(SECRET), os.urandom(32)
        )
        async with await knock(session, b) as socket:
            await socket.send_bytes(write(caller.hello))
            step = caller.hear(await answer_of(socket))  # type: ignore[arg-type]
            assert isinstance(step, Proof)
            await socket.send_bytes(write(step))
            assert isinstance(await answer_of(socket), Welcome)
            await socket.send_bytes(message)
            while (heard := await asyncio.wait_for(socket.receive(), 10)).type is aiohttp.WSMsgType.BINARY:
                pass
            assert heard.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSING)
        await works(a, b)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, each with a certificate for a node."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificates can be made")
    folder = tmp_path_factory.mktemp("tls")
    for ca in ("ours", "theirs"):
        _openssl(folder, f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={ca} -keyout {ca}.key -out {ca}.pem")
        _openssl(folder, f"req -newkey rsa:2048 -nodes -subj /CN=node -keyout {ca}-node.key -out {ca}.csr")
        _openssl(folder, f"x509 -req -in {ca}.csr -CA {ca}.pem -CAkey {ca}.key -CAcreateserial -days 2 "
                         f"-out {ca}-node.pem")  # fmt: skip
    return folder


def _openssl(folder: Path, words: str) -> None:
    subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)


def tls_of(folder: Path, ca: str, trusts: str) -> TlsFiles:
    return TlsFiles(folder / f"{ca}-node.pem", folder / f"{ca}-node.key", folder / f"{trusts}.pem")


async def test_links_under_tls_need_a_certificate_of_the_cluster_on_both_ends(authority: Path) -> None:
    ours = tls_of(authority, "ours", "ours")
    async with node("a", tls=ours) as a, node("b", tls=ours) as b:
        await a.link(b.me)
        await works(a, b)
        assert isinstance(b.listener._certificate, bytes) and len(b.listener._certificate) == 32
        foreign = dialling_context(tls_of(authority, "theirs", "ours"))
        links = Links(Identity("c", "x", "i", "ws://127.0.0.1:1"), Secret(SECRET), foreign, QUICK)
        link = links.open(b.me, lambda *_: None, lambda *_: None)
        await asyncio.sleep(0.5)
        assert link.state(Role.CONTROL) in (Trouble.TLS, Trouble.GONE, Trouble.NO_ANSWER)
        await links.close()
    async with node("a", tls=ours) as a, node("b", tls=tls_of(authority, "theirs", "ours")) as b:
        link = await a.link(b.me, wait=False)
        await until(lambda: link.state(Role.CONTROL) is Trouble.TLS)


async def test_beyond_loopback_there_is_no_link_without_tls(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="TLS"):
        bind("0.0.0.0", 0, tls=False)
    async with node("a") as a:
        for endpoint in ("ws://10.0.0.7:7000", "ws://localhost:7000", "ws://[fe80::1]:7000"):
            with pytest.raises(BadConfig, match="TLS"):
                await a.link(Identity("c", "b", "", endpoint), wait=False)
        for endpoint in ("http://127.0.0.1:1", "ws://127.0.0.1", "ws://127.0.0.1:99999", "wss://a b:1", "wss://h:0/x"):
            with pytest.raises(BadConfig, match="address of a node"):
                await a.link(Identity("c", "b", "", endpoint), wait=False)
