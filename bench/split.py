"""What a long prompt costs those who read answers meanwhile: computed beside them, or by another node (--pd-split).

By hand: `python -m bench.split [--model NAME] [--streams 4] [--prompts 5] [--words 1200]`. For each setting it starts
two nodes of one thread each, keeps some streams running on one of them, and sends long prompts one after the other.
Printed are the first token's time of the long prompts, and the gaps between tokens of the streams while one of those
was on its way. It talks to the server as any client does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .chaos_nodes import die_with_parent
from .cluster import at

REPO = Path(__file__).resolve().parents[1]
STREAM_TOKENS = 4000


class Cluster:
    """Two nodes of one thread each, the model on both, to stay."""

    def __init__(self, model: str, split: str, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self._folder, self._lines = folder, list[str]()
        command = [
            sys.executable, "-m", "janus_server", "serve", f"m={model}", "--nodes", "2", "--port", "0",
            "--threads", "1", "--memory", "1GiB", "--host-memory", "64MiB", "--pd-split", split, "--access-log", "off",
        ]  # fmt: skip
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment, cwd=REPO, preexec_fn=die_with_parent
        )
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Cluster:
        try:
            self._place()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _place(self) -> None:
        """Wait for both nodes, and have the model on both."""
        self._until(lambda: "nodes are one server" in self.log)
        self.urls = re.findall(r"Janus is ready on (\S+)", self.log)
        for url in self.urls:
            key = json.loads(next(self._folder.rglob(f"{url.rpartition(':')[2]}.key")).read_text())["key"]
            for wish in ("pin", "load"):
                self._until(lambda: _wished(f"{url}/admin/models/m/{wish}?wait=60", key))  # noqa: B023

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its nodes end with it
            self._process.wait(60)

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def _read(self) -> None:
        for line in self._process.stderr or ():
            self._lines.append(line)

    def _until(self, check: Any) -> None:
        end_s = time.monotonic() + 120
        while not check():
            if time.monotonic() > end_s:
                raise SystemExit(self.log)
            time.sleep(0.05)


def _wished(url: str, key: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, b"", {"Authorization": f"Bearer {key}"}), timeout=90):
            return True
    except urllib.error.HTTPError:
        return False


def stream(url: str, prompt: str, tokens: int) -> Iterator[float]:
    """When each token came, monotonic seconds."""
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                yield time.monotonic()


class Reader(threading.Thread):
    """A stream that goes on until it is left."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.over = False
        self._url, self._number = url, number

    def run(self) -> None:
        while not self.over:
            for at_s in stream(self._url, f"Story {self._number}: once upon a time", STREAM_TOKENS):
                self.times.append(at_s)
                if self.over:
                    return

    def gaps(self, start_s: float, end_s: float) -> list[float]:
        times = [at_s for at_s in self.times if start_s - 1.0 <= at_s <= end_s + 1.0]
        return [b - a for a, b in itertools.pairwise(times) if b >= start_s and a <= end_s and b - a < 60]


def measure(model: str, split: str, folder: Path, streams: int, prompts: int, words: int) -> dict[str, float]:
    with Cluster(model, split, folder) as cluster:
        list(stream(cluster.urls[0], "warm " * 200, 4))
        readers = [Reader(cluster.urls[0], number) for number in range(streams)]
        for reader in readers:
            reader.start()
            while not reader.times:
                time.sleep(0.01)
        time.sleep(2.0)
        calm = [gap for reader in readers for gap in reader.gaps(time.monotonic() - 1.0, time.monotonic())]
        first_s, gaps = [], list[float]()
        for number in range(prompts):
            start_s = time.monotonic()
            first_s.append(
                next(stream(cluster.urls[0], f"Report {number}. " + "many words of it " * (words // 4), 1)) - start_s
            )
            end_s = time.monotonic()
            time.sleep(0.5)
            gaps += [gap for reader in readers for gap in reader.gaps(start_s, end_s)]
        for reader in readers:
            reader.over = True
        elsewhere = [_elsewhere(url) for url in cluster.urls]
    return {
        "TTFT, median": statistics.median(first_s), "TTFT, longest": max(first_s),
        "gap, calm": statistics.median(calm), "gap, median": statistics.median(gaps),
        "gap, p99": at(gaps, 0.99), "gap, longest": max(gaps), "prompts elsewhere": float(sum(elsewhere)),
    }  # fmt: skip


def _elsewhere(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as reply:
        found = re.search(r'janus_prompts_elsewhere_total\{outcome="brought"\} (\S+)', reply.read().decode())
    return int(float(found[1])) if found else 0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--streams", type=int, default=4)
    options.add_argument("--prompts", type=int, default=5)
    options.add_argument("--words", type=int, default=1200)
    options.add_argument("--settings", nargs="+", default=["off", "auto", "always"])
    given = options.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for turn, split in enumerate(given.settings):
            found = measure(given.model, split, Path(folder) / f"{turn}", given.streams, given.prompts, given.words)
            told = ", ".join(
                f"{name} {value:.0f}" if name == "prompts elsewhere" else f"{name} {1000 * value:.0f} ms"
                for name, value in found.items()
            )
            print(f"--pd-split {split}: {told}", flush=True)


if __name__ == "__main__":
    main()
