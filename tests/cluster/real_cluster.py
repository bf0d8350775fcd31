"""Real clusters for tests: `janus serve --nodes N` over tiny checkpoints, nodes that join it, and clients of both."""

from __future__ import annotations

import collections
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

REPO = Path(__file__).parents[2]
SMALL = ("--memory", "16MiB", "--page-size", "64KiB", "--host-memory", "16MiB", "--kernels", "cpu", "--threads", "1")


class Process:
    """A `janus serve` of any kind; what it says is read by a thread. Its run directories are below `runtime`."""

    def __init__(self, arguments: list[str], runtime: Path, *paths: Path) -> None:
        """paths: where packages are looked for at first, which is where a process starts."""
        self.runtime = runtime
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, REPO))), "OMP_NUM_THREADS": "1",
            "XDG_RUNTIME_DIR": str(runtime),
        }  # fmt: skip
        command = [sys.executable, *(["-O"] * sys.flags.optimize), "-m", "janus_server", "serve", *arguments]
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=(*paths, REPO)[0],
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)

    def until(self, check: Callable[[], Any], limit_s: float = 60.0) -> Any:
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if found := check():
                return found
            time.sleep(0.02)
        raise AssertionError(f"it did not happen in {limit_s} s:\n{self.log}")

    def said(self, pattern: str, limit_s: float = 60.0) -> re.Match[str]:
        return self.until(lambda: re.search(pattern, self.log), limit_s)

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join(20)
        return code

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nodes that are stopped go on, so that whoever watches them can end them."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait(20)


class Cluster(Process):
    """`with Cluster(models, tmp_path) as cluster:` has three nodes that are ready."""

    def __init__(self, models: dict[str, Path], runtime: Path, *more: str, nodes: int = 3) -> None:
        runtime.chmod(0o700)
        named = [f"{name}={path}" for name, path in models.items()]
        super().__init__([*named, "--nodes", str(nodes), "--port", "0", "--access-log", "off", *SMALL, *more], runtime)
        self.nodes = nodes

    def __enter__(self) -> Cluster:
        try:
            self.said(r"nodes are one server")
        except BaseException:
            self.process.kill()
            raise
        return self

    @property
    def urls(self) -> dict[str, str]:
        """Of each node that is ready, where it was ready last."""
        return dict(re.findall(r"^(n\d+) \| Janus is ready on (\S+)", self.log, re.MULTILINE))

    @property
    def where(self) -> str:
        found = re.search(r"--join (\S+)", self.log)
        assert found is not None
        return found[1]

    @property
    def terms(self) -> dict[int, str]:
        """Who was elected, by term."""
        return {int(term): name for name, term in re.findall(r"(n\d+) leads, in term (\d+)", self.log)}

    @property
    def leader(self) -> str:
        return self.terms[max(self.terms)]

    def pid(self, node: str) -> int:
        main = self.process.pid
        for child in Path(f"/proc/{main}/task/{main}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if words[words.index(b"--node") + 1] == node.encode():
                return int(child)
        raise AssertionError(f"{node} does not run")

    def kill(self, node: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(node), number)


class Outcome(collections.Counter[str]):
    """How requests ended, by a word each."""


def complete(url: str, model: str, prompt: str = "the quick", tokens: int = 16, **more: Any) -> str:
    """The greedy text of an answer that is sent whole."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    status, reply = post(f"{url}/v1/completions", body)
    assert status == 200, reply
    return json.loads(reply)["choices"][0]["text"]


def stream(
    url: str, model: str, prompt: str = "the quick", tokens: int = 16,
    at_event: tuple[int, Callable[[], object]] = (0, int), **more: Any,
) -> tuple[str, str]:  # fmt: skip
    """The greedy text of a stream, and how it ended: "ok", "error" (an event), "cut", "refused N", "no connection"."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        **more,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text, end, events = "", "", 0
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            for line in reply:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    return text, end or "cut"
                events += 1
                if events == at_event[0]:
                    at_event[1]()
                event = json.loads(line[6:])
                assert not end, f"something came after the end: {event}"
                if "error" in event:
                    end = "error"
                else:
                    text += event["choices"][0]["text"]
                    end = "ok" if event["choices"][0]["finish_reason"] else ""
    except urllib.error.HTTPError as error:
        return "", f"refused {error.code}"
    except urllib.error.URLError:
        return "", "no connection"
    except (OSError, http.client.HTTPException):
        return text, "cut" if text else "no connection"
    return text, end or "cut"


def post(url: str, body: dict[str, Any]) -> tuple[int, bytes]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def open_requests(url: str) -> float:
    """That run or wait on a node, its own and those of others."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_"))


def judged(text: str, end: str, expected: str) -> str:
    """How a stream ended, where its text is to be that: "ok" and "error" hold for the text too."""
    if end == "ok" and text != expected:
        return "other text"
    if end == "error" and not expected.startswith(text):
        return "other beginning"
    return end


class Load:
    """Clients that ask again and again, one thread each, until `stop`: how their requests ended, by node."""

    def __init__(self, urls: dict[str, str], models: dict[str, str], each: int = 2, tokens: int = 40) -> None:
        """models are the expected texts."""
        self.ends: dict[str, Outcome] = {node: Outcome() for node in urls}
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(node, url, model, text, tokens), daemon=True)
            for node, url in urls.items()
            for model, text in models.items()
            for _ in range(each)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, node: str, url: str, model: str, expected: str, tokens: int) -> None:
        while not self._over.is_set():
            end = judged(*stream(url, model, tokens=tokens), expected)
            self.ends[node][end] += 1
            if end != "ok":
                self._over.wait(0.1)

    def done(self, node: str) -> int:
        return self.ends[node]["ok"]

    def stop(self) -> dict[str, Outcome]:
        self._over.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a request never ended"
        return self.ends
