"""The load client over real sockets: a no-op server under many streams, and servers that misbehave in every way.

No figure is asserted that depends on this machine's speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvloop

from bench import client
from bench.load import LoadRun
from bench.records import Application, Drawn, Outcome, Plan, Segment
from bench.target import Caller, make_target
from bench.wording import IdWording

APP = Application("a", "m")
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str = "a", finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


GOOD = HEAD + chunk(event()) + chunk(event("b", "stop")) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def plans(count: int, gap_s: float = 0.0, tokens: int = 4) -> list[Plan]:
    return [Plan(i * gap_s, APP, Drawn((Segment(i, 8),)), tokens) for i in range(count)]


def load(url: str, wanted: Sequence[Plan], *, insecure: bool = False, **options: Any) -> LoadRun:
    target = make_target(url, "completions", (), None, insecure=insecure)
    caller = Caller(
        target, IdWording(16, 250, 0), sampling={}, ignore_eos=True, running_usage=False, extra_body={}, id_prefix="t-"
    )
    return LoadRun(target, caller, wanted, **options)


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """A server whose every connection is handled by `answer`."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, dict[str, Any]]:
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    return head, json.loads(await reader.readexactly(size))


def says(data: bytes, *, then_close: bool = True) -> Answer:
    """Answers each request of a connection with the same bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await read_request(reader)
                writer.write(data)
                await writer.drain()
                if then_close:
                    break
        writer.close()

    return answer


async def outcome_of(answer: Answer, **options: Any) -> Outcome:
    async with serving(answer) as url:
        (outcome,) = await load(url, plans(1), **options).run()
    return outcome


# Good answers


def test_many_streams_at_once_against_the_no_op_server() -> None:
    with client.noop_server(0.05) as url:
        run = load(url, plans(600, tokens=10))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            outcomes = runner.run(run.run())
    assert {o.failure for o in outcomes} == {None}
    assert len(outcomes) == 600
    assert run.counts.most_active == 600
    assert run.counts.active == 0
    assert run.counts.tokens == sum(o.usage_completion or 0 for o in outcomes) == 6000
    assert all(o.event_tokens == 10 and o.usage_prompt == 8 and o.finish == "length" for o in outcomes)
    assert all(
        o.plan.due_s <= o.start_s <= o.sent_s <= (o.first_s or 0) <= (o.last_s or 0) <= o.end_s for o in outcomes
    )


def test_sends_are_at_their_times_and_wait_for_no_answer() -> None:
    """Answers take longer than the whole schedule, so a client that waited could not have them all open at once."""
    with client.noop_server(0.2) as url:
        run = load(url, plans(50, gap_s=0.01, tokens=6))
        outcomes = asyncio.run(run.run())
    assert run.counts.most_active == 50
    assert all(o.start_s >= o.plan.due_s for o in outcomes)
    assert not any(o.held for o in outcomes)


def test_a_concurrency_limit_holds_requests_back() -> None:
    with client.noop_server(0.01) as url:
        run = load(url, plans(30, tokens=3), max_concurrency=4)
        outcomes = asyncio.run(run.run())
    assert run.counts.most_active == 4
    assert sum(o.held for o in outcomes) == 26
    assert sum(not o.reused for o in outcomes) == 4


async def test_requests_carry_what_was_planned_in_order() -> None:
    seen: list[tuple[bytes, dict[str, Any]]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                seen.append(await read_request(reader))
                writer.write(GOOD)
        writer.close()

    async with serving(answer) as url:
        outcomes = await load(url, plans(5), max_concurrency=1, keep_text=True).run()
    assert [o.text for o in outcomes] == ["ab"] * 5
    wording = IdWording(16, 250, 0)
    assert [body["prompt"] for _, body in seen] == [wording.render(p.prompt) for p in plans(5)]  # type: ignore[arg-type]
    assert [f"x-request-id: t-{i}".encode() in head for i, (head, _) in enumerate(seen)] == [True] * 5
    assert [o.reused for o in outcomes] == [False, True, True, True, True]


async def test_bytes_may_come_one_by_one() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for i in range(len(GOOD)):
            writer.write(GOOD[i : i + 1])
            await writer.drain()
            if i % 16 == 0:
                await asyncio.sleep(0)
        writer.close()

    outcome = await outcome_of(answer)
    assert (outcome.failure, outcome.event_tokens) == (None, 2)


async def test_a_server_that_closes_an_idle_connection_costs_no_request() -> None:
    """The second request meets a connection that the server has closed, and goes out once more on a new one."""
    outcomes: list[Outcome] = []
    # It answers as if the connection could be used again, and hangs up.
    async with serving(says(GOOD)) as url:
        outcomes = await load(url, plans(6), max_concurrency=1).run()
    assert [o.failure for o in outcomes] == [None] * 6


def test_tls(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = f"req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -keyout {key} -out {certificate}"
    subprocess.run([openssl, *command.split()], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def go(insecure: bool) -> list[Outcome]:
        server = await asyncio.start_server(says(GOOD, then_close=False), "127.0.0.1", 0, ssl=context)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        outcomes = await load(url, plans(4), insecure=insecure, max_concurrency=2).run()
        server.close()
        return outcomes

    assert [(o.failure, o.event_tokens) for o in asyncio.run(go(insecure=True))] == [(None, 2)] * 4
    refused = asyncio.run(go(insecure=False))
    assert [o.failure for o in refused] == ["connect"] * 4
    assert "certificate" in refused[0].detail.lower()


# Bad answers


@pytest.mark.parametrize(
    ("data", "failure"),
    [
        (GOOD[:-5], "closed"),
        (HEAD + chunk(event()), "closed"),
        (HEAD + chunk(event()) + b"0\r\n\r\n", "no_finish"),
        (HEAD + chunk(event()) + b"zz\r\n", "bad_http"),
        (HEAD + chunk(event()) + chunk(b'data: {"error": {"code": "dead"}}\n\n') + b"0\r\n\r\n", "error_event:dead"),
        (HEAD + chunk(event()) + chunk(b"data: {oops\n\n") + b"0\r\n\r\n", "bad_event"),
        (b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\n{}", "http_503"),
        (b'HTTP/1.1 429 No\r\nContent-Length: 10\r\n\r\n{"error": ', "http_429"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 50\r\n\r\ncut", "http_500"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}", "not_a_stream"),
        (b"SSH-2.0-x\r\n\r\n", "bad_http"),
        (b"", "closed"),
    ],
)  # fmt: skip
async def test_failures_have_their_reasons(data: bytes, failure: str) -> None:
    outcome = await outcome_of(says(data))
    assert outcome.failure == failure
    assert outcome.end_s >= outcome.start_s


async def test_a_broken_answer_does_not_poison_the_next_request() -> None:
    turn = iter(range(100))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await read_request(reader)
                bad = next(turn) % 2
                writer.write(HEAD + chunk(event()) + b"zz\r\n" if bad else GOOD)
                await writer.drain()
        writer.close()

    async with serving(answer) as url:
        outcomes = await load(url, plans(8), max_concurrency=1).run()
    assert [o.failure for o in outcomes] == [None, "bad_http"] * 4


async def test_bytes_after_an_answer_close_its_connection() -> None:
    async with serving(says(GOOD + b"HTTP/1.1 200 OK\r\n", then_close=False)) as url:
        outcomes = await load(url, plans(3), max_concurrency=1).run()
    assert [(o.failure, o.reused) for o in outcomes] == [(None, False)] * 3


async def test_a_server_that_never_ends_is_given_up() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + chunk(event()))
        await reader.read()
        writer.close()

    outcome = await outcome_of(answer, timeout_s=0.3)
    assert (outcome.failure, outcome.event_tokens) == ("timeout", 1)


async def test_nobody_listens() -> None:
    async with serving(says(GOOD)) as url:
        pass
    outcomes = await load(url, plans(3)).run()
    assert [o.failure for o in outcomes] == ["connect"] * 3


async def test_a_stopped_run_keeps_what_was_measured() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, body = await read_request(reader)
        if body["max_tokens"] == 1:
            writer.write(GOOD)
            return
        await reader.read()
        writer.close()

    async with serving(answer) as url:
        run = load(url, [*plans(2, tokens=1), *plans(2, tokens=9), *plans(5, gap_s=3600.0)[1:]])
        task = asyncio.ensure_future(run.run())
        while run.counts.completed < 2 or run.counts.sent < 4:
            await asyncio.sleep(0.01)
        run.stop()
        outcomes = await task
    assert sorted(str(o.failure) for o in outcomes) == ["None", "None", "interrupted", "interrupted"]


async def test_an_empty_run_ends() -> None:
    assert await load("http://127.0.0.1:9", []).run() == []


def test_the_clients_own_figures(tmp_path: Path) -> None:
    file = tmp_path / "client.json"
    assert client.main(f"--rate 100 --streams 40 --duration 1 --interval 0.05 --json {file}".split()) == 0
    found = json.loads(file.read_text())
    assert (found["requests"], found["failed"]) == (100, 0)
    assert found["send_lateness_max_ms"] >= found["send_lateness_p99_ms"] >= found["send_lateness_p50_ms"] >= 0
