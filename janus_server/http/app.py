"""The HTTP surface: an aiohttp application that joins the handler groups to their paths. No policy of its own.

`build_app` makes it. It must be served by `edge.build_runner`, whose cancellation on disconnect is what ends a
request when its client has left, in the queue, in prefill and in decode. A handler raises `Refused`; how that looks to
the client is `edge`'s business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from janus_server.api.bodies import Limits
from janus_server.http.edge import Guard, stamp
from janus_server.http.generate import Generate
from janus_server.http.service import Service
from janus_server.http.status import Status
from janus_server.metrics import Metrics

if TYPE_CHECKING:
    from janus_server.node import Node


def build_app(node: Node, *, metrics: Metrics, limits: Limits) -> web.Application:
    """The application with all its routes; serve it with `edge.build_runner`."""
    service = Service(node, metrics, limits)
    app = web.Application(middlewares=[Guard(metrics).guard], client_max_size=limits.body_bytes)
    _add_status(app.router, Status(service))
    _add_generate(app.router, Generate(service))
    app.on_response_prepare.append(stamp)
    app.cleanup_ctx.append(service.threads)
    return app


def _add_status(router: web.UrlDispatcher, status: Status) -> None:
    router.add_get("/health", status.health)
    router.add_get("/ready", status.ready)
    router.add_get("/version", status.version)
    router.add_get("/metrics", status.metrics)
    router.add_get("/v1/models", status.list_models)
    router.add_get("/v1/models/{model:.+}", status.show_model)


def _add_generate(router: web.UrlDispatcher, generate: Generate) -> None:
    router.add_post("/v1/chat/completions", generate.chat)
    router.add_post("/v1/completions", generate.complete)
