"""The same copy by NIXL, where `pip install nixl-cu12` (or nixl-cu13) has put it: two agents, each in a process.

`transfer` starts the reader, which starts the owner. NIXL writes to standard output at import: what is said between the
processes goes over descriptors of their own. Its own choice on one host is a copy from the other process (cma).

    python -m bench.transfer_nixl reader SIZE_BYTES ANSWERS_FD      "pull" a line on stdin, seconds a line out
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Final

import numpy as np

CMA: Final = "NIXL, its choice (cma)"
TCP: Final = "NIXL over TCP"
_MODULES: Final = ("nixl_cu12", "nixl_cu13")


def module() -> str | None:
    """The name of the installed one."""
    return next((name for name in _MODULES if importlib.util.find_spec(name) is not None), None)


@contextmanager
def pair(size: int, tcp: bool) -> Iterator[Callable[[], tuple[float, float]]]:
    """A function that pulls once: seconds of the whole, and of the reader's processors."""
    command = [sys.executable, "-m", f"{__package__}.transfer_nixl", "reader", str(size)]
    settings = ["env", *(["UCX_TLS=tcp"] if tcp else [])]
    read, write = os.pipe()
    child = subprocess.Popen(
        [*settings, *command, str(write)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, pass_fds=[write], text=True,
    )  # fmt: skip
    os.close(write)
    with open(read, encoding="utf-8") as answers:

        def pull() -> tuple[float, float]:
            if child.stdin is None:
                raise RuntimeError("the reader has no input")
            child.stdin.write("pull\n")
            child.stdin.flush()
            whole_s, cpu_s = json.loads(answers.readline())
            return whole_s, cpu_s

        try:
            yield pull
        finally:
            child.communicate()


def _agent(name: str) -> Any:
    api = importlib.import_module(f"{module()}._api")
    return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))


def _touched(size: int, value: int) -> np.ndarray:
    return np.full(size, value, np.uint8)


def _described(array: np.ndarray) -> list[tuple[int, int, int]]:
    return [(array.ctypes.data, len(array), 0)]


def owner(size: int, out: IO[str]) -> None:
    """Says where its memory is, and ends with its standard input."""
    agent, memory = _agent("owner"), _touched(size, 7)
    registered = agent.register_memory([(*_described(memory)[0], "")], "DRAM")
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    out.write(json.dumps([metadata, _described(memory)]) + "\n")
    out.flush()
    sys.stdin.read()
    agent.deregister_memory(registered)


def reader(size: int, out: IO[str]) -> None:
    read, write = os.pipe()
    command = [sys.executable, "-m", f"{__package__}.transfer_nixl", "owner", str(size), str(write)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[write])
    os.close(write)
    with open(read, encoding="utf-8") as said:
        metadata, where = json.loads(said.readline())
    agent, memory = _agent("reader"), _touched(size, 1)
    agent.register_memory([(*_described(memory)[0], "")], "DRAM")
    name = agent.add_remote_agent(base64.b64decode(metadata))
    name = name.decode() if isinstance(name, bytes) else name
    mine = agent.get_xfer_descs(_described(memory), "DRAM")
    theirs = agent.get_xfer_descs([tuple(one) for one in where], "DRAM")
    for _ in sys.stdin:
        memory[:: 1 << 20] = 1
        cpu_s, start_s = time.process_time(), time.perf_counter()
        handle = agent.initialize_xfer("READ", mine, theirs, name)
        state = agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            state = agent.check_xfer_state(handle)
        took = time.perf_counter() - start_s, time.process_time() - cpu_s
        agent.release_xfer_handle(handle)
        if state == "ERR" or memory[:: 1 << 20].min() != 7:
            raise RuntimeError("NIXL did not copy")
        out.write(json.dumps(took) + "\n")
        out.flush()
    child.communicate()


if __name__ == "__main__":
    _, _role, _size, _fd = sys.argv
    with open(int(_fd), "w", encoding="utf-8") as _out:
        {"owner": owner, "reader": reader}[_role](int(_size), _out)
