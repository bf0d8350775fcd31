"""The process that is read by `transfer`: one memory, readable through Janus's own plane and by loops that do no more
than move bytes. It prints where each is found, and ends with its standard input.

    python -m bench.transfer_owner SIZE_BYTES RUN_DIR SECRET [CERTIFICATE KEY]
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

# house: exempt — what is measured is the plane itself, below any HTTP
from janus_server.kv.move import sampled_digest
from janus_server.kv.vmm_cpu import CpuMemory  # house: exempt — as above
from janus_server.transfer.door import Door, Pages  # house: exempt — as above
from janus_server.transfer.grants import Grants, Offer  # house: exempt — as above
from janus_server.transfer.proving import endpoint_of  # house: exempt — as above
from janus_server.transfer.rundir import Peering  # house: exempt — as above
from janus_server.transfer.serving import PeerServer  # house: exempt — as above
from janus_server.wire.handshake import Identity, Secret  # house: exempt — as above
from janus_server.wire.tls import TlsFiles, answering_context, own_digest  # house: exempt — as above

PAGE_BYTES: Final = 2 << 20
HOT_BYTES: Final = 1 << 20
COUNT: Final = struct.Struct(">QQ")


async def main(size: int, run_dir: Path, secret: str, tls: TlsFiles | None) -> None:
    memory = CpuMemory(-(-size // PAGE_BYTES), PAGE_BYTES)
    memory.slab[:] = np.arange(memory.slab.size, dtype=np.uint32).view(np.uint8)[: memory.slab.size]
    offer = Offer(
        layout="L", checkpoint="C", size_bytes=size, pages=tuple(range(memory.n_pages)),
        digest=sampled_digest(memory.slab[:size]),
    )  # fmt: skip
    grants = Grants()
    peering = Peering(node="owner", incarnation="o", run_dir=run_dir, grant_s=60.0)
    pages = Pages(memory, grants, lambda model: offer if model == "m" else None)
    near = PeerServer(peering, memory, grants, pages.offers)
    doors = [door(peering, pages, secret, files) for files in ([None] if tls is None else [None, tls])]
    fd = memory.read_only()

    def send_slab(connection: socket.socket, at: int, count: int) -> None:
        connection.sendall(memory.slab[at : at + count].data)

    print(
        json.dumps({
            "pid": os.getpid(), "fd": fd, "doors": [endpoint for _, endpoint in doors],
            "bare": bare(lambda connection, at, count: send_file(connection, fd, at, count)),
            "hot": bare(send_hot),
            "sealed": None if tls is None else bare(send_slab, answering_context(tls)),
        }),
        flush=True,
    )  # fmt: skip
    await asyncio.to_thread(sys.stdin.read)
    for one, _ in doors:
        await one.close()
    await near.close()


def door(peering: Peering, pages: Pages, secret: str, tls: TlsFiles | None) -> tuple[Door, str]:
    listening = socket.create_server(("127.0.0.1", 0))
    endpoint = endpoint_of("127.0.0.1", listening.getsockname()[1], tls is not None)
    me = Identity("bench", "owner", "o", endpoint)
    if tls is None:
        return Door(listening, me, Secret(secret), peering, pages), endpoint
    return Door(listening, me, Secret(secret), peering, pages, answering_context(tls), own_digest(tls)), endpoint


def bare(send: Callable[[socket.socket, int, int], None], tls: ssl.SSLContext | None = None) -> int:
    """A port whose connections are asked for (offset, bytes) again and again."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        whole = socket.MSG_WAITALL
        if tls is not None:
            connection, whole = tls.wrap_socket(connection, server_side=True), socket.MsgFlag(0)
        with connection:
            while len(head := connection.recv(COUNT.size, whole)) == COUNT.size:
                send(connection, *COUNT.unpack(head))

    def accept() -> None:
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listening.getsockname()[1])


def send_file(connection: socket.socket, fd: int, at: int, count: int) -> None:
    while count:
        sent = os.sendfile(connection.fileno(), fd, at, count)
        at, count = at + sent, count - sent


def send_hot(connection: socket.socket, at: int, count: int) -> None:
    """The same megabyte, which the caches hold: what the sockets alone can do."""
    block = memoryview(bytes(HOT_BYTES))
    while count:
        connection.sendall(block[: min(count, HOT_BYTES)])
        count -= min(count, HOT_BYTES)


if __name__ == "__main__":
    _, _size, _run, _secret, *_files = sys.argv
    _tls = TlsFiles(Path(_files[0]), Path(_files[1]), Path(_files[0])) if _files else None
    asyncio.run(main(int(_size), Path(_run), _secret, _tls))
