"""`janus serve`: one process from launch to exit code. Listens first, loads beside it, drains on a signal.

The port answers /health from the start and /ready once every model is loaded, so that probes and impatient clients get
a clear word instead of a refused connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec
import uvloop

from janus_server import applications
from janus_server import keys as keyring
from janus_server.config import LogFormat, ServeConfig, run_folders
from janus_server.errors import BadConfig, BadModel
from janus_server.keys import KeyRing
from janus_server.localkey import offered
from janus_server.network import bind, check_exposure, connections_to_have, inherited, is_local, tls_context
from janus_server.node import Node
from janus_server.observe import log as logs
from janus_server.observe.trace import Tracer
from janus_server.peers import peering_of
from janus_server.terminal.progress import LoadProgress
from janus_server.units import format_bytes
from janus_server.version import server_version

if TYPE_CHECKING:
    import ssl

    from janus_server.cluster.meeting import Place
    from janus_server.http.listen import Listener
    from janus_server.transfer.rundir import Peering

log = logging.getLogger("janus.serve")

# What a node says when it has nothing left to do for its clients; who watches it waits for that.
PAUSED: Final = "no request is open here any more"
# How long requests that were told to end may take to write their last words.
_LAST_WORDS_S = 2.0
_SHUTTING_DOWN: Final = "the server is shutting down"
# So long nothing is asked on connections that are open before a node of a cluster closes them.
_QUIET_S: Final = 0.5


def run(config: ServeConfig, listen_fd: int | None = None) -> int:
    """Serve until a signal; 0 after a clean end, 2 when the model or a setting cannot be used.

    listen_fd is a socket that listens for this process already; without it, it binds its own.
    """
    lines = logs.start(sys.stderr, config.log_level.value, config.log_format is LogFormat.JSON)
    tracer = None
    try:
        if config.nodes > 1:
            from janus_server.cluster.watch import watch

            return watch(config, sys.argv[1:])
        if config.join is not None and config.node is None:
            config = msgspec.structs.replace(config, node=f"n{os.urandom(4).hex()}")
        tracer = None if config.otlp_endpoint is None else Tracer.open(config.otlp_endpoint, server_version())
        keys, tls = keyring.load(config.keys, config.api_key_file), tls_context(config)
        applications.check_keys(config.applications, keys.limits())
        connections = connections_to_have(config.max_connections)
        if connections < config.max_connections:
            log.warning("at most %d connections: the process may open no more files (ulimit -n)", connections)
        config = msgspec.structs.replace(config, max_connections=connections)
        with bind(config.host, config.port) if listen_fd is None else inherited(listen_fd) as listening:
            if (warning := check_exposure(config, keys, listening.getsockname()[0])) is not None:
                log.warning("%s", warning)
            with _local_admin(keys, listening) as all_keys:
                return uvloop.run(_serve(config, all_keys, listening, tls, tracer))
    except (BadConfig, BadModel) as error:
        print(f"janus: {error}", file=sys.stderr)
        return 2
    finally:
        if tracer is not None:
            tracer.close()
        lines.close()


@contextlib.contextmanager
def _local_admin(keys: KeyRing, listening: socket.socket) -> Iterator[KeyRing]:
    """With an admin key for the user of this process alone, where none is configured and nobody else gets here."""
    address, port = listening.getsockname()[:2]
    if keys.has_admin or not is_local(address):
        yield keys
        return
    with offered(run_folders(), address, port) as text:
        yield keys if text is None else keys.with_local(keyring.local_admin(text))


async def _serve(
    config: ServeConfig, keys: KeyRing, listening: socket.socket, tls: ssl.SSLContext | None, tracer: Tracer | None
) -> int:
    start_s = time.perf_counter()
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _on_signal, stop, hurry)
    peering = peering_of(config, run_folders())
    node = Node(config, peering, _place(config, peering))
    progress = LoadProgress(sys.stderr)
    opening = asyncio.create_task(node.open(progress.update))
    await asyncio.sleep(0)  # let it begin
    # Imported after loading began: the HTTP stack takes 0.25 s to import, which the loader's reads can hide.
    from janus_server.http.listen import Listener

    node.reached.url = _reached_at(config, listening)
    server = await Listener.open(config, keys, node, listening, tls, tracer)
    if config.api_key_file is not None:  # without one, a terminal that closes still ends the server
        loop.add_signal_handler(signal.SIGHUP, functools.partial(_reload_keys, config, keys, server))
    if config.join is not None:
        pausing: list[asyncio.Task[None]] = []
        loop.add_signal_handler(
            signal.SIGUSR1, lambda: pausing.append(asyncio.create_task(_pause(config, node, server)))
        )
    try:
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([opening, stopped], return_when=asyncio.FIRST_COMPLETED)
        progress.close()
        if opening.done():
            await opening
            _announce(config, node, _url(config, listening), time.perf_counter() - start_s, peering)
            # What start-up left behind lives as long as the process: keep the collector from walking it again.
            gc.collect()
            gc.freeze()
            await stopped
            await _drain(config, node, server, hurry)
        else:
            node.pause(_SHUTTING_DOWN)
    finally:
        await server.close()
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await node.close()
    return 130 if hurry.is_set() else 0


def _place(config: ServeConfig, peering: Peering | None) -> Place | None:
    """Where the node belongs to a cluster: its place there."""
    if config.join is None or config.node is None or peering is None:
        return None
    from janus_server.cluster.meeting import Place
    from janus_server.wire.tls import TlsFiles

    certificate, key, ca = config.peer_certfile, config.peer_keyfile, config.peer_cafile
    tls = None if certificate is None or key is None or ca is None else TlsFiles(certificate, key, ca)
    return Place(
        node=config.node, join=config.join, domain=config.domain or "", secret=config.cluster_secret,
        login=config.etcd_login,
        host=config.peer_host, tls=tls, process=peering.incarnation,
    )  # fmt: skip


def _url(config: ServeConfig, listening: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{host}:{listening.getsockname()[1]}"


def _reached_at(config: ServeConfig, listening: socket.socket) -> str:
    """For whoever reads it on another node: every address is none, so it is the one that peers reach."""
    everywhere = config.host in ("0.0.0.0", "::", "")
    return _url(msgspec.structs.replace(config, host=config.peer_host) if everywhere else config, listening)


def _on_signal(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    """The first asks for an orderly end, the second for the error events now, the third for no courtesy at all."""
    if hurry.is_set():
        raise SystemExit(130)
    if stop.is_set():
        hurry.set()
    stop.set()


def _reload_keys(config: ServeConfig, old: KeyRing, server: Listener) -> None:
    """SIGHUP: the key file as it is now. One that cannot be used changes nothing.

    A key that is gone from it is gone, also where an application was bound to it: nobody can ask for that one then.
    """
    try:
        keys = keyring.load(config.keys, config.api_key_file, old.local)
    except BadConfig as error:
        log.error("the keys stay as they were: %s", error)
        return
    server.rekey(keys)
    try:
        applications.check_keys(config.applications, keys.limits())
    except BadConfig as error:
        log.warning("%s", error)
    log.info("%d keys are in force", len(keys))


async def _pause(config: ServeConfig, node: Node, server: Listener) -> None:
    """The whole cluster ends: no client is let in, but whatever other nodes wait for is run until all are so far."""
    node.pause(_SHUTTING_DOWN)
    while server.active:
        await asyncio.sleep(0.02)
    if config.log_format is LogFormat.JSON:
        logs.decision(PAUSED, kind="paused", open_requests=0)
    else:
        print(f"janus: {PAUSED}", file=sys.stderr)


async def _drain(config: ServeConfig, node: Node, server: Listener, hurry: asyncio.Event) -> None:
    """Refuse new requests, let those in progress finish for a while, then end the rest with an error.

    In progress is what has reached the gate: a request whose body still arrives, or that is being encoded, is among
    them, although the node does not know it yet.
    """
    node.drain(_SHUTTING_DOWN)
    until_s = time.monotonic() + config.shutdown_timeout_s
    if server.active:
        requests = "1 request" if server.active == 1 else f"{server.active} requests"
        sentence = f"finishing {requests} (Ctrl-C again to end them now)"
        if config.log_format is LogFormat.JSON:
            logs.decision(sentence, kind="drain", open_requests=server.active)
        else:
            print(f"janus: {sentence}", file=sys.stderr)
    if node.relaying:
        await _hand_on(node, server, until_s, hurry)
    await _idle(lambda: server.active + node.guests, until_s - time.monotonic(), hurry)
    if server.active or node.guests:
        log.warning("ending %d requests before they are complete", server.active + node.guests)
        node.end_all()
        await _idle(lambda: server.active + node.guests, _LAST_WORDS_S)
        # Left are those that no model runs, and all of them if the device thread is stuck.
        server.end_all()
        await _idle(lambda: server.active, _LAST_WORDS_S)


async def _hand_on(node: Node, server: Listener, until_s: float, hurry: asyncio.Event) -> None:
    """As long as anything runs here, other nodes run what comes in. Then nobody is let in, and who was is answered.

    A client may have connected a moment ago and not have asked yet, or have been told before that it may ask again.
    """
    server.part()
    await _idle(lambda: node.busy, until_s - time.monotonic(), hurry)
    await server.accept_no_more()
    asked_s = time.monotonic()
    while server.connections and time.monotonic() < min(until_s, asked_s + _QUIET_S) and not hurry.is_set():
        await asyncio.sleep(0.02)
        if server.active:
            asked_s = time.monotonic()


async def _idle(active: Callable[[], int], limit_s: float, hurry: asyncio.Event | None = None) -> None:
    """Wait until no request is in progress, at most `limit_s`, and no longer once there is a hurry."""
    deadline = time.monotonic() + limit_s
    while active() and time.monotonic() < deadline and not (hurry is not None and hurry.is_set()):
        await asyncio.sleep(0.02)


def _announce(config: ServeConfig, node: Node, url: str, took_s: float, peering: Peering | None) -> None:
    lines = [f"Janus is ready on {url} after {took_s:.2f} s"]
    stages = node.stages()
    for card in node.cards.values():
        lines.append(
            f"  {card.id}: {card.family}, {card.parameters / 1e6:.0f} M parameters, {card.dtype}, "
            f"{format_bytes(card.weight_bytes)} of weights, context {card.context_tokens}, {stages[card.id].value}"
            + (f", served by {', '.join(away)}" if (away := node.served_by(card.id)) else "")
        )
    pool = format_bytes(config.memory_bytes)
    lines.append(f"  memory {pool}, of it {format_bytes(node.free_pages * config.page_bytes)} free for KV cache")
    if peering is not None:
        lines.append(f"  node {peering.node}: shares its weights with your other nodes in {peering.run_dir}")
    local = url == "http://127.0.0.1:8000"
    lines.append("  try: janus chat" + ("" if local else f" --url {url}"))
    if config.log_format is LogFormat.JSON:
        logs.decision(lines[0], kind="ready", url=url, seconds=round(took_s, 3), models=list(stages))
    else:
        print("\n".join(lines), file=sys.stderr)
