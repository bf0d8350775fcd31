"""Processes that do for the server what a client could make costly: started when first asked, replaced once used up.

`tokens.render` and `grammar.compile` ask from encoding threads, one question a process at a time. An answer of None
means that the question took more time or memory than a process has. The programs are built on `bounded_child`. Nothing
here may hold what belongs to a request once `ask` has returned.
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

from janus_server.errors import Bug

# Only a process that was stopped from outside can be silent for longer than its processor time.
_SILENT_S: Final = 60.0
# Where this package lies comes first: an editable install is found by a hook, not by a path, and -S leaves hooks out.
_HERE: Final = str(Path(__file__).parents[1])


class Workers:
    """At most `workers` processes of one program, each with `cpu_s` seconds of processor time a question and
    `memory_bytes` in all. The program gets these two bounds, then `arguments`, on its command line. niceness 19 is work
    that can wait for everything else.
    """

    def __init__(
        self, program: Path, *, workers: int, cpu_s: float, memory_bytes: int, answer_bytes: int,
        arguments: tuple[str, ...] = (), niceness: int = 0,
    ) -> None:  # fmt: skip
        self._command = [sys.executable, "-P", "-S", str(program), str(cpu_s), str(memory_bytes), *arguments]
        self._answer_bytes = answer_bytes
        self._niceness = niceness
        self._answering: set[_Worker] = set()
        # Last in, first out: a second process starts only when two threads ask at once.
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._workers = workers
        self._closed = False

    def ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """The program's answer; None when it gave none within its bounds, and then the process is gone too.

        Raises Bug when the program cannot be started: its own words are in the server's log.
        """
        data = json.dumps(question).encode()
        worker = self._idle.get()
        answer = None
        try:
            if self._closed:  # a thread that still asks then must not wait for ever, nor start a process
                return None
            if worker is None or not worker.alive:
                worker = _Worker(self._command, self._niceness)
            self._answering.add(worker)
            if self._closed:  # whoever closed did not see it
                return None
            worker.start()
            answer = worker.ask(data, self._answer_bytes)
        finally:
            if worker is not None:
                self._answering.discard(worker)
            if answer is None and worker is not None:
                worker.close()
                worker = None
            self._idle.put(worker)
        return answer

    def kill(self) -> None:
        """End the processes at once: questions that are being answered get no answer. Another thread than theirs."""
        self._closed = True
        for worker in tuple(self._answering):
            worker.kill()
        self.close()

    def close(self) -> None:
        """End the processes; waits for questions that are being answered. Later ones get no answer."""
        self._closed = True
        for worker in [self._idle.get() for _ in range(self._workers)]:
            if worker is not None:
                worker.close()
            self._idle.put(None)


class _Worker:
    """One process and our end of its socket. Its environment holds nothing but where to import from."""

    def __init__(self, command: list[str], niceness: int) -> None:
        self._program = Path(command[3]).name
        self._ready = False
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), start_new_session=True,
                env={"PYTHONPATH": os.pathsep.join([_HERE, *(path for path in sys.path if path)])},
            )  # fmt: skip
        if niceness:
            os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)
        ours.settimeout(_SILENT_S)
        self._stream = ours.makefile("rwb")
        ours.close()  # the stream keeps the descriptor

    def start(self) -> None:
        """Wait until it is ready, the first time. Bug where it never will be."""
        if not self._ready and not self._started():
            raise Bug(f"the helper process {self._program} did not start")
        self._ready = True

    def _started(self) -> bool:
        """Whether the program said that it is ready: one empty frame, after its imports."""
        try:
            return self._stream.read(4) == bytes(4)
        except OSError:
            return False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: bytes, answer_bytes: int) -> dict[str, Any] | None:
        try:
            self._stream.write(len(question).to_bytes(4, "little") + question)
            self._stream.flush()
            size = int.from_bytes(self._stream.read(4), "little")
            data = self._stream.read(size) if 0 < size <= answer_bytes else b""
            return dict(json.loads(data)) if data and len(data) == size else None
        except (OSError, ValueError, RecursionError):
            return None

    def kill(self) -> None:
        """Whoever waits for its answer is told that there will be none."""
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        with contextlib.suppress(OSError):
            self._stream.close()
        self._process.wait()
