"""Pages read by nodes of other hosts: equal bytes over real sockets, with TLS and without, and what breaks a line.

Sources that die or stop are processes of their own; peers that lie are written out frame by frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from far_peers import (
    FREE,
    PAGE,
    dialler,
    process,
    pulled,
    reader,
    source,
    until,
    want,
)
from hypothesis import given
from hypothesis import strategies as st
from transfer_peers import fill

from janus_server.kv.move import Pace, Stopped, sampled_digest_of
from janus_server.transfer import streamed
from janus_server.transfer.door import _Reading
from janus_server.transfer.frames import (
    ANSWER_MOST_BYTES,
    ANSWERS,
    FETCH_MOST_BYTES,
    Answer,
    Ask,
    Check,
    Claim,
    Denial,
    Denied,
    Fetch,
    Granted,
    PeerTrouble,
    Sending,
)
from janus_server.transfer.grants import BeingRead, Grant, Offer
from janus_server.transfer.line import Line
from janus_server.transfer.pull import claiming, pulling
from janus_server.wire.tls import TlsFiles

SIZE = 4 * PAGE - 100
SLOW = 2e6  # bytes a second


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificates can be made")
    folder = tmp_path_factory.mktemp("tls")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=node".split()
    subprocess.run([*make, "-keyout", "key.pem", "-out", "node.pem"], cwd=folder, check=True, capture_output=True)
    return TlsFiles(folder / "node.pem", folder / "key.pem", folder / "node.pem")


@pytest.fixture(params=["plain", "tls"])
def either(request: pytest.FixtureRequest) -> TlsFiles | None:
    return None if request.param == "plain" else request.getfixturevalue("tls")


def with_line(endpoint: str, play: Callable[[Line], Any], **who: Any) -> Any:
    """What a proved peer of few manners hears."""
    line = dialler(endpoint, **who)(2.0)
    try:
        return play(line)
    finally:
        line.close()


def asking(**change: Any) -> Ask:
    return Ask(**{"node": "reader", "incarnation": "p2", "model": "m", "layout": "L", "checkpoint": "C",
                  "size_bytes": SIZE, **change})  # fmt: skip


def ask(line: Line, question: Any) -> Answer:
    line.send(question, 2.0)
    return line.receive(ANSWERS, ANSWER_MOST_BYTES, 2.0)


# Bytes


@pytest.mark.parametrize("size", [1, PAGE - 1, PAGE, PAGE + 1, SIZE, FETCH_MOST_BYTES + 3, 3 * FETCH_MOST_BYTES - 7])
async def test_what_is_read_over_the_network_is_the_model(size: int, either: TlsFiles | None) -> None:
    async with source(size, either) as one:
        for _ in range(2):
            assert np.array_equal(await pulled(reader(one.endpoint, either), size), one.shelf.window)
        await until(lambda: one.shelf.grants.readers("m") == [] and one.door.lines == 0)


async def test_several_lines_share_a_copy(monkeypatch: pytest.MonkeyPatch, either: TlsFiles | None) -> None:
    monkeypatch.setattr(streamed, "_SHARED_BYTES", FETCH_MOST_BYTES)
    size, dials = 5 * FETCH_MOST_BYTES + 11, []
    async with source(size, either) as one:
        peering = reader(one.endpoint, either, streams=3)
        known = peering.others.source  # type: ignore[attr-defined]
        peering.others.source = known._replace(dial=lambda s: dials.append(s) or known.dial(s))  # type: ignore
        seen: list[int] = []
        got = await pulled(peering, size, Pace(seen.append, lambda: True))
        assert np.array_equal(got, one.shelf.window)
        assert len(dials) == 3 and seen == sorted(seen) and seen[-1] == size
        await until(lambda: one.shelf.grants.readers("m") == [] and one.door.lines == 0)


async def test_a_line_that_fails_beside_others_fails_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot even be opened does not."""
    monkeypatch.setattr(streamed, "_SHARED_BYTES", FETCH_MOST_BYTES)
    size = 8 * FETCH_MOST_BYTES
    async with source(size) as one:
        peering, first = reader(one.endpoint, streams=2), threading.Event()
        known = peering.others.source  # type: ignore[attr-defined]

        def dial(limit_s: float) -> Line:
            line = known.dial(limit_s)
            if first.is_set():
                line.cut()
            first.set()
            return line

        peering.others.source = known._replace(dial=dial)  # type: ignore[attr-defined]
        with pytest.raises(PeerTrouble, match="went away"):
            # Slow enough for the second line to take part.
            await pulled(peering, size, Pace(lambda done: time.sleep(0.02), lambda: True))

        lines: list[Line] = []
        peering.others.source = known._replace(  # type: ignore[attr-defined]
            dial=lambda s: lines.append(known.dial(s)) or lines[-1]
        )
        done: list[int] = []
        cut: list[int] = []

        def slowly(so_far: int) -> None:
            done.append(so_far)
            if len(lines) == 2 and not cut:
                lines[0].cut()
                cut.append(so_far)
            time.sleep(0.02)

        with pytest.raises(PeerTrouble, match="went away"):  # the first line: the others end with it
            await pulled(peering, size, Pace(slowly, lambda: True))
        assert done[-1] <= cut[0] + 2 * FETCH_MOST_BYTES < size

        def refuse(limit_s: float) -> Line:
            if threading.current_thread().name.startswith("janus-stream"):
                raise PeerTrouble("no")
            return known.dial(limit_s)

        peering.others.source = known._replace(dial=refuse)  # type: ignore[attr-defined]
        assert np.array_equal(await pulled(peering, size), one.shelf.window)


@given(
    pages=st.permutations(range(9)).flatmap(lambda p: st.integers(1, 9).map(lambda n: tuple(p[:n]))),
    page=st.integers(1, 7), cut=st.data(),
)  # fmt: skip
def test_parts_of_a_grant_lie_where_its_pages_are(pages: tuple[int, ...], page: int, cut: st.DataObject) -> None:
    size = len(pages) * page - cut.draw(st.integers(0, page - 1))
    at = cut.draw(st.integers(0, size - 1))
    count = cut.draw(st.integers(1, size - at))
    memory = np.arange(9 * page)
    window = np.concatenate([memory[p * page : (p + 1) * page] for p in pages])[:size]
    reading = _Reading(
        Grant(id="", peer="", incarnation="", model="", layout="", pages=pages, size_bytes=size, expires_s=0.0), page
    )
    spans = list(reading.spans(at, count))
    assert np.array_equal(np.concatenate([memory[o : o + n] for o, n in spans]), window[at : at + count])


@given(sizes=st.lists(st.integers(0, 9), max_size=8), most=st.integers(1, 12))
def test_pieces_cover_what_is_to_be_filled_once_and_in_order(sizes: list[int], most: int) -> None:
    whole = np.zeros(sum(sizes), np.uint8)
    ends = np.cumsum([0, *sizes])
    parts = [whole[a:b].data for a, b in itertools.pairwise(ends)]
    at = 0
    for piece in streamed._cut(parts, lambda: most):
        assert piece.at == at and 1 <= piece.size_bytes == sum(map(len, piece.into)) <= most
        for part in piece.into:
            np.frombuffer(part, np.uint8)[:] += np.arange(at + 1, at + 1 + len(part), dtype=np.uint8)
            at += len(part)
    assert np.array_equal(whole, np.arange(1, len(whole) + 1)) and at == len(whole)


async def test_a_pace_is_kept_and_may_change(either: TlsFiles | None) -> None:
    """The source's wish, the reader's own limit and the mover's rate: the slowest holds. Lower bounds only."""
    async with source(SIZE, either) as one:
        for change in ("source", "reader", "mover"):
            one.shelf.rate = SIZE / 0.2 if change == "source" else None
            limit = SIZE / 0.2 if change == "reader" else None
            rate = SIZE / 0.2 if change == "mover" else None
            start_s = time.monotonic()
            pace = Pace(FREE.on_bytes, FREE.may_go, lambda rate=rate: rate)
            got = await pulled(reader(one.endpoint, either, bytes_per_s=limit), SIZE, pace)
            assert np.array_equal(got, one.shelf.window)
            assert time.monotonic() - start_s > 0.15


# Pages that are no weights


async def test_pages_of_any_kind_are_claimed_by_the_process_that_was_given_them(either: TlsFiles | None) -> None:
    async with source(SIZE, either) as one:
        memory = one.shelf.memory
        pages = (0, 2, 5)
        views = [memory.slab[p * PAGE : (p + 1) * PAGE] for p in pages]
        offer = Offer(layout="kv", checkpoint="", size_bytes=3 * PAGE, pages=pages, digest=sampled_digest_of(views))
        grant = one.shelf.grants.issue("reader", "p2", "m", offer, 10.0, term=3)
        assert isinstance(grant, Grant) and grant.term == 3
        mine = [np.zeros(PAGE, np.uint8) for _ in pages]
        with pytest.raises(BeingRead), one.shelf.grants.barred("m"):
            raise AssertionError("it was barred while it was being read")
        async with claiming(reader(one.endpoint, either), "source", grant.id, 3 * PAGE) as pull:
            await asyncio.to_thread(pull.fill_parts, mine, FREE)
            await pull.confirm()
        assert all(np.array_equal(a, b) for a, b in zip(mine, views, strict=True))
        await until(lambda: one.shelf.grants.readers("m") == [])
        with pytest.raises(PeerTrouble, match="grant ended"):  # used once
            async with claiming(reader(one.endpoint, either), "source", grant.id, 3 * PAGE):
                raise AssertionError("it was granted")
        with one.shelf.grants.barred("m"):
            assert one.shelf.grants.issue("reader", "p2", "m", offer, 10.0) is Denial.GOING


async def test_pages_that_were_swapped_or_are_others_are_noticed() -> None:
    async with source(SIZE) as one:
        memory, pages = one.shelf.memory, (0, 2, 5)
        views = [memory.slab[p * PAGE : (p + 1) * PAGE] for p in pages]
        offer = Offer(layout="kv", checkpoint="", size_bytes=3 * PAGE, pages=(0, 5, 2), digest=sampled_digest_of(views))
        grant = one.shelf.grants.issue("reader", "p2", "m", offer, 10.0)
        assert isinstance(grant, Grant)
        async with claiming(reader(one.endpoint), "source", grant.id, 3 * PAGE) as pull:
            with pytest.raises(PeerTrouble, match="not those"):
                await asyncio.to_thread(pull.fill_parts, [np.zeros(PAGE, np.uint8) for _ in pages], FREE)


@pytest.mark.parametrize(("node", "process_"), [("other", "p2"), ("reader", "p3")])
async def test_a_grant_of_somebody_else_is_of_no_use(node: str, process_: str) -> None:
    async with source(SIZE) as one:
        offer = msgspec.structs.replace(one.shelf.offer, layout="kv")
        grant = one.shelf.grants.issue("reader", "p2", "m", offer, 10.0)
        assert isinstance(grant, Grant)
        for question in (Claim(node, process_, grant.id), Fetch(grant.id, 0, 10), Check(grant.id)):
            answer = await asyncio.to_thread(
                with_line, one.endpoint, lambda line, q=question: ask(line, q), node=node, process=process_
            )  # fmt: skip
            assert answer == Denied(Denial.NO_GRANT), question
        # Nor does it help to claim another's name under one's own proof.
        with pytest.raises(PeerTrouble, match="went away"):
            await asyncio.to_thread(
                with_line, one.endpoint, lambda line: ask(line, Claim("reader", "p2", grant.id)), node=node,
                process=process_,
            )  # fmt: skip
        assert one.shelf.grants.valid(grant)


# What a grant is for


@pytest.mark.parametrize(
    ("at", "size"), [(0, SIZE + 1), (SIZE, 1), (SIZE - 1, 2), (1 << 59, 1), (0, FETCH_MOST_BYTES), (4 * PAGE - 1, 1)]
)
async def test_nothing_outside_a_grant_is_sent(at: int, size: int) -> None:
    async with source(SIZE) as one:

        def play(line: Line) -> None:
            granted = ask(line, asking())
            assert isinstance(granted, Granted)
            assert ask(line, Fetch(granted.grant, SIZE - 1, 1)) == Sending(1)
            line.receive_pages(memoryview(bytearray(1)), 1.0, lambda: True)
            ask(line, Fetch(granted.grant, at, size))

        with pytest.raises(PeerTrouble, match="went away"):
            await asyncio.to_thread(with_line, one.endpoint, play)
        await until(lambda: one.shelf.grants.readers("m") == [])


async def test_what_was_never_granted_is_over_or_belongs_to_an_old_term_is_denied() -> None:
    async with source(SIZE, grant_s=0.2) as one:
        for question in (Fetch("0" * 32, 0, 1), Check("x"), Claim("reader", "p2", "y")):
            assert await asyncio.to_thread(with_line, one.endpoint, lambda line, q=question: ask(line, q)) == Denied(
                Denial.NO_GRANT
            )

        def late(line: Line) -> Answer:
            granted = ask(line, asking())
            assert isinstance(granted, Granted)
            one.shelf.grants._open = {  # as if its time had passed
                key: given._replace(grant=msgspec.structs.replace(given.grant, expires_s=0.0))
                for key, given in one.shelf.grants._open.items()
            }
            return ask(line, Fetch(granted.grant, 0, 1))

        assert await asyncio.to_thread(with_line, one.endpoint, late) == Denied(Denial.NO_GRANT)
        one.shelf.terms_over = 4
        with pytest.raises(PeerTrouble, match="term is over"):
            await pulled(reader(one.endpoint), SIZE, term=4)
        assert np.array_equal(await pulled(reader(one.endpoint), SIZE, term=5), one.shelf.window)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": "other"}, "another layout"),
        ({"checkpoint": "other"}, "another model"),
        ({"model": "n"}, "does not hold"),
        ({"digest": 1}, "other weights"),
    ],
)
async def test_other_weights_are_denied_before_a_byte_moves(change: dict[str, Any], words: str) -> None:
    async with source(SIZE) as one:
        with pytest.raises(PeerTrouble, match=words):
            async with pulling(reader(one.endpoint), "source", want(SIZE, **change)):
                raise AssertionError("it was granted")
        await until(lambda: one.shelf.grants.readers("m") == [])


async def test_pages_that_went_away_in_the_middle_are_not_confirmed() -> None:
    async with source(SIZE) as one:
        target = np.zeros(SIZE, np.uint8)
        async with pulling(reader(one.endpoint), "source", want(SIZE)) as pull:
            await asyncio.to_thread(fill, pull, target, FREE)
            with one.shelf.grants.revoked("m"):
                pass
            with pytest.raises(PeerTrouble, match="grant ended"):
                await pull.confirm()
        async with pulling(reader(one.endpoint), "source", want(SIZE)) as pull:
            with one.shelf.grants.revoked("m"):
                pass
            with pytest.raises(PeerTrouble, match="grant ended"):
                await asyncio.to_thread(fill, pull, target, FREE)


# Ends


class Half:
    """A pace that is slow, and knows when something has come."""

    def __init__(self, target: np.ndarray) -> None:
        self.target = target
        self.done = 0
        self.stopped = False
        self.pace = Pace(self._count, lambda: not self.stopped, lambda: SLOW)

    def _count(self, done: int) -> None:
        self.done = done

    async def quiet_from_here(self) -> None:
        before = self.target.copy()
        await asyncio.sleep(0.2)
        assert np.array_equal(self.target, before)


async def test_a_source_that_is_killed_is_noticed_at_once() -> None:
    size = 64 * PAGE
    with process(size) as (child, endpoint):
        half = Half(np.zeros(size, np.uint8))
        async with pulling(reader(endpoint, stall_s=60.0), "source", want(size)) as pull:
            copying = asyncio.create_task(asyncio.to_thread(fill, pull, half.target, half.pace))
            await until(lambda: half.done > 0)
            child.kill()
            with pytest.raises(PeerTrouble, match="went away"):
                async with asyncio.timeout(20):
                    await copying
            assert half.done < size
            await half.quiet_from_here()


@pytest.mark.parametrize("paced", [True, False])
async def test_a_source_that_is_stopped_is_given_up_and_writes_nothing_later(paced: bool) -> None:
    size = 64 * PAGE if paced else 40 * FETCH_MOST_BYTES
    with process(size) as (child, endpoint):
        half = Half(np.zeros(size, np.uint8))
        pace = half.pace if paced else Pace(half._count, lambda: True)
        async with pulling(reader(endpoint, stall_s=0.3), "source", want(size)) as pull:
            copying = asyncio.create_task(asyncio.to_thread(fill, pull, half.target, pace))
            await until(lambda: half.done > 0)
            child.send_signal(signal.SIGSTOP)
            with pytest.raises(PeerTrouble, match=r"nothing for too long|in time"):
                async with asyncio.timeout(20):
                    await copying
            child.send_signal(signal.SIGCONT)
            await half.quiet_from_here()


async def test_a_cancel_writes_nothing_later_even_where_the_source_is_stopped() -> None:
    size = 64 * PAGE
    with process(size) as (child, endpoint):
        half = Half(np.zeros(size, np.uint8))
        async with pulling(reader(endpoint, stall_s=60.0, reply_s=60.0), "source", want(size)) as pull:
            copying = asyncio.create_task(asyncio.to_thread(fill, pull, half.target, half.pace))
            await until(lambda: half.done > 0)
            child.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.05)
            half.stopped = True
            with pytest.raises(Stopped):
                async with asyncio.timeout(20):
                    await copying
            child.send_signal(signal.SIGCONT)
            await half.quiet_from_here()


async def test_a_question_that_is_cancelled_leaves_no_thread_behind() -> None:
    with process(SIZE) as (child, endpoint):
        async with pulling(reader(endpoint, reply_s=60.0), "source", want(SIZE)) as pull:
            child.send_signal(signal.SIGSTOP)
            asked = asyncio.create_task(pull.confirm())
            await asyncio.sleep(0.05)
            asked.cancel()
            async with asyncio.timeout(20):
                with contextlib.suppress(asyncio.CancelledError):
                    await asked
            assert asked.cancelled()


@pytest.mark.parametrize("end", ["closes", "is killed"])
async def test_a_reader_that_is_gone_gives_the_pages_back(end: str) -> None:
    async with source(SIZE) as one:
        if end == "closes":
            line = await asyncio.to_thread(dialler(one.endpoint), 2.0)
            granted = await asyncio.to_thread(ask, line, asking())
            assert isinstance(granted, Granted) and len(one.shelf.grants.readers("m")) == 1
            line.close()
        else:
            code = (
                "import sys, os; sys.path.insert(0, 'tests/cpu')\n"
                "from test_far_transfer import dialler, ask, asking, Fetch\n"
                "line = dialler(sys.argv[1])(5.0); g = ask(line, asking())\n"
                "line.send(Fetch(g.grant, 0, 200000), 1.0); os.kill(os.getpid(), 9)"
            )
            await asyncio.to_thread(
                subprocess.run, [os.sys.executable, "-c", code, one.endpoint], cwd=Path(__file__).parents[2],  # type: ignore
                env={**os.environ, "PYTHONPATH": "."},
            )  # fmt: skip
        await until(lambda: one.shelf.grants.readers("m") == [] and one.door.lines == 0)
        with one.shelf.grants.barred("m"):
            pass


async def test_a_reader_that_takes_nothing_is_left(either: TlsFiles | None) -> None:
    size = 8 * FETCH_MOST_BYTES
    async with source(size, either, stall_s=0.2) as one:
        line = await asyncio.to_thread(dialler(one.endpoint, either), 2.0)
        granted = await asyncio.to_thread(ask, line, asking(size_bytes=size))
        assert isinstance(granted, Granted)
        for at in range(0, size, FETCH_MOST_BYTES):
            line.send(Fetch(granted.grant, at, FETCH_MOST_BYTES), 1.0)
        await until(lambda: one.shelf.grants.readers("m") == [] and one.door.lines == 0)
        line.close()


async def test_a_door_that_closes_leaves_everybody(either: TlsFiles | None) -> None:
    async with source(SIZE, either, grant_s=60.0) as one:
        half = Half(np.zeros(SIZE, np.uint8))
        half.pace = Pace(half._count, lambda: True, lambda: SIZE / 30)
        host, port = one.endpoint.rpartition(":")[0].partition("//")[2], int(one.endpoint.rpartition(":")[2])
        stranger = socket.create_connection((host, port))
        async with pulling(reader(one.endpoint, either), "source", want(SIZE)) as pull:
            copying = asyncio.create_task(asyncio.to_thread(fill, pull, half.target, half.pace))
            await until(lambda: half.done > 0 and one.door.lines == 2)
            await one.door.close()
            assert one.door.lines == 0
            with pytest.raises(PeerTrouble, match="went away"):
                await copying
        stranger.close()
        with pytest.raises(PeerTrouble, match="cannot be reached"):
            await pulled(reader(one.endpoint, either), SIZE)
