"""The HTTP application on its listening socket: gate, admission and metrics put together. `serve` opens it."""

from __future__ import annotations

import functools
import socket
import time
from typing import TYPE_CHECKING

from aiohttp import web

from janus_server.admission import Admission, queue_bounds
from janus_server.api.bodies import Limits
from janus_server.applications import Applications
from janus_server.attainment import Course
from janus_server.config import ServeConfig
from janus_server.executor import StepReport
from janus_server.http.access import Access
from janus_server.http.app import build_app
from janus_server.http.edge import build_runner
from janus_server.http.gate import Gate, Places
from janus_server.keys import KeyRing
from janus_server.metrics import Metrics
from janus_server.network import is_local
from janus_server.node import Node
from janus_server.observe.trace import Tracer
from janus_server.telemetry import Telemetry
from janus_server.types import Request

if TYPE_CHECKING:
    import ssl


class Listener:
    """The application, served until `close`."""

    def __init__(self, runner: web.AppRunner, gate: Gate, admission: Admission) -> None:
        self._runner = runner
        self._gate = gate
        self._admission = admission

    @staticmethod
    async def open(
        config: ServeConfig, keys: KeyRing, node: Node, listening: socket.socket, tls: ssl.SSLContext | None,
        tracer: Tracer | None = None,
    ) -> Listener:  # fmt: skip
        """Serve on a bound socket, which is closed with the listener."""
        metrics, limits = Metrics(functools.partial(_tell, node.telemetry)), _limits(config)
        node.on_step(lambda report: _observe(metrics, report))
        admission = _admission(config, keys)
        gate = Gate(_places(config, listening), keys, metrics)
        applications = Applications(config.applications)
        node.reached.applications = lambda: metrics.views(applications.listed)
        app = build_app(node, metrics=metrics, limits=limits, admission=admission, applications=applications)
        app.on_response_prepare.append(gate.part)
        access = Access(gate, node, lines=config.access_log, prompts=config.log_prompts, tracer=tracer)
        runner = build_runner(app, limits, access)
        await runner.setup()
        await web.SockSite(runner, listening, backlog=1024, ssl_context=tls).start()
        return Listener(runner, gate, admission)

    @property
    def active(self) -> int:
        """Requests that are being read, encoded, queued, run or answered."""
        return self._gate.active

    @property
    def connections(self) -> int:
        """Those that are open, whether anything was asked on them or not."""
        return 0 if self._runner.server is None else len(self._runner.server.connections)

    def part(self) -> None:
        """Every answer is the last one on its connection from now on."""
        self._gate.parting = True

    async def accept_no_more(self) -> None:
        """Close the socket here. Where another process has it too, who connects waits for whoever accepts again."""
        for site in self._runner.sites:
            await site.stop()

    def rekey(self, keys: KeyRing) -> None:
        """Other keys from now on; requests in progress go on."""
        self._gate.keys = keys
        self._admission.rekey(keys.limits(), time.monotonic())

    def end_all(self) -> None:
        """Stop what is still in progress, each with an error that says so."""
        self._gate.end_all()

    async def close(self) -> None:
        await self._runner.cleanup()


def _limits(config: ServeConfig) -> Limits:
    return Limits(
        connections=config.max_connections,
        headers_s=config.header_timeout_s,
        idle_s=config.idle_timeout_s,
        request_s=config.request_timeout_s,
        share_prefixes=config.share_prefixes,
    )


def _admission(config: ServeConfig, keys: KeyRing) -> Admission:
    server, model = queue_bounds(
        config.max_queued_requests, config.max_queued_tokens,
        sequences=config.max_num_seqs, step_tokens=config.max_num_batched_tokens, models=len(config.models),
    )  # fmt: skip
    return Admission(server, model, keys.limits())


def _places(config: ServeConfig, listening: socket.socket) -> Places:
    return Places(
        local=is_local(listening.getsockname()[0]),
        bound=config.host,
        hosts=frozenset(config.allowed_hosts),
        origins=frozenset(config.allowed_origins),
    )


def _observe(metrics: Metrics, report: StepReport) -> None:
    if report.step is not None:
        metrics.model(report.model).step(report.step.total_s, report.step.device_s, report.step.tokens)


def _tell(telemetry: Telemetry, request: Request, course: Course, on_time: bool | None) -> None:
    """How a request went. One that took no time was turned away at the door: of its coming nobody has told."""
    if course.open_s == 0.0:
        telemetry.arrived(request)
    telemetry.ended(request, course.tokens, on_time)
