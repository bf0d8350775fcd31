"""The ways that `transfer` compares, each as a function that fills the same memory once and says how long it took.

The ceilings do no more than move bytes; the pulls are Janus's own, whole: connection, proofs of the secret, grant,
pages, checksum and confirmation.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

# house: exempt — what is measured is the plane itself, below any HTTP
from janus_server.cluster.freight import Known
from janus_server.kv.move import Pace  # house: exempt — as above
from janus_server.kv.vmm_cpu import CpuMemory, PeerMemory  # house: exempt — as above
from janus_server.transfer.proving import dial  # house: exempt — as above
from janus_server.transfer.pull import Want, pulling  # house: exempt — as above
from janus_server.transfer.rundir import Peering  # house: exempt — as above
from janus_server.wire.handshake import Identity, Secret  # house: exempt — as above
from janus_server.wire.tls import TlsFiles, dialling_context  # house: exempt — as above

from .transfer_owner import COUNT, HOT_BYTES, PAGE_BYTES

_SECRET: Final = "0123456789abcdef" * 4
_FREE: Final = Pace(lambda done: None, lambda: True)


@dataclasses.dataclass(frozen=True, slots=True)
class Others:
    owner: Known | None

    def names(self) -> tuple[str, ...]:
        return ("owner",)

    def far(self, node: str) -> Known | None:
        return self.owner


@dataclasses.dataclass(frozen=True, slots=True)
class Took:
    """Seconds of the whole, of its copy alone where it has one, and of this process's processors."""

    whole_s: float
    copy_s: float
    cpu_s: float


Way = Callable[[], Took]


class Bench:
    """A target that was touched, beside an owner in a process of its own."""

    def __init__(self, owner: Mapping[str, Any], size: int, run_dir: Path, tls: TlsFiles | None) -> None:
        self.memory = CpuMemory(-(-size // PAGE_BYTES), PAGE_BYTES)
        self.memory.slab[:] = 1
        self.target = self.memory.slab[:size]
        self._owner = owner
        self._run_dir = run_dir
        self._tls = tls
        self._fd = os.open(f"/proc/{owner['pid']}/fd/{owner['fd']}", os.O_RDONLY)
        self._mapped = PeerMemory(self._fd, self.memory.slab.size)
        self._mapped.look_up(0, size)
        self._local = self._mapped.slab[:size].copy()
        self._loop = asyncio.new_event_loop()

    @property
    def has_tls(self) -> bool:
        return self._tls is not None

    def close(self) -> None:
        self._loop.close()
        self._mapped.close()
        os.close(self._fd)

    # Ceilings

    def memcpy(self) -> Took:
        """numpy copies memory of this process."""
        return timed(lambda: np.copyto(self.target, self._local))

    def mapped_copy(self) -> Took:
        """numpy copies the owner's memory, which was mapped before."""
        return timed(lambda: np.copyto(self.target, self._mapped.slab[: len(self.target)]))

    def mapping_copy(self) -> Took:
        """The same with the mapping, its pages looked up, and its end: what a pull cannot do without."""

        def work() -> None:
            mapped = PeerMemory(self._fd, self.memory.slab.size)
            mapped.look_up(0, len(self.target))
            np.copyto(self.target, mapped.slab[: len(self.target)])
            mapped.close()

        return timed(work)

    def sockets(self) -> Took:
        """One hot megabyte through a socket, again and again: what iperf does."""
        block = memoryview(bytearray(HOT_BYTES))

        def work(connection: socket.socket) -> None:
            left = len(self.target)
            connection.sendall(COUNT.pack(0, left))
            while left:
                left -= connection.recv_into(block[: min(left, HOT_BYTES)], 0, socket.MSG_WAITALL)

        return self._connected("hot", [work])

    def bare(self, streams: int, tls: bool = False) -> Took:
        """sendfile at one end (under TLS sendall), recv_into at the other, over so many sockets."""
        whole = socket.MsgFlag(0) if tls else socket.MSG_WAITALL
        cuts = [len(self.target) * i // streams for i in range(streams + 1)]

        def part(first: int, end: int) -> Callable[[socket.socket], None]:
            def work(connection: socket.socket) -> None:
                connection.sendall(COUNT.pack(first, end - first))
                into, got = self.target[first:end].data, 0
                while got < end - first:
                    got += connection.recv_into(into[got:], 0, whole)

            return work

        return self._connected("sealed" if tls else "bare", [part(cuts[i], cuts[i + 1]) for i in range(streams)])

    def _connected(self, port: str, works: list[Callable[[socket.socket], None]]) -> Took:
        """Run each on a connection that is open before the clock starts."""
        connections = [socket.create_connection(("127.0.0.1", self._owner[port])) for _ in works]
        if port == "sealed" and self._tls is not None:
            context = dialling_context(self._tls)
            connections = [context.wrap_socket(connection) for connection in connections]
        try:
            pairs = list(zip(works, connections, strict=True))
            threads = [threading.Thread(target=work, args=(connection,)) for work, connection in pairs[1:]]

            def run() -> None:
                for thread in threads:
                    thread.start()
                works[0](connections[0])
                for thread in threads:
                    thread.join()

            return timed(run)
        finally:
            for connection in connections:
                connection.close()

    # Janus

    def mapped_pull(self) -> Took:
        return self._pull(Peering(node="reader", incarnation="r", run_dir=self._run_dir))

    def far_pull(self, streams: int, tls: bool = False) -> Took:
        endpoint = self._owner["doors"][1 if tls else 0]
        context = dialling_context(self._tls) if tls and self._tls is not None else None
        me, peer = Identity("bench", "reader", "r", "tcp://127.0.0.1:1"), Identity("bench", "owner", "o", endpoint)
        known = Known(False, lambda limit_s: dial(me, peer, Secret(_SECRET), context, limit_s))
        return self._pull(
            Peering(node="reader", incarnation="r", run_dir=self._run_dir, streams=streams, others=Others(known))
        )

    def _pull(self, peering: Peering) -> Took:
        want = Want(model="m", layout="L", checkpoint="C", size_bytes=len(self.target), digest=None)
        copied_s = 0.0

        async def run() -> None:
            nonlocal copied_s
            async with pulling(peering, "owner", want) as pull:
                await asyncio.to_thread(pull.attach)
                start_s = time.perf_counter()
                await asyncio.to_thread(pull.copy, [self.target], _FREE)
                copied_s = time.perf_counter() - start_s
                await asyncio.to_thread(pull.verify, self.target)
                await pull.confirm()

        took = timed(lambda: self._loop.run_until_complete(run()))
        return dataclasses.replace(took, copy_s=copied_s)


def timed(work: Callable[[], object]) -> Took:
    cpu_s, start_s = time.process_time(), time.perf_counter()
    work()
    whole_s = time.perf_counter() - start_s
    return Took(whole_s, whole_s, time.process_time() - cpu_s)


@contextmanager
def opened(size: int) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="janus-transfer-") as folder:
        run_dir, tls = Path(folder) / "run", _certificate(Path(folder))
        files = [] if tls is None else [str(tls.certificate), str(tls.key)]
        command = [sys.executable, "-m", f"{__package__}.transfer_owner", str(size), str(run_dir), _SECRET, *files]
        owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            if owner.stdout is None:
                raise RuntimeError("the owner says nothing")
            bench = Bench(json.loads(owner.stdout.readline()), size, run_dir, tls)
            try:
                yield bench
            finally:
                bench.close()
        finally:
            owner.communicate()


def _certificate(folder: Path) -> TlsFiles | None:
    """None where there is no openssl to make one with."""
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=bench".split()
    try:
        subprocess.run([*make, "-keyout", "key.pem", "-out", "node.pem"], cwd=folder, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return TlsFiles(folder / "node.pem", folder / "key.pem", folder / "node.pem")
