"""Real etcd servers for the chaos bench and the tests of the cluster: started, killed, stopped, started again.

They listen on loopback, or on an address of a network namespace. Nothing is installed: the program must be there.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

HEALTHY_S: Final = 60.0
PROGRAM: Final = "etcd"
MISSING: Final = "there is no etcd server here (Debian: apt install etcd-server)"


class EtcdServer:
    """One server. Its data stay when it dies."""

    def __init__(
        self, folder: Path, name: str, client_port: int, peer_port: int, cluster: str, *more: str,
        host: str = "127.0.0.1", before: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """before: a command that starts it somewhere else, such as in a network namespace."""
        self.endpoint = f"{host}:{client_port}"
        self.url = f"http://{self.endpoint}"
        self._folder = folder / name
        self._command = [
            *before, PROGRAM, "--name", name, "--data-dir", str(self._folder), "--listen-client-urls", self.url,
            "--advertise-client-urls", self.url, "--listen-peer-urls", f"http://{host}:{peer_port}",
            "--initial-advertise-peer-urls", f"http://{host}:{peer_port}", "--initial-cluster", cluster,
            *more,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._folder.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def forget(self) -> None:
        """Lose all data, as on a disk that was replaced."""
        self.kill()
        shutil.rmtree(self._folder)

    def send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self) -> None:
        """Until it has a leader and answers."""
        until_s = time.monotonic() + HEALTHY_S
        while True:
            with contextlib.suppress(OSError):
                with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                    if b"true" in answer.read(1000):
                        return
            if time.monotonic() >= until_s:
                raise RuntimeError(self._folder.with_suffix(".log").read_text()[-2000:])
            time.sleep(0.05)


@contextlib.contextmanager
def etcd_servers(folder: Path, count: int = 1) -> Iterator[list[EtcdServer]]:
    """So many that are one, on loopback."""
    ports = free_ports(2 * count)
    names = [f"e{i}" for i in range(count)]
    cluster = ",".join(f"{name}=http://127.0.0.1:{ports[2 * i + 1]}" for i, name in enumerate(names))
    servers = [EtcdServer(folder, name, ports[2 * i], ports[2 * i + 1], cluster) for i, name in enumerate(names)]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
