"""The inside of a bounded process: one question a frame (4 bytes of length, then JSON) on a socket that is stdin and
stdout at once, each answered within its processor time.

The programs that `bounded` starts call `serve` once they have imported and warmed whatever they need: afterwards no
file can be opened. The standard library only: what runs there holds no secret, and imports nothing of the server that
does. A question that is too costly ends the process, wherever it is, in C code too.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], cpu_s: float, memory_bytes: int) -> None:
    """Answer questions until the server hangs up. What `answer` raises ends the process, as running out does.

    Until here the program's errors go to the server's log; from here on it says nothing there.
    """
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    lock_down(memory_bytes)
    _write(b"")
    while (question := _read(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process
        data = json.dumps(answer(question)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(data)


def lock_down(memory_bytes: int) -> None:
    """Give up, for good, everything that answering a question does not take."""
    for kind, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NOFILE, 0),  # what is open stays; nothing more can be opened
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(len(data).to_bytes(4, "little") + data)
    sys.stdout.buffer.flush()


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    head = stream.read(4)
    return json.loads(stream.read(int.from_bytes(head, "little"))) if len(head) == 4 else None
