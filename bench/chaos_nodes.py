"""Real nodes of a cluster, each a process of its own that can be killed, stopped, cut off and started again.

`Nodes` starts them and knows from their logs who leads and who is ready. What a node says is kept with the time at
which it came. Nothing is measured here and no fault is thought up here.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_READY: Final = re.compile(r"Janus is ready on (\S+)")
_LEADS: Final = re.compile(r"(\S+) leads, in term (\d+)")
_MOVED: Final = "goes on elsewhere"
_PR_SET_PDEATHSIG: Final = 1
_STOP_S: Final = 60.0
WAIT_S: Final = 60.0


class NotInTime(Exception):
    """Something that was waited for did not happen."""


class Line:
    """One line of a node's log, and when it came on the monotonic clock."""

    __slots__ = ("at_s", "text")

    def __init__(self, at_s: float, text: str) -> None:
        self.at_s, self.text = at_s, text


class Node:
    """`janus serve` with these arguments. before: a command that starts it somewhere else."""

    def __init__(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str], before: Sequence[str] = ()
    ) -> None:  # fmt: skip
        self.name = name
        self.lines: list[Line] = []
        self._command = [*before, sys.executable, *(["-O"] * sys.flags.optimize), "-m", "janus_server", "serve",
                         *arguments, "--node", name]  # fmt: skip
        paths = os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment}
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._since = 0
        self._child = any(word == "--fork" for word in before)

    @property
    def url(self) -> str:
        """Where it is ready; empty while it is not."""
        found = [match for line in self.lines[self._since :] if (match := _READY.search(line.text))]
        return found[-1][1] if found else ""

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return "".join(line.text for line in self.lines)

    def start(self) -> None:
        self._since = len(self.lines)
        self._process = subprocess.Popen(
            self._command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=self._environment,
            preexec_fn=die_with_parent,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """As kill -9 does, and wait until it is gone."""
        self.send(signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_S)
        if self._reader is not None:
            self._reader.join(_STOP_S)

    @property
    def pid(self) -> int:
        """Of the node itself, where a command that starts it stays its parent; 0 before it was started."""
        pid = 0 if self._process is None else self._process.pid
        if not self._child:
            return pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else pid

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stderr or ():
            self.lines.append(Line(time.monotonic(), line))


class Nodes:
    """All nodes of one cluster, by name."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.all = {node.name: node for node in nodes}

    def __getitem__(self, name: str) -> Node:
        return self.all[name]

    @property
    def urls(self) -> dict[str, str]:
        return {name: node.url for name, node in self.all.items()}

    def terms(self) -> dict[int, tuple[str, float]]:
        """Who said that it leads, and when, by term."""
        found: dict[int, tuple[str, float]] = {}
        for node in self.all.values():
            for line in list(node.lines):
                if match := _LEADS.search(line.text):
                    found[int(match[2])] = match[1], line.at_s
        return found

    def moved(self, since_s: float) -> int:
        """How many requests went on, on another node, from what they had said."""
        lines = [line for node in self.all.values() for line in list(node.lines) if line.at_s >= since_s]
        return sum(_MOVED in line.text for line in lines)

    @property
    def term(self) -> int:
        return max(self.terms(), default=0)

    @property
    def leader(self) -> str:
        terms = self.terms()
        return terms[max(terms)][0] if terms else ""

    @property
    def followers(self) -> list[str]:
        return [name for name in self.all if name != self.leader]

    async def start(self) -> None:
        for node in self.all.values():
            node.start()
        await self.until(lambda: all(self.urls.values()), "every node is ready")

    async def until(self, check: Callable[[], Any], what: str, limit_s: float = WAIT_S) -> None:
        until_s = time.monotonic() + limit_s
        while not check():
            if time.monotonic() >= until_s:
                raise NotInTime(f"{what}: not within {limit_s:g} s\n{self.tail()}")
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        """All of them, as Ctrl-C does, and those that do not answer by force."""
        for node in self.all.values():
            node.send(signal.SIGCONT)
            node.send(signal.SIGINT)
        for node in self.all.values():
            node.wait()

    def tail(self, lines: int = 12) -> str:
        """The end of every log, to see what went wrong."""
        return "".join(f"{node.name} | {line.text}" for node in self.all.values() for line in node.lines[-lines:])


def die_with_parent() -> None:
    """Runs in the new process: no node outlives the bench, however that ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
