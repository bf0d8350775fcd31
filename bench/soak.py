"""Does a server stay as it was? Clients that leave at random moments, or ten times the load that it can carry.

    janus bench soak                             10,000 requests, half of whose clients leave early
    janus bench soak --overload --seconds 60     ten times the knee's load for a minute
    janus bench soak --model PATH --requests 500

It starts a real `janus serve` with a bounded queue, watches its memory, its open files and its metrics, and prints a
table and what did not hold. Exit code 1 when something did not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from .churn import Account, Ask, Fate, churn, play
from .serve_options import Parser

MODEL: Final = "m"
OVER: Final = 10  # how many times the knee's rate
# Memory may grow while caches fill; after a third of the run it may not any more.
GROWTH: Final = 1.05
GROWTH_BYTES: Final = 4 << 20


class Checks:
    """What was to hold, and whether it did."""

    def __init__(self) -> None:
        self.rows: list[tuple[bool, str]] = []

    def add(self, held: bool, what: str) -> None:
        self.rows.append((held, what))

    @property
    def held(self) -> bool:
        return all(held for held, _ in self.rows)

    def show(self) -> None:
        for held, what in self.rows:
            print(f"  {'ok    ' if held else 'FAILED'} {what}")


class Server:
    """A `janus serve` child and how it looks from outside."""

    def __init__(self, model: str, flags: Sequence[str]) -> None:
        command = [
            sys.executable,
            "-m",
            "janus_server",
            "serve",
            f"{MODEL}={model}",
            "--port",
            "0",
            "--access-log",
            "off",
        ]
        paths = os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)
        self._process = subprocess.Popen(
            [*command, *flags], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
        self.log = ""
        self.port = self._wait_for_port()
        # The pipe must not fill while the soak runs.
        threading.Thread(target=self._drain, daemon=True).start()

    def heap_bytes(self) -> int:
        """Resident memory without the pool of pages: its size is fixed, and pages are touched as they are used."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        found = dict(re.findall(r"(VmRSS|RssShmem):\s+(\d+)", status))
        return (int(found["VmRSS"]) - int(found["RssShmem"])) << 10

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def metrics(self) -> dict[str, float]:
        """Samples by name, those of one name summed over their labels."""
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60).read().decode()
        found: dict[str, float] = {}
        for name, value in re.findall(r"^([a-z_:]+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def settle(self, limit_s: float = 30.0) -> dict[str, float]:
        """The metrics once nothing runs and nothing waits, or the last ones."""
        end_s = time.monotonic() + limit_s
        while (found := self.metrics()) and time.monotonic() < end_s:
            if found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0:
                break
            time.sleep(0.05)
        return found

    def stop(self) -> int:
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(60)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def _wait_for_port(self) -> int:
        for line in self._process.stderr or ():
            self.log += line
            if found := re.search(r"ready on http://\S+:(\d+)", line):
                return int(found[1])
        raise SystemExit(f"the server ended before it was ready:\n{self.log}")

    def _drain(self) -> None:
        for line in self._process.stderr or ():
            self.log = (self.log + line)[-100_000:]


class Memory:
    """The memory of the server over a run, its pool of pages apart."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.samples: list[int] = []

    def sample(self) -> None:
        self.samples.append(self._server.heap_bytes())

    def judge(self, checks: Checks) -> None:
        """The last third may not lie above the middle one: pools and caches have filled by then."""
        third = max(1, len(self.samples) // 3)
        before = statistics.median(self.samples[third : 2 * third] or self.samples)
        after = statistics.median(self.samples[-third:])
        bound = before * GROWTH + GROWTH_BYTES
        shown = [f"{size / 2**20:.1f}" for size in (after, before, bound)]
        text = f"memory {shown[0]} MiB in the last third, {shown[1]} in the second (at most {shown[2]})"
        checks.add(after <= bound, text)


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    checks = Checks()
    with running(options) as server:
        figures = overload(server, options, checks) if options.overload else leaks(server, options, checks)
        _idle(server, checks, options.open_files_before)
        code = server.stop()
        checks.add(code == 0, f"exit code {code} after Ctrl-C")
        checks.add("Traceback" not in server.log, "no traceback in the log")
    for name, value in figures.items():
        print(f"  {name:<34} {value}")
    checks.show()
    if options.json is not None:
        rows = [{"held": held, "what": what} for held, what in checks.rows]
        options.json.write_text(json.dumps({"figures": figures, "checks": rows}, indent=1) + "\n")
    return 0 if checks.held else 1


@contextlib.contextmanager
def running(options: argparse.Namespace) -> Iterator[Server]:
    flags = ["--max-num-seqs", str(options.sequences), "--max-queued-requests", str(options.queue), *options.serve]
    server = Server(options.model, flags)
    try:
        # Every code path once, so that what is made on first use is not taken for a leak.
        asyncio.run(churn(server.port, MODEL, 60, at_once=8, seed=-1, account=Account()))
        server.settle()
        options.open_files_before = server.open_files()
        yield server
    finally:
        server.kill()


def leaks(server: Server, options: argparse.Namespace, checks: Checks) -> dict[str, Any]:
    """Clients that leave at random moments."""
    memory, account = Memory(server), Account()
    every = max(1, options.requests // 90)

    def after_each(done: int) -> None:
        if done % every == 0:
            memory.sample()

    start_s = time.perf_counter()
    asyncio.run(churn(server.port, MODEL, options.requests, at_once=options.clients, seed=options.seed, account=account,
                      after_each=after_each))  # fmt: skip
    took_s = time.perf_counter() - start_s
    memory.judge(checks)
    _account(account, checks)
    return {
        "requests": account.sent, "clients that left": account.left,
        "requests a second": round(account.sent / took_s, 1),
        "by status (0: left before one)": dict(sorted(account.statuses.items())),
    }  # fmt: skip


def overload(server: Server, options: argparse.Namespace, checks: Checks) -> dict[str, Any]:
    """The knee, with as many clients as there is room for; then ten times its rate; then the knee again."""
    knee, later = Account(), Account()
    knee_s = asyncio.run(_closed(server.port, options, knee))
    rate = OVER * knee.statuses[200] / knee_s
    memory, account = Memory(server), Account()
    over_s = asyncio.run(_open(server.port, options, rate, account, memory.sample))
    server.settle()
    later_s = asyncio.run(_closed(server.port, options, later))
    memory.judge(checks)
    for one in (knee, account, later):
        _account(one, checks)
    # Before and after: a machine with neighbours is not the same for a minute.
    at_knee, over = (knee.tokens + later.tokens) / (knee_s + later_s), account.tokens / over_s
    refused = sum(account.statuses[status] for status in (429, 503))
    checks.add(refused > 0 and account.statuses[200] > 0, f"{account.statuses[200]} were served and {refused} refused")
    kept = f"goodput {over:.0f} tokens/s, {at_knee:.0f} at the knee (at least {options.goodput:.0%} of it)"
    checks.add(over >= options.goodput * at_knee, kept)
    early_s = statistics.quantiles(account.refused_s, n=100)[-1] if len(account.refused_s) > 1 else 0.0
    return {
        "knee, requests a second": round(knee.statuses[200] / knee_s, 1), "offered, requests a second": round(rate, 1),
        "by status": dict(sorted(account.statuses.items())), "refusals, 99 in 100 within": f"{early_s * 1e3:.0f} ms",
        "goodput at the knee, tokens/s": round(at_knee), "goodput under overload": round(over),
    }  # fmt: skip


async def _closed(port: int, options: argparse.Namespace, account: Account) -> float:
    """As many clients as sequences, each with one request after another, for a quarter of the time."""
    start_s = time.perf_counter()
    end_s = start_s + options.seconds / 4

    async def client(number: int) -> None:
        rng = random.Random(f"{options.seed} knee {number}")
        while time.perf_counter() < end_s:
            ask = _plain(rng, options.tokens)
            account.add(ask, await play(port, ask))

    await asyncio.gather(*(client(number) for number in range(options.sequences)))
    return time.perf_counter() - start_s


async def _open(
    port: int, options: argparse.Namespace, rate: float, account: Account, sample: Callable[[], None]
) -> float:
    """Poisson arrivals at `rate` a second, whatever becomes of the earlier ones; seconds until the last one ended."""
    rng = random.Random(f"{options.seed} over")
    start_s = due_s = time.perf_counter()
    sampled_s = 0.0

    async def client(ask: Ask) -> None:
        account.add(ask, await play(port, ask))

    async with asyncio.TaskGroup() as group:
        while due_s < start_s + options.seconds:
            due_s += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            group.create_task(client(_plain(rng, options.tokens)))
            if time.perf_counter() > sampled_s + options.seconds / 90:
                sampled_s = time.perf_counter()
                sample()
    return time.perf_counter() - start_s


def _plain(rng: random.Random, tokens: int) -> Ask:
    """A request of a fixed length, so that tokens and requests tell the same."""
    prompt = [rng.randrange(5, 250) for _ in range(16)]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return Ask("/v1/completions", body, Fate.STAY, 0.0, 0)


def _account(account: Account, checks: Checks) -> None:
    shown = "; ".join(sorted(set(account.faults))[:5])
    checks.add(
        not account.faults, f"{len(account.faults)} faulty answers among {account.sent} requests {shown}".rstrip()
    )


def _idle(server: Server, checks: Checks, open_files_before: int) -> None:
    """Nothing of the load is left."""
    found = server.settle()
    queued = found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]
    checks.add(queued == 0, f"{queued:.0f} requests are left in the engine")
    held, free, total = (found[f"janus_pool_{name}"] for name in ("pages", "free_pages", "total_pages"))
    checks.add(held + free == total, f"pages: {held:.0f} held + {free:.0f} free = {total:.0f}")
    for _ in range(300):  # a refused connection lingers for some seconds, so that its client can read why
        if server.open_files() <= open_files_before:
            break
        time.sleep(0.1)
    files = server.open_files()
    checks.add(files <= open_files_before, f"{files} open files, {open_files_before} before")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("janus bench soak", __doc__ or "")
    add = parser.add_argument
    add("--model", default="smollm2-135m", metavar="MODEL", help="what to serve (default: the packaged model)")
    add("--requests", type=int, default=10_000, metavar="N", help="how many clients come")
    add("--clients", type=int, default=48, metavar="N", help="at once")
    add("--overload", action="store_true", help="ten times the knee's load instead of clients that leave")
    add("--seconds", type=float, default=60.0, metavar="S", help="how long the overload lasts")
    add("--tokens", type=int, default=48, metavar="N", help="tokens of an answer under overload")
    add("--goodput", type=float, default=0.9, metavar="SHARE", help="of the knee's goodput to keep under overload")
    add("--sequences", type=int, default=16, metavar="N", help="--max-num-seqs of the server")
    add("--queue", type=int, default=64, metavar="N", help="--max-queued-requests of the server")
    add("--seed", type=int, default=0, metavar="N")
    add("--serve", action="append", default=[], metavar="FLAG", help="further flags of janus serve, one each")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
