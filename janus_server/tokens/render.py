"""The processes that render chat templates: started when first asked, replaced when a template has used one up.

`chat_template` asks from encoding threads, one question a worker at a time. An answer of None means that the template
took more time or memory than a worker has. The program itself is `worker`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

MAX_PROMPT_CHARS: Final = 16 * 1024 * 1024
_PROGRAM: Final = Path(__file__).with_name("worker.py")
_MAX_ANSWER_BYTES: Final = 8 * MAX_PROMPT_CHARS  # JSON spells a character in at most six bytes, twelve beyond the BMP
# Only a worker that was stopped from outside can be silent for longer than its processor time.
_SILENT_S: Final = 60.0


class Renderers:
    """At most `workers` processes, each with `cpu_s` seconds of processor time a question and `memory_bytes` in all."""

    def __init__(self, workers: int = 2, cpu_s: float = 2.0, memory_bytes: int = 1 << 30) -> None:
        bounds = [str(bound) for bound in (cpu_s, memory_bytes, MAX_PROMPT_CHARS)]
        self._command = [sys.executable, "-P", "-S", str(_PROGRAM), *bounds]
        # Last in, first out: a second process starts only when two threads ask at once.
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._workers = workers

    def ask(self, source: str, values: dict[str, Any] | None) -> dict[str, Any] | None:
        """The worker's answer: a rendered "text", an "error", or with values None the template's facts."""
        question = json.dumps({"source": source, "values": values}).encode()
        worker = self._idle.get()
        answer = None
        try:
            if worker is None or not worker.alive:
                worker = _Worker(self._command)
            answer = worker.ask(question)
        finally:
            if answer is None and worker is not None:
                worker.close()
                worker = None
            self._idle.put(worker)
        return answer

    def close(self) -> None:
        """End the processes; waits for questions that are being answered."""
        for _ in range(self._workers):
            worker = self._idle.get()
            if worker is not None:
                worker.close()


class _Worker:
    """One process and our end of its socket. Its environment holds nothing but where to import from."""

    def __init__(self, command: list[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL,
                start_new_session=True, env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )  # fmt: skip
        ours.settimeout(_SILENT_S)
        self._stream = ours.makefile("rwb")
        ours.close()  # the stream keeps the descriptor

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: bytes) -> dict[str, Any] | None:
        try:
            self._stream.write(len(question).to_bytes(4, "little") + question)
            self._stream.flush()
            size = int.from_bytes(self._stream.read(4), "little")
            data = self._stream.read(size) if 0 < size <= _MAX_ANSWER_BYTES else b""
            return dict(json.loads(data)) if data and len(data) == size else None
        except (OSError, ValueError, RecursionError):
            return None

    def close(self) -> None:
        self._process.kill()
        with contextlib.suppress(OSError):
            self._stream.close()
        self._process.wait()
