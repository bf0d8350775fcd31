"""`janus serve`: one process from launch to exit code. Listens first, loads beside it, drains on a signal.

The port answers /health from the start and /ready once every model is loaded, so that probes and impatient clients get
a clear word instead of a refused connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
import time

import uvloop

from janus_server.config import ServeConfig
from janus_server.errors import BadConfig, BadModel
from janus_server.node import Node
from janus_server.terminal.progress import LoadProgress, LoadStopped
from janus_server.units import format_bytes

log = logging.getLogger("janus.serve")


def run(config: ServeConfig) -> int:
    """Serve until a signal; 0 after a clean end, 2 when the model or a setting cannot be used."""
    logging.basicConfig(
        level=config.log_level.value.upper(), stream=sys.stderr, format="%(asctime)s %(levelname).1s %(message)s"
    )
    try:
        return uvloop.run(_serve(config))
    except (BadConfig, BadModel) as error:
        print(f"janus: {error}", file=sys.stderr)
        return 2


async def _serve(config: ServeConfig) -> int:
    start = time.perf_counter()
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _on_signal, stop)
    node = Node(config)
    progress = LoadProgress(sys.stderr, stop.is_set)
    loading = asyncio.create_task(asyncio.to_thread(node.load, loop, progress.update))
    # Imported after loading began: the HTTP stack takes 0.25 s to import, which the loader's reads can hide.
    from janus_server.http.listen import Listener

    try:
        server = await Listener.open(node, config)
    except BadConfig:
        stop.set()
        with contextlib.suppress(LoadStopped, BadConfig, BadModel):
            await loading
        raise
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    progress.close()
    try:
        if loading.done():
            loading.result()
            _announce(config, node, server.url, time.perf_counter() - start)
            # What start-up left behind lives as long as the process: keep the collector from walking it again.
            gc.collect()
            gc.freeze()
            await stopping
            await _drain(config, node)
        else:
            with contextlib.suppress(LoadStopped):
                await loading
    finally:
        stopping.cancel()
        await server.close()
        await asyncio.to_thread(node.close)
    return 0


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
    for model in node.models.values():
        card = model.card
        lines.append(
            f"  {card.id}: {card.family}, {card.parameters / 1e6:.0f} M parameters, {card.dtype}, "
            f"{format_bytes(card.weight_bytes)} of weights, context {card.context_tokens}"
        )
    pool = format_bytes(config.memory_bytes)
    lines.append(f"  memory {pool}, of it {format_bytes(node.free_pages * config.page_bytes)} free for KV cache")
    lines.append("  try: janus chat")
    print("\n".join(lines), file=sys.stderr)
