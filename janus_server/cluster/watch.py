"""`janus serve --nodes N`: starts the nodes of one host, starts those anew that die, and ends all of them together.

It is a process of its own that serves nothing and knows nothing of models: what a node takes is `janus serve` itself.
What nodes write to stderr it passes on with their names before it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from janus_server import keys as keyring
from janus_server.cluster.meeting import SECRET
from janus_server.config import ServeConfig, run_folders
from janus_server.coordinator.address import read_login
from janus_server.coordinator.names import free, taken
from janus_server.coordinator.rundir import clear
from janus_server.errors import BadConfig
from janus_server.network import bind, check_exposure, tls_context
from janus_server.serve import PAUSED
from janus_server.transfer.rundir import first_usable
from janus_server.wire.tls import shared_secret

log = logging.getLogger("janus.watch")

# A node that dies again at once is started again later and later.
_FIRST_S: Final = 0.5
_LONGEST_S: Final = 30.0
_STEADY_S: Final = 30.0
# What a node says when it cannot serve at all, as its exit code: starting it again would change nothing.
_HOPELESS: Final = 2
_PR_SET_PDEATHSIG: Final = 1
_READY: Final = re.compile(r"Janus is ready on (\S+) after")
_MOST_LINE_BYTES: Final = 1 << 20


class _Node(msgspec.Struct, frozen=True):
    name: str
    listening: socket.socket


def watch(config: ServeConfig, arguments: Sequence[str]) -> int:
    """Run until a signal. arguments are those of `janus`, which every node is given too."""
    try:
        return asyncio.run(Watchman(config, arguments).run())
    except KeyboardInterrupt:
        return 130


class Watchman:
    """The nodes of one host."""

    def __init__(self, config: ServeConfig, arguments: Sequence[str]) -> None:
        self._config = config
        self._arguments = tuple(arguments)
        ports = [config.port + i if config.port else 0 for i in range(config.nodes)]
        if ports[-1] > 65535:
            raise BadConfig(f"--port {config.port} with --nodes {config.nodes} goes beyond the last port, 65535")
        keys = keyring.load(config.keys, config.api_key_file)
        tls_context(config)
        # What is wrong is said once here instead of by each node. While a node is started again, who connects waits.
        self._listening = [bind(config.host, port) for port in ports]
        check_exposure(config, keys, self._listening[0].getsockname()[0])
        self._login = None if config.etcd_login is None else read_login(config.etcd_login)
        self._nodes: list[_Node] = []
        self._where = config.join or str(_run_dir(config.port))
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._ready: dict[str, str] = {}
        self._paused: set[str] = set()
        self._leaving: asyncio.Task[None] | None = None
        self._signals = 0
        self._ending = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        names = free(len(self._listening), await taken(self._where, self._login))
        self._nodes = [_Node(name, one) for name, one in zip(names, self._listening, strict=True)]
        codes = [] if self._signals else await asyncio.gather(*map(self._keep, self._nodes))
        if self._config.join is None:
            await asyncio.to_thread(clear, Path(self._where))
        if self._signals:
            return 130 if self._signals > 1 else 0
        return max(codes)

    def _on_signal(self, number: int) -> None:
        """The first lets requests finish, the second ends them, as with one node; the third is the last.

        A node that has nothing left to do for its clients may have something for those of others: all stay until none
        has.
        """
        self._signals += 1
        self._end()
        if self._signals == 1:
            self._send(signal.SIGUSR1)
            self._leaving = asyncio.create_task(self._leave())
        elif self._signals == 2:
            self._send(signal.SIGINT)
            self._send(signal.SIGTERM)  # two of one kind may be one
        else:
            self._send(signal.SIGKILL)

    def _end(self) -> None:
        """No node is started any more: who connects after the last one has gone is told so."""
        self._ending.set()
        for listening in self._listening:
            listening.close()

    async def _leave(self) -> None:
        until_s = time.monotonic() + self._config.shutdown_timeout_s
        while time.monotonic() < until_s and not self._running.keys() <= self._paused:
            await asyncio.sleep(0.02)
        if self._signals == 1:
            self._send(signal.SIGINT)

    def _send(self, number: int) -> None:
        for process in self._running.values():
            if process.returncode is None:
                process.send_signal(number)

    async def _keep(self, node: _Node) -> int:
        """Have the node run, again and again, until the end or until there is no use in it."""
        delay_s = 0.0
        while not self._ending.is_set():
            started_s = time.monotonic()
            code = await self._run(node)
            if self._ending.is_set():
                return code
            self._ready.pop(node.name, None)
            if code == _HOPELESS and node.name not in self._ready and time.monotonic() - started_s < _STEADY_S:
                self._say(node.name, "it cannot serve: it is not started again")
                node.listening.close()
                if len(self._running) <= 1:
                    self._end()
                return code
            delay_s = _FIRST_S if time.monotonic() - started_s > _STEADY_S else min(_LONGEST_S, delay_s * 2 or _FIRST_S)
            self._say(node.name, f"it ended with {code}; it is started again in {delay_s:g} s")
            try:
                async with asyncio.timeout(delay_s):
                    await self._ending.wait()
                return code
            except TimeoutError:
                pass
        return 0

    async def _run(self, node: _Node) -> int:
        process = await asyncio.create_subprocess_exec(
            *self._command(node), stderr=asyncio.subprocess.PIPE, limit=_MOST_LINE_BYTES,
            start_new_session=True,  # Ctrl-C reaches them through this process alone
            pass_fds=[node.listening.fileno()], preexec_fn=_die_with_parent,
        )  # fmt: skip
        self._running[node.name] = process
        try:
            await self._pass_on(node, process)
            return await process.wait()
        finally:
            del self._running[node.name]

    async def _pass_on(self, node: _Node, process: asyncio.subprocess.Process) -> None:
        if process.stderr is None:
            return
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # a line without end
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            self._say(node.name, text)
            if PAUSED in text:
                self._paused.add(node.name)
            if found := _READY.search(text):
                self._ready[node.name] = found[1]
                if len(self._ready) == len(self._nodes):
                    urls = ", ".join(self._ready[name] for name in sorted(self._ready))
                    self._say("janus", f"{len(self._nodes)} nodes are one server: {urls}")
                    self._say("janus", f"more nodes of it: janus serve MODEL… --port PORT --join {self._where}")

    def _say(self, name: str, text: str) -> None:
        sys.stderr.write(f"{name} | {text}\n")
        sys.stderr.flush()

    def _command(self, node: _Node) -> list[str]:
        """The same command again, for one node: of a flag that comes twice the last one holds."""
        config, port = self._config, node.listening.getsockname()[1]
        return [
            sys.executable, *(["-O"] * sys.flags.optimize), "-m", "janus_server", *self._arguments,
            "--nodes", "1", "--node", node.name, "--port", str(port), "--listen-fd", str(node.listening.fileno()),
            "--join", self._where,
            "--memory", str(config.memory_bytes), "--host-memory", str(config.host_memory_bytes),
            "--threads", str(config.threads),
        ]  # fmt: skip


def _run_dir(port: int) -> Path:
    """Where nodes meet that were started together: by the port, which no two of them can have."""
    folder = first_usable(run_folders()) / (f"cluster-{port}" if port else f"cluster-{time.time_ns():x}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise BadConfig(f"the run directory {folder} cannot be used: {error.strerror}") from None
    shared_secret(folder / SECRET)
    return folder


def _die_with_parent() -> None:
    """Runs in the new process: no node outlives whoever watches it, however that ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
