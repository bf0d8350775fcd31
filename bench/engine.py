"""How fast the engine is: decode at several batch sizes, prefill, launch to first token, memory, and the share of the
limits.

It starts a real `janus serve`, talks to it over a socket like any client, and prints one table. Nothing is asserted.

    janus bench engine                       the default model
    janus bench engine MODEL --threads 1     a folder or a .gguf file, on one thread
    janus bench engine --json out.json       the same figures for a program
"""

from __future__ import annotations

import argparse
import asyncio
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
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

PROMPT_TOKENS: Final = 128
OUTPUT_TOKENS: Final = 128
PREFILL_TOKENS: Final = 1024


class Burst(NamedTuple):
    """`streams` requests at once: seconds to each first token, and seconds a token after it, a stream."""

    wall_s: float
    ttft_s: list[float]
    tpot_s: list[float]


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    figures = {"copy_bytes_s": copy_bandwidth(options.threads)}
    launches = []
    for _ in range(options.repeats):
        with _launch(options) as server:
            launches.append(server.first_token_s)
            if len(launches) == options.repeats:
                figures |= _measure(server, options)
    figures["launch_to_first_token_s"] = statistics.median(launches)
    _print(figures, options)
    if options.json is not None:
        options.json.write_text(json.dumps({"model": options.model, "threads": options.threads, **figures}, indent=1))
    return 0


def copy_bandwidth(threads: int, size_bytes: int = 256 << 20, passes: int = 5) -> float:
    """Bytes a second that memory delivers to `threads` copying numpy arrays (read and written bytes both counted)."""
    pairs = [
        (np.ones(size_bytes // threads, np.uint8), np.empty(size_bytes // threads, np.uint8)) for _ in range(threads)
    ]
    rates = []
    for _ in range(passes + 1):
        workers = [threading.Thread(target=np.copyto, args=(target, source)) for source, target in pairs]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        rates.append(2 * size_bytes / (time.perf_counter() - start))
    return statistics.median(rates[1:])


class Server:
    """A `janus serve` child and the time from its launch to the first token a client got."""

    def __init__(self, command: list[str]) -> None:
        start = time.perf_counter()
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.log = ""
        self.port = self._wait_for_port()
        asyncio.run(_stream(self.port, {"prompt": [5], "max_tokens": 1}))
        self.first_token_s = time.perf_counter() - start
        # The pipe must not fill while the benchmark runs.
        threading.Thread(target=self._drain, daemon=True).start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)

    @property
    def pid(self) -> int:
        return self._process.pid

    def peak_rss_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10  # type: ignore[index]

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics without labels: this server has one model."""
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=20).read().decode()
        found = re.findall(r"^([a-z_:]+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def _wait_for_port(self) -> int:
        for line in self._process.stderr or ():
            self.log += line
            if found := re.search(r"ready on http://\S+:(\d+)", line):
                return int(found[1])
        raise SystemExit(f"the server ended before it was ready:\n{self.log}")

    def _drain(self) -> None:
        for line in self._process.stderr or ():
            self.log += line


def _launch(options: argparse.Namespace) -> Server:
    command = [sys.executable, "-m", "janus_server", "serve", options.model, "--served-model-name", "m", "--port", "0"]
    return Server([*command, "--threads", str(options.threads), *options.serve])


def _measure(server: Server, options: argparse.Namespace) -> dict[str, float]:
    rng = random.Random(7)
    card = _card(server.port)
    figures: dict[str, float] = {"weight_bytes": card["weight_bytes"]}
    _burst(server, rng, 2, 16, 8)  # warm: every code path once, pages touched
    for streams in (1, 4, 16):
        runs = []
        before = server.metrics()
        for _ in range(options.repeats):
            runs.append(_burst(server, rng, streams, PROMPT_TOKENS, OUTPUT_TOKENS))
        after = server.metrics()
        figures[f"decode_{streams}_tok_s"] = statistics.median(streams / statistics.median(r.tpot_s) for r in runs)
        figures[f"batch_{streams}_tok_s"] = statistics.median(streams * OUTPUT_TOKENS / r.wall_s for r in runs)
        spent = after["janus_step_seconds_sum"] - before["janus_step_seconds_sum"]
        device = after["janus_step_device_seconds_total"] - before["janus_step_device_seconds_total"]
        figures[f"overhead_{streams}"] = 1 - device / spent
    long = [_burst(server, rng, 1, PREFILL_TOKENS, 1) for _ in range(options.repeats)]
    figures["prefill_tok_s"] = PREFILL_TOKENS / statistics.median(r.ttft_s[0] for r in long)
    figures["peak_rss_bytes"] = server.peak_rss_bytes()
    return figures


def _burst(server: Server, rng: random.Random, streams: int, prompt: int, output: int) -> Burst:
    bodies = [{"prompt": [rng.randrange(5, 250) for _ in range(prompt)], "max_tokens": output} for _ in range(streams)]

    async def run() -> list[list[float]]:
        return list(await asyncio.gather(*(_stream(server.port, body) for body in bodies)))

    start = time.perf_counter()
    arrivals = asyncio.run(run())
    wall = time.perf_counter() - start
    tpot = [(a[-1] - a[0]) / (len(a) - 1) for a in arrivals if len(a) > 1]
    return Burst(wall, [a[0] - start for a in arrivals], tpot)


async def _stream(port: int, body: dict[str, object]) -> list[float]:
    """When each token's event of one streaming completion arrived. Raw sockets: the client shares these cores."""
    payload = json.dumps({**body, "model": "m", "temperature": 0, "ignore_eos": True, "stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + payload)
    status = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in status.split(b"\r\n", 1)[0]:
        raise SystemExit(f"the server refused: {(await reader.read(2000)).decode(errors='replace')}")
    arrivals: list[float] = []
    rest = b""
    while chunk := await reader.read(65536):
        *events, rest = (rest + chunk).split(b"\n\n")
        arrivals += [time.perf_counter()] * sum(b'"text":' in event for event in events)
    writer.close()
    return arrivals


def _card(port: int) -> dict[str, float]:
    reply = urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=20).read()
    return dict(json.loads(reply)["data"][0]["meta"])


def _print(figures: dict[str, float], options: argparse.Namespace) -> None:
    weights, copy = figures["weight_bytes"], figures["copy_bytes_s"]
    rows = [("copy bandwidth here", f"{copy / 1e9:.1f} GB/s", f"{options.threads} threads, read + written")]
    for streams in (1, 4, 16):
        rate = figures[f"decode_{streams}_tok_s"]
        read = rate / streams * weights
        overhead = figures[f"overhead_{streams}"]
        share = f"weights {read / 1e9:.1f} GB/s = {read / copy:.0%} of copy; host overhead {overhead:.1%}"
        rows.append((f"decode, batch {streams}", f"{rate:.0f} tok/s", share))
    rows += [
        (
            "16 streams, prefill included",
            f"{figures['batch_16_tok_s']:.0f} tok/s",
            f"{PROMPT_TOKENS} in, {OUTPUT_TOKENS} out",
        ),
        (f"prefill, {PREFILL_TOKENS} tokens", f"{figures['prefill_tok_s']:.0f} tok/s", ""),
        ("launch to first token", f"{figures['launch_to_first_token_s']:.2f} s", f"median of {options.repeats}"),
        ("peak resident memory", f"{figures['peak_rss_bytes'] / 2**20:.0f} MiB", f"weights {weights / 2**20:.0f} MiB"),
    ]
    print(f"{options.model}, {options.threads} threads, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name, value, note in rows:
        print(f"  {name:<30} {value:>14}   {note}")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="janus bench engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="a folder, a .gguf file or an alias")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads that compute")
    parser.add_argument("--repeats", type=int, default=3, help="passes a figure; the median is shown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--serve", action="append", default=[], metavar="FLAG", help="passed on to janus serve")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
