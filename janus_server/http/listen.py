"""The listening socket under the HTTP application, and the metrics between node and application. `serve` opens it."""

from __future__ import annotations

import errno

from aiohttp import web

from janus_server.api.bodies import Limits
from janus_server.config import ServeConfig
from janus_server.errors import BadConfig
from janus_server.executor import StepReport
from janus_server.http.app import build_app
from janus_server.http.edge import build_runner
from janus_server.metrics import Metrics
from janus_server.node import Node


class Listener:
    """The application, served on `url` until `close`."""

    def __init__(self, runner: web.AppRunner, url: str) -> None:
        self.url = url
        self._runner = runner

    @staticmethod
    async def open(node: Node, config: ServeConfig) -> Listener:
        """Bind and serve; BadConfig when the address cannot be had."""
        metrics, limits = Metrics(), Limits()
        node.on_step(lambda report: _observe(metrics, report))
        runner = build_runner(build_app(node, metrics=metrics, limits=limits), limits)
        await runner.setup()
        try:
            await web.TCPSite(runner, config.host, config.port, backlog=1024).start()
        except OSError as error:
            await runner.cleanup()
            raise BadConfig(_cannot_listen(config, error)) from None
        port = runner.addresses[0][1]
        host = f"[{config.host}]" if ":" in config.host else config.host
        return Listener(runner, f"http://{host}:{port}")

    async def close(self) -> None:
        await self._runner.cleanup()


def _observe(metrics: Metrics, report: StepReport) -> None:
    if report.step is not None:
        metrics.model(report.model).step(report.step.total_s, report.step.device_s, report.step.tokens)


def _cannot_listen(config: ServeConfig, error: OSError) -> str:
    where = f"{config.host} port {config.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use by another process; choose another with --port (0 takes any free one)"
    return f"cannot listen on {where}: {error.strerror}"
