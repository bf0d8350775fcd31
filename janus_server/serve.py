"""`janus serve`: one process from launch to exit code. Listens first, loads beside it, drains on a signal.

The port answers /health from the start and /ready once every model is loaded, so that probes and impatient clients get
a clear word instead of a refused connection.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import sys
import time

import uvloop

from janus_server.config import ServeConfig
from janus_server.errors import BadConfig, BadModel
from janus_server.node import Node
from janus_server.terminal.progress import LoadProgress
from janus_server.units import format_bytes

log = logging.getLogger("janus.serve")


def run(config: ServeConfig) -> int:
    """Serve until a signal; 0 after a clean end, 2 when the model or a setting cannot be used."""
    logging.basicConfig(
        level=config.log_level.value.upper(), stream=sys.stderr, format="%(asctime)s %(levelname).1s %(message)s"
    )
    try:
        with bind(config.host, config.port) as listening:
            return uvloop.run(_serve(config, listening))
    except (BadConfig, BadModel) as error:
        print(f"janus: {error}", file=sys.stderr)
        return 2


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to that address, before anything slow begins; BadConfig when it cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except socket.gaierror:
        raise BadConfig(f"--host {host}: no such address; 127.0.0.1 is this machine, 0.0.0.0 every network") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = "is in use by another process; choose another with --port (0 takes any free one)"
        else:
            reason = f"cannot be listened on: {os.strerror(error.errno or 0)}"
        raise BadConfig(f"{host} port {port} {reason}") from None


async def _serve(config: ServeConfig, listening: socket.socket) -> int:
    start_s = time.perf_counter()
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _on_signal, stop)
    node = Node(config)
    progress = LoadProgress(sys.stderr)
    opening = asyncio.create_task(node.open(progress.update))
    await asyncio.sleep(0)  # let it begin
    # Imported after loading began: the HTTP stack takes 0.25 s to import, which the loader's reads can hide.
    from janus_server.http.listen import Listener

    server = await Listener.open(node, listening)
    try:
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([opening, stopped], return_when=asyncio.FIRST_COMPLETED)
        progress.close()
        if opening.done():
            await opening
            _announce(config, node, _url(config, listening), time.perf_counter() - start_s)
            # What start-up left behind lives as long as the process: keep the collector from walking it again.
            gc.collect()
            gc.freeze()
            await stopped
            await _drain(config, node)
    finally:
        await server.close()
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await node.close()
    return 0


def _url(config: ServeConfig, listening: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listening.getsockname()[1]}"


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        # A second Ctrl-C: the user does not want to wait for the drain.
        raise SystemExit(130)
    stop.set()


async def _drain(config: ServeConfig, node: Node) -> None:
    """Refuse new requests, let running ones finish for a while, then end the rest with an error event."""
    node.drain("the server is shutting down")
    if len(node.streams):
        print(f"janus: finishing {len(node.streams)} requests (Ctrl-C again to stop at once)", file=sys.stderr)
    deadline = time.monotonic() + config.shutdown_timeout_s
    while len(node.streams) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    if len(node.streams):
        log.warning("ending %d requests that did not finish in %.0f s", len(node.streams), config.shutdown_timeout_s)
        node.end_all()
        for _ in range(100):
            if not len(node.streams):
                break
            await asyncio.sleep(0.02)


def _announce(config: ServeConfig, node: Node, url: str, took_s: float) -> None:
    lines = [f"Janus is ready on {url} after {took_s:.2f} s"]
    stages = node.stages()
    for card in node.cards.values():
        lines.append(
            f"  {card.id}: {card.family}, {card.parameters / 1e6:.0f} M parameters, {card.dtype}, "
            f"{format_bytes(card.weight_bytes)} of weights, context {card.context_tokens}, {stages[card.id].value}"
        )
    pool = format_bytes(config.memory_bytes)
    lines.append(f"  memory {pool}, of it {format_bytes(node.free_pages * config.page_bytes)} free for KV cache")
    lines.append("  try: janus chat")
    print("\n".join(lines), file=sys.stderr)
