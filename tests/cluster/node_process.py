"""Nodes as processes of their own, and what they said. See `coordinator_node`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Far more than anything here takes on an idle machine.
PATIENCE_S = 60.0


class NodeProcess:
    """One node. `said` grows as it speaks."""

    def __init__(self, where: str, name: str, lease_s: float) -> None:
        self.name = name
        self.said: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("coordinator_node.py")), where, name, str(lease_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._reader.join(10)

    def refused(self) -> str:
        """Why it was not let in."""
        self._process.wait(PATIENCE_S)
        self._reader.join(10)
        return next(line["refused"] for line in self.said if "refused" in line)

    def acts(self) -> list[dict[str, Any]]:
        return [line for line in list(self.said) if "acts" in line]

    def changes(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in list(self.said) if line.get("change") == kind]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(json.loads(line))


@contextlib.contextmanager
def nodes(where: str, *names: str, lease_s: float) -> Iterator[dict[str, NodeProcess]]:
    """They have joined, and one of them leads. Nodes that a test adds are killed at the end too."""
    running = {name: NodeProcess(where, name, lease_s) for name in names}
    try:
        wait_for("all have joined", lambda: all(any("joined" in s for s in n.said) for n in running.values()))
        wait_for("one leads", lambda: any(node.acts() for node in running.values()))
        yield running
    finally:
        for node in running.values():
            node.kill()


def leader_of(running: dict[str, NodeProcess]) -> NodeProcess:
    """Whoever led last."""
    return max((node for node in running.values() if node.acts()), key=lambda node: node.acts()[-1]["asked"])


def wait_for(what: str, holds: Callable[[], bool]) -> float:
    """How long it took."""
    began_s = time.monotonic()
    while not holds():
        assert time.monotonic() < began_s + PATIENCE_S, f"in vain: {what}"
        time.sleep(0.01)
    return time.monotonic() - began_s


def check_terms(running: dict[str, NodeProcess]) -> list[int]:
    """One leader in each term, and no moment at which two led; the terms, as they followed each other."""
    acts = sorted((line["acts"], line["asked"], line["until"], n.name) for n in running.values() for line in n.acts())
    terms: dict[int, list[tuple[float, float, str]]] = {}
    for term, asked_s, until_s, name in acts:
        terms.setdefault(term, []).append((asked_s, until_s, name))
    last_s = 0.0
    for term, led in sorted(terms.items()):
        assert len({name for _, _, name in led}) == 1, f"term {term} has two leaders"
        assert min(asked_s for asked_s, _, _ in led) > last_s, f"term {term} began before the one before it had ended"
        last_s = max(asked_s for asked_s, _, _ in led)
    return sorted(terms)
