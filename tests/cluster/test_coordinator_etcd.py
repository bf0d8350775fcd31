"""Sessions in this process, against real etcd servers that die, return, lose members, want a password or are none."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import ssl
import subprocess
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from etcd_server import EtcdServer, etcd_servers, free_ports
from tcp_gate import Gate, Mode

from janus_server.coordinator.base import Trouble, boot_clock
from janus_server.coordinator.etcd import EtcdCoordinator
from janus_server.coordinator.etcdsession import EtcdSession
from janus_server.coordinator.gateway import Gateway, Login
from janus_server.coordinator.records import Came, Change, Cut, Deposed, Elected, Led, Member, Vacant, Went
from janus_server.errors import BadConfig

LEASE_S = 2.0
PATIENCE_S = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    with etcd_servers(tmp_path) as servers:
        yield servers[0]


class Seen:
    """What one session tells, for as long as it lasts."""

    def __init__(self, session: EtcdSession) -> None:
        self.session = session
        self.told: list[Change] = []
        self._task = asyncio.create_task(self._listen())

    def of(self, kind: type[Any]) -> list[Any]:
        return [change for change in self.told if isinstance(change, kind)]

    async def _listen(self) -> None:
        async for change in self.session.observe():
            self.told.append(change)


@asynccontextmanager
async def joined(endpoints: list[str], *names: str, **how: Any) -> AsyncIterator[list[Seen]]:
    """Sessions of these nodes, all of which stand; they see each other and one of them leads."""
    coordinator = EtcdCoordinator([f"http://{e}" for e in endpoints], "tests", lease_s=LEASE_S, **how)
    seen: list[Seen] = []
    try:
        for name in names:
            seen.append(Seen(await coordinator.join(member(name))))
            seen[-1].session.campaign()
        await until("one leads", lambda: any(s.session.leadership() for s in seen))
        await until("all see all", lambda: all(len(s.session.view.members) == len(names) for s in seen))
        await until("all see it", lambda: all(s.session.view.leader for s in seen))
        yield seen
    finally:
        for each in seen:
            await each.session.close()


def member(name: str) -> Member:
    return Member(name=name, incarnation=f"{name}{time.monotonic_ns():x}", url=f"wss://{name}:1", version="1")


async def until(what: str, holds: Callable[[], Any]) -> float:
    began_s = time.monotonic()
    while not holds():
        assert time.monotonic() < began_s + PATIENCE_S, f"in vain: {what}"
        await asyncio.sleep(0.01)
    return time.monotonic() - began_s


def leader(seen: list[Seen]) -> Seen:
    return next(each for each in seen if each.session.leadership() is not None)


async def ask(server: EtcdServer, path: str, what: dict[str, Any]) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http, http.post(f"{server.url}{path}", json=what) as answer:
        return json.loads(await answer.text())


def b64(text: str) -> str:
    return b64encode(text.encode()).decode()


async def test_a_leader_that_resigns_or_leaves_is_followed_at_once(server: EtcdServer) -> None:
    async with joined([server.endpoint], "a", "b", "c") as seen:
        first = leader(seen)
        held = first.session.leadership()
        assert held is not None
        assert boot_clock() < held.until_s < boot_clock() + LEASE_S
        await first.session.resign()
        assert first.session.leadership() is None
        took_s = await until("another leads", lambda: [s for s in seen if s.session.leadership()])
        second = leader(seen)
        assert second is not first
        assert second.session.view.leading is not None
        assert second.session.view.leading > held.term
        await until("the first sees it", lambda: first.session.view.term == second.session.view.leading)
        assert {type(change) for change in first.told} >= {Came, Led, Elected, Deposed, Vacant}
        print(f"resigned: the next led {took_s * 1e3:.0f} ms later")
        await second.session.close()
        third = next(s for s in seen if s is not first and s is not second)
        await until("the last one leads", third.session.leadership)
        await until("the second is missed", lambda: first.of(Went))
        assert first.of(Went)[0].member.name == second.session.member.name
        assert first.session.leadership() is None


async def test_a_lease_that_is_lost_is_replaced_under_the_same_name(server: EtcdServer) -> None:
    async with joined([server.endpoint], "a", "b") as seen:
        lost, other = leader(seen), next(s for s in seen if s.session.leadership() is None)
        before = lost.session.member
        for lease in (await ask(server, "/v3/lease/leases", {}))["leases"]:
            await ask(server, "/v3/lease/revoke", {"ID": lease["ID"]})
        await until("both are back", lambda: all(len(s.session.view.members) == 2 and s.of(Deposed) for s in [lost]))
        await until("another incarnation", lambda: other.session.view.member(before.name) == lost.session.member)
        assert lost.session.member.process == before.process
        assert lost.session.member.incarnation != before.incarnation
        await until("one leads", lambda: any(s.session.leadership() for s in seen))
        assert max(s.session.view.leading or 0 for s in seen) > lost.of(Elected)[0].term


async def test_keys_that_somebody_removes_or_writes_by_hand_do_no_harm(server: EtcdServer) -> None:
    async with joined([server.endpoint], "a", "b") as seen:
        key = {"key": b64("/janus/tests/leader")}
        term = leader(seen).session.view.term
        await ask(server, "/v3/kv/deleterange", key)
        await until("another term", lambda: [s for s in seen if s.session.leadership() and s.session.view.term > term])
        await ask(server, "/v3/kv/put", {**key, "value": b64("garbage")})
        await until("nobody leads", lambda: not any(s.session.leadership() for s in seen))
        await ask(server, "/v3/kv/put", {"key": b64("/janus/tests/members/\0x"), "value": b64("{}")})
        await ask(server, "/v3/kv/put", {"key": b64("/janus/tests/members/c"), "value": b64('{"name": "b"}')})
        await asyncio.sleep(0.5)
        assert not any(s.session.leadership() for s in seen)
        assert all(len(s.session.view.members) == 2 for s in seen)
        await ask(server, "/v3/kv/deleterange", key)
        await until("one leads again", lambda: any(s.session.leadership() for s in seen))
        await ask(server, "/v3/kv/deleterange", {"key": b64("/janus/tests/members/a")})
        await until("it is back", lambda: all(s.session.view.member("a") and s.of(Went) for s in seen))


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_nobody_is_lost_while_etcd_is_away(server: EtcdServer, how: str) -> None:
    away_s = 2.5 * LEASE_S
    async with joined([server.endpoint], "a", "b", "c") as seen:
        first, before = leader(seen), seen[0].session.view
        held = first.session.leadership()
        assert held is not None
        server.kill() if how == "killed" else server.send(signal.SIGSTOP)
        await until("the leader stops", lambda: first.session.leadership() is None)
        assert boot_clock() < held.until_s + LEASE_S + 1.0
        await asyncio.sleep(away_s)
        assert all(s.of(Cut) for s in seen)
        assert all(s.session.view.members == before.members for s in seen)
        assert not any(s.session.leadership() for s in seen)
        assert not any(s.of(Went) for s in seen)
        server.start() if how == "killed" else server.send(signal.SIGCONT)
        took_s = await until("one leads", lambda: any(s.session.leadership() for s in seen))
        print(f"etcd {how} for {away_s:.0f} s: one led {took_s:.2f} s after it came back")
        await until("no cut", lambda: all(s.session.view.cut is None for s in seen))
        await until("all are there", lambda: all(len(s.session.view.members) == 3 for s in seen))
        # Whoever had to register anew came back at once: at no moment was anybody gone.
        went = [change for s in seen for change in zip(s.told, s.told[1:], strict=False) if isinstance(change[0], Went)]
        assert all(isinstance(came, Came) and came.member.name == gone.member.name for gone, came in went)
        assert leader(seen).session.view.term > before.term
        assert first.of(Deposed)[0].term == before.term


async def test_a_node_that_dies_while_etcd_is_away_is_missed_afterwards(server: EtcdServer) -> None:
    async with joined([server.endpoint], "a", "b") as seen:
        server.kill()
        await until("cut", lambda: all(s.session.view.cut for s in seen))
        await seen[1].session.close()
        server.start()
        await until("it is missed", lambda: seen[0].of(Went))
        assert [m.name for m in seen[0].session.view.members] == ["a"]


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_one_of_three_servers_may_die(tmp_path: Path, victim: int) -> None:
    with etcd_servers(tmp_path, 3) as servers:
        async with joined([s.endpoint for s in servers], "a", "b") as seen:
            before = seen[0].session.view
            servers[victim].kill()
            began_s = time.monotonic()
            await asyncio.sleep(LEASE_S)
            await until("one leads", lambda: any(s.session.leadership() for s in seen))
            await until("no cut", lambda: all(s.session.view.cut is None for s in seen))
            term = leader(seen).session.view.term
            kept = "the same term" if term == before.term else "another term"
            print(f"server {victim} of 3 killed: one leads {time.monotonic() - began_s:.2f} s later, {kept}")
            assert term >= before.term
            assert len(seen[0].session.view.members) == 2
            servers[victim].start()
            servers[victim].wait()
            await leader(seen).session.resign()
            await until("one leads", lambda: any(s.session.leadership() for s in seen))


async def test_history_that_etcd_has_dropped_is_read_anew(server: EtcdServer) -> None:
    async with joined([server.endpoint], "a", "b") as seen:
        server.kill()
        await until("cut", lambda: all(s.session.view.cut for s in seen))
        server.start()
        await asyncio.to_thread(server.wait)
        for _ in range(20):
            at = (await ask(server, "/v3/kv/put", {"key": b64("x"), "value": b64("x")}))["header"]["revision"]
        await ask(server, "/v3/kv/compaction", {"revision": at, "physical": True})
        await until("one leads", lambda: any(s.session.leadership() for s in seen))
        await leader(seen).session.resign()
        await until("the other leads", lambda: any(s.session.leadership() for s in seen))
        assert all(len(s.session.view.members) == 2 for s in seen)


async def test_an_etcd_that_lost_its_data_is_not_trusted_with_new_terms(server: EtcdServer) -> None:
    async with joined([server.endpoint], "a", "b") as seen:
        server.forget()
        server.start()
        await until("all say so", lambda: all("have lost what they knew" in (s.session.view.cut or "") for s in seen))
        await until("nobody leads", lambda: not any(s.session.leadership() for s in seen))
        await asyncio.sleep(LEASE_S)
        assert not any(s.session.leadership() for s in seen)
        assert all(len(s.session.view.members) == 2 for s in seen)
    async with joined([server.endpoint], "a", "b"):
        pass


async def test_a_server_that_went_silent_is_left_for_another(tmp_path: Path) -> None:
    """Its connections stay open and say nothing, as when a network is cut."""
    with etcd_servers(tmp_path, 3) as servers:
        async with joined([servers[0].endpoint, servers[1].endpoint], "a", "b") as seen:
            servers[0].send(signal.SIGSTOP)
            await asyncio.sleep(1.5 * LEASE_S)
            took_s = await until("one leads", lambda: any(s.session.leadership() for s in seen))
            await leader(seen).session.resign()
            await until("the other leads", lambda: any(s.session.leadership() for s in seen))
            print(f"one of three servers silent: a leader after {1.5 * LEASE_S + took_s:.2f} s at most")
            servers[0].send(signal.SIGCONT)


async def test_a_server_that_wants_a_password_says_so(server: EtcdServer) -> None:
    await ask(server, "/v3/auth/user/add", {"name": "root", "password": "pw"})
    await ask(server, "/v3/auth/user/grant", {"user": "root", "role": "root"})
    await ask(server, "/v3/auth/enable", {})
    for login in (None, Login("root", "wrong")):
        with pytest.raises(BadConfig, match="user name and password"):
            async with joined([server.endpoint], "a", login=login):
                pass
    assert "pw" not in repr(Login("root", "pw"))
    async with joined([server.endpoint], "a", "b", login=Login("root", "pw")) as seen:
        await leader(seen).session.resign()
        await until("the other leads", lambda: any(s.session.leadership() for s in seen))


async def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here to make a certificate with")
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2".split()
    name = ["-subj", "/CN=etcd", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run([*make, *name], check=True, capture_output=True)
    client, peer = free_ports(2)
    at = f"https://127.0.0.1:{client}"
    etcd = EtcdServer(tmp_path, "e", client, peer, f"e=http://127.0.0.1:{peer}", "--cert-file", cert, "--key-file", key,
                      "--listen-client-urls", at, "--advertise-client-urls", at)  # fmt: skip
    etcd.start()
    try:
        trusted = ssl.create_default_context(cafile=cert)
        session = await EtcdCoordinator([at], "tests", lease_s=LEASE_S, tls=trusted).join(member("a"))
        session.campaign()
        await until("it leads", session.leadership)
        await session.close()
        with pytest.raises(BadConfig, match="certificate is not trusted"):
            await EtcdCoordinator([at], "tests").join(member("a"))
        with pytest.raises(BadConfig, match="etcds://"):
            await EtcdCoordinator([etcd.url], "tests", patience_s=0.5).join(member("a"))
    finally:
        etcd.kill()


async def test_a_name_is_taken_for_as_long_as_its_node_lives(server: EtcdServer) -> None:
    async with joined([server.endpoint], "a", "b") as seen:
        began_s = time.monotonic()
        with pytest.raises(BadConfig, match="a node named a is in the cluster already; give this one another name"):
            async with joined([server.endpoint], "a"):
                pass
        print(f"a second node of one name was refused after {time.monotonic() - began_s:.1f} s")
        assert not any(s.of(Went) for s in seen)
        await seen[0].session.close()
        again = await EtcdCoordinator([server.url], "tests", lease_s=LEASE_S).join(member("a"))
        await until("it is back", lambda: seen[1].session.view.member("a") == again.member)
        await again.close()


@pytest.mark.parametrize("mode", [Mode.SILENT, Mode.RUBBISH])
async def test_a_leader_that_is_cut_off_stops_before_another_begins(server: EtcdServer, mode: Mode) -> None:
    async with Gate(server.endpoint) as gate, joined([gate.endpoint], "a") as cut_off:
        near = cut_off[0]
        other = Seen(await EtcdCoordinator([server.url], "tests", lease_s=LEASE_S).join(member("b")))
        other.session.campaign()
        gate.mode = mode
        acts: dict[str, list[float]] = {"a": [], "b": []}
        while len(acts["b"]) < 50:
            for each in (near, other):
                at_s = boot_clock()
                if each.session.leadership() is not None:
                    acts[each.session.member.name].append(at_s)
            await asyncio.sleep(0.01)
        assert acts["a"]
        assert max(acts["a"]) < min(acts["b"])
        assert near.of(Cut)
        assert near.of(Deposed)
        assert [m.name for m in near.session.view.members] in (["a"], ["a", "b"])
        gate.mode = Mode.OPEN
        took_s = await until("it is back", lambda: near.session.view.cut is None and near.session.view.member("b"))
        await until("it knows the leader", lambda: near.session.view.term == other.session.view.leading)
        await until("both see both", lambda: all(len(s.session.view.members) == 2 for s in (near, other)))
        print(
            f"{mode.name.lower()}: the other led {min(acts['b']) - max(acts['a']):.2f} s later; back in {took_s:.2f} s"
        )
        assert near.session.member.incarnation.endswith(".1")
        await other.session.close()


async def test_a_far_server_is_no_trouble(server: EtcdServer) -> None:
    async with Gate(server.endpoint, delay_s=0.08) as gate, joined([gate.endpoint], "a", "b") as seen:
        term = leader(seen).session.view.term
        await asyncio.sleep(2 * LEASE_S)
        assert leader(seen).session.view.term == term
        assert not any(s.of(Cut) for s in seen)


async def test_where_nothing_answers_joining_ends_with_a_sentence() -> None:
    with pytest.raises(BadConfig, match="no etcd server answers"):
        async with joined([f"127.0.0.1:{free_ports(1)[0]}"], "a", patience_s=1.0):
            pass


ANSWERS: list[tuple[int, bytes]] = [
    (200, b""),
    (200, b"hello"),
    (200, b"[]"),
    (200, b'{"ID": "x", "TTL": "y"}'),
    (200, b'{"ID": "1", "TTL": "2", "header": 7}'),
    (200, b'{"ID": 99999999999999999999999999, "TTL": "2"}'),
    (200, b"\xff\xfe"),
    (200, b"[" * 100000),
    (404, b"Not Found"),
    (500, b'{"error": {"a": 1}}'),
    (302, b""),
]


@pytest.mark.parametrize(("status", "body"), ANSWERS)
async def test_what_is_not_etcd_is_refused(status: int, body: bytes) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers={"Location": "http://127.0.0.1:1/"})

    await refused_by(answer, "not an etcd server|no etcd server answers")


WIRE = [
    b"",
    b"\0" * 1000,
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n\r\nnot gzip!",
    b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 9\r\n\r\nnot br!!!",
    b"HTTP/1.1 200 OK\r\nContent-Type: \xff; charset=\xff\r\nSet-Cookie: \xff\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n{}",
    b"HTTP/1.1 999999 \r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
]


@pytest.mark.parametrize("answer", WIRE, ids=range(len(WIRE)))
async def test_what_does_not_even_speak_http_is_refused(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(BadConfig, match=r"not an etcd server|no etcd server answers"):
            async with joined([f"127.0.0.1:{port}"], "a", patience_s=0.3):
                pass
        gateway = Gateway([f"http://127.0.0.1:{port}"], None, 1.0)
        with pytest.raises(Trouble):
            async for _ in gateway.watch(b"a", b"b", 1, 1.0):
                pass
        await gateway.close()


async def test_an_answer_without_an_end_is_not_read(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * (1 << 20))

    await refused_by(answer, "not an etcd server|no etcd server answers")


async def refused_by(answer: Any, sentence: str) -> None:
    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    port = free_ports(1)[0]
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        with pytest.raises(BadConfig, match=sentence):
            async with joined([f"127.0.0.1:{port}"], "a", patience_s=1.0):
                pass
    finally:
        await runner.cleanup()
