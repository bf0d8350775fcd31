"""Clients that behave badly: they leave at any moment, in any phase, streaming or not; and an account of what they saw.

`soak` and tests run it against a live server. Raw sockets, one request a connection, so that when a client leaves is
decided here to the byte. Every request has its own generator, so a run is the same for the same seed.
"""

from __future__ import annotations

import asyncio
import collections
import enum
import json
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

# A wait beyond this is a hang, and counts as this status.
PATIENCE_S = 60.0
HUNG = -1


class Fate(enum.Enum):
    """What a client does with its request: STAY reads all of the answer; the others leave."""

    STAY = "stay"
    IN_REQUEST = "leave in the request"
    AT_ONCE = "leave at once"
    WAITING = "leave while waiting"
    IN_ANSWER = "leave in the answer"


class Ask(NamedTuple):
    """One request and what becomes of it. wait_s and read_bytes say when a client that leaves does."""

    path: str
    body: dict[str, Any]
    fate: Fate
    wait_s: float
    read_bytes: int

    @property
    def raw(self) -> bytes:
        body = json.dumps(self.body).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Seen(NamedTuple):
    """How a request ended: its status (0: the client left before one), whether its answer was whole, and when."""

    status: int
    whole: bool
    tokens: int
    took_s: float
    retry_after: bool


class Account:
    """What all clients of a run saw."""

    def __init__(self) -> None:
        self.sent = 0
        self.left = 0
        self.tokens = 0
        self.statuses: collections.Counter[int] = collections.Counter()
        self.refused_s: list[float] = []
        self.faults: list[str] = []

    def add(self, ask: Ask, seen: Seen) -> None:
        self.sent += 1
        self.statuses[seen.status] += 1
        if ask.fate is not Fate.STAY:
            self.left += 1
            return
        if seen.status == 200:
            self.tokens += seen.tokens
            if not seen.whole:
                self.faults.append(f"an answer of {ask.path} was cut off")
        elif seen.status in (429, 503):
            self.refused_s.append(seen.took_s)
            if not seen.retry_after or not seen.whole:
                self.faults.append(f"a refusal with {seen.status} lacks its Retry-After or its form")
        else:
            what = "no answer" if seen.status == HUNG else f"status {seen.status}"
            self.faults.append(f"{what} after {seen.took_s:.0f} s for {ask.path}")


async def churn(
    port: int, model: str, requests: int, *, at_once: int, seed: int, account: Account,
    after_each: Callable[[int], None] = lambda done: None, most_tokens: int = 24, vocab: int = 250,
) -> None:  # fmt: skip
    """`requests` clients, `at_once` at a time; after_each(done) is called as each is over."""
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            ask = draw(random.Random(f"{seed} {number}"), model, most_tokens, vocab)
            account.add(ask, await play(port, ask))
            after_each(account.sent)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client())


def draw(rng: random.Random, model: str, most_tokens: int, vocab: int) -> Ask:
    """A request of any kind; half of the prompts begin alike."""
    prompt = list(range(5, 45)) if rng.random() < 0.5 else []
    prompt += [rng.randrange(5, vocab) for _ in range(rng.choice((1, 3, 20, 100)))]
    body: dict[str, Any] = {
        "model": model, "max_tokens": rng.randrange(1, most_tokens + 1), "stream": rng.random() < 0.6,
        "seed": rng.randrange(1 << 30), "temperature": rng.choice((0, 1)), "ignore_eos": rng.random() < 0.5,
    }  # fmt: skip
    if rng.random() < 0.2:
        body["n"] = rng.randrange(2, 4)
    if rng.random() < 0.2:
        body["stop"] = rng.choice(("a", ["e", "the"], "zzz"))
    path = "/v1/completions"
    if rng.random() < 0.3:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "abc " * rng.randrange(1, 20)}]
    elif rng.random() < 0.2:
        body["prompt"] = [prompt, prompt[:1]]
    else:
        body["prompt"] = prompt
    fates = (Fate.STAY,) * 5 + (
        Fate.IN_REQUEST,
        Fate.AT_ONCE,
        Fate.WAITING,
        Fate.WAITING,
        Fate.IN_ANSWER,
        Fate.IN_ANSWER,
    )
    return Ask(path, body, rng.choice(fates), rng.random() ** 2 * 0.2, rng.randrange(1, 3000))


async def play(port: int, ask: Ask) -> Seen:
    """Send one request and do with it what its fate says. A reset is an end like any other."""
    start_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = b""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await _send(writer, ask)
            match ask.fate:
                case Fate.STAY:
                    raw = await reader.read()
                case Fate.WAITING:
                    await asyncio.sleep(ask.wait_s)
                case Fate.IN_ANSWER:
                    raw = await reader.readexactly(ask.read_bytes)
    except asyncio.IncompleteReadError as error:
        raw = error.partial
    except TimeoutError:
        return Seen(HUNG, False, 0, time.perf_counter() - start_s, False)
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    return _seen(ask, raw, time.perf_counter() - start_s)


async def _send(writer: asyncio.StreamWriter, ask: Ask) -> None:
    raw = ask.raw
    writer.write(raw[: len(raw) * 2 // 3] if ask.fate is Fate.IN_REQUEST else raw)
    await writer.drain()


def _seen(ask: Ask, raw: bytes, took_s: float) -> Seen:
    head, _, body = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 ") or len(head) < 12:
        return Seen(0, False, 0, took_s, False)
    status = int(head[9:12])
    retry_after = b"\r\nretry-after:" in head.lower()
    if b"text/event-stream" in head:
        whole = body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b'data: {"error"' not in body
        return Seen(status, whole, body.count(b'"index":'), took_s, retry_after)
    try:
        answer = json.loads(body)
    except ValueError:
        return Seen(status, False, 0, took_s, retry_after)
    usage = answer.get("usage") or {}
    return Seen(
        status, "choices" in answer or "error" in answer, usage.get("completion_tokens", 0), took_s, retry_after
    )
