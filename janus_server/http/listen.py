"""The HTTP application on its listening socket, and the metrics between node and application. `serve` opens it."""

from __future__ import annotations

import socket

from aiohttp import web

from janus_server.api.bodies import Limits
from janus_server.executor import StepReport
from janus_server.http.app import build_app
from janus_server.http.edge import build_runner
from janus_server.metrics import Metrics
from janus_server.node import Node


class Listener:
    """The application, served until `close`."""

    def __init__(self, runner: web.AppRunner) -> None:
        self._runner = runner

    @staticmethod
    async def open(node: Node, listening: socket.socket) -> Listener:
        """Serve on a bound socket, which is closed with the listener."""
        metrics, limits = Metrics(), Limits()
        node.on_step(lambda report: _observe(metrics, report))
        runner = build_runner(build_app(node, metrics=metrics, limits=limits), limits)
        await runner.setup()
        await web.SockSite(runner, listening, backlog=1024).start()
        return Listener(runner)

    async def close(self) -> None:
        await self._runner.cleanup()


def _observe(metrics: Metrics, report: StepReport) -> None:
    if report.step is not None:
        metrics.model(report.model).step(report.step.total_s, report.step.device_s, report.step.tokens)
