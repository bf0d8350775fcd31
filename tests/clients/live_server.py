"""A real `janus serve` process for other people's clients to talk to, and the checkpoint that it serves.

The clients' packages live in a virtual environment of their own, so nothing of the server is imported here: it runs
under the interpreter that JANUS_PYTHON names (the tests' own one by default). Every wait has an end, and a server ends
with its `with` block whatever happened in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

REPO = Path(__file__).parents[2]
PYTHON = os.environ.get("JANUS_PYTHON", sys.executable)
START_LIMIT_S = 90.0

Metrics = dict[str, float]


class LiveServer:
    """One running server: its address, what /metrics says, and its log so far."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.url = ""
        self._log = log

    @property
    def v1(self) -> str:
        """The base URL that OpenAI's clients want."""
        return f"{self.url}/v1"

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def metrics(self) -> Metrics:
        """Every sample of /metrics as `name{key=value,…}`, labels in order."""
        found = {}
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=20) as reply:
            for family in text_string_to_metric_families(reply.read().decode()):
                for sample in family.samples:
                    labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                    found[f"{sample.name}{{{labels}}}"] = sample.value
        return found

    def until(self, holds: Callable[[Metrics], bool], limit_s: float = 30.0) -> Metrics:
        """Poll /metrics until `holds`."""
        end_s = time.monotonic() + limit_s
        while True:
            metrics = self.metrics()
            if holds(metrics):
                return metrics
            if time.monotonic() > end_s:
                shown = {name: value for name, value in metrics.items() if "num_requests" in name or "pages" in name}
                raise AssertionError(f"it never held; the last metrics: {shown}")
            time.sleep(0.05)

    def get(self, path: str) -> tuple[int, bytes]:
        return _fetch(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Any) -> tuple[int, bytes]:
        """POST a JSON body; status and raw reply."""
        headers = {"Content-Type": "application/json"}
        return _fetch(urllib.request.Request(self.url + path, json.dumps(body).encode(), headers))

    def wait_for_port(self) -> str:
        """The address on which it listens, as soon as it does: long before a line in the log tells of it."""
        end_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < end_s and self.process.poll() is None:
            for connection in psutil.Process(self.process.pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    return f"http://127.0.0.1:{connection.laddr.port}"
            time.sleep(0.01)
        raise AssertionError(f"the server does not listen, exit code {self.process.poll()}:\n{self.log}")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first place in the log that matches, once it is there."""
        end_s = time.monotonic() + START_LIMIT_S
        while (found := re.search(pattern, self.log)) is None:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode} before {pattern!r}:\n{self.log}")
            if time.monotonic() > end_s:
                raise AssertionError(f"no {pattern!r} in the log after {START_LIMIT_S:.0f} s:\n{self.log}")
            time.sleep(0.02)
        return found


@contextlib.contextmanager
def launched(folder: Path, *arguments: str) -> Iterator[LiveServer]:
    """`janus serve ARGUMENTS` from the moment its process exists; `folder` takes its log."""
    log = folder / f"serve-{time.monotonic_ns()}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [PYTHON, "-m", "janus_server", "serve", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=sink, cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    server = LiveServer(process, log)
    try:
        yield server
    except BaseException:
        # pytest shows it with the failure.
        print(f"the server's log, exit code {process.poll()}:\n{server.log[-4000:]}", file=sys.stderr)
        raise
    finally:
        _end(process)


@contextlib.contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[LiveServer]:
    """A server on a port of its own choice, once it is ready."""
    with launched(folder, *arguments, "--port", "0") as server:
        server.url = server.wait_for(r"ready on (http://\S+)")[1]
        yield server


def tiny_model(folder: Path, **overrides: int) -> Path:
    """A random model in `folder`; it is made in the server's environment, which has what that takes."""
    return _make_model(folder, json.dumps(overrides))


def scripted_model(folder: Path, scripts: Mapping[str, Sequence[str]]) -> Path:
    """A model in `folder` that says a script, the same every time: see make_model."""
    return _make_model(folder, "--script", json.dumps(scripts))


def running_and_waiting(metrics: Metrics) -> tuple[float, float]:
    """Sequences in the batch and in the queue, over all models."""
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    running, waiting = (sum(value for key, value in metrics.items() if key.startswith(name)) for name in names)
    return running, waiting


def idle(metrics: Metrics) -> bool:
    return running_and_waiting(metrics) == (0, 0)


def counted(metrics: Metrics, name: str) -> float:
    """The sum of a metric over all its labels."""
    return sum(value for key, value in metrics.items() if key.partition("{")[0] == name)


def _make_model(folder: Path, *arguments: str) -> Path:
    command = [PYTHON, str(Path(__file__).with_name("make_model.py")), str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPO, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def _fetch(request: urllib.request.Request) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def _end(process: subprocess.Popen[bytes]) -> None:
    """First as a user would, so that helper processes end too; then for certain."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    if process.poll() is None:
        process.kill()
        process.wait(30)
