"""The ceiling of the API layer: how many streamed tokens a second it can write, beside bare aiohttp.

    janus bench http                         64 streams
    janus bench http --chat --streams 256

The servers of `http_sides` run, each in its own process; this process is the client, which only counts bytes. Bare
aiohttp writes the very bytes that ours did, cut into the same chunks, one chunk a stream and turn of its loop; "fed" is
the same with each chunk waiting for the engine's token, as ours do. Rounds alternate, so that a busy machine slows all.
Where the client or a neighbour holds a server up, its processor time a token says more than its rate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from .serve_options import Parser

GOAL: Final = 0.6
END: Final = b"0\r\n\r\n"


class Round(NamedTuple):
    """One round of one side: tokens a second, and the server's processor time for a token."""

    tokens_s: float
    cpu_us: float


class Side(NamedTuple):
    """A running server."""

    port: int
    pid: int


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    figures = measure(options.streams, options.tokens, options.rounds, options.chat)
    print(f"{options.streams} streams of {options.tokens} tokens, {options.rounds} rounds; medians")
    for name, title in (("ours", "our API layer"), ("bare", "bare aiohttp"), ("fed", "bare aiohttp, fed")):
        side, of = figures[name], figures["ratios"].get(name)
        beside = f"; ours reaches {of['rate']:.0%} of it, with {of['cpu']:.0%} of its economy" if of else ""
        print(f"  {title:<18}{side['tokens_s']:>8.0f} tokens/s, {side['cpu_us']:5.1f} µs of processor a token{beside}")
    print(f"  the goal is {GOAL:.0%} of bare aiohttp's rate; load of this machine {figures['load']:.1f}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def measure(streams: int, tokens: int, rounds: int, chat: bool) -> dict[str, Any]:
    """The medians of all sides; ratios are those of the medians, above 1 where ours is better."""
    path, request = _request(tokens, chat)
    with _server("ours", streams) as ours, _server("bare", streams) as bare, _server("fed", streams) as fed:
        # The engine waits for all its streams, so the sample is one of them.
        sample = _exchange(ours.port, [request] * streams)[0]
        scripted = request.replace(path, b"/stream", 1)
        sides = {"ours": (ours, request), "bare": (bare, scripted), "fed": (fed, scripted)}
        found: dict[str, list[Round]] = {name: [] for name in sides}
        for name in ("bare", "fed"):
            _teach(sides[name][0].port, sample)
        for number in range(rounds + 1):
            for name, (side, ask) in sides.items():
                one = _round(side, ask, streams, tokens, len(sample))
                if number:  # the first warms them up
                    found[name].append(one)
    medians = {
        name: {"tokens_s": statistics.median(r.tokens_s for r in of), "cpu_us": statistics.median(r.cpu_us for r in of)}
        for name, of in found.items()
    }
    mine = medians["ours"]
    ratios = {
        name: {"rate": mine["tokens_s"] / of["tokens_s"], "cpu": of["cpu_us"] / max(mine["cpu_us"], 1e-3)}
        for name, of in medians.items()
        if name != "ours"
    }
    return {**medians, "ratios": ratios, "streams": streams, "tokens": tokens, "rounds": rounds, "chat": chat,
            "load": os.getloadavg()[0]}  # fmt: skip


def _round(side: Side, ask: bytes, streams: int, tokens: int, expected_bytes: int) -> Round:
    cpu_s = _cpu_s(side.pid)
    took_s, sizes = _drink(side.port, ask, streams)
    cpu_s = _cpu_s(side.pid) - cpu_s
    # Ids and dates are of one length, and both sides say the same; heads differ by a few headers.
    if any(abs(size - expected_bytes) > 1000 for size in sizes):
        raise SystemExit(f"the streams had {min(sizes)} to {max(sizes)} bytes where {expected_bytes} were due")
    return Round(streams * tokens / took_s, 1e6 * cpu_s / (streams * tokens))


def _drink(port: int, ask: bytes, streams: int) -> tuple[float, list[int]]:
    """Seconds from the first byte of all to the last, and the bytes of each stream. Costs as little as Python can."""
    poll = select.epoll()
    sockets, sizes, tails = {}, {}, {}
    for _ in range(streams):
        one = socket.create_connection(("127.0.0.1", port))
        one.sendall(ask)
        one.setblocking(False)
        sockets[one.fileno()] = one
        sizes[one.fileno()], tails[one.fileno()] = 0, b""
        poll.register(one, select.EPOLLIN)
    first_s = 0.0
    left = streams
    while left:
        for number, _ in poll.poll(30.0):
            piece = sockets[number].recv(1 << 18)
            if not piece:
                poll.unregister(number)
                left -= 1
                continue
            first_s = first_s or time.perf_counter()
            sizes[number] += len(piece)
            tails[number] = piece[-8:]
    took_s = time.perf_counter() - first_s
    for one in sockets.values():
        one.close()
    poll.close()
    if not all(tail.endswith(END) for tail in tails.values()):
        raise SystemExit("a stream ended before its last chunk")
    return took_s, list(sizes.values())


def _exchange(port: int, requests: Sequence[bytes]) -> list[bytes]:
    """The raw answers to requests sent at once."""
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in requests]
    for one, request in zip(sockets, requests, strict=True):
        one.sendall(request)
    answers = []
    for one in sockets:
        with one:
            answers.append(b"".join(iter(lambda one=one: one.recv(1 << 18), b"")))
    return answers


def _teach(port: int, sample: bytes) -> None:
    """Give the bare side the chunks and the headers of an answer."""
    head, _, rest = sample.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise SystemExit(f"the server refused: {sample[:1000].decode(errors='replace')}")
    lines = [line.decode().partition(": ") for line in head.split(b"\r\n")[1:]]
    kept = {
        name: value for name, _, value in lines if name not in ("Date", "Server", "Transfer-Encoding", "Connection")
    }
    chunks = []
    while not rest.startswith(b"0\r\n"):
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)].decode())
        rest = rest[int(size, 16) + 2 :]
    body = json.dumps({"chunks": chunks, "headers": kept}).encode()
    head = b"POST /script HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    (answer,) = _exchange(port, [head + body])
    if b" 200 " not in answer.split(b"\r\n", 1)[0]:
        raise SystemExit("a bare server did not take its script")


def _request(tokens: int, chat: bool) -> tuple[bytes, bytes]:
    """The path, and the whole request."""
    path = b"/v1/chat/completions" if chat else b"/v1/completions"
    asked = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": [1, 2, 3]}
    body = json.dumps({"model": "noop", "max_tokens": tokens, "stream": True, **asked}).encode()
    return path, (
        b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (path, len(body), body)
    )


@contextlib.contextmanager
def _server(side: str, streams: int) -> Iterator[Side]:
    # -P: the folder of the benchmarks must not come before the standard library, which has an `http` too.
    command = [sys.executable, "-P", str(Path(__file__).with_name("http_sides.py")), side, str(streams)]
    paths = os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths})
    try:
        line = process.stdout.readline() if process.stdout is not None else ""
        if not line:
            raise SystemExit(f"the server of the side {side!r} did not start")
        yield Side(int(line), process.pid)
    finally:
        process.kill()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def _cpu_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("janus bench http", __doc__ or "")
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="answers at once")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds of each side, after one to warm up")
    parser.add_argument("--chat", action="store_true", help="chat completions instead of completions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
