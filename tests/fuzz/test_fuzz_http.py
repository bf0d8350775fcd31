"""The framing of HTTP over real sockets: no request of any kind hangs the server, breaks it, or passes for two.

After every case a good request must be answered, and at the end no task and no socket of a client may be left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os

import pytest
from fake_engine import settled
from harness import fuzz_async
from http_cases import SMUGGLED, Case, Fate, make
from http_client import Answer, NotHttp, Script, Silent, parse, play
from http_server import Server, is_error, served

from janus_server.api.bodies import Limits

LIMITS = Limits(body_bytes=64 * 1024, keep_alive_s=0.05, body_s=0.3)
GOOD = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def run(server: Server, case: Case) -> None:
    answers: list[Answer] = []
    # A server that still waits for the rest of a broken request owes nothing yet.
    patience_s = 20.0 if case.fate is Fate.ANSWERED else 0.4
    try:
        answers = await play(server.port, case.script, patience_s)
    except Silent:
        assert case.fate is Fate.ANY, "no answer, and no end"
    check(case, answers)
    (good,) = await play(server.port, Script((GOOD,)))
    assert good.status == 200


def check(case: Case, answers: list[Answer]) -> None:
    for answer in answers:
        assert answer.status < 500, answer
        assert answer.headers.get("x-request-id") != "smuggled", "a request was smuggled"
        assert "aiohttp" not in str(answer.headers).lower()
        # HEAD has the headers of an answer without its body, so it is not read as JSON.
        if answer.status >= 400 and answer.body:
            is_error(answer.json)
    if case.fate is Fate.REFUSED:
        assert len(answers) <= 1
        assert all(answer.status >= 400 for answer in answers)
    if case.fate is Fate.ANSWERED:
        assert [answer.headers["x-request-id"] for answer in answers] == list(case.ids)
        for answer, label in zip(answers, case.ids, strict=True):
            if "event-stream" in answer.headers["content-type"]:
                texts = [json.loads(line[6:])["choices"][0]["text"] for line in answer.body.split(b"\n\n")[:-2]]
                assert "".join(texts).startswith(label)
            elif "choices" in (told := answer.json):
                assert told["choices"][0]["text"].startswith(label)


async def test_no_request_hangs_breaks_or_passes_for_two(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with served(limits=LIMITS) as server:
        await play(server.port, Script((GOOD,)))
        before = (len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")))
        await fuzz_async("http", 250, make, lambda case: run(server, case))
        assert await settled(lambda: not server.model.live)
        assert await settled(lambda: (len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))) == before, 20), (
            before,
            [task.get_coro() for task in asyncio.all_tasks()],
        )
    assert not [record for record in caplog.records if record.exc_info], "a traceback in the log"


@pytest.mark.parametrize("half_close", [False, True])
async def test_a_client_that_stops_in_the_middle_of_a_body_is_let_go(half_close: bool) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    async with served(limits=LIMITS) as server:
        answers = await play(server.port, Script((head,), half_close=half_close))
        assert [answer.status for answer in answers] == ([] if half_close else [408])
        assert not server.model.requests


async def test_many_slow_clients_do_not_stop_a_quick_one() -> None:
    async with served(limits=LIMITS) as server:
        slow = [asyncio.open_connection("127.0.0.1", server.port) for _ in range(200)]
        streams = await asyncio.gather(*slow)
        for _, writer in streams:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Sl")
        (good,) = await play(server.port, Script((GOOD,)))
        assert good.status == 200
        for _, writer in streams:
            writer.transport.abort()


def test_the_strict_client_finds_what_is_no_http() -> None:
    fine = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    assert [answer.body for answer in parse(fine + fine)] == [b"ok", b"ok"]
    for raw in (
        fine + b"x",
        fine[:-1],
        b"HTTP/1.1 200 OK\r\n\r\n",
        fine.replace(b"Length:", b"Length :"),
        b"junk\r\n\r\n",
    ):
        with contextlib.suppress(NotHttp, KeyError, ValueError):
            parse(raw)
            raise AssertionError(raw)
    smuggled = Answer(404, {"x-request-id": "smuggled"}, b"")
    with pytest.raises(AssertionError, match="smuggled"):
        check(Case(Script((SMUGGLED,)), Fate.REFUSED), [smuggled])
